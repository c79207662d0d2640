# SPDX-License-Identifier: Apache-2.0
"""The scenario `corners`: fixed dialogues that random clients hardly ever have, each to one error branch or transition.

A script is a generator. It yields a request or a time to wait in milliseconds, and receives the response's bytes (empty
after a wait). The scenario has no faults, so a script knows every response in advance and checks it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Final, TypeAlias

from kcoord.simulation.client import Scene, SimulatedClient
from kcoord.simulation.options import MOST_ASSIGNOR_BYTES, MOST_GROUP_ASSIGNOR_BYTES
from kcoord.simulation.topics import FIRST_TOPIC
from kcoord.simulation.trace import ViolationError
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors
from kcoord_protocol.messages import (
    AddOffsetsToTxnRequest,
    AddOffsetsToTxnResponse,
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
    ConsumerGroupPrepareAssignmentRequest,
    ConsumerGroupPrepareAssignmentResponse,
    ConsumerProtocolAssignment,
    ConsumerProtocolSubscription,
    EndTxnRequest,
    EndTxnResponse,
    InitProducerIdRequest,
    InitProducerIdResponse,
    JoinGroupRequest,
    JoinGroupResponse,
    Message,
    OffsetCommitRequest,
    OffsetCommitResponse,
    SyncGroupRequest,
    SyncGroupResponse,
    TxnOffsetCommitRequest,
    TxnOffsetCommitResponse,
)

Step: TypeAlias = "int | tuple[ApiKey, int, str, Message]"
Script: TypeAlias = Generator[Step, bytes, None]
_HEARTBEAT: Final = 1
_JOIN: Final = 3
_STATIC_JOIN: Final = 5
"""The first version with instance ids (KIP-345)."""
_SYNC: Final = 5
_COMMIT_BY_ID: Final = 10
_COMMIT: Final = 8
_INIT: Final = 4
_ADD: Final = 3
_TXN_COMMIT: Final = 3
_AGREED_TXN_COMMIT: Final = 5
"""The first version that the transaction coordinator always verifies, whatever is configured (KIP-890)."""
_END: Final = 3
_OLD_INIT: Final = 3
_OLD_ADD: Final = 1
_OLD_END: Final = 1
_BUMPING_END: Final = 5
"""The first version of EndTxn that bumps the producer epoch (KIP-890)."""
_FIRST_MS: Final = 1_000
_LATER_MS: Final = 3_000
_NEVER: Final = 600_000
_SESSION_MS: Final = 10_000
_LIMIT_OF_GROUPS: Final = 100
_TOO_LARGE: Final = 2 << 20


class Actor(SimulatedClient):
    """Plays one script once."""

    def __init__(
        self,
        script: Script,
        name: str,
        scene: Scene,
    ) -> None:
        super().__init__(name, scene)
        self._script = script
        self._trace = scene.trace
        self._has_ended = False

    def start(self) -> None:
        self.clock.after(_FIRST_MS, lambda: self._take(next(self._script)))

    def settle(self) -> None:
        """Does nothing: the script continues to its end."""

    def is_settled(self) -> bool:
        return self._has_ended

    def on_timeout(self) -> None:
        raise ViolationError("I-28 every request is answered", self.name)

    def _go_on(self, body: bytes) -> None:
        try:
            step = self._script.send(body)
        except StopIteration:
            self._trace.add("corner", self.name)
            self._has_ended = True
        else:
            self._take(step)

    def _take(self, step: Step) -> None:
        if isinstance(step, int):
            self.clock.after(step, lambda: self._go_on(b""))
        else:
            self.request(*step, self._go_on, timeout_ms=_NEVER)


def actors(
    scene: Scene,
    shard_of: Callable[[str], int],
) -> Iterator[Actor]:
    """Returns an actor per script. `shard_of` returns the shard of a group; one script fills up a shard."""
    producer: list[int] = []
    scripts = {
        "custom-assignor": _custom_assignor(),
        "large-assignment": _large_assignment(),
        "large-static-member": _large_static_member(),
        "commit-before-sync": _commit_before_sync(),
        "strange-protocol": _strange_protocol(),
        "unknown-topic": _unknown_topic(),
        "client-assignors": _client_assignors(),
        "leader": _leader(),
        "follower": _follower(),
        "newcomer": _newcomer(),
        "commits-twice": _begins_again_after_a_commit(),
        "commits-with-an-old-epoch": _commits_with_an_old_epoch(),
        "fenced-in-old-versions": _fenced_in_old_versions(),
        "commits-late": _commits_late(producer),
        "ends-early": _ends_early(producer),
        "many-groups": _many_groups(shard_of),
    }
    for name, script in scripts.items():
        yield Actor(script, f"corner-{name}", scene)


def _expect(error: int, expected: Errors, request: str) -> None:
    """Raises ViolationError if a response has another error than expected."""
    if error != expected:
        raise ViolationError("I-0 no unexpected error", f"{request}: {Errors(error).name}, not {expected.name}")


# Groups.


def _join(group_id: str, instance_id: str | None = None, user_data: bytes | None = None) -> Step:
    subscription = ConsumerProtocolSubscription(topics=[FIRST_TOPIC], user_data=user_data)
    metadata = b"\x00\x01" + subscription.encode(1)
    request = JoinGroupRequest(
        group_id=group_id,
        group_instance_id=instance_id,
        session_timeout_ms=_SESSION_MS,
        rebalance_timeout_ms=_SESSION_MS,
        protocol_type="consumer",
        protocols=[JoinGroupRequest.JoinGroupRequestProtocol(name="range", metadata=metadata)],
    )
    return ApiKey.JOIN_GROUP, _JOIN if instance_id is None else _STATIC_JOIN, group_id, request


def _joined(group_id: str, instance_id: str | None = None) -> Generator[Step, bytes, JoinGroupResponse]:
    version = _JOIN if instance_id is None else _STATIC_JOIN
    joined = JoinGroupResponse.decode((yield _join(group_id, instance_id)), version)
    _expect(joined.error_code, Errors.NONE, "JoinGroup")
    return joined


def _synced(
    group_id: str, joined: JoinGroupResponse, user_data: bytes | None, protocol: str = "range"
) -> Generator[Step, bytes, int]:
    """Sends SyncGroup and returns its error. A leader assigns no partitions, only the user data."""
    data = b"\x00\x01" + ConsumerProtocolAssignment(user_data=user_data).encode(1)
    given = [SyncGroupRequest.SyncGroupRequestAssignment(member_id=joined.member_id, assignment=data)]
    request = SyncGroupRequest(
        group_id=group_id,
        generation_id=joined.generation_id,
        member_id=joined.member_id,
        protocol_type="consumer",
        protocol_name=protocol,
        assignments=given if joined.leader == joined.member_id else [],
    )
    return SyncGroupResponse.decode((yield ApiKey.SYNC_GROUP, _SYNC, group_id, request), _SYNC).error_code


def _converted(group_id: str, assignor: str = "") -> Generator[Step, bytes, int]:
    """Joins a group of classic members with the consumer protocol, and returns the error."""
    request = ConsumerGroupHeartbeatRequest(
        group_id=group_id,
        member_id=f"{group_id}-new",
        rebalance_timeout_ms=_SESSION_MS,
        subscribed_topic_names=[FIRST_TOPIC],
        topic_partitions=[],
        client_assignors=[ConsumerGroupHeartbeatRequest.ClientAssignor(name=assignor)] if assignor else None,
    )
    body = yield ApiKey.CONSUMER_GROUP_HEARTBEAT, _HEARTBEAT, group_id, request
    return ConsumerGroupHeartbeatResponse.decode(body, _HEARTBEAT).error_code


def _commit(group_id: str, member_id: str = "", generation: int = -1) -> Generator[Step, bytes, int]:
    partition = OffsetCommitRequest.OffsetCommitRequestPartition(partition_index=0, committed_offset=1)
    topic = OffsetCommitRequest.OffsetCommitRequestTopic(name=FIRST_TOPIC, partitions=[partition])
    request = OffsetCommitRequest(
        group_id=group_id, generation_id_or_member_epoch=generation, member_id=member_id, topics=[topic]
    )
    body = yield ApiKey.OFFSET_COMMIT, _COMMIT, group_id, request
    return OffsetCommitResponse.decode(body, _COMMIT).topics[0].partitions[0].error_code


def _custom_assignor() -> Script:
    """An assignment with user data is of a custom assignor. A member that does not read it cannot convert the group."""
    group_id = "corner-assignor"
    joined = yield from _joined(group_id)
    _expect((yield from _synced(group_id, joined, b"mine")), Errors.NONE, "SyncGroup")
    _expect((yield from _converted(group_id)), Errors.GROUP_ID_NOT_FOUND, "a custom assignor")
    error = yield from _converted(group_id, "range")
    _expect(error, Errors.INVALID_REQUEST, "an assignor that does not read user data")


def _large_assignment() -> Script:
    """A generation whose record would exceed the size limit fails to begin."""
    group_id = "corner-large"
    joined = yield from _joined(group_id)
    error = yield from _synced(group_id, joined, bytes(_TOO_LARGE))
    _expect(error, Errors.UNKNOWN_SERVER_ERROR, "SyncGroup with too much")


def _large_static_member() -> Script:
    """A static member whose metadata does not fit into a record does not take over its instance id."""
    group_id = "corner-static"
    joined = yield from _joined(group_id, "instance")
    _expect((yield from _synced(group_id, joined, None)), Errors.NONE, "SyncGroup")
    refused = JoinGroupResponse.decode((yield _join(group_id, "instance", bytes(_TOO_LARGE))), _STATIC_JOIN)
    _expect(refused.error_code, Errors.UNKNOWN_SERVER_ERROR, "JoinGroup with too much")
    yield from _joined(group_id, "instance")


def _commit_before_sync() -> Script:
    """Commits are rejected between a member's JoinGroup and its SyncGroup."""
    group_id = "corner-commit"
    joined = yield from _joined(group_id)
    error = yield from _commit(group_id, joined.member_id, joined.generation_id)
    _expect(error, Errors.REBALANCE_IN_PROGRESS, "OffsetCommit before SyncGroup")
    error = yield from _synced(group_id, joined, None, "sticky")
    _expect(error, Errors.INCONSISTENT_GROUP_PROTOCOL, "SyncGroup of another protocol")
    _expect((yield from _synced(group_id, joined, None)), Errors.NONE, "SyncGroup")
    error = yield from _commit(group_id, joined.member_id, joined.generation_id)
    _expect(error, Errors.NONE, "OffsetCommit after SyncGroup")


