# SPDX-License-Identifier: Apache-2.0
"""A network namespace for the calling thread, and for threads and processes that it starts in the meantime.

It has a loopback device that can drop packets.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from tests.support.shared import missing

_CLONE_NEWNET = 0x40000000
_SET_MARK = ("-j", "CONNMARK", "--set-mark")


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

    def mark(self, groups: Sequence[int]) -> None:
        """Marks the connections that processes with these group ids open or accept, for `split`."""
        for group in map(str, groups):
            _run("iptables", "-w", "-A", "OUTPUT", "-m", "owner", "--gid-owner", group, *_SET_MARK, group)

    @contextmanager
    def split(self, group: int, ports: Sequence[int]) -> Iterator[None]:
        """Drops all TCP packets between the ports and processes with a marked group id, in both directions."""
        marked = ["-p", "tcp", "-m", "connmark", "--mark", str(group)]
        with ExitStack() as rules:
            for port in ports:
                rules.enter_context(self._dropping(*marked, "--dport", str(port)))
                rules.enter_context(self._dropping(*marked, "--sport", str(port)))
            yield

    @contextmanager
    def _dropping(self, *what: str) -> Iterator[None]:
        rule = ["INPUT", *what, "-j", "DROP"]
        _run("iptables", "-w", "-A", *rule)
        try:
            yield
        finally:
            _run("iptables", "-w", "-D", *rule)


def network_of_thread() -> str:
    """Returns the file of the network namespace of the calling thread. Other systems than Linux have none."""
    return f"/proc/{os.getpid()}/task/{threading.get_native_id()}/ns/net"


def enter_network(file: str) -> None:
    """Moves the calling process into the namespace of another one, if it is in a different one."""
    if not os.path.exists(file) or os.readlink(file) == os.readlink("/proc/self/ns/net"):
        return
    descriptor = os.open(file, os.O_RDONLY)
    _set_network(ctypes.CDLL(None, use_errno=True), descriptor)
    os.close(descriptor)


def _set_network(libc: ctypes.CDLL, descriptor: int) -> None:
    assert not libc.setns(descriptor, _CLONE_NEWNET), os.strerror(ctypes.get_errno())


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
            _set_network(libc, before)
    finally:
        os.close(before)


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        missing(f"{command[0]} is not installed")
    if done.returncode:
        missing(f"{' '.join(command)}: {done.stderr.strip()}")
