# SPDX-License-Identifier: Apache-2.0
"""The records that `kcoord produce` parses from lines."""

from __future__ import annotations

import pytest

from kcoord.cli import main
from kcoord.cli.produce import InputRecord, NotARecord, config_of, find_problem, make_parser, parse_line


@pytest.mark.parametrize(
    ("arguments", "line", "record"),
    [
        ([], b"a:b", InputRecord(b"a:b")),
        ([], b"", InputRecord(b"")),
        (["--key-separator", ":"], b"a:b:c", InputRecord(b"b:c", b"a")),
        (["--key-separator", "=>", "--null-marker", "NULL"], b"a=>NULL", InputRecord(None, b"a")),
        (["--null-marker", "NULL"], b"NULL", InputRecord(None)),
        (["--json"], b'{"value": "v", "key": "k"}', InputRecord(b"v", b"k")),
        (["--json"], b'{"value": {"a": 1}, "partition": 2}', InputRecord(b'{"a": 1}', partition=2)),
        (["--json"], b'{"headers": {"h": "x", "n": null}}', InputRecord(None, None, (("h", b"x"), ("n", None)))),
        (["--json"], b'{"topic": "t", "offset": 3, "value": "v"}', InputRecord(b"v")),
        (["--json"], b'{"timestamp_ms": 5}', InputRecord(None, timestamp_ms=5)),
    ],
)
def test_lines(arguments: list[str], line: bytes, record: InputRecord) -> None:
    assert parse_line(line, make_parser().parse_args(["topic", *arguments])) == record


@pytest.mark.parametrize(
    ("arguments", "line", "problem"),
    [
        (["--key-separator", ":"], b"ab", "no ':' between key and value"),
        (["--json"], b"x", "not valid JSON"),
        (["--json"], b"[" * 50_000, "not valid JSON"),
        (["--json"], b"[1]", "not a JSON object"),
        (["--json"], b'{"x": 1}', "x: unknown field"),
        (["--json"], b'{"headers": 1}', "headers: not an object"),
        (["--json"], b'{"partition": "1"}', "partition: not an integer from 0 to 2147483647"),
        (["--json"], b'{"partition": true}', "partition: not an integer from 0 to"),
        (["--json"], b'{"partition": 2147483648}', "partition: not an integer from 0 to 2147483647"),
        (["--json"], b'{"timestamp_ms": 9223372036854775808}', f"timestamp_ms: not an integer from 0 to {2**63 - 1}"),
        (["--json"], b'{"value": "\\ud800"}', "value: a surrogate without its other half"),
        (["--json"], b'{"headers": {"\\ud800": "v"}}', "headers: a surrogate without its other half"),
    ],
)
def test_malformed_lines(arguments: list[str], line: bytes, problem: str) -> None:
    with pytest.raises(NotARecord, match=problem):
        parse_line(line, make_parser().parse_args(["topic", *arguments]))


def test_json_lines_do_not_go_with_separator_and_marker() -> None:
    with pytest.raises(SystemExit):
        main(["produce", "topic", "--json", "--key-separator", ":"])


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["t"], None),
        (["--topic", "t", "--json"], None),
        (["t", "--topic", "u"], "one TOPIC is needed"),
        ([], "one TOPIC is needed"),
        (["t", "--key-separator", ""], "--key-separator must not be empty"),
        (["t", "--json", "--null-marker", "-"], "cannot be used with --json"),
    ],
)
def test_options(arguments: list[str], problem: str | None) -> None:
    error = find_problem(make_parser().parse_args(arguments))
    assert (error is None) if problem is None else (problem in (error or ""))


@pytest.mark.parametrize(("arguments", "most_ms"), [([], 30_000), (["--timeout", "90000"], 90_000)])
def test_the_timeout_bounds_the_wait_for_metadata(arguments: list[str], most_ms: int) -> None:
    assert config_of(make_parser().parse_args(["t", *arguments])).max_block_ms == most_ms
