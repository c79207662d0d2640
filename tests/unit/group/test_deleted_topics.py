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
LONGEST_ID_BYTES = 4_096
"""The default of `kcoord.max.id.bytes`."""


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


def test_a_shard_is_loaded_even_if_long_ids_make_the_tombstones_larger_than_a_batch() -> None:
    """The last owner has ended before it deleted the offsets of the topic."""
    image = image_of({TOPIC: 1}, epoch=1)
    config = BrokerConfig.from_properties({})
    last_owner = GroupCoordinatorShard(config, image)
    shards = ShardSet(lambda _: last_owner, CoordinatorSerde())
    shards.load(0, (), NOW_MS, 0)
    for number in range(MAX_BATCH_BYTES // LONGEST_ID_BYTES + 1):
        group_id = str(number).zfill(LONGEST_ID_BYTES)
        shards.run(0, GroupCoordinatorShard.commit_offset, commit(group_id, 1), OperationContext(NOW_MS, 9))
    [append] = shards.poll(NOW_MS).appends
    deleted = {image.topics[TOPIC].id: None}
    without = image_of({}, epoch=2, previous=image)
    shards = ShardSet(lambda _: GroupCoordinatorShard(config, without, deleted_topics=deleted), CoordinatorSerde())
    batches = [(header, append.data[at:][: header.size_bytes]) for at, header in iter_headers(append.data)]
    shards.load(0, batches, NOW_MS)
    machine = shards.machine(0)
    assert machine is not None
    assert machine.hard_state()["offsets"] == {}


def commit(group_id: str, partitions_count: int = PARTITIONS) -> OffsetCommitRequest:
    partitions = [
        OffsetCommitRequest.OffsetCommitRequestPartition(partition_index=partition, committed_offset=1)
        for partition in range(partitions_count)
    ]
    topic = OffsetCommitRequest.OffsetCommitRequestTopic(name=TOPIC, partitions=partitions)
    return OffsetCommitRequest(group_id=group_id, generation_id_or_member_epoch=-1, topics=[topic])
