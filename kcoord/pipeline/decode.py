# SPDX-License-Identifier: Apache-2.0
"""Decodes batches into chunks of records: decompression, cutting into records, keys.

Theory of operation. One task of a job reads one or more ranges of log partitions. Each block passes these steps:

1. `log_reader.read_pieces` reads a block of a segment file and finds its batches (`batch_table.scan`). The result is
   a `Piece`: a buffer, and a table with one row per batch.
2. `transactions.Resolver` takes the outcome of each transactional batch from the markers (`range_reader`).
3. `Decoder.decode`, here, appends decompressed records to a copy of the buffer, cuts the batches into records
   (`record_split`) and numbers the keys (`keys.KeyTable`). The result is a `RecordChunk`, which holds positions in the
   buffer. No value has been read yet.
4. `record_columns` and `tables` make the columns that the query reads. `offset_values` reads the values of offset
   commits a column at a time; `group_values` reads all other values one by one with the broker's decoder.

The inner loops of steps 1, 3 and 4 exist twice, in numpy and compiled by numba, with equal results (`kernels`).

Rules:

* Bad bytes never raise. A batch that cannot be cut becomes an entry of `errors` and has no records. A key or value
  that cannot be read becomes the `error` of its record.
* No byte outside of a buffer is read: positions are checked or clipped, and padding follows the content (`buffers`).
* A buffer does not change once its chunk exists, since Arrow columns may refer to it without a copy.
* Each task runs in one thread of a Spark Python worker. Tasks share nothing but caches, such as that of
  `keys.read_key`. A task changes nothing in the log, so Spark may run it again after a crash.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from kcoord.pipeline.batch_table import Batches
from kcoord.pipeline.buffers import Bytes, Flags, Ints, content_bytes, padded_copy
from kcoord.pipeline.chunk import RecordChunk, Records
from kcoord.pipeline.kernels import NUMPY, Kernels
from kcoord.pipeline.keys import KeyTable
from kcoord.pipeline.record_split import Split, sane_counts
from kcoord.pipeline.transactions import Resolution
from kcoord_protocol.batch_header import BATCH_OVERHEAD_BYTES
from kcoord_protocol.compression import Compression, decompress
from kcoord_protocol.errors import CorruptBatchError

NOT_DECODED: Final = "the records of the batch are malformed"


class Decoder:
    """Decodes batches of one log partition. The key table is kept from one call to the next."""

    def __init__(self, log_partition: int, keys: KeyTable, kernels: Kernels = NUMPY) -> None:
        self._log_partition = log_partition
        self._keys = keys
        self._kernels = kernels

    def decode(self, data: Bytes, batches: Batches, resolution: Resolution) -> tuple[RecordChunk, dict[int, str]]:
        """Returns the records of the batches in `data`, and the error of each bad batch by its row.

        The records of bad batches are omitted.
        """
        start, end = batches.position + BATCH_OVERHEAD_BYTES, batches.position + batches.size_bytes
        errors: dict[int, str] = {}
        if batches.codec.any():
            data, start, end = _decompressed(data, batches, start, end, errors)
        split = self._kernels.split_records(data, start, end, batches.count)
        counts = sane_counts(start, end, batches.count)
        records = Records.of(batches, split, counts)
        bad = _bad_batches(batches, split, records)
        if bad.any():
            for row in np.flatnonzero(bad).tolist():
                errors.setdefault(row, NOT_DECODED)
            records = records.rows(~bad[records.batch])
        control = batches.is_control[records.batch]
        present = (records.key_size >= 0) & ~control
        keys = self._keys.columns(data, records.key_at, records.key_size, present)
        return RecordChunk(self._log_partition, data, batches, resolution, records, keys, self._kernels), errors


def _bad_batches(batches: Batches, split: Split, records: Records) -> Flags:
    """Flags the batches that could not be cut, and those whose record offsets do not rise or exceed the last offset."""
    bad = ~split.ok
    falling = np.flatnonzero((np.diff(records.offset) <= 0) & (np.diff(records.batch) == 0))
    bad[records.batch[falling]] = True
    beyond = np.flatnonzero(records.offset > batches.last_offset[records.batch])
    bad[records.batch[beyond]] = True
    return bad


def _decompressed(
    data: Bytes, batches: Batches, start: Ints, end: Ints, errors: dict[int, str]
) -> tuple[Bytes, Ints, Ints]:
    """Returns a copy of the buffer with the decompressed records appended, and start and end of each batch's records.

    Adds the batches that cannot be decompressed to `errors`.
    """
    start, end = start.copy(), end.copy()
    size = content_bytes(data)
    parts = [data[:size]]
    for row in np.flatnonzero(batches.codec).tolist():
        try:
            codec = Compression(int(batches.codec[row]))
            body = data[start[row] : end[row]].tobytes()
            records = decompress(codec, body) if body else b""
        except (CorruptBatchError, ValueError) as error:
            errors[row] = str(error)
            records = b""
        parts.append(np.frombuffer(records, np.uint8))
        start[row], end[row] = size, size + len(records)
        size += len(records)
    return padded_copy(*parts), start, end
