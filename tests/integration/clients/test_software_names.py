# SPDX-License-Identifier: Apache-2.0
"""Well-known clients follow Apache Kafka. The broker recognizes their software names and serves them no KIP-1327."""

from __future__ import annotations

from collections.abc import Iterator

import aiokafka
import confluent_kafka
import kafka
import pytest
from confluent_kafka.admin import AdminClient

from kcoord.config import BrokerConfig, Kip1327Form
from kcoord.testing import KcoordBroker, start_broker
from tests.support.confluent import PolledConsumer
from tests.support.kafka_jars import KafkaJars
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def broker() -> Iterator[KcoordBroker]:
    with start_broker() as started:
        started.create_topic("t", 1)
        yield started


def names_given(broker: KcoordBroker) -> set[str]:
    return {request.body["clientSoftwareName"] for request in broker.requests("ApiVersions") if request.version >= 3}


def test_librdkafka_and_its_binding(broker: KcoordBroker) -> None:
    broker.clear_requests()
    AdminClient({"bootstrap.servers": broker.bootstrap_servers}).list_topics(timeout=20)
    plain = {"bootstrap.servers": broker.bootstrap_servers, "client.software.name": "librdkafka"}
    confluent_kafka.Producer(plain).list_topics(timeout=20)
    assert names_given(broker) == {"confluent-kafka-python", "librdkafka"}
    with PolledConsumer(broker.bootstrap_servers, "g", ["t"]) as member:
        wait_until(lambda: len(member.assigned) == 1, "the member owns the partition")
    assert {request.version for request in broker.requests("ConsumerGroupHeartbeat")} <= {0, 1}
    assert_are_served_nothing(names_given(broker))


def test_kafka_python(broker: KcoordBroker) -> None:
    broker.clear_requests()
    client = kafka.KafkaAdminClient(bootstrap_servers=broker.bootstrap_servers)
    assert "t" in client.list_topics()
    client.close()
    assert names_given(broker) == {"kafka-python"}
    assert_are_served_nothing(names_given(broker))


async def test_aiokafka_sends_no_name(broker: KcoordBroker) -> None:
    """It is therefore served as `*`, but it knows and uses only Apache Kafka's versions."""
    broker.clear_requests()
    async with aiokafka.AIOKafkaProducer(bootstrap_servers=broker.bootstrap_servers) as producer:
        await producer.send_and_wait("t", b"x")
    assert names_given(broker) == set()
    assert broker.requests("ApiVersions")
    assert {request.version for request in broker.requests("Metadata")} <= set(range(14))


@pytest.mark.java
def test_kafkas_tools(broker: KcoordBroker) -> None:
    broker.clear_requests()
    assert "t" in KafkaJars().tool("topics", "--bootstrap-server", broker.bootstrap_servers, "--list")
    assert names_given(broker) == {"apache-kafka-java"}
    assert_are_served_nothing(names_given(broker))


def assert_are_served_nothing(names: set[str]) -> None:
    config = BrokerConfig.from_properties({})
    assert {config.kip1327_form(name) for name in names} == {Kip1327Form.OFF}
