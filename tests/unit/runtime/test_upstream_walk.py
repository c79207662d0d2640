# SPDX-License-Identifier: Apache-2.0
"""Random walks of the upstream log, and faults planted in it that the walks have to find."""

from __future__ import annotations

import pytest

from kcoord.runtime.shard_log import Append
from kcoord.runtime.upstream_actions import Fetch, Produce, Written
from kcoord.runtime.upstream_log import UpstreamLog, UpstreamState
from kcoord_protocol.batch_header import stamp_producer
from kcoord_protocol.record_batch import BatchHeader, decode_header
from tests.unit.runtime.upstream_walk import Violation, World

SEEDS = 200
STEPS = 400


def test_two_owners_lose_nothing_that_was_acknowledged() -> None:
    acknowledged = 0
    for seed in range(SEEDS):
        world = World(seed)
        world.walk(STEPS)
        acknowledged += world.served
    assert acknowledged > 5 * SEEDS, "most walks acknowledge several appends"


class NoClaim(UpstreamLog):
    """Serves after it has read the log to its present end, and claims with its first append only."""

    def initialized(self, request: object, producer_id: int, epoch: int, now_ms: int) -> None:
        super().initialized(request, producer_id, epoch, now_ms)  # type: ignore[arg-type]
        produce = self.actions[-1]
        if isinstance(produce, Produce) and self.state is UpstreamState.CLAIMING:
            self.actions.pop()
            self.produced(produce, -1, now_ms)
            self._sequence = 0

    def fetched(self, request: Fetch, data: bytes, now_ms: int) -> None:
        if request is self._request:
            self._claim_offset = self._end_offset = -1
            super().fetched(request, data, now_ms)


class UnreadTail(UpstreamLog):
    """Reads up to the first end of the log that it sees, and not up to its claim."""

    def _take_batches(self, data: bytes) -> list[tuple[BatchHeader, bytes]]:
        batches = super()._take_batches(data)
        self._position = self._claim_offset + 1
        return batches


class EarlyAnswer(UpstreamLog):
    """Acknowledges an append when it is sent."""

    def append(self, append: Append, now_ms: int) -> None:
        super().append(append, now_ms)
        if self.state is UpstreamState.OWNER:
            self.actions.append(Written(append))


class NewSequence(UpstreamLog):
    """Repeats a batch with an unknown outcome under the sequence number after it."""

    def _repeat(self, now_ms: int) -> None:
        batch = self._batch
        if batch is None or batch.is_claim:
            super()._repeat(now_ms)
            return
        self._sequence += batch.count
        header = decode_header(batch.data)
        batch.data = stamp_producer(batch.data, header.producer_id, header.producer_epoch, self._sequence)
        self._send(Produce(batch.data, now_ms))


class AnyOffset(UpstreamLog):
    """Acknowledges a batch at whatever offset it is."""

    def produced(self, request: Produce, base_offset: int, now_ms: int) -> None:
        if request is self._request and self.state is UpstreamState.OWNER:
            self._end_offset = base_offset
        super().produced(request, base_offset, now_ms)


class NoWait(UpstreamLog):
    """Serves at once although the claim before its own has another producer id."""

    def _take_batches(self, data: bytes) -> list[tuple[BatchHeader, bytes]]:
        batches = super()._take_batches(data)
        self._has_earlier_claim = False
        return batches


@pytest.mark.parametrize("fault", [NoClaim, UnreadTail, EarlyAnswer, NewSequence, AnyOffset, NoWait])
def test_the_walks_find_a_planted_fault(fault: type[UpstreamLog]) -> None:
    for seed in range(5 * SEEDS):
        try:
            World(seed, fault, expiries=3 if fault is NoWait else 0.2).walk(STEPS)
        except Violation:
            return
    pytest.fail("no walk found the fault")
