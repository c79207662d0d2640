# SPDX-License-Identifier: Apache-2.0
"""Clients notice nothing of instances that are killed: in front of Apache Kafka without KIP-848, and of kcoord."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.clients_before_kafka.clients import all_clients, some_clients
from tests.clients_before_kafka.stage import Size, run
from tests.exactly_once.instances import QUICK, KcoordUpstream
from tests.support.kafka_broker import KafkaBroker
from tests.support.kafka_jars import VERSION, KafkaJars

pytestmark = pytest.mark.java

# Instances are replaced soon. Members keep their sessions, also on a busy machine.
PATIENT = {**QUICK, "group.consumer.session.timeout.ms": "45000"}
SHORT = Size(2, PATIENT, kills=1, pause_seconds=0, away_seconds=3, per_second=100)
# The defaults of kcoord and of the clients: the session of an instance is 10 s.
LONG = Size(int(os.environ.get("INSTANCES", "3")), {}, kills=12, pause_seconds=20, away_seconds=13, per_second=30)
IS_LONG = os.environ.get("CLIENTS") == "long"


def test_some_clients_before_kcoord(tmp_path: Path) -> None:
    upstream = KcoordUpstream(tmp_path / "upstream")
    try:
        run(tmp_path, upstream.address, [1], some_clients(), SHORT)
    finally:
        upstream.kill()


if IS_LONG:
    TOOL_CALLS = (
        ("consumer-groups", "--list"),
        ("consumer-groups", "--describe", "--all-groups"),
        ("consumer-groups", "--describe", "--group", "java-classic", "--members"),
        ("topics", "--describe"),
        ("configs", "--describe", "--entity-type", "groups", "--entity-name", "java-consumer"),
        ("consumer-groups", "--describe", "--group", "java-consumer", "--state"),
    )
    """Calls of Kafka's tools. Each has to succeed while an instance is missing, and to name a group or topic."""

    @pytest.mark.parametrize("version", [VERSION, "3.9.1"])
    def test_all_clients_before_kafka(tmp_path: Path, version: str) -> None:
        jars = KafkaJars()
        calls = iter(TOOL_CALLS)

        def administer(address: str) -> None:
            name, *arguments = next(calls)
            assert "java-" in jars.tool(name, "--bootstrap-server", address, *arguments)

        kafka = KafkaBroker(KafkaJars(version), tmp_path / "kafka")
        try:
            if version == VERSION:
                downgrade = ("downgrade", "--feature", "group.version=0")
                jars.tool("features", "--bootstrap-server", kafka.address, *downgrade)
            run(tmp_path, kafka.address, [1], all_clients(jars, tmp_path), LONG, administer)
        finally:
            kafka.stop()
