# SPDX-License-Identifier: Apache-2.0
"""Reads the batches of a partition through a broker, for commands that need what no other response contains."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Final, Self, TypeVar

from kcoord.client.admin.client import AdminClient
from kcoord.client.admin.model import TopicDescription
from kcoord.client.cluster import Cluster
from kcoord.client.config import CommonConfig
from kcoord.client.leaders import fetch_batches
from kcoord.client.repeat import repeat
from kcoord.client.types import TopicPartition
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.internal_topics import GROUP_METADATA_TOPIC
from kcoord_protocol.messages import FetchResponse
from kcoord_protocol.record_batch import iter_headers

T = TypeVar("T")

_FETCH_BYTES: Final = 8 * 1024 * 1024


async def offsets_topic(admin: AdminClient) -> TopicDescription | None:
    """Returns `__consumer_offsets`, None if it does not exist yet."""
    results = await admin.describe_topics([GROUP_METADATA_TOPIC])
    error: KafkaError | None = results.error(GROUP_METADATA_TOPIC)
    if error is not None and error.error is Errors.UNKNOWN_TOPIC_OR_PARTITION:
        return None
    return results[GROUP_METADATA_TOPIC]


class LogReader:
    """Reads partitions from their leaders, over connections with the security of `config`. Use it in `async with`."""

    def __init__(self, config: CommonConfig) -> None:
        self._cluster = Cluster(config)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._cluster.close()

    async def read(self, partition: TopicPartition, read: Callable[[Iterator[bytes]], T]) -> T:
        """Returns the result of `read`, which gets every batch that the partition has now.

        `read` runs in a thread, so that only one response is in memory at a time.
        """
        loop = asyncio.get_running_loop()

        def batches() -> Iterator[bytes]:
            offset = 0
            while True:
                fetched = asyncio.run_coroutine_threadsafe(self._fetch(partition, offset), loop).result()
                if fetched.error_code == Errors.OFFSET_OUT_OF_RANGE:
                    offset = fetched.log_start_offset
                    continue
                data = fetched.records or b""
                for position, header in iter_headers(data):
                    if header.next_offset > offset:
                        yield data[position : position + header.size_bytes]
                        offset = header.next_offset
                if offset >= fetched.high_watermark or not data:
                    return

        return await asyncio.to_thread(lambda: read(batches()))

    async def _fetch(self, partition: TopicPartition, offset: int) -> FetchResponse.PartitionData:
        """Fetches from `offset`. OFFSET_OUT_OF_RANGE is a result if the log starts after it, and raised otherwise."""
        attempt = fetch_batches(self._cluster, offset, _FETCH_BYTES)
        outcome = (await repeat(self._cluster, self._cluster.deadline(), [partition], attempt))[partition]
        if isinstance(outcome, KafkaError):
            raise outcome
        if outcome.error_code and offset >= outcome.log_start_offset:
            raise KafkaError(Errors(outcome.error_code), f"reading {partition}")
        return outcome
