# SPDX-License-Identifier: Apache-2.0
"""Keys of coordinator records.

A few keys make up most of a log, so each distinct key is decoded once and then looked up.
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
GROUP_TYPES: Final = (2, 3, 17)
"""The records of classic, KIP-848 and streams groups. Their tombstones end a group, or move it to another type."""
_OFFSET_COMMIT: Final = b"\0\1"
_LONGEST_TEXT: Final = 0x7FFF
_MOST_KEYS: Final = 1 << 20
"""A KeyTable with more keys than this is replaced before the next range."""


class Key(NamedTuple):
    """The fields of a key. A field that its type does not have is None, or -1 for the partition."""

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
    """Reads a sound key of an offset commit, the most frequent kind. Returns None for all other keys."""
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
    """Decodes a key. Never raises: a key that cannot be read has an `error`.

    An unknown type has only its number and its group. Results are cached, because the tasks of a worker read the same
    keys.
    """
    return _read_offset_key(data) or read_any_key(data)


def read_any_key(data: bytes) -> Key:
    """Does the same as `read_key`, with the broker's schemas and without the cache."""
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
        """Returns the number of each key, and the new keys in the order of their numbers.

        The number is -1 for a size below 0.
        """


class ArrowKeyIndex:
    """Finds the distinct keys of a block with Arrow, and their numbers in a dictionary."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}

    def find(self, data: Bytes, at: Ints, size: Ints) -> tuple[Ints, list[bytes]]:
        encoded = views(data, at, size).dictionary_encode()
        distinct = encoded.dictionary.to_pylist()
        number_by_key = self._numbers
        first = len(number_by_key)
        numbers = [number_by_key.setdefault(key, len(number_by_key)) for key in distinct]
        indices = encoded.indices.fill_null(len(numbers)) if encoded.indices.null_count else encoded.indices
        numbers_by_row = np.array([*numbers, -1], np.int64)[indices.to_numpy(zero_copy_only=False)]
        return numbers_by_row, [key for key, number in zip(distinct, numbers, strict=True) if number >= first]


class KeyTable:
    """Keeps the fields of all keys that it has seen, as columns."""

    def __init__(self, index: KeyIndex | None = None) -> None:
        self.keys: list[Key] = []
        self._index = index or ArrowKeyIndex()
        self._ints: dict[str, Ints] = {}
        self._texts: dict[str, pa.Array] = {}

    @property
    def is_full(self) -> bool:
        """True if the table should be replaced by a new one, since it never drops a key."""
        return len(self.keys) > _MOST_KEYS

    def columns(self, data: Bytes, at: Ints, size: Ints, present: Flags) -> KeyColumns:
        """Returns the keys at `at`. Records that are not `present` have no key."""
        numbers, new = self._index.find(data, at, size)
        self.keys += map(read_key, new)
        return KeyColumns(self, numbers if present.all() else np.where(present, numbers, -1))

    def ints(self, attribute: str) -> Ints:
        """Returns an attribute of each key, followed by -1 for records without a key.

        The value of a text attribute is 1 if the key has it, else 0.
        """
        ints = self._ints.get(attribute)
        if ints is None or len(ints) <= len(self.keys):
            first = 0 if ints is None else len(ints) - 1
            values = (getattr(key, attribute) for key in self.keys[first:])
            new = np.array([value if type(value) is int else value is not None for value in values], np.int64)
            ints = self._ints[attribute] = np.concatenate([ints[:first] if ints is not None else new[:0], new, [-1]])
        return ints

    def places(self) -> Ints | None:
        """Returns a number for each key, followed by -1. All keys of one committed offset have the same number.

        Returns None if no two keys share a number. Offset commits have a second key type only in logs of old releases.
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
        """Returns a text attribute of each key."""
        texts = self._texts.get(attribute)
        first = 0 if texts is None else len(texts)
        if texts is None or first < len(self.keys):
            new = pa.array([getattr(key, attribute) for key in self.keys[first:]], pa.string())
            texts = self._texts[attribute] = new if texts is None else pa.concat_arrays([texts, new])
        return texts


class KeyColumns:
    """The keys of some records. `numbers` are indexes in the KeyTable, -1 for a record without a key."""

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
        """Like `numbers`, but equal for all records of one committed offset, whatever the type of the key."""
        places = self._table.places()
        return self.numbers if places is None else places[self.numbers]

    def flags(self, test: Callable[[Key], bool]) -> Flags:
        """Flags the records with a key for which `test` is true."""
        return np.array([*map(test, self._table.keys), False], np.bool_)[self.numbers]

    @property
    def has_error(self) -> Flags:
        """Flags the records with a key that could not be read."""
        return np.equal(self._table.ints("error")[self.numbers], 1)

    def partitions(self) -> Ints:
        return self._table.ints("partition")[self.numbers]

    def texts(self, attribute: str) -> pa.Array:
        """Returns a text attribute of each record's key."""
        numbers, texts = self.numbers, self._table.texts(attribute)
        if texts.null_count == len(texts):
            return pa.nulls(len(numbers), pa.string())
        present = numbers >= 0
        index = int_column(numbers, pa.int64(), None if present.all() else present)
        return texts.take(index)
