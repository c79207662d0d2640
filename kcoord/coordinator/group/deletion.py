# SPDX-License-Identifier: Apache-2.0
"""What goes together: a group with its offsets, the offsets of a topic, what has expired. Each tombstone says why."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping

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
    """Reads a shard's offsets; `pending` are those of transactions under way."""

    def __init__(self, offsets: CommittedOffsets, pending: TransactionalOffsets) -> None:
        self._offsets = offsets
        self._pending = pending

    def of_topic(self, topic: str) -> Iterator[CoordinatorRecord]:
        """The offsets of a topic that is gone, of all groups."""
        for group_id, partitions in self._offsets.of_topic(topic):
            for partition in partitions:
                yield records.new_offset_commit_tombstone(group_id, topic, partition, TombstoneReason.TOPIC_DELETE)
        for key in self._pending.of_topic(topic):
            if self._offsets.get(*key) is None:
                yield records.new_offset_commit_tombstone(*key, TombstoneReason.TOPIC_DELETE)

    def of_groups(
        self, groups: Mapping[str, Group], group_ids: Iterable[str]
    ) -> CoordinatorResult[list[DeleteGroupsResponse.DeletableGroupResult]]:
        """KIP-229: an empty group goes with its offsets; one result per distinct id."""
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
        return CoordinatorResult(results, tombstones, is_refusable=True)

    def of_group(self, group: Group) -> list[CoordinatorRecord]:
        """A group and its offsets, those within transactions too."""
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
        """KIP-211. If it returns MAX_TOMBSTONES or more, there may be others."""
        tombstones: list[CoordinatorRecord] = []
        for group in groups:
            tombstones += self._of_expired(expiration, group)
            if len(tombstones) >= MAX_TOMBSTONES:
                break
        return tombstones

    def _of_expired(self, expiration: Expiration, group: Group) -> list[CoordinatorRecord]:
        """What has expired, at most MAX_TOMBSTONES at a time, and with the last offset an empty group. Where
        it is not known since when a group is empty, it is since now.
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
    if isinstance(group, ConsumerGroup):
        return records.new_consumer_group_tombstones(group.group_id, group.resolved_regexes, reason)
    return [records.new_classic_group_tombstone(group.group_id, reason)]
