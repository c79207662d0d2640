# SPDX-License-Identifier: Apache-2.0
"""Keys of coordinator records. Few keys make most of a log, so each distinct one is decoded once and looked up after
that.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Final, NamedTuple, Protocol

import numpy as np
import pyarrow as pa

from kcoord.logtools.decode import group_id_of
from kcoord.pipeline.buffers import Bytes, Flags, Ints
from kcoord.pipeline.columns import int_column, views
from kcoord.runtime.serde import GROUP_RECORDS
from kcoord_protocol.errors import DecodeError
from kcoord_protocol.messages import Message, message_class

_KEY_NAMES: Final = (*GROUP_RECORDS, "LegacyOffsetCommit")
KEY_CLASSES: Final[dict[int, type[Message]]] = {
    cls.api_key: cls for cls in (message_class(f"{name}Key") for name in _KEY_NAMES)
}
NO_TYPE: Final = -1
OFFSET_TYPES: Final = (0, 1)
GROUP_TYPES: Final = (2, 3)
_OFFSET_COMMIT: Final = b"\0\1"
_LONGEST_TEXT: Final = 0x7FFF
_MOST_KEYS: Final = 1 << 20
"""So many keys are remembered, or those of one range."""


class Key(NamedTuple):
    """What a key says; None for what its type does not have."""

    record_type: int = NO_TYPE
    record_name: str | None = None
    group: str | None = None
    topic: str | None = None
    partition: int = -1
    member_id: str | None = None
    regex: str | None = None
    error: str | None = None


def _snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


RECORD_NAMES: Final = {
    record_type: _snake_case(cls.message_name.removesuffix("Key")) for record_type, cls in KEY_CLASSES.items()
}


def _read_offset_key(data: bytes) -> Key | None:
    """The key of an offset commit, where all is as it should be: other keys are few."""
    if not data.startswith(_OFFSET_COMMIT) or len(data) > _LONGEST_TEXT:
        return None
    group_end = 4 + int.from_bytes(data[2:4], "big")
    topic_end = group_end + 2 + int.from_bytes(data[group_end : group_end + 2], "big")
    if topic_end + 4 != len(data):
        return None
    partition = int.from_bytes(data[topic_end:], "big", signed=True)
    try:
        return Key(1, RECORD_NAMES[1], data[4:group_end].decode(), data[group_end + 2 : topic_end].decode(), partition)
    except UnicodeDecodeError:
        return None


@lru_cache(maxsize=1 << 16)
def read_key(data: bytes) -> Key:
    """Never fails: what cannot be read has an `error`, a type that is not known its number and its group alone. The
    tasks of a worker meet the same keys one after the other.
    """
    return _read_offset_key(data) or read_any_key(data)


def read_any_key(data: bytes) -> Key:
    """As `read_key`, by the broker's schemas."""
    if len(data) < 2:
        return Key(error=f"the key has {len(data)} bytes")
    record_type = int.from_bytes(data[:2], "big", signed=True)
    cls = KEY_CLASSES.get(record_type)
    if cls is None:
        return Key(record_type, group=group_id_of(data))
    name = RECORD_NAMES[record_type]
    try:
        key = cls.decode(data[2:], 0)
    except DecodeError as error:
        return Key(record_type, name, group_id_of(data), error=str(error))
    group = getattr(key, "group", None)
    return Key(
        record_type,
        name,
        getattr(key, "group_id", "") if group is None else group,
        getattr(key, "topic", None),
        getattr(key, "partition", -1),
        getattr(key, "member_id", None),
        getattr(key, "regular_expression", None),
    )


class KeyIndex(Protocol):
    """Numbers keys in the order in which it first sees them."""

    def find(self, data: Bytes, at: Ints, size: Ints) -> tuple[Ints, list[bytes]]:
        """The number of each key, -1 for a size below 0; and the keys that are new, in the order of their numbers."""


