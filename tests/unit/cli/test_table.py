# SPDX-License-Identifier: Apache-2.0
"""The format of tables and times."""

from __future__ import annotations

import pytest

from kcoord.cli.table import format_table, format_time, parse_time

NOW_MS = 1_795_000_000_000


def test_numbers_are_right_aligned_and_text_left_aligned() -> None:
    table = format_table(("NAME", "COUNT"), [("a", 5), ("longer", 1234), ("none", None)])
    assert table.splitlines() == ["NAME    COUNT", "a           5", "longer   1234", "none        -"]


def test_a_table_without_rows_is_its_titles() -> None:
    assert format_table(("NAME", "COUNT"), []) == "NAME  COUNT"


def test_a_cell_has_no_control_characters() -> None:
    """Clients choose names and metadata of offsets. The sample of Kafka's log has metadata of one zero byte."""
    table = format_table(("METADATA",), [("\0",), ("a\nb",), ("\x1b[2J",), ("größer, ß",), ("\ud800",)])
    assert table.split("\n") == ["METADATA", r"\x00", r"a\nb", r"\x1b[2J", "größer, ß", r"\ud800"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1795000000123", 1_795_000_000_123),
        ("2026-11-18T10:26:40Z", 1_794_997_600_000),
        ("2026-11-18T10:26:40", 1_794_997_600_000),
        ("2026-11-18T11:26:40+01:00", 1_794_997_600_000),
        ("15m", NOW_MS - 900_000),
        ("2h", NOW_MS - 7_200_000),
        ("3d", NOW_MS - 3 * 86_400_000),
        ("40s", NOW_MS - 40_000),
    ],
)
def test_times(text: str, expected: int) -> None:
    assert parse_time(text, NOW_MS) == expected


def test_a_malformed_time_is_an_error() -> None:
    with pytest.raises(ValueError, match="yesterday"):
        parse_time("yesterday", NOW_MS)


def test_times_are_printed_in_utc() -> None:
    assert format_time(1_794_997_600_123) == "2026-11-18T10:26:40.123Z"
    assert format_time(-1) == "-"
    assert format_time(2**62) == str(2**62)
