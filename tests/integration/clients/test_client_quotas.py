# SPDX-License-Identifier: Apache-2.0
"""Client quotas: librdkafka's producer and consumer are slowed; Kafka's kafka-configs and kcoord's show the same."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from typing import cast

import pytest
from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from kcoord import client
from kcoord_protocol.messages import (
    AlterClientQuotasRequest,
    AlterClientQuotasResponse,
    ListGroupsRequest,
    ListGroupsResponse,
)
from tests.integration.wire import ConnectionClosed, WireClient
from tests.support.command_line import CommandLine
from tests.support.kafka_jars import KafkaJars
from tests.support.kcoord_process import KcoordProcess
from tests.support.quotas import alter_quota

RATE = 50_000
"""Bytes per second. The burst is ten times as much."""
VALUE = b"x" * 10_000
RECORDS = 80


def produce(broker: KcoordProcess, topic: str, client_id: str, records: int = RECORDS) -> tuple[float, int]:
    """Produces records. Returns the seconds that this took and the longest throttle time in milliseconds."""
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
    for _ in range(records):
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


@pytest.fixture
def no_quotas_later(broker: KcoordProcess) -> Iterator[None]:
    """Removes what a test that fails leaves behind."""
    yield

    async def remove() -> None:
        async with client.AdminClient(bootstrap_servers=broker.address) as admin:
            left = await admin.describe_client_quotas()
            (await admin.alter_client_quotas({of: dict.fromkeys(values) for of, values in left.items()})).all()

    asyncio.run(remove())


@pytest.mark.usefixtures("no_quotas_later")
def test_clients_above_their_quota_are_slowed(broker: KcoordProcess, name: str) -> None:
    alter_quota(broker.address, {"client-id": "slow"}, producer_byte_rate=RATE, consumer_byte_rate=RATE)
    free_throttle_ms = produce(broker, name, "free")[1]
    slow_seconds, slow_throttle_ms = produce(broker, f"{name}-slow", "slow")
    assert free_throttle_ms == 0
    assert slow_throttle_ms > 0
    # 800 kB at 50 kB/s, after a burst of 500 kB.
    assert slow_seconds > 3
    assert consume(broker, name, "slow") > 3
    alter_quota(broker.address, {"client-id": "slow"}, producer_byte_rate=None, consumer_byte_rate=None)
    assert produce(broker, f"{name}-slow", "slow")[1] == 0


@pytest.mark.usefixtures("no_quotas_later")
def test_a_client_above_its_share_of_time_is_slowed(broker: KcoordProcess, name: str) -> None:
    """A ten-thousandth of a percent are 10 us of CPU time in ten seconds. Each throttle lasts for one second."""
    alter_quota(broker.address, {"client-id": "busy"}, request_percentage=0.0001)
    producer_throttle_ms = produce(broker, name, "busy", 2)[1]
    assert 0 < producer_throttle_ms <= 1000
    alter_quota(broker.address, {"client-id": "busy"}, request_percentage=None)
    assert produce(broker, name, "busy", 2)[1] == 0


@pytest.mark.usefixtures("no_quotas_later")
def test_new_topics_above_the_quota_are_delayed(broker: KcoordProcess, name: str) -> None:
    """librdkafka asks for them in a version that no quota refuses. The first topic leaves a debt of 1.5 s."""
    alter_quota(broker.address, {"client-id": "maker"}, controller_mutation_rate=10.0)
    admin = AdminClient({"bootstrap.servers": broker.address, "client.id": "maker"})
    began = time.monotonic()
    for topic, partitions in ((name, 125), (f"{name}-2", 1)):
        admin.create_topics([NewTopic(topic, partitions, 1)])[topic].result(20)
    assert time.monotonic() - began > 1.4


def test_connections_above_the_rate_of_their_address_are_closed(broker: KcoordProcess) -> None:
    """Ten seconds' worth of connections are served at once. The others hear nothing until they are closed."""
    with WireClient(broker.port) as kept:
        alter_address(kept, "127.0.0.1", 1.0)
        try:
            served = 0
            while is_served(broker.port) and served < 30:
                served += 1
            assert 9 <= served < 30, "the connections before the quota do not count, and time passes"
            assert is_served(broker.port, "127.0.0.2")
        finally:
            alter_address(kept, "127.0.0.1", None)
    assert is_served(broker.port)


def alter_address(wire: WireClient, address: str, rate: float | None) -> None:
    alter = AlterClientQuotasRequest
    change = alter.EntryData(
        entity=[alter.EntityData(entity_type="ip", entity_name=address)],
        ops=[alter.OpData(key="connection_creation_rate", value=rate or 0.0, remove=rate is None)],
    )
    (altered,) = wire.call(alter(entries=[change]), 1, AlterClientQuotasResponse).entries
    assert (altered.error_code, altered.error_message) == (0, None)


def is_served(port: int, own_address: str = "127.0.0.1") -> bool:
    """Returns whether a new connection gets a response, False if the broker closes it."""
    connected = socket.create_connection(("127.0.0.1", port), 10, (own_address, 0))
    with WireClient(port, connected=connected) as wire:
        try:
            return wire.call(ListGroupsRequest(), 5, ListGroupsResponse).error_code == 0
        except (ConnectionClosed, ConnectionError):
            return False


