# SPDX-License-Identifier: Apache-2.0
"""Runs each input that coverage-guided fuzzing has kept (`make fuzz`) once through its target."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.fuzz import login_targets
from tests.fuzz.targets import TARGETS, kept


@pytest.mark.parametrize("name", TARGETS)
def test_kept_inputs(name: str) -> None:
    target, seeds = TARGETS[name]
    inputs = [*seeds(), *kept(name)]
    assert len(inputs) > len(seeds()), "there are no kept inputs"
    for data in inputs:
        target(data)


def test_the_logins_among_the_seeds_succeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The targets would find nothing if no input logged in."""
    accepted: list[str] = []

    def note(name: str, check: Callable[[Any], bool]) -> None:
        def noted(argument: Any) -> bool:
            accepted.append(name)
            return check(argument)

        monkeypatch.setattr(login_targets, name, noted)

    note("_has_secret", login_targets._has_secret)
    note("is_genuine", login_targets.is_genuine)
    for data in login_targets.sasl_seeds():
        login_targets.sasl(data)
    # Four mechanisms with and without requests, four sessions, and one that is renewed.
    assert accepted.count("_has_secret") == 13
    accepted.clear()
    for data in login_targets.token_seeds():
        login_targets.tokens(data)
    assert accepted.count("is_genuine") >= 5
