# SPDX-License-Identifier: Apache-2.0
"""Random walks with offsets in transactions, and faults planted in the rules against earlier owners."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

import pytest

from kcoord.runtime.shard_log import Load
from kcoord.runtime.upstream_batches import NO_CLAIM, Kind, UpstreamBatches
from kcoord.runtime.upstream_log import UpstreamLog
from kcoord.runtime.upstream_reader import UpstreamReader
from kcoord.simulation.planted_upstream import LateBatches, NoRewrite, Unread
from kcoord_protocol.record_batch import BatchHeader
from tests.unit.runtime.transactional_walk import LeasedWorld, TransactionalWorld
from tests.unit.runtime.upstream_walk import Instance, Violation

SEEDS = 60
STEPS = 1_000
MOST_SEEDS = range(3_000)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("world", [TransactionalWorld, LeasedWorld])
def test_transactions_commit_once_and_aborted_ones_never(world: type[TransactionalWorld]) -> None:
    committed = 0
    for seed in range(SEEDS):
        walk = world(seed)
        walk.walk(STEPS)
        committed += walk.served
    assert committed > SEEDS, "most walks commit transactions"


class AllClaims(UpstreamBatches):
    """Takes the batches of all owners for valid."""

    def take(self, header: BatchHeader, batch: bytes) -> Kind:
        if header.is_transactional:
            self.claim = NO_CLAIM
        return super().take(header, batch)


class VoidCounts(UpstreamLog):
    """Loads batches of earlier owners (rule 7)."""

    def open(self, load: Load, now_ms: int, reader: UpstreamReader | None = None) -> None:
        super().open(load, now_ms)
        self.reader.batches = AllClaims()


def find(world: type[TransactionalWorld], log: type[UpstreamLog], seeds: Iterable[int]) -> bool:
    for seed in seeds:
        try:
            world(seed, log).walk(STEPS)
        except Violation:
            return True
    return False


@pytest.mark.parametrize(("fault", "found_at"), [(Unread, 6), (VoidCounts, 51), (NoRewrite, 10), (LateBatches, 31)])
def test_the_walks_find_a_planted_fault(fault: type[UpstreamLog], found_at: int) -> None:
    """The seed that finds the fault is tried first, to save time."""
    assert find(TransactionalWorld, fault, (found_at, *MOST_SEEDS))


class NoLease(LeasedWorld):
    """Instances do not ask whether they have the lease."""

    def may_act(self, instance: Instance) -> bool:
        return True


def test_the_lease_keeps_an_earlier_owner_from_writing_unless_a_request_is_late() -> None:
    assert not find(LeasedWorld, VoidCounts, range(SEEDS))
    assert find(NoLease, VoidCounts, (60, *MOST_SEEDS))
