# SPDX-License-Identifier: Apache-2.0
"""Reads the batches of a partition from its leader, in order and each once.

Theory of operation. `pieces` fetches block after block, read_uncommitted, and yields a `Piece` per response, like the
reader of folders. As soon as the batches of a response are known, the next fetch starts, and runs while the caller
decodes. A fetch repeats itself while leaders move and brokers restart (`client`). The rest is decided here:

* A broker sends whole batches up to the high watermark. The last batch of a response may be cut off; the next fetch
  begins with it.
* A fetch from a gap of a cleaned log returns the next batch. If a response has no batch, the log ends there.
* The position is out of range if the broker has deleted its records (DeleteRecords, retention), or if it has lost the
  end of the log. Then `fail_on_data_loss` decides: DataLossError, or the reader continues at the new start of the log
  and stops at its end.
* A fetch names the topic by its id, so it never reads a topic that was deleted and created again.
* Damage is a batch whose checksum is wrong, or bytes between sound batches. It is reported as `DamagedBytes`, and the
  reader continues behind it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Final, NamedTuple

import numpy as np

from kcoord.client.types import TopicPartition
from kcoord.pipeline.batch_table import Batches, Walk, find_batch, scan, walk
from kcoord.pipeline.buffers import Bytes, Gather, Ints, content_bytes, padded_copy
from kcoord.pipeline.errors import BrokerError, DataLossError
from kcoord.pipeline.log_reader import DamagedBytes, Piece, piece_of
from kcoord.pipeline.wire.client import EARLIEST, LATEST, BrokerClient, FetchedPartition, client_of
from kcoord.pipeline.wire.place import BrokerPartition
from kcoord_protocol.batch_header import BATCH_OVERHEAD_BYTES, LOG_OVERHEAD_BYTES

FETCH_BYTES: Final = 1 << 20
"""A fetch returns at most this much, or one batch that is larger.

