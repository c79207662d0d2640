# SPDX-License-Identifier: Apache-2.0
"""The fast path of OffsetCommit requests: a frame that differs from an earlier one in offsets alone is not decoded.

A consumer's commits are equal but for the correlation id and, per partition, 12 bytes of offset and leader epoch: the
cells. Invariant: what a frame decodes to depends on its bytes alone, and in a frame of equal length with equal bytes
around the cells only the cells' fields can differ. So what was learned from one frame holds for the other; whether the
commit is accepted is decided anew (see `coordinator.group.packed_commit`). Other frames go the general way.
`kcoord.fast.paths.enable=false` switches it off, for debugging.
"""

from __future__ import annotations

from functools import lru_cache
from struct import Struct
from typing import TYPE_CHECKING, Final

from kcoord.coordinator.group.packed_commit import FIRST_VERSION_WITH_TOPIC_IDS, CommitPlan
from kcoord.server.exchange import ExchangeOwner, KnownExchange
from kcoord.server.handlers.offset_commit import success_response
from protocol.headers import encode_response
from protocol.messages import OffsetCommitRequest
from protocol.primitives import encode_uvarint

if TYPE_CHECKING:
    from kcoord.server.apis import BoundApi
    from kcoord.server.broker import Broker

MAX_PARTITIONS: Final = 20_000
"""Partitions in all that one connection may have plans for; a real consumer has those that it owns."""

_FIRST_FLEXIBLE_VERSION: Final = 8
_BEFORE_ID: Final = 4
_AFTER_ID: Final = 8
_PARTITION_BYTES: Final = 4
_CELL_BYTES: Final = 12
_CELL: Final = Struct(">qi")
_UUID_BYTES: Final = 16


@lru_cache(maxsize=512)
def _layout(fixed_sizes: tuple[int, ...]) -> Struct:
    """Cells, each followed by so many bytes that are always the same."""
    return Struct(">" + "".join(f"{_CELL_BYTES}s{size}s" for size in fixed_sizes))


class _KnownCommit:
    """What was learned from a frame: how it is laid out, what it means, and what it is answered with."""

    __slots__ = ("fixed", "head", "layout", "plan", "start", "tail")

    def __init__(self, frame: bytes, cells_at: list[int], plan: CommitPlan, answer: bytes) -> None:
        ends = [*cells_at[1:], len(frame)]
        self.start = frame[:_BEFORE_ID]
        self.layout = _layout(tuple(end - at - _CELL_BYTES for at, end in zip(cells_at, ends, strict=True)))
        self.fixed = self.layout.unpack_from(frame, cells_at[0])[1::2]
        self.plan = plan
        self.head, self.tail = answer[:_BEFORE_ID], answer[_AFTER_ID:]


class CommitMemo:
    """The commits of one connection, by their length and what precedes the first offset."""

    __slots__ = ("_broker", "_known", "_owner", "_partitions")

    def __init__(self, broker: Broker, owner: ExchangeOwner) -> None:
        self._broker = broker
        self._owner = owner
        self._known: dict[int, tuple[int, dict[bytes, _KnownCommit]]] = {}
        self._partitions = 0

    def answer(self, frame: bytes, now_ms: int) -> KnownExchange | None:
        """Commits, if the frame is of a known kind and may be; the answer comes when that is durable."""
        bucket = self._known.get(len(frame))
        if bucket is None:
            return None
        cells_at, plans = bucket
        known = plans.get(frame[_AFTER_ID:cells_at])
        if known is None:
            return None
        fields = known.layout.unpack_from(frame, cells_at)
        if fields[1::2] != known.fixed or not frame.startswith(known.start):
            return None
        exchange = KnownExchange(self._owner, frame, known.head + frame[_BEFORE_ID:_AFTER_ID] + known.tail)
        if not self._broker.groups.commit_packed(known.plan, fields[::2], now_ms, exchange):
            return None
        return exchange

    def learn(self, frame: bytes, body_at: int, request: object, bound: BoundApi, now_ms: int) -> KnownExchange | None:
        """Remembers a decoded request and answers it if that can be done now, which costs less than the general way;
        but not the first one of a group, which has to make its rows and may well stay the only one.
        """
        assert isinstance(request, OffsetCommitRequest)
        size = len(frame)
        if not self._broker.groups.has_offsets(request.group_id):
            return None
        version = bound.version
        if not CommitPlan.is_possible(request, version) or frame[body_at:] != request.encode(version):
            return None
        cells_at = find_cells(request, version, body_at)
        first = cells_at[0]
        bucket = self._known.get(size)
        if bucket is not None and (bucket[0] != first or frame[_AFTER_ID:first] in bucket[1]):
            # Another first cell, or other partitions: the last one is what is likely to come again.
            self._partitions -= sum(known.plan.count for known in self._known.pop(size)[1].values())
        plan = CommitPlan(request, version)
        if self._partitions + plan.count > MAX_PARTITIONS:
            self._known.clear()
            self._partitions = 0
        self._partitions += plan.count
        answer = encode_response(0, bound.key, version, success_response(request).encode(version))
        plans = self._known.setdefault(size, (first, {}))[1]
        plans[frame[_AFTER_ID:first]] = _KnownCommit(frame, cells_at, plan, answer)
        return self.answer(frame, now_ms)


def find_cells(request: OffsetCommitRequest, version: int, body_at: int) -> list[int]:
    """Where offset and leader epoch of each partition are in the frame that `request` was decoded from. It has no
    metadata and is encoded as we would encode it.
    """
    flexible = version >= _FIRST_FLEXIBLE_VERSION
    without_topics = OffsetCommitRequest(
        group_id=request.group_id,
        generation_id_or_member_epoch=request.generation_id_or_member_epoch,
        member_id=request.member_id,
        group_instance_id=request.group_instance_id,
    ).encode(version)
    # Behind what comes before the topics: their number, and tags in flexible versions.
    at = body_at + len(without_topics) - (2 if flexible else 4)
    at += _count_bytes(len(request.topics), flexible)
    cells = []
    for topic in request.topics:
        if version >= FIRST_VERSION_WITH_TOPIC_IDS:
            at += _UUID_BYTES
        else:
            name_bytes = len(topic.name.encode())
            at += name_bytes + (len(encode_uvarint(name_bytes + 1)) if flexible else 2)
        at += _count_bytes(len(topic.partitions), flexible)
        for _ in topic.partitions:
            cells.append(at + _PARTITION_BYTES)
            # Metadata without text takes one byte and the tags another one, or two bytes without tags.
            at += _PARTITION_BYTES + _CELL_BYTES + 2
        at += 1 if flexible else 0
    return cells


def _count_bytes(count: int, flexible: bool) -> int:
    return len(encode_uvarint(count + 1)) if flexible else 4
