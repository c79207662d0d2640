# SPDX-License-Identifier: Apache-2.0
"""Random walks with offsets in transactions, and faults planted in the rules against earlier owners."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from kcoord.runtime.shard_log import Load
from kcoord.runtime.upstream_actions import Produce
from kcoord.runtime.upstream_batches import NO_CLAIM, Kind, ReadBatch, UpstreamBatches
from kcoord.runtime.upstream_claim import OwnBatch
from kcoord.runtime.upstream_log import UpstreamLog
from kcoord.runtime.upstream_reader import UpstreamReader
from kcoord_protocol.record_batch import BatchHeader
from tests.unit.runtime.transactional_walk import LeasedWorld, TransactionalWorld
from tests.unit.runtime.upstream_walk import Instance, Violation

SEEDS = 60
STEPS = 1_000
MOST_SEEDS = 3_000


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


class Unread(UpstreamLog):
    """Takes an answer for the proof that the batch is in the log, and does not read it back (rule 6)."""

    def produced(self, request: Produce, base_offset: int, now_ms: int) -> None:
        batch = self._batch
        if request is self._request and batch is not None and batch.provisional is not None:
            self._request = None
            self._decide(None, now_ms)
        else:
            super().produced(request, base_offset, now_ms)

    def _follow(self, read: ReadBatch, now_ms: int) -> None:
        if read.kind is not Kind.TRANSACTIONAL:
            super()._follow(read, now_ms)


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


class NoRewrite(UpstreamLog):
    """Leaves the records of void batches to other readers (rule 7)."""

    def _rewrite(self) -> None:
        """Does nothing."""


class LateBatches(UpstreamLog):
    """Writes a batch although the client's transaction has ended (rule 8)."""

    def _decide_before_marker(self, producer_id: int, now_ms: int) -> None:
        """Does nothing."""

    def _begin_batch(self, batch: OwnBatch, now_ms: int) -> None:
        if batch.provisional is not None:
            batch.provisional.is_stale = False
        super()._begin_batch(batch, now_ms)


def find(world: type[TransactionalWorld], log: type[UpstreamLog], seeds: int) -> bool:
    for seed in range(seeds):
        try:
            world(seed, log).walk(STEPS)
        except Violation:
            return True
    return False


@pytest.mark.parametrize("fault", [Unread, VoidCounts, NoRewrite, LateBatches])
def test_the_walks_find_a_planted_fault(fault: type[UpstreamLog]) -> None:
    assert find(TransactionalWorld, fault, MOST_SEEDS)


class NoLease(LeasedWorld):
    """Instances do not ask whether they have the lease."""

    def may_act(self, instance: Instance) -> bool:
        return True


def test_the_lease_keeps_an_earlier_owner_from_writing_unless_a_request_is_late() -> None:
    assert not find(LeasedWorld, VoidCounts, SEEDS)
    assert find(NoLease, VoidCounts, MOST_SEEDS)
