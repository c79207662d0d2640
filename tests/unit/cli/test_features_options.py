# SPDX-License-Identifier: Apache-2.0
"""The option combinations of `kcoord features`."""

from __future__ import annotations

import pytest

from kcoord.cli import features


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["describe"], None),
        (["describe", "--json"], None),
        (["upgrade", "--feature", "group.version=1", "--feature", "x=-2", "--dry-run"], None),
        (["downgrade", "--unsafe", "--feature", "group.version=0"], None),
        (["disable", "--unsafe", "--feature", "group.version"], None),
        (["describe", "--feature", "group.version"], "changes nothing"),
        (["upgrade"], "You must specify at least one feature to upgrade"),
        (["upgrade", "--feature", "group.version=1", "--json"], "--json goes with describe"),
        (["upgrade", "--feature", "group.version=1", "--unsafe"], "--unsafe does not go with upgrade"),
        (["upgrade", "--feature", "a"], "Can't parse feature=level string a: equals sign not found."),
        (["upgrade", "--feature", "a=x"], "Can't parse feature=level string a=x: unable to parse x as a short."),
        (["upgrade", "--feature", "a=32768"], "unable to parse 32768 as a short."),
        (["upgrade", "--feature", "a=--1"], "unable to parse --1 as a short."),
        (["upgrade", "--feature", "a="], "unable to parse  as a short."),
        (["upgrade", "--feature", "a=1", "--feature", "a=2"], "a feature is named more than once"),
        (["disable", "--feature", "a", "--feature", "a"], "a feature is named more than once"),
    ],
)
def test_options(arguments: list[str], problem: str | None) -> None:
    actual = features.find_problem(features.make_parser().parse_args(arguments))
    assert (actual is None) if problem is None else (problem in (actual or ""))
