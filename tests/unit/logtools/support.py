# SPDX-License-Identifier: Apache-2.0
"""Small data folders for the tests of the log tools."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from kcoord.config import BrokerConfig
from kcoord.metadata import records
from kcoord.runtime.result import CoordinatorRecord
from kcoord.runtime.serde import REASON_HEADER, CoordinatorSerde, MetadataSerde, partition_for
from kcoord.storage.file_system import FileSystem, RealFileSystem
from kcoord.storage.log_dir import Identity, LogDir
from kcoord.storage.segment import LogConfig
from kcoord_protocol.messages import OffsetCommitKey, OffsetCommitValue
from kcoord_protocol.record_batch import Compression, Record, encode_batch, encode_batch_from_parts
from kcoord_protocol.uuid import uuid_to_string

NOW_MS = 1_795_000_000_000
NODE_ID = 1
TOPIC_ID = bytes(range(16))
OFFSETS_ID = bytes(range(16, 32))
DIRECTORY_ID = bytes(range(32, 48))
SMALL = LogConfig(segment_bytes=700, index_interval_bytes=100)


def broker_config(**settings: str) -> BrokerConfig:
    """Returns a configuration. Keyword arguments are config keys with underscores for dots."""
    values = {"node.id": str(NODE_ID), "offsets.topic.num.partitions": "4"}
    values.update({key.replace("_", "."): value for key, value in settings.items()})
    return BrokerConfig.from_properties(values)


def uuids() -> Callable[[], bytes]:
    """Returns a source of distinct ids that are the same in each run."""
    numbers = itertools.count(1)
    return lambda: next(numbers).to_bytes(16, "big")


def open_folder(path: str, fs: FileSystem | None = None) -> LogDir:
    identity = Identity("c" * 22, NODE_ID, uuid_to_string(DIRECTORY_ID))
    return LogDir.open(fs or RealFileSystem(), path, identity)


def commit_record(group_id: str, topic: str, partition: int, offset: int, at_ms: int = NOW_MS) -> Record:
    key = OffsetCommitKey(group=group_id, topic=topic, partition=partition)
    value = OffsetCommitValue(offset=offset, metadata="", commit_timestamp=at_ms, topic_id=TOPIC_ID)
    return record_of(CoordinatorRecord(key, value, 4), at_ms)


def commit_tombstone(group_id: str, topic: str, partition: int, at_ms: int = NOW_MS, why: str = "") -> Record:
    key = OffsetCommitKey(group=group_id, topic=topic, partition=partition)
    record = record_of(CoordinatorRecord(key, None), at_ms)
    record.headers = [(REASON_HEADER, why.encode())] if why else []
    return record


def record_of(record: CoordinatorRecord, at_ms: int = NOW_MS) -> Record:
    key, value = CoordinatorSerde().serialize(record)
    return Record(key, value, timestamp_ms=at_ms)


def append(log_dir: LogDir, topic: str, partition: int, batches: Sequence[bytes], config: LogConfig = SMALL) -> None:
    """Appends batches that were encoded for base offset 0, moving each to the log end offset."""
    log = log_dir.open_log(topic, partition, config, NOW_MS)
    for batch in batches:
        moved = log.end_offset.to_bytes(8, "big") + batch[8:]
        log.append(moved, now_ms=NOW_MS)
    log.close()


def metadata_records(partitions: int = 2, offsets_partitions: int = 4) -> list[CoordinatorRecord]:
    """Returns the records of a topic `orders` and of the offsets topic."""
    made = [records.new_topic_record("orders", TOPIC_ID), records.new_topic_record("__consumer_offsets", OFFSETS_ID)]
    for number in range(partitions):
        made.append(records.new_partition_record(TOPIC_ID, number, [NODE_ID], [DIRECTORY_ID], NOW_MS))
    for number in range(offsets_partitions):
        made.append(records.new_partition_record(OFFSETS_ID, number, [NODE_ID], [DIRECTORY_ID], NOW_MS))
    return made


def write_metadata(log_dir: LogDir, made: Sequence[CoordinatorRecord]) -> None:
    serde = MetadataSerde()
    batches = [encode_batch_from_parts([serde.serialize(record)], NOW_MS) for record in made]
    append(log_dir, "__cluster_metadata", 0, batches)


def make_small_folder(path: str, fs: FileSystem | None = None) -> None:
    """Creates a cleanly closed folder: metadata, a group's offsets and a topic, in a few segments with indexes."""
    log_dir = open_folder(path, fs)
    write_metadata(log_dir, metadata_records())
    home = partition_for("readers", 4)
    commits = [encode_batch([commit_record("readers", "orders", n % 2, n, NOW_MS + n)]) for n in range(16)]
    append(log_dir, "__consumer_offsets", home, commits)
    codecs = itertools.cycle((Compression.NONE, Compression.ZSTD, Compression.LZ4))
    data = [
        encode_batch(
            [Record(b"k%d" % n, b"value-%d" % at * 3, timestamp_ms=NOW_MS + n) for at in range(3)],
            compression=next(codecs),
        )
        for n in range(14)
    ]
    for number in range(2):
        append(log_dir, "orders", number, data)
        log_dir.write_topic_id("orders", number, TOPIC_ID)
        log_dir.write_leader_epochs("orders", number, [(0, 0)])
    log_dir.close()
