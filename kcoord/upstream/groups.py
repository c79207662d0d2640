# SPDX-License-Identifier: Apache-2.0
"""Reads the committed offsets of a group from the upstream's own coordinator.

The order of the requests matters. The group is described first, and its offsets are fetched after that: a member that
leaves in between has committed its last offsets before. The fetch waits for offsets of open transactions, because they
may still be committed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kcoord.client.admin.group_offsets import list_group_offsets
from kcoord.client.admin.groups import describe_groups, list_groups
from kcoord.client.cluster import Cluster, Deadline
from kcoord.client.offset_messages import GroupOffsets
from kcoord.coordinator.group.imports import ImportedOffset
from kcoord.upstream.rights import naming_right
from kcoord_protocol.errors import Errors, KafkaError

FETCH_MS: Final = 5_000
"""The time in which the upstream has to answer. Clients of the group wait meanwhile, and ask again afterwards."""
_INACTIVE: Final = frozenset({"Empty", "Dead"})


async def committed_offsets(cluster: Cluster, timeout_ms: int, group_id: str) -> Sequence[ImportedOffset]:
    """Returns the committed offsets of a group, none if the upstream does not know the group.

    Raises NON_EMPTY_GROUP if the group has members in the upstream, and any other KafkaError if its offsets cannot be
    known now.
    """
    deadline = cluster.deadline(timeout_ms)
    is_described = await _check_empty(cluster, deadline, group_id)
    offsets = await _fetch(cluster, deadline, group_id)
    if offsets and not is_described:
        # A streams group, for example, or a group that has begun meanwhile. Only a list shows its state.
        groups = await cluster.retry("list groups", deadline, lambda: list_groups(cluster, (), ()))
        for group in groups:
            if group.group_id == group_id:
                _check_state(group_id, group.state, 0)
        offsets = await _fetch(cluster, deadline, group_id)
    return [
        ImportedOffset(partition.topic, partition.partition, offset.offset, offset.leader_epoch, offset.metadata)
        for partition, offset in sorted(offsets.items())
        if offset is not None
    ]


async def _check_empty(cluster: Cluster, deadline: Deadline, group_id: str) -> bool:
    """Raises NON_EMPTY_GROUP if the group has members. Returns False if there is no consumer group of this name."""
    outcome = (await describe_groups(cluster, deadline, [group_id], include_authorized_operations=False))[group_id]
    if not isinstance(outcome, KafkaError):
        _check_state(group_id, outcome.state, len(outcome.members))
        return True
    if outcome.error in (Errors.GROUP_ID_NOT_FOUND, Errors.INVALID_GROUP_ID):
        return False
    raise _explained(outcome, group_id)


def _check_state(group_id: str, state: str, members: int) -> None:
    if state not in _INACTIVE:
        count = f" with {members} members" if members else ""
        raise KafkaError(
            Errors.NON_EMPTY_GROUP,
            f"group {group_id} is in use in the upstream: it is {state}{count}. Stop these members first; they and "
            "members here would read the same partitions",
        )


async def _fetch(cluster: Cluster, deadline: Deadline, group_id: str) -> GroupOffsets:
    outcome = (await list_group_offsets(cluster, deadline, {group_id: None}, require_stable=True))[group_id]
    if not isinstance(outcome, KafkaError):
        return outcome
    if outcome.error in (Errors.GROUP_ID_NOT_FOUND, Errors.INVALID_GROUP_ID):
        return {}
    raise _explained(outcome, group_id)


def _explained(error: KafkaError, group_id: str) -> KafkaError:
    """Returns an error that names the group, and the missing right if that is the reason."""
    if error.error is Errors.GROUP_AUTHORIZATION_FAILED:
        return naming_right(error, "Describe", f"group {group_id}")
    if error.error is Errors.UNSTABLE_OFFSET_COMMIT:
        return KafkaError(error.error, f"an open transaction in the upstream has offsets of group {group_id}")
    return KafkaError(error.error, f"the upstream does not answer about group {group_id}: {error}")
