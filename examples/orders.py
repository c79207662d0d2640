# SPDX-License-Identifier: Apache-2.0
"""Produces twelve orders, and consumes them with two members of a KIP-848 group.

Usage: `python examples/orders.py [HOST:PORT]`. Run it again, or restart the broker in between: the group continues at
its committed offsets.
"""

from __future__ import annotations

import sys

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

ADDRESS = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:9092"
TOPIC, GROUP, PARTITIONS, ORDERS = "orders", "billing", 4, 12


def create_topic(admin: AdminClient) -> None:
    try:
        admin.create_topics([NewTopic(TOPIC, PARTITIONS, 1)])[TOPIC].result(10)
        print(f"created {TOPIC} with {PARTITIONS} partitions")
    except KafkaException as error:
        if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
            raise


def produce() -> None:
    producer = Producer({"bootstrap.servers": ADDRESS, "enable.idempotence": True})
    for number in range(ORDERS):
        producer.produce(TOPIC, f"order {number}".encode(), partition=number % PARTITIONS)
    producer.flush(10)
    print(f"produced {ORDERS} orders")


def join() -> Consumer:
    config = {
        "bootstrap.servers": ADDRESS,
        "group.id": GROUP,
        "group.protocol": "consumer",
        "auto.offset.reset": "earliest",
        "enable.auto.commit": False,
    }
    consumer = Consumer(config)
    consumer.subscribe([TOPIC])
    return consumer


def share(members: dict[str, Consumer]) -> None:
    """Polls until each member has its share of the partitions."""
    while any(len(member.assignment()) != PARTITIONS // len(members) for member in members.values()):
        for member in members.values():
            member.poll(0.05)
    for name, member in members.items():
        print(f"{name} owns partitions {sorted(partition.partition for partition in member.assignment())}")


def consume(members: dict[str, Consumer]) -> None:
    seen = 0
    while seen < ORDERS:
        for name, member in members.items():
            message = member.poll(0.05)
            if message is not None and not message.error():
                seen += 1
                member.commit(message=message, asynchronous=False)
                text = (message.value() or b"").decode()
                print(f"{name} got {text} from partition {message.partition()} at offset {message.offset()}")


def main() -> None:
    admin = AdminClient({"bootstrap.servers": ADDRESS})
    create_topic(admin)
    members = {"first member": join(), "second member": join()}
    try:
        share(members)
        produce()
        consume(members)
        group = admin.describe_consumer_groups([GROUP])[GROUP].result(10)
        print(f"{GROUP} is {group.state.name}, a {group.type.name} group with assignor {group.partition_assignor}")
    finally:
        for member in members.values():
            member.close()


if __name__ == "__main__":
    main()
