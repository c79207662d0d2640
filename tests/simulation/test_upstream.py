# SPDX-License-Identifier: Apache-2.0
"""Instances in front of a modelled upstream: all invariants hold, and two runs of a seed are the same run."""

from __future__ import annotations

import pytest

from kcoord.simulation.clock import START_MS
from kcoord.simulation.runner import Outcome, report, run
from kcoord.simulation.trace import ViolationError
from kcoord.simulation.upstream.world import UpstreamWorld
from kcoord.simulation.world import Setup

SEEDS = range(20)
DEAD_AT_MS = 8_000


@pytest.fixture(scope="module")
def outcomes() -> dict[int, Outcome]:
    return {seed: run(Setup(seed, scenario="upstream")) for seed in SEEDS}


@pytest.mark.parametrize("seed", SEEDS)
def test_no_invariant_is_violated(outcomes: dict[int, Outcome], seed: int) -> None:
    assert not outcomes[seed].failure, report(outcomes[seed])


def test_the_seeds_have_every_fault(outcomes: dict[int, Outcome]) -> None:
    events = {kind for outcome in outcomes.values() for kind in outcome.counts}
    expected = {
        *("crash", "stop", "pause", "cut-off", "reset", "drop", "hold-up", "last-words", "start-slow-clock"),
        *("election", "unclean-election", "topic-deleted", "too-few-replicas", "coordinator-moves"),
        *("ids-forgotten", "epochs-near-their-end", "compact", "repeated-batch", "refused-batch", "transaction"),
    }
    assert expected - events == set()


def test_the_same_seed_is_the_same_run(outcomes: dict[int, Outcome]) -> None:
    for seed in (3, 4):
        assert run(Setup(seed, scenario="upstream")).trace_hash == outcomes[seed].trace_hash


def test_without_faults_nothing_disturbs() -> None:
    outcome = run(Setup(1, scenario="upstream", faults=frozenset()))
    assert not outcome.failure, report(outcome)
    assert not outcome.counts.keys() & {"crash", "pause", "drop", "election", "cut-off"}


def test_instances_find_the_coordinator_although_their_connections_are_dead() -> None:
    """The upstream's brokers are gone without a word, as after a power loss. Lookups need new connections then."""
    world = UpstreamWorld(Setup(1, scenario="upstream", faults=frozenset()))

    def lose_all() -> None:
        for link in world.network.open:
            link.is_lost = True

    world.clock.at(START_MS + DEAD_AT_MS, lose_all)
    with world.surroundings():
        try:
            world.run()
        except ViolationError as error:
            pytest.fail(str(error))
        finally:
            world.end()
