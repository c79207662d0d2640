# SPDX-License-Identifier: Apache-2.0
"""Requests of logs to the leaders of their partitions."""

from __future__ import annotations

from typing import cast

from kcoord.client.cluster import Cluster, Purpose
from kcoord.client.metadata import ClusterMetadata
from kcoord.upstream.requests import Fetched, PartitionRequests
from kcoord_protocol.messages import FetchResponse


class ThrottlingBroker:
    """A broker whose quota the first Fetch exceeds, as the only broker of a cluster and the only connection to it."""

    def __init__(self) -> None:
        self.metadata = ClusterMetadata()
        self.fetches = 0

    async def connection(self, node_id: int, purpose: Purpose) -> ThrottlingBroker:
        return self

    async def call(self, request: object, response: object, **limits: object) -> FetchResponse:
        self.fetches += 1
        if self.fetches == 1:
            return FetchResponse(throttle_time_ms=20)
        data = FetchResponse.PartitionData(partition_index=0, high_watermark=7, records=b"batches")
        return FetchResponse(responses=[FetchResponse.FetchableTopicResponse(topic="log", partitions=[data])])


async def test_a_fetch_over_a_quota_of_the_upstream_is_repeated() -> None:
    broker = ThrottlingBroker()
    requests = PartitionRequests(cast("Cluster", broker), "log", attempt_timeout_ms=1)
    assert await requests.fetch_all(1, {0: 5}, 0, Purpose.FETCHES) == {0: Fetched(b"batches", 7)}
    assert broker.fetches == 2
