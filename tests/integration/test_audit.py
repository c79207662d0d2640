# SPDX-License-Identifier: Apache-2.0
"""The audit log of a broker process: librdkafka's administrators, workers, and `kill -9`."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import ConsumerGroupTopicPartitions, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._acl import AclBinding, AclOperation, AclPermissionType
from confluent_kafka.admin._config import AlterConfigOpType, ConfigEntry, ConfigResource
from confluent_kafka.admin._resource import ResourcePatternType, ResourceType
from confluent_kafka.cimpl import NewTopic

from kcoord.cli import main
from kcoord_protocol.messages import DeleteGroupsRequest, DeleteGroupsResponse
from tests.integration.conftest import MakeServer
from tests.integration.test_metrics import scrape
from tests.integration.wire import ConnectionClosed, WireClient
from tests.support.authorizing_process import authorizing_process
from tests.support.waiting import wait_until

Entry = dict[str, Any]
JAAS = "org.apache.kafka.common.security.plain.PlainLoginModule required"


def entries_of(path: Path) -> list[Entry]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class Audited:
    """A broker with an audit log and the listeners ADMIN, ALICE and LOGIN."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "audit.log"
        self.process = authorizing_process(folder, kcoord_audit_log=str(self.path))
        self.process.overrides |= {
            "kcoord.metrics.port": "0",
            "listeners": "ADMIN://127.0.0.1:0,ALICE://127.0.0.1:0,LOGIN://127.0.0.1:0",
            "listener.security.protocol.map": "ADMIN:PLAINTEXT,ALICE:PLAINTEXT,LOGIN:SASL_PLAINTEXT",
            "kcoord.listener.principals": "ADMIN=User:admin,ALICE=User:alice",
            "super.users": "User:admin",
            "sasl.enabled.mechanisms": "PLAIN",
            "listener.name.login.plain.sasl.jaas.config": f'{JAAS} user_bob="plum-cake";',
        }
        self._seen = 0

    def admin(self, listener: int, **settings: str) -> AdminClient:
        properties: dict[str, str | int | float | bool] = {
            "bootstrap.servers": f"127.0.0.1:{self.process.ports[listener]}",
            "client.id": "tool",
            "log_level": 0,
        }
        return AdminClient(properties | {name.replace("_", "."): value for name, value in settings.items()})

    def wait_for(self, is_wanted: Callable[[Entry], bool]) -> Entry:
        """Returns the first new entry that is wanted, and forgets it and those before it."""
        entry: list[Entry] = []

        def is_there() -> bool:
            entry[:] = [entry for entry in entries_of(self.path)[self._seen :] if is_wanted(entry)]
            return bool(entry)

        wait_until(is_there, "the audit log has the entry")
        self._seen = entries_of(self.path).index(entry[0], self._seen) + 1
        return entry[0]

    def request(self, name: str) -> Entry:
        return self.wait_for(lambda entry: entry.get("request") == name)


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Audited]:
    audited = Audited(tmp_path_factory.mktemp("audit"))
    try:
        audited.process.start()
        yield audited
    finally:
        audited.process.kill()


def results(futures: dict[Any, Future[Any]]) -> list[Any]:
    return [future.result(10) for future in futures.values()]


def error_of(futures: dict[Any, Future[Any]]) -> str:
    with pytest.raises(KafkaException) as caught:
        results(futures)
    name: str = caught.value.args[0].name()
    return name


def reset(admin: AdminClient) -> None:
    offsets = ConsumerGroupTopicPartitions("g", [TopicPartition("orders", 0, 5)])
    results(admin.alter_consumer_group_offsets([offsets]))


def allow(admin: AdminClient, operation: AclOperation) -> None:
    acl = AclBinding(
        *(ResourceType.GROUP, "g", ResourcePatternType.LITERAL, "User:alice", "*"),
        *(operation, AclPermissionType.ALLOW),
    )
    results(admin.create_acls([acl]))


