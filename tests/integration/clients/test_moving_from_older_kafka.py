# SPDX-License-Identifier: Apache-2.0
"""Applications move from Apache Kafka 3.9.1 to kcoord in front of it, and back."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.integration.clients.moving import confluent_application, java_application, move_and_return
from tests.support.kafka_broker import KafkaBroker
from tests.support.kafka_jars import KafkaJars
from tests.support.kcoord_process import FAST, KcoordProcess

pytestmark = pytest.mark.java


@pytest.fixture(scope="module")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaBroker]:
    broker = KafkaBroker(KafkaJars("3.9.1"), tmp_path_factory.mktemp("kafka"))
    yield broker
    broker.stop()


@pytest.fixture(scope="module")
def gateway(kafka: KafkaBroker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KcoordProcess]:
    settings = {**FAST, "kcoord.upstream.bootstrap.servers": kafka.address, "kcoord.upstream.ports": "0"}
    process = KcoordProcess(tmp_path_factory.mktemp("gateway"), settings).start()
    yield process
    process.stop(signal.SIGKILL)


def test_confluent_kafka(kafka: KafkaBroker, gateway: KcoordProcess) -> None:
    move_and_return(kafka.address, gateway.address, "confluent", confluent_application)


def test_java_consumer(kafka: KafkaBroker, gateway: KcoordProcess) -> None:
    move_and_return(kafka.address, gateway.address, "java", java_application(KafkaJars()))
