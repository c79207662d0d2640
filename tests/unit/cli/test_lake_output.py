# SPDX-License-Identifier: Apache-2.0
"""The rows that `kcoord lake` prints: which ones, in which order, and whether there are more."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import cast

import pytest
from pyspark.sql import DataFrame

from kcoord.cli.lake import _print

Rows = Sequence[Mapping[str, object]]


class Row(dict[str, object]):
    def asDict(self, *, recursive: bool) -> dict[str, object]:
        return dict(self)


class Frame:
    """The part of a frame of Spark that printing needs."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self.columns = [*rows[0]]

    def unionByName(self, other: Frame) -> Frame:
        return Frame([*self._rows, *other._rows])

    def orderBy(self, *columns: str) -> Frame:
        return Frame(sorted(self._rows, key=lambda row: [str(row[column]) for column in columns]))

    def limit(self, count: int) -> Frame:
        return Frame(self._rows[:count])

    def collect(self) -> list[Row]:
        return [Row(row) for row in self._rows]


def rows(cluster: str, *groups: str) -> DataFrame:
    return cast(DataFrame, Frame([{"cluster": cluster, "group": group} for group in groups]))


def test_json_has_the_first_rows_by_key_and_says_which_tables_have_more(capsys: pytest.CaptureFixture[str]) -> None:
    frames = {"cut": [rows("b", "z"), rows("a", "y", "x")], "whole": [rows("b", "n"), rows("a", "m")]}
    keys = {"cut": ["group"], "whole": ["group"]}
    _print(argparse.Namespace(limit=2, json=True), frames, keys)
    assert json.loads(capsys.readouterr().out) == {
        "cut": [{"cluster": "a", "group": "x"}, {"cluster": "a", "group": "y"}],
        "whole": [{"cluster": "a", "group": "m"}, {"cluster": "b", "group": "n"}],
        "more": ["cut"],
    }


def test_a_table_says_that_there_are_more_rows(capsys: pytest.CaptureFixture[str]) -> None:
    _print(argparse.Namespace(limit=1, json=False), {"cut": [rows("a", "y", "x")]}, {"cut": ["group"]})
    output = capsys.readouterr().out
    assert "\nx\n" in output and "y" not in output and "(more than 1: see --limit)" in output
