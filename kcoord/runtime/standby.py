# SPDX-License-Identifier: Apache-2.0
"""The state machine of a shard that this process does not own, kept ready for a takeover. Pure.

Theory of operation. A standby is a load that begins before the claim. Its state machine replays the shard's log as the
log grows; it runs no operation and has neither timers nor tasks. If this process claims the log, the shard set goes on
with this machine, and has to read only what followed up to the claim.

    created  -> following   from a snapshot, or empty
    following -> paused     the log is being claimed (`is_paused`). Fetches in flight are ignored
    paused   -> following   the claim failed before the shard set got the machine
    any      -> dropped     the shard set has the machine, or the log is another one (DivergedError)

A dropped standby is never used again. Its owner makes another one, from the last snapshot or from the beginning of the
log.
"""

from __future__ import annotations

import logging
from typing import Generic, TypeVar

from kcoord.runtime.loader import Loader
from kcoord.runtime.result import StateMachine
from kcoord.runtime.upstream_reader import UpstreamReader

_logger = logging.getLogger(__name__)

M = TypeVar("M", bound=StateMachine)


class Standby(Generic[M]):
    """A state machine that follows the log of one shard. The module docstring describes its life.

    The machine of `loader` has everything below the position of `reader`.
    """

    def __init__(self, shard_id: int, loader: Loader[M], reader: UpstreamReader) -> None:
        self.shard_id = shard_id
        self.loader = loader
        self.reader = reader
        self.is_paused = False
        self.high_watermark: int | None = None
        """The end of the log as of the last fetch; None before the first one."""
        self.grown_bytes = 0
        """The bytes that were replayed since the last snapshot."""

    # For the fetches.

    def fetched(self, offset: int, data: bytes, high_watermark: int, now_ms: int) -> None:
        """Replays batches that were fetched from an offset.

        Ignores the response if the standby was paused after the request, or if the request was that of an earlier
        standby or owner, which had read more. Raises DivergedError, CorruptBatchError or LoadError: then the standby
        must be dropped.
        """
        if self.is_paused or offset > self.reader.position:
            return
        batches = self.reader.take(data, now_ms)
        self.loader.replay(batches)
        self.grown_bytes += sum(len(batch) for _, batch in batches)
        self.high_watermark = high_watermark
        self.reader.caught_up(high_watermark, now_ms)

    def begin_at(self, offset: int) -> None:
        """Begins at the first offset of the log, because that has no earlier one. Raises DivergedError."""
        if not self.is_paused:
            self.reader.begin_at(offset)

    def failed(self) -> None:
        """Notes a failed fetch. The log may have another leader now."""
        if not self.is_paused:
            self.reader.distrust()

    @property
    def lag(self) -> int | None:
        """The number of offsets to the end of the log, None while it is unknown."""
        if self.high_watermark is None or not self.reader.is_verified:
            return None
        return max(self.high_watermark - self.reader.position, 0)

    # For snapshots, as ShardContext.

    @property
    def machine(self) -> M | None:
        """The machine, or None while a snapshot of it would be worth nothing."""
        return self.loader.machine if self.reader.last is not None and self.reader.is_verified else None

    @property
    def next_offset(self) -> int:
        return self.reader.position

    @property
    def durable_offset(self) -> int:
        return self.reader.position

    @property
    def is_behind(self) -> bool:
        """False: the state has only what is durable in the log."""
        return False

    def broken(self, error: AssertionError) -> None:
        """Logs that an invariant is broken. The next snapshot may succeed."""
        _logger.error("An invariant of the standby of shard %d is broken", self.shard_id, exc_info=error)
