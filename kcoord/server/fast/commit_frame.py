# SPDX-License-Identifier: Apache-2.0
"""Reads OffsetCommit requests of the ordinary kind off their bytes, several times faster than decoding does.

Ordinary are versions from 6 on, no metadata, no tags, each partition once: what consumers send all the time. Anything
else, and anything malformed, is `None` here and left to the decoder. Tests compare both.
"""

from __future__ import annotations

from dataclasses import dataclass
from struct import Struct, error
from typing import Final

from kcoord.coordinator.group.offsets.packed_commit import (
    FIRST_VERSION,
    FIRST_VERSION_WITH_TOPIC_IDS,
    CommitShape,
    TopicShape,
)
from kcoord_protocol.uuid import ZERO_UUID

FIRST_FLEXIBLE_VERSION: Final = 8
CELL_BYTES: Final = 12
"""Offset and leader epoch of a partition."""

_PARTITION_BYTES: Final = 4
_ROW: Final = Struct(">4s12x2s")
"""Partition, cell, and what follows it: empty or no metadata, and the end of the tags where there are tags."""
_ROW_ENDS: Final = {True: {b"\0\0", b"\1\0"}, False: {b"\xff\xff", b"\0\0"}}
_ANSWER_ROW_ENDS: Final = {True: b"\0\0\0", False: b"\0\0"}
"""No error, and no tags."""
_INT32: Final = Struct(">i")
_INT16: Final = Struct(">h")
_UUID_BYTES: Final = 16
_NO_THROTTLING: Final = bytes(4)


class _Unusual(Exception):
    """Left to the decoder."""


@dataclass(slots=True)
class CommitFrame:
    """What a request says, where its cells are in the frame, and the body of the answer if all of it is committed."""

    shape: CommitShape
    cells_at: list[int]
    answer: bytes


def read_commit(frame: bytes, body_at: int, version: int) -> CommitFrame | None:
    """`frame` is a request without its length, whose body begins at `body_at`."""
    if version < FIRST_VERSION:
        return None
    try:
        return _Reader(frame, body_at, version).read()
    except (_Unusual, IndexError, UnicodeDecodeError, error):
        return None


class _Reader:
    __slots__ = ("_at", "_flexible", "_frame", "_version")

    def __init__(self, frame: bytes, at: int, version: int) -> None:
        self._frame = frame
        self._at = at
        self._version = version
        self._flexible = version >= FIRST_FLEXIBLE_VERSION

    def read(self) -> CommitFrame:
        group_id = self._text()
        epoch = self._int32()
        member_id = self._text()
        # Static membership came with version 7.
        instance_id = self._nullable_text() if self._version > FIRST_VERSION else None
        topics: list[TopicShape] = []
        cells_at: list[int] = []
        count_at = self._at
        count = self._count()
        answer = [_NO_THROTTLING, self._frame[count_at : self._at]]
        for _ in range(count):
            topics.append(self._topic(cells_at, answer))
        self._tags(answer)
        if self._at != len(self._frame) or not cells_at:
            raise _Unusual
        if len({(topic.name, topic.topic_id) for topic in topics}) < len(topics):
            raise _Unusual
        return CommitFrame(CommitShape(group_id, epoch, member_id, instance_id, topics), cells_at, b"".join(answer))

    def _topic(self, cells_at: list[int], answer: list[bytes]) -> TopicShape:
        frame, start = self._frame, self._at
        name, topic_id = "", ZERO_UUID
        if self._version >= FIRST_VERSION_WITH_TOPIC_IDS:
            self._at += _UUID_BYTES
            topic_id = frame[start : self._at]
        else:
            name = self._text()
        count = self._count()
        first = self._at
        self._at = first + count * _ROW.size
        if self._at > len(frame):
            raise _Unusual
        answer.append(frame[start:first])
        partitions = []
        ends, answer_end = _ROW_ENDS[self._flexible], _ANSWER_ROW_ENDS[self._flexible]
        for partition, end in _ROW.iter_unpack(frame[first : self._at]):
            if end not in ends:
                raise _Unusual
            partitions.append(partition)
            answer += partition, answer_end
        if len(set(partitions)) < count:
            raise _Unusual
        cells_at += range(first + _PARTITION_BYTES, self._at, _ROW.size)
        self._tags(answer)
        return TopicShape(name, topic_id, [_INT32.unpack(partition)[0] for partition in partitions])

    def _tags(self, answer: list[bytes]) -> None:
        if self._flexible:
            if self._frame[self._at]:
                raise _Unusual
            self._at += 1
            answer.append(b"\0")

    def _count(self) -> int:
        """Of an array; one that is null is unusual."""
        count = self._uvarint() - 1 if self._flexible else self._int32()
        if count < 0:
            raise _Unusual
        return count

    def _text(self) -> str:
        text = self._nullable_text()
        if text is None:
            raise _Unusual
        return text

    def _nullable_text(self) -> str | None:
        size = self._uvarint() - 1 if self._flexible else self._int16()
        if size < 0:
            if size < -1:
                raise _Unusual
            return None
        start = self._at
        self._at = start + size
        if self._at > len(self._frame):
            raise _Unusual
        return self._frame[start : self._at].decode()

    def _uvarint(self) -> int:
        """Of at most two bytes."""
        low = self._frame[self._at]
        if low < 0x80:
            self._at += 1
            return low
        high = self._frame[self._at + 1]
        if not 0 < high < 0x80:
            raise _Unusual
        self._at += 2
        return low & 0x7F | high << 7

    def _int32(self) -> int:
        (value,) = _INT32.unpack_from(self._frame, self._at)
        self._at += _INT32.size
        return int(value)

    def _int16(self) -> int:
        (value,) = _INT16.unpack_from(self._frame, self._at)
        self._at += _INT16.size
        return int(value)
