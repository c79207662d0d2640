# SPDX-License-Identifier: Apache-2.0
"""Checks every response against the state of the broker when its request arrived.

Theory of operation
-------------------
For each request of a connection, in this order:

1. `AnswerChecks.ask` decodes it, notes what its response has to agree with (`Asked`), and gives its bytes to the
   server's connection. The observer collects the records that the server writes meanwhile.
2. `AnswerChecks.ask_again` gives the same request directly to its handler, with services that ask the state machines
   and apply nothing (`_Alone`). If the request wrote records, the repetition must have none to write; this is checked
   for a share of the requests. If it wrote none and its API has a fast path, the handler's response is kept as the
   expected one.
3. `AnswerChecks.answer` gets the response, possibly much later. It compares order, owner of the shard, effect of a
   rejection, configs of the group, durability, and the expected bytes.

The broker cannot influence the expected response: it is computed by the handler, and compared with whatever a fast
path, a memo or the handler has sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

from kcoord.coordinator.group.shard import GroupCoordinatorShard
from kcoord.metadata.image import MetadataImage
from kcoord.runtime.result import CoordinatorRecord, CoordinatorResult, OperationContext
from kcoord.runtime.waiting import ShardState
from kcoord.server.api.api_table import KEY_AND_VERSION, RequestContext
from kcoord.server.net.connection import KafkaConnection
from kcoord.simulation.machine import Machine
from kcoord.simulation.observer import CommitKey
from kcoord.simulation.process import SimulatedProcess
from kcoord.simulation.quota_watch import AskedQuota, QuotaWatch
from kcoord.simulation.rights_watch import AskedRights, RightsWatch
from kcoord.simulation.trace import ViolationError
from kcoord_protocol.api_keys import ApiKey, request_class, response_class
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.framing import decode_request_header, decode_response_header
from kcoord_protocol.messages import (
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
    DeleteGroupsRequest,
    Message,
    OffsetFetchResponse,
)

if TYPE_CHECKING:
    from kcoord.server.broker import Broker

_REPEATED_SHARE: Final = 0.1
_UNAVAILABLE: Final = frozenset(
    (
        Errors.NOT_COORDINATOR,
        Errors.COORDINATOR_LOAD_IN_PROGRESS,
        Errors.COORDINATOR_NOT_AVAILABLE,
        Errors.UNSUPPORTED_VERSION,
    )
)
_REFUSALS: Final = frozenset(
    (
        Errors.STALE_MEMBER_EPOCH,
        Errors.ILLEGAL_GENERATION,
        Errors.UNKNOWN_MEMBER_ID,
        Errors.FENCED_INSTANCE_ID,
        Errors.FENCED_MEMBER_EPOCH,
        Errors.GROUP_ID_NOT_FOUND,
        Errors.INVALID_REQUEST,
    )
)
_OF_A_GROUP: Final = frozenset(
    (
        ApiKey.CONSUMER_GROUP_HEARTBEAT,
        ApiKey.JOIN_GROUP,
        ApiKey.SYNC_GROUP,
        ApiKey.HEARTBEAT,
        ApiKey.LEAVE_GROUP,
        ApiKey.OFFSET_COMMIT,
        ApiKey.OFFSET_DELETE,
    )
)

Operation: TypeAlias = Callable[[GroupCoordinatorShard, OperationContext, Any], CoordinatorResult[Any]]

_HEARTBEAT: Final = ApiKey.CONSUMER_GROUP_HEARTBEAT
_REPEATABLE: Final = frozenset({_HEARTBEAT, ApiKey.OFFSET_COMMIT, ApiKey.OFFSET_DELETE, ApiKey.DELETE_GROUPS})
"""APIs that change state only by their records, so that they can be repeated without effect."""
_FROM_MEMORY: Final = frozenset({_HEARTBEAT, ApiKey.HEARTBEAT, ApiKey.OFFSET_FETCH, ApiKey.METADATA})
"""APIs that a fast path may answer."""


@dataclass(slots=True)
class Asked:
    """A request that the connection has taken and not answered yet."""

    correlation_id: int
    api_key: ApiKey
    version: int
    message: Message
    state: ShardState | None
    """The state of the group's shard, None for a request without a group."""
    has_written: bool = False
    interval_ms: int = 0
    expected: bytes | None = None
    """The response of the handler; None if it was not computed."""
    image: MetadataImage | None = None
    """The metadata that `expected` was computed from."""
    would_write: Sequence[CoordinatorRecord] = ()
    rights: AskedRights | None = None
    quota: AskedQuota | None = None

    @property
    def is_heartbeat_in_load(self) -> bool:
        """Whether it is a heartbeat of a classic member, whose shard was being loaded."""
        return self.api_key is ApiKey.HEARTBEAT and self.state in (ShardState.INITIAL, ShardState.LOADING)


class Dialogue:
    """One connection, and its requests that are not answered yet."""

    def __init__(self, process: SimulatedProcess, protocol: KafkaConnection, client_id: str) -> None:
        self.process = process
        self.protocol = protocol
        self.client_id = client_id
        self.asked: deque[Asked] = deque()