def _strange_protocol() -> Script:
    """A classic member of a converted group sends SyncGroup with a protocol that it never offered."""
    group_id = "corner-strange"
    joined = yield from _joined(group_id)
    _expect((yield from _synced(group_id, joined, None)), Errors.NONE, "SyncGroup")
    _expect((yield from _converted(group_id)), Errors.NONE, "ConsumerGroupHeartbeat")
    error = yield from _synced(group_id, joined, None, "sticky")
    _expect(error, Errors.INCONSISTENT_GROUP_PROTOCOL, "SyncGroup of another protocol")


def _unknown_topic() -> Script:
    """A commit for a topic id that the broker does not know, such as that of a deleted topic."""
    group_id = "corner-unknown"
    partition = OffsetCommitRequest.OffsetCommitRequestPartition(partition_index=0, committed_offset=1)
    topic = OffsetCommitRequest.OffsetCommitRequestTopic(topic_id=bytes(15) + b"\7", partitions=[partition])
    request = OffsetCommitRequest(group_id=group_id, generation_id_or_member_epoch=-1, topics=[topic])
    body = yield ApiKey.OFFSET_COMMIT, _COMMIT_BY_ID, group_id, request
    error = OffsetCommitResponse.decode(body, _COMMIT_BY_ID).topics[0].partitions[0].error_code
    _expect(error, Errors.UNKNOWN_TOPIC_ID, "OffsetCommit for an unknown topic")


