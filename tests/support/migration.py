# SPDX-License-Identifier: Apache-2.0
"""Helpers for tests that move data from and to Kafka: they fill a broker before, and describe it afterwards."""

from __future__ import annotations

import re
import socket
import struct

from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._scram import (
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialAlteration,
    UserScramCredentialUpsertion,
)
from confluent_kafka.cimpl import NewTopic

from tests.support.confluent import PolledConsumer, produce
from tests.support.kafka_jars import KafkaJars

QUIET = {"log_level": 0}


def transaction(address: str, transactional_id: str, offset: int, end: str) -> Producer:
    """Writes to `out` and commits `offset` of orders-0 for the group `in-transactions`, in one transaction.

    `end` is `commit`, `abort`, or any other text for an open transaction.
    """
    producer = Producer({"bootstrap.servers": address, "transactional.id": transactional_id, **QUIET})
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce("out", f"{transactional_id}:{offset}".encode())
    consumer = Consumer({"bootstrap.servers": address, "group.id": "in-transactions", **QUIET})
    metadata = consumer.consumer_group_metadata()
    producer.send_offsets_to_transaction([TopicPartition("orders", 0, offset)], metadata, 30)
    consumer.close()
    # An abort would drop records that are not sent yet.
    producer.flush(30)
    if end == "commit":
        producer.commit_transaction(30)
    elif end == "abort":
        producer.abort_transaction(30)
    return producer


def use_everything(address: str) -> Producer:
    """Creates topics, a user, groups of each kind, and transactions of each outcome.

    Returns the producer of the open transaction.
    """
    admin = AdminClient({"bootstrap.servers": address, **QUIET})
    topics = [NewTopic("orders", 3, 1, config={"retention.ms": "3600000"}), NewTopic("out", 1, 1)]
    for future in admin.create_topics(topics).values():
        future.result(20)
    produce(address, "orders", 3, 20)
    with PolledConsumer(address, "readers", ["orders"], commit_each=True) as member:
        member.wait_for(60)
    with PolledConsumer(address, "static-readers", ["orders"], commit_each=True, instance_id="one") as member:
        member.wait_for(60)
    with PolledConsumer(address, "classic-readers", ["orders"], commit_each=True, classic="range") as member:
        member.wait_for(60)
    simple = Consumer({"bootstrap.servers": address, "group.id": "simple", "enable.auto.commit": False, **QUIET})
    simple.commit(offsets=[TopicPartition("orders", 1, 5, metadata="nötig")], asynchronous=False)
    simple.close()
    info = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 8192)
    users: list[UserScramCredentialAlteration] = [UserScramCredentialUpsertion("alice", info, b"password")]
    for altered in admin.alter_user_scram_credentials(users).values():
        altered.result(20)
    transaction(address, "first", 7, "commit")
    transaction(address, "second", 9, "abort")
    return transaction(address, "third", 11, "nothing")


def use_other_groups(jars: KafkaJars, address: str) -> None:
    """Creates a share group that reads five messages of `orders`, and a streams group with a member."""
    server = ("--bootstrap-server", address)
    earliest = ["--add-config", "share.auto.offset.reset=earliest"]
    jars.tool("configs", *server, "--alter", "--entity-type", "groups", "--entity-name", "sharers", *earliest)
    limits = ["--max-messages", "5", "--timeout-ms", "30000"]
    text = jars.tool("console-share-consumer", *server, "--topic", "orders", "--group", "sharers", *limits)
    assert "Processed a total of 5 messages" in text, text
    join_streams_group(address, "streamers", "orders")


def join_streams_group(address: str, group_id: str, topic: str) -> None:
    """Sends StreamsGroupHeartbeat v0 of a new member, with a topology of one subtopology that reads `topic`."""
    subtopology = _compact("0") + b"\x02" + _compact(topic) + b"\x01\x01\x01\x01\x01" + b"\x00"
    topology = struct.pack(">i", 0) + b"\x02" + subtopology + b"\x00"
    # Member epoch 0 and endpoint epoch 0, no instance, no rack; then the rebalance timeout.
    body = _compact(group_id) + _compact("streams-member-1234567") + struct.pack(">ii", 0, 0) + b"\x00\x00"
    body += struct.pack(">i", 60_000) + b"\x01" + topology
    # No tasks, a process id, no endpoint, no tags, no offsets, no shutdown, no tagged fields.
    body += b"\x01\x01\x01" + _compact("process") + b"\xff" + b"\x01\x00\x00" + b"\x00" + b"\x00"
    header = struct.pack(">hhihc", 88, 0, 1, 1, b"t") + b"\x00"
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), 20) as connection:
        connection.sendall(struct.pack(">i", len(header) + len(body)) + header + body)
        answer = connection.recv(4096)
    # Size, correlation id, tagged fields and throttle time come before the error code.
    assert answer[13:15] == b"\x00\x00", answer


def _compact(text: str) -> bytes:
    data = text.encode()
    return bytes([len(data) + 1]) + data


def descriptions(jars: KafkaJars, address: str) -> dict[str, list[str]]:
    """Returns the output of Kafka's tools, without the parts that differ between two brokers."""
    server = ("--bootstrap-server", address)
    groups = jars.tool("consumer-groups", *server, "--describe", "--all-groups")
    states = jars.tool("consumer-groups", *server, "--describe", "--all-groups", "--state")
    topics = jars.tool("topics", *server, "--describe", "--exclude-internal")
    users = jars.tool("configs", *server, "--describe", "--entity-type", "users")
    assert "'alice' are SCRAM-SHA-512=iterations=8192" in users
    return {
        "users": users.splitlines(),
        "offsets": sorted(line for line in groups.splitlines() if " orders " in line),
        "states": sorted(
            re.sub(r"127.0.0.1:\d+ +\(1\)", "", line) for line in states.splitlines() if "127.0.0.1" in line
        ),
        "topics": sorted(re.sub(r",?min.insync.replicas=1", "", line) for line in topics.splitlines()),
    }


def read_committed(address: str, topic: str, count: int) -> list[bytes]:
    consumer = Consumer({"bootstrap.servers": address, "group.id": "looks-on", "isolation.level": "read_committed"})
    consumer.assign([TopicPartition(topic, 0, 0)])
    values = []
    for message in consumer.consume(count + 1, 5):
        assert message.error() is None
        value = message.value()
        assert value is not None
        values.append(value)
    consumer.close()
    return values