With 8 MiB a broker of kcoord answers other clients later, and the source reads as fast.
"""
_PROBE_BYTES: Final = 1 << 14
"""A probe has the gaps between batches in it, which a single batch does not show."""
_OFFSET_BYTES: Final = 8
_LAST_DELTA_AT: Final = 23

_logger = logging.getLogger(__name__)


class Probe(NamedTuple):
    """The base offset of the first batch at an offset, and the bytes per offset from there on, gaps included."""

    base_offset: int
    density: float


class BrokerLog:
    """The log of one partition, read from its leader."""

    def __init__(self, place: BrokerPartition) -> None:
        self._place = place
        self._partition = TopicPartition(place.topic, place.log_partition)
        self._client: BrokerClient = client_of(place.properties)

    def pieces(
        self, start: int, end: int, *, verify: bool, block_bytes: int = FETCH_BYTES, walk: Walk = walk
    ) -> Iterator[Piece]:
        """Yields the batches with offsets in [start, end), up to the end that the log had when it was listed."""
        offset, end = start, min(end, self._place.end_offset)
        fetch = self._fetch(offset, end, block_bytes)
        try:
            while offset < end:
                fetched = self._client.result(fetch, self._place.topic)
                piece = None
                if fetched.records:
                    piece = self._piece(fetched.records, offset, end, walk, verify=verify)
                    offset = piece.end
                elif fetched.error_code or fetched.high_watermark < end:
                    offset = self._after_loss(offset, end)
                else:
                    return  # the log cleaner has removed the rest of the range
                if offset < end:
                    fetch = self._fetch(offset, end, block_bytes)
                if piece is not None:
                    yield piece
        finally:
            fetch.cancel()

    def probe(self, offset: int) -> Probe | None:
        """Fetches the batch that has `offset`, or the next batch, and some after it. None if there is neither."""
        fetched = self._client.result(self._fetch(offset, 0, _PROBE_BYTES), self._place.topic)
        if fetched.error_code or not fetched.records:
            return None
        data = padded_copy(fetched.records)
        base = int.from_bytes(fetched.records[:_OFFSET_BYTES], "big")
        size, following = _size(data, 0), _next_offset(data, 0)
        while size + BATCH_OVERHEAD_BYTES <= content_bytes(data):
            following = max(_next_offset(data, size), following)
            size += max(_size(data, size), 1)
        return Probe(base, size / max(following - min(base, offset), 1))

    def _fetch(self, offset: int, end: int, max_bytes: int) -> Future[FetchedPartition]:
        return self._client.fetch(self._partition, self._place.topic_id, offset, end, max_bytes)

    def _after_loss(self, offset: int, end: int) -> int:
        """Returns the offset at which to continue if the log has no records at `offset`, or has lost its end."""
        place = self._place
        numbers = [place.log_partition]
        (first,) = self._client.offsets(place.topic, numbers, EARLIEST).values()
        (last,) = self._client.offsets(place.topic, numbers, LATEST).values()
        if offset < first:
            loss, following = f"{place}: the records {offset} to {first - 1} were deleted", min(first, end)
        else:
            loss, following = f"{place} ends at offset {last - 1}, and had records up to offset {end - 1}", end
        accept_loss(loss, fails=place.fail_on_data_loss)
        return following

    def _piece(self, records: bytes, start: int, end: int, walk: Walk, *, verify: bool) -> Piece:
        """Makes a piece of a response, whose last batch may be cut off."""
        data = padded_copy(records)
        positions: list[Ints] = []
        damages: list[DamagedBytes] = []
        at, expected = 0, start
        while True:
            rest = data[at:]
            result = scan(rest, content_bytes(rest), walk, verify=verify)
            positions.append(result.positions + at)
            if len(result.positions):
                expected = _next_offset(rest, int(result.positions[-1]))
            if not result.error:
                break
            size, following = self._damage(rest, result.end, expected)
            damages.append(DamagedBytes(expected, rest[result.end : result.end + size].tobytes(), result.error))
            at, expected = at + result.end + size, following
        piece = piece_of(data, Batches.read(Gather(data), np.concatenate(positions)), start, end)
        if not len(piece.batches) and not damages and expected == start:
            raise BrokerError(f"{self._place}: the broker sent no whole batch at offset {start}")
        piece.damages += [damage for damage in damages if damage.log_offset < end]
        piece.end = max(piece.end, min(expected, end))
        piece.size_bytes = len(records)
        return piece

    def _damage(self, data: Bytes, position: int, expected: int) -> tuple[int, int]:
        """Returns the size of the damaged bytes at a position, and the offset that follows them."""
        limit = content_bytes(data)
        following = find_batch(data, position + 1, limit, expected)
        if following is not None:
            return following - position, int.from_bytes(data[following : following + _OFFSET_BYTES].tobytes(), "big")
        size = _size(data, position)
        next_offset = _next_offset(data, position)
        if not 0 < size <= limit - position or next_offset <= expected:
            raise BrokerError(f"{self._place}: the bytes that the broker sent for offset {expected} are no batch")
        return size, next_offset


def accept_loss(loss: str, *, fails: bool) -> None:
    """Raises DataLossError if the option says so. Otherwise logs the loss."""
    if fails:
        raise DataLossError(f"{loss}. Set failOnDataLoss=false to read what is there")
    _logger.warning("%s", loss)


def _size(data: Bytes, position: int) -> int:
    length = data[position + _OFFSET_BYTES : position + LOG_OVERHEAD_BYTES].tobytes()
    return int.from_bytes(length, "big", signed=True) + LOG_OVERHEAD_BYTES


def _next_offset(data: Bytes, position: int) -> int:
    """Returns the offset after the batch at a position."""
    base = int.from_bytes(data[position : position + _OFFSET_BYTES].tobytes(), "big", signed=True)
    delta = data[position + _LAST_DELTA_AT : position + _LAST_DELTA_AT + 4].tobytes()
    return base + int.from_bytes(delta, "big", signed=True) + 1
