# SPDX-License-Identifier: Apache-2.0
"""Regular expressions match whole names, and one that cannot be compiled matches nothing."""

from __future__ import annotations

import time

import pytest

from kcoord.coordinator.group.regex import ResolvedRegexes, ResolveRegex, compile_pattern, resolve, validate
from kcoord_protocol.errors import Errors, KafkaError

NAMES = ["t1", "t2", "t10", "at1", "T1", ""]


@pytest.mark.parametrize(
    ("regex", "matched"),
    [
        ("t[0-9]", ["t1", "t2"]),
        ("t.*", ["t1", "t2", "t10"]),
        ("1|t1", ["t1"]),
        ("(?i)t1", ["t1", "T1"]),
        ("", [""]),
        ("x", []),
    ],
)
def test_the_whole_name_matches(regex: str, matched: list[str]) -> None:
    assert [name for name in NAMES if compile_pattern(regex)(name)] == matched
    assert resolve(ResolveRegex("g", (regex,), 7), iter(NAMES)) == ResolvedRegexes(7, {regex: frozenset(matched)})


@pytest.mark.parametrize(
    ("regex", "reason"),
    [
        ("(", "missing ): ("),
        ("*", "no argument for repetition operator: *"),
        ("(?=t)", "invalid perl operator: (?="),
        (r"(t)\1", r"invalid escape sequence: \1"),
        (r"\pL{1000}", "pattern too large - compile failed"),
        (r"\pL{250}", "pattern too large - compile failed"),
        ("t{1001}", "invalid repetition size: {1001}"),
    ],
)
def test_an_expression_that_is_not_re2_is_rejected(regex: str, reason: str) -> None:
    for check in (validate, compile_pattern):
        with pytest.raises(KafkaError) as caught:
            check(regex)
        assert caught.value.error is Errors.INVALID_REGULAR_EXPRESSION
        assert caught.value.message == f"SubscribedTopicRegex `{regex}` is not a valid regular expression: {reason}"


@pytest.mark.parametrize("regex", [".?" * 4_097, "é" * 4_097])
def test_a_long_expression_is_rejected_before_it_is_compiled(regex: str) -> None:
    """RE2 takes a fifth of a second to compile 16 KiB of this kind, and four times as long for twice as much."""
    with pytest.raises(KafkaError) as caught:
        validate(regex)
    assert (caught.value.error, caught.value.message) == (
        Errors.INVALID_REGULAR_EXPRESSION,
        "SubscribedTopicRegex has 8194 bytes. At most 8192 are allowed.",
    )
    validate("t" * 8_192)


def test_an_expression_that_no_longer_compiles_matches_nothing() -> None:
    resolved = resolve(ResolveRegex("g", ("(", "t1", "t2"), 7), NAMES)
    assert resolved.topics == {"(": frozenset(), "t1": frozenset({"t1"}), "t2": frozenset({"t2"})}


def test_a_long_expression_that_an_older_version_accepted_still_matches() -> None:
    regex = "t1|" + "x" * 10_000
    assert resolve(ResolveRegex("g", (regex,), 7), NAMES).topics == {regex: frozenset({"t1"})}


def test_groups_cost_nothing_because_nobody_asks_what_they_captured() -> None:
    """With the captures one such match takes seconds, in which no other thread has the GIL."""
    matches = compile_pattern("(.?)" * 1_500)
    began = time.thread_time()
    assert matches("t" * 249)
    assert time.thread_time() - began < 0.1
