# SPDX-License-Identifier: Apache-2.0
"""The option combinations of `kcoord consumer-groups`, and the values that they parse to."""

from __future__ import annotations

import pytest

from kcoord.cli import main
from kcoord.cli.consumer_groups import find_problem, make_parser
from kcoord.cli.group_filters import states_of, types_of
from kcoord.cli.group_offsets import reset_of
from kcoord.cli.offset_reset import Reset, Target

GROUP = ["--group", "g"]
RESET = ["--reset-offsets", *GROUP, "--topic", "t"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--list"],
        ["--list", "--state"],
        ["--list", "--state", "stable, Empty", "--type", "generic"],
        ["--describe", *GROUP],
        ["--describe", *GROUP, "--group", "h", "--members", "--verbose"],
        ["--describe", "--all-groups", "--state"],
        ["--describe", "--all-groups", "--type"],
        ["--delete", *GROUP],
        ["--delete", "--all-groups"],
        ["--delete-offsets", *GROUP, "--topic", "t:0,1", "--topic", "u"],
        [*RESET, "--to-earliest"],
        [*RESET, "--to-offset", "0", "--execute"],
        [*RESET, "--shift-by", "-5", "--dry-run"],
        [*RESET, "--shift-by", "0", "--export"],
        [*RESET, "--by-duration", "P1D"],
        [*RESET, "--to-start-time"],
        ["--reset-offsets", "--all-groups", "--all-topics", "--to-datetime", "2026-01-31T12:00:00.000"],
        ["--reset-offsets", *GROUP, "--from-file", "plan.csv"],
        ["--validate-regex", "a.*"],
        ["--verify-regex", "a.*"],
        ["--describe", "--validate-regex", "a.*"],
    ],
)
def test_valid_combinations(arguments: list[str]) -> None:
    assert find_problem(make_parser().parse_args(arguments)) is None


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "exactly one action"),
        (["--list", "--describe"], "exactly one action"),
        (["--list", *GROUP], "--group does not go with --list"),
        (["--list", "--state", "Happy"], "unknown state Happy"),
        (["--list", "--type", "odd"], "unknown type odd"),
        (["--describe"], "--group or --all-groups"),
        (["--describe", *GROUP, "--all-groups"], "not both"),
        (["--describe", *GROUP, "--state", "--members"], "at most one of"),
        (["--describe", *GROUP, "--state", "Stable"], "with --list only"),
        (["--describe", *GROUP, "--execute"], "--execute does not go with --describe"),
        (["--delete"], "--group or --all-groups"),
        (["--delete-offsets", *GROUP], "at least one --topic"),
        (["--delete-offsets", *GROUP, "--group", "h", "--topic", "t"], "needs one --group"),
        (["--delete-offsets", *GROUP, "--topic", "t:x"], "is not a partition"),
        (RESET, "exactly one of --to-earliest"),
        ([*RESET, "--to-earliest", "--to-offset", "0"], "exactly one of"),
        ([*RESET, "--to-latest", "--all-topics"], "not both"),
        ([*RESET, "--to-latest", "--dry-run", "--execute"], "not both"),
        ([*RESET, "--to-latest", "--json", "--export"], "not both"),
        ([*RESET, "--from-file", "plan.csv"], "names the topics itself"),
        ([*RESET, "--to-datetime", "noon"], "is not a time"),
        ([*RESET, "--by-duration", "P1Y"], "is not a duration"),
        (["--reset-offsets", *GROUP, "--to-latest"], "--topic or --all-topics"),
    ],
)
def test_invalid_combinations(arguments: list[str], problem: str) -> None:
    error = find_problem(make_parser().parse_args(arguments))
    assert error is not None
    assert problem in error


def test_states_and_types_in_any_case() -> None:
    options = make_parser().parse_args(["--list", "--state", "stable,PREPARINGREBALANCE", "--type", "generic,consumer"])
    assert states_of(options) == ["Stable", "PreparingRebalance"]
    assert types_of(options) == ["Classic", "Consumer"]


@pytest.mark.parametrize(
    ("arguments", "reset"),
    [
        (["--to-earliest"], Reset(Target.EARLIEST)),
        (["--to-latest"], Reset(Target.LATEST)),
        (["--to-current"], Reset(Target.CURRENT)),
        (["--to-offset", "0"], Reset(Target.OFFSET, 0)),
        (["--shift-by", "-2"], Reset(Target.SHIFT, -2)),
        (["--to-datetime", "1970-01-01T00:00:02.000"], Reset(Target.TIME, 2000)),
        (["--by-duration", "PT1S"], Reset(Target.TIME, 4000)),
        (["--by-duration", "P1D"], Reset(Target.TIME, 0)),
    ],
)
def test_targets(arguments: list[str], reset: Reset) -> None:
    assert reset_of(make_parser().parse_args([*RESET, *arguments]), now_ms=5000) == reset


def test_a_wrong_command_line_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as failed:
        main(["consumer-groups", "--list", "--describe"])
    assert failed.value.code == 2
    assert "exactly one action is needed" in capsys.readouterr().err


def test_regular_expressions_need_no_broker(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["consumer-groups", "--validate-regex", "a.*b"]) == 0
    assert main(["consumer-groups", "--validate-regex", "a(b"]) == 1
    valid, invalid = capsys.readouterr().out.splitlines()
    assert valid == "The regular expression `a.*b` is valid."
    assert "a(b" in invalid
