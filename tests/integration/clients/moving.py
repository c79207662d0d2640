# SPDX-License-Identifier: Apache-2.0
"""An application that moves from a cluster to kcoord in front of it, and back, by changing its bootstrap address."""

from __future__ import annotations

from collections.abc import Callable

from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from tests.support.command_line import CommandLine
from tests.support.kafka_jars import KafkaJars
from tests.support.waiting import wait_until

PARTITIONS = 3
STEP = 20
"""The number of records that the application consumes in each place."""
CONSUME_SECONDS = 30.0

Application = Callable[[str, str], list[int]]
"""Consumes STEP records of the topic with the name of its group, from an address. Returns their values."""


def java_application(jars: KafkaJars, *options: str) -> Application:
    """Returns Kafka's console consumer."""

    def run(address: str, group: str) -> list[int]:
        output = jars.tool(
            "console-consumer",
            *("--bootstrap-server", address, "--topic", group, "--group", group, "--from-beginning"),
            *("--max-messages", str(STEP), "--timeout-ms", "30000", *options),
        )
        return [int(line) for line in output.splitlines() if line.isdigit()]

    return run


def confluent_application(address: str, group: str) -> list[int]:
    """Consumes with confluent-kafka, commits each record, and leaves."""
    consumer = Consumer(
        {
            "bootstrap.servers": address,
            "group.id": group,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "topic.metadata.refresh.interval.ms": 500,
        }
    )
    consumer.subscribe([group])
    values: list[int] = []

    def has_all() -> bool:
        message = consumer.poll(0.2)
        if message is not None and not message.error():
            values.append(int(message.value() or b""))
            consumer.commit(message=message, asynchronous=False)
        return len(values) == STEP

    wait_until(has_all, f"{STEP} records of {group} from {address}", CONSUME_SECONDS)
    consumer.close()
    return values


def move_and_return(
    upstream: str, gateway: str, group: str, application: Application, moved: Application | None = None
) -> None:
    """Consumes in the upstream, then at kcoord, then in the upstream. No record is missed or consumed twice.

    `moved` is the application at kcoord, if that is another one.
    """
    admin = AdminClient({"bootstrap.servers": upstream})
    admin.create_topics([NewTopic(group, PARTITIONS, 1)])[group].result(20)
    producer = Producer({"bootstrap.servers": upstream})
    for number in range(3 * STEP):
        producer.produce(group, str(number).encode(), partition=number % PARTITIONS)
    assert producer.flush(20) == 0
    values = application(upstream, group)
    values += (moved or application)(gateway, group)
    command = CommandLine(gateway)
    assert command.run("upstream", "verify", "--group", group).code == 1
    command.succeed("upstream", "export", "--group", group)
    command.succeed("upstream", "verify", "--group", group)
    values += application(upstream, group)
    assert sorted(values) == list(range(3 * STEP))
