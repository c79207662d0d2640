# SPDX-License-Identifier: Apache-2.0
"""`kcoord log export`: a real Kafka 4.3.1 starts with the folder, and serves the same data as kcoord."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from kcoord.cli import main
from tests.integration.clients.conftest import StartBroker
from tests.support.confluent import PolledConsumer, produce
from tests.support.kafka_broker import START_SECONDS, KafkaBroker
from tests.support.kafka_jars import KafkaJars
from tests.support.migration import QUIET, descriptions, read_committed, use_everything
from tests.support.waiting import wait_until

pytestmark = pytest.mark.java

DECODERS = {
    "__cluster_metadata": "--cluster-metadata-decoder",
    "__consumer_offsets": "--offsets-decoder",
    "__transaction_state": "--transaction-log-decoder",
    "orders": "--print-data-log",
    "out": "--print-data-log",
}


def bytes_of(folder: Path) -> dict[str, str]:
    """Returns a digest of every file."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def group_config(jars: KafkaJars, address: str) -> str:
    server = ("--bootstrap-server", address)
    return jars.tool("configs", *server, "--describe", "--entity-type", "groups", "--entity-name", "readers")


def group_ids(jars: KafkaJars, address: str) -> list[str]:
    return sorted(jars.tool("consumer-groups", "--bootstrap-server", address, "--list").split())


def check_files(jars: KafkaJars, data: Path) -> None:
    """Checks that Kafka's kafka-dump-log reads every log of the folder."""
    for topic, decoder in DECODERS.items():
        logs = sorted(data.glob(f"{topic}-*/*.log"))
        text = jars.tool("dump-log", decoder, "--deep-iteration", "--files", ",".join(map(str, logs)))
        assert text.count("isvalid: true") > 0, topic
        assert "isvalid: false" not in text and "Exception" not in text, text
    snapshots = ",".join(map(str, data.glob("*/*.snapshot")))
    text = jars.tool("dump-log", "--files", snapshots)
    assert "producerId: " in text and "Exception" not in text, text


def test_kafka_serves_topics_groups_offsets_and_data_of_the_folder(
    start_broker: StartBroker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jars = KafkaJars()
    # A static member that is not connected is still a member of its group after Kafka has started.
    broker = start_broker(group_consumer_session_timeout_ms="45000", transaction_state_log_num_partitions="2")
    pending = use_everything(broker.address)
    interval = ["--add-config", "consumer.heartbeat.interval.ms=4000"]
    server = ("--bootstrap-server", broker.address)
    jars.tool("configs", *server, "--alter", "--entity-type", "groups", "--entity-name", "readers", *interval)
    before = descriptions(jars, broker.address)
    groups = group_ids(jars, broker.address)
    configs = group_config(jars, broker.address)
    assert "consumer.heartbeat.interval.ms=4000" in configs
    assert broker.stop() == 0
    source = bytes_of(broker.data)
    folder = tmp_path / "kafka"
    command = ["log", "export", str(broker.data), str(folder / "logs"), "--json"]
    assert main(command) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["topics"], report["consumer groups"], report["notes"]) == (4, 2, [])
    assert bytes_of(broker.data) == source
    check_files(jars, folder / "logs")
    kafka = KafkaBroker(jars, folder, group_min_session_timeout_ms="1000")
    try:
        # Kafka answers before it has loaded its groups, and lists only those that it has loaded.
        wait_until(lambda: group_ids(jars, kafka.address) == groups, f"Kafka serves {groups}", START_SECONDS)
        after = descriptions(jars, kafka.address)
        for what, lines in before.items():
            assert after[what] == lines, what
        assert "consumer.heartbeat.interval.ms=4000" in group_config(jars, kafka.address)
        check_use(kafka.address)
    finally:
        pending.purge()
        kafka.stop()


def check_use(address: str) -> None:
    """Checks that groups continue at their offsets, and that the open transaction can be ended."""
    fenced = Producer({"bootstrap.servers": address, "transactional.id": "third", **QUIET})
    fenced.init_transactions(30)
    assert read_committed(address, "out", 1) == [b"first:7"]
    produce(address, "orders", 3, 1)
    for group_id, classic in (("readers", None), ("classic-readers", "range")):
        with PolledConsumer(address, group_id, ["orders"], commit_each=True, classic=classic) as resumed:
            resumed.wait_for(3)
            assert sorted(resumed.seen) == [("orders", number, 20) for number in range(3)]
        committed = Consumer({"bootstrap.servers": address, "group.id": group_id, **QUIET})
        asked = [TopicPartition("orders", number) for number in range(3)]
        assert [partition.offset for partition in committed.committed(asked, 20)] == [21, 21, 21]
        committed.close()
