# SPDX-License-Identifier: Apache-2.0
"""Random walks of the upstream log, and faults planted in it that the walks have to find."""

from __future__ import annotations

import pytest

from kcoord.runtime.standby import Standby
from kcoord.runtime.upstream_log import UpstreamLog
from kcoord.runtime.upstream_reader import UpstreamReader
from kcoord.simulation.planted_upstream import (
    AnyOffset,
    EarlyAnswer,
    EndOfSnapshot,
    LateReader,
    NewSequence,
    NoClaim,
    NoWait,
    StaleResponse,
    TrustingReader,
    TrustingRestart,
    UnreadStandby,
    UnreadTail,
)
from tests.unit.runtime.upstream_walk import Numbers, Violation, World

SEEDS = 150
STEPS = 600


def test_two_owners_lose_nothing_that_was_acknowledged() -> None:
    acknowledged = taken_over = 0
    for seed in range(SEEDS):
        world = World(seed)
        world.walk(STEPS)
        acknowledged += world.served
        taken_over += sum(instance.taken_over for instance in world.instances)
    assert acknowledged > 4 * SEEDS, "most walks acknowledge several appends"
    assert taken_over > SEEDS, "most walks have takeovers with a standby"


def test_owners_serve_what_the_log_has_although_the_upstream_loses_some() -> None:
    for seed in range(SEEDS):
        World(seed, unclean=1).walk(STEPS)


FAULTS: dict[type[UpstreamLog | UpstreamReader | Standby[Numbers]], dict[str, float]] = {
    NoClaim: {},
    EarlyAnswer: {},
    NewSequence: {},
    AnyOffset: {"unclean": 3, "follow": 5},
    UnreadStandby: {},
    UnreadTail: {},
    NoWait: {"expire": 3},
    TrustingReader: {"unclean": 2, "follow": 80, "claim": 6},
    TrustingRestart: {"unclean": 1, "restart": 8, "snapshot": 50, "put": 80},
    EndOfSnapshot: {"snapshot": 30},
    LateReader: {"compact": 20, "follow": 2, "time": 60, "put": 60, "claim": 1},
    StaleResponse: {"restart": 4, "claim": 4},
}
"""Planted faults, with the weights of the steps that lead to their circumstances."""
FOUND_AT = {NoWait: 66, StaleResponse: 141}
"""Seeds that find faults which few seeds find. The test tries them first, to save time."""


@pytest.mark.parametrize("fault", FAULTS)
def test_the_walks_find_a_planted_fault(fault: type[UpstreamLog | UpstreamReader | Standby[Numbers]]) -> None:
    log = fault if issubclass(fault, UpstreamLog) else UpstreamLog
    reader = fault if issubclass(fault, UpstreamReader) else UpstreamReader
    standby = fault if issubclass(fault, Standby) else Standby
    for seed in (FOUND_AT.get(fault, 0), *range(5 * SEEDS)):
        try:
            World(seed, log, reader, standby, **FAULTS[fault]).walk(3 * STEPS)
        except Violation:
            return
    pytest.fail("no walk found the fault")
