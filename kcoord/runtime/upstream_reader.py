# SPDX-License-Identifier: Apache-2.0
"""The position of an instance in the log of a shard in the upstream, and what it knows of the log before it. Pure.

Theory of operation
-------------------
A reader gets fetched batches, and says which of them the shard's state machine has to replay
(`kcoord.runtime.upstream_batches`). It belongs to one state machine, from the first batch on. A standby reads as the
log grows. A new owner reads up to its claim. For that it gets the reader of its standby, or a new one, which begins at
the beginning of the log. Afterwards the owner knows the log from its own appends (`appended`), and reads what others
append.

The state of the machine is worth something only if the log still has everything before the position. A leader that was
elected uncleanly may lack some batches, and has others at their offsets. So the reader `distrusts` the log after each
failure of a fetch, with the first batch of another leader epoch, and before a takeover. It then reads once more from
the last batch that it knows. Leader epoch, producer and sequence number identify a batch, also after compaction. If
that batch is the same, so is everything before it, because all replicas have their batches in the order of one leader.

Compaction removes tombstones `delete.retention.ms` after it has removed what they delete. A reader that was not at the
end of the log for that long may have missed one. It has missed nothing if it finds all offsets. So a gap in the offsets
counts as divergence if the reader was not complete for half of that time.

A reader that raised DivergedError is not used again, and neither is its state machine. All is read from the beginning.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from struct import Struct
from struct import error as StructError
from typing import Final, NamedTuple

from kcoord.runtime.upstream_batches import Kind, ReadBatch, UpstreamBatches
from kcoord_protocol.record_batch import BatchHeader, walk_batches

TOMBSTONES_KEPT_MS: Final = 86_400_000
"""The default of `delete.retention.ms`."""
_UNKNOWN_EPOCH: Final = -1


class DivergedError(Exception):
    """The log is not the one that was read before, or the reader may have missed deletions."""


class BatchId(NamedTuple):
    """Identifies a batch in the log of a partition. An owner does not know the leader epoch of its batches: -1."""

    base_offset: int
    next_offset: int
    leader_epoch: int
    producer_id: int
    producer_epoch: int
    base_sequence: int

    @classmethod
    def of(cls, header: BatchHeader) -> BatchId:
        return cls(
            header.base_offset,
            header.next_offset,
            header.partition_leader_epoch,
            header.producer_id,
            header.producer_epoch,
            header.base_sequence,
        )

    def is_same(self, other: BatchId) -> bool:
        """True if both are the same batch, as far as their leader epochs are known."""
        if _UNKNOWN_EPOCH in (self.leader_epoch, other.leader_epoch):
            other = other._replace(leader_epoch=self.leader_epoch)
        return self == other


_MARK: Final = Struct(">qqiqhiqq?qqh")


class LogNote(NamedTuple):
    """What a reader knows at its position, for a snapshot that begins there.

    No transaction is open at the position.
    """

    position: int
    claim: tuple[int, int]
    batches: bytes
    """What follows from the transactions before the position, encoded."""


@dataclass(slots=True, frozen=True)
class LogMark:
    """What has to be known of the log for a snapshot: `note` where it began, and the rest where it ended."""

    last: BatchId
    complete_ms: int
    settled_id: int
    has_owner: bool
    note: LogNote

    def encode(self) -> bytes:
        position, claim, batches = self.note
        return _MARK.pack(*self.last, self.complete_ms, self.settled_id, self.has_owner, position, *claim) + batches

    @classmethod
    def decode(cls, data: bytes) -> LogMark:
        """Returns the mark. Raises ValueError if the bytes are malformed."""
        try:
            *batch, complete_ms, settled_id, has_owner, position, claim_id, claim_epoch = _MARK.unpack_from(data)
            note = LogNote(position, (claim_id, claim_epoch), data[_MARK.size :])
            UpstreamBatches.restored(note.batches, note.claim)
        except StructError as error:
            raise ValueError(f"the mark of a log is malformed: {error}") from error
        return cls(BatchId(*batch), complete_ms, settled_id, has_owner, note)


class UpstreamReader:
    """The position in the log of one shard. The module docstring describes the checks.

    `tombstones_kept_ms` is `delete.retention.ms` of the topic.
    """

    def __init__(self, now_ms: int, tombstones_kept_ms: int = TOMBSTONES_KEPT_MS) -> None:
        self.position = 0
        """The offset from which to read next. Everything below it is replayed."""
        self.last: BatchId | None = None
        """The last batch below the position; None at the beginning of the log."""
        self.complete_ms = now_ms
        """At this time, everything that the log had was below the position."""
        self.has_owner = False
        """True if the log has a batch of an owner."""
        self.settled_id = -1
        """The producer id of the last settled record, or of a claim at offset 0."""
        self.batches = UpstreamBatches()
        """What follows from the batches below the position."""
        self.has_diverged = False
        self._stale_after_ms = tombstones_kept_ms // 2
        self._check: BatchId | None = None
        """The batch that has to be in the log, until it was seen there."""
        self._leader_epoch = _UNKNOWN_EPOCH

    @classmethod
    def restored(cls, mark: LogMark, tombstones_kept_ms: int) -> UpstreamReader:
        """Returns a reader for the state of a snapshot. It replays the log from the beginning of the snapshot."""
        reader = cls(mark.complete_ms, tombstones_kept_ms)
        reader.position = mark.note.position
        reader.last = reader._check = mark.last
        reader.settled_id, reader.has_owner = mark.settled_id, mark.has_owner
        reader.batches = UpstreamBatches.restored(mark.note.batches, mark.note.claim)
        return reader

    @property
    def is_verified(self) -> bool:
        """False until the log has shown that it is the one that was read before."""
        return self._check is None

    @property
    def fetch_offset(self) -> int:
        """The offset from which to fetch next."""
        return self.position if self._check is None else min(self.position, self._check.base_offset)

    def note(self) -> LogNote | None:
        """Returns what is known at the position. None if a transaction is open, or the log has to be checked first."""
        batches = self.batches.encode()
        if batches is None or self._check is not None:
            return None
        return LogNote(self.position, self.batches.claim, batches)

    def mark(self, note: LogNote) -> LogMark | None:
        """Returns the mark of a snapshot from `note` up to here. None if the log has to be checked first."""
        if self.last is None or self._check is not None:
            return None
        return LogMark(self.last, self.complete_ms, self.settled_id, self.has_owner, note)

    def distrust(self) -> None:
        """Makes the next fetch show that the log still has the last batch."""
        if self._check is None:
            self._check = self.last

    def begin_at(self, offset: int) -> None:
        """Begins at the first offset of the log. Raises DivergedError if something before it was read."""
        if self.last is not None or offset <= self.position:
            raise self._diverged(f"the log does not have offset {self.fetch_offset}")
        self.position = offset

    def appended(self, batch: BatchId) -> None:
        """Notes a batch of the owner at the position, which is not read back."""
        self.last = batch
        self.position = batch.next_offset

    def caught_up(self, high_watermark: int, now_ms: int) -> None:
        """Notes the end of the log, and that everything below it is replayed, if it is."""
        if self._check is None and self.position >= high_watermark:
            self.complete_ms = now_ms

    def take(self, data: bytes, now_ms: int, claim: BatchId | None = None) -> Sequence[tuple[BatchHeader, bytes]]:
        """Moves the position behind fetched batches, as `read`. Returns those that have to be replayed."""
        return [(read.header, read.data) for read in self.read(data, now_ms, claim) if read.is_replayed]

    def read(self, data: bytes, now_ms: int, claim: BatchId | None = None) -> Iterator[ReadBatch]:
        """Yields fetched batches, and moves the position behind each of them, at most behind the own claim.

        The first batches may be below the position, and the last one may be cut off. The own claim is not yielded.
        Raises CorruptBatchError, and DivergedError.
        """
        trusts_epochs = self._check is not None or self.last is None
        for at, fields in walk_batches(data, verify=True):
            header = BatchHeader(*fields)
            if self._check is not None and header.next_offset >= self._check.next_offset:
                self._compare(self._check, header)
                self._check = None
                # The check counts for the epoch that caused it, whose batches may not be in the same response.
                self._leader_epoch = max(self._leader_epoch, header.partition_leader_epoch)
            if header.next_offset <= self.position:
                continue
            if header.partition_leader_epoch != self._leader_epoch:
                self._leader_epoch = header.partition_leader_epoch
                if not trusts_epochs:
                    self.distrust()
                    break
            self._check_gap(header, now_ms)
            self.last = BatchId.of(header)
            self.position = header.next_offset
            if claim is not None and header.next_offset >= claim.next_offset:
                self._compare(self._check or claim, header)
                break
            batch = bytes(data[at : at + header.size_bytes])
            kind = self.batches.take(header, batch)
            self.has_owner |= header.producer_id >= 0 and not (header.is_control or header.is_transactional)
            if kind is Kind.SETTLED or (kind is Kind.CLAIM and header.base_offset == 0):
                self.settled_id = header.producer_id
            yield ReadBatch(kind, header, batch)

    def _compare(self, expected: BatchId, header: BatchHeader) -> None:
        batch = BatchId.of(header)
        if not expected.is_same(batch):
            raise self._diverged(f"the log has {batch} and not {expected}, which was in it before")

    def _check_gap(self, header: BatchHeader, now_ms: int) -> None:
        is_whole = header.base_offset <= self.position and header.records_count > header.last_offset_delta
        # A time far in the future is from before a start after which the clock was set back.
        if not is_whole and abs(now_ms - self.complete_ms) >= self._stale_after_ms:
            raise self._diverged(
                f"the log was compacted at offset {self.position}, and was last read to its end "
                f"{now_ms - self.complete_ms} ms ago, so deletions may be missing"
            )

    def _diverged(self, reason: str) -> DivergedError:
        self.has_diverged = True
        return DivergedError(reason)
