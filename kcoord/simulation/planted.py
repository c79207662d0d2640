# SPDX-License-Identifier: Apache-2.0
"""Planted faults: defects that the simulation has to find. A simulation that does not find them proves nothing.

A fault replaces the group coordinator's state machine, makes the log writer report success early, or replaces
attributes of product code while a run lasts. Product code does not depend on this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

from kcoord.config import BrokerConfig
from kcoord.coordinator.group import migration, records
from kcoord.coordinator.group.classic.group import ClassicGroup
from kcoord.coordinator.group.consumer import heartbeat, removal
from kcoord.coordinator.group.consumer.assignment import CurrentAssignmentBuilder
from kcoord.coordinator.group.consumer.group import ConsumerGroup, ConsumerGroupMember
from kcoord.coordinator.group.consumer.heartbeat import ConsumerHeartbeat, MemberTransition
from kcoord.coordinator.group.counters import GroupCounters
from kcoord.coordinator.group.creation_limits import CreationLimits
from kcoord.coordinator.group.group import Group
from kcoord.coordinator.group.offsets import operations as offset_operations
from kcoord.coordinator.group.offsets.committed_offsets import CommittedOffset, CommittedOffsets
from kcoord.coordinator.group.offsets.expiration import Aging
from kcoord.coordinator.group.offsets.operations import PartitionCheck
from kcoord.coordinator.group.offsets.packed_commit import CommitPlan
from kcoord.coordinator.group.offsets.packed_fetch import PackedFetch
from kcoord.coordinator.group.offsets.transactional_offsets import OffsetKey, PendingOffsets, TransactionalOffsets
from kcoord.coordinator.group.shard import GroupCoordinatorShard
from kcoord.coordinator.group.steady import SteadyHeartbeat
from kcoord.metadata.creation_order import CreationOrder
from kcoord.metadata.image import MetadataImage
from kcoord.runtime.result import CoordinatorRecord, CoordinatorResult, OperationContext, Schedule
from kcoord.runtime.shard_context import ShardContext
from kcoord.server.api.api_table import DeferredResponse
from kcoord.server.disk import shard_logs
from kcoord.server.fast.metadata import MetadataResponses
from kcoord.server.net.request_path import RequestPath
from kcoord.server.workers.controller_metadata import MetadataFollowers
from kcoord.simulation import planted_assignors, planted_security, planted_upstream
from kcoord.storage import journal, log_loader
from kcoord.storage.journal import DurableAppends
from kcoord.storage.offset_map import OffsetMap
from kcoord.topics.fetch_manager import FetchManager
from kcoord.topics.open_log import OpenLog
from kcoord.topics.partition import Partition
from kcoord.topics.producer_state import AbortedTransaction, ProducerState
from kcoord_protocol.batch_header import BatchHeader
from kcoord_protocol.errors import Errors
from kcoord_protocol.messages import (
    ConsumerGroupCurrentMemberAssignmentValue,
    ConsumerGroupMetadataValue,
    ConsumerGroupTargetAssignmentMetadataValue,
    DeleteGroupsResponse,
    GroupMetadataValue,
    OffsetCommitKey,
    OffsetDeleteRequest,
    OffsetDeleteResponse,
)

_SKIPPED_OF: Final = 40


@dataclass(slots=True)
class Fault:
    """A fault to plant. The defaults are the correct behaviour."""

    make_machine: Callable[[BrokerConfig, MetadataImage, GroupCounters], GroupCoordinatorShard] = GroupCoordinatorShard
    early_replies: bool = False
    """The log writer reports success before the sync."""
    patches: Sequence[tuple[object, str, object]] = ()
    """Owner, name and replacement of attributes of product code."""

    @contextmanager
    def planted(self) -> Iterator[None]:
        """Replaces the attributes, and restores them afterwards."""
        before = [getattr(owner, name) for owner, name, _ in self.patches]
        for owner, name, value in self.patches:
            setattr(owner, name, value)
        try:
            yield
        finally:
            for (owner, name, _), value in zip(self.patches, before, strict=True):
                setattr(owner, name, value)


NO_FAULT: Final = Fault()


class ForgetfulShard(GroupCoordinatorShard):
    """Skips the replay of some live records. A load replays all records."""

    def __init__(self, config: BrokerConfig, image: MetadataImage, counters: GroupCounters) -> None:
        super().__init__(config, image, counters)
        self._is_loaded = False
        self._replayed = 0

    def on_loaded(self, context: OperationContext) -> CoordinatorResult[None]:
        self._is_loaded = True
        return super().on_loaded(context)

    def replay(self, record: CoordinatorRecord) -> None:
        self._replayed += self._is_loaded
        if not self._is_loaded or self._replayed % _SKIPPED_OF:
            super().replay(record)


class HastyShard(GroupCoordinatorShard):
    """Forgets which partitions a member still has to revoke, and so assigns them to another member at once."""

    def replay(self, record: CoordinatorRecord) -> None:
        value = record.value
        if isinstance(value, ConsumerGroupCurrentMemberAssignmentValue) and value.partitions_pending_revocation:
            value.partitions_pending_revocation = []
        super().replay(record)


class ClingingShard(GroupCoordinatorShard):
    """Ignores the tombstones of offsets, so that deleted offsets stay."""

    def replay(self, record: CoordinatorRecord) -> None:
        if not isinstance(record.key, OffsetCommitKey) or record.value is not None:
            super().replay(record)


# Replacements of product functions.


def _deletes_subscribed(
    self: GroupCoordinatorShard, context: OperationContext, request: OffsetDeleteRequest
) -> CoordinatorResult[OffsetDeleteResponse]:
    """Deletes offsets even of subscribed topics."""
    result = _delete_offsets(self, context, request)
    group = self.group(request.group_id)
    for topic in request.topics:
        if group is not None and group.is_subscribed_to(topic.name):
            result.records += (
                records.new_offset_commit_tombstone(
                    request.group_id, topic.name, partition.partition_index, records.TombstoneReason.OFFSET_DELETE
                )
                for partition in topic.partitions
            )
    return result


def _deletes_every_group(
    self: GroupCoordinatorShard, context: OperationContext, group_ids: list[str]
) -> CoordinatorResult[list[DeleteGroupsResponse.DeletableGroupResult]]:
    """Deletes groups even if they have members."""
    result = _delete_groups(self, context, group_ids)
    for answer in result.response:
        group = self.group(answer.group_id)
        if group is not None and answer.error_code:
            answer.error_code = 0
            result.records += _tombstones_of(group)
    return result


def _tombstones_of(group: Group) -> list[CoordinatorRecord]:
    """Returns the group's tombstones. `Deletion` makes none for a group with members (G-12)."""
    reason = records.TombstoneReason.GROUP_DELETE
    if isinstance(group, ConsumerGroup):
        return records.new_consumer_group_tombstones(group.group_id, group.resolved_regexes, reason)
    return [records.new_classic_group_tombstone(group.group_id, reason)]


