# SPDX-License-Identifier: Apache-2.0
"""The thread that cleans compacted logs: those of the coordinators, and topics with cleanup.policy=compact.

It takes the log with the largest dirty share first, and rests between slices of work for at least as long as these
took, and for longer while others use the processor, so that the event loop never waits for it. Of each log it asks the
event loop what is to be known, once; what changes the log runs where the log is written.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from kcoord.config import BrokerConfig
from kcoord.server.environment import share_with_loop
from kcoord.storage.cleaner import Assessment, Cleaner, CleaningRules, assess
from kcoord.storage.cleaning_pass import LastOfProducer
from kcoord.storage.errors import CorruptLogError, StorageError
from kcoord.storage.file_system import FileSystem
from kcoord.storage.log import Log
from kcoord.storage.log_dir import LogDir
from kcoord.storage.replacement import OnOwner

_logger = logging.getLogger(__name__)

T = TypeVar("T")

LEAST_ROLLED_BYTES = 4 << 20
"""A coordinator's active segment is closed for cleaning when it is larger, and dirty enough. Each pass costs some files
and syncs and copies what is live, so a small one that still grows is left alone.
"""
LEAST_QUIET_BYTES = 16 << 10
"""The same for a log that has not grown since the cleaner looked last."""
BUSY_REST = 3.0
"""So many times the work is added to a rest when the other threads of the process used a whole core of late."""
_LONGEST_REST_SECONDS = 0.5
_SHORTEST_REST_SECONDS = 0.0005
_ANSWER_CHECK_SECONDS = 0.1


class CleaningStopped(Exception):
    """The process ends: the pass is given up."""


@dataclass(slots=True)
class CleanableLog:
    """One log, as the event loop knows it at the moment."""

    topic: str
    partition: int
    log: Log
    rules: CleaningRules
    stable_offset: int
    on_owner: OnOwner
    producers: Mapping[int, LastOfProducer] = field(default_factory=dict)
    forget_aborted: Callable[[set[int]], None] = lambda offsets: None
    may_roll: bool = False
    """The active segment may be closed early, because nobody but its coordinator cares where segments end."""

    @property
    def key(self) -> tuple[str, int]:
        return self.topic, self.partition


class CleanableLogs(Protocol):
    """Asked in the event loop."""

    def __call__(self) -> list[CleanableLog]: ...


class LogCleaner:
    """See the module's text. `start` it in the event loop; `close` ends it between two slices."""

    def __init__(
        self,
        config: BrokerConfig,
        log_dir: LogDir,
        file_system: FileSystem,
        logs: CleanableLogs,
        now_ms: Callable[[], int],
    ) -> None:
        self._config = config
        self._log_dir = log_dir
        self._logs = logs
        self._now_ms = now_ms
        self._file_system = file_system
        self._loop = asyncio.get_running_loop()
        self._stopping = threading.Event()
        self._damaged: set[tuple[str, int]] = set()
        self._postponed: set[tuple[str, int]] = set()
        self._slice_began = 0.0
        self._paused = (0.0, 0.0)
        """When the last pause began, and the CPU time that other threads had had by then."""
        self._ends: dict[tuple[str, int], int] = {}
        self._former_ends: dict[tuple[str, int], int] = {}
        self._thread = threading.Thread(target=self._run, name="kcoord-log-cleaner", daemon=True)

    def start(self) -> None:
        share_with_loop()
        self._thread.start()

    def close(self, timeout_seconds: float) -> bool:
        """True when the thread has ended."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping.wait(self._config.log_cleaner_backoff_ms / 1000):
            self._postponed.clear()
            self._former_ends, self._ends = self._ends, {}
            try:
                while self._clean_filthiest():
                    pass
            except CleaningStopped:
                return
            except Exception:
                _logger.exception("Cleaning failed; it is tried again in %d ms", self._config.log_cleaner_backoff_ms)

    def _clean_filthiest(self) -> bool:
        """Cleans one log; False where none needs it."""
        self._slice_began = time.perf_counter()
        due: list[tuple[float, Assessment, CleanableLog]] = []
        for target in self.in_loop(self._logs):
            if target.key not in self._damaged and target.key not in self._postponed:
                found = self._assess(target)
                if found is not None and found.is_due(target.rules):
                    due.append((found.ratio, found, target))
                self._pause(0)
        if not due:
            return False
        _, found, target = max(due, key=lambda one: one[0])
        self._clean(target, found)
        return True

    def _assess(self, target: CleanableLog) -> Assessment | None:
        log = target.log
        try:
            if log.is_closed or log.failure is not None:
                return None
            dirty_offset = self._log_dir.cleaned_offset(target.topic, target.partition)
            found = assess(log, dirty_offset, target.rules, target.stable_offset, self._now_ms())
            end_offset = self._ends.setdefault(target.key, log.end_offset)
            least_bytes = LEAST_QUIET_BYTES if self._former_ends.get(target.key) == end_offset else LEAST_ROLLED_BYTES
            if target.may_roll and _is_worth_rolling(log, found, target.rules, least_bytes):
                target.on_owner(lambda: self._roll(log))
                target.stable_offset = log.end_offset
                found = assess(log, dirty_offset, target.rules, target.stable_offset, self._now_ms())
            return found
        except (OSError, StorageError) as error:
            self._report(target, error)
            return None

    def _roll(self, log: Log) -> None:
        if not log.is_closed and log.failure is None:
            log.roll(self._now_ms())

    def _clean(self, target: CleanableLog, found: Assessment) -> None:
        began = time.monotonic()
        if not self._log_dir.cleaned_offset(target.topic, target.partition):
            # Before the first segment is replaced: whoever finds gaps must be able to know that this log is compacted.
            self._log_dir.note_cleaned(target.topic, target.partition, found.first_dirty_offset)
        cleaner = Cleaner(
            self._file_system, max_map_bytes=self._config.log_cleaner_dedupe_buffer_size, pause=self._pause
        )
        try:
            done = cleaner.clean(
                target.log,
                found,
                target.rules,
                target.on_owner,
                self._now_ms(),
                stable_offset=target.stable_offset,
                producers=target.producers,
                forget_aborted=target.forget_aborted,
            )
            self._log_dir.note_cleaned(target.topic, target.partition, done.next_dirty_offset)
        except (OSError, StorageError) as error:
            self._report(target, error)
            return
        if done.next_dirty_offset <= found.first_dirty_offset:
            # A transaction is open where the log is clean up to: there is nothing to do until it ends.
            self._postponed.add(target.key)
            return
        _logger.info(
            "Cleaned %s-%d up to offset %d in %.1f s: %d of %d records left, %d instead of %d bytes, %d instead of %d "
            "segments",
            target.topic,
            target.partition,
            done.next_dirty_offset,
            time.monotonic() - began,
            done.records_kept,
            done.records_read,
            done.bytes_after,
            done.bytes_before,
            done.segments_after,
            done.segments_before,
        )

    def _report(self, target: CleanableLog, error: Exception) -> None:
        """As in Kafka a damaged log is left alone until the next start. Whatever else it was may be over next time."""
        _logger.error("%s-%d was not cleaned: %s", target.topic, target.partition, error)
        (self._damaged if isinstance(error, CorruptLogError) else self._postponed).add(target.key)

    def _pause(self, done_bytes: int) -> None:
        """Rests after a slice of work: as long as it took, or longer where others are busy or the configured rate
        demands it.
        """
        now, others_seconds = time.perf_counter(), time.process_time() - time.thread_time()
        paused, others_before = self._paused
        self._paused = now, others_seconds
        worked = now - self._slice_began
        at_rate = done_bytes / self._config.log_cleaner_io_max_bytes_per_second
        busy_cores = (others_seconds - others_before) / (now - paused)
        rest = max(worked * (1 + BUSY_REST * min(busy_cores, 1)), at_rate - worked, _SHORTEST_REST_SECONDS)
        if done_bytes == 0:
            rest = min(rest, _LONGEST_REST_SECONDS)
        if self._stopping.wait(rest):
            raise CleaningStopped
        self._slice_began = time.perf_counter()

    def in_loop(self, function: Callable[[], T]) -> T:
        """Runs a function in the event loop and waits for its result."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        try:
            self._loop.call_soon_threadsafe(run)
        except RuntimeError:
            raise CleaningStopped from None
        while True:
            try:
                return future.result(_ANSWER_CHECK_SECONDS)
            except FutureTimeoutError:
                if self._stopping.is_set() and not future.done():
                    raise CleaningStopped from None
                if future.done():
                    raise


def _is_worth_rolling(log: Log, found: Assessment, rules: CleaningRules, least_bytes: int) -> bool:
    active_bytes = log.segments[-1].size_bytes
    dirty_bytes = active_bytes + found.cleanable_bytes
    return (
        active_bytes >= least_bytes
        and dirty_bytes > rules.min_cleanable_dirty_ratio * (dirty_bytes + found.clean_bytes)
        and log.end_offset > log.segments[-1].base_offset
    )