class AnswerChecks:
    """The checks of requests and responses of one run.

    `ask` gives a request to its connection, `ask_again` repeats it without effect, `answer` takes the broker's bytes.
    """

    def __init__(self, broker: Machine) -> None:
        self.rights: RightsWatch | None = None
        """None if the run has no ACLs."""
        self.quotas: QuotaWatch | None = None
        """None if the run has no quotas."""
        self._broker = broker
        self._made = 0
        self._repeats = Random(0)

    def ask(self, dialogue: Dialogue, data: bytes) -> Asked:
        frame = data[4:]
        header, body_at = decode_request_header(frame)
        api_key, version = ApiKey(header.request_api_key), header.request_api_version
        message = request_class(api_key).decode(frame[body_at:], version)
        process, observer = dialogue.process, self._broker.observer
        asked = Asked(header.correlation_id, api_key, version, message, self._state(process, message))
        dialogue.asked.append(asked)
        if isinstance(message, ConsumerGroupHeartbeatRequest):
            asked.interval_ms = self._interval_ms(process, message.group_id)
        if self.rights is not None:
            asked.rights = self.rights.ask(dialogue.client_id, api_key, message)
        if self.quotas is not None:
            asked.quota = self.quotas.ask(dialogue, process, dialogue.client_id, message, version)
        observer.begin(message)
        dialogue.protocol.data_received(data)
        asked.has_written = bool(observer.written)
        if self.rights is not None and asked.rights is not None:
            self.rights.wrote(asked.rights, observer.written)
        observer.end()
        return asked

    def _state(self, process: SimulatedProcess, message: Message) -> ShardState | None:
        group_id = _group_id(message)
        return process.state_of(group_id) if group_id is not None else None

    def _interval_ms(self, process: SimulatedProcess, group_id: str) -> int:
        own = process.broker.image.group_configs(group_id).get("consumer.heartbeat.interval.ms")
        return self._broker.options.heartbeat_interval_ms if own is None else int(own)

    # Repeated requests.

    def ask_again(self, dialogue: Dialogue, asked: Asked) -> None:
        """I-9: a repeated request writes nothing more, and its response is the same if the first one wrote nothing."""
        # If the coordinator chooses the member id (version 0), a repeated join is another member.
        if asked.api_key is _HEARTBEAT and not getattr(asked.message, "member_id", ""):
            return
        if asked.has_written:
            if asked.api_key in _REPEATABLE and self._repeats.random() < _REPEATED_SHARE:
                self._broker.observer.check_repeated(asked.api_key, self._handled_alone(dialogue, asked)[1])
        elif asked.api_key in _FROM_MEMORY and not asked.is_heartbeat_in_load:
            asked.expected, asked.would_write = self._handled_alone(dialogue, asked)
            asked.image = dialogue.process.broker.image

    def _handled_alone(self, dialogue: Dialogue, asked: Asked) -> tuple[bytes, list[CoordinatorRecord]]:
        """Returns the response of the handler, and the records that it would write. Applies nothing."""
        path = dialogue.protocol.path
        bound = path.apis.bound(KEY_AND_VERSION.pack(asked.api_key, asked.version))
        assert bound is not None
        authorizer = dialogue.process.broker.authorizer
        context = RequestContext(
            asked.api_key,
            asked.version,
            asked.correlation_id,
            dialogue.client_id,
            path.client,
            dialogue.process.broker.now_ms(),
            rights=None if authorizer is None else path.client.rights(authorizer, asked.api_key),
        )
        alone = _Alone(dialogue.process)
        response = bound.respond(cast("Broker", alone), context, asked.message)
        return bound.encode(asked.correlation_id, response, asked.message), alone.groups.records

    # Responses.

    def answer(self, dialogue: Dialogue, data: bytes) -> None:
        """Checks the responses in the bytes that the broker writes. Raises ViolationError."""
        position = 0
        while position < len(data):
            end = position + 4 + int.from_bytes(data[position : position + 4], "big")
            self._check(dialogue, data[position + 4 : end])
            position = end

    def _check(self, dialogue: Dialogue, frame: bytes) -> None:
        correlation_id = int.from_bytes(frame[:4], "big")
        if not dialogue.asked or dialogue.asked[0].correlation_id != correlation_id:
            asked_ids = [asked.correlation_id for asked in dialogue.asked]
            text = f"{dialogue.client_id} got a response to request {correlation_id}; unanswered are {asked_ids}"
            raise ViolationError("I-27 answers come in order", text)
        asked = dialogue.asked.popleft()
        _, body_at = decode_response_header(frame, asked.api_key, asked.version)
        response = response_class(asked.api_key).decode(frame[body_at:], asked.version)
        error = _error_of(response)
        self._check_owner(asked, error)
        if error in _REFUSALS and asked.has_written and asked.api_key in _REPEATABLE:
            text = f"{asked.api_key.name} was rejected with error {error} and wrote records"
            raise ViolationError("I-13 a refused request leaves no trace", text)
        if self.rights is not None and asked.rights is not None:
            self.rights.answered(asked.rights, response)
        if self.quotas is not None and asked.quota is not None:
            self.quotas.answered(asked.quota, response)
        self._check_interval(asked, response)
        if isinstance(response, OffsetFetchResponse):
            self._check_durable(dialogue.process, response)
        # A parked OffsetFetch response resolves topic names and ids when it is sent, not when the request arrived.
        is_of_other_topics = asked.api_key is ApiKey.OFFSET_FETCH and asked.image is not dialogue.process.broker.image
        if asked.expected is not None and error not in _UNAVAILABLE and not is_of_other_topics:
            self._check_expected(dialogue, asked, frame, response)

    def _check_owner(self, asked: Asked, error: int) -> None:
        """I-19: a broker that has not loaded a shard does not answer for its groups.

        While it loads the shard, it answers heartbeats of classic members without an error, as Kafka does.
        """
        is_answer = asked.api_key in _OF_A_GROUP and error == Errors.NONE
        if is_answer and asked.state is not ShardState.ACTIVE and not asked.is_heartbeat_in_load:
            raise ViolationError("I-19 no answer without the shard", f"{asked.message}")

    def _check_interval(self, asked: Asked, response: Message) -> None:
        """I-25: the heartbeat interval in the response is that of the group's configs."""
        if not isinstance(response, ConsumerGroupHeartbeatResponse) or response.error_code or response.member_epoch < 0:
            return
        if response.heartbeat_interval_ms != asked.interval_ms:
            text = f"the response has heartbeat interval {response.heartbeat_interval_ms}, not {asked.interval_ms} ms"
            raise ViolationError("I-25 group configs take effect", text)

    def _check_durable(self, process: SimulatedProcess, response: OffsetFetchResponse) -> None:
        for group in response.groups:
            machine = process.machine_of(group.group_id)
            if machine is None:
                continue
            for topic in group.topics:
                topic_by_id = process.broker.image.topics_by_id.get(topic.topic_id)
                name = topic.name or (topic_by_id.name if topic_by_id is not None else "")
                for partition in topic.partitions:
                    key = CommitKey(group.group_id, name, partition.partition_index)
                    self._broker.observer.check_durable(machine, key, partition.committed_offset)

    def _check_expected(self, dialogue: Dialogue, asked: Asked, frame: bytes, response: Message) -> None:
        """I-9: the response has the bytes that the handler computed, whatever path answered the request."""
        assert asked.expected is not None
        if asked.would_write:
            text = f"{asked.message} wrote nothing; a repeated request would write {asked.would_write}"
            raise ViolationError("I-9 a repeated request makes no difference", text)
        if frame != asked.expected[4:]:
            body_at = decode_response_header(asked.expected[4:], asked.api_key, asked.version)[1]
            expected = response_class(asked.api_key).decode(asked.expected[4 + body_at :], asked.version)
            text = f"{dialogue.client_id} got {response}, the handler computes {expected}"
            raise ViolationError("I-9 a repeated answer is still true", text)


