# SPDX-License-Identifier: Apache-2.0
"""`kcoord log import` of the folders of real Kafka brokers: kcoord then serves the same data as Kafka."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kcoord.cli import main
from kcoord_protocol.messages import (
    ConsumerGroupDescribeRequest,
    ConsumerGroupDescribeResponse,
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
)
from tests.integration.wire import WireClient
from tests.support.confluent import PolledConsumer, produce
from tests.support.kafka_broker import KafkaBroker
from tests.support.kafka_jars import KafkaJars
from tests.support.kcoord_process import FAST, KcoordProcess
from tests.support.migration import descriptions, read_committed, use_everything, use_other_groups
from tests.support.shared import ROOT

pytestmark = pytest.mark.java


def group_epochs(port: int, group_id: str) -> tuple[int, int]:
    """Returns the group epoch and the epoch of the target assignment."""
    with WireClient(port) as wire:
        request = ConsumerGroupDescribeRequest(group_ids=[group_id])
        (group,) = wire.call(request, 0, ConsumerGroupDescribeResponse).groups
    assert (group.error_code, len(group.members)) == (0, 1)
    return group.group_epoch, group.assignment_epoch


def rejoin(port: int, group_id: str, instance_id: str) -> int:
    """Joins a static member again with another member id; returns its member epoch."""
    request = ConsumerGroupHeartbeatRequest(
        group_id=group_id,
        member_id="returned",
        instance_id=instance_id,
        rebalance_timeout_ms=60_000,
        subscribed_topic_names=["orders"],
        topic_partitions=[],
    )
    with WireClient(port) as wire:
        response = wire.call(request, 1, ConsumerGroupHeartbeatResponse)
    assert response.error_code == 0, response
    assert response.assignment is not None
    assert [topic.partitions for topic in response.assignment.topic_partitions] == [[0, 1, 2]]
    return response.member_epoch


@pytest.fixture(scope="module")
def jars() -> KafkaJars:
    return KafkaJars()


@pytest.fixture(scope="module", params=["4.3.1", "4.4.0"])
def kafka(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaBroker]:
    folder = tmp_path_factory.mktemp("kafka")
    broker = KafkaBroker(
        KafkaJars(request.param),
        folder,
        offsets_topic_num_partitions="5",
        transaction_state_log_num_partitions="2",
        share_coordinator_state_topic_num_partitions="2",
        group_min_session_timeout_ms="1000",
        broker_rack="rack-1",
    )
    yield broker
    broker.stop()


def test_recorded_topic_hashes_are_those_of_kafkas_class(jars: KafkaJars) -> None:
    source = ROOT / "tests" / "integration" / "clients" / "java" / "TopicHashes.java"
    recorded = ROOT / "tests" / "unit" / "group" / "kafka_topic_hashes.json"
    printed = subprocess.run(jars.program(source), capture_output=True, check=True, timeout=60).stdout
    assert json.loads(printed) == json.loads(recorded.read_bytes())


def test_groups_offsets_topics_and_data_are_served_as_kafka_served_them(
    kafka: KafkaBroker, jars: KafkaJars, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pending = use_everything(kafka.address)
    use_other_groups(jars, kafka.address)
    before = descriptions(jars, kafka.address)
    epochs = group_epochs(kafka.port, "static-readers")
    kafka.stop()
    assert main(["log", "verify", str(kafka.data)]) == 0
    # A static member that is not connected is still a member of its group.
    settings = {"node.id": "1", "broker.rack": "rack-1", "group.consumer.session.timeout.ms": "45000"}
    broker = KcoordProcess(tmp_path, {**FAST, **settings})
    partitions = broker.overrides["offsets.topic.num.partitions"]
    command = ["log", "import", str(kafka.data), "--into", str(broker.data), "--override", "node.id=1"]
    assert main([*command, "--override", f"offsets.topic.num.partitions={partitions}"]) == 0
    assert main(["log", "verify", str(broker.data)]) == 0
    said = capsys.readouterr().out
    assert re.search(r"transactional offsets left out: never decided +1", said)
    assert re.search(r"open transactions in topics ended +1", said)
    assert re.search(r"kept, but not served: share group records +[1-9]", said)
    assert re.search(r"kept, but not served: streams group records +[1-9]", said)
    assert re.search(r"left out: internal topic __share_group_state +1", said)
    broker.start()
    try:
        after = descriptions(jars, broker.address)
        for what, lines in before.items():
            assert after[what] == lines, what
        # The hash of the topics, racks included, is Kafka's, so the group needs no new epoch.
        assert rejoin(broker.port, "static-readers", "one") == epochs[0]
        assert group_epochs(broker.port, "static-readers") == epochs
        # The producer aborted the second transaction. The import aborted the third one.
        assert read_committed(broker.address, "out", 1) == [b"first:7"]
        produce(broker.address, "orders", 3, 1)
        with PolledConsumer(broker.address, "readers", ["orders"]) as resumed:
            resumed.wait_for(3)
            assert sorted(resumed.seen) == [("orders", number, 20) for number in range(3)]
    finally:
        pending.purge()
        broker.stop()
