# SPDX-License-Identifier: Apache-2.0
"""The logs of a coordinator's shards in a topic of the upstream: shard p is partition p.

Theory of operation. `UpstreamShardLog` implements `kcoord.runtime.shard_log`. Each shard has an `UpstreamLog`, which
decides everything. This module executes its actions: requests become tasks or batches of `PartitionRequests`, and
outcomes become calls of the shard set. All code runs in the event loop. After each call of an `UpstreamLog`, `_execute`
takes its actions, so none waits longer than the call.

`tick` runs once a second, and a timer runs for each repetition of a request. `Following` reads the partitions of all
owned logs.

Nothing is claimed and nothing appended unless `may_act` returns True right before the request is sent. The answer to an
append, and what is read from the partition of an owned log, count only if `may_act` is still True then.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from kcoord.metrics.measures import Histogram
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
from kcoord.runtime.upstream_claim import UpstreamState
from kcoord.runtime.upstream_log import UpstreamLog
from kcoord.runtime.upstream_reader import LogNote, UpstreamReader
from kcoord.upstream.following import Following
from kcoord.upstream.requests import Fetched, PartitionRequests, PendingBatch
from kcoord.upstream.standby_files import StandbyFiles
from kcoord.upstream.standbys import Standbys
from kcoord_protocol.errors import KafkaError

if TYPE_CHECKING:
    from concurrent.futures import Future

STOP_SECONDS: Final = 0.7
"""The time after which an orderly stop begins no further snapshot."""

_logger = logging.getLogger(__name__)


class UpstreamShardLog:
    """The `ShardLog` of a shard set in the upstream; the module describes it.

    `cluster_id` is that of the upstream, `owner` names this instance in its claims, and `wake` requests a poll of the
    shard set. `may_act` returns whether this instance may be the owner of shards, and `on_fenced` is called with each
    shard whose log another instance has claimed.

    `now_ms` is the time of the shards. `log_ms` is the time of logs and standbys, which also counts while the machine
    is suspended: the upstream deletes tombstones meanwhile, and an earlier owner stops.
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
        log_ms: Callable[[], int],
        may_act: Callable[[], bool],
        on_fenced: Callable[[int], None],
        files: StandbyFiles | None,
        tombstones_kept_ms: int,
    ) -> None:
        self._shards = shards
        self._requests = requests
        self._cluster_id = cluster_id
        self._new_log = partial(
            UpstreamLog, owner, write_timeout_ms=write_timeout_ms, foreign_id_wait_ms=foreign_id_wait_ms
        )
        self._wake = wake
        self._now_ms = now_ms
        self._log_ms = log_ms
        self._may_act = may_act
        self._on_fenced = on_fenced
        self.fenced_writes = 0
        """The number of appends that were rejected because another instance had claimed the log."""
        self.produces = Histogram()
        """The times from an append until the upstream has acknowledged it, without appends that failed."""
        self.logs: dict[int, UpstreamLog] = {}
        """The logs of the shards that this instance owns or has owned."""
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._opening: dict[int, Load] = {}
        """The loads whose logs are not claimed yet, because their standbys are still being made."""
        self._opened: dict[int, OpenedLog] = {}
        """The logs that are read up to their claims."""
        self._following = Following(requests, self._positions, self._followed, self._is_in_a_hurry)
        self.standbys = Standbys(
            shards,
            requests,
            files,
            tombstones_kept_ms=tombstones_kept_ms,
            now_ms=log_ms,
            wake=self._following.wake,
        )
        shards.snapshots.note_log = self._note

    def claimed_ids(self) -> dict[int, tuple[int, int]]:
        """Returns the producer id and the epoch of each shard's last claim."""
        return {shard_id: log.claimed_id for shard_id, log in self.logs.items()}

    # Called by the driver of the shard set.

    def is_empty(self, shard_id: int) -> bool:
        return False

    def gained(self, shard_id: int) -> None:
        """Does nothing: `open` claims the log from any other owner."""

    def open(self, load: Load) -> None:
        self._opening[load.shard_id] = load
        self._requests.start(self._open(load), f"opening shard {load.shard_id}")

    async def _open(self, load: Load) -> None:
        """Claims the log as soon as the standby is made. The load then begins with the standby's state."""
        shard_id = load.shard_id
        standby = await self.standbys.claimed(shard_id)
        if standby is None:
            return
        if self._opening.get(shard_id) is not load:
            self.standbys.released(shard_id, has_diverged=False)
            return
        del self._opening[shard_id]
        if load.is_dropped:
            self.standbys.released(shard_id, has_diverged=False)
            self._shards.failed(load, OSError("the shard was given up meanwhile"), self._now_ms())
            self._wake()
            return
        log = self.logs.get(shard_id)
        if log is None:
            log = self.logs[shard_id] = self._new_log()
        log.open(load, self._log_ms(), standby.reader)
        self._execute(shard_id, log)

    def read(self, load: Load) -> None:
        log = self.logs[load.shard_id]
        log.read(load)
        self._execute(load.shard_id, log)

    def append(self, append: Append, now_ms: int) -> None:
        log = self.logs[append.shard_id]
        log.append(append, self._log_ms())
        self._execute(append.shard_id, log)

    def save(self, save: Save) -> None:
        written = self.standbys.save(save, self._reader_of(save.shard_id))
        if written is None:
            self._shards.saved(save, self._now_ms(), succeeded=False)
        else:
            loop = asyncio.get_running_loop()
            written.add_done_callback(lambda done: loop.call_soon_threadsafe(self._saved, save, done))

    def _saved(self, save: Save, done: Future[bool]) -> None:
        # A snapshot of a state that was dropped meanwhile is kept. Whether it fits the log is checked before its use.
        self._shards.saved(save, self._now_ms(), succeeded=not done.cancelled() and done.result())
        self._wake()

    def _reader_of(self, shard_id: int) -> UpstreamReader | None:
        """Returns what this instance knows of the log of a shard, if its state is that of a standby or an owner."""
        standby = self._shards.standbys.get(shard_id)
        if standby is not None:
            return standby.reader
        log = self.logs.get(shard_id)
        return log.reader if log is not None and log.state is UpstreamState.OWNER else None

    def _note(self, shard_id: int) -> LogNote | None:
        """Returns an offset of the upstream, and what was known there: the state of the shard has all before it."""
        reader = self._reader_of(shard_id)
        return reader.note() if reader is not None else None

    def release(self, release: Release) -> None:
        for shard_id in release.shard_ids:
            self.close(shard_id)
        self._shards.released(release)

    def close(self, shard_id: int) -> None:
        log = self.logs.get(shard_id)
        if log is not None:
            log.close()
        self._given_up(shard_id)

    def _given_up(self, shard_id: int) -> None:
        """Follows the log of a shard that this instance does not own, or could not claim."""
        log = self.logs.get(shard_id)
        has_diverged = log is not None and log.reader.has_diverged
        if log is not None and has_diverged:
            log.reader = UpstreamReader(self._log_ms())
        self._opened.pop(shard_id, None)
        self.standbys.released(shard_id, has_diverged=has_diverged)

    def revoke(self, reason: str) -> None:
        """Ends all loads and appends, because this instance may not own shards any more. Called after they closed."""
        opening, self._opening = self._opening, {}
        for load in opening.values():
            self._shards.failed(load, OSError(reason), self._now_ms())
        for shard_id, log in self.logs.items():
            log.revoke(reason)
            self._execute(shard_id, log)

    def tick(self, now_ms: int) -> None:
        for shard_id, log in self.logs.items():
            log.tick(self._log_ms())
            self._execute(shard_id, log)
        self._following.wake()

    def stop(self) -> None:
        self.standbys.stop()
        for timer in self._timers.values():
            timer.cancel()
        for log in self.logs.values():
            log.close()

    def finish(self, saves: Iterator[Save]) -> None:
        deadline = asyncio.get_running_loop().time() + STOP_SECONDS
        for save in saves:
            self.standbys.save_now(save, self._reader_of(save.shard_id))
            if asyncio.get_running_loop().time() > deadline:
                break

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
                self._given_up(shard_id)
            case Fenced(ticket):
                shards.fenced(ticket)
                self._given_up(shard_id)
                self.fenced_writes += isinstance(ticket, Append)
                self._on_fenced(shard_id)
            case Opened(load, end_offset):
                standby = shards.standbys[shard_id]
                opened = OpenedLog(standby.next_offset, end_offset, standby.grown_bytes, has_standby=True)
                self._opened[shard_id] = opened
                shards.opened(load, opened)
            case Loaded(load, batches, is_end):
                self._opened[shard_id].size_bytes += sum(len(data) for _, data in batches)
                shards.read(load, batches, now_ms, is_end=is_end)
                if is_end:
                    self._following.wake()
            case Held(load):
                shards.held(load, now_ms)
                self._given_up(shard_id)
            case LoadFailed(load, reason):
                shards.failed(load, OSError(reason), now_ms)
                self._given_up(shard_id)
            case Lost(reason, is_fenced):
                if is_fenced:
                    _logger.warning("Shard %d of %s is closed: %s", shard_id, shards.name, reason)
                    shards.close_shard(shard_id)
                    self._on_fenced(shard_id)
                else:
                    shards.fail_shard(shard_id, reason)
                self._given_up(shard_id)

    async def _ask(self, shard_id: int, log: UpstreamLog, request: InitProducerId | Fetch | FindStart) -> None:
        """Sends a request and passes the answer to the log."""
        try:
            match request:
                case InitProducerId():
                    transactional_id = f"kcoord-{self._cluster_id}-{shard_id}"
                    producer_id, epoch = await self._requests.init_producer_id(transactional_id, self._may_act)
                    log.initialized(request, producer_id, epoch, self._log_ms())
                case Fetch(offset):
                    data = await self._requests.fetch(shard_id, offset)
                    log.fetched(request, data, self._log_ms())
                case FindStart():
                    offset = await self._requests.first_offset(shard_id)
                    log.found_start(request, offset, self._log_ms())
        except KafkaError as error:
            log.refused(request, error, self._log_ms())
            self._repeat_later(shard_id, log)
        self._execute(shard_id, log)

    def _produce(self, shard_id: int, log: UpstreamLog, request: Produce) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()

        def may_send() -> bool:
            return log.may_send(request, self._log_ms()) and self._may_act()

        def done(answer: int | KafkaError) -> None:
            if not self._may_act():
                # The log is revoked soon, which ends the append with an unknown outcome.
                return
            if isinstance(answer, KafkaError):
                log.refused(request, answer, self._log_ms())
                self._repeat_later(shard_id, log)
            else:
                self.produces.add((loop.time() - began) * 1000)
                log.produced(request, answer, self._log_ms())
            self._execute(shard_id, log)

        self._requests.produce(PendingBatch(shard_id, request.data, may_send, done, request.transactional_id))

    # Following the partitions of owned logs and of standbys.

    def _positions(self) -> dict[int, int]:
        offsets = self.standbys.offsets()
        for shard_id, log in self.logs.items():
            if log.is_following:
                offsets[shard_id] = log.reader.fetch_offset
        return offsets

    def _is_in_a_hurry(self, shard_id: int) -> bool:
        log = self.logs.get(shard_id)
        return (log is not None and log.is_in_a_hurry) or self.standbys.is_behind(shard_id)

    def _followed(self, shard_id: int, offset: int, answer: Fetched | KafkaError) -> None:
        log = self.logs.get(shard_id)
        if log is None or not log.is_following:
            self.standbys.deliver(shard_id, offset, answer)
            return
        if not self._may_act() or offset > log.reader.position:
            return
        if isinstance(answer, KafkaError):
            log.not_followed(answer)
        elif answer.data:
            log.followed(answer.data, self._log_ms())
        self._execute(shard_id, log)

    def _repeat_later(self, shard_id: int, log: UpstreamLog) -> None:
        """Arms the timer for the repetition of a request, if one is due to be repeated."""
        if log.retry_ms is None:
            return
        timer = self._timers.get(shard_id)
        if timer is not None:
            timer.cancel()
        delay_ms = max(log.retry_ms - self._log_ms(), 1)
        self._timers[shard_id] = asyncio.get_running_loop().call_later(delay_ms / 1000, self._tick, shard_id)

    def _tick(self, shard_id: int) -> None:
        log = self.logs[shard_id]
        log.tick(self._log_ms())
        if log.retry_ms is not None and log.retry_ms > self._log_ms():
            self._repeat_later(shard_id, log)
        self._execute(shard_id, log)
