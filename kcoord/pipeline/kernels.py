# SPDX-License-Identifier: Apache-2.0
"""The inner loops of the decoder, in numpy or compiled by numba, chosen by name.

Both give the same results. numba halves the CPU time of decoding, but costs 0.35 s and 115 MB in each process before
its first record. docs/performance.md, "Data pipeline", has the figures.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache
from typing import Literal, NamedTuple, TypeAlias

import pyarrow as pa

from kcoord.pipeline.batch_table import walk
from kcoord.pipeline.buffers import Bytes, Gather, Ints
from kcoord.pipeline.columns import pieces
from kcoord.pipeline.keys import ArrowKeyIndex, KeyIndex
from kcoord.pipeline.offset_values import OffsetValues, read_offset_values
from kcoord.pipeline.record_split import Split, split_records

DecoderName: TypeAlias = Literal["auto", "numpy", "numba"]


class Kernels(NamedTuple):
    """The inner loops of the decoder.

    `walk` finds batches, `split_records` cuts them into records, `read_offset_values` reads offset commits, `key_index`
    makes a new KeyIndex, and `pieces` copies bytes into a column.
    """

    name: str
    walk: Callable[[Bytes, int, int], tuple[Ints, int]]
    split_records: Callable[[Bytes, Ints, Ints, Ints], Split]
    read_offset_values: Callable[[Gather, Ints, Ints], OffsetValues]
    key_index: Callable[[], KeyIndex]
    pieces: Callable[[Bytes, Ints, Ints], pa.Array]


NUMPY = Kernels("numpy", walk, split_records, read_offset_values, ArrowKeyIndex, pieces)


@cache
def kernels(name: DecoderName) -> Kernels:
    """Returns the inner loops of that name. `auto` means numba if it is installed, else numpy.

    Raises ImportError for `numba` if it is not installed.
    """
    if name == "numpy" or (name == "auto" and importlib.util.find_spec("numba") is None):
        return NUMPY
    try:
        from kcoord.pipeline import numba_kernels as compiled
        from kcoord.pipeline.numba_keys import HashKeyIndex
    except ImportError as error:
        raise ImportError(
            "decoder: numba is not installed: pip install '.[spark-fast]' in a checkout of kcoord"
        ) from error
    loops = compiled.walk, compiled.split_records, compiled.read_offset_values
    return Kernels("numba", *loops, HashKeyIndex, compiled.pieces)
