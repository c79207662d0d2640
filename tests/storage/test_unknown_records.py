# SPDX-License-Identifier: Apache-2.0
"""Records of other releases in the logs of a group coordinator: loading skips them, cleaning keeps them."""

from __future__ import annotations

from kcoord.config import BrokerConfig
from kcoord.coordinator.group.shard import GroupCoordinatorShard
from kcoord.metadata.image import MetadataImage
from kcoord.runtime.serde import CoordinatorSerde
from kcoord.runtime.shard_set import ShardSet
from kcoord.storage.log import Log
from kcoord.storage.memory_file_system import MemoryFileSystem
from kcoord_protocol.messages import OffsetCommitKey, OffsetCommitValue
from kcoord_protocol.record_batch import Record, decode_records, encode_batch
from tests.storage.cleaning import clean
from tests.storage.support import NOW_MS, new_config, open_log

UNKNOWN = {
    b"\x00\x0a" + b"share-group": b"\x00\x00" + bytes(range(256)),
    b"\x00\x11" + b"streams-group": b"\x00\x01" + b"\xff" * 40,
    b"\x7f\xff" + b"of a later release": b"\x00\x63\x00",
    b"\x00\x01" + OffsetCommitKey(group="g", topic="t", partition=9).encode(0): b"\x00\x63" + b"a later version",
}


def commit(offset: int) -> tuple[bytes, bytes]:
    key = b"\x00\x01" + OffsetCommitKey(group="g", topic="t", partition=0).encode(0)
    return key, b"\x00\x03" + OffsetCommitValue(offset=offset, metadata="", commit_timestamp=5).encode(3)


def commit_with_tagged_field(offset: int) -> tuple[bytes, bytes]:
    """Returns a record as a later release may write it: the flexible version ends with tagged fields."""
    key = b"\x00\x01" + OffsetCommitKey(group="g", topic="t", partition=1).encode(0)
    value = OffsetCommitValue(offset=offset, metadata="", commit_timestamp=5).encode(4)
    assert value.endswith(b"\x00")
    return key, b"\x00\x04" + value[:-1] + b"\x01\x37\x05extra"


def put(log: Log, pairs: list[tuple[bytes, bytes]]) -> None:
    base = log.end_offset
    records = [
        Record(key, value, [("why", b"\x00\xff"), ("empty", None)], NOW_MS + number, base + number)
        for number, (key, value) in enumerate(pairs)
    ]
    log.append(encode_batch(records, base_offset=base), now_ms=NOW_MS)


def content(log: Log) -> dict[bytes, Record]:
    return {record.key: record for _, data in log.batches() for record in decode_records(data) if record.key}


def test_d11_records_of_unknown_types_survive_compaction_byte_for_byte() -> None:
    fs = MemoryFileSystem()
    log = open_log(fs, new_config())
    put(log, [*UNKNOWN.items(), commit(1), commit_with_tagged_field(1)])
    for offset in range(2, 50):
        put(log, [commit(offset), commit_with_tagged_field(offset)])
    before = content(log)
    log.roll(NOW_MS)
    size_bytes = log.size_bytes
    clean(log, fs)
    assert log.size_bytes < size_bytes / 4
    after = content(log)
    assert after == before
    assert {key: after[key].value for key in UNKNOWN} == UNKNOWN
    assert [after[key].headers for key in UNKNOWN] == [[("why", b"\x00\xff"), ("empty", None)]] * len(UNKNOWN)
    assert after[commit_with_tagged_field(0)[0]].value == commit_with_tagged_field(49)[1]


def test_d11_records_of_unknown_types_are_skipped_with_a_count() -> None:
    log = open_log(MemoryFileSystem(), new_config())
    put(log, [*UNKNOWN.items(), commit(7), commit_with_tagged_field(8)])
    config = BrokerConfig.from_properties({})
    runtime = ShardSet(lambda _: GroupCoordinatorShard(config, MetadataImage.empty()), CoordinatorSerde())
    runtime.load(0, log.batches(), NOW_MS, log.end_offset)
    shard = runtime.machine(0)
    assert shard is not None
    offsets = shard._offsets.of_group("g")["t"]
    assert {partition: committed.offset for partition, committed in offsets.items()} == {0: 7, 1: 8}
    assert runtime.statistics.records_skipped == len(UNKNOWN)
