# SPDX-License-Identifier: Apache-2.0
"""ACLs survive kill -9 once they are acknowledged, and a change holds on every worker before its response."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from kcoord_protocol.acls import Acl, AclOperation, PatternType, PermissionType, ResourceType
from kcoord_protocol.errors import Errors
from kcoord_protocol.messages import (
    CreateAclsRequest,
    CreateAclsResponse,
    DeleteAclsRequest,
    DeleteAclsResponse,
    DescribeAclsRequest,
    DescribeAclsResponse,
    MetadataRequest,
    MetadataResponse,
)
from tests.integration.wire import ConnectionClosed, WireClient
from tests.support.authorizing_process import authorizing_process
from tests.support.kcoord_process import KcoordProcess

VERSION = 3
CHANGES = 12
TIMEOUT_SECONDS = 30
METADATA_OF_T = MetadataRequest(
    topics=[MetadataRequest.MetadataRequestTopic(name="t")], allow_auto_topic_creation=False
)


def create(
    port: int,
    name: str,
    resource_type: ResourceType = ResourceType.TOPIC,
    principal: str = "User:alice",
    operation: AclOperation = AclOperation.READ,
) -> list[int]:
    acl = Acl(resource_type, name, PatternType.LITERAL, principal, "*", operation, PermissionType.ALLOW)
    creation = CreateAclsRequest.AclCreation(
        resource_type=acl.resource_type,
        resource_name=acl.resource_name,
        resource_pattern_type=acl.pattern_type,
        principal=acl.principal,
        host=acl.host,
        operation=acl.operation,
        permission_type=acl.permission_type,
    )
    with WireClient(port) as client:
        response = client.call(CreateAclsRequest(creations=[creation]), VERSION, CreateAclsResponse)
    return [result.error_code for result in response.results]


def delete(port: int, name: str) -> int:
    """Deletes the ACLs of a topic; returns their number."""
    entry = DeleteAclsRequest.DeleteAclsFilter(
        resource_type_filter=ResourceType.TOPIC,
        resource_name_filter=name,
        pattern_type_filter=PatternType.ANY,
        principal_filter=None,
        host_filter=None,
        operation=AclOperation.ANY,
        permission_type=PermissionType.ANY,
    )
    with WireClient(port) as client:
        response = client.call(DeleteAclsRequest(filters=[entry]), VERSION, DeleteAclsResponse)
    (result,) = response.filter_results
    assert result.error_code == 0
    return len(result.matching_acls)


def names(port: int) -> list[str]:
    """Returns the names of the resources that have ACLs, as one broker describes them."""
    request = DescribeAclsRequest(
        resource_type_filter=ResourceType.ANY,
        resource_name_filter=None,
        pattern_type_filter=PatternType.ANY,
        principal_filter=None,
        host_filter=None,
        operation=AclOperation.ANY,
        permission_type=PermissionType.ANY,
    )
    with WireClient(port) as client:
        response = client.call(request, VERSION, DescribeAclsResponse)
    assert (response.error_code, response.error_message) == (0, "")
    return [resource.resource_name for resource in response.resources]


def test_acknowledged_changes_survive_kill_9(tmp_path: Path) -> None:
    broker = authorizing_process(tmp_path).start()
    try:
        for name in ("a", "b", "c"):
            assert create(broker.port, name) == [0]
        assert delete(broker.port, "b") == 1
        broker.kill()
        broker.start()
        assert names(broker.port) == ["a", "c"]
    finally:
        broker.kill()


def test_a_change_holds_on_all_workers_before_its_response(tmp_path: Path) -> None:
    broker = authorizing_process(tmp_path, group_coordinator_threads="2").start()
    try:
        check_changes(broker)
        broker.restart()
        assert {tuple(names(port)) for port in broker.ports} == {("t1",)}
    finally:
        broker.kill()


def check_changes(broker: KcoordProcess) -> None:
    """Creates and deletes ACLs at each worker in turn, and describes them at the other one at once."""
    assert len(broker.ports) == 2
    for change in range(CHANGES):
        here, other = broker.ports if change % 2 else broker.ports[::-1]
        assert create(here, "t0") == [0]
        assert names(other) == names(here) == ["t0"]
        assert delete(other, "t0") == 1
        assert names(here) == names(other) == []
    assert create(broker.ports[1], "t1") == [0]


def topic_error(client: WireClient) -> int:
    """Returns the error of Metadata for the topic `t`."""
    return client.call(METADATA_OF_T, 12, MetadataResponse).topics[0].error_code


def withdraw_super_user(broker: KcoordProcess) -> None:
    """Restarts the broker so that anonymous clients may change ACLs, and nothing else without ACLs."""
    for operation in (AclOperation.ALTER, AclOperation.DESCRIBE):
        assert create(broker.port, "kafka-cluster", ResourceType.CLUSTER, "User:ANONYMOUS", operation) == [0]
    broker.overrides["super.users"] = "User:admin"
    broker.restart()


def test_a_worker_that_hangs_never_serves_with_removed_acls(tmp_path: Path) -> None:
    """The worker is killed, so the request that waits for it is never served. Its successor has the change."""
    broker = authorizing_process(tmp_path, group_coordinator_threads="2").start()
    try:
        withdraw_super_user(broker)
        assert create(broker.port, "t", principal="User:ANONYMOUS") == [0]
        with WireClient(broker.ports[1]) as client:
            assert topic_error(client) == Errors.UNKNOWN_TOPIC_OR_PARTITION
            hung = broker.worker_pids()[1]
            os.kill(hung, signal.SIGSTOP)
            client.send(METADATA_OF_T, 12)
            assert delete(broker.port, "t") == 1
            with suppress(ProcessLookupError):
                os.kill(hung, signal.SIGCONT)
            with pytest.raises((ConnectionClosed, ConnectionResetError)):
                client.receive_frame()
        with WireClient(broker.ports[1]) as client:
            assert topic_error(client) == Errors.TOPIC_AUTHORIZATION_FAILED
    finally:
        broker.kill()


def test_after_a_crash_of_the_controller_a_change_waits_for_workers_that_run(tmp_path: Path) -> None:
    """They have the ACLs of before the crash until they have connected to the new controller."""
    broker = authorizing_process(tmp_path, group_coordinator_threads="2").start()
    try:
        withdraw_super_user(broker)
        assert create(broker.port, "t", principal="User:ANONYMOUS") == [0]
        with WireClient(broker.ports[1]) as client, ThreadPoolExecutor(1) as other:
            controller, late = broker.worker_pids()
            os.kill(late, signal.SIGSTOP)
            os.kill(controller, signal.SIGKILL)
            deleting = other.submit(delete, broker.port, "t")
            with pytest.raises(TimeoutError):
                deleting.result(1.5)
            os.kill(late, signal.SIGCONT)
            assert deleting.result(TIMEOUT_SECONDS) == 1
            assert topic_error(client) == Errors.TOPIC_AUTHORIZATION_FAILED
    finally:
        broker.kill()


def test_a_revoked_right_holds_for_the_next_request_on_every_worker(tmp_path: Path) -> None:
    broker = authorizing_process(tmp_path, group_coordinator_threads="2").start()
    try:
        withdraw_super_user(broker)
        hidden, missing = Errors.TOPIC_AUTHORIZATION_FAILED, Errors.UNKNOWN_TOPIC_OR_PARTITION
        with WireClient(broker.ports[0]) as first, WireClient(broker.ports[1]) as second:
            for change in range(CHANGES):
                here, other = broker.ports if change % 2 else broker.ports[::-1]
                assert [topic_error(client) for client in (first, second, first, second)] == [hidden] * 4
                assert create(here, "t", principal="User:ANONYMOUS") == [0]
                assert [topic_error(client) for client in (second, first, second, first)] == [missing] * 4
                assert delete(other, "t") == 1
    finally:
        broker.kill()
