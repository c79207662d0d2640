# SPDX-License-Identifier: Apache-2.0
"""The commands that read the log or check a broker, over TLS with a certificate of the client."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest

from kcoord.cli import main
from kcoord.testing import allow, start_broker
from kcoord_protocol.errors import Errors
from kcoord_protocol.messages import DeleteGroupsRequest, DeleteGroupsResponse
from tests.integration.clients.test_tls import SecuredBroker
from tests.integration.test_server import commit, committed, create_topic, find_coordinator
from tests.integration.wire import WireClient
from tests.support.certificates import Authority
from tests.support.waiting import wait_until


class Commands:
    """Runs commands with the properties file of a client."""

    def __init__(self, broker: SecuredBroker) -> None:
        self.broker = broker
        self.file = broker.folder / "client.properties"
        self.trust(broker.authority_file)

    def trust(self, authority_file: str) -> None:
        client = self.broker.client_file(self.broker.issue("client"))
        self.file.write_text(
            f"security.protocol=SSL\nssl.truststore.type=PEM\nssl.truststore.location={authority_file}\n"
            f"ssl.keystore.type=PEM\nssl.keystore.location={client}\n"
        )

    def run(self, *arguments: str) -> int:
        return main([*arguments, "--bootstrap-server", self.broker.address, "--command-config", str(self.file)])

    def plain(self) -> WireClient:
        """Returns a connection to the PLAINTEXT listener, by which the tests write and look."""
        return WireClient(self.broker.ports[1])

    def commit(self, offset: int) -> None:
        with self.plain() as client:
            wait_until(lambda: not find_coordinator(client, "g").coordinators[0].error_code, "g has a coordinator")
            wait_until(lambda: commit(client, "g", "t", {0: offset}) == {0: Errors.NONE}, "the offset is committed")


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    broker = SecuredBroker(tmp_path, ssl_client_auth="required")
    broker.start()
    yield Commands(broker)
    broker.kill()


def test_groups_expiry_reads_the_log_over_tls(commands: Commands, capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.run("groups", "expiry", "--json") == 0, "there is no topic __consumer_offsets yet"
    assert json.loads(capsys.readouterr().out) == []
    with commands.plain() as client:
        create_topic(client, "t", 1)
    commands.commit(5)
    assert commands.run("groups", "expiry", "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["group"], row["topic"], row["offset"]) for row in rows] == [("g", "t", 5), ("g", None, None)]
    assert commands.run("groups", "expiry", "--group", "another") == 1
    problem = "group another does not exist, or has no committed offsets"
    assert capsys.readouterr().err == f"kcoord groups expiry: {problem}\n"


def test_groups_restore_over_tls(commands: Commands, capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.run("groups", "restore", "--group", "g", "--to", "1h") == 1
    assert capsys.readouterr().err.startswith("g: 0 offsets were restored as of ")
    with commands.plain() as client:
        create_topic(client, "t", 1)
        commands.commit(5)
        before_ms = str(time.time_ns() // 1_000_000 + 1)
        wait_until(lambda: time.time_ns() // 1_000_000 > int(before_ms), "a millisecond has passed")
        deleted = client.call(DeleteGroupsRequest(groups_names=["g"]), 2, DeleteGroupsResponse)
        assert deleted.results[0].error_code == 0
        assert commands.run("groups", "restore", "--group", "g", "--to", before_ms, "--json") == 0
        (row,) = (json.loads(line) for line in capsys.readouterr().out.splitlines())
        assert (row["topic"], row["then"], row["now"], row["action"]) == ("t", 5, None, "restore")
        assert committed(client, "g") == {0: 5}


def test_health_over_tls(commands: Commands, capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.run("health") == 0
    assert capsys.readouterr().out.startswith(f"{commands.broker.address} serves ")
    # Without the file the connection is plain, which this listener refuses.
    assert main(["health", "--bootstrap-server", commands.broker.address]) == 1
    commands.trust(Authority("Other").write_pem(commands.broker.folder / "other.pem"))
    assert commands.run("health", "--json") == 1
    assert "SSL handshake failed" in json.loads(capsys.readouterr().out)["reason"]


@pytest.mark.parametrize(
    "command",
    [
        "topics --list",
        "groups explain --group g",
        "consumer-groups --describe --group g",
        "groups expiry",
        "wait --for ready",
        "consume t",
        "produce t",
    ],
)
def test_a_certificate_that_is_not_trusted_ends_a_command_at_once(
    commands: Commands, command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    commands.trust(Authority("Other").write_pem(commands.broker.folder / "other.pem"))
    with commands.file.open("a") as file:
        file.write("default.api.timeout.ms=3600000\n")
    monkeypatch.setattr("sys.stdin", StringIO("value\n"))
    assert commands.run(*command.split()) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{commands.broker.address}: SSL handshake failed: the broker's certificate is not accepted: " in line
    assert line.endswith(" (ssl.truststore.location)")


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-512"])
def test_commands_log_in(tmp_path: Path, mechanism: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = "org.apache.kafka.common.security.plain.PlainLoginModule required"
    settings = {
        "listeners": "CLIENTS://127.0.0.1:0",
        "listener.security.protocol.map": "CLIENTS:SASL_PLAINTEXT",
        "sasl.enabled.mechanisms": mechanism,
        "listener.name.clients.plain.sasl.jaas.config": f'{module} user_alice="apple-pie";',
        "kcoord.bootstrap.scram": "SCRAM-SHA-512=[name=alice,password=apple-pie]",
    }
    file = tmp_path / "alice.properties"
    with start_broker(settings) as broker:
        common = ("--bootstrap-server", broker.bootstrap_servers, "--command-config", str(file))
        for password, code in (("apple-pie", 0), ("wrong", 1)):
            file.write_text(
                f"security.protocol=SASL_PLAINTEXT\nsasl.mechanism={mechanism}\n"
                f'sasl.jaas.config={module} username="alice" password="{password}";\n'
            )
            assert main(["health", *common]) == code
            assert main(["groups", "expiry", *common]) == code
            assert main(["groups", "restore", "--group", "g", "--to", "1h", *common]) == 1
            assert capsys.readouterr().err.count("SASL_AUTHENTICATION_FAILED") == 3 * code


def test_health_needs_the_right_to_describe_its_group(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    acls = [allow("alice", "Describe", group="kcoord-health")]
    with start_broker(tls=True, users={"alice": "apple-pie", "bob": "plum-cake"}, acls=acls) as broker:
        for user, code in (("alice", 0), ("bob", 1)):
            file = tmp_path / f"{user}.properties"
            lines = (f"{key}={value}".replace("\n", "\\n") for key, value in broker.client_properties(user).items())
            file.write_text("\n".join(lines))
            options = ("--bootstrap-server", broker.bootstrap_servers, "--command-config", str(file))
            assert main(["health", *options]) == code
        assert "FIND_COORDINATOR: GROUP_AUTHORIZATION_FAILED" in capsys.readouterr().err


def test_health_refuses_a_file_that_it_cannot_use(commands: Commands, capsys: pytest.CaptureFixture[str]) -> None:
    """Health does not fall back to a plain connection."""
    commands.file.write_text("security.protocol=TLS\n")
    assert commands.run("health") == 1
    assert "security.protocol: 'TLS' is not one of PLAINTEXT, SSL" in capsys.readouterr().err
    commands.file.unlink()
    assert commands.run("health") == 1
    assert "No such file" in capsys.readouterr().err
