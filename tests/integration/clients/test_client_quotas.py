# SPDX-License-Identifier: Apache-2.0
"""Client quotas: librdkafka's producer and consumer are slowed, and Kafka's kafka-configs sets and shows quotas."""

from __future__ import annotations

import time

import pytest
from confluent_kafka import Consumer, Producer

from tests.support.kafka_jars import KafkaJars
from tests.support.kcoord_process import KcoordProcess
from tests.support.quotas import alter_quota

RATE = 50_000
"""Bytes per second. The burst is ten times as much."""
VALUE = b"x" * 10_000
RECORDS = 80


def produce(broker: KcoordProcess, topic: str, client_id: str) -> tuple[float, int]:
    """Produces RECORDS records. Returns the seconds that this took and the longest throttle time in milliseconds."""
    throttles = [0]
    producer = Producer(
        {
            "bootstrap.servers": broker.address,
            "client.id": client_id,
            "batch.num.messages": 1,
            "throttle_cb": lambda event: throttles.append(int(event.throttle_time * 1000)),
        }
    )
    began = time.monotonic()
    for _ in range(RECORDS):
        producer.produce(topic, VALUE)
    assert producer.flush(60) == 0
    producer.poll(0)
    return time.monotonic() - began, max(throttles)


def consume(broker: KcoordProcess, topic: str, client_id: str) -> float:
    """Reads RECORDS records. Returns the seconds that this took."""
    consumer = Consumer(
        {
            "bootstrap.servers": broker.address,
            "client.id": client_id,
            "group.id": client_id,
            "auto.offset.reset": "earliest",
        }
    )
    consumer.subscribe([topic])
    count, began = 0, time.monotonic()
    while count < RECORDS:
        message = consumer.poll(60)
        assert message is not None
        assert message.error() is None
        count += 1
    consumer.close()
    return time.monotonic() - began


def test_clients_above_their_quota_are_slowed(broker: KcoordProcess, name: str) -> None:
    alter_quota(broker.address, {"client-id": "slow"}, producer_byte_rate=RATE, consumer_byte_rate=RATE)
    free_seconds, free_throttle_ms = produce(broker, name, "free")
    slow_seconds, slow_throttle_ms = produce(broker, f"{name}-slow", "slow")
    assert free_throttle_ms == 0
    assert slow_throttle_ms > 0
    # 800 kB at 50 kB/s, after a burst of 500 kB.
    assert slow_seconds > 3 > free_seconds
    assert consume(broker, name, "slow") > 3
    alter_quota(broker.address, {"client-id": "slow"}, producer_byte_rate=None, consumer_byte_rate=None)
    assert produce(broker, f"{name}-slow", "slow")[1] == 0


@pytest.mark.java
def test_kafkas_tool_sets_and_shows_quotas(broker: KcoordProcess) -> None:
    def configs(*arguments: str, check: bool = True) -> str:
        return KafkaJars().tool("configs", "--bootstrap-server", broker.address, *arguments, check=check)

    entity = ("--entity-type", "users", "--entity-name", "alice", "--entity-type", "clients", "--entity-default")
    configs("--alter", "--add-config", "producer_byte_rate=1024,consumer_byte_rate=2048", *entity)
    shown = configs("--describe", *entity)
    assert "user-principal 'alice', the default client-id are" in shown
    assert "producer_byte_rate=1024.0" in shown
    assert "consumer_byte_rate=2048.0" in shown
    refused = configs("--alter", "--add-config", "request_percentage=10", *entity, check=False)
    assert "This broker does not enforce the quota request_percentage." in refused
    configs("--alter", "--delete-config", "producer_byte_rate,consumer_byte_rate", *entity)
    assert "producer_byte_rate" not in configs("--describe", *entity)
