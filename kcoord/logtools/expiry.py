# SPDX-License-Identifier: Apache-2.0
"""Forecasts when committed offsets and groups expire, and by which rule.

It applies the rules of `coordinator.group.offsets.expiration` to the content of a partition of `__consumer_offsets`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from kcoord.config import BrokerConfig
from kcoord.coordinator.group.group import Group
from kcoord.coordinator.group.offsets.committed_offsets import CommittedOffset, CommittedOffsets
from kcoord.coordinator.group.offsets.expiration import Aging, Expiration
from kcoord.coordinator.group.offsets.records import OffsetCommitReader
from kcoord.coordinator.group.offsets.transactional_offsets import OffsetKey, TransactionalOffsets
from kcoord.coordinator.group.replay import GroupReplay
from kcoord.metadata.image import MetadataImage
from kcoord.runtime.result import CoordinatorRecord, CoordinatorResult, OperationContext, Task, TimerKey
from kcoord.runtime.serde import CoordinatorSerde
from kcoord.runtime.shard_set import ShardSet
from kcoord_protocol.record_batch import decode_header

PENDING_TRANSACTION = "pending transaction"
COMMITTED_RETENTION = "retention of the commit"
WITHOUT_OFFSETS = "without offsets"


@dataclass(slots=True)
class ExpiryRow:
    """One committed offset, or the group itself (`topic` is None), which expires with its last offset.

    `expires_ms` is None if the offset is protected from expiration. `because` names the rule. The retention of
    `retention_ms` starts at `since_ms`.
    """

    group: str
    topic: str | None
    partition: int | None
    offset: int | None
    expires_ms: int | None
    because: str
    since_ms: int | None = None
    retention_ms: int | None = None


class GroupHistory:
    """The groups and offsets of a partition after a replay. A state machine without timers or requests."""

    def __init__(self) -> None:
        self.groups: dict[str, Group] = {}
        self.offsets = CommittedOffsets()
        self.pending = TransactionalOffsets()
        self._replay = GroupReplay(self.groups, self.offsets, self.pending)

    def replay(self, record: CoordinatorRecord) -> None:
        self._replay.apply(record)

    def batch_replay(self) -> Callable[[bytes, int], bool]:
        return OffsetCommitReader(self.groups, self.offsets, self.pending).replay

    def on_loaded(self, context: OperationContext) -> CoordinatorResult[None]:
        return CoordinatorResult(None)

    def fire_timer(self, context: OperationContext, key: TimerKey) -> CoordinatorResult[None]:
        return CoordinatorResult(None)

    def complete_task(self, context: OperationContext, task: Task, value: object) -> CoordinatorResult[None]:
        return CoordinatorResult(None)


def read_groups(batches: Iterable[bytes]) -> GroupHistory:
    """Replays all batches of a partition of `__consumer_offsets`, in order. Raises LoadError if one is malformed."""
    history = GroupHistory()
    shards = ShardSet(lambda _: history, CoordinatorSerde())
    shards.load(0, ((decode_header(batch), batch) for batch in batches), 0)
    return history


def forecast(
    history: GroupHistory, config: BrokerConfig, image: MetadataImage, group_id: str | None = None
) -> Iterator[ExpiryRow]:
    """Yields the rows of one group or of all groups: offsets by topic and partition, then the group itself."""
    expiration = Expiration(config, image, 0)
    for name in sorted(history.groups) if group_id is None else [group_id]:
        group = history.groups.get(name)
        if group is not None:
            yield from _of_group(history, expiration, group)


def _of_group(history: GroupHistory, expiration: Expiration, group: Group) -> Iterator[ExpiryRow]:
    pending = set(history.pending.of_group(group.group_id))
    rows = []
    for topic, partitions in sorted(history.offsets.of_group(group.group_id).items()):
        aging = expiration.aging(group, topic)
        for partition, offset in sorted(partitions.items()):
            is_pending = OffsetKey(group.group_id, topic, partition) in pending
            rows.append(_of_offset(group.group_id, topic, partition, offset, aging, is_pending=is_pending))
    yield from rows
    ends = [row.expires_ms for row in rows]
    if expiration.may_remove(group) and not pending and None not in ends:
        because = "with its last offset" if ends else WITHOUT_OFFSETS
        yield ExpiryRow(
            group.group_id, None, None, None, max((end for end in ends if end is not None), default=0), because
        )


def _of_offset(
    group_id: str, topic: str, partition: int, offset: CommittedOffset, aging: Aging, *, is_pending: bool
) -> ExpiryRow:
    row = ExpiryRow(group_id, topic, partition, offset.offset, None, aging.rule.value)
    if is_pending:
        row.because = PENDING_TRANSACTION
    elif aging.rule.protects:
        return row
    elif offset.expire_timestamp_ms >= 0:
        row.because = COMMITTED_RETENTION
        row.since_ms, row.expires_ms = offset.commit_timestamp_ms, offset.expire_timestamp_ms
        row.retention_ms = offset.expire_timestamp_ms - offset.commit_timestamp_ms
    else:
        row.since_ms = max(offset.commit_timestamp_ms, aging.since_ms)
        row.expires_ms, row.retention_ms = aging.expires_at_ms(offset), aging.retention_ms
    return row
