# SPDX-License-Identifier: Apache-2.0
"""A real Kafka 4.3.1 with groups whose tombstones are in the log after their offsets, before and after a repair."""

from __future__ import annotations

from pathlib import Path

import pytest
from confluent_kafka import (
    OFFSET_INVALID,
    Consumer,
    ConsumerGroupTopicPartitions,
    KafkaError,
    KafkaException,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from kcoord.cli import main
from kcoord.coordinator.group.records import TombstoneReason, new_classic_group_tombstone, new_consumer_group_tombstones
from kcoord.logtools.folders import FolderReader
from kcoord.storage.file_system import RealFileSystem
from kcoord_protocol.record_batch import encode_batch
from tests.support.kafka_broker import KafkaBroker
from tests.support.kafka_jars import KafkaJars
from tests.support.waiting import wait_until
from tests.unit.logtools.support import record_of

pytestmark = pytest.mark.java

QUIET = {"log_level": 0}
SETTINGS = {"offsets_topic_num_partitions": "1"}


def commit(address: str, group: str, offset: int) -> None:
    simple = Consumer({"bootstrap.servers": address, "group.id": group, "enable.auto.commit": False, **QUIET})
    simple.commit(offsets=[TopicPartition("orders", 0, offset)], asynchronous=False)
    simple.close()


def groups(jars: KafkaJars, address: str) -> dict[str, list[str]]:
    """Returns the words of each group's line in the list, by group.

    Waits until the coordinator has loaded `three`, which is never lost.
    """
    listed: dict[str, list[str]] = {}

    def has_loaded() -> bool:
        output = jars.tool("consumer-groups", "--bootstrap-server", address, "--list", "--state", "--type")
        listed.update({line.split()[0]: line.split()[1:] for line in output.splitlines()[1:] if line.strip()})
        return "three" in listed

    wait_until(has_loaded, "Kafka lists the groups", 60.0)
    return listed


def served(address: str, group: str) -> int:
    """Returns the committed offset of orders-0, OFFSET_INVALID if there is none."""
    admin = AdminClient({"bootstrap.servers": address, **QUIET})
    requested = ConsumerGroupTopicPartitions(group, [TopicPartition("orders", 0)])
    (place,) = admin.list_consumer_group_offsets([requested])[group].result(20).topic_partitions
    return int(place.offset)


def refusal(address: str, group: str) -> int:
    """Returns the error of deleting the group."""
    admin = AdminClient({"bootstrap.servers": address, **QUIET})
    error = admin.delete_consumer_groups([group])[group].exception(20)
    assert isinstance(error, KafkaException)
    return int(error.args[0].code())


def end_groups(data: Path) -> None:
    """Appends the tombstones of both groups after their offsets, which no broker should do."""
    folder = data / "__consumer_offsets-0"
    end = max(frame.last_offset for frame in FolderReader(RealFileSystem(), str(folder)).batches()) + 1
    tombstones = [
        new_classic_group_tombstone("one", TombstoneReason.GROUP_DELETE),
        *new_consumer_group_tombstones("two", [], TombstoneReason.GROUP_DELETE),
    ]
    path = max(folder.glob("*.log"))
    batch = encode_batch([record_of(tombstone) for tombstone in tombstones], base_offset=end)
    path.write_bytes(path.read_bytes() + batch)
    (data / ".kafka_cleanshutdown").unlink()
    (data / "recovery-point-offset-checkpoint").unlink()


def test_kafka_lists_a_lost_group_again_after_a_repair(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jars = KafkaJars()
    kafka = KafkaBroker(jars, tmp_path, **SETTINGS)
    try:
        admin = AdminClient({"bootstrap.servers": kafka.address, **QUIET})
        admin.create_topics([NewTopic("orders", 1)])["orders"].result(20)
        for group in ("one", "two", "three"):
            commit(kafka.address, group, 3)
        whole = groups(jars, kafka.address)
        assert set(whole) == {"one", "two", "three"}
    finally:
        kafka.stop()
    end_groups(kafka.data)
    kafka = KafkaBroker(jars, tmp_path, **SETTINGS)
    try:
        assert set(groups(jars, kafka.address)) == {"three"}
        for group in ("one", "two"):
            assert served(kafka.address, group) == OFFSET_INVALID
            assert refusal(kafka.address, group) == KafkaError.GROUP_ID_NOT_FOUND
    finally:
        kafka.stop()
    assert main(["log", "verify", str(kafka.data)]) == 1
    said = capsys.readouterr().out
    assert said.count("lost group") == 2
    assert main(["log", "repair", str(kafka.data), "--yes"]) == 0
    kafka = KafkaBroker(jars, tmp_path, **SETTINGS)
    try:
        assert groups(jars, kafka.address) == whole
        for group in whole:
            assert served(kafka.address, group) == 3
        deleted = jars.tool("consumer-groups", "--bootstrap-server", kafka.address, "--delete", "--group", "one")
        assert "successful" in deleted
        assert set(groups(jars, kafka.address)) == {"two", "three"}
    finally:
        kafka.stop()
