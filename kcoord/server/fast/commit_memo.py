# SPDX-License-Identifier: Apache-2.0
"""The fast path of OffsetCommit requests: a frame that differs from an earlier one in offsets alone is not decoded.

A consumer's commits are equal but for the correlation id and, per partition, 12 bytes of offset and leader epoch: the
cells. Invariant: what a frame decodes to depends on its bytes alone, and in a frame of equal length with equal bytes
around the cells only the cells' fields can differ. So what was learned from one frame holds for the other; whether the
commit is accepted is decided anew (see `coordinator.group.offsets.packed_commit`). Other frames go the general way.
`kcoord.fast.paths.enable=false` switches it off, for debugging.
"""

from __future__ import annotations

from functools import lru_cache
from struct import Struct
from typing import TYPE_CHECKING, Final

from kcoord.coordinator.group.offsets.packed_commit import CommitPlan, shared
from kcoord.server.fast.commit_frame import CELL_BYTES, read_commit
from kcoord.server.net.exchange import ExchangeOwner, KnownExchange
from kcoord_protocol.headers import encode_response

if TYPE_CHECKING:
    from kcoord.server.api.api_table import BoundApi
    from kcoord.server.broker import Broker
    from kcoord.server.shards.group_service import ShardCommitter

MAX_PARTITIONS: Final = 20_000
"""Partitions in all that one connection may have plans for; a real consumer has those that it owns."""

_BEFORE_ID: Final = 4
_AFTER_ID: Final = 8


@lru_cache(maxsize=512)
def _layout(fixed_sizes: tuple[int, ...]) -> Struct:
    """Cells, each followed by so many bytes that are always the same."""
    return Struct(">" + "".join(f"{CELL_BYTES}s{size}s" for size in fixed_sizes))


class _KnownCommit:
    """What was learned from a frame: how it is laid out, what it means, and what it is answered with."""

    __slots__ = ("committer", "fixed", "head", "plan", "start", "tail", "unpack")

    def __init__(
        self, frame: bytes, cells_at: list[int], plan: CommitPlan, committer: ShardCommitter, answer: bytes
    ) -> None:
        ends = [*cells_at[1:], len(frame)]
        self.start = shared(frame[:_BEFORE_ID])
        self.unpack = _layout(
            tuple([end - at - CELL_BYTES for at, end in zip(cells_at, ends, strict=True)])
        ).unpack_from
        self.fixed = tuple([shared(part) for part in self.unpack(frame, cells_at[0])[1::2]])
        self.plan = plan
        self.committer = committer
        self.head, self.tail = shared(answer[:_BEFORE_ID]), shared(answer[_AFTER_ID:])


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
        fields = known.unpack(frame, cells_at)
        if fields[1::2] != known.fixed or not frame.startswith(known.start):
            return None
        exchange = KnownExchange(self._owner, frame, known.head + frame[_BEFORE_ID:_AFTER_ID] + known.tail)
        return exchange if known.committer.commit(known.plan, fields[::2], now_ms, exchange) else None

    def learn(self, frame: bytes, body_at: int, bound: BoundApi, now_ms: int) -> KnownExchange | None:
        """Remembers a request whose body begins at `body_at` and answers it, if that can be done now. A group that does
        not exist yet may well have this commit only, so that is not remembered.
        """
        version = bound.version
        read = read_commit(frame, body_at, version)
        committer = self._broker.groups.committer(read.shape.group_id) if read is not None else None
        if read is None or committer is None:
            return None
        size = len(frame)
        first = read.cells_at[0]
        bucket = self._known.get(size)
        if bucket is not None and (bucket[0] != first or frame[_AFTER_ID:first] in bucket[1]):
            # Another first cell, or other partitions: the last one is what is likely to come again.
            self._partitions -= sum(known.plan.count for known in self._known.pop(size)[1].values())
        plan = CommitPlan(read.shape, version)
        if self._partitions + plan.count > MAX_PARTITIONS:
            self._known.clear()
            self._partitions = 0
        self._partitions += plan.count
        answer = encode_response(0, bound.key, version, read.answer)
        plans = self._known.setdefault(size, (first, {}))[1]
        plans[frame[_AFTER_ID:first]] = _KnownCommit(frame, read.cells_at, plan, committer, answer)
        return self.answer(frame, now_ms)