ALTERATIONS = [
    ("--entity-type users --entity-name alice", "config for user alice"),
    ("--user-defaults", "default config for users in the cluster"),
    ("--client app", "config for client app"),
    ("--entity-type clients --entity-default", "default config for clients in the cluster"),
    ("--user alice --client app", "config for client app"),
    (
        "--entity-type users --entity-name alice --entity-type clients --entity-default",
        "config for user alice",
    ),
    ("--user-defaults --client app", "config for client app"),
    ("--client-defaults --user bob", "config for user bob"),
    ("--client-defaults --user-defaults", "default config for clients in the cluster"),
]
"""The options of an entity, and what Kafka's tool prints when it has changed it."""


@pytest.mark.java
@pytest.mark.usefixtures("no_quotas_later")
def test_kcoord_configs_shows_quotas_as_kafkas_tool(broker: KcoordProcess) -> None:
    """Each tool sees the changes of the other. Kafka prints lines and values in no particular order."""
    kcoord = CommandLine(broker.address)

    def kafka(*arguments: str, check: bool = True) -> str:
        return KafkaJars().tool("configs", "--bootstrap-server", broker.address, *arguments, check=check)

    def lines(output: str) -> set[tuple[str, frozenset[str]]]:
        parts = (line.rpartition(" are ") for line in output.splitlines())
        return {(entity, frozenset(values.split(", "))) for entity, _, values in parts}

    values = "producer_byte_rate=12345678,consumer_byte_rate=2048,controller_mutation_rate=0.5,request_percentage=9000"
    for options, title in ALTERATIONS:
        changed = kcoord.succeed("configs", "--alter", "--add-config", values, *options.split()).out
        assert changed == f"Completed updating {title}.\n"
    for options, rate in (("--ip 192.0.2.1", 5), ("--ip-defaults", 7000)):
        kcoord.succeed("configs", "--alter", "--add-config", f"connection_creation_rate={rate}", *options.split())
    ips = lines(kcoord.succeed("configs", "--describe", "--entity-type", "ips").out)
    assert ips == lines(kafka("--describe", "--entity-type", "ips"))
    assert ("Quota configs for the default ip", frozenset({"connection_creation_rate=7000.0"})) in ips
    kafka("--alter", "--ip-defaults", "--delete-config", "connection_creation_rate")
    assert kcoord.succeed("configs", "--describe", "--ip-defaults").out == ""
    kcoord.succeed("configs", "--alter", "--ip", "192.0.2.1", "--delete-config", "connection_creation_rate")
    pair = ["--entity-type", "clients", "--entity-type", "users"]
    for names, count in (([], 5), (["--entity-name", "app"], 2)):
        ours = lines(kcoord.succeed("configs", "--describe", *pair, *names).out)
        assert len(ours) == count
        assert ours == lines(kafka("--describe", *pair, *names))
    users = kcoord.succeed("configs", "--describe", "--entity-type", "users").out
    assert lines(users) == lines(kafka("--describe", "--entity-type", "users"))
    assert users.startswith("Quota configs for the default user-principal are consumer_byte_rate=2048.0, ")
    assert "producer_byte_rate=1.2345678E7" in users
    kafka("--alter", "--client", "app", "--user", "alice", "--delete-config", "producer_byte_rate,consumer_byte_rate")
    described = kcoord.succeed("configs", "--describe", "--user", "alice", "--client", "app", "--json").json
    assert described == [
        {
            "entity": {"users": "alice", "clients": "app"},
            "quotas": {"controller_mutation_rate": 0.5, "request_percentage": 9000.0},
        },
    ]
    failed = kcoord.run("configs", "--alter", *ALTERATIONS[4][0].split(), "--delete-config", "producer_byte_rate")
    assert (failed.code, failed.out) == (1, "")
    assert "Invalid config(s): producer_byte_rate" in failed.err
    for options, _ in ALTERATIONS:
        arguments = ["--describe", *options.split(), "--json"]
        (entity,) = kcoord.succeed("configs", *arguments).json
        keys = ",".join(cast("dict[str, float]", entity["quotas"]))
        kcoord.succeed("configs", "--alter", *options.split(), "--delete-config", keys)
        assert kcoord.succeed("configs", *arguments).json == []


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("--user alice --add-config nope=1", "Only quota and SCRAM credential configs can be added for 'users'"),
        ("--client app --add-config SCRAM-SHA-256=x", "Only quota configs can be added for 'clients'"),
        ("--user alice --client app --delete-config nope", "Only quota configs can be deleted for 'clients'"),
        ("--ip 192.0.2.1 --add-config nope=1", "Only connection quota configs can be added for 'ips'"),
        ("--user-defaults --delete-config SCRAM-SHA-256", "is not allowed with User SCRAM Credentials"),
        (
            "--user alice --add-config producer_byte_rate=1 --delete-config SCRAM-SHA-256",
            "Cannot alter both quota and SCRAM credential configs simultaneously for 'users'",
        ),
        (
            "--user alice --add-config producer_byte_rate=abc",
            "Cannot parse quota configuration value for producer_byte_rate: abc",
        ),
        ("--user alice --add-config producer_byte_rate=0", "Quota producer_byte_rate must be greater than 0"),
    ],
)
def test_changes_that_kcoord_configs_refuses(broker: KcoordProcess, arguments: str, text: str) -> None:
    """The texts are those of Kafka's tool of 4.3.1."""
    refused = CommandLine(broker.address).run("configs", "--alter", *arguments.split())
    assert refused.code == 1
    assert text in refused.err
