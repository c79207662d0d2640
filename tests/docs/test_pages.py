# SPDX-License-Identifier: Apache-2.0
"""The shell sessions of all pages print what the pages show.

`KCOORD_REWRITE=1` plays the pages and writes into them what the commands print. Read it as a reviewer would: the run
compares nothing.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.docs.terminal import Command, Terminal, blocks_of, commands_of, matches
from tests.support.ports import free_ports
from tests.support.shared import ROOT

DOCS = ROOT / "docs"
PAGES = [path for path in (ROOT / "README.md", *sorted(DOCS.rglob("*.md"))) if "\n```console" in path.read_text()]
IS_REWRITING = "KCOORD_REWRITE" in os.environ

# The pages use the default address, `make run` and a checkout. Here the broker listens on a free port, and the
# environment is that of the tests.
FUNCTIONS = """\
kcoord() {{
  set -- "${{@//:9092/:{port}}}"
  set -- "${{@//:9093/:{second_port}}}"
  case "$1" in
    serve)
      grep -qs ^listeners= "$2" || set -- "$@" --override listeners=PLAINTEXT://127.0.0.1:{port}
      command kcoord "$@" --override log.dirs=kcoord-data ;;
    log | storage | completion | --version) command kcoord "$@" ;;
    *)
      [[ " $* " == *" --bootstrap-server "* ]] || set -- "$@" --bootstrap-server 127.0.0.1:{port}
      command kcoord "$@" ;;
  esac
}}
make() {{
  test "$*" = run && exec kcoord serve --override listeners=PLAINTEXT://127.0.0.1:{port} --override log.dirs=kcoord-data
}}
.venv/bin/kcoord() {{
  kcoord "$@"
}}
.venv/bin/python() {{
  python "$@" 127.0.0.1:{port}
}}
"""
PORTS = 3
"""The number of ports in a row that a page uses: 9092 and those that follow."""


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_page(path: Path, tmp_path: Path) -> None:
    port = free_ports(PORTS)
    functions = tmp_path / ".functions"
    functions.write_text(FUNCTIONS.format(port=port, second_port=port + 1))
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "server.properties").touch()
    environment = {
        **{name: text for name, text in os.environ.items() if not name.startswith(("KCOORD_", "PYTEST_"))},
        "BASH_ENV": str(functions),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "NO_COLOR": "1",
        "COLUMNS": "200",
    }
    addresses = {f":{port + offset}": f":{9092 + offset}" for offset in range(PORTS)}
    page = path.read_text()
    blocks = blocks_of(page)
    last_sessions = {block.title: block for block in blocks if block.language == "console"}
    terminals: dict[str, Terminal] = {}
    try:
        for block in blocks:
            if block.language == "console":
                if block.title not in terminals:
                    terminals[block.title] = Terminal(tmp_path, block.title, environment, addresses)
                *commands, last = commands_of(block.text)
                session = [play(terminals[block.title], command) for command in commands]
                session.append(play(terminals[block.title], last, last_sessions[block.title] is block))
                page = page.replace(block.text, "".join(session))
            elif block.title:
                text = block.text
                for real, shown in addresses.items():
                    text = text.replace(shown, real)
                (tmp_path / block.title).write_text(text)
    finally:
        for terminal in terminals.values():
            terminal.close()
        if IS_REWRITING:
            path.write_text(page)


def play(terminal: Terminal, command: Command, may_keep_running: bool = False) -> str:
    """Runs the command. Returns it with its output, as a page shows it."""
    if IS_REWRITING and not may_keep_running:
        printed = terminal.run(Command(command.text, ["..."]))
        if not matches(command.output, printed):
            return f"$ {command.text}\n{printed}"
    else:
        terminal.run(command, may_keep_running)
    return "".join(f"{line}\n" for line in (f"$ {command.text}", *command.output))


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
        (["after 12 ms at 2026-11-21T05:24:54.397Z"], "after 8 ms at 2027-01-02T03:04:05.006Z\n", True),
        (["after 12 s"], "after 8 s\n", False),
        (["id Y03toMF1SKaSzKqPCF5Vwg"], "id -x_toMF1SKaSzKqPCF5Vwg\n", True),
    ],
)
def test_matches(shown: list[str], output: str, is_equal: bool) -> None:
    assert matches(shown, output) is is_equal
