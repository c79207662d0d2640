# SPDX-License-Identifier: Apache-2.0
"""Committed offsets as packed rows: they behave as a dictionary of objects, and a fast path loads them from a log."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kcoord.config import BrokerConfig
from kcoord.coordinator.group.offsets.committed_offsets import (
    CELL,
    CELL_END,
    TIME,
    CommittedOffset,
    CommittedOffsets,
    TopicOffsets,
)
from kcoord.coordinator.group.records import TombstoneReason, new_offset_commit_record, new_offset_commit_tombstone
from kcoord.coordinator.group.shard import GroupCoordinatorShard
from kcoord.metadata.image import MetadataImage
from kcoord.runtime.result import CoordinatorRecord, Producer, new_end_transaction_marker
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
    model = {group_id: {t: rows for t, rows in topics.items() if rows} for group_id, topics in model.items()}
    model = {group_id: topics for group_id, topics in model.items() if topics}
    assert set(offsets.group_ids()) == set(model)
    for group_id, topics in model.items():
        assert {t: dict(rows.items()) for t, rows in offsets.of_group(group_id).items()} == topics
        for topic, expected_rows in topics.items():
            rows = offsets.of_group(group_id)[topic]
            assert list(rows) == sorted(expected_rows)
            assert len(rows) == len(expected_rows)
            assert all(partition in rows and rows[partition] == rows.get(partition) for partition in expected_rows)
            assert list(rows.values()) == [expected_rows[partition] for partition in sorted(expected_rows)]
    for topic in ("t", "uu"):
        expected = {group_id: sorted(topics[topic]) for group_id, topics in model.items() if topic in topics}
        assert dict(offsets.of_topic(topic)) == expected


# -- the fast path of loading ------------------------------------------------------------------------------------------


def new_shard() -> GroupCoordinatorShard:
    return GroupCoordinatorShard(CONFIG, MetadataImage.empty())


def record(group_id: str, topic: str, partition: int, offset: CommittedOffset | None) -> CoordinatorRecord:
    if offset is None:
        return new_offset_commit_tombstone(group_id, topic, partition, TombstoneReason.EXPIRED)
    return new_offset_commit_record(group_id, topic, partition, offset)


def both_ways(batches: list[bytes]) -> tuple[GroupCoordinatorShard, GroupCoordinatorShard, int]:
    """Loads batches; returns a shard by the fast path, one by the general path, and the number of fast batches.

    The first shard replays a batch by the general path if the fast path does not accept it.
    """
    quick, slow = new_shard(), new_shard()
    replay = quick.batch_replay()
    fast = 0
    for batch in batches:
        done = replay(batch, decode_header(batch).records_count)
        fast += done
        for _, key, value in decode_entries(batch):
            read = SERDE.deserialize(key, value)
            assert read is not None
            slow.replay(read)
            if not done:
                quick.replay(read)
    return quick, slow, fast


NAMES = st.sampled_from(["g", "group-1", "group-2", "ü"])
COMMITS = st.lists(
    st.tuples(NAMES, st.sampled_from(["t", "topic-1", "topic-2"]), PARTITIONS, st.one_of(st.none(), OFFSETS, OFFSETS)),
    min_size=1,
    max_size=8,
)


@settings(max_examples=70, deadline=None)
@given(st.lists(COMMITS, max_size=6))
def test_the_fast_path_gives_the_same_state(
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


def test_a_group_that_was_deleted_before_its_offsets_exists_again_with_the_next_commit() -> None:
    """The same holds during a transaction, when no batch takes the fast path."""
    commit = PLAIN_BATCHES["one"]
    key = ConsumerGroupMetadataKey(group_id="group")
    for has_transaction in (False, True):
        quick, slow = new_shard(), new_shard()
        replay = quick.batch_replay()
        assert replay(commit, 1)
        for _, *pair in decode_entries(commit):
            slow.replay(SERDE.deserialize(*pair))  # type: ignore[arg-type]
        pending = record("other", "topic", 0, plain(1))
        pending.producer = Producer(7, 0)
        events = [CoordinatorRecord(key, ConsumerGroupMetadataValue(epoch=1)), CoordinatorRecord(key, None)]
        if has_transaction:
            events = [pending, *events, new_end_transaction_marker(Producer(7, 0), 1, committed=True)]
        for event in events:
            assert not replay(encoded([record("group", "other", 0, None)]) if has_transaction else encoded([event]), 1)
            quick.replay(event)
            slow.replay(event)
        assert replay(commit, 1)
        for _, *pair in decode_entries(commit):
            slow.replay(SERDE.deserialize(*pair))  # type: ignore[arg-type]
        assert quick.hard_state() == slow.hard_state()
        assert _group_ids(quick) == _group_ids(slow)
        assert "group" in _group_ids(quick)


def test_a_tombstone_between_fast_batches_counts() -> None:
    key = ConsumerGroupMetadataKey(group_id="g")
    steps = [
        [record("g", "t", 0, plain(1)), record("g", "t", 1, plain(1))],
        [CoordinatorRecord(key, ConsumerGroupMetadataValue(epoch=1))],
        [record("g", "t", 0, None), record("g", "t", 1, None)],
        [CoordinatorRecord(key, None)],
        [record("g", "t", 1, plain(2))],
    ]
    data = [encode_batch_from_parts([SERDE.serialize(entry) for entry in batch], timestamp_ms=0) for batch in steps]
    quick, slow, _ = both_ways(data)
    assert quick.hard_state() == slow.hard_state()
    assert _group_ids(quick) == _group_ids(slow) == ["g"]


def encoded(records: Sequence[CoordinatorRecord], *deltas: int) -> bytes:
    """Returns a batch; `deltas` are its offset deltas if compaction has left gaps."""
    return encode_batch(
        [
            Record(*SERDE.serialize(record), timestamp_ms=5, offset=delta)
            for record, delta in zip(records, deltas or range(len(records)), strict=True)
        ]
    )


def commits_of(
    topic: str, partitions: Iterable[int], topic_id: bytes = ZERO_UUID, group_id: str = "group"
) -> list[CoordinatorRecord]:
    return [record(group_id, topic, partition, plain(partition + 7, topic_id)) for partition in partitions]


def of_old_type(batch: bytes) -> bytes:
    """Returns the batch with keys of type 0, as old releases of Kafka wrote them."""
    return batch.replace(b"\0\1\0\5group", b"\0\0\0\5group")


PLAIN_BATCHES = {
    "one": encoded(commits_of("topic", [0])),
    "one with id": encoded(commits_of("topic", [3], TOPIC_IDS[1])),
    "in a row": encoded(commits_of("topic", range(5), TOPIC_IDS[1])),
    "not in a row": encoded(commits_of("topic", [4, 0, 2, 2, 9])),
    "most with short deltas": encoded(commits_of("topic", range(64))),
    "one long delta": encoded(commits_of("topic", range(65))),
    "long deltas": encoded(commits_of("topic", range(1_000), TOPIC_IDS[1])),
    "gaps": encoded(commits_of("topic", range(6)), 0, 1, 5, 63, 64, 700),
    "wide gaps": encoded(commits_of("topic", range(4)), 3, 8_191, 8_192, 1_000_000),
    "two topics": encoded(commits_of("topic", range(3)) + commits_of("cipot", range(3))),
    "two sizes": encoded(commits_of("topic", range(3)) + commits_of("t", range(3))),
    "two sizes, later": encoded(commits_of("topic", range(40)) + commits_of("t", range(20))),
    "two groups": encoded(commits_of("topic", range(2)) + commits_of("topic", range(2), group_id="puorg")),
    "by turns": encoded([*commits_of("topic", [0]), *commits_of("cipot", [0]), *commits_of("topic", [1])]),
    "two ids": encoded(commits_of("topic", [0, 1], TOPIC_IDS[1]) + commits_of("topic", [2, 3], TOPIC_IDS[2])),
    "old keys": of_old_type(encoded(commits_of("topic", range(2)))),
    "long name": encoded(commits_of("t" * 249, range(3), TOPIC_IDS[2])),
}


@pytest.mark.parametrize("name", PLAIN_BATCHES)
def test_commits_without_notes_take_the_fast_path(name: str) -> None:
    """The batch is loaded into an empty shard, over the same offsets, and after batches of other shapes."""
    batch = PLAIN_BATCHES[name]
    for before in ([], [batch], [PLAIN_BATCHES["one"]], [PLAIN_BATCHES["long deltas"], PLAIN_BATCHES["two sizes"]]):
        quick, slow, fast = both_ways([*before, batch, batch])
        assert fast == len(before) + 2
        assert quick.hard_state() == slow.hard_state()
        assert _group_ids(quick) == _group_ids(slow)


def test_other_records_take_the_general_path() -> None:
    """Batches after them are stored in the right place."""
    first, many = PLAIN_BATCHES["in a row"], PLAIN_BATCHES["long deltas"]
    with_metadata = encoded([record("group", "topic", 1, CommittedOffset(5, 3, "note", 1234))])
    with_expiry = encoded([record("group", "topic", 1, CommittedOffset(5, 3, "", 1234, 99))])
    removed = encoded([record("group", "topic", partition, None) for partition in range(5)])
    group = encoded(
        [CoordinatorRecord(ConsumerGroupMetadataKey(group_id="other"), ConsumerGroupMetadataValue(epoch=1))]
    )
    for odd in (with_metadata, with_expiry, removed, group):
        quick, slow, fast = both_ways([first, odd, first, odd, many])
        assert fast == 3
        assert quick.hard_state() == slow.hard_state()
        mixed = encode_batch_from_parts(
            [(key, value) for batch in (first, odd, first) for _, key, value in decode_entries(batch)], timestamp_ms=0
        )
        quick, slow, fast = both_ways([first, mixed, many])
        assert fast == 2
        assert quick.hard_state() == slow.hard_state()


@pytest.mark.parametrize("name", ["one", "in a row", "gaps", "two sizes", "two ids", "old keys"])
def test_damaged_records_are_left_to_the_general_path(name: str) -> None:
    """If the fast path accepts damaged bytes, the general path reads the same records from them."""
    sound = PLAIN_BATCHES[name]
    count = decode_header(sound).records_count
    last_delta = range(23, 27)
    for at in (*last_delta, *range(61, len(sound))):
        for change in (0x01, 0x02, 0x03, 0x10, 0x7F, 0x80, 0xFF):
            batch = bytearray(sound)
            batch[at] ^= change
            compare_damaged(bytes(batch), count)
    for position in range(61, len(sound), 3):
        compare_damaged(sound[:position], count)
        compare_damaged(sound[:position] + b"\0" + sound[position:], count)
    compare_damaged(sound + b"\0", count)
    compare_damaged(sound, count + 1)


def compare_damaged(batch: bytes, count: int) -> None:
    quick = new_shard()
    if not quick.batch_replay()(batch, count):
        return
    slow = new_shard()
    for _, key, value in decode_entries(batch):
        read = SERDE.deserialize(key, value)
        assert read is not None
        slow.replay(read)
    assert quick.hard_state() == slow.hard_state()
    assert _group_ids(quick) == _group_ids(slow)


# -- the rows of one topic ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(30))
def test_rows_do_not_move_while_the_layout_is_unchanged(seed: int) -> None:
    random = Random(seed)
    topic = TopicOffsets(ZERO_UUID, bytearray(), bytearray(), None)
    model: dict[int, CommittedOffset] = {}
    most = random.choice((3, 8, 50))
    for _ in range(150):
        partition, before, layout = random.randrange(most), sorted(model), topic.layout
        offset = CommittedOffset(random.randrange(9), 3, "", random.randrange(1_000), topic_id=topic.topic_id)
        match random.randrange(8):
            case 0 | 1:
                topic.remove(partition)
                model.pop(partition, None)
            case 2 if topic.notes is None and before == list(range(len(before))):
                first = random.randrange(len(before) + 1)
                new = dict.fromkeys(range(first, first + random.randrange(1, 4)), offset)
                cells = b"".join(CELL.pack(number, offset.offset, 3, CELL_END) for number in new)
                topic.put_first(list(new), cells, TIME.pack(offset.commit_timestamp_ms) * len(new))
                model |= new
            case 3:
                offset.metadata = random.choice(("", "note"))
                offset.expire_timestamp_ms = random.choice((-1, 7))
                topic.put(partition, offset)
                model[partition] = offset
            case _:
                topic.put(partition, offset)
                model[partition] = offset
        rows = sorted(model)
        assert dict(topic.items()) == model
        assert topic.layout == layout + (rows != before), "the layout grows if a row gets a new partition"
        assert topic.is_dense() == (rows == list(range(len(rows))))
        numbers = [random.randrange(-2, most + 2) for _ in range(3)]
        for number in numbers:
            assert topic.row_of(number) == (rows.index(number) if number in model else None)
            assert (number in topic) == (number in model)
        assert topic.rows_of(numbers) == ([rows.index(n) for n in numbers] if set(numbers) <= set(rows) else None)
        assert not topic.__contains__("0")
        has_notes = any(
            o.metadata or o.expire_timestamp_ms >= 0 or o.topic_id != topic.topic_id for o in model.values()
        )
        assert (topic.notes is not None) == has_notes or not model
        if model:
            assert topic.oldest() == (min(o.commit_timestamp_ms for o in model.values()), has_notes)
