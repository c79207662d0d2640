# SPDX-License-Identifier: Apache-2.0
"""The option combinations of `kcoord users`."""

from __future__ import annotations

import pytest

from kcoord.cli import users

ALICE = ["--user", "alice"]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["list"], None),
        (["list", "--json"], None),
        (["describe", *ALICE], None),
        (["add", *ALICE], None),
        (["add", *ALICE, "--mechanism", "SCRAM-SHA-256", "--iterations", "16384", "--password-file", "-"], None),
        (["alter", *ALICE, "--iterations", "4096"], None),
        (["delete", *ALICE], None),
        (["delete", *ALICE, "--mechanism", "SCRAM-SHA-512"], None),
        (["list", *ALICE], "list shows all users"),
        (["describe"], "describe needs --user"),
        (["add", "--user", ""], "add needs --user"),
        (["delete"], "delete needs --user"),
        (["describe", *ALICE, "--mechanism", "SCRAM-SHA-512"], "--mechanism does not go with describe"),
        (["delete", *ALICE, "--iterations", "5000"], "go with add and alter"),
        (["list", "--password-file", "f"], "go with add and alter"),
        (["add", *ALICE, "--iterations", "4095"], "4095 is not between 4096 and 16384"),
        (["alter", *ALICE, "--iterations", "16385"], "16385 is not between 4096 and 16384"),
    ],
)
def test_options(arguments: list[str], problem: str | None) -> None:
    actual = users.find_problem(users.make_parser().parse_args(arguments))
    assert (actual is None) if problem is None else (problem in (actual or ""))
