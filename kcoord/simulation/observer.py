# SPDX-License-Identifier: Apache-2.0
"""Observes every record when a live shard replays it, and checks the invariants of single records.

Theory of operation
-------------------
`watch_groups` and `watch_transactions` wrap `replay` of a state machine once its log is loaded. The wrapper runs before
the real `replay`, so the checks see the state before the record. Commits of the fast path append no record objects;
`watch_groups` wraps `commit_packed`, too, and derives their records from the request.

The observer outlives processes. It numbers all records (`_place`), so it knows which commit of a partition is later,
which was deleted, and which belongs to an open transaction. `checkers.AcknowledgedCommits` asks it for that order.

A violation inside the server must not be swallowed by the server's own error handling: `guard` stores the first one,
and `state_checks.BrokerChecks.after_step` raises it after the step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from struct import Struct
from typing import Final, NamedTuple

from kcoord.coordinator.group.classic.group import ClassicGroup
from kcoord.coordinator.group.consumer.group import ConsumerGroup
from kcoord.coordinator.group.offsets.expiration import GROUP_RETENTION_KEY
from kcoord.coordinator.group.offsets.packed_commit import CommitPlan
from kcoord.coordinator.group.shard import GroupCoordinatorShard
from kcoord.coordinator.transaction.metadata import LEGAL_PREDECESSORS, TransactionState
from kcoord.coordinator.transaction.shard import TransactionCoordinatorShard
from kcoord.metadata.image import MetadataImage
from kcoord.runtime.result import CoordinatorRecord, OperationContext
from kcoord.simulation.trace import Trace, ViolationError
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.control_records import ControlRecordType
from kcoord_protocol.messages import (
    ConsumerGroupCurrentMemberAssignmentKey,
    ConsumerGroupMemberMetadataKey,
    ConsumerGroupMetadataKey,
    ConsumerGroupMetadataValue,
    ConsumerGroupRegularExpressionKey,
    ConsumerGroupRegularExpressionValue,
    ControlRecordTypeSchema,
    GroupMetadataKey,
    OffsetCommitKey,
    OffsetCommitRequest,
    OffsetCommitValue,
    TransactionLogKey,
    TransactionLogValue,
)

_RETENTION_MS: Final = 60_000
_CELL: Final = Struct(">qi")
"""Offset and leader epoch of a partition."""


class CommitKey(NamedTuple):
    """Group, topic and partition of a committed offset."""

    group_id: str
    topic: str
    partition: int


@dataclass(slots=True)
class Commits:
    """The commits of one partition in the order of the log. Every commit has an offset of its own."""

    places: dict[int, int] = field(default_factory=dict)
    """Place of the last record by committed offset."""
    ends: dict[int, tuple[GroupCoordinatorShard, int]] = field(default_factory=dict)
    """The state machine that took the commit first, and the log offset that has to be durable before it may be read; by
    committed offset. Without commits of transactions.
    """
    counted: set[int] = field(default_factory=set)
    """Offsets that are committed: outside of a transaction, or by its commit marker."""
    latest: tuple[int, int] | None = None
    """Commit and expire timestamps of the last commit; None if they are not known."""
    deleted_at: int = -1


class Observer:
    """Watches the state machines of all processes of one run.

    `now_ms` is the clock of the broker, `image` the metadata of the controller.
    """

    def __init__(self, trace: Trace) -> None:
        self.image: Callable[[], MetadataImage] = MetadataImage.empty
        self.now_ms: Callable[[], int] = lambda: 0
        self.log_offsets: Callable[[str], tuple[int, int]] = lambda group_id: (0, 0)
        """Returns the durable offset and the end offset of the log of a group's shard."""
        self.shard_of: Callable[[str], int] = lambda group_id: 0
        self.on_group_gone: Callable[[str], None] = lambda group_id: None
        self.on_regex_resolved: Callable[[str, list[str]], None] = lambda group_id, topics: None
        """Called with the topics that a group's regular expression matches."""
        self.on_member_gone: Callable[[str, str], None] = lambda group_id, member_id: None
        """Called with the ids of a group and of a member of the consumer protocol before the member is removed."""
        self.on_shard_loaded: Callable[[int], None] = lambda shard_id: None
        self.transitions: Counter[str] = Counter()
        self.records: Counter[str] = Counter()
        self.violation: ViolationError | None = None
        """The first violation inside the broker; it ends the run after the step."""
        self._trace = trace
        self._commits: dict[CommitKey, Commits] = {}
        self._place = 0
        self._message: object = None
        self.written: list[CoordinatorRecord] = []
        self._open: dict[int, list[tuple[CommitKey, int]]] = {}
        self._creation_times: dict[str, int] = {}
        self._given_creation_times: dict[str, set[int]] = {}
        self._transactions: dict[str, int] = {}

    # Watching shards.

    def violated(self, error: ViolationError) -> None:
        """Stores the violation if it is the first one."""
        self.violation = self.violation or error

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Stores a violation instead of raising it into the server, which would handle it as an internal error."""
        try:
            yield
        except ViolationError as error:
            self.violated(error)

    def watch_groups(self, shard_id: int, machine: GroupCoordinatorShard) -> None:
        """Begins to watch a shard of the group coordinator that has just replayed its log."""
        replay = machine.replay
        self.on_shard_loaded(shard_id)
        self._creation_times = {
            group_id: time_ms
            for group_id, time_ms in self._creation_times.items()
            if self.shard_of(group_id) != shard_id
        }
        for listed in machine.list_groups(OperationContext(0), [], ["consumer"]).response:
            self._loaded(machine, listed.group_id)
        offsets = machine.hard_state()["offsets"]
        assert isinstance(offsets, dict)
        for key, offset in offsets.items():
            # The log may end before the last observed commits, if those were not durable.
            commits = self._commits.setdefault(CommitKey(*key), Commits())
            commits.latest = offset.commit_timestamp_ms, offset.expire_timestamp_ms
            # An offset that was read from the log is durable, even if a client commits it again.
            commits.ends[offset.offset] = machine, 0

        def observed(record: CoordinatorRecord) -> None:
            with self.guard():
                self._before(machine, record)
            replay(record)

        setattr(machine, "replay", observed)  # noqa: B010
        commit_packed = machine.commit_packed

        def observed_commit(plan: CommitPlan, cells: Sequence[bytes], now_ms: int) -> bool:
            if not commit_packed(plan, cells, now_ms):
                return False
            with self.guard():
                self._packed(machine, plan, cells, now_ms)
            return True

        setattr(machine, "commit_packed", observed_commit)  # noqa: B010

    def watch_transactions(self, shard_id: int, machine: TransactionCoordinatorShard) -> None:
        """Begins to watch a shard of the transaction coordinator that has just replayed its log."""
        replay = machine.replay
        for transactional_id, metadata in machine.hard_state().items():
            self._transactions[transactional_id] = metadata.state

        def observed(record: CoordinatorRecord) -> None:
            with self.guard():
                self._transaction(record)
            replay(record)

        setattr(machine, "replay", observed)  # noqa: B010

    def _transaction(self, record: CoordinatorRecord) -> None:
        key, value = record.key, record.value
        assert isinstance(key, TransactionLogKey)
        if value is None:
            self._transactions.pop(key.transactional_id, None)
            self.transitions["transaction: forgotten"] += 1
            return
        assert isinstance(value, TransactionLogValue)
        new = TransactionState(value.transaction_status)
        old = self._transactions.get(key.transactional_id)
        self._transactions[key.transactional_id] = new
        name = "new" if old is None else TransactionState(old).wire_name
        self.transitions[f"transaction: {name} -> {new.wire_name}"] += 1
        if old is not None and TransactionState(old) not in LEGAL_PREDECESSORS[new]:
            raise ViolationError(
                "I-18 transactions move in order", f"{key.transactional_id}: {name} -> {new.wire_name}"
            )

    # Records of groups.

    def _before(self, machine: GroupCoordinatorShard, record: CoordinatorRecord) -> None:
        self._place += 1
        if self._message is not None:
            self.written.append(record)
        match record.key, record.value:
            case OffsetCommitKey() as key, OffsetCommitValue() as value:
                commit_key = CommitKey(key.group, key.topic, key.partition)
                if record.producer is None:
                    self._check_zombie(machine, commit_key, value.topic_id)
                    self._note_end(machine, commit_key, value.offset, self.log_offsets(commit_key.group_id)[1])
                self._commit(commit_key, value, record)
            case OffsetCommitKey() as key, None:
                self._offset_deleted(machine, CommitKey(key.group, key.topic, key.partition), record.reason)
            case ConsumerGroupMetadataKey() as key, ConsumerGroupMetadataValue() as value:
                self._group_epoch(machine, key.group_id, value)
            case ConsumerGroupMetadataKey() as key, None:
                self._group_deleted(machine, key.group_id, record.reason)
            case GroupMetadataKey() as key, None:
                self._group_deleted(machine, key.group, record.reason)
            case ConsumerGroupMemberMetadataKey() as key, None:
                self.on_member_gone(key.group_id, key.member_id)
            case ConsumerGroupRegularExpressionKey() as key, ConsumerGroupRegularExpressionValue() as value:
                self.on_regex_resolved(key.group_id, value.topics)
            case ControlRecordTypeSchema() as key, _:
                self._marker(record, committed=key.type == ControlRecordType.COMMIT)
            case _:
                pass

    def _note_end(self, machine: GroupCoordinatorShard, key: CommitKey, offset: int, end: int) -> None:
        ends = self._commits.setdefault(key, Commits()).ends
        if offset not in ends or ends[offset][0] is not machine:
            ends[offset] = machine, end

    def check_durable(self, machine: GroupCoordinatorShard, key: CommitKey, offset: int) -> None:
        """I-11: a fetched offset is durable, so that no crash can lose it."""
        commits = self._commits.get(key)
        taken_by, end = commits.ends.get(offset, (None, 0)) if commits is not None else (None, 0)
        durable = self.log_offsets(key.group_id)[0]
        if taken_by is machine and durable < end:
            text = f"{key}: {offset} was fetched; the log is durable to {durable}, and would have to be to {end}"
            raise ViolationError("I-11 what is read is durable", text)

    def _packed(self, machine: GroupCoordinatorShard, plan: CommitPlan, cells: Sequence[bytes], now_ms: int) -> None:
        """Observes a commit of the fast path as the records that its handler would have written."""
        request = self._message
        assert isinstance(request, OffsetCommitRequest)
        numbers = iter(cells)
        for topic in request.topics:
            topic_by_id = machine.image.topics_by_id.get(topic.topic_id)
            name = topic.name or (topic_by_id.name if topic_by_id is not None else "")
            image = machine.image.topics[name]
            for partition in topic.partitions:
                offset, leader_epoch = _CELL.unpack(next(numbers))
                key = OffsetCommitKey(group=request.group_id, topic=name, partition=partition.partition_index)
                value = OffsetCommitValue(
                    offset=offset,
                    leader_epoch=leader_epoch,
                    metadata="",
                    commit_timestamp=now_ms,
                    expire_timestamp=-1,
                    topic_id=image.id,
                )
                # The batch is appended after this.
                end = self.log_offsets(request.group_id)[1] + 1
                self._note_end(machine, CommitKey(request.group_id, name, partition.partition_index), offset, end)
                self._before(machine, CoordinatorRecord(key, value))

    def _commit(self, key: CommitKey, value: OffsetCommitValue, record: CoordinatorRecord) -> None:
        commits = self._commits.setdefault(key, Commits())
        commits.places[value.offset] = self._place
        if record.producer is None:
            commits.counted.add(value.offset)
            commits.latest = value.commit_timestamp, value.expire_timestamp
            return
        self._open.setdefault(record.producer.producer_id, []).append((key, value.offset))

    def _marker(self, record: CoordinatorRecord, *, committed: bool) -> None:
        assert record.producer is not None
        self._trace.add("markers", f"{record.producer.producer_id} {committed}")
        for key, offset in self._open.pop(record.producer.producer_id, []):
            if committed:
                self._commits[key].counted.add(offset)
                self._commits[key].latest = None

    def _offset_deleted(self, machine: GroupCoordinatorShard, key: CommitKey, reason: str) -> None:
        self.records[f"offset tombstone: {reason}"] += 1
        commits = self._commits.setdefault(key, Commits())
        if reason == "expired":
            self._check_expiry(machine, key, commits)
        elif reason == "offset-delete" and key.topic in self.subscribed_topics(machine, key.group_id):
            raise ViolationError("I-15 a subscribed topic keeps its offsets", f"{key} was deleted")
        commits.deleted_at = self._place
        commits.latest = None

    def _check_expiry(self, machine: GroupCoordinatorShard, key: CommitKey, commits: Commits) -> None:
        """I-14: an offset does not expire early, nor while a member subscribes to its topic (KIP-211)."""
        self._trace.add("expired", f"{key}")
        if key.topic in self.subscribed_topics(machine, key.group_id):
            raise ViolationError("I-14 offsets do not expire early", f"{key} expired while it is subscribed to")
        if commits.latest is None:
            return
        commit_ms, expire_ms = commits.latest
        own = self.image().group_configs(key.group_id).get(GROUP_RETENTION_KEY)
        retention_ms = _RETENTION_MS if own is None else int(own) * 60_000
        expires_ms = expire_ms if expire_ms >= 0 else commit_ms + retention_ms
        if self.now_ms() < expires_ms:
            text = f"{key} expired at {self.now_ms()}, not at {expires_ms}"
            raise ViolationError("I-14 offsets do not expire early", text)

    def subscribed_topics(self, machine: GroupCoordinatorShard, group_id: str) -> set[str]:
        """Returns the topics that members of the consumer protocol subscribe to by name."""
        described = machine.consumer_group_describe(OperationContext(0), [group_id]).response[0]
        return {name for member in described.members.values() for name in member.subscribed_topic_names}

    # Groups.

    def _loaded(self, machine: GroupCoordinatorShard, group_id: str) -> None:
        """I-21: a loaded group has a creation time that was written for it.

        Not always the last one: a deletion and a new creation may not have been durable.
        """
        group = machine.consumer_group_describe(OperationContext(0), [group_id]).response[0].group
        created_ms = group.group_creation_time_ms
        if created_ms not in self._given_creation_times.get(group_id, set()):
            text = f"{group_id} was loaded as created at {created_ms}, not {self._given_creation_times.get(group_id)}"
            raise ViolationError("I-21 creation times are written once", text)
        self._creation_times[group_id] = created_ms

    def _group_epoch(self, machine: GroupCoordinatorShard, group_id: str, value: ConsumerGroupMetadataValue) -> None:
        """I-21: the creation time of a group does not change between its creation and its deletion."""
        if group_id not in self._creation_times:
            self._check_new_group(machine, group_id, value.creation_time_ms)
        created_ms = self._creation_times.setdefault(group_id, value.creation_time_ms)
        self._given_creation_times.setdefault(group_id, set()).add(value.creation_time_ms)
        if created_ms != value.creation_time_ms:
            text = f"{group_id} was created at {created_ms}, then at {value.creation_time_ms}"
            raise ViolationError("I-21 creation times are written once", text)

    def _check_new_group(self, machine: GroupCoordinatorShard, group_id: str, created_ms: int) -> None:
        """I-31: of all partitions, exactly those that the coordinator does not know yet are newer than a new group."""
        coordinator_topics = machine.image.topics_by_id
        for topic in self.image().topics.values():
            count = len(coordinator_topics[topic.id].partitions) if topic.id in coordinator_topics else 0
            for partition in topic.partitions:
                is_new = partition.creation_time_ms > created_ms
                if is_new == (partition.partition_id < count):
                    text = (
                        f"group {group_id} was created at {created_ms}, {topic.name}-{partition} at "
                        f"{partition.creation_time_ms}; the coordinator knew {count} partitions of the topic"
                    )
                    raise ViolationError("I-31 new partitions are newer", text)

    def partitions_made(self, before: MetadataImage, image: MetadataImage) -> None:
        """I-31: partitions that the controller has made are newer than all existing groups."""
        for topic in image.topics.values():
            old = before.topics_by_id.get(topic.id)
            if old is topic or topic.internal:
                continue
            for partition in topic.partitions[len(old.partitions) if old is not None else 0 :]:
                for group_id, created_ms in self._creation_times.items():
                    if partition.creation_time_ms <= created_ms:
                        text = (
                            f"group {group_id} was created at {created_ms}, the new partition "
                            f"{topic.name}-{partition.partition_id} at {partition.creation_time_ms}"
                        )
                        self.violated(ViolationError("I-31 new partitions are newer", text))

    def _group_deleted(self, machine: GroupCoordinatorShard, group_id: str, reason: str) -> None:
        """I-16: only an empty group is deleted. A tombstone of a conversion is no deletion."""
        self.records[f"group tombstone: {reason}"] += 1
        self._creation_times.pop(group_id, None)
        self.on_group_gone(group_id)
        if reason not in ("group-delete", "expired"):
            return
        for listed in machine.list_groups(OperationContext(0), [], []).response:
            if listed.group_id == group_id and listed.group_state not in ("Empty", "Dead"):
                text = f"{group_id} is {listed.group_state} and was deleted: {reason}"
                raise ViolationError("I-16 only empty groups are deleted", text)

    # Requests.

    def begin(self, message: object) -> None:
        """Called before a connection gets a request: records belong to the request until `end`."""
        self._message = message
        self.written = []

    def end(self) -> None:
        self._message = None

    def _check_zombie(self, machine: GroupCoordinatorShard, key: CommitKey, topic_id: bytes) -> None:
        """I-13: a member that commits at an older epoch has owned the partition since that epoch or longer."""
        request = self._message
        group = machine.group(key.group_id)
        if not isinstance(request, OffsetCommitRequest) or group is None:
            return
        epoch = request.generation_id_or_member_epoch
        text = f"{request.member_id} committed {key} at epoch {epoch}"
        if group.is_empty():
            if epoch >= 0:
                raise ViolationError("I-13 no commit of a zombie", f"{text}, the group is empty")
            return
        if isinstance(group, ClassicGroup) and epoch != group.generation:
            raise ViolationError("I-13 no commit of a zombie", f"{text}, the generation is {group.generation}")
        if isinstance(group, ConsumerGroup):
            member = group.members.get(request.member_id)
            since = member.assignment_epoch_of(topic_id, key.partition) if member is not None else None
            if member is None or (epoch != member.member_epoch and (since is None or epoch < since)):
                raise ViolationError("I-13 no commit of a zombie", f"{text}: {member}")

    def check_repeated(self, api_key: ApiKey, again: Sequence[CoordinatorRecord]) -> None:
        """I-9: a repeated request writes nothing more. `again` are the records that it would write."""
        more: Sequence[CoordinatorRecord]
        if api_key is ApiKey.CONSUMER_GROUP_HEARTBEAT:
            # If a static member repeats its temporary leave (epoch -2), the same record is written again.
            more = [record for record in again if not isinstance(record.key, ConsumerGroupCurrentMemberAssignmentKey)]
        elif api_key is ApiKey.OFFSET_COMMIT:
            before = [_committed(record) for record in self.written]
            more = [record for record in again if _committed(record) not in before]
        else:
            more = again
        if more:
            text = f"{api_key.name} wrote {self.written}; a repeated request would write {more}"
            raise ViolationError("I-9 a repeated request makes no difference", text)

    # The order of the log.

    def place_of(self, key: CommitKey, offset: int) -> int | None:
        """Returns the number of the commit's last record; None if it was never written or was deleted since."""
        commits = self._commits.get(key)
        place = commits.places.get(offset) if commits is not None else None
        return None if commits is None or place is None or place < commits.deleted_at else place

    def was_written(self, key: CommitKey, offset: int) -> bool:
        commits = self._commits.get(key)
        return commits is not None and offset in commits.places

    def is_visible(self, key: CommitKey, offset: int) -> bool:
        """True if a fetch may return the commit: it is not only part of open or aborted transactions."""
        return offset in self._commits[key].counted


def _committed(record: CoordinatorRecord) -> tuple[object, object]:
    """Returns a commit record without its timestamp."""
    value = record.value
    return record.key, (value.offset, value.metadata) if isinstance(value, OffsetCommitValue) else value
