# SPDX-License-Identifier: Apache-2.0
"""The brokers of a test session. A broker in this process is made anew for each test, which takes a few
milliseconds; a process takes a hundred times as long, so one that was given back is reset and lent again.
"""

from __future__ import annotations

from collections.abc import Mapping

from kcoord.testing.broker import KcoordBroker, Mode
from kcoord.testing.transports import LoopThread, ProcessTransport, ThreadTransport


class BrokerPool:
    """`take` and `give_back`, from one thread."""

    def __init__(self) -> None:
        self._thread: LoopThread | None = None
        self._idle: list[KcoordBroker] = []

    def take(self, mode: Mode, config: Mapping[str, str]) -> KcoordBroker:
        """A broker without topics, groups, faults or history, with these settings, on a port that no test had."""
        if mode == "in-process":
            if self._thread is None:
                self._thread = LoopThread()
            return KcoordBroker(ThreadTransport(self._thread, config))
        if not self._idle:
            return KcoordBroker(ProcessTransport(config))
        broker = self._idle.pop()
        try:
            broker.reset(config, like_new=True)
        except BaseException:
            broker.stop()
            raise
        return broker

    def give_back(self, broker: KcoordBroker) -> None:
        """Ends a broker of this process; a process waits for the next test, already empty, so that clients that a test
        has left behind find nobody.
        """
        if broker.control_url is None:
            broker.stop()
            return
        try:
            broker.reset({}, like_new=True)
        except BaseException:
            broker.stop()
            raise
        self._idle.append(broker)

    def close(self) -> None:
        for broker in self._idle:
            broker.stop()
        self._idle.clear()
        if self._thread is not None:
            self._thread.close()
