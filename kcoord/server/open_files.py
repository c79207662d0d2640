# SPDX-License-Identifier: Apache-2.0
"""The system's limit on the open files of a process (`ulimit -n`). Sockets of clients count, too."""

from __future__ import annotations

import resource
import sys
from contextlib import suppress
from typing import Final

MOST_RESERVED: Final = 128
"""Logs and modules that are opened at once need far fewer."""

_MOST_ON_MACOS: Final = 10240
"""OPEN_MAX of its kernel."""


def raise_limit() -> None:
    """Raises the soft limit to the hard limit, as the JVM does for Kafka.

    The soft limit is 1,024 on most systems, and exists for programs that call select(2).
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # macOS has no hard limit by default, and rejects a soft limit above that of its kernel.
    most = min(hard, _MOST_ON_MACOS) if sys.platform == "darwin" else hard
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def soft_limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def first_reserved(limit: int) -> int:
    """Returns the lowest descriptor that no connection may have.

    The system gives each file the lowest free descriptor. So with this one, almost as many files are open as the limit
    allows. The rest is for logs and modules: a broker that cannot open them fails requests of all clients.
    """
    return limit - min(MOST_RESERVED, limit // 4)
