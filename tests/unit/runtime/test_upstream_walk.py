# SPDX-License-Identifier: Apache-2.0
"""Random walks of the upstream log, and faults planted in it that the walks have to find."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kcoord.runtime.shard_log import Append, Load
from kcoord.runtime.standby import Standby
from kcoord.runtime.upstream_actions import Fetch, Loaded, Produce, Written
from kcoord.runtime.upstream_claim import UpstreamState
from kcoord.runtime.upstream_log import UpstreamLog
from kcoord.runtime.upstream_reader import BatchId, DivergedError, LogMark, UpstreamReader
from kcoord_protocol.batch_header import stamp_producer
from kcoord_protocol.record_batch import BatchHeader, decode_header
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


class NoClaim(UpstreamLog):
    """Serves after it has read the log to its present end, and claims with its first append only."""

    def initialized(self, request: object, producer_id: int, epoch: int, now_ms: int) -> None:
        super().initialized(request, producer_id, epoch, now_ms)  # type: ignore[arg-type]
        if self.state is UpstreamState.CLAIMING:
            produce = self.actions.pop()
            assert isinstance(produce, Produce)
            self.produced(produce, -1, now_ms)
            self._sequence = 0

    def fetched(self, request: Fetch, data: bytes, now_ms: int) -> None:
        if request is self._request:
            load, self._load = self._load, None
            assert load is not None
            self.state = UpstreamState.OWNER
            try:
                self.actions.append(Loaded(load, self.reader.take(data, now_ms), is_end=True))
            except DivergedError as error:
                self._give_up(str(error))


class UnreadTail(UpstreamReader):
    """Reads up to the first end of the log that it sees, and not up to the claim. So a takeover loses the tail."""

    def take(self, data: bytes, now_ms: int, claim: BatchId | None = None) -> Sequence[tuple[BatchHeader, bytes]]:
        batches = super().take(data, now_ms, claim)
        if claim is not None:
            self.appended(claim)
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
            self.reader.position = base_offset
        super().produced(request, base_offset, now_ms)


class NoWait(UpstreamReader):
    """Sees no earlier claims, so an owner with another producer id does not wait."""

    def take(self, data: bytes, now_ms: int, claim: BatchId | None = None) -> Sequence[tuple[BatchHeader, bytes]]:
        batches = super().take(data, now_ms, claim)
        self.has_owner = False
        return batches


class UnreadStandby(UpstreamLog):
    """Serves with the state of the standby, and reads nothing up to the claim."""

    def read(self, load: Load) -> None:
        if self.reader.last is not None and self.state is UpstreamState.READING:
            assert self._claim is not None
            self.reader.appended(self._claim)
            self.state = UpstreamState.OWNER
            self._load = None
            self.actions.append(Loaded(load, [], is_end=True))
        else:
            super().read(load)


class TrustingReader(UpstreamReader):
    """Continues after a failure without a look at what it has read, so a state outlives a truncation."""

    def distrust(self) -> None:
        return


class TrustingRestart(TrustingReader):
    """Continues from a snapshot, too, without a look at what the log has now. So the copy outlives a truncation."""

    @classmethod
    def restored(cls, mark: LogMark, tombstones_kept_ms: int) -> UpstreamReader:
        reader = super().restored(mark, tombstones_kept_ms)
        reader._check = None
        return reader


class EndOfSnapshot(UpstreamReader):
    """Continues at the end of a snapshot, although the state is partly that of its beginning."""

    @classmethod
    def restored(cls, mark: LogMark, tombstones_kept_ms: int) -> UpstreamReader:
        reader = super().restored(mark, tombstones_kept_ms)
        reader.position = mark.last.next_offset
        return reader


class LateReader(UpstreamReader):
    """Reads a compacted log however long it was away."""

    def __init__(self, now_ms: int, tombstones_kept_ms: int) -> None:
        super().__init__(now_ms, 1 << 62)


class StaleResponse(Standby[Numbers]):
    """Takes the response to a request of an earlier standby, which had read more."""

    def fetched(self, offset: int, data: bytes, high_watermark: int, now_ms: int) -> None:
        super().fetched(0, data, high_watermark, now_ms)


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


@pytest.mark.parametrize("fault", FAULTS)
def test_the_walks_find_a_planted_fault(fault: type[UpstreamLog | UpstreamReader | Standby[Numbers]]) -> None:
    log = fault if issubclass(fault, UpstreamLog) else UpstreamLog
    reader = fault if issubclass(fault, UpstreamReader) else UpstreamReader
    standby = fault if issubclass(fault, Standby) else Standby
    for seed in range(5 * SEEDS):
        try:
            World(seed, log, reader, standby, **FAULTS[fault]).walk(3 * STEPS)
        except Violation:
            return
    pytest.fail("no walk found the fault")
