# SPDX-License-Identifier: Apache-2.0
"""The time slice of the event loop's thread, which Python's library cannot set."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import struct
import sys
from typing import Final

TIME_SLICE_MS: Final = 0.1
"""The shortest time slice that Linux offers."""

_CALL_NUMBERS: Final = {"x86_64": 314, "aarch64": 274}
"""The number of the system call sched_setattr."""
_ATTRIBUTES: Final = struct.Struct("<IIQiIQQQ")
"""`struct sched_attr`: size, policy, flags, nice value, priority, and three times in ns, the first for the slice."""

_logger = logging.getLogger(__name__)


def shorten_time_slice() -> None:
    """Asks for the shortest time slice for this thread, and for threads and processes that it starts.

    On a busy machine, a thread with short slices gets a processor sooner after it wakes, and no more of its time. An
    event loop wakes often and needs little, so clients get their responses sooner. Linux before 6.12 ignores the
    request, and other systems have no such call. A real-time priority stays as it is.
    """
    number = _CALL_NUMBERS.get(platform.machine())
    if sys.platform != "linux" or number is None:
        return
    try:
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            _set_time_slice(number, os.getpriority(os.PRIO_PROCESS, 0))
    except OSError as error:
        # A sandbox may forbid the calls. The broker runs without short slices, too.
        _logger.info("The time slice of the event loop stays as it is: %s", error.strerror)


def _set_time_slice(number: int, nice: int) -> None:
    slice_ns = int(TIME_SLICE_MS * 1_000_000)
    attributes = _ATTRIBUTES.pack(_ATTRIBUTES.size, os.SCHED_OTHER, 0, nice, 0, slice_ns, 0, 0)
    library = ctypes.CDLL(None, use_errno=True)
    if library.syscall(ctypes.c_long(number), ctypes.c_int(0), attributes, ctypes.c_uint(0)):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
