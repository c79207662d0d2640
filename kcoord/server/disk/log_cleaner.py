# SPDX-License-Identifier: Apache-2.0
"""The thread that cleans compacted logs: those of the coordinators, and topics with cleanup.policy=compact.

Theory of operation
-------------------
The thread wakes up every `log.cleaner.backoff.ms` and cleans logs until none is due. It takes the log with the largest
share of dirty bytes first. For each log:

1. In the event loop it asks once for the list of logs, with their rules and stable offsets (`CleanableLog`).
2. In its own thread it reads the log and writes cleaned segments (`kcoord.storage.cleaner`).
3. Steps that change the log, such as replacing segments or rolling the active one, go through `on_owner`. For topics
   they run in the event loop. For logs of coordinators the cleaner's thread runs them under the lock of the log.
4. It writes the offset up to which the log is clean to the checkpoint `cleaner-offset-checkpoint`.

The cleaner never changes records at or after the stable offset, so no record of an open transaction. A record keeps its
offset.

The thread rests after each slice of work for at least as long as the slice took. While other threads of the process
use the CPU it rests for longer. So the event loop does not compete with it for long.

A crash at any point leaves old segments or new ones, never a mixture (`kcoord.storage.replacement`). Cleaning a part of
a log a second time does no harm. A damaged log is left alone until it is opened again, such as at the next start.
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
from operator import itemgetter
from typing import Protocol, TypeVar

from kcoord.config import BrokerConfig
from kcoord.server.environment import share_with_loop
from kcoord.storage.cleaner import Assessment, Cleaner, CleaningRules, assess
from kcoord.storage.cleaning_pass import LastOfProducer
from kcoord.storage.errors import CorruptLogError, StorageError
from kcoord.storage.file_system import FileSystem
from kcoord.storage.log import Log
from kcoord.storage.log_dir import LogDir
from kcoord.storage.replacement import OnOwner, ReplacementAbandoned

_logger = logging.getLogger(__name__)

T = TypeVar("T")

LEAST_ROLLED_BYTES = 4 << 20
"""The smallest active segment of a coordinator that the cleaner rolls, if the log is dirty enough.

