# SPDX-License-Identifier: Apache-2.0
"""Committed offsets as packed rows: the answers of a dictionary of objects, and the short way from a log's bytes."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kcoord.config import BrokerConfig
from kcoord.coordinator.group.offsets.committed_offsets import CommittedOffset, CommittedOffsets
from kcoord.coordinator.group.records import TombstoneReason, new_offset_commit_record, new_offset_commit_tombstone
from kcoord.coordinator.group.shard import GroupCoordinatorShard
from kcoord.metadata.image import MetadataImage
from kcoord.runtime.result import CoordinatorRecord
from kcoord.runtime.serde import CoordinatorSerde
from kcoord_protocol.messages import ConsumerGroupMetadataKey, ConsumerGroupMetadataValue
from kcoord_protocol.record_batch import Record, decode_entries, decode_header, encode_batch, encode_batch_from_parts
from kcoord_protocol.uuid import ZERO_UUID

SERDE = CoordinatorSerde()
CONFIG = BrokerConfig.from_properties({})
TOPIC_IDS = [ZERO_UUID, b"\x01" * 16, b"\x02" * 16]
INT64 = st.integers(-(2**63), 2**63 - 1)
OFFSETS = st.builds(
    CommittedOffset,
    offset=st.one_of(st.integers(0, 10), INT64),
    leader_epoch=st.integers(-1, 2**31 - 1),
    metadata=st.sampled_from(["", "", "", "höhe", "m" * 300]),
    commit_timestamp_ms=st.integers(0, 2**62),
    expire_timestamp_ms=st.sampled_from([-1, -1, -1, 5]),
    topic_id=st.sampled_from(TOPIC_IDS),
)
PARTITIONS = st.one_of(st.integers(0, 5), st.integers(0, 5), st.integers(0, 2**31 - 1))
CHANGES = st.lists(
    st.tuples(st.sampled_from(["g", "h"]), st.sampled_from(["t", "uu"]), PARTITIONS, st.one_of(st.none(), OFFSETS))
)


@settings(max_examples=60, deadline=None)
@given(CHANGES)
def test_rows_are_a_dictionary(changes: list[tuple[str, str, int, CommittedOffset | None]]) -> None:
    offsets = CommittedOffsets()
    model: dict[str, dict[str, dict[int, CommittedOffset]]] = {}
    for group_id, topic, partition, offset in changes:
        if offset is None:
            offsets.remove(group_id, topic, partition)
            model.get(group_id, {}).get(topic, {}).pop(partition, None)
        else:
            offsets.put(group_id, topic, partition, offset)
            model.setdefault(group_id, {}).setdefault(topic, {})[partition] = offset
        assert offsets.get(group_id, topic, partition) == offset
    model = {group_id: {t: found for t, found in topics.items() if found} for group_id, topics in model.items()}
    model = {group_id: topics for group_id, topics in model.items() if topics}
    assert set(offsets.group_ids()) == set(model)
    for group_id, topics in model.items():
        assert {t: dict(found.items()) for t, found in offsets.of_group(group_id).items()} == topics
        for topic, found in topics.items():
            seen = offsets.of_group(group_id)[topic]
            assert list(seen) == sorted(found)
            assert len(seen) == len(found)
            assert all(partition in seen and seen[partition] == seen.get(partition) for partition in found)
            assert list(seen.values()) == [found[partition] for partition in sorted(found)]
    for topic in ("t", "uu"):
        expected = {group_id: sorted(topics[topic]) for group_id, topics in model.items() if topic in topics}
        assert dict(offsets.of_topic(topic)) == expected


# -- the short way -----------------------------------------------------------------------------------------------------


def new_shard() -> GroupCoordinatorShard:
    return GroupCoordinatorShard(CONFIG, MetadataImage.empty())


def record(group_id: str, topic: str, partition: int, offset: CommittedOffset | None) -> CoordinatorRecord:
    if offset is None:
        return new_offset_commit_tombstone(group_id, topic, partition, TombstoneReason.EXPIRED)
    return new_offset_commit_record(group_id, topic, partition, offset)


def both_ways(batches: list[bytes]) -> tuple[GroupCoordinatorShard, GroupCoordinatorShard, int]:
    """A shard by the short way as far as it goes, one by the ordinary way, and how many batches went the short way."""
    quick, slow = new_shard(), new_shard()
    replay = quick.batch_replay()
    short = 0
    for batch in batches:
        done = replay(batch, decode_header(batch).records_count)
        short += done
        for _, key, value in decode_entries(batch):
            found = SERDE.deserialize(key, value)
            assert found is not None
            slow.replay(found)
            if not done:
                quick.replay(found)
    return quick, slow, short


NAMES = st.sampled_from(["g", "group-1", "group-2", "ü"])
COMMITS = st.lists(
    st.tuples(NAMES, st.sampled_from(["t", "topic-1", "topic-2"]), PARTITIONS, st.one_of(st.none(), OFFSETS, OFFSETS)),
    min_size=1,
    max_size=8,
)


@settings(max_examples=70, deadline=None)
@given(st.lists(COMMITS, max_size=6))
def test_the_short_way_gives_the_same_state(
    batches: list[list[tuple[str, str, int, CommittedOffset | None]]],
) -> None:
    data = [
        encode_batch_from_parts([SERDE.serialize(record(*commit)) for commit in commits], timestamp_ms=7)
        for commits in batches
    ]
    quick, slow, _ = both_ways(data)
    assert quick.hard_state() == slow.hard_state()
    assert _group_ids(quick) == _group_ids(slow)


def _group_ids(shard: GroupCoordinatorShard) -> list[str]:
    from kcoord.runtime.result import OperationContext

    return [group.group_id for group in shard.list_groups(OperationContext(0), [], []).response]


def plain(offset: int, topic_id: bytes = TOPIC_IDS[1]) -> CommittedOffset:
    return CommittedOffset(offset, 3, "", 1234, -1, topic_id)


def test_ordinary_commits_do_go_the_short_way() -> None:
    """Many partitions, several topics and groups in one batch, with and without topic ids, and again later."""
    commits = [
        [record("group", "topic", partition, plain(partition)) for partition in range(200)],
        [record("group", topic, partition, plain(9)) for topic in ("a", "b") for partition in (5, 3, 4)],
        [record(group, "topic", 0, plain(1, ZERO_UUID)) for group in ("one", "two", "three", "four")],
        [record("group", "topic", partition, plain(7)) for partition in range(50, 80)],
    ]
    data = [
        encode_batch_from_parts([SERDE.serialize(one) for one in batch], timestamp_ms=9, base_offset=1000 * number)
        for number, batch in enumerate(commits)
    ]
    quick, slow, short = both_ways(data)
    assert short == len(data)
    assert quick.hard_state() == slow.hard_state()


def test_gaps_that_compaction_left_do_not_matter() -> None:
    records = [
        Record(*SERDE.serialize(record("group", "topic", number, plain(number))), timestamp_ms=5, offset=number * 50)
        for number in range(8)
    ]
    quick, slow, short = both_ways([encode_batch(records)])
    assert quick.hard_state() == slow.hard_state()
    assert short in (0, 1)


def test_a_tombstone_in_between_is_not_forgotten() -> None:
    key = ConsumerGroupMetadataKey(group_id="g")
    steps = [
        [record("g", "t", 0, plain(1)), record("g", "t", 1, plain(1))],
        [CoordinatorRecord(key, ConsumerGroupMetadataValue(epoch=1))],
        [record("g", "t", 0, None), record("g", "t", 1, None)],
        [CoordinatorRecord(key, None)],
        [record("g", "t", 1, plain(2))],
    ]
    data = [encode_batch_from_parts([SERDE.serialize(one) for one in batch], timestamp_ms=0) for batch in steps]
    quick, slow, _ = both_ways(data)
    assert quick.hard_state() == slow.hard_state()
    assert _group_ids(quick) == _group_ids(slow) == ["g"]


@settings(max_examples=70, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 255))
def test_damaged_records_are_left_to_the_ordinary_way(position: int, flip: int) -> None:
    """What the short way takes must be what the ordinary way would take, also of bytes that nobody meant."""
    data = bytearray(
        encode_batch_from_parts(
            [SERDE.serialize(record("group", "topic", partition, plain(partition))) for partition in range(3)],
            timestamp_ms=0,
        )
    )
    at = 61 + position % (len(data) - 61)
    data[at] ^= flip
    quick, slow = new_shard(), new_shard()
    done = quick.batch_replay()(bytes(data), 3)
    if not done:
        return
    for _, key, value in decode_entries(bytes(data)):
        found = SERDE.deserialize(key, value)
        assert found is not None
        slow.replay(found)
    assert quick.hard_state() == slow.hard_state()
