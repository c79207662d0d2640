# SPDX-License-Identifier: Apache-2.0
"""Counts the retries of tests because of races inside client libraries. A test retries at most once.

An invisible retry would also hide a fault of the broker. So a test that retries calls `note_retry`, and
tests/conftest.py prints all retries after the run, including those of other worker processes.
"""

from __future__ import annotations

_retries: list[str] = []


def note_retry(race: str) -> None:
    """Notes a retry. `race` names the client and its fault. Any thread may call it."""
    _retries.append(race)


def take_retries() -> list[str]:
    """Returns the races since the last call."""
    retries = _retries[:]
    del _retries[: len(retries)]
    return retries
