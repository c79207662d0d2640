# SPDX-License-Identifier: Apache-2.0
"""Makes Arrow columns from numpy arrays and from positions in a buffer, without a Python object per row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from kcoord.pipeline.buffers import Bytes, Flags, Gather, Ints
from kcoord.pipeline.schemas import TIMESTAMP
from kcoord_protocol.uuid import ZERO_UUID, uuid_to_string

_INLINE_BYTES: Final = 12
_FIRST_BYTES: Final = np.array([(1 << 8 * size) - 1 for size in range(9)], np.uint64)
_NUMPY_TYPES: Final = {pa.int32(): np.int32, pa.int64(): np.int64}


def validity(valid: Flags | None) -> pa.Buffer | None:
    """Returns Arrow's bitmap of the rows that are not null, or None if no row is null."""
    if valid is None or bool(valid.all()):
        return None
    return pa.py_buffer(np.packbits(valid, bitorder="little"))


def int_column(values: Ints, dtype: pa.DataType, valid: Flags | None = None) -> pa.Array:
    """Makes a column of int32 or int64."""
    data = np.ascontiguousarray(values, _NUMPY_TYPES[dtype])
    return pa.Array.from_buffers(dtype, len(data), [validity(valid), pa.py_buffer(data)])


def timestamp_column(values_ms: Ints, valid: Flags | None = None) -> pa.Array:
    """Makes a column from milliseconds since 1970. Negative values become null."""
    has_time = values_ms >= 0
    present = has_time if valid is None else has_time & valid
    return pa.Array.from_buffers(TIMESTAMP, len(values_ms), [validity(present), pa.py_buffer(values_ms * 1000)])


def bool_column(values: Flags, valid: Flags | None = None) -> pa.Array:
    return pa.Array.from_buffers(
        pa.bool_(), len(values), [validity(valid), pa.py_buffer(np.packbits(values, bitorder="little"))]
    )


def views(data: Bytes, at: Ints, size: Ints, valid: Flags | None = None) -> pa.Array:
    """Makes a column of Arrow binary views of the buffer. A size below 0 is null.

    Only pieces of up to 12 bytes are copied; longer views refer to the buffer.
    """
    present = size >= 0
    if valid is not None:
        present &= valid
    size = np.where(present, size, 0)
    rows = np.zeros((len(at), 4), np.int32)
    rows[:, 0] = size
    words = np.ndarray((len(data) - 3,), "<i4", data, strides=(1,))
    at = np.where(present, at, 0)
    rows[:, 1] = words[at]
    rows[:, 3] = at
    short = np.flatnonzero(size <= _INLINE_BYTES)
    if len(short):
        rows[short] = _inline(data, at[short], size[short])
    return pa.Array.from_buffers(pa.binary_view(), len(at), [validity(present), pa.py_buffer(rows), pa.py_buffer(data)])


def _inline(data: Bytes, at: Ints, size: Ints) -> npt.NDArray[np.int32]:
    """Makes views that hold their bytes themselves, followed by zeros."""
    gather = Gather(data)
    rows = np.empty((len(at), 4), np.int32)
    rows[:, 0] = size
    rows[:, 1:3] = (gather.words(at) & _FIRST_BYTES[np.minimum(size, 8)]).view(np.int32).reshape(-1, 2)
    rows[:, 3] = (gather.words(at + 8) & _FIRST_BYTES[np.maximum(size - 8, 0)]).view(np.int32)[::2]
    return rows


def pieces(data: Bytes, at: Ints, size: Ints) -> pa.Array:
    """Copies pieces of the buffer into a binary column. A size below 0 is null."""
    return views(data, at, size).cast(pa.binary())


def empty_texts(present: Flags) -> pa.Array:
    """Makes a column of "" and nulls."""
    offsets = pa.py_buffer(np.zeros(len(present) + 1, np.int32))
    return pa.Array.from_buffers(pa.string(), len(present), [validity(present), offsets, pa.py_buffer(b"")])


def text_column(binary: pa.Array) -> pa.Array:
    """Decodes binary views as UTF-8. Replacement characters stand for invalid bytes."""
    try:
        return pc.cast(binary, pa.string())
    except pa.ArrowInvalid:
        texts = (None if value is None else value.decode("utf-8", "replace") for value in binary.to_pylist())
        return pa.array(texts, pa.string())


def uuid_column(ids: npt.NDArray[np.void], valid: Flags) -> pa.Array:
    """Makes a column of uuids in Kafka's text form. The zero uuid becomes null."""
    if not valid.any():
        return pa.nulls(len(ids), pa.string())
    words = np.ascontiguousarray(ids).view(np.uint64).reshape(-1, 2)
    if valid.all() and (words == words[0]).all():
        first = ids[0].tobytes()
        return pa.repeat(pa.scalar(None if first == ZERO_UUID else uuid_to_string(first), pa.string()), len(ids))
    raw = pa.Array.from_buffers(pa.binary(16), len(ids), [validity(valid), pa.py_buffer(words)])
    encoded = raw.dictionary_encode()
    texts = [None if uuid == ZERO_UUID else uuid_to_string(uuid) for uuid in encoded.dictionary.to_pylist()]
    return pa.array(texts, pa.string()).take(encoded.indices)


def spread(values: Sequence[object], rows: Ints, count: int, dtype: pa.DataType) -> pa.Array:
    """Makes a column of `count` rows that has `values` at `rows` and null elsewhere."""
    if not len(rows):
        return pa.nulls(count, dtype)
    index = np.zeros(count, np.int64)
    index[rows] = np.arange(len(rows))
    present = np.zeros(count, np.bool_)
    present[rows] = True
    return pa.array(values, dtype).take(int_column(index, pa.int64(), present))
