# SPDX-License-Identifier: Apache-2.0
"""The logs of a coordinator's shards in a topic of the upstream: shard p is partition p.

Theory of operation. `UpstreamShardLog` implements `kcoord.runtime.shard_log`. Each shard has an `UpstreamLog`, which
decides everything. This module executes its actions: requests become tasks or batches of `PartitionRequests`, and
outcomes become calls of the shard set. All code runs in the event loop. After each call of an `UpstreamLog`, `_execute`
takes its actions, so none waits longer than the call.

The logs get the time from `tick`, once a second, and from a timer for each repetition of a request. `Following` reads
the partitions of all owned logs.

Nothing is claimed and nothing appended unless `may_act` returns True right before the request is sent. The answer to an
append, and what is read from the partition of an owned log, count only if `may_act` is still True then.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from kcoord.runtime.result import new_end_transaction_marker
from kcoord.runtime.shard_log import Append, Load, OpenedLog, Release, Save
from kcoord.runtime.shard_set import ShardSet
from kcoord.runtime.upstream_actions import (
    Decided,
    Ended,
    Fenced,
    Fetch,
    FindStart,
    Held,
    InitProducerId,
    Loaded,
    LoadFailed,
    Lost,
    Opened,
    Outcome,
    Produce,
    Rewrite,
    Unknown,
    Written,
)
from kcoord.runtime.upstream_log import UpstreamLog
from kcoord.upstream.following import Following
from kcoord.upstream.requests import PartitionRequests, PendingBatch
from kcoord_protocol.errors import KafkaError

_logger = logging.getLogger(__name__)


class UpstreamShardLog:
    """The `ShardLog` of a shard set in the upstream; the module describes it.

    `cluster_id` is that of the upstream, `owner` names this instance in its claims, and `wake` requests a poll of the
    shard set. `may_act` returns whether this instance may be the owner of shards, and `on_fenced` is called with each
    shard whose log another instance has claimed.
    """

    def __init__(
        self,
        shards: ShardSet[Any],
        requests: PartitionRequests,
        *,
        cluster_id: str,
        owner: str,
        write_timeout_ms: int,
        foreign_id_wait_ms: int,
        wake: Callable[[], None],
        now_ms: Callable[[], int],
        may_act: Callable[[], bool],
        on_fenced: Callable[[int], None],
    ) -> None:
        self._shards = shards
        self._requests = requests
        self._cluster_id = cluster_id
        self._new_log = partial(
            UpstreamLog, owner, write_timeout_ms=write_timeout_ms, foreign_id_wait_ms=foreign_id_wait_ms
        )
        self._wake = wake
        self._now_ms = now_ms
        self._may_act = may_act
        self._on_fenced = on_fenced
        self.fenced_writes = 0
        """The number of appends that were rejected because another instance had claimed the log."""
        self._logs: dict[int, UpstreamLog] = {}
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._following = Following(
            requests, self._positions, self._followed, lambda shard_id: self._logs[shard_id].is_in_a_hurry
        )

    def claimed_ids(self) -> dict[int, tuple[int, int]]:
        """Returns the producer id and the epoch of each shard's last claim."""
        return {shard_id: log.claimed_id for shard_id, log in self._logs.items()}

    # Called by the driver of the shard set.

    def is_empty(self, shard_id: int) -> bool:
        return False

    def gained(self, shard_id: int) -> None:
        """Does nothing: `open` claims the log from any other owner."""

    def open(self, load: Load) -> None:
        log = self._logs.get(load.shard_id)
        if log is None:
            log = self._logs[load.shard_id] = self._new_log()
        log.open(load, self._now_ms())
        self._execute(load.shard_id, log)

    def read(self, load: Load) -> None:
        log = self._logs[load.shard_id]
        log.read(load)
        self._execute(load.shard_id, log)

    def append(self, append: Append, now_ms: int) -> None:
        log = self._logs[append.shard_id]
        log.append(append, now_ms)
        self._execute(append.shard_id, log)

    def save(self, save: Save) -> None:
        raise AssertionError(f"shard set {self._shards.name} takes no snapshots, got {save}")

    def release(self, release: Release) -> None:
        for shard_id in release.shard_ids:
            self.close(shard_id)
        self._shards.released(release)

    def close(self, shard_id: int) -> None:
        log = self._logs.get(shard_id)
        if log is not None:
            log.close()

    def revoke(self, reason: str) -> None:
        """Ends all loads and appends, because this instance may not own shards any more. Called after they closed."""
        for shard_id, log in self._logs.items():
            log.revoke(reason)
            self._execute(shard_id, log)

    def tick(self, now_ms: int) -> None:
        for shard_id, log in self._logs.items():
            log.tick(now_ms)
            self._execute(shard_id, log)
        self._following.wake()

    def stop(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        for log in self._logs.values():
            log.close()

    def finish(self, saves: Iterator[Save]) -> None:
        """Does nothing: all state is in the upstream."""

    # Actions.

    def _execute(self, shard_id: int, log: UpstreamLog) -> None:
        """Executes the actions of a log."""
        actions, log.actions = log.actions, []
        for action in actions:
            match action:
                case Produce():
                    self._produce(shard_id, log, action)
                case InitProducerId() | Fetch() | FindStart():
                    self._requests.start(self._ask(shard_id, log, action), f"shard {shard_id}")
                case _:
                    self._report(shard_id, action)
                    self._wake()
        if log.is_in_a_hurry:
            self._following.hurry(shard_id)

    def _report(self, shard_id: int, outcome: Outcome) -> None:
        """Passes an outcome to the shard set."""
        shards, now_ms = self._shards, self._now_ms()
        match outcome:
            case Written(append):
                shards.written(append)
            case Decided(append, offset, error):
                shards.decided(append, offset, error)
            case Ended(producer, coordinator_epoch, committed):
                shards.ended(shard_id, new_end_transaction_marker(producer, coordinator_epoch, committed=committed))
            case Rewrite(keys):
                shards.rewrite(shard_id, keys, now_ms)
            case Unknown(append, reason):
                shards.unknown(append, OSError(reason), now_ms)
            case Fenced(ticket):
                shards.fenced(ticket)
                self.fenced_writes += isinstance(ticket, Append)
                self._on_fenced(shard_id)
            case Opened(load, end_offset):
                shards.opened(load, OpenedLog(0, end_offset))
            case Loaded(load, batches, is_end):
                shards.read(load, batches, now_ms, is_end=is_end)
                if is_end:
                    self._following.wake()
            case Held(load):
                shards.held(load, now_ms)
            case LoadFailed(load, reason):
                shards.failed(load, OSError(reason), now_ms)
            case Lost(reason, is_fenced):
                if is_fenced:
                    _logger.warning("Shard %d of %s is closed: %s", shard_id, shards.name, reason)
                    shards.close_shard(shard_id)
                    self._on_fenced(shard_id)
                else:
                    shards.fail_shard(shard_id, reason)

    async def _ask(self, shard_id: int, log: UpstreamLog, request: InitProducerId | Fetch | FindStart) -> None:
        """Sends a request and passes the answer to the log."""
        try:
            match request:
                case InitProducerId():
                    transactional_id = f"kcoord-{self._cluster_id}-{shard_id}"
                    producer_id, epoch = await self._requests.init_producer_id(transactional_id, self._may_act)
                    log.initialized(request, producer_id, epoch, self._now_ms())
                case Fetch(offset):
                    data = await self._requests.fetch(shard_id, offset)
                    log.fetched(request, data, self._now_ms())
                case FindStart():
                    offset = await self._requests.first_offset(shard_id)
                    log.found_start(request, offset, self._now_ms())
        except KafkaError as error:
            log.refused(request, error, self._now_ms())
            self._repeat_later(shard_id, log)
        self._execute(shard_id, log)

    def _produce(self, shard_id: int, log: UpstreamLog, request: Produce) -> None:
        def may_send() -> bool:
            return log.may_send(request, self._now_ms()) and self._may_act()

        def done(answer: int | KafkaError) -> None:
            if not self._may_act():
                # The log is revoked soon, which ends the append with an unknown outcome.
                return
            if isinstance(answer, KafkaError):
                log.refused(request, answer, self._now_ms())
                self._repeat_later(shard_id, log)
            else:
                log.produced(request, answer, self._now_ms())
            self._execute(shard_id, log)

        self._requests.produce(PendingBatch(shard_id, request.data, may_send, done, request.transactional_id))

    # The partitions of owned logs.

    def _positions(self) -> dict[int, int]:
        return {shard_id: log.reader.fetch_offset for shard_id, log in self._logs.items() if log.is_following}

    def _followed(self, shard_id: int, answer: bytes | KafkaError) -> None:
        if not self._may_act():
            return
        log = self._logs[shard_id]
        if isinstance(answer, KafkaError):
            log.not_followed(answer)
        elif answer:
            log.followed(answer, self._now_ms())
        self._execute(shard_id, log)

    def _repeat_later(self, shard_id: int, log: UpstreamLog) -> None:
        """Arms the timer for the repetition of a request, if one is due to be repeated."""
        if log.retry_ms is None:
            return
        timer = self._timers.get(shard_id)
        if timer is not None:
            timer.cancel()
        delay_ms = max(log.retry_ms - self._now_ms(), 1)
        self._timers[shard_id] = asyncio.get_running_loop().call_later(delay_ms / 1000, self._tick, shard_id)

    def _tick(self, shard_id: int) -> None:
        log = self._logs[shard_id]
        log.tick(self._now_ms())
        if log.retry_ms is not None and log.retry_ms > self._now_ms():
            self._repeat_later(shard_id, log)
        self._execute(shard_id, log)
