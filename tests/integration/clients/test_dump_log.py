# SPDX-License-Identifier: Apache-2.0
"""Kafka 4.3.1's own kafka-dump-log reads every file of a broker process, and prints what kcoord decodes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from kcoord.logtools.decode import Json, kind_of
from kcoord.logtools.dump import Selection, dump_file
from kcoord.logtools.folders import partition_at
from kcoord.storage.file_system import RealFileSystem
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.framing import encode_request
from kcoord_protocol.messages import (
    FindCoordinatorRequest,
    FindCoordinatorResponse,
    OffsetCommitRequest,
    OffsetCommitResponse,
)
from tests.integration.clients.conftest import StartBroker
from tests.integration.wire import WireClient
from tests.support.confluent import PolledConsumer, create_topic, produce
from tests.support.kafka_jars import KafkaJars
from tests.support.waiting import wait_until

pytestmark = pytest.mark.java

DECODERS = {
    "offsets": "--offsets-decoder",
    "metadata": "--cluster-metadata-decoder",
    "transactions": "--transaction-log-decoder",
    "data": "--print-data-log",
}
RECORD = re.compile(
    r"\| offset: (?P<offset>\d+) (?:CreateTime|LogAppendTime): (?P<timestamp>-?\d+) keySize: (?P<key_size>-?\d+) "
    r"valueSize: (?P<value_size>-?\d+) sequence: (?P<sequence>-?\d+) headerKeys: \[(?P<headers>[^]]*)\]"
    r"(?: endTxnMarker: (?P<marker>\w+) coordinatorEpoch: (?P<epoch>\d+))?"
    r"(?: key: (?P<key>.*?))?(?: payload: (?P<value>.*))?"
)


def printed_by_kafka(jars: KafkaJars, decoder: str, files: list[Path]) -> dict[tuple[str, int], Json]:
    """Returns what the tool prints about each record, by file and offset."""
    text = jars.tool("dump-log", decoder, "--deep-iteration", "--files", ",".join(map(str, files)))
    assert "isvalid: false" not in text and "Exception" not in text, text
    records: dict[tuple[str, int], Json] = {}
    file = ""
    for line in text.splitlines():
        if line.startswith("Dumping "):
            file = line.removeprefix("Dumping ")
        elif line.startswith("| offset"):
            match = RECORD.fullmatch(line)
            assert match is not None, line
            fields = match.groupdict()
            row: Json = {
                "timestamp": int(fields["timestamp"]),
                "sequence": int(fields["sequence"]),
                "headers": [name for name in fields["headers"].split(",") if name],
            }
            if fields["marker"]:
                row["key"] = {"control": fields["marker"]}
                row["value"] = {"coordinatorEpoch": int(fields["epoch"])}
            else:
                row["key"], row["value"] = content(fields["key"]), content(fields["value"])
            records[file, int(fields["offset"])] = row
    return records


def content(text: str | None) -> object:
    if text is None or text == "<DELETE>":
        return None
    return json.loads(text) if text.startswith("{") else text


def decoded_by_us(files: list[Path]) -> dict[tuple[str, int], Json]:
    records: dict[tuple[str, int], Json] = {}
    for file in files:
        for row in dump_file(RealFileSystem(), str(file), Selection()):
            assert "damage" not in row
            offset, headers, value = row["offset"], row["headers"], row["value"]
            assert isinstance(offset, int) and isinstance(headers, list)
            if isinstance(value, dict):
                # Kafka 4.3.1 skips these tagged fields: kcoord's own, and those of KIP-1327.
                value.pop("unknownTaggedFields", None)
                value.get("data", {}).pop("creationTimeMs", None)
            records[str(file), offset] = {
                "timestamp": row["timestamp"],
                "sequence": row["sequence"],
                "headers": [header["key"] for header in headers],
                "key": row["key"],
                "value": value,
            }
    return records


def write_everything(address: str, name: str) -> None:
    create_topic(address, name, 2)
    produce(address, name, 2, 40)
    with PolledConsumer(address, f"{name}-848", [name], commit_each=True) as member:
        member.wait_for(80)
    with PolledConsumer(address, f"{name}-classic", [name], commit_each=True, classic="range") as member:
        member.wait_for(80)
    for transactional_id, commits in (("yes", True), ("no", False)):
        producer = Producer({"bootstrap.servers": address, "transactional.id": transactional_id})
        producer.init_transactions(20)
        producer.begin_transaction()
        producer.produce(name, b"in a transaction", partition=0)
        # An abort would drop records that were not sent yet.
        producer.flush(20)
        consumer = Consumer({"bootstrap.servers": address, "group.id": f"{name}-tx"})
        offsets = [TopicPartition(name, 0, 7)]
        producer.send_offsets_to_transaction(offsets, consumer.consumer_group_metadata(), 20)
        consumer.close()
        if commits:
            producer.commit_transaction(20)
        else:
            producer.abort_transaction(20)


def test_every_file_is_read_and_every_record_is_the_same(start_broker: StartBroker, name: str) -> None:
    jars = KafkaJars()
    broker = start_broker(offsets_topic_num_partitions="2", transaction_state_log_num_partitions="2")
    write_everything(broker.address, name)
    assert broker.stop() == 0
    files: dict[str, list[Path]] = {}
    for log in sorted(broker.data.glob("*/*.log")):
        partition = partition_at(str(log.parent))
        assert partition is not None
        files.setdefault(kind_of(partition.topic).value, []).append(log)
    assert files.keys() == DECODERS.keys()
    for kind, logs in files.items():
        ours = decoded_by_us(logs)
        assert ours
        theirs = printed_by_kafka(jars, DECODERS[kind], logs)
        assert theirs.keys() == ours.keys()
        for place, row in theirs.items():
            assert row == ours[place], place
    check_indexes(jars, broker.data)


def test_commits_that_arrive_together_are_one_batch_for_kafka(start_broker: StartBroker, name: str) -> None:
    """The output of the tool is compared with the commits that were sent."""
    jars = KafkaJars()
    broker = start_broker(offsets_topic_num_partitions="1")
    create_topic(broker.address, name, 2)
    offsets = range(100, 120)
    with WireClient(broker.port) as client:
        wait_until(lambda: has_committed(client, name, 99), "the first commit has created the group")
        # All frames are in one TCP segment, so that the broker reads them in one turn.
        requests = [commit_request(name, offset).encode(9) for offset in offsets]
        frames = [encode_request(ApiKey.OFFSET_COMMIT, 9, 1_000, "wire", body) for body in requests]
        client.socket.sendall(b"".join(frames))
        for offset in offsets:
            answer = client.receive(1_000, ApiKey.OFFSET_COMMIT, 9, OffsetCommitResponse)
            assert [partition.error_code for partition in answer.topics[0].partitions] == [0, 0], offset
    assert broker.stop() == 0
    (log,) = broker.data.glob("__consumer_offsets-0/*.log")
    text = jars.tool("dump-log", "--offsets-decoder", "--deep-iteration", "--files", str(log))
    assert "isvalid: false" not in text and "Exception" not in text, text
    assert max(int(count) for count in re.findall(r"^baseOffset: .* count: (\d+) ", text, re.MULTILINE)) > 2
    rows = [(row["key"], row["value"]) for row in printed_by_kafka(jars, "--offsets-decoder", [log]).values()]
    offsets_printed = [
        (key["data"]["partition"], value["data"]["offset"])  # type: ignore[index]
        for key, value in rows
        if key["data"]["group"] == name  # type: ignore[index]
    ]
    assert offsets_printed == [(partition, offset + partition) for offset in (99, *offsets) for partition in (0, 1)]


def commit_request(name: str, offset: int) -> OffsetCommitRequest:
    partitions = [
        OffsetCommitRequest.OffsetCommitRequestPartition(partition_index=number, committed_offset=offset + number)
        for number in (0, 1)
    ]
    topic = OffsetCommitRequest.OffsetCommitRequestTopic(name=name, partitions=partitions)
    return OffsetCommitRequest(group_id=name, generation_id_or_member_epoch=-1, topics=[topic])


def has_committed(client: WireClient, name: str, offset: int) -> bool:
    client.call(FindCoordinatorRequest(coordinator_keys=[name]), 4, FindCoordinatorResponse)
    answer = client.call(commit_request(name, offset), 9, OffsetCommitResponse)
    return not answer.topics[0].partitions[0].error_code


def check_indexes(jars: KafkaJars, data: Path) -> None:
    """Checks that the tool accepts the entries of indexes, and prints producer snapshots and transaction indexes."""
    indexes = [path for path in data.glob("*/*") if path.suffix in (".index", ".timeindex")]
    text = jars.tool("dump-log", "--index-sanity-check", "--files", ",".join(map(str, indexes)))
    empty = sum(path.stat().st_size == 0 for path in indexes)
    assert text.count("passed sanity check") == len(indexes) - empty > 0
    files = [*indexes, *data.glob("*/*.snapshot"), *data.glob("*/*.txnindex")]
    text = jars.tool("dump-log", "--files", ",".join(map(str, files)))
    assert "Mismatches" not in text and "not properly" not in text and "Exception" not in text, text
    assert "producerEpoch: 0" in text and "firstOffset" in text
