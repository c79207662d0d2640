# SPDX-License-Identifier: Apache-2.0
"""Decides where a consumer begins to read a partition: the classification flow of KIP-1327, step by step. Pure.

The decision depends on the committed offset, on whether the position was out of range, on the two policies and the two
creation times. It depends on nothing else, so every member of the group and every retry makes the same decision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum

from kcoord.client.creation_time import UNKNOWN_TIME_MS
from kcoord.client.reset_policy import ResetPolicy
from kcoord.client.types import TopicIdPartition


class Reason(Enum):
    """Why a policy was chosen."""

    OUT_OF_RANGE = "the position is out of range"
    NOT_SET = "auto_offset_reset_new_partitions is not set"
    UNKNOWN_TIME = "a creation time is not known"
    NEWLY_EXPANDED = "the partition is newer than the group"
    PRE_EXISTING = "the partition is not newer than the group"


@dataclass(frozen=True, slots=True)
class UseCommitted:
    """Begin at the committed offset."""

    offset: int


@dataclass(frozen=True, slots=True)
class UsePolicy:
    """Reset by this policy. The policy `none` raises an error to the application."""

    policy: ResetPolicy
    reason: Reason


@dataclass(frozen=True, slots=True)
class RefreshMetadata:
    """The metadata does not have the partition: fetch it, then decide."""


Decision = UseCommitted | UsePolicy | RefreshMetadata


def decide(
    *,
    committed_offset: int | None,
    is_out_of_range: bool,
    base_policy: ResetPolicy,
    new_partitions_policy: ResetPolicy | None,
    group_creation_time_ms: int,
    partition_creation_time_ms: int | None,
    is_listed_as_new: bool | None = None,
) -> Decision:
    """Returns where to begin to read a partition.

    A creation time is -1 if the broker does not know it. The partition's time is None if the metadata does not have the
    partition yet. `is_listed_as_new` is None unless the coordinator lists new partitions (the later revision of the
    KIP); if it does, the times do not count. A committed offset counts as in range until a fetch fails with
    OFFSET_OUT_OF_RANGE.
    """
    # 1. Check committed offset.
    if committed_offset is not None and not is_out_of_range:
        return UseCommitted(committed_offset)
    # 2. Check out-of-range: the partition is unambiguously pre-existing.
    if is_out_of_range:
        return UsePolicy(base_policy, Reason.OUT_OF_RANGE)
    # 3. Check auto.offset.reset.new.partitions.
    if new_partitions_policy is None:
        return UsePolicy(base_policy, Reason.NOT_SET)
    # 4. The later revision: the coordinator has compared the times.
    if is_listed_as_new is not None:
        if is_listed_as_new:
            return UsePolicy(new_partitions_policy, Reason.NEWLY_EXPANDED)
        return UsePolicy(base_policy, Reason.PRE_EXISTING)
    # 5. Read timestamps. Without the group's time the partition's time does not matter.
    if partition_creation_time_ms is None and group_creation_time_ms != UNKNOWN_TIME_MS:
        return RefreshMetadata()
    # 6. Classify and apply.
    if partition_creation_time_ms is None or UNKNOWN_TIME_MS in (group_creation_time_ms, partition_creation_time_ms):
        return UsePolicy(base_policy, Reason.UNKNOWN_TIME)
    if partition_creation_time_ms > group_creation_time_ms:
        return UsePolicy(new_partitions_policy, Reason.NEWLY_EXPANDED)
    return UsePolicy(base_policy, Reason.PRE_EXISTING)


def topics_to_refresh(
    assigned: Iterable[TopicIdPartition],
    creation_time_ms: Callable[[TopicIdPartition], int | None],
    new_partitions_policy: ResetPolicy | None,
) -> set[bytes]:
    """Returns the topics of an assignment whose metadata lacks an assigned partition.

    The consumer refreshes them at once (KIP-1327 "Metadata Refresh for Newly Assigned Partitions"). Returns no topics
    unless the option is set.
    """
    if new_partitions_policy is None:
        return set()
    return {partition.topic_id for partition in assigned if creation_time_ms(partition) is None}
