# SPDX-License-Identifier: Apache-2.0
"""Tables at a terminal and in a pipe. The start of a broker imports neither rich nor shtab."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest
from rich.console import Console, RenderableType

from kcoord.cli import terminal
from kcoord.cli.group_insight import changes
from kcoord.cli.group_screen import GroupScreen
from kcoord.client.admin.model import ConsumerGroupDescription, MemberDescription
from kcoord.client.types import Node, TopicPartition

T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)


def drawn(what: RenderableType, width: int = 100) -> str:
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=False).print(what)
    return out.getvalue()


def test_a_long_cell_is_wrapped() -> None:
    text = "[bold]" + "x" * 50
    lines = drawn(terminal.make_table(["NAME", "COUNT"], [[text, 7]]), width=30)
    assert "…" not in lines
    assert lines.count("x") == 50
    assert "[bold]" in lines, "brackets are no markup"


def test_a_pipe_gets_plain_columns(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.print_table(["NAME", "COUNT"], [["a", 1], [None, 10]])
    assert capsys.readouterr().out == "NAME  COUNT\na         1\n-        10\n"


def test_a_terminal_gets_a_drawn_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(terminal, "is_terminal", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    terminal.print_table(["NAME", "COUNT"], [["a", 1]])
    assert "─" in capsys.readouterr().out


@pytest.mark.parametrize(("width", "is_drawn"), [(100, True), (80, False)])
def test_a_terminal_that_is_too_narrow_gets_plain_columns(
    width: int, is_drawn: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The ids of members and the titles stay whole. Longer cells are wrapped in a drawn table."""
    monkeypatch.setattr(terminal, "is_terminal", lambda: True)
    monkeypatch.setenv("COLUMNS", str(width))
    member_id = "e9bcaa11-de82-4e9f-b10d-ba17737b10f4"
    terminal.print_table(["CONSUMER-ID", "LOG-END-OFFSET", "ASSIGNMENT"], [[member_id, 1, "t:0," + "1" * 60]])
    out = capsys.readouterr().out
    assert ("─" in out) is is_drawn
    assert member_id in out
    assert "LOG-END-OFFSET" in out


def member(name: str, owned: set[TopicPartition], target: set[TopicPartition]) -> MemberDescription:
    return MemberDescription(
        f"{name}-id", None, name, "/1", frozenset(owned), member_epoch=3, target_assignment=frozenset(target)
    )


def group(epoch: int, *members: MemberDescription) -> ConsumerGroupDescription:
    return ConsumerGroupDescription(
        "g", "Consumer", "Stable", "consumer", "uniform", list(members), Node(1, "h", 1), epoch, epoch
    )


def test_the_screen_shows_what_members_have_to_revoke_and_why() -> None:
    screen = GroupScreen("g")
    screen.look(None, [], 0)
    assert "does not exist" in drawn(screen.show(0))
    before = group(2, member("a", {T0, T1}, {T0, T1}))
    screen.look(before, list(changes(None, before)), 1000)
    assert "last rebalance" not in drawn(screen.show(1000))
    after = group(3, member("a", {T0, T1}, {T0}), member("b", set(), {T1}))
    screen.look(after, list(changes(before, after)), 2000)
    text = drawn(screen.show(2000), width=160)
    assert "last rebalance: 1970-01-01T00:00:02.000Z, because members joined" in text
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line.startswith((" a-id", " b-id"))}
    assert rows["a-id"][-3:] == ["t:0,1", "t:1", "-"]
    assert rows["b-id"][-5:] == ["-", "-", "t:1", "from", "a"]
    screen.look(after, [], 3000)
    assert "because members joined" in drawn(screen.show(3000), width=160), "until the next one"


def test_a_start_of_a_broker_imports_neither_rich_nor_shtab() -> None:
    """Together these imports take a third of the limit for a start."""
    code = "import sys, kcoord.cli, kcoord.cli.serve, kcoord.server.process; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "kcoord.server.process" in loaded
    assert not {"rich", "shtab", "click", "http.server", "kcoord.testing", "kcoord.client"} & set(loaded)
