# SPDX-License-Identifier: Apache-2.0
"""Real `__consumer_offsets` logs of Apache Kafka 4.3.1, with the output of Kafka's own tools for them."""

from __future__ import annotations

import json
import lzma
import re
import tarfile
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import NamedTuple, TypeAlias

from pyspark.sql import Row as SparkRow

from kcoord.runtime.serde import partition_for
from tests.support.shared import shared

Row: TypeAlias = dict[str, object]
Key: TypeAlias = tuple[str, str, int]

LOG_PARTITIONS = 8

_STATES = {"stable": 0, "unrevoked_partitions": 1, "unreleased_partitions": 2}


def unpack_sample(folder: Path) -> str:
    """Extracts the eight partition folders into `folder`, and returns its path."""
    with tarfile.open(shared("spark-sample", "consumer_offsets.tar.xz")) as archive:
        archive.extractall(folder, filter="data")
    return str(folder)


def described_offsets(*log_partitions: int) -> dict[Key, int]:
    """Returns (group, topic, partition) -> committed offset, from `kafka-consumer-groups --describe --all-groups`.

    `log_partitions` limits the result to the groups in these partitions; without them it has all groups.
    """
    offsets = {}
    for line in shared("spark-sample", "describe-offsets.txt").read_text().splitlines():
        words = line.split()
        if len(words) >= 6 and words[0] != "GROUP" and words[3].isdigit():
            offsets[words[0], words[1], int(words[2])] = int(words[3])
    chosen = log_partitions or range(LOG_PARTITIONS)
    return {key: offsets[key] for key in offsets if partition_for(key[0], LOG_PARTITIONS) in chosen}


def committed_offsets(rows: Iterable[SparkRow]) -> dict[Key, int]:
    """Returns (group, topic, partition) -> committed offset, from Spark's rows of `current_offsets`."""
    return {(row["group"], row["topic"], row["partition"]): row["committed_offset"] for row in rows}


class Dumped(NamedTuple):
    """A record as kafka-dump-log prints it. `key` and `payload` are JSON; the payload of a tombstone is None."""

    log_partition: int
    offset: int
    timestamp_ms: int
    key_size: int
    value_size: int
    sequence: int
    batch: dict[str, str]
    key: object
    payload: object


_FILE = re.compile(r"^Dumping .*__consumer_offsets-(\d+)/")
_RECORD = re.compile(
    r"^\| offset: (\d+) CreateTime: (\d+) keySize: (\d+) valueSize: (-?\d+) sequence: (-?\d+) headerKeys: \[\] "
    r"key: (\{.*?\}) payload: (.*)$"
)


def dumped_records() -> Iterator[Dumped]:
    """Yields the records that kafka-dump-log printed for the log partitions 0, 5 and 6."""
    partition, batch = -1, dict[str, str]()
    with lzma.open(shared("spark-sample", "dump-log-partitions-0-5-6.txt.xz"), "rt") as lines:
        yield from _records(lines, partition, batch)


def _records(lines: Iterable[str], partition: int, batch: dict[str, str]) -> Iterator[Dumped]:
    for line in lines:
        if file := _FILE.match(line):
            partition = int(file[1])
        elif line.startswith("baseOffset:"):
            batch = dict(re.findall(r"(\w+): (\S+)", line))
        elif line.startswith("|"):
            match = _RECORD.match(line)
            assert match is not None, line
            key, payload = _key_and_payload(line)
            offset, timestamp_ms, key_size, value_size, sequence = map(int, match.groups()[:5])
            sizes = key_size, value_size
            yield Dumped(partition, offset, timestamp_ms, *sizes, sequence, batch, key, payload)


def _key_and_payload(line: str) -> tuple[object, object]:
    start = line.index("key: {") + len("key: ")
    key, end = json.JSONDecoder().raw_decode(line, start)
    payload = line[end + len(" payload: ") :].strip()
    return key, None if payload == "<DELETE>" else json.loads(payload)


def as_dumped(row: Row) -> tuple[object, object]:
    """Returns key and payload of a row of `records` in kafka-dump-log's format, for the types that the dump has."""
    kind = row["record_type"]
    group = {"groupId": row["group"]}
    data: Row = {
        1: {"group": row["group"], "topic": row["topic"], "partition": row["partition"]},
        2: {"group": row["group"]},
        5: {**group, "memberId": row["member_id"]},
        7: {**group, "memberId": row["member_id"]},
        8: {**group, "memberId": row["member_id"]},
    }.get(kind, group)  # type: ignore[call-overload]
    key = {"type": str(kind), "data": data}
    return key, None if row["is_tombstone"] else {"version": str(row["value_version"]), "data": _payload(row)}


def _payload(row: Row) -> object:
    if row["record_type"] == 1:
        return _offset(row)
    value = json.loads(str(row["value_json"]))
    if row["record_type"] == 7:
        return {"topicPartitions": _by_topic(value)}
    makers = {2: _classic, 3: _group, 5: _member, 6: _target, 8: _current}
    return makers[row["record_type"]](value)  # type: ignore[index]


def _ms(moment: object) -> int:
    if moment is None:
        return -1
    parsed = datetime.fromisoformat(moment) if isinstance(moment, str) else moment
    assert isinstance(parsed, datetime)
    return round(parsed.timestamp() * 1000)