def _client_assignors() -> Script:
    """Assignors and computations that are invalid in any group, and metadata that the group has no room for."""
    group_id = "corner-computed"

    def offers(member_id: str, *names: str) -> Step:
        request = ConsumerGroupHeartbeatRequest(
            group_id=group_id,
            member_id=member_id,
            rebalance_timeout_ms=_SESSION_MS,
            subscribed_topic_names=[FIRST_TOPIC],
            topic_partitions=[],
            client_assignors=[
                ConsumerGroupHeartbeatRequest.ClientAssignor(name=name, metadata_bytes=bytes(MOST_ASSIGNOR_BYTES))
                for name in names
            ],
        )
        return ApiKey.CONSUMER_GROUP_HEARTBEAT, _HEARTBEAT, group_id, request

    room = MOST_GROUP_ASSIGNOR_BYTES // MOST_ASSIGNOR_BYTES
    expected = [(f"{group_id}-{number}", "x", Errors.NONE) for number in range(room)]
    expected += [("blank", " ", Errors.INVALID_REQUEST), ("much", "x", Errors.POLICY_VIOLATION)]
    for member_id, name, error in expected:
        response = ConsumerGroupHeartbeatResponse.decode((yield offers(member_id, name)), _HEARTBEAT)
        _expect(response.error_code, error, f"assignor {name!r}")
    for group, member_id, epoch, error in (
        (" ", "m", 1, Errors.INVALID_REQUEST),
        (group_id, " ", 1, Errors.INVALID_REQUEST),
        (group_id, "m", -1, Errors.INVALID_REQUEST),
        (group_id, "m", 1, Errors.UNKNOWN_MEMBER_ID),
    ):
        prepare = ConsumerGroupPrepareAssignmentRequest(group_id=group, member_id=member_id, member_epoch=epoch)
        body = yield ApiKey.CONSUMER_GROUP_PREPARE_ASSIGNMENT, 0, group_id, prepare
        _expect(ConsumerGroupPrepareAssignmentResponse.decode(body, 0).error_code, error, "PrepareAssignment")


