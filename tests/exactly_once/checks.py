# SPDX-License-Identifier: Apache-2.0
"""What applications must have written to a topic, given the numbers that they read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from tests.exactly_once.topics import PARTITIONS, Rows

Check = Callable[[Rows, Rows], None]
"""Fails unless the second topic is what an application makes of the first one."""


def check_copy(source: Rows, target: Rows) -> None:
    """Fails unless each record was copied exactly once, in order."""
    for partition in range(PARTITIONS):
        expected, copied = source[partition], target[partition]
        wrong = [place for place, pair in enumerate(zip(expected, copied, strict=False)) if pair[0] != pair[1]]
        place = wrong[0] if wrong else 0
        assert not wrong, f"{copied[place : place + 3]} for {expected[place : place + 3]} at {partition}, {place}"
        assert len(copied) == len(expected)


def check_copied(source: Rows, target: Rows) -> None:
    """Fails unless each value was copied at least once, to any partition."""
    copied = {value for rows in target.values() for _, value in rows}
    missing = {value for rows in source.values() for _, value in rows} - copied
    assert not missing, f"{len(missing)} records are missing, such as {sorted(missing)[:3]}"


def check_counts(source: Rows, target: Rows) -> None:
    """Fails unless each record was counted exactly once."""
    assert _counts(target) == _expected_counts(source)


def check_counted(source: Rows, target: Rows) -> None:
    """Fails unless each record was counted at least once."""
    counts = _counts(target)
    for key, expected in _expected_counts(source).items():
        missing = set(expected) - set(counts[key])
        assert not missing, f"{len(missing)} counts of key {key} are missing, such as {sorted(missing)[:3]}"


def _expected_counts(source: Rows) -> dict[str, list[int]]:
    numbers: defaultdict[str, int] = defaultdict(int)
    for rows in source.values():
        for key, _ in rows:
            numbers[key] += 1
    return {key: list(range(1, number + 1)) for key, number in numbers.items()}


def _counts(target: Rows) -> defaultdict[str, list[int]]:
    counts: defaultdict[str, list[int]] = defaultdict(list)
    for rows in target.values():
        for key, value in rows:
            counts[key].append(int(value))
    return counts
