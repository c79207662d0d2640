# SPDX-License-Identifier: Apache-2.0
"""Planted faults in the computation of targets by client-side assignors; see `planted`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Final

from kcoord.coordinator.group import records
from kcoord.coordinator.group.consumer import client_computation
from kcoord.coordinator.group.consumer.assignment import ComputedTarget, TargetInput, install, target_input
from kcoord.coordinator.group.consumer.client_assignors import AskedMember, ClientComputation, select
from kcoord.coordinator.group.consumer.group import NO_METADATA, ConsumerGroup
from kcoord.coordinator.group.counters import GroupCounters
from kcoord.runtime.result import CoordinatorResult, OperationContext
from kcoord_protocol.messages import ConsumerGroupInstallAssignmentRequest, ConsumerGroupPrepareAssignmentRequest


class _Kept(set[str]):
    """A set that cannot be emptied."""

    def clear(self) -> None:
        """Does nothing."""


def _nothing(*arguments: object) -> None:
    """Does nothing."""


def _found_for_everyone(
    group: ConsumerGroup, request: ConsumerGroupPrepareAssignmentRequest | ConsumerGroupInstallAssignmentRequest
) -> AskedMember | None:
    """Treats every member as the one that is asked."""
    asked = _find_asked(group, request)
    computation = group.client_computation
    return computation.asked if computation is not None else asked


def _judges_the_present(
    group: ConsumerGroup,
    context: OperationContext,
    request: ConsumerGroupInstallAssignmentRequest,
    counters: GroupCounters,
    max_bytes: int,
) -> CoordinatorResult[object]:
    """Checks an assignment against the group as it is now."""
    asked = _find_asked(group, request)
    if asked is not None and isinstance(asked.snapshot, TargetInput) and select(group.offers()) is not None:
        former = asked.snapshot
        asked.snapshot = target_input(group, former.group_epoch, former.assignor, former.image)
    return _begin_install(group, context, request, counters, max_bytes)


def _takes_every_epoch(
    group: ConsumerGroup,
    context: OperationContext,
    request: ConsumerGroupInstallAssignmentRequest,
    counters: GroupCounters,
    max_bytes: int,
) -> CoordinatorResult[object]:
    """Ignores the group epoch that an assignment was computed for."""
    asked = _find_asked(group, request)
    if asked is not None and isinstance(asked.snapshot, TargetInput):
        request = copy(request)
        request.group_epoch = asked.snapshot.group_epoch
    return _begin_install(group, context, request, counters, max_bytes)


def _installs_for_all(group: ConsumerGroup, computed: ComputedTarget, now_ms: int) -> CoordinatorResult[None]:
    """Writes the targets of members that have left during the computation, too."""
    result = install(group, computed, now_ms)
    if result.records:
        result.records += [
            records.new_target_assignment_record(group.group_id, member_id, target, NO_METADATA)
            for member_id, target in computed.changed.items()
            if member_id not in group.members
        ]
    return result


def _never_empties_failed(group_epoch: int) -> ClientComputation:
    """Remembers the members that have failed after the end of a round."""
    return ClientComputation(group_epoch, failed=_Kept())


_find_asked = client_computation._find_asked
_begin_install = client_computation.begin_install

PATCHES: Final[Mapping[str, Sequence[tuple[object, str, object]]]] = {
    "assignment-checked-by-the-present": [(client_computation, "begin_install", _judges_the_present)],
    "assignment-of-a-member-not-asked": [(client_computation, "_find_asked", _found_for_everyone)],
    "assignment-of-another-epoch": [(client_computation, "begin_install", _takes_every_epoch)],
    "computation-of-a-dead-member": [(ClientComputation, "forget", _nothing)],
    "computation-without-deadline": [(client_computation, "time_is_over", _nothing)],
    "failed-members-are-never-asked-again": [(client_computation, "ClientComputation", _never_empties_failed)],
    "targets-of-members-that-left": [(client_computation, "install", _installs_for_all)],
}
"""The replacements of each fault, as in `planted.Fault`."""
