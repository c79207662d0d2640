# SPDX-License-Identifier: Apache-2.0
"""A broadcast between tasks: take a ticket, look at the state, wait on the ticket. Nothing in between is missed."""

from __future__ import annotations

import asyncio


class Signal:
    """Says that something changed, not what."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def ticket(self) -> asyncio.Event:
        """To be waited on: set by the next `notify`."""
        return self._event

    def notify(self) -> None:
        self._event.set()
        self._event = asyncio.Event()


async def wait_for(ticket: asyncio.Event, timeout_ms: float | None) -> bool:
    """Whether the ticket was set in time."""
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
