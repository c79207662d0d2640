# SPDX-License-Identifier: Apache-2.0
"""Users of a cluster whose only listeners need a login with SCRAM: from the first user to the removal of a user."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from kcoord.cli import main
from tests.integration.test_workers import metadata, settings
from tests.support.command_line import CommandLine, Output
from tests.support.kafka_jars import KafkaJars
from tests.support.kcoord_process import FAST, KcoordProcess

ADMIN = "SCRAM-SHA-512=[name=admin,password=first-word]"
SCRAM_ONLY = {
    "listeners": "USERS://127.0.0.1:0",
    "listener.security.protocol.map": "USERS:SASL_PLAINTEXT",
    "sasl.enabled.mechanisms": "SCRAM-SHA-256,SCRAM-SHA-512",
}


class ScramBroker(KcoordProcess):
    """A broker, and the logins of its users."""

    def properties(self, user: str, password: str) -> str:
        """Returns the path of a file with the client settings of a user."""
        path = self.data.parent / f"{user}.properties"
        path.write_text(
            "security.protocol=SASL_PLAINTEXT\nsasl.mechanism=SCRAM-SHA-512\n"
            "sasl.jaas.config=org.apache.kafka.common.security.scram.ScramLoginModule required "
            f'username="{user}" password="{password}";\n'
        )
        return str(path)

    def users(self, *arguments: str, stdin: str = "") -> Output:
        """Runs `kcoord users` as the first user."""
        command = ["users", *arguments, "--command-config", self.properties("admin", "first-word")]
        return CommandLine(self.address).succeed(*command, stdin=stdin)

    def admits(self, user: str, password: str, port: int | None = None) -> bool:
        """Returns whether librdkafka can log in."""
        admin = AdminClient(
            {
                "bootstrap.servers": f"127.0.0.1:{port or self.port}",
                "security.protocol": "SASL_PLAINTEXT",
                "sasl.mechanism": "SCRAM-SHA-512",
                "sasl.username": user,
                "sasl.password": password,
                "log_level": 0,
            }
        )
        try:
            admin.list_topics(timeout=2)
        except KafkaException:
            return False
        return True


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[ScramBroker]:
    process = ScramBroker(tmp_path, {**FAST, **SCRAM_ONLY})
    yield process
    process.kill()


def test_the_first_user_creates_and_removes_others(broker: ScramBroker) -> None:
    broker.overrides["kcoord.bootstrap.scram"] = ADMIN
    broker.start()
    assert broker.admits("admin", "first-word")
    assert not broker.admits("admin", "second-word")
    assert not broker.admits("bob", "word")
    broker.users("add", "--user", "bob", "--password-file", "-", stdin="word\n")
    assert broker.admits("bob", "word")
    broker.users("alter", "--user", "bob", "--password-file", "-", "--iterations", "8192", stdin="other\n")
    assert broker.admits("bob", "other")
    assert not broker.admits("bob", "word")
    broker.restart(signal.SIGKILL)
    assert broker.admits("bob", "other")
    broker.users("delete", "--user", "bob")
    assert not broker.admits("bob", "other")
    assert broker.admits("admin", "first-word")
    for secret in ("first-word", "second-word", "other"):
        assert secret not in broker.log


@pytest.mark.java
def test_a_formatted_folder_admits_its_users_and_kafkas_tool(broker: ScramBroker) -> None:
    folder = ["--override", f"log.dirs={broker.data}", "--override", "node.id=1"]
    properties = broker.properties("admin", "first-word")
    assert main(["storage", "format", "--config", properties, "--add-scram", ADMIN, *folder]) == 0
    broker.start()
    server = ["--bootstrap-server", broker.address, "--command-config", properties, "--entity-type", "users"]
    tool = KafkaJars().tool
    tool("configs", *server, "--alter", "--entity-name", "bob", "--add-config", "SCRAM-SHA-512=[password=word]")
    assert broker.admits("bob", "word")
    assert "'bob' are SCRAM-SHA-512=iterations=4096" in tool("configs", *server, "--describe")


def test_a_changed_user_holds_at_every_worker_at_once(tmp_path: Path) -> None:
    process = ScramBroker(tmp_path, {**settings(), **SCRAM_ONLY, "kcoord.bootstrap.scram": ADMIN}).start()
    try:
        process.users("add", "--user", "bob", "--password-file", "-", stdin="word")
        assert all(process.admits("bob", "word", port) for port in process.ports)
        process.users("delete", "--user", "bob")
        assert not any(process.admits("bob", "word", port) for port in process.ports)
    finally:
        process.kill()


def test_a_cluster_without_a_way_in_does_not_start(broker: ScramBroker) -> None:
    with pytest.raises(AssertionError):
        broker.start()
    assert "kcoord: no client can log in: all of listeners=USERS://127.0.0.1:0 need a login with SCRAM" in broker.log
    broker.overrides["listeners"] = "USERS://127.0.0.1:0,LOCAL://127.0.0.1:0"
    broker.overrides["listener.security.protocol.map"] = "USERS:SASL_PLAINTEXT,LOCAL:PLAINTEXT"
    broker.start()


def test_the_listeners_of_all_workers_count(broker: ScramBroker) -> None:
    broker.overrides["group.coordinator.threads"] = "2"
    with pytest.raises(AssertionError):
        broker.start()
    assert "all of listeners=USERS://127.0.0.1:0,USERS://127.0.0.1:0 need a login with SCRAM" in broker.log
    broker.overrides["kcoord.worker.1.listener.security.protocol.map"] = "USERS:PLAINTEXT"
    broker.start()
    assert metadata(broker.ports[1]).error_code == 0
