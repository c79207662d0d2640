# SPDX-License-Identifier: Apache-2.0
"""Fills the log of the groups in an upstream with committed offsets, as an instance does that runs no more."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from functools import partial
from typing import Final

from kcoord.client import AdminClient
from kcoord.client.cluster import Cluster
from kcoord.client.config import CommonConfig
from kcoord.coordinator.group.offsets.committed_offsets import CommittedOffset
from kcoord.coordinator.group.records import new_offset_commit_record
from kcoord.runtime.serde import CoordinatorSerde, partition_for
from kcoord.runtime.upstream_batches import claim_key
from kcoord.upstream.own_topics import OFFSETS_TOPIC, prepare_topic
from kcoord.upstream.requests import PartitionRequests, PendingBatch
from kcoord_protocol.batch_header import stamp_producer
from kcoord_protocol.errors import KafkaError
from kcoord_protocol.record_batch import decode_header, encode_batch_from_parts

OFFSETS_OF_A_GROUP: Final = 1_000
SEGMENT_BYTES: Final = 100 << 20


async def seed(address: str, partitions: int, offsets: int) -> None:
    """Creates the topic, claims its partitions, and commits offsets of groups with OFFSETS_OF_A_GROUP each."""
    async with AdminClient(bootstrap_servers=address) as admin:
        await prepare_topic(admin, OFFSETS_TOPIC, partitions, SEGMENT_BYTES)
    batches: defaultdict[int, list[bytes]] = defaultdict(list)
    now_ms = int(time.time() * 1000)
    serialize = CoordinatorSerde().serialize
    for number in range(offsets // OFFSETS_OF_A_GROUP):
        group = f"seeded{number}"
        records = [
            serialize(new_offset_commit_record(group, "seeded", partition, CommittedOffset(partition, -1, "", now_ms)))
            for partition in range(OFFSETS_OF_A_GROUP)
        ]
        batches[partition_for(group, partitions)].append(encode_batch_from_parts(records, now_ms))
    cluster = Cluster(CommonConfig(bootstrap_servers=address))
    requests = PartitionRequests(cluster, OFFSETS_TOPIC, attempt_timeout_ms=20_000)
    try:
        await cluster.start(cluster.deadline(20_000))
        await asyncio.gather(*(_append(cluster, requests, number, batches[number]) for number in range(partitions)))
    finally:
        await requests.stop()
        await cluster.close()


async def _append(cluster: Cluster, requests: PartitionRequests, partition: int, batches: list[bytes]) -> None:
    transactional_id = f"kcoord-{cluster.metadata.cluster_id}-{partition}"

    async def claim() -> tuple[int, int]:
        return await requests.init_producer_id(transactional_id, lambda: True)

    producer_id, epoch = await cluster.retry("claim", cluster.deadline(), claim)
    sequence = 0
    first = encode_batch_from_parts([(claim_key((producer_id, epoch)), b"\0\0seed, node.id=0")], 0)
    for data in [first, *batches]:
        stamped = stamp_producer(data, producer_id, epoch, sequence)
        sequence += decode_header(data).records_count
        # Brokers may not lead a new topic's partitions yet. A repeated batch has its old sequence number.
        await cluster.retry("append", cluster.deadline(), partial(_produce, requests, partition, stamped))


async def _produce(requests: PartitionRequests, partition: int, data: bytes) -> None:
    answer: asyncio.Future[int | KafkaError] = asyncio.get_running_loop().create_future()
    requests.produce(PendingBatch(partition, data, lambda: True, answer.set_result))
    outcome = await answer
    if isinstance(outcome, KafkaError):
        raise outcome