Each pass costs some files and syncs and copies the live records, so a small segment that still grows is left alone.
"""
LEAST_QUIET_BYTES = 16 << 10
"""The same for a log that has not grown since the last round of the cleaner."""
BUSY_REST = 3.0
"""If other threads of the process use a whole core, a rest is longer by this many times the slice of work."""
_LONGEST_REST_SECONDS = 0.5
_SHORTEST_REST_SECONDS = 0.0005
_ANSWER_CHECK_SECONDS = 0.1


class CleaningStopped(Exception):
    """The process ends, so the cleaner abandons its pass."""


@dataclass(slots=True)
class CleanableLog:
    """One log that may be cleaned, with the state that only the event loop knows.

    `stable_offset`: records from it on are left alone. `on_owner` runs a function in the thread that appends to the
    log, or keeps that thread away meanwhile. `producers`: the last batch of each producer, which is kept.
    `forget_aborted` is called in the cleaner's thread, with the offsets of transaction markers that will be removed.
    """

    topic: str
    partition: int
    log: Log
    rules: CleaningRules
    stable_offset: int
    on_owner: OnOwner
    producers: Mapping[int, LastOfProducer] = field(default_factory=dict)
    forget_aborted: Callable[[set[int]], None] = lambda offsets: None
    may_roll: bool = False
    """The cleaner may roll the active segment early. Only logs of coordinators allow it: `segment.bytes` and
    `segment.ms` of a topic are a promise to its users.
    """

    @property
    def key(self) -> tuple[str, int]:
        return self.topic, self.partition


class CleanableLogs(Protocol):
    """Lists the logs that may be cleaned. Called in the event loop."""

    def __call__(self) -> list[CleanableLog]: ...


class LogCleaner:
    """The cleaner of one process. `start` is called in the event loop; `close` ends the thread between two slices."""

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
        self._damaged: dict[tuple[str, int], Log] = {}
        """The logs that are left alone. Another log of that name may follow: the topic is deleted and created again."""
        self._postponed: set[tuple[str, int]] = set()
        self._slice_began = 0.0
        self._paused = (0.0, 0.0)
        """The start of the last rest, and the CPU seconds that other threads had used by then."""
        self._ends: dict[tuple[str, int], int] = {}
        self._former_ends: dict[tuple[str, int], int] = {}
        self._thread = threading.Thread(target=self._run, name="kcoord-log-cleaner", daemon=True)

    def start(self) -> None:
        share_with_loop()
        self._thread.start()

    def close(self, timeout_seconds: float) -> bool:
        """Ends the thread; returns False if it still runs after `timeout_seconds`."""
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
                _logger.exception("The log cleaner failed; it retries in %d ms", self._config.log_cleaner_backoff_ms)

    def _clean_filthiest(self) -> bool:
        """Cleans one log; returns False if no log is due."""
        self._slice_began = time.perf_counter()
        due: list[tuple[float, Assessment, CleanableLog]] = []
        for target in self.in_loop(self._logs):
            if self._damaged.get(target.key) is not target.log and target.key not in self._postponed:
                assessment = self._assess(target)
                if assessment is not None and assessment.is_due(target.rules):
                    due.append((assessment.ratio, assessment, target))
                self._pause(0)
        if not due:
            return False
        _, assessment, target = max(due, key=itemgetter(0))
        self._clean(target, assessment)
        return True

    def _assess(self, target: CleanableLog) -> Assessment | None:
        log = target.log
        try:
            if log.is_closed or log.failure is not None:
                return None
            dirty_offset = self._log_dir.cleaned_offset(target.topic, target.partition)
            assessment = assess(log, dirty_offset, target.rules, target.stable_offset, self._now_ms())
            end_offset = self._ends.setdefault(target.key, log.end_offset)
            least_bytes = LEAST_QUIET_BYTES if self._former_ends.get(target.key) == end_offset else LEAST_ROLLED_BYTES
            if target.may_roll and _is_worth_rolling(log, assessment, target.rules, least_bytes):
                target.on_owner(lambda: self._roll(log))
                target.stable_offset = log.end_offset
                assessment = assess(log, dirty_offset, target.rules, target.stable_offset, self._now_ms())
            return assessment
        except CleaningStopped:
            raise
        except Exception as error:
            self._report(target, error)
            return None

    def _roll(self, log: Log) -> None:
        if not log.is_closed and log.failure is None:
            log.roll(self._now_ms())

    def _clean(self, target: CleanableLog, assessment: Assessment) -> None:
        began = time.monotonic()
        cleaner = Cleaner(
            self._file_system, max_map_bytes=self._config.log_cleaner_dedupe_buffer_size, pause=self._pause
        )
        try:
            if not self._log_dir.cleaned_offset(target.topic, target.partition):
                # Gaps between offsets are damage unless the log is compacted. So the checkpoint names the log before
                # its first segment is replaced.
                self._log_dir.note_cleaned(target.topic, target.partition, assessment.first_dirty_offset)
            done = cleaner.clean(
                target.log,
                assessment,
                target.rules,
                target.on_owner,
                self._now_ms(),
                stable_offset=target.stable_offset,
                producers=target.producers,
                forget_aborted=target.forget_aborted,
            )
            self._log_dir.note_cleaned(target.topic, target.partition, done.next_dirty_offset)
        except CleaningStopped:
            raise
        except Exception as error:
            self._report(target, error)
            return
        if done.next_dirty_offset <= assessment.first_dirty_offset:
            # The first dirty record belongs to an open transaction, so nothing can be cleaned until that ends.
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
        """Logs why a log was not cleaned, and skips the log from now on or for this round.

        A damaged log is left alone until it is opened again, such as at the next start. So is a log with an unexpected
        error, such as a broken invariant: no log may keep the cleaner from the others. Errors of the disk may be gone
        in the next round. It is no error if retention, or the deletion of the topic, was faster than the cleaner.
        """
        if isinstance(error, ReplacementAbandoned):
            _logger.info("%s-%d was not cleaned: %s", target.topic, target.partition, error)
            self._postponed.add(target.key)
            return
        is_expected = isinstance(error, OSError | StorageError)
        _logger.error(
            "%s-%d was not cleaned: %s", target.topic, target.partition, error, exc_info=None if is_expected else error
        )
        if not is_expected or isinstance(error, CorruptLogError):
            self._damaged[target.key] = target.log
        else:
            self._postponed.add(target.key)

    def _pause(self, done_bytes: int) -> None:
        """Rests after a slice of work that read or wrote `done_bytes`, for at least as long as the slice took.

        Rests for longer if other threads are busy, or to stay below `log.cleaner.io.max.bytes.per.second`.
        """
        now, other_threads_seconds = time.perf_counter(), time.process_time() - time.thread_time()
        paused, other_threads_before = self._paused
        self._paused = now, other_threads_seconds
        worked = now - self._slice_began
        at_rate = done_bytes / self._config.log_cleaner_io_max_bytes_per_second
        busy_cores = (other_threads_seconds - other_threads_before) / (now - paused)
        rest = max(worked * (1 + BUSY_REST * min(busy_cores, 1)), at_rate - worked, _SHORTEST_REST_SECONDS)
        if done_bytes == 0:
            rest = min(rest, _LONGEST_REST_SECONDS)
        if self._stopping.wait(rest):
            raise CleaningStopped
        self._slice_began = time.perf_counter()

    def in_loop(self, function: Callable[[], T]) -> T:
        """Runs a function in the event loop and returns its result. Raises CleaningStopped if the process ends."""
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


def _is_worth_rolling(log: Log, assessment: Assessment, rules: CleaningRules, least_bytes: int) -> bool:
    """Returns whether the active segment is large enough, and the log dirty enough together with it."""
    active_bytes = log.segments[-1].size_bytes
    dirty_bytes = active_bytes + assessment.cleanable_bytes
    return (
        active_bytes >= least_bytes
        and dirty_bytes > rules.min_cleanable_dirty_ratio * (dirty_bytes + assessment.clean_bytes)
        and log.end_offset > log.segments[-1].base_offset
    )
