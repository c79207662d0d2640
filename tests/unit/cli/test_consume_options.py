# SPDX-License-Identifier: Apache-2.0
"""The option combinations of `kcoord consume`, and the lines that it prints."""

from __future__ import annotations

import json

import pytest

from kcoord.cli.consume import find_problem, make_parser, record_line
from kcoord.client.types import ConsumerRecord
from kcoord_protocol.batch_header import TimestampType

RECORD = ConsumerRecord("t", 1, 7, 5, TimestampType.CREATE_TIME, None, b"\xffv", [("h", b"x"), ("n", None)])


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["t", "u", "--from-beginning"], None),
        (["t", "--group", "g"], None),
        (["--topic", "t", "--group", "g"], None),
        (["--partition", "0", "--topic", "t", "u"], "goes with one TOPIC"),
        (["--include", "a.*", "--group", "g"], None),
        (["--include", "a.*", "--command-config", "f"], None),
        (["t", "--partition", "0", "--offset", "5"], None),
        ([], "is needed"),
        (["t", "--include", "a", "--group", "g"], "not both"),
        (["--include", "a"], "needs --group"),
        (["t", "u", "--partition", "0"], "goes with one TOPIC"),
        (["t", "--group", "g", "--partition", "0"], "goes with one TOPIC"),
        (["t", "--offset", "5"], "goes with --partition"),
        (["t", "--partition", "0", "--offset", "middle"], "is not earliest, latest or a number"),
        (["t", "--partition", "0", "--offset", "9" * 5000], f"or a number from 0 to {2**63 - 1}"),
        (["t", "--partition", "0", "--offset", str(2**63)], f"or a number from 0 to {2**63 - 1}"),
    ],
)
def test_options(arguments: list[str], problem: str | None) -> None:
    error = find_problem(make_parser().parse_args(arguments))
    assert (error is None) if problem is None else (problem in (error or ""))


@pytest.mark.parametrize("option", ["--max-messages", "--idle-timeout", "--partition"])
def test_negative_numbers(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        make_parser().parse_args(["t", option, "-1"])
    assert f"argument {option}: '-1' is not a whole number from 0" in capsys.readouterr().err


def test_lines() -> None:
    assert record_line(RECORD, make_parser().parse_args(["t"])) == "\\xffv"
    assert record_line(RECORD, make_parser().parse_args(["t", "--key-separator", "="])) == "null=\\xffv"
    assert json.loads(record_line(RECORD, make_parser().parse_args(["t", "--json"]))) == {
        "topic": "t",
        "partition": 1,
        "offset": 7,
        "timestamp_ms": 5,
        "key": None,
        "value": "\\xffv",
        "headers": {"h": "x", "n": None},
    }
