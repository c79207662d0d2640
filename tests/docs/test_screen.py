# SPDX-License-Identifier: Apache-2.0
"""The screen of `kcoord groups watch` on the page of the command line is what the command draws."""

from __future__ import annotations

import io

from rich.console import Console

from kcoord.cli.group_insight import changes
from kcoord.cli.group_screen import GroupScreen
from kcoord.client.admin.model import ConsumerGroupDescription, MemberDescription
from kcoord.client.types import Node, TopicPartition
from tests.docs.terminal import blocks_of
from tests.support.shared import ROOT

PAGE = ROOT / "docs" / "command-line.md"
FIRST, SECOND = "b663d858-9bc9-49ac-9af1-b87de5489b43", "1e5b3dae-888f-406b-987f-5c921764e203"
BEGIN_MS = 1795422695213
P0, P1, P2 = (TopicPartition("orders", number) for number in range(3))


def member(member_id: str, epoch: int, owned: set[TopicPartition], target: set[TopicPartition]) -> MemberDescription:
    return MemberDescription(
        member_id,
        None,
        "kcoord-cli",
        "/127.0.0.1",
        frozenset(owned),
        member_epoch=epoch,
        target_assignment=frozenset(target),
    )


def group(state: str, epoch: int, *members: MemberDescription) -> ConsumerGroupDescription:
    coordinator = Node(1, "127.0.0.1", 9092)
    return ConsumerGroupDescription(
        "demo", "Consumer", state, "consumer", "uniform", list(members), coordinator, epoch, epoch
    )


def test_screen() -> None:
    (block,) = (block for block in blocks_of(PAGE.read_text()) if block.language == "screen")
    screen = GroupScreen("demo")
    seen = None
    for milliseconds, group_seen in (
        (0, group("Stable", 2, member(FIRST, 2, {P0, P1, P2}, {P0, P1, P2}))),
        (2600, group("Reconciling", 3, member(FIRST, 2, {P0, P1, P2}, {P0, P1}), member(SECOND, 3, set(), {P2}))),
    ):
        screen.look(group_seen, list(changes(seen, group_seen)), BEGIN_MS + milliseconds)
        seen = group_seen
    out = io.StringIO()
    Console(file=out, width=150, force_terminal=False).print(screen.show(BEGIN_MS + 2800))
    assert [line.rstrip() for line in out.getvalue().splitlines()] == block.text.splitlines()
