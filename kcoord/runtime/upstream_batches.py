# SPDX-License-Identifier: Apache-2.0
"""Decides which batches of a partition of the upstream count, in the order of the partition.

Theory of operation
-------------------
The partition has batches of several writers:

* Owners append batches that are not transactional. Each owner has a producer id and an epoch, which its claim begins.
  The leader of the partition rejects batches of earlier owners from then on. So the last such batch tells who owns the
  shard at this point of the partition.
* The owner also appends transactional batches, with the producer id and epoch of a client: offsets of a transaction.
  Claims do not fence them. A header of each record has the claim of the owner that wrote it, and the offset up to which
  that owner had read the partition.
* The transaction coordinator of the upstream appends markers, which end transactions.

A transactional batch is *void* in two cases:

* Another claim is between its claim and it: its writer had lost the shard already.
* A marker of its producer is before it, but the writer had not read that. So the batch may belong to an earlier
  transaction of the client, which has given the request up since.

Void batches are not replayed. But readers that do not know of claims see them: if the transaction is committed, they
take the records of void batches for its outcome. So the owner then writes the present values of these keys again
(`to_rewrite`), and every reader ends with them.

Compaction must not remove the claim that makes a batch void before the values are written again. Until then, any number
of owners may have claimed the log and died. So each claim has a key of its own. An owner deletes the oldest ones
(`to_delete`) if the log has more than `MOST_CLAIMS`. It does so only if no void batch waits for its marker, and no
values have to be written again. Then the values are after all void batches, so they win, even if a later reader takes
such a batch for valid.

A batch whose claim is gone counts, unless the log has shown a later claim before it. A later claim has the same
producer id with a higher epoch, or another producer id that has followed. The batches of an owner show its claim, too.
So compaction never makes a batch void. A marker stays for `delete.retention.ms` after compaction has removed the
records of its transaction. A request of an owner that has not read the marker does not arrive so late.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from enum import Enum
from struct import Struct
from typing import Final, NamedTuple

from kcoord.runtime.result import Producer
from kcoord_protocol.control_records import ControlRecordType, decode_control_key, decode_end_txn_marker
from kcoord_protocol.errors import CorruptBatchError
from kcoord_protocol.record_batch import BatchHeader, Record, decode_entries, encode_batch, iter_records, walk_batches

CLAIM_KEY: Final = (30_000).to_bytes(2, "big")
"""The beginning of the keys of claims: a coordinator record type that Kafka does not have."""
SETTLED_KEY: Final = (30_001).to_bytes(2, "big")
"""The key of settled records. The producer id is that of the batch."""
WRITER_HEADER: Final = "kcoord.writer"
"""The header of records in transactions: producer id (int64) and epoch (int16) of their writer's claim, and the offset
(int64) up to which the writer had read the partition."""
NO_CLAIM: Final = (-1, -1)
_WRITER: Final = Struct(">qhq")
_CLIENT: Final = Struct(">qhiqqq")
_CLAIM: Final = Struct(">qh")
_COUNT: Final = Struct(">i")
MOST_CLAIMS: Final = 16
"""An owner deletes the oldest claim if the log has more of them."""
MAX_SEQUENCE: Final = 0x7FFF_FFFF
_NO_SEQUENCE: Final = -1
_PRODUCER_KEPT_MS: Final = 8 * 24 * 3_600_000
"""Brokers forget an idle producer after a day, and its transactional id after seven (the defaults of Kafka)."""


class Kind(Enum):
    """The kinds of batches."""

    CLAIM = "claim"
    DELETED_CLAIM = "deleted claim"
    """A tombstone for a claim."""
    SETTLED = "settled"
    RECORDS = "records"
    """Records of an owner outside transactions."""
    EMPTY = "empty"
    """Compaction has removed all records."""
    TRANSACTIONAL = "transactional"
    VOID = "void"
    MARKER = "marker"


class _Client(NamedTuple):
    """What was last read of a client's producer."""

    epoch: int
    last_sequence: int
    timestamp_ms: int
    marker_offset: int
    """The offset of the last marker, -1 if there was none."""
    offset: int
    """The offset of the last batch or marker."""


_NO_CLIENT: Final = _Client(-1, _NO_SEQUENCE, -1, -1, -1)


