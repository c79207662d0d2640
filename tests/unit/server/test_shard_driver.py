# SPDX-License-Identifier: Apache-2.0
"""The driver of a shard set turns deferred replies into futures."""

from __future__ import annotations

import asyncio
import gc
from typing import Any, cast

from kcoord.runtime.waiting import DeferredReply
from kcoord.server.shards.shard_service import ShardDriver
from kcoord_protocol.errors import Errors, KafkaError


def test_a_rejection_that_no_caller_awaits_is_not_reported() -> None:
    """A caller that asks all shards gives up at the first rejection. Other shards may reject later, when they close."""
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
