# SPDX-License-Identifier: Apache-2.0
"""The screen of `kcoord groups watch` at a terminal: the group, its members, and the latest events."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Final

from rich.console import Group, RenderableType
from rich.text import Text

from kcoord.cli.group_insight import GroupInsight, cause_of, partitions_text, summary_of
from kcoord.cli.table import format_time
from kcoord.cli.terminal import make_table
from kcoord.client.admin.model import ConsumerGroupDescription, MemberDescription
from kcoord.client.types import TopicPartition

MOST_EVENTS: Final = 12
_TITLES: Final = ("MEMBER", "INSTANCE", "CLIENT", "EPOCH", "OWNS", "HAS TO GIVE UP", "WAITS FOR")


class GroupScreen:
    """Collects successive descriptions of a group. `show` draws the latest one."""

    def __init__(self, group_id: str) -> None:
        self._group_id = group_id
        self._group: ConsumerGroupDescription | None = None
        self._rebalance = ""
        self._events: deque[tuple[int, GroupInsight]] = deque(maxlen=MOST_EVENTS)

    def look(self, group: ConsumerGroupDescription | None, findings: list[GroupInsight], now_ms: int) -> None:
        """Adds a description. `findings` has the changes since the previous one."""
        if self._group is not None and group is not None:
            causes = [cause for cause in cause_of(self._group, group) if cause.startswith("because")]
            if causes:
                self._rebalance = f"{format_time(now_ms)}, {causes[0]}"
        self._group = group
        self._events.extend((now_ms, finding) for finding in findings)

    def show(self, now_ms: int) -> RenderableType:
        return Group(*self._parts(now_ms))

    def _parts(self, now_ms: int) -> Iterator[RenderableType]:
        group = self._group
        state = "does not exist" if group is None else summary_of(group)
        yield Text.assemble((self._group_id, "bold"), "  ", state, (f"  {format_time(now_ms)}", "dim"))
        if self._rebalance:
            yield Text(f"last rebalance: {self._rebalance}")
        if group is not None and group.members:
            yield make_table(_TITLES, _rows(group))
        for time_ms, finding in self._events:
            yield Text.assemble((f"{format_time(time_ms)}  ", "dim"), f"{finding.subject:<7}  {finding.text}")


def _rows(group: ConsumerGroupDescription) -> Iterator[tuple[object, ...]]:
    owners = {partition: member for member in group.members for partition in member.assignment}
    for member in sorted(group.members, key=lambda member: (member.client_id, member.member_id)):
        target = member.assignment if member.target_assignment is None else member.target_assignment
        yield (
            member.member_id,
            member.group_instance_id,
            f"{member.client_id} {member.host}",
            member.member_epoch,
            partitions_text(member.assignment),
            partitions_text(member.assignment - target),
            _waits_for(target - member.assignment, owners),
        )


def _waits_for(missing: frozenset[TopicPartition], owners: dict[TopicPartition, MemberDescription]) -> str:
    held = {partition for partition in missing if partition in owners}
    if not held:
        return partitions_text(missing)
    holders = ", ".join(sorted({owners[partition].client_id for partition in held}))
    return f"{partitions_text(missing)} from {holders}"
