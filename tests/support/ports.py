# SPDX-License-Identifier: Apache-2.0
"""Free ports for processes that cannot choose one themselves."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from random import SystemRandom

_RANGE = range(10_000, 32_000)
"""Below the ports that Linux gives to those who let it choose, so another process rarely takes one meanwhile."""


def free_ports(count: int = 1) -> int:
    """Returns the first of `count` free ports in a row."""
    while True:
        first = SystemRandom().choice(_RANGE)
        with ExitStack() as listeners:
            try:
                for port in range(first, first + count):
                    listeners.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
            return first
