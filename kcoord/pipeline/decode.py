# SPDX-License-Identifier: Apache-2.0
"""From the bytes of batches to chunks of records: decompression, cutting into records, keys."""

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

NOT_DECODED: Final = "the records of the batch do not add up"


class Decoder:
    """Decodes batches of one log partition, remembering keys from one call to the next."""

    def __init__(self, log_partition: int, keys: KeyTable, kernels: Kernels = NUMPY) -> None:
        self._log_partition = log_partition
        self._keys = keys
        self._kernels = kernels

    def decode(self, data: Bytes, batches: Batches, resolution: Resolution) -> tuple[RecordChunk, dict[int, str]]:
        """The records of the batches in `data`, and what is wrong with the batches (rows) that have none here."""
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
    """Batches that could not be cut, or whose offsets do not rise within their bounds."""
    bad = ~split.ok
    falling = np.flatnonzero((np.diff(records.offset) <= 0) & (np.diff(records.batch) == 0))
    bad[records.batch[falling]] = True
    beyond = np.flatnonzero(records.offset > batches.last_offset[records.batch])
    bad[records.batch[beyond]] = True
    return bad


def _decompressed(
    data: Bytes, batches: Batches, start: Ints, end: Ints, errors: dict[int, str]
) -> tuple[Bytes, Ints, Ints]:
    """The buffer with the decompressed records behind it, and where the records of each batch lie now."""
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
