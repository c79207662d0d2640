# SPDX-License-Identifier: Apache-2.0
"""The brokers of a test session."""

from __future__ import annotations

from collections.abc import Mapping

from kcoord.testing.broker import KcoordBroker, Mode
from kcoord.testing.security import BrokerSecurity
from kcoord.testing.transports import LoopThread, ProcessTransport, ThreadTransport


class BrokerPool:
    """Lends brokers to tests. All calls come from one thread.

    A broker in this process starts in a few milliseconds, so each test gets a new one. A process takes a hundred times
    as long, so a process that was given back is reset and lent again.
    """

    def __init__(self) -> None:
        self._thread: LoopThread | None = None
        self._idle: list[KcoordBroker] = []

    def take(self, mode: Mode, config: Mapping[str, str], security: BrokerSecurity) -> KcoordBroker:
        """Returns a broker without topics, groups, faults and history, with these settings, on a new port."""
        settings = {**config, **security.settings}
        if mode == "in-process":
            if self._thread is None:
                self._thread = LoopThread()
            return KcoordBroker(ThreadTransport(self._thread, settings), security)
        if not self._idle:
            return KcoordBroker(ProcessTransport(settings), security)
        broker = self._idle.pop()
        broker.security = security
        try:
            broker.reset(settings, like_new=True)
        except BaseException:
            broker.stop()
            raise
        return broker

    def give_back(self, broker: KcoordBroker) -> None:
        """Stops a broker in this process. A broker process is reset and waits for the next test.

        The reset changes its port, so clients that a test has left behind cannot reconnect.
        """
        if broker.control_url is None or broker.is_stopped:
            broker.stop()
            return
        broker.security = BrokerSecurity()
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