def test_what_administrators_do_is_in_the_log(audited: Audited) -> None:
    admin, alice = audited.admin(0), audited.admin(1)
    results(admin.create_topics([NewTopic("orders", 1, config={"retention.ms": "1"})]))
    entry = audited.request("CreateTopics")
    assert entry["time"].endswith("Z")
    assert {name: entry[name] for name in ("event", "allowed", "principal", "host", "clientId", "listener")} == {
        "event": "change",
        "allowed": True,
        "principal": "User:admin",
        "host": "127.0.0.1",
        "clientId": "tool",
        "listener": "ADMIN",
    }
    assert entry["decisions"][0]["rule"] == "SuperUser"
    assert entry["fields"]["topics"][0]["configs"] == [{"name": "retention.ms"}]
    assert entry["errors"] == []

    resource = ConfigResource(ConfigResource.Type.TOPIC, "orders")
    resource.add_incremental_config(ConfigEntry("segment.ms", "-7", incremental_operation=AlterConfigOpType.SET))
    assert error_of(admin.incremental_alter_configs([resource])) == "INVALID_CONFIG"
    entry = audited.request("IncrementalAlterConfigs")
    assert entry["errors"] == [{"resourceName": "orders", "error": "INVALID_CONFIG"}]

    # librdkafka resets offsets as a consumer without a generation. The fast path must not hide the second commit.
    for _ in range(2):
        reset(admin)
        entry = audited.request("OffsetCommit")
        assert (entry["event"], entry["fields"]["groupId"]) == ("commit", "g")
        (partition,) = entry["fields"]["topics"][0]["partitions"]
        assert partition["committedOffset"] == 5

    # Without a right to the group its coordinator is not found.
    assert error_of(alice.delete_consumer_groups(["g"])) == "GROUP_AUTHORIZATION_FAILED"
    entry = audited.request("FindCoordinator")
    assert (entry["event"], entry["principal"], entry["allowed"]) == ("denied", "User:alice", False)
    assert "fields" not in entry and "errors" not in entry
    allow(admin, AclOperation.DESCRIBE)
    audited.request("CreateAcls")
    assert error_of(alice.delete_consumer_groups(["g"])) == "GROUP_AUTHORIZATION_FAILED"
    entry = audited.request("DeleteGroups")
    assert (entry["event"], entry["principal"], entry["allowed"]) == ("change", "User:alice", False)
    assert entry["errors"] == [{"groupId": "g", "error": "GROUP_AUTHORIZATION_FAILED"}]
    assert entry["decisions"] == [
        {"operation": "DELETE", "resourceType": "GROUP", "resource": "g", "allowed": False, "rule": "DefaultDeny"}
    ]

    allow(admin, AclOperation.DELETE)
    entry = audited.request("CreateAcls")
    (creation,) = entry["fields"]["creations"]
    assert (creation["principal"], creation["operation"], creation["resourceName"]) == ("User:alice", "DELETE", "g")
    results(alice.delete_consumer_groups(["g"]))
    entry = audited.request("DeleteGroups")
    assert (entry["principal"], entry["allowed"], entry["errors"]) == ("User:alice", True, [])
    assert entry["decisions"][0]["rule"].startswith("MatchingAcl(acl=StandardAcl[resourceType=GROUP, resourceName=g,")

    page = scrape(audited.process)
    authorizer = ("StandardAuthorizer", "authorizer.class.name", "broker")
    assert page["kafka_server_plugins_acls_total_count", authorizer] == 2
    assert page["kafka_server_plugins_authorization_denied_rate_per_minute", authorizer] > 0
    assert page["kafka_server_plugins_authorization_request_rate_per_minute", authorizer] == pytest.approx(
        page["kafka_server_plugins_authorization_denied_rate_per_minute", authorizer]
        + page["kafka_server_plugins_authorization_allowed_rate_per_minute", authorizer]
    )
    assert page["kcoord_audit_entries_total", ()] >= 9
    assert page["kcoord_audit_lost_entries_total", ()] == 0