_INTERRUPTED: Final = "corner-interrupted"


def _leader() -> Script:
    """Joins first, becomes the leader and never sends SyncGroup."""
    yield from _joined(_INTERRUPTED)


def _follower() -> Script:
    """Waits in SyncGroup while the group is converted."""
    yield 100
    joined = yield from _joined(_INTERRUPTED)
    error = yield from _synced(_INTERRUPTED, joined, None)
    _expect(error, Errors.REBALANCE_IN_PROGRESS, "SyncGroup")


def _newcomer() -> Script:
    """Joins with the consumer protocol, which converts the group."""
    yield _LATER_MS
    _expect((yield from _converted(_INTERRUPTED)), Errors.NONE, "ConsumerGroupHeartbeat")


def _many_groups(shard_of: Callable[[str], int]) -> Script:
    """Fills up a shard that no other client needs."""
    yield _LATER_MS
    used = {shard_of("committers"), shard_of("group-0")}
    names = (f"corner-many-{number}" for number in range(_LIMIT_OF_GROUPS * 100))
    error = Errors.NONE.value
    for group_id in names:
        if shard_of(group_id) not in used:
            error = yield from _commit(group_id)
        if error:
            break
    _expect(error, Errors.POLICY_VIOLATION, "one group too many")


# Transactions.


def _begun(transactional_id: str) -> Generator[Step, bytes, tuple[int, int]]:
    request = InitProducerIdRequest(transactional_id=transactional_id, transaction_timeout_ms=60_000)
    while True:
        body = yield ApiKey.INIT_PRODUCER_ID, _INIT, "", request
        response = InitProducerIdResponse.decode(body, _INIT)
        if response.error_code != Errors.CONCURRENT_TRANSACTIONS:
            _expect(response.error_code, Errors.NONE, "InitProducerId")
            return response.producer_id, response.producer_epoch
        yield 100


def _added(transactional_id: str, producer: tuple[int, int], group_id: str) -> Generator[Step, bytes, None]:
    request = AddOffsetsToTxnRequest(
        transactional_id=transactional_id, producer_id=producer[0], producer_epoch=producer[1], group_id=group_id
    )
    body = yield ApiKey.ADD_OFFSETS_TO_TXN, _ADD, group_id, request
    _expect(AddOffsetsToTxnResponse.decode(body, _ADD).error_code, Errors.NONE, "AddOffsetsToTxn")


def _committed(
    transactional_id: str, producer: tuple[int, int], group_id: str, version: int = _TXN_COMMIT
) -> Generator[Step, bytes, int]:
    partition = TxnOffsetCommitRequest.TxnOffsetCommitRequestPartition(partition_index=0, committed_offset=1)
    request = TxnOffsetCommitRequest(
        transactional_id=transactional_id,
        group_id=group_id,
        producer_id=producer[0],
        producer_epoch=producer[1],
        topics=[TxnOffsetCommitRequest.TxnOffsetCommitRequestTopic(name=FIRST_TOPIC, partitions=[partition])],
    )
    body = yield ApiKey.TXN_OFFSET_COMMIT, version, group_id, request
    return TxnOffsetCommitResponse.decode(body, version).topics[0].partitions[0].error_code


