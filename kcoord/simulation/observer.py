# SPDX-License-Identifier: Apache-2.0
"""Sees every record at the moment in which a live shard replays it, and checks what must be true of it there and then.

It also knows the order of the log: which commit of a partition came after which, and which were deleted or are pending.
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
    ConsumerGroupMetadataKey,
    ConsumerGroupMetadataValue,
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
    """What a committed offset belongs to."""

    group_id: str
    topic: str
    partition: int


@dataclass(slots=True)
class Commits:
    """The commits of one partition in the order of the log. Every commit has an offset of its own."""

    places: dict[int, int] = field(default_factory=dict)
    """Offset -> the place of its last record."""
    ends: dict[int, tuple[GroupCoordinatorShard, int]] = field(default_factory=dict)
    """Offset -> who took it first, and how far its log has to be durable at least; not for transactions."""
    counted: set[int] = field(default_factory=set)
    """Offsets that were committed, outside of a transaction or by the end of one."""
    latest: tuple[int, int] | None = None
    """Commit and expire timestamp of the last one, if they are known."""
    deleted_at: int = -1


class Observer:
    """See the module's text. `image` and `now_ms` are the broker's."""

    def __init__(self, trace: Trace) -> None:
        self.image: Callable[[], MetadataImage] = MetadataImage.empty
        self.now_ms: Callable[[], int] = lambda: 0
        self.log_offsets: Callable[[str], tuple[int, int]] = lambda group_id: (0, 0)
        """Up to where the log of a group's shard is durable, and where it ends."""
        self.shard_of: Callable[[str], int] = lambda group_id: 0
        self.on_group_gone: Callable[[str], None] = lambda group_id: None
        self.transitions: Counter[str] = Counter()
        self.records: Counter[str] = Counter()
        self.violation: ViolationError | None = None
        """The first one that a record has shown; it ends the run after the step."""
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
        self.violation = self.violation or error

    @contextmanager
    def guard(self) -> Iterator[None]:
        """The server takes an exception of its parts for a broken part, and would go on."""
        try:
            yield
        except ViolationError as error:
            self.violated(error)

    def watch_groups(self, shard_id: int, machine: GroupCoordinatorShard) -> None:
        """From here on the shard is live: its log was replayed."""
        replay = machine.replay
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
            # The last commits may not have been durable.
            commits = self._commits.setdefault(CommitKey(*key), Commits())
            commits.latest = offset.commit_timestamp_ms, offset.expire_timestamp_ms
            # What was read from the log is durable, whoever commits the same offset again.
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
            case ControlRecordTypeSchema() as key, _:
                self._marker(record, committed=key.type == ControlRecordType.COMMIT)
            case _:
                pass

    def _note_end(self, machine: GroupCoordinatorShard, key: CommitKey, offset: int, end: int) -> None:
        ends = self._commits.setdefault(key, Commits()).ends
        if offset not in ends or ends[offset][0] is not machine:
            ends[offset] = machine, end

    def check_durable(self, machine: GroupCoordinatorShard, key: CommitKey, offset: int) -> None:
        """I-11: nothing is read that a crash would take away."""
        commits = self._commits.get(key)
        taken_by, end = commits.ends.get(offset, (None, 0)) if commits is not None else (None, 0)
        durable = self.log_offsets(key.group_id)[0]
        if taken_by is machine and durable < end:
            text = f"{key}: {offset} is answered, the log is durable up to {durable}, and has it before {end}"
            raise ViolationError("I-11 what is read is durable", text)

    def _packed(self, machine: GroupCoordinatorShard, plan: CommitPlan, cells: Sequence[bytes], now_ms: int) -> None:
        """A commit that goes to the log without becoming records: those that it stands for."""
        request = self._message
        assert isinstance(request, OffsetCommitRequest)
        numbers = iter(cells)
        for topic in request.topics:
            known = machine.image.topics_by_id.get(topic.topic_id)
            name = topic.name or (known.name if known is not None else "")
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
                # It is appended after this.
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
        """KIP-211, as far as the record itself tells: not early, and not while somebody consumes the topic."""
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
        """Topics that a member of the consumer protocol names itself."""
        group = machine.consumer_group_describe(OperationContext(0), [group_id]).response[0]
        return {name for member in group.members for name in member.subscribed_topic_names}

    # Groups.

    def _loaded(self, machine: GroupCoordinatorShard, group_id: str) -> None:
        """I-21: a group comes back with a creation time that it was given; its last one may not have been durable."""
        group = machine.consumer_group_describe(OperationContext(0), [group_id]).response[0]
        found = group.group_creation_time_ms
        if found not in self._given_creation_times.get(group_id, set()):
            text = f"{group_id} came back as created at {found}, not {self._given_creation_times.get(group_id)}"
            raise ViolationError("I-21 creation times are written once", text)
        self._creation_times[group_id] = found

    def _group_epoch(self, machine: GroupCoordinatorShard, group_id: str, value: ConsumerGroupMetadataValue) -> None:
        """I-21: the creation time is written once per life of a group."""
        if group_id not in self._creation_times:
            self._check_new_group(machine, group_id, value.creation_time_ms)
        known = self._creation_times.setdefault(group_id, value.creation_time_ms)
        self._given_creation_times.setdefault(group_id, set()).add(value.creation_time_ms)
        if known != value.creation_time_ms:
            text = f"{group_id} was created at {known}, then at {value.creation_time_ms}"
            raise ViolationError("I-21 creation times are written once", text)

    def _check_new_group(self, machine: GroupCoordinatorShard, group_id: str, created_ms: int) -> None:
        """I-31: partitions that the coordinator knows when it creates a group are not new to it, all others are."""
        known = machine.image.topics_by_id
        for topic in self.image().topics.values():
            known_count = len(known[topic.id].partitions) if topic.id in known else 0
            for partition in topic.partitions:
                is_new = partition.creation_time_ms > created_ms
                if is_new == (partition.partition_id < known_count):
                    text = f"{group_id} of {created_ms}, {topic.name}-{partition} of {partition.creation_time_ms}"
                    raise ViolationError("I-31 new partitions are newer", text)

    def partitions_made(self, before: MetadataImage, image: MetadataImage) -> None:
        """I-31: they are new to all groups that there are."""
        for topic in image.topics.values():
            old = before.topics_by_id.get(topic.id)
            if old is topic or topic.internal:
                continue
            for partition in topic.partitions[len(old.partitions) if old is not None else 0 :]:
                for group_id, created_ms in self._creation_times.items():
                    if partition.creation_time_ms <= created_ms:
                        text = f"{group_id} of {created_ms}, a partition of {partition.creation_time_ms}"
                        self.violated(ViolationError("I-31 new partitions are newer", text))

    def _group_deleted(self, machine: GroupCoordinatorShard, group_id: str, reason: str) -> None:
        """I-16: only an empty group is deleted; a conversion is no deletion."""
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
        """A request is about to run."""
        self._message = message
        self.written = []

    def end(self) -> None:
        self._message = None

    def _check_zombie(self, machine: GroupCoordinatorShard, key: CommitKey, topic_id: bytes) -> None:
        """I-13: who commits with an older epoch has had the partition ever since."""
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
        """I-9: the same request again, from a client that missed the answer, makes no difference."""
        more: Sequence[CoordinatorRecord]
        if api_key is ApiKey.CONSUMER_GROUP_HEARTBEAT:
            # A member that left for a while may say so again, and gets the same record again.
            more = [record for record in again if not isinstance(record.key, ConsumerGroupCurrentMemberAssignmentKey)]
        elif api_key is ApiKey.OFFSET_COMMIT:
            before = [_committed(record) for record in self.written]
            more = [record for record in again if _committed(record) not in before]
        else:
            more = again
        if more:
            text = f"{api_key.name} wrote {self.written}, and another time would write {more}"
            raise ViolationError("I-9 a repeated request makes no difference", text)

    # The order of the log.

    def place_of(self, key: CommitKey, offset: int) -> int | None:
        """Where in the log the commit is; None where it never was, or was deleted since."""
        commits = self._commits.get(key)
        place = commits.places.get(offset) if commits is not None else None
        return None if commits is None or place is None or place < commits.deleted_at else place

    def was_written(self, key: CommitKey, offset: int) -> bool:
        commits = self._commits.get(key)
        return commits is not None and offset in commits.places

    def is_visible(self, key: CommitKey, offset: int) -> bool:
        """Whether the commit may be answered: not if only transactions that are open or were aborted have it."""
        return offset in self._commits[key].counted


def _committed(record: CoordinatorRecord) -> tuple[object, object]:
    """What a commit is but for its time."""
    value = record.value
    return record.key, (value.offset, value.metadata) if isinstance(value, OffsetCommitValue) else value