def test_logins_are_in_the_log(audited: Audited) -> None:
    login = {"security_protocol": "SASL_PLAINTEXT", "sasl_mechanism": "PLAIN", "sasl_username": "bob"}
    audited.admin(2, sasl_password="plum-cake", **login).list_topics(timeout=10)
    entry = audited.wait_for(lambda entry: entry["event"] == "login")
    assert {name: entry[name] for name in ("allowed", "principal", "host", "listener", "mechanism")} == {
        "allowed": True,
        "principal": "User:bob",
        "host": "127.0.0.1",
        "listener": "LOGIN",
        "mechanism": "PLAIN",
    }
    guessing = audited.admin(2, sasl_password="guessed-it", **login)
    entry = audited.wait_for(lambda entry: entry["event"] == "login" and not entry["allowed"])
    guessing.poll(0)
    assert entry["principal"] is None
    assert entry["reason"].startswith("the authentication with PLAIN failed")
    page = scrape(audited.process)
    assert page["kafka_server_socket_server_metrics_successful_authentication_total", ("LOGIN",)] >= 1
    assert page["kafka_server_socket_server_metrics_failed_authentication_total", ("LOGIN",)] >= 1
    assert page["kcoord_audit_lost_entries_total", ()] == 0
    assert "plum-cake" not in audited.path.read_text() and "guessed-it" not in audited.path.read_text()


def delete_group(port: int, group_id: str) -> None:
    with WireClient(port) as client:
        client.call(DeleteGroupsRequest(groups_names=[group_id]), 2, DeleteGroupsResponse)


def name_of(number: int) -> str:
    return f"g{number}-{'x' * 200}"


def test_kill_9_leaves_whole_lines(make_server: MakeServer, tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    process = make_server(kcoord_audit_log=str(path)).start()

    def delete_until_killed() -> None:
        with WireClient(process.port) as client, suppress(OSError, ConnectionClosed):
            for number in itertools.count():
                client.call(DeleteGroupsRequest(groups_names=[name_of(number)]), 2, DeleteGroupsResponse)

    deleting = threading.Thread(target=delete_until_killed, daemon=True)
    deleting.start()
    wait_until(lambda: path.read_text().count("\n") >= 100, "deletions are in the log")
    process.kill()
    deleting.join()
    process.start()
    delete_group(process.port, "last")
    process.stop()
    entries = entries_of(path)
    names = [entry["fields"]["groupsNames"] for entry in entries]
    assert names == [*([name_of(number)] for number in range(len(names) - 1)), ["last"]]
    assert len(names) > 100
    assert {entry["principal"] for entry in entries} == {"User:ANONYMOUS"}
    assert all("decisions" not in entry and entry["allowed"] for entry in entries)


def test_each_worker_has_its_own_file(make_server: MakeServer, tmp_path: Path) -> None:
    process = make_server(kcoord_audit_log=str(tmp_path / "audit.log"), group_coordinator_threads="2").start()
    for port in process.ports:
        admin = AdminClient({"bootstrap.servers": f"127.0.0.1:{port}"})
        delete_group(port, str(port))
        results(admin.create_topics([NewTopic(f"t{port}", 1)]))
    assert main(["workers", "fence", "2", "--data", str(process.data)]) == 0
    process.stop()
    files = [tmp_path / f"audit.log.broker-{number}" for number in (1, 2)]
    assert sorted(tmp_path.glob("audit.log*")) == files
    by_broker = {
        entry["broker"]: entry for file in files for entry in entries_of(file) if entry["request"] == "DeleteGroups"
    }
    assert {broker: entry["fields"]["groupsNames"] for broker, entry in by_broker.items()} == {
        number: [str(port)] for number, port in enumerate(process.ports, 1)
    }
    # A change that one worker passes on to the controller has one entry.
    created = [entry for file in files for entry in entries_of(file) if entry["request"] == "CreateTopics"]
    assert sorted(entry["fields"]["topics"][0]["name"] for entry in created) == sorted(
        f"t{port}" for port in process.ports
    )

    (fenced,) = (entry for entry in entries_of(files[0]) if entry["request"] == "BrokerHeartbeat")
    assert fenced["fields"]["brokerId"] == 2 and fenced["fields"]["wantFence"]
    assert (fenced["principal"], fenced["host"], fenced["errors"]) == (None, "", [])


def test_a_file_that_cannot_be_written_refuses_the_start(make_server: MakeServer, tmp_path: Path) -> None:
    process = make_server(kcoord_audit_log=str(tmp_path))
    process.spawn()
    reason = f"kcoord: Invalid value {tmp_path} for configuration kcoord.audit.log: the file cannot be written: "
    wait_until(lambda: f"{reason}Is a directory" in process.log, "the start is refused")
    assert process.stop() in (1, -15)