class _Alone:
    """The broker, with a group service that applies nothing."""

    def __init__(self, process: SimulatedProcess) -> None:
        self._broker = process.broker
        self.groups = _GroupsAlone(process)

    def __getattr__(self, name: str) -> object:
        return getattr(self._broker, name)


class _GroupsAlone:
    """The group service, except that `call` runs an operation directly on the state machine and drops its records."""

    def __init__(self, process: SimulatedProcess) -> None:
        self.records: list[CoordinatorRecord] = []
        self._process = process

    def __getattr__(self, name: str) -> object:
        return getattr(self._process.broker.groups, name)

    def call(self, group_id: str, operation: Operation, request: object, context: OperationContext) -> object:
        return self.call_shard(self._process.broker.groups.shard_of(group_id), operation, request, context)

    def call_shard(self, shard_id: int, operation: Operation, request: object, context: OperationContext) -> object:
        machine = self._process.broker.groups.shards.machine(shard_id)
        if machine is None:
            raise KafkaError(Errors.NOT_COORDINATOR)
        context.creation_limit_ms = self._process.group_times.limits.limit_ms
        result = operation(machine, context, request)
        self.records += result.records
        return result.response


def _group_id(message: Message) -> str | None:
    """Returns the group that a request is about, the first one if there are several."""
    return message.groups_names[0] if isinstance(message, DeleteGroupsRequest) else getattr(message, "group_id", None)


def _error_of(response: Message) -> int:
    """Returns the first error code in a response; 0 if there is none."""
    error = getattr(response, "error_code", 0)
    parts = getattr(response, "groups", ()) or getattr(response, "results", ()) or getattr(response, "topics", ())
    for part in parts:
        error = error or getattr(part, "error_code", 0)
        for partition in getattr(part, "partitions", ()):
            error = error or getattr(partition, "error_code", 0)
    return int(error)
