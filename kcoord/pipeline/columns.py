# SPDX-License-Identifier: Apache-2.0
"""Arrow columns from numpy arrays and from positions in a buffer, without a Python object per row."""

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
    """The bitmap of what is not null; None where all is."""
    if valid is None or bool(valid.all()):
        return None
    return pa.py_buffer(np.packbits(valid, bitorder="little"))


def int_column(values: Ints, dtype: pa.DataType, valid: Flags | None = None) -> pa.Array:
    """A column of int32 or int64."""
    data = np.ascontiguousarray(values, _NUMPY_TYPES[dtype])
    return pa.Array.from_buffers(dtype, len(data), [validity(valid), pa.py_buffer(data)])


def timestamp_column(values_ms: Ints, valid: Flags | None = None) -> pa.Array:
    """Milliseconds since 1970; negative ones stand for none."""
    known = values_ms >= 0
    present = known if valid is None else known & valid
    return pa.Array.from_buffers(TIMESTAMP, len(values_ms), [validity(present), pa.py_buffer(values_ms * 1000)])


def bool_column(values: Flags, valid: Flags | None = None) -> pa.Array:
    return pa.Array.from_buffers(
        pa.bool_(), len(values), [validity(valid), pa.py_buffer(np.packbits(values, bitorder="little"))]
    )


def views(data: Bytes, at: Ints, size: Ints, valid: Flags | None = None) -> pa.Array:
    """Pieces of the buffer as Arrow binary views: nothing is copied but what has up to 12 bytes. A size below 0 is
    null.
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
    """Views that hold their bytes themselves, zeros behind them."""
    gather = Gather(data)
    rows = np.empty((len(at), 4), np.int32)
    rows[:, 0] = size
    rows[:, 1:3] = (gather.words(at) & _FIRST_BYTES[np.minimum(size, 8)]).view(np.int32).reshape(-1, 2)
    rows[:, 3] = (gather.words(at + 8) & _FIRST_BYTES[np.maximum(size - 8, 0)]).view(np.int32)[::2]
    return rows


def pieces(data: Bytes, at: Ints, size: Ints) -> pa.Array:
    """Pieces of the buffer as a binary column. A size below 0 is null."""
    return views(data, at, size).cast(pa.binary())


def empty_texts(present: Flags) -> pa.Array:
    """A column of "" and nulls."""
    offsets = pa.py_buffer(np.zeros(len(present) + 1, np.int32))
    return pa.Array.from_buffers(pa.string(), len(present), [validity(present), offsets, pa.py_buffer(b"")])


def text_column(found: pa.Array) -> pa.Array:
    """Views as text. What is no UTF-8 has replacement characters."""
    try:
        return pc.cast(found, pa.string())
    except pa.ArrowInvalid:
        texts = (None if each is None else each.decode("utf-8", "replace") for each in found.to_pylist())
        return pa.array(texts, pa.string())


def uuid_column(ids: npt.NDArray[np.void], valid: Flags) -> pa.Array:
    """Uuids in Kafka's text form; all zero is none."""
    if not valid.any():
        return pa.nulls(len(ids), pa.string())
    words = np.ascontiguousarray(ids).view(np.uint64).reshape(-1, 2)
    if valid.all() and (words == words[0]).all():
        one = ids[0].tobytes()
        return pa.repeat(pa.scalar(None if one == ZERO_UUID else uuid_to_string(one), pa.string()), len(ids))
    raw = pa.Array.from_buffers(pa.binary(16), len(ids), [validity(valid), pa.py_buffer(words)])
    encoded = raw.dictionary_encode()
    texts = [None if each == ZERO_UUID else uuid_to_string(each) for each in encoded.dictionary.to_pylist()]
    return pa.array(texts, pa.string()).take(encoded.indices)


def spread(values: Sequence[object], rows: Ints, count: int, dtype: pa.DataType) -> pa.Array:
    """A column of `count` rows that has `values` at `rows` and null elsewhere."""
    if not len(rows):
        return pa.nulls(count, dtype)
    index = np.zeros(count, np.int64)
    index[rows] = np.arange(len(rows))
    present = np.zeros(count, np.bool_)
    present[rows] = True
    return pa.array(values, dtype).take(int_column(index, pa.int64(), present))
