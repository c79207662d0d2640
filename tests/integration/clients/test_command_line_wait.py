# SPDX-License-Identifier: Apache-2.0
"""`kcoord wait`, for kcoord and for Apache Kafka: it returns when its condition is met, and not before."""

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
    """The address of a broker of kcoord, and of a broker of Kafka."""
    if request.param == "kcoord":
        process: KcoordProcess | KafkaBroker = KcoordProcess(tmp_path).start()
    else:
        process = KafkaBroker(KafkaJars(), tmp_path, offsets_topic_num_partitions="2")
    yield process.address
    process.stop()


def start_waiting(address: str, *arguments: str) -> subprocess.Popen[str]:
    """Starts `kcoord wait` in another process, as in a script."""
    command = [sys.executable, "-m", "kcoord", "wait", *arguments, "--bootstrap-server", address, "--timeout", "60000"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_conditions_are_met(either: str, name: str) -> None:
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
        incomplete = kcoord.run("wait", "--for", "group-stable", "--group", name, "--members", "2", *SHORT)
        assert incomplete.err == f"error: group '{name}' has 1 of 2 members, after 600 ms\n"
        assert stable.poll() is None, "it waits for the second member"
        with PolledConsumer(either, name, [name]):
            result = json.loads(stable.communicate(timeout=60)[0])
    assert stable.returncode == 0
    assert (result["for"], result["met"], result["reason"]) == ("group-stable", True, None)
    empty = kcoord.run("wait", "--for", "group-stable", "--group", name, *SHORT)
    assert empty.err == f"error: group '{name}' is in state Empty, after 600 ms\n"


def test_a_broker_that_starts_later(start_broker: StartBroker) -> None:
    broker = start_broker()
    assert broker.stop() == 0
    away = CommandLine(broker.address).run("wait", "--for", "ready", *SHORT, "--json")
    assert (away.code, json.loads(away.out)["met"]) == (1, False)
    assert f"no connection to {broker.address}" in away.err
    waiting = start_waiting(broker.address, "--for", "ready")
    broker.spawn()
    assert waiting.wait(60) == 0


def test_a_condition_that_cannot_be_met_fails_at_once(kcoord: CommandLine) -> None:
    refused = kcoord.run("wait", "--for", "topic", "--topic", "not a name", "--timeout", "60000", "--json")
    assert refused.code == 1
    result = json.loads(refused.out)
    assert "INVALID_TOPIC_EXCEPTION" in result["reason"]
    assert result["waited_ms"] < 30_000
