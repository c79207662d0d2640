# SPDX-License-Identifier: Apache-2.0
"""The new offsets of `--reset-offsets`, and its arguments and CSV."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcoord.cli.offset_reset import (
    Decision,
    Facts,
    Reset,
    Target,
    decide,
    format_plan,
    parse_age_ms,
    parse_datetime_ms,
    parse_plan,
    parse_topics,
)
from kcoord.client.types import TopicPartition

FACTS = Facts(earliest=5, latest=20, committed=12, at_time=15)
UNKNOWN = Facts(earliest=5, latest=20)


@pytest.mark.parametrize(
    ("reset", "facts", "offset"),
    [
        (Reset(Target.EARLIEST), FACTS, 5),
        (Reset(Target.LATEST), FACTS, 20),
        (Reset(Target.CURRENT), FACTS, 12),
        (Reset(Target.CURRENT), UNKNOWN, 20),
        (Reset(Target.OFFSET, 7), FACTS, 7),
        (Reset(Target.OFFSET, 2), FACTS, 5),
        (Reset(Target.OFFSET, 21), FACTS, 20),
        (Reset(Target.SHIFT, 3), FACTS, 15),
        (Reset(Target.SHIFT, -3), FACTS, 9),
        (Reset(Target.SHIFT, -100), FACTS, 5),
        (Reset(Target.SHIFT, 100), FACTS, 20),
        (Reset(Target.SHIFT, 1), UNKNOWN, None),
        (Reset(Target.TIME, 1000), FACTS, 15),
        (Reset(Target.TIME, 1000), UNKNOWN, 20),
    ],
)
def test_new_offsets(reset: Reset, facts: Facts, offset: int | None) -> None:
    assert decide(reset, facts).offset == offset


def test_an_adjusted_offset_has_a_note() -> None:
    assert decide(Reset(Target.OFFSET, 7), FACTS) == Decision(7)
    assert decide(Reset(Target.OFFSET, 30), FACTS).note == "ends at 20: 30 is after that"
    assert decide(Reset(Target.SHIFT, 1), UNKNOWN).note == "has no committed offset to shift"
    assert decide(Reset(Target.TIME, 1), UNKNOWN).note is not None


@given(
    st.sampled_from([Target.EARLIEST, Target.LATEST, Target.OFFSET, Target.SHIFT, Target.TIME]),
    st.integers(-100, 100),
    st.integers(0, 50),
    st.integers(0, 50),
    st.integers(0, 100),
)
def test_an_offset_is_within_the_partition(
    target: Target, value: int, earliest: int, length: int, committed: int
) -> None:
    latest = earliest + length
    offset = decide(Reset(target, value), Facts(earliest, latest, committed)).offset
    assert offset is not None
    assert earliest <= offset <= latest


def test_topics() -> None:
    assert parse_topics(["a:0,2", "b", "a:1"]) == {"a": [0, 1, 2], "b": None}
    assert parse_topics(["a:0", "a"]) == {"a": None}
    assert parse_topics(["a", "a:0"]) == {"a": None}


@pytest.mark.parametrize("text", ["a:", "a:x", ":1", "", "a:1,-2", "a:2147483648"])
def test_malformed_topics(text: str) -> None:
    with pytest.raises(ValueError, match="is not"):
        parse_topics([text])


def test_times() -> None:
    assert parse_datetime_ms("1970-01-01T00:00:01.500") == 1500
    assert parse_datetime_ms("1970-01-01T01:00:00+01:00") == 0
    assert parse_datetime_ms("1970-01-01T00:00:01Z") == 1000
    assert parse_age_ms("P1DT1H") == 25 * 3_600_000
    for parse, text in ((parse_datetime_ms, "yesterday"), (parse_age_ms, "1 day"), (parse_age_ms, "-PT1S")):
        with pytest.raises(ValueError, match=text):
            parse(text)


def test_a_plan_of_one_group_needs_no_group() -> None:
    plan = {"g": {TopicPartition("t", 1): 7, TopicPartition("t", 0): 3}}
    assert format_plan(plan) == "t,0,3\nt,1,7\n"
    assert parse_plan("t,0,3\n\nt,1,7\n", ["g"]) == plan
    assert parse_plan("g,t,0,3\ng,t,1,7\n", ["g"]) == plan


def test_a_plan_keeps_group_names_with_special_characters() -> None:
    plan = {'a "group", quoted': {TopicPartition("t", 0): 1}, "h": {TopicPartition("u", 3): 2}}
    assert parse_plan(format_plan(plan), list(plan)) == plan


@pytest.mark.parametrize(
    ("text", "groups", "problem"),
    [
        ("t,2147483648,3", ["g"], "line 1: the greatest partition is 2147483647"),
        ("t,0,3\nt,1,9223372036854775808", ["g"], "line 2: the greatest .* offset 9223372036854775807"),
        ("t,0", ["g"], "line 1: the columns must be topic,partition,offset"),
        ("t,0,1", ["g", "h"], "line 1: the columns must be group,topic,partition,offset"),
        ("g,t,0,1\nx,t,0,1", ["g"], "line 2: x is not one of the groups"),
        ("t,0,-1", ["g"], "line 1: not a topic with a partition and an offset"),
        ("t,a,1", ["g"], "line 1: not a topic with a partition and an offset"),
    ],
)
def test_malformed_plans(text: str, groups: list[str], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_plan(text, groups)
