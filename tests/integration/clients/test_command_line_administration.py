# SPDX-License-Identifier: Apache-2.0
"""Kafka's own tools for features, the quorum, log folders, registrations, users and ACLs, and `kcoord features`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.clients.conftest import StartBroker
from tests.support.command_line import CommandLine
from tests.support.kafka_jars import KafkaJars
from tests.support.kcoord_process import KcoordProcess

pytestmark = pytest.mark.java


def tool(broker: KcoordProcess, name: str, *arguments: str, check: bool = True) -> str:
    return KafkaJars().tool(name, "--bootstrap-server", broker.address, *arguments, check=check)


def test_features_are_described_as_by_kafka(start_broker: StartBroker) -> None:
    broker = start_broker()
    kcoord = CommandLine(broker.address)
    # Kafka's tool has names for the levels of metadata.version.
    ours, theirs = (
        [line for line in text.splitlines() if "metadata.version" not in line]
        for text in (kcoord.succeed("features", "describe").out, tool(broker, "features", "describe"))
    )
    assert ours == theirs
    assert len(ours) == 4
    for arguments in (
        ("downgrade", "--feature", "group.version=0"),
        ("upgrade", "--feature", "group.version=1", "--dry-run"),
        ("upgrade", "--feature", "group.version=2", "--feature", "transaction.version=2"),
        ("disable", "--feature", "transaction.version", "--dry-run"),
        ("upgrade", "--feature", "nope=1", "--dry-run"),
    ):
        printed = kcoord.run("features", *arguments)
        assert printed.out + printed.err == tool(broker, "features", *arguments, check=False)


def test_the_quorum(broker: KcoordProcess) -> None:
    status = tool(broker, "metadata-quorum", "describe", "--status")
    status_fields = {key: value.strip() for key, _, value in (line.partition(":") for line in status.splitlines())}
    assert (status_fields["LeaderId"], status_fields["MaxFollowerLag"], status_fields["CurrentObservers"]) == (
        "1",
        "0",
        "[]",
    )
    assert int(status_fields["HighWatermark"]) > 0
    assert json.loads(status_fields["CurrentVoters"]) == [{"id": 1, "endpoints": [f"PLAINTEXT://{broker.address}"]}]
    replication = tool(broker, "metadata-quorum", "describe", "--replication").splitlines()
    assert [line.split()[0] for line in replication] == ["NodeId", "1"]
    assert "Leader" in replication[1]


def test_replicas_in_their_log_folder(broker: KcoordProcess, tmp_path: Path, name: str) -> None:
    CommandLine(broker.address).succeed("topics", "--create", "--topic", name)
    plan = tmp_path / "plan.json"
    for folder, text in (
        (broker.data, "Successfully started moving log directory to "),
        (tmp_path, "The user-specified log directory is not found in the broker config"),
    ):
        move = {"topic": name, "partition": 0, "replicas": [1], "log_dirs": [str(folder)]}
        plan.write_text(json.dumps({"version": 1, "partitions": [move]}))
        options = ["--execute", "--reassignment-json-file", str(plan), "--timeout", "500"]
        assert text in tool(broker, "reassign", *options, check=False)


def test_acls_without_an_authorizer(broker: KcoordProcess) -> None:
    entry = ["--force", "--allow-principal", "User:a", "--operation", "Read", "--topic", "x"]
    for arguments in (["--list"], ["--add", *entry], ["--remove", *entry]):
        said = tool(broker, "acls", *arguments, check=False)
        assert "SecurityDisabledException: No Authorizer is configured" in said


def test_users_without_credentials_and_quotas(broker: KcoordProcess) -> None:
    for options in (["--entity-type", "users"], ["--entity-type", "users", "--entity-name", "alice"]):
        assert tool(broker, "configs", "--describe", *options) == ""


def test_credentials_of_users(broker: KcoordProcess) -> None:
    """Kafka's tool and kcoord's print the same lines, and each sees the changes of the other."""
    kcoord = CommandLine(broker.address)

    def both(*arguments: str) -> str:
        ours, theirs = kcoord.succeed("configs", *arguments).out, tool(broker, "configs", *arguments)
        assert ours == theirs
        return ours

    user = ["--entity-type", "users", "--entity-name"]
    setting = "SCRAM-SHA-256=[iterations=8192,password=pw]"
    line = "SCRAM credential configs for user-principal '{}' are SCRAM-SHA-256=iterations={}\n"
    assert both("--alter", *user, "kim", "--add-config", setting) == "Completed updating config for user kim.\n"
    assert both("--describe", *user, "kim") == line.format("kim", 8192)
    tool(broker, "configs", "--alter", *user, "lea", "--add-config", "SCRAM-SHA-256=[password=pw]")
    assert both("--describe", "--entity-type", "users") == line.format("kim", 8192) + line.format("lea", 4096)
    for user_name in ("kim", "lea"):
        tool(broker, "configs", "--alter", *user, user_name, "--delete-config", "SCRAM-SHA-256")
    assert both("--describe", "--entity-type", "users") == ""
    for arguments, text in (
        (["--delete-config", "SCRAM-SHA-256"], "Attempt to delete a user credential that does not exist"),
        (["--add-config", f"{setting},SCRAM-SHA-512=[password=pw]"], "cannot be altered twice in the same request"),
        (["--add-config", "SCRAM-SHA-256=[iterations=1,password=pw]"], "Iterations 1 is less than the minimum 4096"),
        (["--add-config", "SCRAM-SHA-256=[password=]"], "Password must not be empty"),
    ):
        refused = kcoord.run("configs", "--alter", *user, "kim", *arguments)
        assert (refused.code, refused.out) == (1, "")
        assert text in refused.err
        assert text in tool(broker, "configs", "--alter", *user, "kim", *arguments, check=False)


def test_the_only_broker_in_service_stays_registered(broker: KcoordProcess) -> None:
    """Kafka unregisters it, and then no partition is served until a restart. Other workers can be unregistered."""
    jars = KafkaJars()

    def unregister(broker_id: str) -> str:
        options = ["unregister", "--bootstrap-server", broker.address, "--id", broker_id]
        return jars.tool("cluster", *options, check=False)

    assert "BrokerIdNotRegisteredException: Broker ID 99 is not currently registered" in unregister("99")
    assert "InvalidRequestException: Broker ID 1 is the only broker in service" in unregister("1")
    assert "1          127.0.0.1" in jars.tool("cluster", "list-endpoints", "--bootstrap-server", broker.address)
