# SPDX-License-Identifier: Apache-2.0
"""The file of the audit log: JSON lines that a thread appends, and rotation.

Theory of operation. `AuditFile.add` queues an entry and never blocks. A thread takes all queued entries, makes a line
of each, and appends the lines with one write. The rules:

* The file has whole lines only. If a write fails, the file is cut to its size before the write. If the process is
  killed within a write, the next start cuts the last line, which has no end.
* The broker serves on if the file cannot be written (a full disk), or if entries come faster than they can be written.
  Entries are lost then. They are counted in `lost`, the log of the broker says so, and the next line that can be
  written has their number: `{"event": "lost", "entries": 3}`.
* Lines are in the page cache when they are written, so they survive the end of the process. A rotation and an orderly
  end also sync the file to the disk.
* When a batch would make the file larger than `max_bytes`, FILE becomes FILE.1, FILE.1 becomes FILE.2, and so on. The
  oldest is removed, so at most `max_files` exist. A batch is never split.
* A file that is no audit log is not touched: the start is refused.
* One process writes a file. It holds a lock on the file, so a second broker with the same file cannot start.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import stat
import threading
from collections import deque
from collections.abc import Mapping
from typing import Final, TypeAlias

from kcoord.server.errors import StartError

AuditEntry: TypeAlias = Mapping[str, object]

MAX_WAITING: Final = 2_000
"""Number of entries that may wait for the thread. A disk that hangs must not fill the memory.

An entry has at most `MOST_PARTS` parts of each kind.
"""
CLOSE_SECONDS: Final = 1.5
"""The longest time that a shutdown waits for the last lines."""
_MODE: Final = 0o600
_BEGIN: Final = b'{"time":"'
"""The beginning of every line."""
_TAIL_BYTES: Final = 65_536

_logger = logging.getLogger(__name__)


class AuditFile:
    """Appends entries to a file. The constructor raises StartError if the file cannot be used."""

    def __init__(self, path: str, max_bytes: int, max_files: int) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._max_files = max_files
        self._waiting: deque[AuditEntry] = deque()
        self._wake = threading.Condition()
        self._is_closing = False
        self._descriptor = -1
        self._size = 0
        self.written = 0
        """Number of entries in the file since the start."""
        self.lost = 0
        """Number of entries that could not be written."""
        self._unreported = 0
        """Number of lost entries that no line of the file has yet."""
        self._is_failing = False
        self._is_rotation_failing = False
        try:
            self._descriptor, self._size = self._open(path)
        except OSError as error:
            raise StartError(_refusal(path, error.strerror or str(error))) from None
        self._thread = threading.Thread(target=self._run, name="kcoord-audit", daemon=True)
        self._thread.start()

    def add(self, entry: AuditEntry) -> None:
        """Queues an entry. Never blocks."""
        with self._wake:
            if len(self._waiting) >= MAX_WAITING:
                self._lose(1, "entries come faster than they can be written")
                return
            self._waiting.append(entry)
            self._wake.notify()

    def close(self) -> None:
        """Writes what is queued, and closes the file."""
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        self._thread.join(CLOSE_SECONDS)

    # --- in the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._waiting and not self._is_closing:
                    self._wake.wait()
                entries = [*self._waiting]
                self._waiting.clear()
                unreported = self._unreported
            if not entries:
                break
            self._append(entries, unreported)
        self._sync()
        os.close(self._descriptor)

    def _append(self, entries: list[AuditEntry], unreported: int) -> None:
        lines = [*map(_line, entries)]
        if unreported:
            lines.insert(0, _line({"time": entries[0]["time"], "event": "lost", "entries": unreported}))
        data = b"".join(lines)
        if self._size and self._size + len(data) > self._max_bytes:
            self._rotate_if_possible()
        try:
            self._write(data)
        except OSError as error:
            with self._wake:
                self._lose(len(entries), error.strerror or str(error))
            return
        with self._wake:
            self.written += len(entries)
            self._unreported -= unreported
            self._is_failing = False

    def _write(self, data: bytes) -> None:
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError:
            os.ftruncate(self._descriptor, self._size)
            raise
        self._size += len(data)

    def _lose(self, entries: int, reason: str) -> None:
        """Counts lost entries. Says so in the broker's log once, until a write succeeds again."""
        self.lost += entries
        self._unreported += entries
        if not self._is_failing:
            self._is_failing = True
            _logger.error("Entries of the audit log %s are lost: %s. The broker serves on", self._path, reason)

    # --- files --------------------------------------------------------------------------------------------------------

    def _open(self, path: str) -> tuple[int, int]:
        """Opens and locks a file. Returns its descriptor and its size."""
        # A pipe without a reader would block the open.
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
        descriptor = os.open(path, flags, _MODE)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError("it is no regular file")
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _BEGIN.startswith(os.pread(descriptor, len(_BEGIN), 0)):
                raise OSError("the file is no audit log")
            size = self._cut(descriptor)
            os.fchmod(descriptor, _MODE)
        except BlockingIOError:
            os.close(descriptor)
            raise OSError("another broker writes it") from None
        except OSError:
            os.close(descriptor)
            raise
        return descriptor, size

    def _cut(self, descriptor: int) -> int:
        """Cuts a last line without an end, and returns the size of the file."""
        size = end = os.fstat(descriptor).st_size
        while end:
            start = max(end - _TAIL_BYTES, 0)
            newline = os.pread(descriptor, end - start, start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        if end < size:
            os.ftruncate(descriptor, end)
            _logger.warning("The last line of the audit log %s was incomplete and is cut off", self._path)
        return end

    def _rotate_if_possible(self) -> None:
        """Begins a new file. If that fails, the present file grows beyond its limit, and the older ones stay."""
        try:
            self._rotate()
            self._is_rotation_failing = False
        except OSError as error:
            if not self._is_rotation_failing:
                self._is_rotation_failing = True
                _logger.error("The audit log %s cannot be rotated, and grows: %s", self._path, error.strerror)

    def _rotate(self) -> None:
        """Opens the new file first, under another name. So nothing is renamed or removed if no file can be opened."""
        self._sync()
        next_path = f"{self._path}.next"
        descriptor, size = self._open(next_path)
        try:
            # If FILE is missing, an earlier rotation failed after it had renamed the files.
            for number in range(self._max_files - 1, 0, -1) if os.path.exists(self._path) else ():
                older = self._path if number == 1 else f"{self._path}.{number - 1}"
                if os.path.exists(older):
                    os.replace(older, f"{self._path}.{number}")
            os.replace(next_path, self._path)
        except OSError:
            os.close(descriptor)
            raise
        os.close(self._descriptor)
        self._descriptor, self._size = descriptor, size

    def _sync(self) -> None:
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            _logger.error("The audit log %s could not be synced: %s", self._path, error.strerror)


def _line(entry: AuditEntry) -> bytes:
    return json.dumps(entry, separators=(",", ":"), default=str).encode() + b"\n"


def _refusal(path: str, reason: str) -> str:
    return f"Invalid value {path} for configuration kcoord.audit.log: the file cannot be written: {reason}"
