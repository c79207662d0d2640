# SPDX-License-Identifier: Apache-2.0
"""The Java KafkaConsumer and Kafka's own command-line tools, version 4.3.1."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest

from tests.integration.clients.conftest import StartBroker
from tests.support.confluent import PolledConsumer, committed, create_topic, produce
from tests.support.kafka_jars import JavaMember, KafkaJars
from tests.support.kcoord_process import KcoordProcess
from tests.support.waiting import wait_until

pytestmark = pytest.mark.java

JVM_SECONDS = 60.0
StartMember = Callable[[str, str, str], JavaMember]


@pytest.fixture(scope="module")
def jars() -> KafkaJars:
    return KafkaJars()


@pytest.fixture
def start_member(jars: KafkaJars) -> Iterator[StartMember]:
    members: list[JavaMember] = []

    def start(address: str, group_id: str, topic: str) -> JavaMember:
        members.append(JavaMember(jars, address, group_id, topic))
        return members[-1]

    yield start
    for member in members:
        member.kill()


def test_java_consumers_rebalance_commit_and_resume(
    start_broker: StartBroker, start_member: StartMember, name: str
) -> None:
    broker = start_broker(group_consumer_session_timeout_ms="20000")
    create_topic(broker.address, name, 4)
    produce(broker.address, name, 4, 10)
    first = start_member(broker.address, name, name)
    wait_until(lambda: first.owned == {0, 1, 2, 3} and first.seen == 40, "the first member reads all", JVM_SECONDS)
    second = start_member(broker.address, name, name)
    wait_until(lambda: len(first.owned) == len(second.owned) == 2, "both members own two partitions", JVM_SECONDS)
    assert not first.owned & second.owned
    produce(broker.address, name, 4, 5)
    wait_until(lambda: first.seen + second.seen == 60, "new records are read once", JVM_SECONDS)
    broker.restart()
    produce(broker.address, name, 4, 5)
    wait_until(lambda: first.seen + second.seen == 80, "records are read after a restart", JVM_SECONDS)
    second.leave()
    wait_until(lambda: first.owned == {0, 1, 2, 3}, "the remaining member takes over", JVM_SECONDS)
    first.leave()
    partitions = [(name, partition) for partition in range(4)]
    assert committed(broker.address, name, partitions) == dict.fromkeys(partitions, 20)
    produce(broker.address, name, 4, 1)
    with PolledConsumer(broker.address, name, [name]) as resumed:
        resumed.wait_for(4)
        assert {offset for _, _, offset in resumed.seen} == {20}


def test_a_java_and_a_librdkafka_consumer_share_a_group(
    broker: KcoordProcess, start_member: StartMember, name: str
) -> None:
    create_topic(broker.address, name, 4)
    java = start_member(broker.address, name, name)
    with PolledConsumer(broker.address, name, [name]) as native:
        wait_until(lambda: len(java.owned) == len(native.assigned) == 2, "each member owns two partitions", JVM_SECONDS)
        assert java.owned.isdisjoint(partition for _, partition in native.assigned)
    java.leave()


def test_topics_tool(broker: KcoordProcess, jars: KafkaJars, name: str) -> None:
    server = ("--bootstrap-server", broker.address)
    jars.tool("topics", *server, "--create", "--topic", name, "--partitions", "3", "--config", "retention.ms=120000")
    described = jars.tool("topics", *server, "--describe", "--topic", name)
    assert "PartitionCount: 3" in described
    assert "retention.ms=120000" in described
    jars.tool("topics", *server, "--alter", "--topic", name, "--partitions", "5")
    assert "PartitionCount: 5" in jars.tool("topics", *server, "--describe", "--topic", name)
    jars.tool("topics", *server, "--delete", "--topic", name)
    assert name not in jars.tool("topics", *server, "--list").split()


def test_consumer_groups_tool(broker: KcoordProcess, jars: KafkaJars, name: str) -> None:
    server = ("--bootstrap-server", broker.address)
    group = (*server, "--group", name)
    create_topic(broker.address, name, 2)
    produce(broker.address, name, 2, 10)
    with PolledConsumer(broker.address, name, [name], commit_each=True) as member:
        member.wait_for(20)
        assert re.search(rf"^{name}\s", jars.tool("consumer-groups", *server, "--list"), re.MULTILINE)
        described = jars.tool("consumer-groups", *group, "--describe")
        rows = [line.split() for line in described.splitlines() if re.match(rf"{name}\s", line)]
        assert sorted(row[1:6] for row in rows) == [[name, "0", "10", "10", "0"], [name, "1", "10", "10", "0"]]
        assert re.search(r"\bStable\b", jars.tool("consumer-groups", *group, "--describe", "--state"))
        members = jars.tool("consumer-groups", *group, "--describe", "--members", "--verbose")
        assert re.search(rf"{name}:0,1", members)
    jars.tool("consumer-groups", *group, "--reset-offsets", "--to-offset", "3", "--all-topics", "--execute")
    assert committed(broker.address, name, [(name, 0), (name, 1)]) == {(name, 0): 3, (name, 1): 3}
    jars.tool("consumer-groups", *group, "--delete-offsets", "--topic", f"{name}:1")
    assert committed(broker.address, name, [(name, 0), (name, 1)]) == {(name, 0): 3, (name, 1): -1001}
    assert "successful" in jars.tool("consumer-groups", *group, "--delete")


def test_configs_tool(broker: KcoordProcess, jars: KafkaJars, name: str) -> None:
    group = ("--bootstrap-server", broker.address, "--entity-type", "groups", "--entity-name", name)
    jars.tool("configs", *group, "--alter", "--add-config", "consumer.session.timeout.ms=50000")
    assert "consumer.session.timeout.ms=50000" in jars.tool("configs", *group, "--describe")
    refused = jars.tool("configs", *group, "--alter", "--add-config", "consumer.session.timeout.ms=1", check=False)
    assert "consumer.session.timeout.ms" in refused and "InvalidConfiguration" in refused
    jars.tool("configs", *group, "--alter", "--delete-config", "consumer.session.timeout.ms")
    assert "consumer.session.timeout.ms=50000" not in jars.tool("configs", *group, "--describe")


def test_console_producer_and_consumer(broker: KcoordProcess, jars: KafkaJars, name: str) -> None:
    server = ("--bootstrap-server", broker.address, "--topic", name)
    create_topic(broker.address, name, 1)
    jars.tool("console-producer", *server, stdin="one\ntwo\nthree\n")
    consumed = jars.tool(
        "console-consumer", *server, "--from-beginning", "--max-messages", "3", "--timeout-ms", "30000",
        "--group", name, "--command-property", "group.protocol=consumer",
    )  # fmt: skip
    assert consumed.split()[:3] == ["one", "two", "three"]


def test_dump_log_reads_the_offsets_topic(start_broker: StartBroker, jars: KafkaJars, name: str) -> None:
    broker = start_broker(offsets_topic_num_partitions="1")
    create_topic(broker.address, name, 1)
    produce(broker.address, name, 1, 5)
    with PolledConsumer(broker.address, name, [name], commit_each=True) as member:
        member.wait_for(5)
    assert broker.stop() == 0
    (segment,) = broker.data.glob("__consumer_offsets-0/*.log")
    dumped = jars.tool("dump-log", "--offsets-decoder", "--deep-iteration", "--files", str(segment))
    assert f'"group":"{name}"' in dumped
    assert '"offset":5' in dumped
    assert "isvalid: true" in dumped and "isvalid: false" not in dumped
    (metadata,) = broker.data.glob("__cluster_metadata-0/*.log")
    assert '"TOPIC_RECORD"' in jars.tool("dump-log", "--cluster-metadata-decoder", "--files", str(metadata))
