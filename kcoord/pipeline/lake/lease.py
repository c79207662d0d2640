# SPDX-License-Identifier: Apache-2.0
"""Leases: only one process at a time copies logs into a cluster of a lake, and only one updates its tables.

Theory of operation. A lease is a file beside the notes (`NAME.lease`), whose first line names the holder. A process
that finds a holder waits for a while, and then raises LeaseError with that line.

* On a local file system the holder locks the file. The kernel ends the lock with the process, however that ends.
* Object storage has no locks, nor have some network file systems, and pyarrow cannot create a file only if there is
  none. There the holder writes the file again every _RENEWAL_SECONDS, with another number, and deletes it in the end. A
  process that finds the file watches it. If the number does not change for _SILENT_SECONDS, the holder was killed. No
  clocks are compared.
* A holder that stood still for longer than that has lost its lease, and two processes that begin in the same moment may
  both take it. So a holder calls `check` before it writes a plan or a note: the one that wrote the file last
  continues, the other one ends with LeaseError.

If the file cannot be written, nothing in the lake can. The process then waits for nobody, has no lease, and may only
read: `check` raises LeaseError.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Final, Protocol
from uuid import uuid4

from pyarrow import fs

from kcoord.pipeline.lake.errors import LakeError
from kcoord.pipeline.lake.files import replace_text

PURPOSES: Final = {
    "ingest": "copies a log",
    "audit": "copies audit logs",
    "tables": "updates tables",
    "samples": "adds a sample",
    "compaction": "compacts tables",
}
WAIT_SECONDS: Final = 60.0
"""How long a process waits for the holder. Most jobs need seconds."""
_LOOK_SECONDS: Final = 0.5
_RENEWAL_SECONDS: Final = 5.0
_SILENT_SECONDS: Final = 20.0
_NO_LOCKS: Final = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class LeaseError(LakeError):
    """Another process has the lease."""


class Lease:
    """A lease of a cluster. Threads with the same object share it."""

    def __init__(self, files: fs.FileSystem, folder: str, name: str, place: str) -> None:
        """`folder` has the file. `place` names the cluster and its lake in errors."""
        path = f"{folder}/{name}.lease"
        self._path = path
        self._place = place
        self._purpose = PURPOSES[name]
        self._mark = _Mark(files, path)
        self._file: _LeaseFile = _Lock(files, path) if isinstance(files, fs.LocalFileSystem) else self._mark
        self._guard = threading.Lock()
        self._holders = 0

    @contextmanager
    def held(self, wait_s: float | None = None) -> Iterator[None]:
        """Holds the lease. Raises LeaseError with the name of the holder if another process has it for longer."""
        with self._guard:
            if not self._holders:
                since = datetime.now(UTC).isoformat(" ", "seconds").removesuffix("+00:00")
                own = f"process {os.getpid()} on {socket.gethostname()} {self._purpose} since {since} UTC"
                self._raise_for(self._take(own, time.monotonic() + (WAIT_SECONDS if wait_s is None else wait_s)))
            self._holders += 1
        try:
            yield
        finally:
            with self._guard:
                self._holders -= 1
                if not self._holders:
                    self._file.release()

    def _take(self, own: str, deadline: float) -> str | None:
        try:
            return self._file.take(own, deadline)
        except OSError as error:
            if self._file is self._mark or error.errno not in _NO_LOCKS:
                raise
            self._file = self._mark
            return self._file.take(own, deadline)

    def check(self) -> None:
        """Raises LeaseError if the lease was lost, or this process may only read."""
        failure = self._file.failure
        if failure is not None:
            raise LeaseError(f"{self._place}: this job {self._purpose}, and {self._path} cannot be written: {failure}")
        self._raise_for(self._file.holder())

    def _raise_for(self, holder: str | None) -> None:
        if holder is not None:
            raise LeaseError(
                f"{self._place}: {holder or 'another process took the lease'}, and only one process may at a time. "
                "Wait for it or end it, and run this again"
            )


class _LeaseFile(Protocol):
    failure: OSError | None
    """Why the file cannot be written. The process then has no lease."""

    def take(self, own: str, deadline: float) -> str | None:
        """Takes the lease. Returns the line of the holder if another one has it at the deadline."""
        ...

    def holder(self) -> str | None:
        """Returns None if this process has the lease, or else the line of the holder, which may be empty."""
        ...

    def release(self) -> None: ...


class _Lock:
    """A file that is locked. It stays when the lock ends."""

    def __init__(self, files: fs.FileSystem, path: str) -> None:
        self._files = files
        self._path = path
        self._descriptor: int | None = None
        self.failure: OSError | None = None

    def take(self, own: str, deadline: float) -> str | None:
        self.failure = None
        try:
            self._files.create_dir(os.path.dirname(self._path))
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            self.failure = error
            return None
        try:
            while not _is_locked(self._descriptor):
                if time.monotonic() >= deadline:
                    self.release()
                    return _read(self._files, self._path)
                time.sleep(_LOOK_SECONDS)
        except BaseException:
            self.release()
            raise
        with suppress(OSError):  # The disk may be full. Others then cannot name the holder.
            os.ftruncate(self._descriptor, 0)
            os.write(self._descriptor, own.encode())
        return None

    def holder(self) -> str | None:
        return None

    def release(self) -> None:
        if self._descriptor is not None:
            with suppress(OSError):  # Some file systems have no locks.
                # A forked process would keep the lock otherwise.
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            os.close(self._descriptor)
            self._descriptor = None


def _is_locked(descriptor: int) -> bool:
    """Locks a file if no other process has. Returns whether this process has it now."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class _Mark:
    """A file that its holder keeps writing. Its second line is a number that no other write has."""

    def __init__(self, files: fs.FileSystem, path: str) -> None:
        self._files = files
        self._path = path
        self._own = ""
        self.failure: OSError | None = None
        self._released = threading.Event()
        self._renewal: threading.Thread | None = None

    def take(self, own: str, deadline: float) -> str | None:
        seen, silent_from = self._text(), time.monotonic()
        self.failure = self._refusal() if seen else None
        if self.failure is not None:
            return None
        while seen and time.monotonic() - silent_from < _SILENT_SECONDS:
            time.sleep(_LOOK_SECONDS)
            text = self._text()
            if text == seen:
                continue
            if text and time.monotonic() >= deadline:
                return text.partition("\n")[0]
            seen, silent_from = text, time.monotonic()
        self._own = f"{own}\n{uuid4()}"
        self._released = threading.Event()
        try:
            self._write(0)
        except OSError as error:
            self.failure = error
            return None
        self._renewal = threading.Thread(target=self._renew, args=(self._released,), daemon=True)
        self._renewal.start()
        return None

    def holder(self) -> str | None:
        text = self._text()
        return None if self._own and text.startswith(self._own) else text.partition("\n")[0]

    def release(self) -> None:
        self._released.set()
        if self._renewal is not None:
            self._renewal.join()
            self._renewal = None
        with suppress(OSError):
            if self.failure is None and self.holder() is None:
                self._files.delete_file(self._path)
        self._own = ""

    def _refusal(self) -> OSError | None:
        """Returns the error if this process may not write beside the file."""
        path = f"{self._path}.{uuid4().hex}"
        try:
            replace_text(self._files, path, "")
            self._files.delete_file(path)
        except OSError as error:
            return error
        return None

    def _renew(self, released: threading.Event) -> None:
        number = 0
        while not released.wait(_RENEWAL_SECONDS):
            number += 1
            with suppress(OSError):
                if self.holder() is not None:
                    return
                self._write(number)

    def _write(self, number: int) -> None:
        replace_text(self._files, self._path, f"{self._own} {number}")

    def _text(self) -> str:
        return _read(self._files, self._path)


def _read(files: fs.FileSystem, path: str) -> str:
    """Returns the text of a file, empty if there is none."""
    try:
        with files.open_input_stream(path) as file:
            return str(file.read().decode())
    except FileNotFoundError:
        return ""
