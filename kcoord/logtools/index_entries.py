# SPDX-License-Identifier: Apache-2.0
"""Decodes index files without any check of the order of their entries, for the tools that print and check them."""

from __future__ import annotations

import struct
from typing import Final

from kcoord.storage.index import OFFSET_ENTRY_BYTES, TIME_ENTRY_BYTES, OffsetPosition, TimestampOffset

_OFFSET_ENTRY: Final = struct.Struct(">ii")
_TIME_ENTRY: Final = struct.Struct(">qi")


def offset_entries(base_offset: int, data: bytes) -> list[OffsetPosition]:
    """Returns the complete entries of an .index file."""
    whole = len(data) - len(data) % OFFSET_ENTRY_BYTES
    return [OffsetPosition(base_offset + delta, at) for delta, at in _OFFSET_ENTRY.iter_unpack(data[:whole])]


def time_entries(base_offset: int, data: bytes) -> list[TimestampOffset]:
    """Returns the complete entries of a .timeindex file."""
    whole = len(data) - len(data) % TIME_ENTRY_BYTES
    return [TimestampOffset(time, base_offset + delta) for time, delta in _TIME_ENTRY.iter_unpack(data[:whole])]