def _every_commit(member: ConsumerGroupMember, epoch: int, stale: Errors | None = None) -> PartitionCheck | None:
    """Accepts commits at every member epoch."""
    return None


def _no_bump(
    config: BrokerConfig,
    image: MetadataImage,
    group: object,
    members: Sequence[ConsumerGroupMember],
    reason: records.EpochReason,
    now_ms: int,
) -> CoordinatorResult[None]:
    """Removes members without a bump of the group epoch."""
    result = _remove_members(config, image, group, members, reason, now_ms)  # type: ignore[arg-type]
    epochs = (ConsumerGroupMetadataValue, ConsumerGroupTargetAssignmentMetadataValue)
    return replace(result, records=[record for record in result.records if not isinstance(record.value, epochs)])


def _one_ms_early(self: Aging, offset: CommittedOffset) -> int | None:
    """Expires offsets one millisecond early."""
    expires_at_ms = _expires_at_ms(self, offset)
    return None if expires_at_ms is None else expires_at_ms - 1


def _lost_newest(self: OffsetMap, key: bytes) -> int:
    """Treats every seventh last value of a key as superseded."""
    offset = _get(self, key)
    return offset + (offset % 7 == 0)


def _lost_newest_of_all(self: OffsetMap, keys: Sequence[bytes]) -> list[int]:
    return [_lost_newest(self, key) for key in keys]


def _gives_everything(self: CurrentAssignmentBuilder, member_epoch: int) -> ConsumerGroupMember:
    """Assigns partitions that other members have not released."""
    return _next(replace(self, owners_of=lambda topic_id: {}), member_epoch)


def _from_one(*arguments: object) -> CoordinatorResult[None]:
    """Resets the epoch of a group that is converted to a classic group to 1."""
    result = _downgrade(*arguments)  # type: ignore[arg-type]
    for record in result.records:
        if isinstance(record.value, GroupMetadataValue):
            record.value.generation = 1
    return result


def _rebalances_only(config: BrokerConfig, group: object, now_ms: int) -> Schedule | None:
    """Forgets at a load that a group with classic members only has to become a classic group."""
    return _unfinished(config, group, now_ms) if isinstance(group, ClassicGroup) else None


def _converts_only(config: BrokerConfig, group: object, now_ms: int) -> Schedule | None:
    """Forgets at a load that a group that became a classic group has to rebalance."""
    return _unfinished(config, group, now_ms) if isinstance(group, ConsumerGroup) else None


