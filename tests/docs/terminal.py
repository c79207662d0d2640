# SPDX-License-Identifier: Apache-2.0
"""Plays the shell sessions of a page.

A page is Markdown. Its `console` blocks are sessions: lines that begin with "$ " are commands, the lines below are what
they print. `...` stands for any text; alone in a line it stands for any lines. Runs of blanks are equal to each other.
So are times, durations in ms, UUIDs and ids of 22 characters, because every run prints other ones. Lines of members,
which have UUIDs, may be in another order.
Blocks with the same title run in the same terminal. A block with another language and a title is a file of that name.

A terminal is a bash that reads commands from a pipe. A command has ended when bash prints the marker that follows it.
Only the last command of a terminal may keep running, as a broker does. It is done when it has printed what the page
shows.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

_BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
_MARKER = re.compile(r"^==end of command (\d+)==\n", re.MULTILINE)
_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_VARYING = re.compile(
    rf"{_UUID.pattern}|"
    r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"  # a time
    r"|\b1[5-9]\d{11}\b"  # a time in ms
    r"|\b\d+(?= ms\b)|(?<=\"waited_ms\": )\d+"
    r"|(?<![\w/-])[\w-]{22}(?![\w-])"
)
_MOST_SECONDS = 60.0
_POLL_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page. `title` is "" if it has none."""

    language: str
    title: str
    text: str


@dataclass(frozen=True, slots=True)
class Command:
    """A command of a session, and the lines that the page shows below it."""

    text: str
    output: list[str]


def blocks_of(page: str) -> list[Block]:
    """The fenced blocks of a page in their order."""
    return [Block(language, title, text) for language, title, text in _BLOCK.findall(page)]


def commands_of(session: str) -> Iterator[Command]:
    """The commands of a `console` block."""
    command: Command | None = None
    for line in session.splitlines():
        if line.startswith("$ "):
            if command is not None:
                yield command
            command = Command(line[2:], [])
        else:
            assert command is not None, f"a session begins with a command: {line!r}"
            command.output.append(line)
    if command is not None:
        yield command


def matches(pattern: list[str], output: str) -> bool:
    """Whether `output` is what the page shows."""
    expression = ""
    for line in _normal(pattern):
        if line == "...":
            expression += r"(?:[^\n]*\n)*?"
        else:
            expression += r"[^\n]*".join(re.escape(part) for part in line.split("...")) + r"\n"
    return re.fullmatch(expression, "".join(f"{line}\n" for line in _normal(output.splitlines()))) is not None


def _normal(lines: list[str]) -> list[str]:
    """Returns the lines without the differences that do not count.

    Brokers list members in the order of their UUIDs. So neighbouring lines with UUIDs are sorted.
    """
    normal: list[str] = []
    for has_member, run in groupby(lines, lambda line: _UUID.search(line) is not None):
        texts = [re.sub(r"\s+", " ", _VARYING.sub("#", line)).strip() for line in run]
        normal += sorted(texts) if has_member else texts
    return normal


class Terminal:
    """A bash in a folder. `close` ends it and everything that it has started."""

    def __init__(self, folder: Path, name: str, environment: Mapping[str, str], replaced: Mapping[str, str]) -> None:
        self._replaced = replaced
        self._path = folder / f".{name.replace(' ', '-')}.out"
        with self._path.open("wb") as output:
            self._bash = subprocess.Popen(
                ["bash", "--norc", "--noprofile"],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=dict(environment),
                start_new_session=True,
            )
        self._begin = 0
        self._count = 0

    def run(self, command: Command, may_keep_running: bool = False) -> str:
        """Returns what the command printed.

        Raises AssertionError if that is not what the page shows, or if the command does not end.
        """
        assert self._bash.stdin is not None
        self._begin = self._path.stat().st_size
        self._count += 1
        self._bash.stdin.write(f"{command.text}\necho '==end of command {self._count}=='\n".encode())
        self._bash.stdin.flush()
        deadline = time.monotonic() + _MOST_SECONDS
        while True:
            printed, has_ended = self._printed()
            if (has_ended or may_keep_running) and matches(command.output, printed):
                return printed
            assert not has_ended and time.monotonic() < deadline, f"$ {command.text}\n{printed}"
            time.sleep(_POLL_SECONDS)

    def _printed(self) -> tuple[str, bool]:
        """What the command has printed so far, and whether it has ended."""
        with self._path.open("rb") as file:
            file.seek(self._begin)
            text = file.read().decode()
        for new, old in self._replaced.items():
            text = text.replace(new, old)
        return _MARKER.sub("", text), str(self._count) in _MARKER.findall(text)

    def close(self) -> None:
        os.killpg(self._bash.pid, signal.SIGKILL)
        assert self._bash.stdin is not None
        self._bash.stdin.close()
        self._bash.wait()
