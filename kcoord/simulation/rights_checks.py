# SPDX-License-Identifier: Apache-2.0
"""Checks what responses and records show of the rights of clients, against the oracle of `acl_oracle` (S-1 to S-5).

`ANSWERS` has a function for each API. It compares a response with what the client may do by one state of the ACLs, and
returns the first contradiction: the invariant and a text. A response is wrong if it contradicts every state that was
possible between the arrival of its request and its departure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from kcoord.simulation.acl_oracle import ClientRights
from kcoord_protocol.acls import CLUSTER_NAME, AclOperation, ResourceType
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors

COMMITS: Final = "S-1 nobody without Read commits"
HIDDEN: Final = "S-2 nobody without Describe learns that a topic exists"
DENIED: Final = "S-3 a denied request changes nothing"
ALLOWED: Final = "S-4 only requests without the right are denied"
OPERATIONS: Final = "S-5 authorized operations follow the ACLs"

Problem: TypeAlias = "tuple[str, str] | None"

_TOPIC: Final = int(Errors.TOPIC_AUTHORIZATION_FAILED)
_GROUP: Final = int(Errors.GROUP_AUTHORIZATION_FAILED)
_CLUSTER: Final = int(Errors.CLUSTER_AUTHORIZATION_FAILED)
_TRANSACTION: Final = int(Errors.TRANSACTIONAL_ID_AUTHORIZATION_FAILED)
FAILED: Final = frozenset({_TOPIC, _GROUP, _CLUSTER, _TRANSACTION})
_GONE: Final = int(Errors.UNKNOWN_TOPIC_ID)
_NOT_ASKED: Final = -(2**31)


@dataclass(slots=True)
class Exchanged:
    """A request and its response, whose fields differ from API to API. `names` has all topics of the run, by id."""

    client: ClientRights
    request: Any
    response: Any
    names: Mapping[bytes, str]

    def name_of(self, topic: Any) -> str:
        name = getattr(topic, "name", None) or getattr(topic, "topic", None)
        return name or self.names.get(topic.topic_id, "")


def _agree(is_allowed: bool, error: int, codes: Iterable[int], what: str, broken: str = DENIED) -> Problem:
    """Compares error codes with a right: all are `error` without the right, none is with it."""
    for code in codes:
        if is_allowed and code == error:
            return ALLOWED, f"{what} is allowed, and was denied"
        if not is_allowed and code != error:
            return broken, f"{what} is denied, and got {Errors(code).name}"
    return None


def _first(problems: Iterable[Problem]) -> Problem:
    return next((problem for problem in problems if problem is not None), None)


def _bits(answer: Exchanged, bits: int, resource_type: ResourceType, name: str) -> Problem:
    expected = answer.client.operations(resource_type, name)
    if bits in (_NOT_ASKED, expected):
        return None
    return OPERATIONS, f"the operations on {resource_type.name} {name} are {bits:b}, not {expected:b}"


def _codes(topic: Any) -> list[int]:
    return [partition.error_code for partition in topic.partitions]


def _topics(answer: Exchanged, operation: AclOperation, broken: str) -> Problem:
    """Compares the errors of partitions in a response with the right to their topics."""
    return _first(
        _agree(
            answer.client.may_topic(operation, name),
            _TOPIC,
            # An id that the broker does not know (any more) has no name to be denied.
            [code for code in _codes(topic) if code != _GONE],
            f"{operation.name} of topic {name}",
            broken,
        )
        for topic in answer.response.topics
        if (name := answer.name_of(topic))
    )


def _group(answer: Exchanged, operation: AclOperation, codes: Iterable[int], broken: str = DENIED) -> Problem:
    group_id = answer.request.group_id
    what = f"{operation.name} of group {group_id}"
    return _agree(answer.client.may_group(operation, group_id), _GROUP, codes, what, broken)


def _transaction(answer: Exchanged, codes: Iterable[int]) -> Problem:
    name = answer.request.transactional_id
    is_allowed = answer.client.may(AclOperation.WRITE, ResourceType.TRANSACTIONAL_ID, name)
    return _agree(is_allowed, _TRANSACTION, codes, f"WRITE of transactional id {name}")


def _one_group(answer: Exchanged) -> Problem:
    return _group(answer, AclOperation.READ, [answer.response.error_code])


def _offset_commit(answer: Exchanged) -> Problem:
    codes = [code for topic in answer.response.topics for code in _codes(topic)]
    if not answer.client.may_group(AclOperation.READ, answer.request.group_id):
        return _group(answer, AclOperation.READ, codes, COMMITS)
    return _group(answer, AclOperation.READ, codes) or _topics(answer, AclOperation.READ, COMMITS)


def _txn_offset_commit(answer: Exchanged) -> Problem:
    codes = [code for topic in answer.response.topics for code in _codes(topic)]
    name = answer.request.transactional_id
    if not answer.client.may(AclOperation.WRITE, ResourceType.TRANSACTIONAL_ID, name):
        return _transaction(answer, codes)
    return _transaction(answer, codes) or _offset_commit(answer)


def _offset_fetch(answer: Exchanged) -> Problem:
    asked = {group.group_id: group for group in answer.request.groups}
    for group in answer.response.groups:
        is_allowed = answer.client.may_group(AclOperation.DESCRIBE, group.group_id)
        problem = _agree(is_allowed, _GROUP, [group.error_code], f"DESCRIBE of group {group.group_id}", HIDDEN)
        if problem or not is_allowed or group.error_code:
            return problem
        named = Exchanged(answer.client, answer.request, group, answer.names)
        if asked[group.group_id].topics is not None:
            problem = _topics(named, AclOperation.DESCRIBE, HIDDEN)
        else:
            problem = _shown(answer.client, {answer.name_of(topic) for topic in group.topics})
        if problem:
            return problem
    return None


def _shown(client: ClientRights, names: Iterable[str]) -> Problem:
    hidden = sorted(name for name in names if not client.may_topic(AclOperation.DESCRIBE, name))
    return (HIDDEN, f"topics {hidden} are shown") if hidden else None


def _described_topics(answer: Exchanged) -> Problem:
    """Metadata and DescribeTopicPartitions: named topics fail, others are left out."""
    for topic in answer.response.topics:
        name = answer.name_of(topic)
        if not name:
            continue
        is_allowed = answer.client.may_topic(AclOperation.DESCRIBE, name)
        codes = [] if topic.error_code == _GONE else [topic.error_code]
        problem = _agree(is_allowed, _TOPIC, codes, f"DESCRIBE of topic {name}", HIDDEN)
        if problem is None and not is_allowed and topic.partitions:
            problem = HIDDEN, f"{topic} is shown"
        if problem is None and is_allowed and topic.name:
            problem = _bits(answer, topic.topic_authorized_operations, ResourceType.TOPIC, name)
        if problem:
            return problem
    return None


def _metadata(answer: Exchanged) -> Problem:
    return _described_topics(answer) or _cluster_bits(answer)


def _cluster_bits(answer: Exchanged) -> Problem:
    bits = answer.response.cluster_authorized_operations
    if not answer.client.may_cluster(AclOperation.DESCRIBE):
        return (
            (OPERATIONS, f"the operations on the cluster are {bits:b}, not 0") if bits not in (0, _NOT_ASKED) else None
        )
    return _bits(answer, bits, ResourceType.CLUSTER, CLUSTER_NAME)


def _list_offsets(answer: Exchanged) -> Problem:
    return _topics(answer, AclOperation.DESCRIBE, HIDDEN)


def _find_coordinator(answer: Exchanged) -> Problem:
    kind = ResourceType.TRANSACTIONAL_ID if answer.request.key_type else ResourceType.GROUP
    error = _TRANSACTION if answer.request.key_type else _GROUP
    return _first(
        _agree(
            answer.client.may(AclOperation.DESCRIBE, kind, coordinator.key),
            error,
            [coordinator.error_code],
            f"DESCRIBE of {kind.name} {coordinator.key}",
        )
        for coordinator in answer.response.coordinators
    )


def _consumer_group_heartbeat(answer: Exchanged) -> Problem:
    code = answer.response.error_code
    if not answer.client.may_group(AclOperation.READ, answer.request.group_id) or code == _GROUP:
        return _one_group(answer)
    names = answer.request.subscribed_topic_names or ()
    is_allowed = all(answer.client.may_topic(AclOperation.DESCRIBE, name) for name in names)
    return _agree(is_allowed, _TOPIC, [code], f"DESCRIBE of topics {names}", HIDDEN)


def _offset_delete(answer: Exchanged) -> Problem:
    problem = _group(answer, AclOperation.DELETE, [answer.response.error_code])
    return problem or _topics(answer, AclOperation.READ, DENIED)


def _each_group(operation: AclOperation, groups: str) -> Callable[[Exchanged], Problem]:
    """Returns the check of a response with an error for each of its `groups`."""

    def check(answer: Exchanged) -> Problem:
        return _first(
            _agree(
                answer.client.may_group(operation, group.group_id),
                _GROUP,
                [group.error_code],
                f"{operation.name} of group {group.group_id}",
            )
            for group in getattr(answer.response, groups)
        )

    return check


def _describe_groups(answer: Exchanged) -> Problem:
    problem = _each_group(AclOperation.DESCRIBE, "groups")(answer)
    return problem or _first(
        _bits(answer, group.authorized_operations, ResourceType.GROUP, group.group_id)
        for group in answer.response.groups
        if not group.error_code
    )


def _consumer_group_describe(answer: Exchanged) -> Problem:
    shown = [
        topic.topic_name
        for group in answer.response.groups
        for member in group.members
        for assignment in (member.assignment, member.target_assignment)
        for topic in assignment.topic_partitions
    ]
    return _describe_groups(answer) or _shown(answer.client, shown)


def _list_groups(answer: Exchanged) -> Problem:
    if answer.client.may_cluster(AclOperation.DESCRIBE):
        return None
    listed = [group.group_id for group in answer.response.groups]
    hidden = [name for name in listed if not answer.client.may_group(AclOperation.DESCRIBE, name)]
    return (HIDDEN, f"groups {hidden} are listed") if hidden else None


def _init_producer_id(answer: Exchanged) -> Problem:
    code = answer.response.error_code
    if answer.request.transactional_id is not None:
        return _transaction(answer, [code])
    is_allowed = answer.client.may_cluster(AclOperation.IDEMPOTENT_WRITE) or answer.client.may_any(
        AclOperation.WRITE, ResourceType.TOPIC
    )
    return _agree(is_allowed, _CLUSTER, [code], "IDEMPOTENT_WRITE")


def _add_offsets_to_txn(answer: Exchanged) -> Problem:
    code = answer.response.error_code
    name = answer.request.transactional_id
    if not answer.client.may(AclOperation.WRITE, ResourceType.TRANSACTIONAL_ID, name) or code == _TRANSACTION:
        return _transaction(answer, [code])
    return _one_group(answer)


def _end_txn(answer: Exchanged) -> Problem:
    return _transaction(answer, [answer.response.error_code])


def _describe_transactions(answer: Exchanged) -> Problem:
    states = answer.response.transaction_states
    problem = _first(
        _agree(
            answer.client.may(AclOperation.DESCRIBE, ResourceType.TRANSACTIONAL_ID, state.transactional_id),
            _TRANSACTION,
            [state.error_code],
            f"DESCRIBE of transactional id {state.transactional_id}",
        )
        for state in states
    )
    return problem or _shown(answer.client, [topic.topic for state in states for topic in state.topics])


def _produce(answer: Exchanged) -> Problem:
    return _first(
        _agree(
            answer.client.may_topic(AclOperation.WRITE, name),
            _TOPIC,
            [partition.error_code for partition in topic.partition_responses if partition.error_code != _GONE],
            f"WRITE of topic {name}",
        )
        for topic in answer.response.responses
        if (name := answer.name_of(topic))
    )


def _fetch(answer: Exchanged) -> Problem:
    for topic in answer.response.responses:
        name = answer.name_of(topic)
        if not name:
            continue
        codes = [partition.error_code for partition in topic.partitions if partition.error_code != _GONE]
        problem = _agree(
            answer.client.may_topic(AclOperation.READ, name), _TOPIC, codes, f"READ of topic {name}", HIDDEN
        )
        if problem:
            return problem
    return None


def _cluster(operation: AclOperation) -> Callable[[Exchanged], Problem]:
    """Returns the check of an API that needs a right to the cluster."""

    def check(answer: Exchanged) -> Problem:
        is_allowed = answer.client.may_cluster(operation)
        return _agree(is_allowed, _CLUSTER, errors_in(answer.response), f"{operation.name} of the cluster")

    return check


ANSWERS: Final[Mapping[ApiKey, Callable[[Exchanged], Problem]]] = {
    ApiKey.OFFSET_COMMIT: _offset_commit,
    ApiKey.TXN_OFFSET_COMMIT: _txn_offset_commit,
    ApiKey.OFFSET_FETCH: _offset_fetch,
    ApiKey.OFFSET_DELETE: _offset_delete,
    ApiKey.METADATA: _metadata,
    ApiKey.DESCRIBE_TOPIC_PARTITIONS: _described_topics,
    ApiKey.LIST_OFFSETS: _list_offsets,
    ApiKey.FIND_COORDINATOR: _find_coordinator,
    ApiKey.DESCRIBE_CLUSTER: _cluster_bits,
    ApiKey.CONSUMER_GROUP_HEARTBEAT: _consumer_group_heartbeat,
    ApiKey.JOIN_GROUP: _one_group,
    ApiKey.SYNC_GROUP: _one_group,
    ApiKey.HEARTBEAT: _one_group,
    ApiKey.LEAVE_GROUP: _one_group,
    ApiKey.DELETE_GROUPS: _each_group(AclOperation.DELETE, "results"),
    ApiKey.DESCRIBE_GROUPS: _describe_groups,
    ApiKey.CONSUMER_GROUP_DESCRIBE: _consumer_group_describe,
    ApiKey.LIST_GROUPS: _list_groups,
    ApiKey.INIT_PRODUCER_ID: _init_producer_id,
    ApiKey.ADD_OFFSETS_TO_TXN: _add_offsets_to_txn,
    ApiKey.END_TXN: _end_txn,
    ApiKey.DESCRIBE_TRANSACTIONS: _describe_transactions,
    ApiKey.PRODUCE: _produce,
    ApiKey.FETCH: _fetch,
    ApiKey.DESCRIBE_ACLS: _cluster(AclOperation.DESCRIBE),
    ApiKey.CREATE_ACLS: _cluster(AclOperation.ALTER),
    ApiKey.DELETE_ACLS: _cluster(AclOperation.ALTER),
    ApiKey.ALTER_CLIENT_QUOTAS: _cluster(AclOperation.ALTER_CONFIGS),
}
"""The check of each API. An API that is not here is not sent by guests."""


def errors_in(message: object) -> set[int]:
    """Returns all error codes of a response, of its parts and of their parts."""
    codes: set[int] = set()
    for name in getattr(message, "__slots__", ()):
        value = getattr(message, name)
        if name == "error_code":
            codes.add(value)
        elif isinstance(value, list):
            for part in value:
                codes |= errors_in(part)
    return codes
