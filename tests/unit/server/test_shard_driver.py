# SPDX-License-Identifier: Apache-2.0
"""The driver of a shard set turns deferred replies into futures."""

from __future__ import annotations

import asyncio
import gc
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kcoord.runtime.waiting import DeferredReply, Ready
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


def test_a_reply_that_cannot_be_delivered_keeps_no_other_reply_back(caplog: pytest.LogCaptureFixture) -> None:
    delivered: list[object] = []
    replies = [DeferredReply(number) for number in range(4)]
    for reply in replies:
        reply.deliver = delivered.append
    replies[0].deliver = replies[2].deliver = lambda value: delivered.remove(value)
    shards = SimpleNamespace(
        name="groups",
        poll=lambda now_ms: Ready([*replies[:2]], [], []),
        take_replies=lambda: [*replies[2:]],
        has_replies=lambda: False,
    )
    driver: ShardDriver[Any] = ShardDriver(cast("Any", shards), cast("Any", None), lambda: None)
    driver.collect(0)
    driver.deliver_replies()
    assert delivered == [1, 3]
    assert [record.message for record in caplog.records] == ["Delivering a reply of the shards of groups failed"] * 2
