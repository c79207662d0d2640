# SPDX-License-Identifier: Apache-2.0
"""`kcoord wait`, for kcoord and for Apache Kafka: it returns when what it waits for has come, and not before."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.clients.conftest import StartBroker
from tests.support.command_line import CommandLine
from tests.support.confluent import PolledConsumer, create_topic
from tests.support.kafka_broker import KafkaBroker
from tests.support.kafka_jars import KafkaJars
from tests.support.kcoord_process import KcoordProcess

SHORT = ("--timeout", "600")


@pytest.fixture
def kcoord(broker: KcoordProcess) -> CommandLine:
    return CommandLine(broker.address)


@pytest.fixture(params=["kcoord", pytest.param("kafka", marks=pytest.mark.java)])
def either(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The address of a broker of kcoord or Kafka."""
    if request.param == "kcoord":
        process: KcoordProcess | KafkaBroker = KcoordProcess(tmp_path).start()
    else:
        process = KafkaBroker(KafkaJars(), tmp_path, offsets_topic_num_partitions="2")
    yield process.address
    process.stop()


def start_waiting(address: str, *arguments: str) -> subprocess.Popen[str]:
    """In a process of its own, as in a script."""
    command = [sys.executable, "-m", "kcoord", "wait", *arguments, "--bootstrap-server", address, "--timeout", "60000"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_conditions_come_true(either: str, name: str) -> None:
    kcoord = CommandLine(either)
    assert kcoord.succeed("wait", "--for", "ready", "--group", name).out.startswith("The brokers are ready after ")
    absent = kcoord.run("wait", "--for", "topic", "--topic", name, *SHORT)
    assert (absent.code, absent.err) == (1, f"error: topic '{name}' does not exist, after 600 ms\n")
    topic = start_waiting(either, "--for", "topic", "--topic", name)
    create_topic(either, name, 2)
    assert topic.communicate(timeout=60)[0].startswith(f"Topic '{name}' has leaders for all partitions after ")
    assert topic.returncode == 0
    nobody = kcoord.run("wait", "--for", "group-stable", "--group", name, *SHORT)
    assert (nobody.code, nobody.err) == (1, f"error: group '{name}' does not exist, after 600 ms\n")
    stable = start_waiting(either, "--for", "group-stable", "--group", name, "--members", "2", "--json")
    with PolledConsumer(either, name, [name]):
        kcoord.succeed("wait", "--for", "group-stable", "--group", name)
        one = kcoord.run("wait", "--for", "group-stable", "--group", name, "--members", "2", *SHORT)
        assert one.err == f"error: group '{name}' has 1 of 2 members, after 600 ms\n"
        assert stable.poll() is None, "it waits for the second member"
        with PolledConsumer(either, name, [name]):
            found = json.loads(stable.communicate(timeout=60)[0])
    assert stable.returncode == 0
    assert (found["for"], found["met"], found["reason"]) == ("group-stable", True, None)
    empty = kcoord.run("wait", "--for", "group-stable", "--group", name, *SHORT)
    assert empty.err == f"error: group '{name}' is in state Empty, after 600 ms\n"


def test_a_broker_that_comes_later(start_broker: StartBroker) -> None:
    broker = start_broker()
    assert broker.stop() == 0
    away = CommandLine(broker.address).run("wait", "--for", "ready", *SHORT, "--json")
    assert (away.code, json.loads(away.out)["met"]) == (1, False)
    assert f"no connection to {broker.address}" in away.err
    waiting = start_waiting(broker.address, "--for", "ready")
    broker.spawn()
    assert waiting.wait(60) == 0


def test_what_cannot_come_true_is_not_waited_for(kcoord: CommandLine) -> None:
    refused = kcoord.run("wait", "--for", "topic", "--topic", "not a name", "--timeout", "60000", "--json")
    assert refused.code == 1
    said = json.loads(refused.out)
    assert "INVALID_TOPIC_EXCEPTION" in said["reason"]
    assert said["waited_ms"] < 30_000