class ReadBatch(NamedTuple):
    """A batch of the partition."""

    kind: Kind
    header: BatchHeader
    data: bytes

    @property
    def producer(self) -> Producer:
        """The producer of the batch: an owner, or a client."""
        return Producer(self.header.producer_id, self.header.producer_epoch)

    @property
    def is_replayed(self) -> bool:
        """True if the state machine of the shard has to replay the batch."""
        return self.kind in (Kind.RECORDS, Kind.TRANSACTIONAL, Kind.MARKER)

    def marker(self) -> tuple[bool, int]:
        """Returns whether a marker commits its transaction, and the epoch of the transaction coordinator."""
        ((_, key, value),) = decode_entries(self.data)
        return decode_control_key(key) is ControlRecordType.COMMIT, decode_end_txn_marker(value)


class UpstreamBatches:
    """What follows from the batches of a partition up to a position. The module docstring describes the decisions."""

    def __init__(self) -> None:
        self.claim = NO_CLAIM
        """Producer id and epoch of the owner at the position, as far as the log shows it."""
        self._claims: list[tuple[int, int]] = []
        """The claims that were not deleted, in the order of the partition."""
        self._earlier_ids: set[int] = set()
        """The producer ids of owners before `claim`, other than that of `claim`."""
        self.to_rewrite: set[bytes] = set()
        """Keys of void records whose transaction was committed. Their values were not written again since."""
        self.open: set[int] = set()
        """Producer ids of clients with batches after their last marker."""
        self._void: dict[int, set[bytes]] = {}
        """Producer id -> keys of its void records whose transaction is open."""
        self._clients: OrderedDict[int, _Client] = OrderedDict()
        """What was last read of each client's producer, in the order of the partition."""

    def next_sequence(self, producer_id: int, epoch: int) -> int:
        """Returns the next sequence number of a client's producer in this partition."""
        last = self._clients.get(producer_id)
        return (last.last_sequence + 1) & MAX_SEQUENCE if last is not None and last.epoch == epoch else 0

    def claimed(self, claim: tuple[int, int]) -> None:
        """Notes a claim of the owner, which is not read back."""
        self.claim = claim
        if claim not in self._claims:
            self._claims.append(claim)

    @property
    def to_delete(self) -> tuple[int, int] | None:
        """The claim that the owner has to delete now, if any."""
        if len(self._claims) <= MOST_CLAIMS or self._void or self.to_rewrite:
            return None
        return self._claims[0]

    def deleted(self, claim: tuple[int, int]) -> None:
        """Notes that a claim is deleted."""
        if claim in self._claims:
            self._claims.remove(claim)

    def written(self, batch: bytes) -> None:
        """Notes a batch of records outside transactions."""
        if self.to_rewrite:
            self.to_rewrite.difference_update(_keys(batch))

    # Snapshots.

    def encode(self) -> bytes | None:
        """Returns claims and clients for a snapshot; None in a transaction, or if keys have to be written again."""
        if self.open or self.to_rewrite:
            return None
        clients = (_CLIENT.pack(producer_id, *client) for producer_id, client in self._clients.items())
        return b"".join((_COUNT.pack(len(self._claims)), *(_CLAIM.pack(*claim) for claim in self._claims), *clients))

    @classmethod
    def restored(cls, data: bytes, claim: tuple[int, int]) -> UpstreamBatches:
        """Returns the state that was encoded, with the claim at that time. Raises struct.error."""
        batches = cls()
        batches.claim = claim
        (count,) = _COUNT.unpack_from(data)
        end = _COUNT.size + count * _CLAIM.size
        batches._claims = list(_CLAIM.iter_unpack(data[_COUNT.size : end]))
        for producer_id, *fields in _CLIENT.iter_unpack(data[end:]):
            batches._clients[producer_id] = _Client(*fields)
        return batches

    def _note(self, header: BatchHeader, last_sequence: int, marker_offset: int) -> None:
        """Notes a batch or a marker of a client's producer."""
        clients, timestamp_ms = self._clients, header.max_timestamp
        clients[header.producer_id] = _Client(
            header.producer_epoch, last_sequence, timestamp_ms, marker_offset, header.base_offset
        )
        clients.move_to_end(header.producer_id)
        while next(iter(clients.values())).timestamp_ms < timestamp_ms - _PRODUCER_KEPT_MS:
            clients.popitem(last=False)

    # Batches.

    def take(self, header: BatchHeader, batch: bytes) -> Kind:
        """Notes the next batch, and returns its kind."""
        if header.is_control:
            return self._take_control(header, batch)
        if header.is_transactional:
            last = self._clients.get(header.producer_id, _NO_CLIENT)
            self._note(header, header.last_sequence, last.marker_offset)
            if not header.records_count:
                return Kind.EMPTY
            self.open.add(header.producer_id)
            writer = _writer_of(batch)
            if writer is not None:
                producer_id, epoch, read_offset = writer
                if self._may_be_owner(producer_id, epoch) and last.marker_offset < read_offset:
                    return Kind.TRANSACTIONAL
            self._void.setdefault(header.producer_id, set()).update(_keys(batch))
            return Kind.VOID
        if header.producer_id >= 0:
            if header.producer_id != self.claim[0]:
                self._earlier_ids.add(self.claim[0])
                self._earlier_ids.discard(header.producer_id)
            self.claim = header.producer_id, header.producer_epoch
        if not header.records_count:
            return Kind.EMPTY
        _, key, value = decode_entries(batch)[0] if header.records_count == 1 else (0, None, None)
        if key is not None and key.startswith(CLAIM_KEY):
            if value is None:
                self.deleted(claim_of(key))
                return Kind.DELETED_CLAIM
            self.claimed(claim_of(key))
            return Kind.CLAIM
        if key == SETTLED_KEY:
            return Kind.SETTLED
        self.written(batch)
        return Kind.RECORDS

    def _may_be_owner(self, producer_id: int, epoch: int) -> bool:
        """Returns whether the log has shown no later claim than this one, whose owner has just written."""
        if producer_id != self.claim[0]:
            return producer_id not in self._earlier_ids
        if epoch > self.claim[1]:
            # The claim is gone. Owners before it can write nothing that counts any more.
            self.claim = producer_id, epoch
        return epoch == self.claim[1]

    def _take_control(self, header: BatchHeader, batch: bytes) -> Kind:
        entries = decode_entries(batch)
        control_type = decode_control_key(entries[0][1]) if entries else None
        if control_type not in (ControlRecordType.COMMIT, ControlRecordType.ABORT):
            return Kind.EMPTY
        last = self._clients.get(header.producer_id, _NO_CLIENT)
        # A coordinator that aborts for a client raises the epoch. The next batch of that epoch begins at 0.
        sequence = last.last_sequence if last.epoch == header.producer_epoch else _NO_SEQUENCE
        self._note(header, sequence, header.base_offset)
        self.open.discard(header.producer_id)
        keys = self._void.pop(header.producer_id, None)
        if keys and control_type is ControlRecordType.COMMIT:
            self.to_rewrite |= keys
        return Kind.MARKER