def _keeps_predecessor(self: MemberTransition, copy: ConsumerGroupMember, updated: ConsumerGroupMember) -> None:
    """Keeps the previous member with the same instance id."""
    before = len(self.records)
    _replace_static_member(self, copy, updated)
    self.records[before:] = [record for record in self.records[before:] if record.value is not None]


def _at_once(self: TransactionalOffsets, group_id: str, topic: str, partition: int) -> bool:
    """Treats offsets of open transactions as stable."""
    return False


def _aborted_too(
    self: TransactionalOffsets, producer_id: int, *, committed: bool
) -> Iterator[tuple[OffsetKey, CommittedOffset]]:
    """Commits the offsets of aborted transactions, too."""
    return _end(self, producer_id, committed=True)


def _joins_again(self: ConsumerHeartbeat) -> ConsumerGroupMember:
    """Treats every join as a change of the subscription."""
    member = _find_member(self)
    return replace(member, subscribed_topic_names=()) if self.request.member_epoch == 0 else member


def _no_hash(image: MetadataImage, topic_names: object) -> int:
    """Ignores that subscribed topics have grown."""
    return 7


def _never(*arguments: object) -> bool:
    return False


def _always(*arguments: object) -> bool:
    return True


def _restores_nothing(*arguments: object) -> int:
    return 0


def _flushes_nothing(self: DurableAppends) -> bool:
    """Restarts the journal before the logs are on disk."""
    self._journal.begin_anew()
    return True


def _no_marks(names: Iterable[str]) -> set[int]:
    """Takes every segment but the last for durable."""
    return set()


def _hears_nothing(self: CreationOrder[object], worker: object, ticket: int, newest_ms: int, heard_ms: int) -> None:
    """Ignores the creation time that a worker reports."""
    _answer(self, worker, ticket, -1, heard_ms)


def _nothing(*arguments: object) -> None:
    """Does nothing."""


def _outlives(
    self: CommitPlan,
    groups: Mapping[str, Group],
    offsets: CommittedOffsets,
    image: MetadataImage,
    cells: Sequence[bytes],
    now_ms: int,
) -> bool:
    """Accepts commits of a member that was accepted once, as long as its group exists."""
    group = groups.get(self.group_id)
    if group is not None and group is self._group:
        self._group_version = group.version
    return _prepare(self, groups, offsets, image, cells, now_ms)


def _of_first_image(
    self: PackedFetch, group: Group | None, offsets: CommittedOffsets, image: MetadataImage
) -> bytes | None:
    """Looks topics up in the first metadata image that it got."""
    return _encode(self, group, offsets, _first_images.setdefault(self, image))


def _overtakes(self: RequestPath, frame: bytes, response: bytes | DeferredResponse) -> None:
    """Sends responses that are ready before earlier ones that are not."""
    if isinstance(response, bytes):
        self._output.append(response)
    else:
        _send(self, frame, response)


def _forgets_the_image(self: SteadyHeartbeat, image_epoch: int) -> bool:
    """Ignores changes of topics and configs."""
    return self.group.version == self.version


def _of_any_image(self: MetadataResponses, frame: bytes, image: MetadataImage, owner: bytes) -> bytes | None:
    """Repeats a response that was made from an earlier metadata image."""
    return _metadata_respond(self, frame, self._image or image, owner)


def _knows_no_aborted(self: ProducerState, first_offset: int, end_offset: int) -> list[AbortedTransaction]:
    """Omits the aborted transactions from Fetch responses."""
    return []


def _takes_every_batch(self: ProducerState, header: BatchHeader) -> None:
    """Accepts a duplicated batch as a new one."""


def _flushes_later(self: Partition, opened: OpenLog, now_ms: int) -> None:
    """Acknowledges records that are only in the page cache although the topic demands a flush."""
    opened.unflushed_records = 0


def _up_to_the_end(self: OpenLog) -> int:
    """Treats records of open transactions as committed."""
    return self.log.end_offset


def _waits_for_nobody(self: MetadataFollowers, *, is_security: bool) -> None:
    """Acknowledges a change of metadata before the other workers have applied it."""


_first_images: Final[dict[PackedFetch, MetadataImage]] = {}
_prepare = CommitPlan.prepare
_encode = PackedFetch.encode
_send = RequestPath._send
_metadata_respond = MetadataResponses.respond
_answer = CreationOrder.answer
_delete_groups = GroupCoordinatorShard.delete_groups
_delete_offsets = GroupCoordinatorShard.delete_offsets
_remove_members = removal.remove_members
_expires_at_ms = Aging.expires_at_ms
_get = OffsetMap.get
_next = CurrentAssignmentBuilder._next
_downgrade = migration.downgrade
_unfinished = migration.unfinished
_replace_static_member = MemberTransition._replace_static_member
_end = PendingOffsets.end
_find_member = ConsumerHeartbeat._find_member

