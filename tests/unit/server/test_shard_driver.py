# SPDX-License-Identifier: Apache-2.0
"""The driver of a shard set: answers become futures."""

from __future__ import annotations

import asyncio
import gc
from typing import Any, cast

from kcoord.runtime.waiting import DeferredReply
from kcoord.server.shards.shard_service import ShardDriver
from kcoord_protocol.errors import Errors, KafkaError


def test_a_refusal_that_nobody_waits_for_is_not_reported() -> None:
    """Who asks all shards gives up if one of them refuses at once. The others refuse later, as when they are closed."""
    reported: list[dict[str, Any]] = []

    async def abandon() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context))
        driver: ShardDriver[Any] = ShardDriver(cast("Any", None), cast("Any", None), lambda: None)
        reply = DeferredReply(None)
        driver.future_of(reply)
        reply.deliver(KafkaError(Errors.NOT_COORDINATOR))
        del reply
        gc.collect()

    asyncio.run(abandon())
    assert not reported