def claim_key(claim: tuple[int, int]) -> bytes:
    """Returns the key of a claim."""
    return CLAIM_KEY + _CLAIM.pack(*claim)


def claim_of(key: bytes) -> tuple[int, int]:
    """Returns the producer id and the epoch in the key of a claim. Raises CorruptBatchError if it is malformed."""
    if len(key) != len(CLAIM_KEY) + _CLAIM.size:
        raise CorruptBatchError(f"a claim has the key {key.hex()}, which has no producer id and epoch")
    producer_id, epoch = _CLAIM.unpack_from(key, len(CLAIM_KEY))
    return producer_id, epoch


def _keys(batch: bytes) -> Iterable[bytes]:
    return [key for _, key, _ in decode_entries(batch) if key is not None]


def _writer_of(batch: bytes) -> tuple[int, int, int] | None:
    """Returns the header of the writer in a transactional batch, None if it has none."""
    record = next(iter_records(batch))
    value = dict(record.headers).get(WRITER_HEADER)
    if value is None or len(value) != _WRITER.size:
        return None
    producer_id, epoch, read_offset = _WRITER.unpack(value)
    return producer_id, epoch, read_offset


def with_writer(batch: bytes, claim: tuple[int, int], read_offset: int, base_sequence: int) -> bytes:
    """Returns a transactional batch with the header of its writer in each record, as a Produce request has it."""
    header = BatchHeader(*next(walk_batches(batch))[1])
    headers: list[tuple[str, bytes | None]] = [(WRITER_HEADER, _WRITER.pack(*claim, read_offset))]
    return encode_batch(
        [Record(key, value, headers, header.base_timestamp) for _, key, value in decode_entries(batch)],
        compression=header.compression,
        producer_id=header.producer_id,
        producer_epoch=header.producer_epoch,
        base_sequence=base_sequence,
        is_transactional=True,
    )
