# SPDX-License-Identifier: Apache-2.0
"""A network namespace for the calling thread, and for threads and processes that it starts in the meantime.

It has a loopback device that can drop packets.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.shared import missing

_CLONE_NEWNET = 0x40000000


class PrivateNetwork:
    """Controls the network of the calling thread."""

    @contextmanager
    def loss(self, share: float) -> Iterator[None]:
        """Drops every packet with this probability."""
        with self._dropping("-m", "statistic", "--mode", "random", "--probability", f"{share:g}"):
            yield

    @contextmanager
    def silence(self, port: int) -> Iterator[None]:
        """Drops all TCP packets from and to `port`."""
        with self._dropping("-p", "tcp", "--sport", str(port)), self._dropping("-p", "tcp", "--dport", str(port)):
            yield

    @contextmanager
    def _dropping(self, *what: str) -> Iterator[None]:
        rule = ["INPUT", *what, "-j", "DROP"]
        _run("iptables", "-w", "-A", *rule)
        try:
            yield
        finally:
            _run("iptables", "-w", "-D", *rule)


@contextmanager
def private_network() -> Iterator[PrivateNetwork]:
    """Moves the calling thread into a new network namespace.

    Needs root, and the tools of Debian's packages iproute2 and iptables.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        if libc.unshare(_CLONE_NEWNET):
            missing(f"cannot create a network namespace: {os.strerror(ctypes.get_errno())}")
        try:
            _run("ip", "link", "set", "lo", "up")
            yield PrivateNetwork()
        finally:
            assert not libc.setns(before, _CLONE_NEWNET), os.strerror(ctypes.get_errno())
    finally:
        os.close(before)


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        missing(f"{command[0]} is not installed")
    if done.returncode:
        missing(f"{' '.join(command)}: {done.stderr.strip()}")