def _offset(row: Row) -> Row:
    epoch = row["committed_leader_epoch"]
    payload: Row = {
        "offset": row["committed_offset"],
        "leaderEpoch": -1 if epoch is None else epoch,
        "metadata": row["metadata"],
        "commitTimestamp": _ms(row["commit_timestamp"]),
    }
    if row["topic_id"] is not None:
        payload["topicId"] = row["topic_id"]
    return payload


def _by_topic(assigned: object, *, name: str = "topic_id", with_epochs: bool = False) -> list[Row]:
    topics: dict[object, Row] = {}
    assert isinstance(assigned, list)
    for partition in assigned:
        shown = "topicId" if name == "topic_id" else name
        topic = topics.setdefault(partition[name], {shown: partition[name], "partitions": []})
        topic["partitions"].append(partition["partition"])  # type: ignore[attr-defined]
        if with_epochs:
            topic.setdefault("assignmentEpochs", []).append(partition["epoch"])  # type: ignore[attr-defined]
    return list(topics.values())


def _classic(value: Row) -> Row:
    return {
        "protocolType": value["protocol_type"],
        "generation": value["generation"],
        "protocol": value["protocol"],
        "leader": value["leader"],
        "currentStateTimestamp": _ms(value["state_timestamp"]),
        "members": [_classic_member(member) for member in value["members"]],  # type: ignore[attr-defined]
    }


def _classic_member(member: Row) -> Row:
    return {
        "memberId": member["member_id"],
        "groupInstanceId": member["instance_id"],
        "clientId": member["client_id"],
        "clientHost": member["client_host"],
        "rebalanceTimeout": member["rebalance_timeout_ms"],
        "sessionTimeout": member["session_timeout_ms"],
        "subscription": {"topics": member["subscribed_topics"]},
        "assignment": {"assignedPartitions": _by_topic(member["assigned"], name="topic")},
    }


def _without_opaque_parts(payload: object) -> object:
    """Removes the assignors' own data from a dumped classic group, since `classic_group` does not have it."""
    if isinstance(payload, dict):
        for member in payload["data"]["members"]:
            member["subscription"] = {"topics": member["subscription"]["topics"]}
            del member["assignment"]["userData"]
    return payload


def _group(value: Row) -> Row:
    # Kafka omits a hash of 0, since a tagged field with its default value is not written.
    hashed = {"metadataHash": value["metadata_hash"]} if value["metadata_hash"] else {}
    return {"epoch": value["epoch"], **hashed}


def _member(value: Row) -> Row:
    return {
        "instanceId": value["instance_id"],
        "rackId": value["rack_id"],
        "clientId": value["client_id"],
        "clientHost": value["client_host"],
        "subscribedTopicNames": value["subscribed_topics"],
        "subscribedTopicRegex": value["subscribed_regex"] or "",
        "rebalanceTimeoutMs": value["rebalance_timeout_ms"],
        "serverAssignor": value["server_assignor"],
        "classicMemberMetadata": value["classic_protocols"],
    }


def _target(value: Row) -> Row:
    payload: Row = {"assignmentEpoch": value["assignment_epoch"]}
    if value["assignment_timestamp"] is not None:
        # The record of a group without members has no timestamp.
        payload["assignmentTimestamp"] = _ms(value["assignment_timestamp"])
    return payload


def _current(value: Row) -> Row:
    return {
        "memberEpoch": value["member_epoch"],
        "previousMemberEpoch": value["previous_member_epoch"],
        "state": _STATES[str(value["state"])],
        "assignedPartitions": _by_topic(value["assigned"], with_epochs=True),
        "partitionsPendingRevocation": _by_topic(value["pending_revocation"], with_epochs=True),
    }


def differences(rows: Iterable[Row], dumped: Iterable[Dumped]) -> list[str]:
    """Returns the places of dumped records that differ in the rows of `records` or are missing there."""
    by_place = {(row["log_partition"], row["log_offset"]): row for row in rows}
    return [f"{record.log_partition}:{record.offset}" for record in dumped if not _is_equal(by_place, record)]


def _is_equal(by_place: dict[tuple[object, object], Row], record: Dumped) -> bool:
    row = by_place.get((record.log_partition, record.offset))
    if row is None:
        return False
    key, value = row["key"], row["value"]
    assert isinstance(key, bytes) and (value is None or isinstance(value, bytes))
    sizes = len(key), -1 if value is None else len(value)
    numbers = _ms(row["timestamp"]), -1 if row["sequence"] is None else row["sequence"]
    batch = {
        "producerId": str(-1 if row["producer_id"] is None else row["producer_id"]),
        "producerEpoch": str(-1 if row["producer_epoch"] is None else row["producer_epoch"]),
        "partitionLeaderEpoch": str(row["leader_epoch"]),
        "isTransactional": str(row["transaction"] is not None).lower(),
        "isControl": str(row["control_type"] is not None).lower(),
    }
    return (
        sizes == (record.key_size, record.value_size)
        and numbers == (record.timestamp_ms, record.sequence)
        and batch.items() <= record.batch.items()
        and as_dumped(row)
        == (record.key, _without_opaque_parts(record.payload) if row["record_type"] == 2 else record.payload)
    )
