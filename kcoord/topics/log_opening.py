# SPDX-License-Identifier: Apache-2.0
"""The opening of a partition's log, in the event loop or in another thread.

Theory of operation
-------------------
After an orderly stop, an opening reads little. After a crash, and if the small files of a partition are missing, it
checks the end of the log and replays all batches after the newest producer snapshot: about 2 s for 1,000,000 batches.
The owner asks `unread_bytes` how much there is to read. It calls `run` itself, or another thread does so.

The thread owns the folder of the partition until `run` returns. The event loop reads only `has_ended` meanwhile.
`cancel` waits for the thread, which notices the cancellation between two batches. So nothing touches the folder after
`cancel`, and the owner may rename it. A canceled opening leaves a folder that the next opening recovers again.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Final

from kcoord.storage.errors import OpeningCanceledError
from kcoord.storage.file_system import join
from kcoord.storage.log_dir import LogDir
from kcoord.storage.recovery import base_offset_of
from kcoord.storage.segment import LogConfig
from kcoord.topics.open_log import OpenLog, load
from kcoord.topics.partition_files import PartitionFiles, replayed_from_offset
from kcoord_protocol.errors import Errors, KafkaError

AT_ONCE_BYTES: Final = 64 << 10
"""An opening that has to read no more is done in the event loop. It takes up to 10 ms, if each batch has one record."""


class LogBeingOpenedError(KafkaError):
    """Another thread opens the log. Clients retry, as if a new leader of the partition was not ready yet."""

    def __init__(self, partition: str, opening: Opening) -> None:
        super().__init__(Errors.NOT_LEADER_OR_FOLLOWER, f"The log of {partition} is still being opened.")
        self.opening = opening


class Opening:
    """One opening of a log. The module text describes the threads."""

    __slots__ = (
        "_config",
        "_error",
        "_files",
        "_is_canceled",
        "_log_dir",
        "_now_ms",
        "_opened",
        "has_ended",
        "index",
        "observers",
        "running",
        "topic",
    )

    def __init__(
        self, log_dir: LogDir, topic: str, index: int, files: PartitionFiles, config: LogConfig, now_ms: int
    ) -> None:
        self.has_ended = False
        self.observers: list[Callable[[], None]] = []
        """Called in the event loop after the end."""
        self.running: AbstractContextManager[object] = nullcontext()
        """A lock, if another thread calls `run`."""
        self._log_dir = log_dir
        self.topic = topic
        self.index = index
        self._files = files
        self._config = config
        self._now_ms = now_ms
        self._is_canceled = False
        self._opened: OpenLog | None = None
        self._error: Exception | None = None

    def unread_bytes(self) -> int:
        """Returns how many bytes of segments the opening has to read, or more. Stops to count above AT_ONCE_BYTES."""
        fs, folder = self._files.fs, self._files.directory
        names = fs.list_dir(folder) if fs.exists(folder) else []
        recovery_point, is_clean = self._log_dir.expected_scan(self.topic, self.index)
        replayed_from = replayed_from_offset(names)
        if is_clean and replayed_from >= recovery_point:
            return 0
        first_offset = replayed_from if is_clean else min(replayed_from, recovery_point)
        size_bytes = 0
        for name in sorted(names, reverse=True):
            base_offset = base_offset_of(name)
            if base_offset is None:
                continue
            size_bytes += fs.size(join(folder, name))
            if base_offset <= first_offset or size_bytes > AT_ONCE_BYTES:
                break
        return size_bytes

    def run(self) -> None:
        """Opens the log, and keeps it or the error for `result`."""
        with self.running:
            if self._is_canceled:
                return
            try:
                log = self._log_dir.open_log(self.topic, self.index, self._config, self._now_ms, check=self._check)
                try:
                    self._opened = load(log, self._files, self._now_ms, self._check)
                except BaseException:
                    # The next use opens the log again, and a log is open only once.
                    log.abandon()
                    raise
            except Exception as error:
                self._error = error
            self.has_ended = True

    def _check(self) -> None:
        if self._is_canceled:
            raise OpeningCanceledError(f"the log of {self.topic}-{self.index} is not needed any more")

    def cancel(self) -> OpenLog | None:
        """Ends the opening. Returns the log if it was opened before."""
        self._is_canceled = True
        with self.running:
            return self._opened

    def result(self) -> OpenLog:
        """Returns the log of an opening that has ended. Raises its error."""
        if self._error is not None:
            raise self._error
        assert self._opened is not None
        return self._opened
