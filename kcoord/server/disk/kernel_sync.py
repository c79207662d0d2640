# SPDX-License-Identifier: Apache-2.0
"""fdatasync through the kernel's queue (Linux AIO), for the event loop: no thread waits for the disk, and none has to
wait for the interpreter when the disk is through.

Called without a library: the one that wraps these three calls takes 40 ms to import, a sixth of a start.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import platform
import sys
from collections.abc import Callable
from typing import Final

_CALL_NUMBERS: Final = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}
"""io_setup, io_destroy, io_getevents and io_submit."""
_FDSYNC: Final = 3
_TELL_EVENT_FD: Final = 1


class _Request(ctypes.Structure):
    """`struct iocb` of a little-endian machine."""

    _fields_ = (
        ("data", ctypes.c_uint64),
        ("key", ctypes.c_uint32),
        ("rw_flags", ctypes.c_int32),
        ("opcode", ctypes.c_uint16),
        ("priority", ctypes.c_int16),
        ("descriptor", ctypes.c_uint32),
        ("buffer", ctypes.c_uint64),
        ("size", ctypes.c_uint64),
        ("offset", ctypes.c_int64),
        ("reserved", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("event_descriptor", ctypes.c_uint32),
    )


class _Event(ctypes.Structure):
    """`struct io_event`."""

    _fields_ = (
        ("data", ctypes.c_uint64),
        ("request", ctypes.c_uint64),
        ("result", ctypes.c_int64),
        ("result2", ctypes.c_int64),
    )


class KernelSync:
    """One sync at a time. OSError where the kernel has no such queue, or a sandbox forbids it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        numbers = _CALL_NUMBERS.get(platform.machine())
        if sys.platform != "linux" or numbers is None or sys.byteorder != "little":
            raise OSError(errno.ENOSYS, "not known for this machine")
        self._setup, self._destroy, self._get_events, self._submit = numbers
        self._call = ctypes.CDLL(None, use_errno=True).syscall
        self._call.restype = ctypes.c_long
        self._context = ctypes.c_ulong(0)
        self._checked(self._setup, ctypes.c_uint(1), ctypes.byref(self._context))
        self._loop = loop
        self._event = _Event()
        self._event_descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._request = _Request(opcode=_FDSYNC, flags=_TELL_EVENT_FD, event_descriptor=self._event_descriptor)
        self._requests = (ctypes.c_void_p * 1)(ctypes.addressof(self._request))
        self._done: Callable[[OSError | None], None] | None = None
        loop.add_reader(self._event_descriptor, self._on_event)

    @property
    def is_busy(self) -> bool:
        return self._done is not None

    def start(self, descriptor: int, done: Callable[[OSError | None], None]) -> None:
        """Syncs what was written to the file until now; `done` is called in the event loop. OSError if it was refused,
        and then it is not.
        """
        assert self._done is None, "one at a time"
        self._request.descriptor = descriptor
        self._checked(self._submit, self._context, ctypes.c_long(1), self._requests)
        self._done = done

    def close(self) -> None:
        """While nothing is under way."""
        self._loop.remove_reader(self._event_descriptor)
        self._call(self._destroy, self._context)
        os.close(self._event_descriptor)

    def _on_event(self) -> None:
        os.eventfd_read(self._event_descriptor)
        count = self._checked(
            self._get_events, self._context, ctypes.c_long(1), ctypes.c_long(1), ctypes.byref(self._event), None
        )
        done, self._done = self._done, None
        assert count == 1
        assert done is not None
        result = self._event.result
        done(OSError(-result, os.strerror(-result)) if result < 0 else None)

    def _checked(self, number: int, *arguments: object) -> int:
        result = int(self._call(ctypes.c_long(number), *arguments))
        if result < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        return result
