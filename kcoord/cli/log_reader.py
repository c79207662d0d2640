# SPDX-License-Identifier: Apache-2.0
"""Reads the batches of a partition through a broker, for commands that need what no other response contains."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Final, Self, TypeVar

from kcoord.cli.upstream_sides import instances_of
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
from kcoord_protocol.record_batch import decode_header, iter_headers

T = TypeVar("T")

_FETCH_BYTES: Final = 8 * 1024 * 1024


async def instance_in_front(config: CommonConfig) -> int | None:
    """Returns the node id of an instance of kcoord in front of the cluster, None if there is none."""
    cluster = Cluster(config)
    try:
        await cluster.start(cluster.deadline())
        return next((node.node_id for node in await instances_of(cluster)), None)
    finally:
        await cluster.close()


async def offsets_topic(admin: AdminClient, instance: int | None) -> TopicDescription | None:
    """Returns the topic with the log of the groups, None if it does not exist yet.

    `instance` is the result of `instance_in_front`. The groups of the cluster behind it are in a topic of the same
    cluster, and may have the same names.
    """
    from kcoord.upstream.own_topics import OFFSETS_TOPIC

    name = GROUP_METADATA_TOPIC if instance is None else OFFSETS_TOPIC
    results = await admin.describe_topics([name])
    error: KafkaError | None = results.error(name)
    if error is not None and error.error is Errors.UNKNOWN_TOPIC_OR_PARTITION:
        return None
    return results[name]


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
        """Returns the result of `read`, which gets every batch that counts and that the partition has now.

        `read` runs in a thread, so that only one response is in memory at a time.
        """
        from kcoord.upstream.own_topics import OFFSETS_TOPIC

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

        is_in_front = partition.topic == OFFSETS_TOPIC
        return await asyncio.to_thread(lambda: read(_counting(batches()) if is_in_front else batches()))

    async def _fetch(self, partition: TopicPartition, offset: int) -> FetchResponse.PartitionData:
        """Fetches from `offset`. OFFSET_OUT_OF_RANGE is a result if the log starts after it, and raised otherwise."""
        attempt = fetch_batches(self._cluster, offset, _FETCH_BYTES)
        outcome = (await repeat(self._cluster, self._cluster.deadline(), [partition], attempt))[partition]
        if isinstance(outcome, KafkaError):
            raise outcome
        if outcome.error_code and offset >= outcome.log_start_offset:
            raise KafkaError(Errors(outcome.error_code), f"reading {partition}")
        return outcome


def _counting(batches: Iterator[bytes]) -> Iterator[bytes]:
    """Yields the batches of `__kcoord_offsets` that the owner of the partition replays. Claims are not among them."""
    from kcoord.runtime.upstream_batches import ReadBatch, UpstreamBatches

    log = UpstreamBatches()
    for batch in batches:
        header = decode_header(batch)
        if ReadBatch(log.take(header, batch), header, batch).is_replayed:
            yield batch
