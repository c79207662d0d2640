# SPDX-License-Identifier: Apache-2.0
"""Groups that come from another coordinator: their committed offsets are imported once.

Theory of operation. In front of an existing cluster (`kcoord.upstream`), a group may have committed offsets with that
cluster's own coordinator. They are imported before the first response about the group. The shard decides whether they
may still be imported, so the decision is as durable as the log:

    unknown    the log has neither the group nor its import record    the offsets may be imported
    present    the group exists                                       never: it has offsets of its own
    departed   it has an import record, and the group is gone         only if an operator asks for it

A group gets its import record together with the imported offsets, in one atomic batch, or before its first own record
if there is nothing to import. So no crash leaves imported offsets without it, and a group that was deleted here does
not come back.

The record of a departed group is needed only while the other coordinator has offsets of the group. The server looks
from time to time and forgets the others (`forget`), so a log does not collect the ids of all groups that ever were.

An imported offset counts as committed at the time of its import, because the other coordinator does not show when it
was committed. So its retention (KIP-211) begins with the import.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import IntEnum
from typing import NamedTuple

from kcoord.coordinator.group import records
from kcoord.coordinator.group.group import Group
from kcoord.coordinator.group.offsets.committed_offsets import CommittedOffset
from kcoord.metadata.image import MetadataImage
from kcoord.runtime.result import CoordinatorRecord, CoordinatorResult
from kcoord_protocol.uuid import ZERO_UUID


class ImportedOffset(NamedTuple):
    """A committed offset of the other coordinator."""

    topic: str
    partition: int
    offset: int
    leader_epoch: int
    metadata: str


class ImportOutcome(IntEnum):
    """What became of an import. The numbers are those of ImportGroups."""

    IMPORTED = 0
    NOTHING = 1
    """The other coordinator has no offsets of the group."""
    PRESENT = 2
    DEPARTED = 3


class ImportRequest(NamedTuple):
    """The offsets of a group, none if there is nothing to import. `again`: also if the group is departed."""

    group_id: str
    offsets: Sequence[ImportedOffset] = ()
    again: bool = False
    dry_run: bool = False


def import_offsets(
    request: ImportRequest, group: Group | None, imports: Collection[str], image: MetadataImage, now_ms: int
) -> CoordinatorResult[ImportOutcome]:
    """Returns the import record, if the group has none, and the records of the offsets, if they may be imported."""
    group_id = request.group_id
    is_recorded = group_id in imports
    if group is not None:
        outcome = ImportOutcome.PRESENT
    elif is_recorded and not request.again:
        outcome = ImportOutcome.DEPARTED
    else:
        outcome = ImportOutcome.IMPORTED if request.offsets else ImportOutcome.NOTHING
    if request.dry_run:
        return CoordinatorResult(outcome)
    made: list[CoordinatorRecord] = []
    if not is_recorded:
        made.append(records.new_group_import_record(group_id))
    if outcome is ImportOutcome.IMPORTED:
        made += (_commit_record(group_id, imported, image, now_ms) for imported in request.offsets)
    return CoordinatorResult(outcome, made, is_refusable=True)


def _commit_record(group_id: str, imported: ImportedOffset, image: MetadataImage, now_ms: int) -> CoordinatorRecord:
    topic = image.topics.get(imported.topic)
    offset = CommittedOffset(
        imported.offset, imported.leader_epoch, imported.metadata, now_ms, -1, ZERO_UUID if topic is None else topic.id
    )
    return records.new_offset_commit_record(group_id, imported.topic, imported.partition, offset)


def forget(
    group_ids: Collection[str], groups: Collection[str], imports: Collection[str]
) -> CoordinatorResult[list[str]]:
    """Returns the tombstones of the import records of departed groups, with the ids of these groups."""
    forgotten = [group_id for group_id in group_ids if group_id in imports and group_id not in groups]
    return CoordinatorResult(forgotten, [records.new_group_import_tombstone(group_id) for group_id in forgotten])
