# SPDX-License-Identifier: Apache-2.0
"""Waits for logs that another thread opens (`kcoord.topics.log_opening`)."""

from __future__ import annotations

import asyncio

from kcoord.topics.log_opening import Opening


async def ends_before(opening: Opening[object], end: float) -> bool:
    """Waits until an opening has ended. Returns False if it has not at `end`, a time of the event loop."""
    if opening.has_ended:
        return True
    ended = asyncio.Event()
    opening.observers.append(ended.set)
    try:
        await asyncio.wait_for(ended.wait(), end - asyncio.get_running_loop().time())
    except TimeoutError:
        return False
    return True
