# SPDX-License-Identifier: Apache-2.0
"""Later seeds, and the scenarios. `make simulate` runs seeds until it is stopped."""

from __future__ import annotations

import pytest

from kcoord.simulation.options import SCENARIOS, UPSTREAM
from kcoord.simulation.runner import report, run
from kcoord.simulation.world import Setup

FAILED_ONCE = (1830, 1986, 2168)
"""Seeds that have failed before (docs/simulation.md)."""
RUN_ELSEWHERE = {"", "security", "client-assignors", UPSTREAM}
"""Scenarios whose first seeds `test_seeds` and `test_upstream` run."""
FAILED_ONCE_IN_A_SCENARIO = (("controller", 41), ("controller", 87), ("controller", 97))


@pytest.mark.parametrize("seed", (*range(100, 110), *FAILED_ONCE))
def test_no_invariant_is_violated(seed: int) -> None:
    outcome = run(Setup(seed))
    assert not outcome.failure, report(outcome)
    assert outcome.settled_after_ms >= 0


@pytest.mark.parametrize("scenario", sorted(SCENARIOS.keys() - RUN_ELSEWHERE))
def test_no_invariant_is_violated_in_a_scenario(scenario: str) -> None:
    for seed in range(3):
        outcome = run(Setup(seed, scenario=scenario))
        assert not outcome.failure, report(outcome)


@pytest.mark.parametrize(("scenario", "seed"), FAILED_ONCE_IN_A_SCENARIO)
def test_no_invariant_is_violated_by_a_seed_that_failed_once(scenario: str, seed: int) -> None:
    outcome = run(Setup(seed, scenario=scenario))
    assert not outcome.failure, report(outcome)
