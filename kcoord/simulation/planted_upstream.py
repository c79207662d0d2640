# SPDX-License-Identifier: Apache-2.0
"""Planted faults in the log of an upstream, its readers and the lease; `planted` lists them with all others.

The random walks of `tests/unit/runtime` use them, too. Only these find `NewSequence`: a commit that is in the log twice
means the same as once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from kcoord.runtime import shard_loads
from kcoord.runtime.shard_log import Append, Load
from kcoord.runtime.standby import Standby
from kcoord.runtime.upstream_actions import Fetch, Loaded, Produce, Written
from kcoord.runtime.upstream_batches import NO_CLAIM, Kind, ReadBatch, UpstreamBatches
from kcoord.runtime.upstream_claim import OwnBatch, UpstreamState
from kcoord.runtime.upstream_log import UpstreamLog
from kcoord.runtime.upstream_reader import BatchId, DivergedError, LogMark, UpstreamReader
from kcoord.upstream import shard_log, standbys
from kcoord.upstream.instance_group import InstanceGroup
from kcoord_protocol.batch_header import stamp_producer
from kcoord_protocol.record_batch import BatchHeader, decode_header


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
        if batch is None or batch.kind is Kind.CLAIM:
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

    def __init__(self, now_ms: int, tombstones_kept_ms: int = 0) -> None:
        super().__init__(now_ms, 1 << 62)


class StaleResponse(Standby[Any]):
    """Takes the response to a request of an earlier standby, which had read more."""

    def fetched(self, offset: int, data: bytes, high_watermark: int, now_ms: int) -> None:
        super().fetched(0, data, high_watermark, now_ms)


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


def _every_claim(self: UpstreamBatches, producer_id: int, epoch: int) -> bool:
    """Takes the batches of all owners for valid (rule 7)."""
    return True


def _last_claim_alone(self: UpstreamBatches, producer_id: int, epoch: int) -> bool:
    """Takes a batch for void if its claim is not the last one that the log has, as if no claim was ever compacted."""
    return self.claim in ((producer_id, epoch), NO_CLAIM)


def _always(self: InstanceGroup) -> bool:
    """Returns True: the lease never ends."""
    return True


def _nothing(self: InstanceGroup) -> None:
    """Does nothing."""


def _log(log: type[UpstreamLog]) -> Sequence[tuple[object, str, object]]:
    return [(shard_log, "UpstreamLog", log)]


def _reader(reader: type[UpstreamReader]) -> Sequence[tuple[object, str, object]]:
    return [(shard_log, "UpstreamReader", reader), (standbys, "UpstreamReader", reader)]


PATCHES: Final[Mapping[str, Sequence[tuple[object, str, object]]]] = {
    "upstream-answer-before-the-produce": _log(EarlyAnswer),
    "upstream-answer-of-a-transaction-is-trusted": _log(Unread),
    "upstream-batch-after-its-transaction": _log(LateBatches),
    "upstream-claim-not-read-to": _reader(UnreadTail),
    "upstream-claim-omitted": _log(NoClaim),
    "upstream-compacted-claim": [(UpstreamBatches, "_may_be_owner", _last_claim_alone)],
    "upstream-copy-is-trusted": _reader(TrustingRestart),
    "upstream-copy-not-read-from-its-beginning": _reader(EndOfSnapshot),
    "upstream-earlier-producer-id-not-awaited": _reader(NoWait),
    "upstream-lease-ignored": [(InstanceGroup, "holds_lease", _always), (InstanceGroup, "check", _nothing)],
    "upstream-offset-not-compared": _log(AnyOffset),
    "upstream-reader-away-for-long": _reader(LateReader),
    "upstream-response-to-an-earlier-standby": [(shard_loads, "Standby", StaleResponse)],
    "upstream-standby-not-read-to-the-claim": _log(UnreadStandby),
    "upstream-truncation-not-noticed": _reader(TrustingReader),
    "upstream-void-batch-counts": [(UpstreamBatches, "_may_be_owner", _every_claim)],
    "upstream-void-batch-not-rewritten": _log(NoRewrite),
}