class ArrowKeyIndex:
    """Arrow finds the distinct keys of a piece of a log, a dictionary those that were there before."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}

    def find(self, data: Bytes, at: Ints, size: Ints) -> tuple[Ints, list[bytes]]:
        encoded = views(data, at, size).dictionary_encode()
        distinct = encoded.dictionary.to_pylist()
        known = self._numbers
        first = len(known)
        numbers = [known.setdefault(key, len(known)) for key in distinct]
        indices = encoded.indices.fill_null(len(numbers)) if encoded.indices.null_count else encoded.indices
        found = np.array([*numbers, -1], np.int64)[indices.to_numpy(zero_copy_only=False)]
        return found, [key for key, number in zip(distinct, numbers, strict=True) if number >= first]


class KeyTable:
    """Keeps what the keys say that it has seen, as columns."""

    def __init__(self, index: KeyIndex | None = None) -> None:
        self.keys: list[Key] = []
        self._index = index or ArrowKeyIndex()
        self._ints: dict[str, Ints] = {}
        self._texts: dict[str, pa.Array] = {}

    @property
    def is_full(self) -> bool:
        """Time for a new one: it holds on to every key that it has seen."""
        return len(self.keys) > _MOST_KEYS

    def columns(self, data: Bytes, at: Ints, size: Ints, present: Flags) -> KeyColumns:
        """Of the keys at `at`; records that are not `present` get none."""
        numbers, new = self._index.find(data, at, size)
        self.keys += map(read_key, new)
        return KeyColumns(self, numbers if present.all() else np.where(present, numbers, -1))

    def ints(self, attribute: str) -> Ints:
        """A number of each key, then -1 for records without one; for a text 1 or 0, whether there is one."""
        known = self._ints.get(attribute)
        if known is None or len(known) <= len(self.keys):
            first = 0 if known is None else len(known) - 1
            values = (getattr(key, attribute) for key in self.keys[first:])
            new = np.array([value if type(value) is int else value is not None for value in values], np.int64)
            known = self._ints[attribute] = np.concatenate([known[:first] if known is not None else new[:0], new, [-1]])
        return known

    def places(self) -> Ints | None:
        """A number of each key that all keys of one committed offset share, then -1; None where every key has its own:
        a second type of key for offset commits is in logs of old releases alone.
        """
        types = self.ints("record_type")
        if not (types == OFFSET_TYPES[0]).any():
            return None
        places = np.arange(len(types))
        places[-1] = -1
        first: dict[tuple[str | None, str | None, int], int] = {}
        for number in np.flatnonzero(np.isin(types, OFFSET_TYPES)).tolist():
            key = self.keys[number]
            if key.error is None:
                places[number] = first.setdefault((key.group, key.topic, key.partition), number)
        return places

    def texts(self, attribute: str) -> pa.Array:
        """A text of each key."""
        known = self._texts.get(attribute)
        first = 0 if known is None else len(known)
        if known is None or first < len(self.keys):
            new = pa.array([getattr(key, attribute) for key in self.keys[first:]], pa.string())
            known = self._texts[attribute] = new if known is None else pa.concat_arrays([known, new])
        return known


class KeyColumns:
    """The keys of some records: `numbers` are those of the KeyTable, -1 for a record without a key."""

    def __init__(self, table: KeyTable, numbers: Ints) -> None:
        self._table = table
        self.numbers = numbers
        self.types = table.ints("record_type")[numbers]

    def __getitem__(self, row: int) -> Key:
        return self._table.keys[int(self.numbers[row])]

    def rows(self, chosen: Flags | Ints | slice) -> KeyColumns:
        return KeyColumns(self._table, self.numbers[chosen])

    @property
    def places(self) -> Ints:
        """As `numbers`, but the same for all records of one committed offset."""
        places = self._table.places()
        return self.numbers if places is None else places[self.numbers]

    def flags(self, test: Callable[[Key], bool]) -> Flags:
        """Which records have a key that passes."""
        return np.array([*map(test, self._table.keys), False], np.bool_)[self.numbers]

    @property
    def has_error(self) -> Flags:
        """Which records have a key that could not be read."""
        return np.equal(self._table.ints("error")[self.numbers], 1)

    def partitions(self) -> Ints:
        return self._table.ints("partition")[self.numbers]

    def texts(self, attribute: str) -> pa.Array:
        """A text of each record's key."""
        numbers, texts = self.numbers, self._table.texts(attribute)
        if texts.null_count == len(texts):
            return pa.nulls(len(numbers), pa.string())
        present = numbers >= 0
        index = int_column(numbers, pa.int64(), None if present.all() else present)
        return texts.take(index)
