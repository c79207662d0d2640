# SPDX-License-Identifier: Apache-2.0
"""Topics whose offsets need more tombstones than one batch can have."""

from __future__ import annotations

from kcoord.config import BrokerConfig
from kcoord.coordinator.group.shard import GroupCoordinatorShard
from kcoord.runtime.result import MAX_BATCH_BYTES, OperationContext
from kcoord.runtime.serde import CoordinatorSerde
from kcoord.runtime.shard_set import ShardSet
from kcoord_protocol.messages import OffsetCommitRequest
from kcoord_protocol.record_batch import iter_headers
from tests.unit.group.images import image_of

NOW_MS = 1_000_000
GROUPS = 12
PARTITIONS = 2_000
TOPIC = "t" * 100


def test_the_offsets_of_a_deleted_topic_go_in_several_batches() -> None:
    """Each batch is within the limit. Apache Kafka does not write these tombstones atomically, either."""
    image = image_of({TOPIC: PARTITIONS}, epoch=1)
    config = BrokerConfig.from_properties({})
    shards = ShardSet(lambda _: GroupCoordinatorShard(config, image), CoordinatorSerde())
    shards.load(0, (), NOW_MS, 0)
    for number in range(GROUPS):
        shards.run(0, GroupCoordinatorShard.commit_offset, commit(f"g{number}"), OperationContext(NOW_MS, 9))
    [append] = shards.poll(NOW_MS).appends
    shards.written(append)
    without = image_of({}, epoch=2, previous=image)

    def update(shard: GroupCoordinatorShard, context: OperationContext, _: None) -> object:
        return shard.on_metadata_update(context, without)

    shards.run_on_active(update, None, NOW_MS)  # type: ignore[arg-type]
    [append] = shards.poll(NOW_MS).appends
    headers = [header for _, header in iter_headers(append.data)]
    assert sum(header.records_count for header in headers) == GROUPS * PARTITIONS
    assert len(headers) > 1
    assert all(header.size_bytes <= MAX_BATCH_BYTES for header in headers)
    machine = shards.machine(0)
    assert machine is not None
    assert machine.hard_state()["offsets"] == {}


def commit(group_id: str) -> OffsetCommitRequest:
    partitions = [
        OffsetCommitRequest.OffsetCommitRequestPartition(partition_index=partition, committed_offset=1)
        for partition in range(PARTITIONS)
    ]
    topic = OffsetCommitRequest.OffsetCommitRequestTopic(name=TOPIC, partitions=partitions)
    return OffsetCommitRequest(group_id=group_id, generation_id_or_member_epoch=-1, topics=[topic])
