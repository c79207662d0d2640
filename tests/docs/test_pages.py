# SPDX-License-Identifier: Apache-2.0
"""The tutorials and guides do what they show."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest

from tests.docs.terminal import Command, Terminal, blocks_of, commands_of, matches
from tests.support.shared import ROOT

DOCS = ROOT / "docs"
PAGES = sorted(path for folder in ("tutorials", "guides") for path in (DOCS / folder).glob("*.md"))

# The pages use the default address and `make run`. Here the broker listens on a free port.
FUNCTIONS = """\
kcoord() {{
  case "$1" in
    serve | log | --version) command kcoord "$@" ;;
    *) command kcoord "$@" --bootstrap-server 127.0.0.1:{port} ;;
  esac
}}
make() {{
  test "$*" = run && exec kcoord serve --override listeners=PLAINTEXT://127.0.0.1:{port} --override log.dirs=kcoord-data
}}
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_page(path: Path, tmp_path: Path) -> None:
    port = free_port()
    functions = tmp_path / ".functions"
    functions.write_text(FUNCTIONS.format(port=port))
    environment = {
        **{name: text for name, text in os.environ.items() if not name.startswith(("KCOORD_", "PYTEST_"))},
        "BASH_ENV": str(functions),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "NO_COLOR": "1",
        "COLUMNS": "200",
    }
    blocks = blocks_of(path.read_text())
    last_sessions = {block.title: block for block in blocks if block.language == "console"}
    terminals: dict[str, Terminal] = {}
    try:
        for block in blocks:
            if block.language == "console":
                if block.title not in terminals:
                    terminals[block.title] = Terminal(tmp_path, block.title, environment, {f":{port}": ":9092"})
                *commands, last = commands_of(block.text)
                for command in commands:
                    terminals[block.title].run(command)
                terminals[block.title].run(last, may_keep_running=last_sessions[block.title] is block)
            elif block.title:
                (tmp_path / block.title).write_text(block.text.replace(":9092", f":{port}"))
    finally:
        for terminal in terminals.values():
            terminal.close()


def test_there_are_pages() -> None:
    assert len(PAGES) >= 3


def test_a_page_that_shows_something_else_fails(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path, "", dict(os.environ), {})
    try:
        terminal.run(Command("echo 1  2", ["1 2"]))
        with pytest.raises(AssertionError, match="echo 3"):
            terminal.run(Command("echo 3", ["4"]))
    finally:
        terminal.close()


@pytest.mark.parametrize(
    ("shown", "output", "is_equal"),
    [
        (["a", "...", "d"], "a\nb\nc\nd\n", True),
        (["a ... c"], "a b b c\n", True),
        (["a"], "a\nb\n", False),
        ([], "a\n", False),
        ([], "", True),
        (["a.c"], "abc\n", False),
    ],
)
def test_matches(shown: list[str], output: str, is_equal: bool) -> None:
    assert matches(shown, output) is is_equal
