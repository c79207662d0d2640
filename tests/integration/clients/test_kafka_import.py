# SPDX-License-Identifier: Apache-2.0
"""`kcoord log import` of the folders of real Kafka brokers: what is served then is what Kafka served."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from kcoord.cli import main
from tests.support.confluent import PolledConsumer, produce
from tests.support.kafka_broker import KafkaBroker
from tests.support.kafka_jars import KafkaJars
from tests.support.kcoord_process import FAST, KcoordProcess
from tests.support.migration import descriptions, read_committed, use_everything, use_other_groups

pytestmark = pytest.mark.java


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
    )
    yield broker
    broker.stop()


def test_groups_offsets_topics_and_data_are_served_as_kafka_served_them(
    kafka: KafkaBroker, jars: KafkaJars, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pending = use_everything(kafka.address)
    use_other_groups(jars, kafka.address)
    before = descriptions(jars, kafka.address)
    kafka.stop()
    assert main(["log", "verify", str(kafka.data)]) == 0
    # A static member that is away still belongs to its group.
    broker = KcoordProcess(tmp_path, {**FAST, "node.id": "1", "group.consumer.session.timeout.ms": "45000"})
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
        # The second transaction was aborted by its producer, the third by the import.
        assert read_committed(broker.address, "out", 1) == [b"first:7"]
        produce(broker.address, "orders", 3, 1)
        with PolledConsumer(broker.address, "readers", ["orders"]) as resumed:
            resumed.wait_for(3)
            assert sorted(resumed.seen) == [("orders", number, 20) for number in range(3)]
    finally:
        pending.purge()
        broker.stop()
