# SPDX-License-Identifier: Apache-2.0
"""Races inside client libraries that make a test try again: once, counted and named at the end of the run.

A retry that nobody sees would also hide a fault of the broker. So whoever tries again calls `note_retry`, and
tests/conftest.py prints all retries after the run, those of other worker processes too.
"""

from __future__ import annotations

_retries: list[str] = []


def note_retry(race: str) -> None:
    """Name the client and what it does. Safe to call from any thread."""
    _retries.append(race)


def take_retries() -> list[str]:
    """The races since the last call."""
    retries = _retries[:]
    del _retries[: len(retries)]
    return retries
