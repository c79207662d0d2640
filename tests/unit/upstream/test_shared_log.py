# SPDX-License-Identifier: Apache-2.0
"""The log that all instances share, read from a scripted partition."""

from __future__ import annotations

import asyncio

import pytest

from kcoord.config import BrokerConfig
from kcoord.metadata.shared import SHARED_RECORDS, new_instance_record
from kcoord.runtime.serde import CoordinatorSerde
from kcoord.upstream import shared_log
from kcoord.upstream.cluster import UpstreamCluster
from kcoord.upstream.requests import PartitionRequests
from kcoord.upstream.shared_log import SharedLog
from kcoord_protocol.record_batch import encode_batch_from_parts


async def test_a_fetch_that_was_damaged_on_its_way_is_repeated(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = BrokerConfig.from_properties({"kcoord.upstream.bootstrap.servers": "127.0.0.1:1"})
    batch = encode_batch_from_parts([CoordinatorSerde(SHARED_RECORDS).serialize(new_instance_record(7))], 1)
    damaged = batch[:-1] + bytes([batch[-1] ^ 1])
    answers = iter([damaged, batch])

    async def fetch(self: PartitionRequests, partition: int, offset: int) -> bytes:
        answer = next(answers, None)
        return answer if answer is not None else await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(PartitionRequests, "fetch", fetch)
    monkeypatch.setattr(shared_log, "_RETRY_SECONDS", 0)
    log = SharedLog(config, UpstreamCluster(config).settings)
    announced: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    log.on_change, log.on_instance = lambda: None, announced.set_result
    following = asyncio.create_task(log.follow())
    try:
        async with asyncio.timeout(5):
            assert await announced == 7
    finally:
        following.cancel()
        await log.close()
    assert "The topic __kcoord_metadata of the upstream cannot be read: CORRUPT_MESSAGE" in caplog.text


async def test_a_hint_to_the_other_instances_that_gets_no_answer_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = BrokerConfig.from_properties({"kcoord.upstream.bootstrap.servers": "127.0.0.1:1"})
    monkeypatch.setattr(PartitionRequests, "produce", lambda self, batch: None)
    monkeypatch.setattr(shared_log, "ANNOUNCE_SECONDS", 0.01)
    log = SharedLog(config, UpstreamCluster(config).settings)
    with caplog.at_level("INFO"):
        await log.announce(7)
    await log.close()
    assert caplog.messages == [
        "The other instances do not get a hint to look at their group: the upstream has not answered for 0.01 s"
    ]
