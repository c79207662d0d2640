# SPDX-License-Identifier: Apache-2.0
"""Reads the values of offset commits, a whole column per field.

The layout comes from the broker's schema of OffsetCommitValue, so both read the same bytes the same way. The broker's
decoder reads the few values with unusual tagged fields.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from kcoord.pipeline.buffers import Flags, Gather, Ints, content_bytes, uvarints
from kcoord_protocol.errors import DecodeError
from kcoord_protocol.messages import OffsetCommitValue
from kcoord_protocol.schema import FieldSchema

_SIZES: Final = {"int8": 1, "int16": 2, "int32": 4, "int64": 8, "uuid": 16}
_VERSION_BYTES: Final = 2
_UUID_TAG_BYTES: Final = 18
"""Size of a tagged uuid field: tag, size, uuid."""


@dataclass(slots=True)
class OffsetValues:
    """One row per value. `metadata_at` and `metadata_size` locate the metadata in the buffer.

    `readable` rows have a known version and could be read. `errors` has the reasons for the others by row. An unknown
    version is not an error.
    """

    version: Ints
    numbers: dict[str, Ints]
    metadata_at: Ints
    metadata_size: Ints
    topic_id: npt.NDArray[np.void]
    has_topic_id: Flags
    readable: Flags
    errors: dict[int, str] = field(default_factory=dict)


NUMBERS: Final = tuple(
    field.attribute
    for field in OffsetCommitValue.message_schema.root.fields
    if field.element_type in ("int32", "int64")
)


def read_offset_values(gather: Gather, at: Ints, size: Ints) -> OffsetValues:
    """Reads the values at `at`, which have `size` bytes each and are not null."""
    count = len(at)
    versions = np.where(size >= _VERSION_BYTES, gather.int16(at), -1)
    values = OffsetValues(
        versions,
        {name: np.full(count, -1, np.int64) for name in NUMBERS},
        np.zeros(count, np.int64),
        np.zeros(count, np.int64),
        np.zeros(count, "V16"),
        np.zeros(count, np.bool_),
        np.zeros(count, np.bool_),
    )
    for row in np.flatnonzero(size < _VERSION_BYTES).tolist():
        values.errors[row] = f"the value has {size[row]} bytes"
    for version in np.unique(versions).tolist():
        if version in OffsetCommitValue.valid_versions:
            rows = slice(None) if (versions == version).all() else np.flatnonzero(versions == version)
            _read_version(gather, at, size, values, version, rows)
    return values


def _read_version(gather: Gather, at: Ints, size: Ints, values: OffsetValues, version: int, rows: slice | Ints) -> None:
    end = at[rows] + size[rows]
    position = at[rows] + _VERSION_BYTES
    last = content_bytes(gather.data)
    is_flexible = OffsetCommitValue.is_flexible(version)
    fields = [field for field in OffsetCommitValue.message_schema.root.fields if version in field.versions]
    for schema in fields:
        if schema.is_tagged(version):
            continue
        if schema.element_type == "string":
            position = _read_text(gather, position, values, rows, is_flexible=is_flexible)
        else:
            values.numbers[schema.attribute][rows] = getattr(gather, schema.element_type)(position)
            position = position + _SIZES[schema.element_type]
        position = np.clip(position, 0, last)
    good = position <= end
    if is_flexible:
        tagged = [schema for schema in fields if schema.is_tagged(version)]
        position, good = _read_tags(gather, position, values, rows, tagged)
    good &= position == end
    good &= values.metadata_size[rows] >= 0
    values.readable[rows] = good
    numbers = np.arange(len(at))[rows]
    for row in numbers[~good].tolist():
        finish_slowly(gather, values, row, int(at[row]), int(size[row]), version)


def _read_text(gather: Gather, position: Ints, values: OffsetValues, rows: slice | Ints, *, is_flexible: bool) -> Ints:
    if is_flexible:
        raw, used = uvarints(gather.words(position))
        size = np.minimum(raw, np.uint64(1 << 40)).astype(np.int64) - 1
    else:
        size, used = gather.int16(position), np.full(len(position), 2)
    values.metadata_at[rows] = position + used
    values.metadata_size[rows] = size
    return position + used + np.maximum(size, 0)


def _read_tags(
    gather: Gather, position: Ints, values: OffsetValues, rows: slice | Ints, tagged: list[FieldSchema]
) -> tuple[Ints, Flags]:
    """Reads the tagged fields if there are none, or only the topic id. Returns the end, and which rows are read.

    The broker's decoder reads the other rows.
    """
    assert [field.attribute for field in tagged] == ["topic_id"]
    head = gather.words(position)
    is_none = (head & np.uint64(0xFF)) == 0
    expected = np.uint64(1 | (tagged[0].tag or 0) << 8 | _SIZES["uuid"] << 16)
    is_id = (head & np.uint64(0xFFFFFF)) == expected
    values.topic_id[rows] = gather.uuids(np.minimum(position + 3, content_bytes(gather.data)))
    values.has_topic_id[rows] = is_id
    return position + 1 + np.where(is_id, _UUID_TAG_BYTES, 0), is_none | is_id


def finish_slowly(gather: Gather, values: OffsetValues, row: int, at: int, size: int, version: int) -> None:
    """Reads one value with the broker's decoder. It has unusual tagged fields, or its bytes are malformed."""
    data = gather.data[at + _VERSION_BYTES : at + size].tobytes()
    try:
        value = OffsetCommitValue.decode(data, version)
    except DecodeError as error:
        values.errors[row] = str(error)
        return
    values.readable[row] = True
    values.topic_id[row] = np.frombuffer(value.topic_id, "V16")[0]
    values.has_topic_id[row] = True
