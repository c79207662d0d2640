# SPDX-License-Identifier: Apache-2.0
"""`kcoord topics` and `kcoord configs`: their output is that of Kafka's own tools."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

import pytest

from tests.support.command_line import CommandLine
from tests.support.kafka_jars import KafkaJars
from tests.support.kcoord_process import KcoordProcess

CREATION_TIME = re.compile(r"\tCreationTimeMs: (\S+)$", re.MULTILINE)


@pytest.fixture
def kcoord(broker: KcoordProcess) -> CommandLine:
    return CommandLine(broker.address)


@pytest.mark.java
def test_topics_are_described_as_by_kafka(kcoord: CommandLine, name: str) -> None:
    jars = KafkaJars()
    settings = ["--config", "retention.ms=120000", "--config", "segment.bytes=1048576"]
    kcoord.succeed("topics", "--create", "--topic", name, "--partitions", "3", "--replication-factor", "1", *settings)
    ours = kcoord.succeed("topics", "--describe", "--topic", name).out
    theirs = jars.tool("topics", "--bootstrap-server", kcoord.address, "--describe", "--topic", name)
    assert len(CREATION_TIME.findall(ours)) == 3
    assert CREATION_TIME.sub("", ours).splitlines() == theirs.splitlines()
    kcoord.succeed("topics", "--delete", "--topic", name)


@pytest.mark.java
def test_partitions_with_too_few_replicas_are_described_as_by_kafka(kcoord: CommandLine, name: str) -> None:
    """On a single broker every partition is at its minimum of in-sync replicas, and none is below it."""
    jars = KafkaJars()
    kcoord.succeed("topics", "--create", "--topic", name, "--partitions", "3")
    (topic,) = kcoord.succeed("topics", "--describe", "--topic", name, "--json").json
    by_id = ["--topic-id", str(topic["topic_id"])]
    ours = kcoord.succeed("topics", "--describe", *by_id).out
    # For ids, Kafka's tool uses Metadata, which has no eligible leaders.
    theirs = jars.tool("topics", "--bootstrap-server", kcoord.address, "--describe", *by_id).replace(
        "Elr: N/A", "Elr: "
    )
    assert CREATION_TIME.sub("", ours).splitlines() == theirs.splitlines()
    for options in (
        ["--topic", name, "--at-min-isr-partitions"],
        ["--topic", name, "--under-replicated-partitions"],
        ["--topic", name, "--partition-size-limit-per-response", "1"],
    ):
        ours = kcoord.succeed("topics", "--describe", *options).out
        theirs = jars.tool("topics", "--bootstrap-server", kcoord.address, "--describe", *options)
        assert CREATION_TIME.sub("", ours).splitlines() == theirs.splitlines(), options
    for option in ("--unavailable-partitions", "--under-min-isr-partitions"):
        assert kcoord.succeed("topics", "--describe", "--topic", name, option).out == ""
    assert "does not exist" in kcoord.run("topics", "--describe", "--topic-id", "AAAAAAAAAAAAAAAAAAAAAQ").err
    kcoord.succeed("topics", "--delete", "--topic", name)


@pytest.mark.java
def test_configs_are_described_as_by_kafka(kcoord: CommandLine, name: str) -> None:
    jars = KafkaJars()
    group = ["--entity-type", "groups", "--entity-name", name]
    settings = "consumer.session.timeout.ms=4000,consumer.heartbeat.interval.ms=400"
    assert kcoord.succeed("configs", *group, "--alter", "--add-config", settings).out == (
        f"Completed updating config for group {name}.\n"
    )
    ours = kcoord.succeed("configs", *group, "--describe").out
    theirs = jars.tool("configs", "--bootstrap-server", kcoord.address, *group, "--describe")
    assert ours.splitlines()[0] == theirs.splitlines()[0]
    assert kcoord.succeed("configs", "--group", name, "--describe").out == ours
    assert sorted(ours.splitlines()) == sorted(theirs.splitlines())


@pytest.mark.java
def test_client_metrics_are_described_as_by_kafka(kcoord: CommandLine, name: str) -> None:
    jars = KafkaJars()
    subscription = ["--entity-type", "client-metrics", "--entity-name", name]
    settings = "metrics=[a.,b.],interval.ms=10000,match=[client_software_name=apache-kafka-java]"
    done = f"Completed updating config for client-metric {name}.\n"
    assert kcoord.succeed("configs", *subscription, "--alter", "--add-config", settings).out == done
    kcoord.succeed("configs", "--client-metrics", f"{name}-2", "--alter", "--add-config", "interval.ms=200")
    for options in ([*subscription], [*subscription, "--all"], ["--entity-type", "client-metrics"]):
        ours = kcoord.succeed("configs", *options, "--describe").out
        theirs = jars.tool("configs", "--bootstrap-server", kcoord.address, *options, "--describe")
        assert sorted(ours.splitlines()) == sorted(theirs.splitlines()), options
        assert f"configs for client-metric {name} are:" in ours
    kcoord.succeed("configs", *subscription, "--alter", "--delete-config", "match")
    (described,) = kcoord.succeed("configs", *subscription, "--describe", "--json").json
    assert (described["entity_type"], described["entity_name"]) == ("client-metrics", name)


def test_a_client_metrics_subscription_is_deleted(kcoord: CommandLine, name: str) -> None:
    kcoord.succeed("configs", "--client-metrics", name, "--alter", "--add-config", "interval.ms=200,metrics=a.")
    refused = kcoord.run("configs", "--client-metrics", name, "--alter", "--add-config", "interval.ms=5")
    assert refused.code == 1
    assert "Invalid value 5 for interval.ms" in refused.err
    deleted = kcoord.succeed("configs", "--client-metrics", name, "--delete")
    assert deleted.out == f"Deleted client metrics config for {name}.\n"
    assert name not in kcoord.succeed("configs", "--entity-type", "client-metrics", "--describe").out
    for action in ("--describe", "--delete"):
        absent = kcoord.run("configs", "--client-metrics", name, action)
        assert absent.code == 1
        assert f"The client-metric '{name}' doesn't exist and doesn't have dynamic config." in absent.err


def test_the_creation_times_of_partitions(kcoord: CommandLine, name: str) -> None:
    """Partitions that are added later are younger (KIP-1327)."""
    kcoord.succeed("topics", "--create", "--topic", name, "--partitions", "2")
    kcoord.succeed("topics", "--alter", "--topic", name, "--partitions", "3")
    described = kcoord.succeed("topics", "--describe", "--topic", name).out
    times = [datetime.fromisoformat(text) for text in CREATION_TIME.findall(described)]
    assert times[0] == times[1] <= times[2]
    assert timedelta(0) <= datetime.now(UTC) - times[2] < timedelta(minutes=5)
    (topic,) = kcoord.succeed("topics", "--describe", "--topic", name, "--json").json
    partitions = topic["partitions"]
    assert isinstance(partitions, list)
    assert [partition["creation_time_ms"] for partition in partitions] == [
        round(time.timestamp() * 1000) for time in times
    ]


def test_topics(kcoord: CommandLine, name: str) -> None:
    create = ["--create", "--topic", name, "--partitions", "2"]
    assert kcoord.succeed("topics", *create).out == f"Created topic {name}.\n"
    again = kcoord.run("topics", *create)
    assert again.code == 1
    assert "TOPIC_ALREADY_EXISTS" in again.err
    kcoord.succeed("topics", *create, "--if-not-exists")
    assert kcoord.succeed("topics", "--list", "--topic", f"{name[:-1]}.").out == f"{name}\n"
    shrunk = kcoord.run("topics", "--alter", "--topic", name, "--partitions", "1")
    assert shrunk.code == 1
    assert "INVALID_PARTITIONS" in shrunk.err
    assert kcoord.succeed("topics", "--describe", "--topics-with-overrides", "--topic", name).out == ""
    assert kcoord.succeed("topics", "--delete", "--topic", name, "--json").json == [
        {"topic": name, "error": None, "message": None}
    ]
    for action in (["--delete"], ["--describe"], ["--alter", "--partitions", "4"]):
        assert kcoord.run("topics", *action, "--topic", name).code == 1
        kcoord.succeed("topics", *action, "--topic", name, "--if-exists")


def test_internal_topics(kcoord: CommandLine, name: str) -> None:
    kcoord.succeed("topics", "--create", "--topic", name)
    kcoord.run("consumer-groups", "--reset-offsets", "--group", name, "--topic", name, "--to-earliest", "--execute")
    assert "__consumer_offsets" in kcoord.succeed("topics", "--list").out.split()
    assert "__consumer_offsets" not in kcoord.succeed("topics", "--list", "--exclude-internal").out.split()


def test_configs(kcoord: CommandLine, name: str) -> None:
    kcoord.succeed("topics", "--create", "--topic", name)
    topic = ["--entity-type", "topics", "--entity-name", name]
    kcoord.succeed("configs", *topic, "--alter", "--add-config", "cleanup.policy=[compact,delete],retention.ms=5000")
    described = kcoord.succeed("configs", *topic, "--describe").out.splitlines()
    assert [line.split()[0] for line in described[1:]] == ["cleanup.policy=compact,delete", "retention.ms=5000"]
    kcoord.succeed("configs", *topic, "--alter", "--delete-config", "retention.ms")
    assert "retention.ms" not in kcoord.succeed("configs", *topic, "--describe").out
    assert "  retention.ms=604800000 " in kcoord.succeed("configs", *topic, "--describe", "--all").out
    refused = kcoord.run("configs", *topic, "--alter", "--add-config", "odd=1")
    assert refused.code == 1
    assert "INVALID_CONFIG" in refused.err
    assert kcoord.run("configs", "--entity-type", "topics", "--entity-name", "absent", "--describe").code == 1
    (entity,) = kcoord.succeed("configs", *topic, "--describe", "--json").json
    assert entity["entity_name"] == name
    brokers = kcoord.succeed("configs", "--entity-type", "brokers", "--describe", "--all").out
    assert "All configs for broker 1 are:" in brokers


def test_an_error_of_configs_names_the_resource(kcoord: CommandLine) -> None:
    failed = kcoord.run("configs", "--describe", "--topic", "absent")
    assert failed.code == 1
    assert failed.err.startswith("error: configs for topic absent: UNKNOWN_TOPIC_OR_PARTITION: ")


def test_configs_of_a_broker_that_does_not_exist(kcoord: CommandLine) -> None:
    for action in (["--describe"], ["--alter", "--add-config", "log.cleaner.threads=2"]):
        failed = kcoord.run("configs", "--broker", "9", *action, "--timeout", "5000")
        assert failed.code == 1
        assert failed.err == "kcoord configs: The broker '9' doesn't exist and doesn't have dynamic config.\n"


def test_a_name_that_does_not_fit_in_a_request(kcoord: CommandLine) -> None:
    name = "x" * 40_000
    failed = kcoord.run("topics", "--create", "--topic", name)
    assert failed.code == 1
    reason = "INVALID_REQUEST: CreateTopicsRequest: topics[0].name: 40000 bytes are too many"
    assert failed.err == f"error: {name}: {reason}\n"
