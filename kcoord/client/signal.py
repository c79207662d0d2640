# SPDX-License-Identifier: Apache-2.0
"""A broadcast between tasks of one event loop.

Theory of operation. A task takes a ticket, looks at the state, and waits on the ticket. `notify` sets the current
ticket and makes a new one. So a change between the look and the wait sets the ticket, and the task cannot miss it.
"""

from __future__ import annotations

import asyncio


class Signal:
    """Notifies waiting tasks that something has changed. It does not say what."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def ticket(self) -> asyncio.Event:
        """Returns the event that the next `notify` sets."""
        return self._event

    def notify(self) -> None:
        """Wakes all tasks that wait on a ticket."""
        self._event.set()
        self._event = asyncio.Event()


async def wait_for(ticket: asyncio.Event, timeout_ms: float | None) -> bool:
    """Waits for the ticket. Returns whether it was set in time."""
    if ticket.is_set():
        return True
    if timeout_ms is not None and timeout_ms <= 0:
        await asyncio.sleep(0)
        return ticket.is_set()
    try:
        async with asyncio.timeout(None if timeout_ms is None else timeout_ms / 1000):
            await ticket.wait()
    except TimeoutError:
        return False
    return True
