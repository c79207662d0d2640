# SPDX-License-Identifier: Apache-2.0
"""The option combinations of `kcoord wait`."""

from __future__ import annotations

import pytest

from kcoord.cli.wait import find_problem, make_parser


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("--for ready", None),
        ("--for ready --group g", None),
        ("--for group-stable --group g --members 2", None),
        ("--for topic --topic t", None),
        ("--for group-stable", "--for group-stable needs --group"),
        ("--for group-stable --group g --members 0", "--members goes with"),
        ("--for ready --members 1", "--members goes with"),
        ("--for topic", "--topic and --for topic go together"),
        ("--for ready --topic t", "--topic and --for topic go together"),
        ("--for topic --topic t --group g", "--group does not go with --for topic"),
    ],
)
def test_options(line: str, problem: str | None) -> None:
    error = find_problem(make_parser().parse_args(line.split()))
    assert (error is None) if problem is None else (problem in (error or ""))


def test_a_condition_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        make_parser().parse_args([])
    assert ended.value.code == 2
    assert "--for" in capsys.readouterr().err


def test_the_help_describes_the_timeout_of_the_whole_wait(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        make_parser().parse_args(["--help"])
    assert "--timeout MS          how long to wait (default 30000 ms)" in capsys.readouterr().out
