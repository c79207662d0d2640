# SPDX-License-Identifier: Apache-2.0
"""Runs `kcoord` commands, and parses the tables that kcoord and Kafka's tools print."""

from __future__ import annotations

import contextlib
import io
import json
import re
from typing import NamedTuple
from unittest import mock

from kcoord.cli import main

_NODE_ID = re.compile(r"\s+\((\w+)\)")


class Output(NamedTuple):
    """The exit code and the output of a command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> list[dict[str, object]]:
        decoded = json.loads(self.out)
        assert isinstance(decoded, list)
        return decoded


class CommandLine:
    """Runs commands for one broker, in this process."""

    def __init__(self, address: str) -> None:
        self.address = address

    def run(self, command: str, *arguments: str, stdin: str = "") -> Output:
        out, err = io.StringIO(), io.StringIO()
        source = io.TextIOWrapper(io.BytesIO(stdin.encode()))
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), mock.patch("sys.stdin", source):
            code = main([command, *arguments, "--bootstrap-server", self.address])
        return Output(code, out.getvalue(), err.getvalue())

    def succeed(self, command: str, *arguments: str, stdin: str = "") -> Output:
        output = self.run(command, *arguments, stdin=stdin)
        assert output.code == 0, output
        return output


def titles(text: str, first: str) -> list[str]:
    """Returns the titles of the first table whose first column is `first`."""
    lines = (_words(line) for line in text.splitlines())
    return next(words for words in lines if words[:1] == [first])


def rows(text: str, first: str = "GROUP") -> list[dict[str, str]]:
    """Returns the sorted rows of all tables whose first column is `first`."""
    table_rows: list[dict[str, str]] = []
    columns: list[str] = []
    for line in text.splitlines():
        words = _words(line)
        if words[:1] == [first]:
            columns = words
        elif words and len(words) == len(columns):
            table_rows.append(dict(zip(columns, words, strict=True)))
        else:
            columns = []
    return sorted(table_rows, key=lambda row: list(row.values()))


def _words(line: str) -> list[str]:
    """Splits a line into cells. Only a node's id in brackets is separated by a space within its cell."""
    return _NODE_ID.sub(r"(\1)", line).split()
