# SPDX-License-Identifier: Apache-2.0
"""Deleting groups and offsets: on request, with their topic, and by expiry.

Everything is deleted by tombstones, one per record key, each with its reason. Tombstones that a request asks for also
have its principal. All tombstones of a request or of expiry are in one atomic batch, so a crash never leaves a deleted
group with a part of its offsets. If the tombstones of a DeleteGroups request do not fit into a batch, the request
fails. Those of deleted topics may be in several batches, since they may be about any number of groups. On request and
with its topic, a pending offset of an open transaction is deleted too; the marker then does not restore it. Expiry
skips partitions with pending offsets and does not delete their group.

If a group is deleted by its own tombstones but still has offsets, replay keeps it as a group without members. Offsets
are only found through their group.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping

from kcoord.coordinator.group import records
from kcoord.coordinator.group.consumer.group import ConsumerGroup
from kcoord.coordinator.group.group import Group
from kcoord.coordinator.group.offsets.committed_offsets import CommittedOffsets
from kcoord.coordinator.group.offsets.expiration import MAX_TOMBSTONES, Expiration
from kcoord.coordinator.group.offsets.transactional_offsets import OffsetKey, TransactionalOffsets
from kcoord.coordinator.group.records import TombstoneReason
from kcoord.runtime.result import CoordinatorRecord, CoordinatorResult
from kcoord_protocol.errors import Errors
from kcoord_protocol.messages import DeleteGroupsResponse


class Deletion:
    """Makes the tombstones of a shard. `pending` are the offsets of open transactions."""

    def __init__(self, offsets: CommittedOffsets, pending: TransactionalOffsets) -> None:
        self._offsets = offsets
        self._pending = pending

    def of_topic(self, topic: str) -> Iterator[CoordinatorRecord]:
        """Yields the tombstones of all groups' offsets of a deleted topic."""
        for group_id, partitions in self._offsets.of_topic(topic):
            for partition in partitions:
                yield records.new_offset_commit_tombstone(group_id, topic, partition, TombstoneReason.TOPIC_DELETE)
        for key in self._pending.of_topic(topic):
            if self._offsets.get(*key) is None:
                yield records.new_offset_commit_tombstone(*key, TombstoneReason.TOPIC_DELETE)

    def of_topic_ids(self, topic_ids: Collection[bytes]) -> list[CoordinatorRecord]:
        """Returns tombstones of offsets that were committed for topics with these ids, at most MAX_TOMBSTONES."""
        tombstones: list[CoordinatorRecord] = []
        for group_id in self._offsets.group_ids() if topic_ids else ():
            for topic, offsets in self._offsets.packed(group_id).items():
                if offsets.topic_id not in topic_ids and offsets.notes is None:
                    continue
                tombstones += (
                    records.new_offset_commit_tombstone(group_id, topic, partition, TombstoneReason.TOPIC_DELETE)
                    for partition, offset in offsets.items()
                    if offset.topic_id in topic_ids
                )
                if len(tombstones) >= MAX_TOMBSTONES:
                    return tombstones[:MAX_TOMBSTONES]
        return tombstones

    def of_groups(
        self, groups: Mapping[str, Group], group_ids: Iterable[str], principal: str
    ) -> CoordinatorResult[list[DeleteGroupsResponse.DeletableGroupResult]]:
        """Deletes empty groups with their offsets (KIP-229); returns one result per distinct id.

        `principal` is the client that asked for it.
        """
        tombstones: list[CoordinatorRecord] = []
        results = []
        for group_id in dict.fromkeys(group_ids):
            group = groups.get(group_id)
            error, message = Errors.NONE, None
            if group is None:
                error, message = Errors.GROUP_ID_NOT_FOUND, f"Group {group_id} not found."
            elif not group.is_empty():
                error, message = Errors.NON_EMPTY_GROUP, f"The group {group_id} is not empty."
            else:
                tombstones += self.of_group(group)
            results.append(
                DeleteGroupsResponse.DeletableGroupResult(group_id=group_id, error_code=error, error_message=message)
            )
        records.attribute(tombstones, principal)
        return CoordinatorResult(results, tombstones, is_refusable=True)

    def of_group(self, group: Group) -> list[CoordinatorRecord]:
        """Returns the tombstones of a group and all its offsets, including pending ones."""
        tombstones = [
            records.new_offset_commit_tombstone(group.group_id, topic, partition, TombstoneReason.GROUP_DELETE)
            for topic, partitions in sorted(self._offsets.of_group(group.group_id).items())
            for partition in sorted(partitions)
        ]
        tombstones += [
            records.new_offset_commit_tombstone(*key, TombstoneReason.GROUP_DELETE)
            for key in self._pending.of_group(group.group_id)
            if self._offsets.get(*key) is None
        ]
        return tombstones + _group_alone(group, TombstoneReason.GROUP_DELETE)

    def of_all_expired(self, expiration: Expiration, groups: Iterable[Group]) -> list[CoordinatorRecord]:
        """Returns tombstones of expired offsets and groups (KIP-211). MAX_TOMBSTONES or more: there may be others."""
        tombstones: list[CoordinatorRecord] = []
        for group in groups:
            tombstones += self._of_expired(expiration, group)
            if len(tombstones) >= MAX_TOMBSTONES:
                break
        return tombstones

    def _of_expired(self, expiration: Expiration, group: Group) -> list[CoordinatorRecord]:
        """Returns tombstones of the group's expired offsets, at most MAX_TOMBSTONES, and of the group if none is left.

        If the time the group became empty is unknown, a record with the current time is returned instead.
        """
        offsets = self._offsets.of_group(group.group_id)
        if offsets and isinstance(group, ConsumerGroup) and expiration.is_empty_since_unknown(group):
            return [records.new_empty_since_record(group, expiration.clock_ms)]
        pending = set(self._pending.of_group(group.group_id))
        candidates = expiration.expired(group, offsets)
        if pending:
            candidates = ((topic, p) for topic, p in candidates if OffsetKey(group.group_id, topic, p) not in pending)
        expired = list(itertools.islice(candidates, MAX_TOMBSTONES))
        tombstones = [
            records.new_offset_commit_tombstone(group.group_id, topic, partition, TombstoneReason.EXPIRED)
            for topic, partition in expired
        ]
        if not pending and expiration.may_remove(group) and len(expired) == sum(map(len, offsets.values())):
            tombstones += _group_alone(group, TombstoneReason.EXPIRED)
        return tombstones


def _group_alone(group: Group, reason: TombstoneReason) -> list[CoordinatorRecord]:
    assert group.is_empty(), f"G-12: group {group.group_id} would be deleted although it has members"
    if isinstance(group, ConsumerGroup):
        return records.new_consumer_group_tombstones(group.group_id, group.resolved_regexes, reason)
    return [records.new_classic_group_tombstone(group.group_id, reason)]