def _ended(transactional_id: str, producer: tuple[int, int], *, committed: bool) -> Generator[Step, bytes, None]:
    request = EndTxnRequest(
        transactional_id=transactional_id, producer_id=producer[0], producer_epoch=producer[1], committed=committed
    )
    body = yield ApiKey.END_TXN, _END, "", request
    _expect(EndTxnResponse.decode(body, _END).error_code, Errors.NONE, "EndTxn")


def _begins_again_after_a_commit() -> Script:
    """A producer restarts after a committed transaction."""
    transactional_id, group_id = "corner-tx-0", "corner-producer"
    producer = yield from _begun(transactional_id)
    yield from _added(transactional_id, producer, group_id)
    _expect((yield from _committed(transactional_id, producer, group_id)), Errors.NONE, "TxnOffsetCommit")
    yield from _ended(transactional_id, producer, committed=True)
    yield from _begun(transactional_id)


def _commits_with_an_old_epoch() -> Script:
    """A producer that was fenced commits offsets at its old epoch, in a version without verification."""
    transactional_id, group_id = "corner-tx-2", "corner-old"
    old = yield from _begun(transactional_id)
    producer = yield from _begun(transactional_id)
    yield from _added(transactional_id, producer, group_id)
    _expect((yield from _committed(transactional_id, producer, group_id)), Errors.NONE, "TxnOffsetCommit")
    error = yield from _committed(transactional_id, old, group_id)
    _expect(error, Errors.INVALID_PRODUCER_EPOCH, "TxnOffsetCommit of an older epoch")
    yield from _ended(transactional_id, producer, committed=True)


def _fenced_in_old_versions() -> Script:
    """A fenced producer uses versions without PRODUCER_FENCED; then its successor aborts without a transaction."""
    transactional_id, group_id = "corner-tx-3", "corner-fenced"
    old = yield from _begun(transactional_id)
    producer = yield from _begun(transactional_id)
    init = InitProducerIdRequest(
        transactional_id=transactional_id, transaction_timeout_ms=60_000, producer_id=old[0], producer_epoch=old[1]
    )
    body = yield ApiKey.INIT_PRODUCER_ID, _OLD_INIT, "", init
    _expect(InitProducerIdResponse.decode(body, _OLD_INIT).error_code, Errors.INVALID_PRODUCER_EPOCH, "InitProducerId")
    add = AddOffsetsToTxnRequest(
        transactional_id=transactional_id, producer_id=old[0], producer_epoch=old[1], group_id=group_id
    )
    body = yield ApiKey.ADD_OFFSETS_TO_TXN, _OLD_ADD, group_id, add
    _expect(AddOffsetsToTxnResponse.decode(body, _OLD_ADD).error_code, Errors.INVALID_PRODUCER_EPOCH, "AddOffsetsToTxn")
    end = EndTxnRequest(transactional_id=transactional_id, producer_id=old[0], producer_epoch=old[1], committed=False)
    body = yield ApiKey.END_TXN, _OLD_END, "", end
    _expect(EndTxnResponse.decode(body, _OLD_END).error_code, Errors.INVALID_PRODUCER_EPOCH, "EndTxn")
    end.producer_id, end.producer_epoch = producer
    body = yield ApiKey.END_TXN, _BUMPING_END, "", end
    _expect(EndTxnResponse.decode(body, _BUMPING_END).error_code, Errors.NONE, "EndTxn of no transaction")


def _commits_late(shared: list[int]) -> Script:
    """The transaction ends while the transaction coordinator's verification of a commit is under way."""
    transactional_id, group_id = "corner-tx-1", "corner-late"
    producer = yield from _begun(transactional_id)
    yield from _added(transactional_id, producer, group_id)
    shared += producer
    error = yield from _committed(transactional_id, producer, group_id, _AGREED_TXN_COMMIT)
    _expect(error, Errors.INVALID_TXN_STATE, "TxnOffsetCommit of a transaction that was ended")


def _ends_early(shared: list[int]) -> Script:
    """Ends the transaction of `_commits_late`, whose producer is in `shared`."""
    while not shared:
        yield 10
    yield 10
    yield from _ended("corner-tx-1", (shared[0], shared[1]), committed=False)
