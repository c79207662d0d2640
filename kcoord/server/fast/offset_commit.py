# SPDX-License-Identifier: Apache-2.0
"""The fast path of OffsetCommit: a frame that differs from an earlier one only in its offsets is not decoded.

The commits of a consumer differ in the correlation id and in 12 bytes per partition, its *cell*: offset and leader
epoch. Invariant: if two frames have the same length and the same bytes around the cells, their requests differ only in
the fields of the cells. So everything learned from one frame holds for the other.

Whether the commit is accepted is decided for each request (`coordinator.group.offsets.packed_commit`): the shard is the
same, loaded and active, and the member may commit with this epoch. The response leaves when the records are durable.
If the write fails, the client gets an error.

`read_commit` reads the first frame of a kind, several times faster than the decoder. It accepts what consumers usually
send: version 6 or later, no metadata, no tagged fields, each partition once. It returns None for any other request, and
for a malformed frame; the decoder then handles it. Tests compare `read_commit` with the decoder.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from struct import Struct, error
from typing import TYPE_CHECKING, Final

from kcoord.coordinator.group.offsets.packed_commit import (
    FIRST_VERSION,
    FIRST_VERSION_WITH_TOPIC_IDS,
    CommitPlan,
    CommitShape,
    TopicShape,
    shared,
)
from kcoord.server.api.api_table import ApiTable, DeferredResponse, Exchange
from kcoord.server.api.authorization import Rights
from kcoord.server.fast.fast_path import AFTER_ID, BEFORE_ID, FastPath, Template, TopicName
from kcoord_protocol.acls import AclOperation, ResourceType
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.framing import encode_response
from kcoord_protocol.uuid import ZERO_UUID

if TYPE_CHECKING:
    from kcoord.server.shards.group_service import GroupService, ShardCommitter

MAX_PARTITIONS: Final = 20_000
"""Total number of partitions in the plans of one connection. A real consumer commits the partitions that it owns."""

FIRST_FLEXIBLE_VERSION: Final = 8
CELL_BYTES: Final = 12
"""Offset and leader epoch of a partition."""

_PARTITION_BYTES: Final = 4
_ROW: Final = Struct(">4s12x2s")
"""Partition, cell, and two bytes after it: empty or null metadata, and in flexible versions no tagged fields."""
_ROW_ENDS: Final = {True: {b"\0\0", b"\1\0"}, False: {b"\xff\xff", b"\0\0"}}
_ANSWER_ROW_ENDS: Final = {True: b"\0\0\0", False: b"\0\0"}
"""No error, and in flexible versions no tagged fields."""
_INT32: Final = Struct(">i")
_INT16: Final = Struct(">h")
_UUID_BYTES: Final = 16
_NO_THROTTLING: Final = bytes(4)


class _Unusual(Exception):
    """The frame is left to the decoder."""


@dataclass(slots=True)
class CommitFrame:
    """The fields of a request, the positions of its cells in the frame, and the body of a response without errors."""

    shape: CommitShape
    cells_at: list[int]
    answer: bytes


def read_commit(frame: bytes, body_at: int, version: int) -> CommitFrame | None:
    """Reads a request without its length, with its body at `body_at`. Returns None if the decoder has to read it."""
    if version < FIRST_VERSION:
        return None
    try:
        return _CommitReader(frame, body_at, version).read()
    except (_Unusual, IndexError, UnicodeDecodeError, error):
        return None


class _CommitReader:
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
        """Reads the size of an array; a null array is unusual."""
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
        """Reads a varint of at most two bytes; a longer one is unusual."""
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


@lru_cache(maxsize=512)
def _layout(fixed_sizes: tuple[int, ...]) -> Struct:
    """Returns a layout of cells, each followed by a number of bytes from `fixed_sizes`."""
    return Struct(">" + "".join(f"{CELL_BYTES}s{size}s" for size in fixed_sizes))


class _CommitTemplate(Template):
    """The lessons of an earlier frame: its layout, the plan of its commit, and the response."""

    __slots__ = ("committer", "fixed", "plan", "start", "unpack")

    def __init__(
        self, frame: bytes, cells_at: list[int], plan: CommitPlan, committer: ShardCommitter, answer: bytes
    ) -> None:
        super().__init__(answer)
        ends = [*cells_at[1:], len(frame)]
        self.start = shared(frame[:BEFORE_ID])
        self.unpack = _layout(
            tuple([end - at - CELL_BYTES for at, end in zip(cells_at, ends, strict=True)])
        ).unpack_from
        self.fixed = tuple([shared(part) for part in self.unpack(frame, cells_at[0])[1::2]])
        self.plan = plan
        self.committer = committer
        self.head, self.tail = shared(self.head), shared(self.tail)


class OffsetCommitFastPath(FastPath):
    """Remembers the commits of one connection by their length and the bytes before the first offset."""

    __slots__ = ("_apis", "_groups", "_known", "_members_only", "_on_response", "_partitions", "_topic_name")

    keys = (ApiKey.OFFSET_COMMIT,)
    learns_before_handler = True

    def __init__(
        self,
        groups: GroupService,
        apis: ApiTable,
        on_response: Callable[[], None],
        topic_name: TopicName,
        *,
        members_only: bool = False,
    ) -> None:
        """`members_only` leaves the commits of clients that are no members to the handler, for the audit log."""
        self._groups = groups
        self._members_only = members_only
        self._topic_name = topic_name
        self._apis = apis
        self._on_response = on_response
        self._known: dict[int, tuple[int, dict[bytes, _CommitTemplate]]] = {}
        self._partitions = 0

    def respond(self, frame: bytes, now_ms: int) -> DeferredResponse | None:
        """Commits the offsets if the frame is known and the member may commit; otherwise returns None and does nothing.

        The response leaves when the records are durable.
        """
        bucket = self._known.get(len(frame))
        if bucket is None:
            return None
        cells_at, plans = bucket
        template = plans.get(frame[AFTER_ID:cells_at])
        if template is None:
            return None
        fields = template.unpack(frame, cells_at)
        if fields[1::2] != template.fixed or not frame.startswith(template.start):
            return None
        deferred = DeferredResponse(frame, template.response_to(frame), self._apis, self._on_response)
        return deferred if template.committer.commit(template.plan, fields[::2], now_ms, deferred) else None

    def learn(self, exchange: Exchange, now_ms: int) -> DeferredResponse | None:
        """Remembers a request, and answers it as `respond` does.

        Commits to groups that do not exist yet are not remembered: most such groups commit once.
        """
        frame, bound = exchange.frame, exchange.bound
        version = bound.version
        read = read_commit(frame, exchange.body_at, version)
        committer = self._groups.committer(read.shape.group_id) if read is not None else None
        if read is None or committer is None or (self._members_only and read.shape.generation_or_epoch < 0):
            return None
        if exchange.rights is not None and not self._may_commit(exchange.rights, read.shape):
            return None
        size = len(frame)
        first = read.cells_at[0]
        bucket = self._known.get(size)
        if bucket is not None and (bucket[0] != first or frame[AFTER_ID:first] in bucket[1]):
            # The frame has the same length, but other partitions. The newest frame is the likeliest to be repeated.
            self._partitions -= sum(template.plan.count for template in self._known.pop(size)[1].values())
        plan = CommitPlan(read.shape, version)
        if self._partitions + plan.count > MAX_PARTITIONS:
            self._known.clear()
            self._partitions = 0
        self._partitions += plan.count
        answer = encode_response(0, bound.key, version, read.answer)
        plans = self._known.setdefault(size, (first, {}))[1]
        plans[frame[AFTER_ID:first]] = _CommitTemplate(frame, read.cells_at, plan, committer, answer)
        return self.respond(frame, now_ms)

    def _may_commit(self, rights: Rights, shape: CommitShape) -> bool:
        """Returns whether the client may read the group and all topics, which exist."""
        names = [topic.name or self._topic_name(topic.topic_id) for topic in shape.topics]
        return rights.allows(AclOperation.READ, ResourceType.GROUP, shape.group_id, logs_denial=False) and all(
            name is not None and rights.allows(AclOperation.READ, ResourceType.TOPIC, name, logs_denial=False)
            for name in names
        )