FAULTS: Final = {
    "answer-before-workers-know": Fault(patches=[(MetadataFollowers, "when_applied", _waits_for_nobody)]),
    "answer-overtakes": Fault(patches=[(RequestPath, "_send", _overtakes)]),
    "aborted-records-not-told": Fault(patches=[(ProducerState, "aborted_between", _knows_no_aborted)]),
    "acknowledged-before-flush": Fault(patches=[(Partition, "flush", _flushes_later)]),
    "batch-taken-twice": Fault(patches=[(ProducerState, "check", _takes_every_batch)]),
    "fetch-not-woken": Fault(patches=[(FetchManager, "on_append", _nothing)]),
    "open-transaction-is-read": Fault(patches=[(OpenLog, "last_stable_offset", property(_up_to_the_end))]),
    "aborted-transaction-counts": Fault(patches=[(PendingOffsets, "end", _aborted_too)]),
    "clocks-of-workers-not-compared": Fault(patches=[(CreationOrder, "answer", _hears_nothing)]),
    "compaction-loses-the-newest-value": Fault(
        patches=[(OffsetMap, "get", _lost_newest), (OffsetMap, "last_offsets", _lost_newest_of_all)]
    ),
    "deletes-a-group-with-members": Fault(patches=[(GroupCoordinatorShard, "delete_groups", _deletes_every_group)]),
    "deletes-subscribed-offsets": Fault(patches=[(GroupCoordinatorShard, "delete_offsets", _deletes_subscribed)]),
    "downgrade-forgotten-by-a-load": Fault(patches=[(migration, "unfinished", _rebalances_only)]),
    "downgrade-without-rebalance-after-a-load": Fault(patches=[(migration, "unfinished", _converts_only)]),
    "downgrade-resets-the-epoch": Fault(patches=[(migration, "downgrade", _from_one)]),
    "creation-time-without-limit": Fault(patches=[(CreationLimits, "hold", _nothing)]),
    "dropped-tombstone": Fault(ClingingShard),
    "epoch-not-bumped": Fault(patches=[(removal, "remove_members", _no_bump)]),
    "expiry-one-ms-early": Fault(patches=[(Aging, "expires_at_ms", _one_ms_early)]),
    # Without the assertion G-4, which would see the fault before the checks of the simulation.
    "grant-before-release": Fault(
        patches=[(CurrentAssignmentBuilder, "_next", _gives_everything), (MemberTransition, "_check_step", _nothing)]
    ),
    "grant-before-revocation": Fault(HastyShard),
    "growth-not-noticed": Fault(patches=[(heartbeat, "metadata_hash", _no_hash)]),
    "join-counts-twice": Fault(patches=[(ConsumerHeartbeat, "_find_member", _joins_again)]),
    "journal-begun-anew-too-early": Fault(patches=[(DurableAppends, "renew", _flushes_nothing)]),
    "journal-not-read": Fault(patches=[(journal, "_restore", _restores_nothing)]),
    "memo-not-invalidated": Fault(patches=[(SteadyHeartbeat, "is_current", _always)]),
    "no-limit-of-members": Fault(patches=[(MemberTransition, "check_size", _nothing)]),
    "old-snapshot-is-used": Fault(patches=[(shard_logs, "may_miss_deletions", _never)]),
    "pending-offsets-count-as-stable": Fault(patches=[(PendingOffsets, "is_pending", _at_once)]),
    "reply-before-durable": Fault(early_replies=True),
    "plan-outlives-a-fenced-member": Fault(patches=[(CommitPlan, "prepare", _outlives)]),
    "repeated-heartbeat-of-an-old-config": Fault(patches=[(SteadyHeartbeat, "is_current", _forgets_the_image)]),
    "repeated-metadata-of-an-old-image": Fault(patches=[(MetadataResponses, "respond", _of_any_image)]),
    "row-visible-before-durable": Fault(patches=[(ShardContext, "is_behind", False)]),
    "skipped-replay": Fault(ForgetfulShard),
    "stale-image-in-a-packed-fetch": Fault(patches=[(PackedFetch, "encode", _of_first_image)]),
    "unsynced-segment-trusted": Fault(patches=[(log_loader, "marks_in", _no_marks)]),
    "static-member-not-fenced": Fault(patches=[(MemberTransition, "_replace_static_member", _keeps_predecessor)]),
    "zombie-commit": Fault(patches=[(offset_operations, "_epoch_check", _every_commit)]),
    **{
        name: Fault(patches=patches)
        for module in (planted_security, planted_assignors, planted_upstream)
        for name, patches in module.PATCHES.items()
    },
}
