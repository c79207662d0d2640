# SPDX-License-Identifier: Apache-2.0
"""The process: ready line, signals, lock, bad settings, health, hostile bytes, and durability after a kill."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kcoord.cli import main
from kcoord.config import BrokerConfig
from kcoord.server.composition import compose
from kcoord.server.disk.data_folder import DataFolder
from kcoord.server.environment import Environment
from kcoord.server.process import BrokerProcess, ReadyLine
from kcoord.server.shards.shard_service import Clock
from kcoord_protocol.api_keys import ApiKey, response_class
from kcoord_protocol.errors import Errors
from kcoord_protocol.framing import encode_request
from kcoord_protocol.messages import (
    ApiVersionsRequest,
    ApiVersionsResponse,
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
    CreateTopicsRequest,
    CreateTopicsResponse,
    DeleteGroupsRequest,
    DeleteGroupsResponse,
    DeleteTopicsRequest,
    DeleteTopicsResponse,
    FetchRequest,
    FetchResponse,
    FindCoordinatorRequest,
    FindCoordinatorResponse,
    ListGroupsRequest,
    ListGroupsResponse,
    Message,
    MetadataRequest,
    MetadataResponse,
    OffsetCommitRequest,
    OffsetCommitResponse,
    OffsetFetchRequest,
    OffsetFetchResponse,
)
from tests.support.kcoord_process import KcoordProcess

from .wire import ConnectionClosed, WireClient

MakeServer = Callable[..., KcoordProcess]


def create_topic(client: WireClient, name: str, partitions: int) -> None:
    topic = CreateTopicsRequest.CreatableTopic(name=name, num_partitions=partitions, replication_factor=1)
    answer = client.call(CreateTopicsRequest(topics=[topic], timeout_ms=5000), 7, CreateTopicsResponse)
    assert [result.error_code for result in answer.topics] == [0]


def find_coordinator(client: WireClient, *groups: str) -> FindCoordinatorResponse:
    return client.call(FindCoordinatorRequest(coordinator_keys=list(groups)), 4, FindCoordinatorResponse)


def commit(client: WireClient, group: str, topic: str, offsets: dict[int, int]) -> dict[int, int]:
    partitions = [
        OffsetCommitRequest.OffsetCommitRequestPartition(partition_index=index, committed_offset=offset)
        for index, offset in offsets.items()
    ]
    request = OffsetCommitRequest(
        group_id=group,
        topics=[OffsetCommitRequest.OffsetCommitRequestTopic(name=topic, partitions=partitions)],
    )
    answer = client.call(request, 9, OffsetCommitResponse)
    return {p.partition_index: p.error_code for t in answer.topics for p in t.partitions}


def committed(client: WireClient, group: str) -> dict[int, int]:
    """Returns the committed offsets of a group; waits while its shard is loaded."""
    request = OffsetFetchRequest(groups=[OffsetFetchRequest.OffsetFetchRequestGroup(group_id=group, topics=None)])
    while True:
        (answer,) = client.call(request, 8, OffsetFetchResponse).groups
        if answer.error_code != Errors.COORDINATOR_LOAD_IN_PROGRESS:
            break
        time.sleep(0.01)
    assert answer.error_code == 0
    return {p.partition_index: p.committed_offset for topic in answer.topics for p in topic.partitions}


def join(client: WireClient, group: str, member: str, topic: str, epoch: int = 0) -> ConsumerGroupHeartbeatResponse:
    request = ConsumerGroupHeartbeatRequest(group_id=group, member_id=member, member_epoch=epoch)
    if epoch == 0:
        request.rebalance_timeout_ms = 60000
        request.subscribed_topic_names = [topic]
        request.topic_partitions = []
    return client.call(request, 1, ConsumerGroupHeartbeatResponse)


def run_serve(*overrides: str) -> subprocess.CompletedProcess[str]:
    arguments = [argument for override in overrides for argument in ("--override", override)]
    command = [sys.executable, "-m", "kcoord", "serve", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


# --- the life of the process ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_the_log_names_the_listener_and_a_signal_ends_the_process(server: KcoordProcess, how: signal.Signals) -> None:
    assert f"PLAINTEXT://127.0.0.1:{server.port}, node 1, cluster " in server.log
    started = time.monotonic()
    assert server.stop(how) == 0
    assert time.monotonic() - started < 5
    assert (server.data / ".kafka_cleanshutdown").exists()


def test_the_ready_line_as_json(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kcoord", "serve", "--json", "--override", "listeners=PLAINTEXT://127.0.0.1:0"]
    command += ["--override", f"log.dirs={tmp_path / 'data'}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            ready = json.loads(process.stdout.readline())
            address = ready["addresses"][0].removeprefix("PLAINTEXT://")
            assert main(["health", "--bootstrap-server", address, "--json"]) == 0
        finally:
            process.terminate()
    assert process.returncode == 0
    assert (ready["node_id"], ready["nodes"], ready["control_url"]) == (1, 1, None)


def test_a_stop_answers_long_polls_and_does_not_wait_for_idle_connections(server: KcoordProcess) -> None:
    with WireClient(server.port) as idle, WireClient(server.port) as poller:
        create_topic(idle, "t", 1)
        partition = FetchRequest.FetchPartition(partition=0, partition_max_bytes=1000)
        request = FetchRequest(
            max_wait_ms=60000,
            min_bytes=1,
            max_bytes=1000,
            topics=[FetchRequest.FetchTopic(topic="t", partitions=[partition])],
        )
        correlation_id = poller.send(request, 11)
        time.sleep(0.2)
        started = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - started < 2
        poller.receive(correlation_id, ApiKey.FETCH, 11, FetchResponse)


def test_a_second_process_on_the_same_folder_fails(server: KcoordProcess) -> None:
    result = run_serve(f"log.dirs={server.data}", "listeners=PLAINTEXT://127.0.0.1:0")
    assert result.returncode == 1
    assert "is in use by another process" in result.stderr
    assert "Traceback" not in result.stderr


def test_the_error_names_a_port_in_use(server: KcoordProcess, tmp_path: Path) -> None:
    result = run_serve(f"log.dirs={tmp_path / 'other'}", f"listeners=PLAINTEXT://127.0.0.1:{server.port}")
    assert result.returncode == 1
    assert f"cannot listen on PLAINTEXT://127.0.0.1:{server.port}" in result.stderr
    assert "Traceback" not in result.stderr


def test_the_error_names_an_unusable_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = run_serve(f"log.dirs={tmp_path / 'file'}", "listeners=PLAINTEXT://127.0.0.1:0")
    assert result.returncode == 1
    assert str(tmp_path / "file") in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("group.max.size=none", ["group.max.size", "none"]),
        ("group.consumer.heartbeat.interval.ms=0", ["group.consumer.heartbeat.interval.ms", "0"]),
        (
            "listeners=SASL_SSL://127.0.0.1:0",
            ["SASL_SSL://127.0.0.1:0", "sasl.enabled.mechanisms", "GSSAPI is not offered"],
        ),
        (
            "listener.security.protocol.map=PLAINTEXT:SASL_PLAINTEXT",
            ["PLAINTEXT://127.0.0.1:0", "GSSAPI is not offered"],
        ),
        ("authorizer.class.name=org.example.Acls", ["authorizer.class.name", "org.example.Acls", "loads no classes"]),
        (
            "principal.builder.class=org.example.Names",
            ["principal.builder.class", "org.example.Names", "loads no classes"],
        ),
        ("nonsense", ["nonsense", "key=value"]),
    ],
)
def test_a_bad_setting_is_an_error_before_any_file_is_opened(tmp_path: Path, override: str, words: list[str]) -> None:
    result = run_serve(f"log.dirs={tmp_path / 'data'}", "listeners=PLAINTEXT://127.0.0.1:0", override)
    assert result.returncode == 1
    assert all(word in result.stderr for word in words)
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "data").exists()


def test_environment_wins_over_file_and_overrides_win_over_both(tmp_path: Path) -> None:
    properties = tmp_path / "server.properties"
    properties.write_text("node.id=5\nlisteners=nonsense\nlog.dirs=nowhere\nnum.network.threads=3\n")
    environment = os.environ | {"KCOORD_LISTENERS": "PLAINTEXT://127.0.0.1:0", "KCOORD_LOG_DIRS": "nowhere-either"}
    command = [sys.executable, "-m", "kcoord", "serve", str(properties), "--override", f"log.dirs={tmp_path / 'data'}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    process.terminate()
    _, errors = process.communicate(timeout=10)
    assert ", node 5, " in line
    assert process.returncode == 0
    assert (tmp_path / "data").is_dir()
    assert "num.network.threads" in errors


# --- health -----------------------------------------------------------------------------------------------------------


def test_health_of_a_running_broker(server: KcoordProcess, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["health", "--bootstrap-server", server.address]) == 0
    assert f"{server.address} serves " in capsys.readouterr().out


def test_health_of_no_broker(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    assert main(["health", "--bootstrap-server", f"127.0.0.1:{port}"]) == 1
    assert "is not healthy" in capsys.readouterr().err


# --- requests ---------------------------------------------------------------------------------------------------------


def test_an_unknown_version_of_api_versions_is_answered_in_v0(server: KcoordProcess) -> None:
    with WireClient(server.port) as client:
        for version in (6, 99, -1):
            header = struct.pack(">hhih", ApiKey.API_VERSIONS, version, 77, -1)
            client.socket.sendall(struct.pack(">i", len(header)) + header)
            frame = client.receive_frame()
            assert frame[:4] == struct.pack(">i", 77)
            answer = ApiVersionsResponse.decode(frame[4:], 0)
            assert answer.error_code == Errors.UNSUPPORTED_VERSION
            assert [(api.api_key, api.min_version, api.max_version) for api in answer.api_keys] == [(18, 0, 5)]


def test_api_versions_lists_apis_and_features(server: KcoordProcess) -> None:
    request = ApiVersionsRequest(client_software_name="test", client_software_version="1.0")
    nameless = ApiVersionsRequest(client_software_name="-", client_software_version="1.0")
    with WireClient(server.port) as client:
        old = client.call(request, 3, ApiVersionsResponse)
        answer = client.call(request, 4, ApiVersionsResponse)
        bad = client.call(nameless, 3, ApiVersionsResponse)
    versions = {api.api_key: (api.min_version, api.max_version) for api in answer.api_keys}
    assert versions[ApiKey.CONSUMER_GROUP_HEARTBEAT] == (0, 2)
    assert versions[ApiKey.METADATA] == (0, 14)
    assert versions[ApiKey.API_VERSIONS] == (0, 5)
    assert {feature.name: feature.max_version_level for feature in answer.finalized_features}["group.version"] == 1
    assert answer.finalized_features_epoch > 0
    supported = {feature.name: (feature.min_version, feature.max_version) for feature in answer.supported_features}
    assert supported["group.version"] == (0, 1)
    assert supported["metadata.version"] == (7, 33)
    assert [feature.name for feature in old.supported_features] == ["metadata.version"]
    assert (bad.error_code, bad.api_keys) == (Errors.INVALID_REQUEST, [])


def test_a_client_that_expects_another_cluster_or_broker_must_bootstrap_again(server: KcoordProcess) -> None:
    """The rules are those of KIP-1242, as observed in Kafka 4.4.0."""

    def ask(client: WireClient, cluster_id: str | None, node_id: int) -> tuple[Errors, bool]:
        request = ApiVersionsRequest(
            client_software_name="test", client_software_version="1.0", cluster_id=cluster_id, node_id=node_id
        )
        answer = client.call(request, 5, ApiVersionsResponse)
        return Errors(answer.error_code), bool(answer.api_keys)

    with WireClient(server.port) as client:
        metadata = client.call(MetadataRequest(topics=[]), 12, MetadataResponse)
        cluster_id, node_id = metadata.cluster_id, metadata.brokers[0].node_id
        assert ask(client, None, -1) == (Errors.NONE, True)
        assert ask(client, cluster_id, node_id) == (Errors.NONE, True)
        for other in ((cluster_id, 77), ("other", node_id), ("", node_id)):
            assert ask(client, *other) == (Errors.REBOOTSTRAP_REQUIRED, False)
        for incomplete in ((cluster_id, -1), ("", -1), (None, node_id)):
            assert ask(client, *incomplete) == (Errors.INVALID_REQUEST, False)


def test_versions_of_kafka_4_4_are_rejected_under_4_3(make_server: MakeServer) -> None:
    server = make_server(kcoord_release="4.3").start()
    request = ApiVersionsRequest(client_software_name="test", client_software_version="1.0")
    with WireClient(server.port) as client:
        answer = client.call(request, 4, ApiVersionsResponse)
        header = struct.pack(">hhih", ApiKey.API_VERSIONS, 5, 77, -1)
        client.socket.sendall(struct.pack(">i", len(header)) + header)
        assert ApiVersionsResponse.decode(client.receive_frame()[4:], 0).error_code == Errors.UNSUPPORTED_VERSION
        with pytest.raises(ConnectionClosed):
            client.call(DeleteGroupsRequest(groups_names=["g"]), 3, DeleteGroupsResponse)
    versions = {api.api_key: api.max_version for api in answer.api_keys}
    listed = [versions[key] for key in (ApiKey.API_VERSIONS, ApiKey.TXN_OFFSET_COMMIT, ApiKey.DELETE_GROUPS)]
    assert listed == [4, 5, 2]
    supported = {feature.name: (feature.min_version, feature.max_version) for feature in answer.supported_features}
    assert supported["metadata.version"] == (7, 30)


def test_delete_groups_has_error_messages_since_v3(server: KcoordProcess) -> None:
    with WireClient(server.port) as client:
        find_coordinator(client, "g")
        for version, has_message in ((2, False), (3, True)):
            answer = client.call(DeleteGroupsRequest(groups_names=["g"]), version, DeleteGroupsResponse)
            (result,) = answer.results
            assert result.error_code == Errors.GROUP_ID_NOT_FOUND
            assert (result.error_message is not None) == has_message


def test_deleting_the_offsets_topic_deletes_its_groups(server: KcoordProcess) -> None:
    """Kafka 4.3.1 does the same. The next FindCoordinator creates the topic again."""
    with WireClient(server.port) as client:
        create_topic(client, "t", 1)
        find_coordinator(client, "g")
        committed(client, "g")
        assert commit(client, "g", "t", {0: 7}) == {0: 0}
        state = DeleteTopicsRequest.DeleteTopicState(name="__consumer_offsets")
        deleted = client.call(DeleteTopicsRequest(topics=[state], timeout_ms=10_000), 6, DeleteTopicsResponse)
        assert [(result.error_code, result.error_message) for result in deleted.responses] == [(0, None)]
        assert client.call(ListGroupsRequest(), 4, ListGroupsResponse).groups == []
        find_coordinator(client, "g")
        assert committed(client, "g") == {}
        assert commit(client, "g", "t", {0: 8}) == {0: 0}
        server.restart()
    with WireClient(server.port) as client:
        find_coordinator(client, "g")
        assert committed(client, "g") == {0: 8}


def test_settings_hide_versions_and_disable_the_consumer_protocol(make_server: MakeServer) -> None:
    server = make_server(kcoord_kip1327_enable="false", group_coordinator_rebalance_protocols="classic").start()
    with WireClient(server.port) as client:
        answer = client.call(ApiVersionsRequest(), 0, ApiVersionsResponse)
        find_coordinator(client, "g")
        assert join(client, "g", "m", "t").error_code == Errors.UNSUPPORTED_VERSION
    versions = {api.api_key: api.max_version for api in answer.api_keys}
    assert versions[ApiKey.METADATA] == 13
    assert versions[ApiKey.CONSUMER_GROUP_HEARTBEAT] == 1


def test_find_coordinator_creates_the_internal_topic(server: KcoordProcess) -> None:
    with WireClient(server.port) as client:
        before = client.call(MetadataRequest(topics=None), 12, MetadataResponse)
        assert [topic.name for topic in before.topics] == []
        assert join(client, "g", "m", "t").error_code == Errors.NOT_COORDINATOR
        answer = find_coordinator(client, "a", "", "a")
        coordinators = [
            (coordinator.key, coordinator.error_code, coordinator.node_id, coordinator.host, coordinator.port)
            for coordinator in answer.coordinators
        ]
        assert coordinators == [(key, 0, 1, "127.0.0.1", server.port) for key in ("a", "", "a")]
        after = client.call(MetadataRequest(topics=None), 12, MetadataResponse)
        assert [(topic.name, len(topic.partitions), topic.is_internal) for topic in after.topics] == [
            ("__consumer_offsets", 4, True)
        ]
        assert join(client, "g", "m", "t").error_code == 0
        expected = {1: (0, 1, "127.0.0.1", server.port), 2: (42, -1, "", -1), -1: (42, -1, "", -1)}
        for key_type, place in expected.items():
            request = FindCoordinatorRequest(key="a", key_type=key_type)
            old = client.call(request, 3, FindCoordinatorResponse)
            assert (old.error_code, old.node_id, old.host, old.port) == place


def test_bad_bytes_end_only_their_connection(server: KcoordProcess) -> None:
    with WireClient(server.port) as good:
        for bad_bytes in (
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(32),
            b"GET / HTTP/1.1\r\n\r\n",
            b"\xff\xff\xff\xff",
            encode_request(ApiKey.LIST_GROUPS, 5, 1, None, b"\xff\xff\xff\xff\xff\xff"),
            encode_request(ApiKey.OFFSET_COMMIT, 11, 1, None, b""),
        ):
            with WireClient(server.port) as bad:
                bad.socket.sendall(bad_bytes)
                with pytest.raises((ConnectionClosed, ConnectionResetError)):
                    bad.receive_frame()
        assert good.call(ListGroupsRequest(), 5, ListGroupsResponse).error_code == 0
    log = server.log
    assert "looks like a TLS handshake" in log
    assert "looks like HTTP" in log
    assert "malformed LIST_GROUPS v5 request" in log
    assert "OFFSET_COMMIT v11 is not served" in log
    assert "Traceback" not in log


@pytest.mark.skipif(sys.platform != "linux", reason="prlimit")
def test_the_broker_may_open_as_many_files_as_the_system_allows(make_server: MakeServer) -> None:
    server = make_server()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    server.files = (256, hard)
    server.start()
    assert resource.prlimit(server.pid, resource.RLIMIT_NOFILE) == (hard, hard)


def test_limits_on_connections(make_server: MakeServer) -> None:
    server = make_server(max_connections_per_ip="2", connections_max_idle_ms="600").start()
    with WireClient(server.port) as first, WireClient(server.port), WireClient(server.port) as third:
        with pytest.raises((ConnectionClosed, ConnectionResetError)):
            third.receive_frame()
        assert first.call(ListGroupsRequest(), 5, ListGroupsResponse).error_code == 0
        with pytest.raises((ConnectionClosed, ConnectionResetError)):
            first.receive_frame()
    assert "max.connections.per.ip=2 reached" in server.log


def test_pipelined_requests_are_answered_in_order(server: KcoordProcess) -> None:
    with WireClient(server.port) as client:
        create_topic(client, "t", 1)
        find_coordinator(client, "g")
        sent: list[tuple[int, Message, int]] = []
        for number in range(200):
            request: Message = ListGroupsRequest()
            version = 5
            if number % 2 == 0:
                partition = OffsetCommitRequest.OffsetCommitRequestPartition(partition_index=0, committed_offset=number)
                topic = OffsetCommitRequest.OffsetCommitRequestTopic(name="t", partitions=[partition])
                request, version = OffsetCommitRequest(group_id="g", topics=[topic]), 9
            sent.append((client.send(request, version), request, version))
        for correlation_id, request, version in sent:
            client.receive(correlation_id, request.api_key, version, response_class(request.api_key))
        assert committed(client, "g") == {0: 198}


# --- durability -------------------------------------------------------------------------------------------------------


def test_the_ready_line_waits_for_small_shards(make_server: MakeServer) -> None:
    """A client that comes right after the ready line does not have to retry COORDINATOR_LOAD_IN_PROGRESS."""
    server = make_server(offsets_topic_num_partitions="50").start()
    with WireClient(server.port) as client:
        create_topic(client, "t", 1)
        find_coordinator(client, "g")
        assert commit(client, "g", "t", {0: 5}) == {0: 0}
    server.kill()
    properties = {**server.overrides, "log.dirs": str(server.data), "listeners": "PLAINTEXT://127.0.0.1:0"}
    config = BrokerConfig.from_properties(properties)
    is_loading: list[bool] = []

    async def run() -> None:
        clock = Clock()
        environment = Environment(asyncio.get_running_loop(), clock.now_ms)
        folder = DataFolder(config, environment.now_ms(), uuids=environment.uuids)
        process = BrokerProcess(compose(config, environment, folder), environment, folder)

        def on_ready(_: ReadyLine) -> None:
            is_loading.append(process.broker.groups.shards.is_loading)
            signal.raise_signal(signal.SIGTERM)

        await process.run(on_ready)

    asyncio.run(run())
    assert is_loading == [False]


def test_a_signal_ends_a_start_that_waits_for_another_process(tmp_path: Path) -> None:
    """So a worker whose supervisor and controller are gone ends, although it cannot follow the metadata log."""
    config = BrokerConfig.from_properties({"log.dirs": str(tmp_path), "listeners": "PLAINTEXT://127.0.0.1:0"})
    ready: list[ReadyLine] = []

    class Follower(BrokerProcess):
        async def _join_cluster(self) -> None:
            self._loop.call_soon(signal.raise_signal, signal.SIGTERM)
            await self._loop.create_future()

    async def run() -> None:
        environment = Environment(asyncio.get_running_loop(), Clock().now_ms)
        folder = DataFolder(config, environment.now_ms(), uuids=environment.uuids)
        process = Follower(compose(config, environment, folder), environment, folder)
        await asyncio.wait_for(process.run(ready.append), 10)

    asyncio.run(run())
    assert not ready


@pytest.mark.parametrize("ending", ["stop", "kill"])
def test_commits_groups_and_topics_survive(server: KcoordProcess, ending: str) -> None:
    with WireClient(server.port) as client:
        create_topic(client, "t", 3)
        find_coordinator(client, "simple")
        assert commit(client, "simple", "t", {0: 5, 2: 7}) == {0: 0, 2: 0}
        joined = join(client, "members", "m1", "t")
        assert joined.error_code == 0
    server.stop() if ending == "stop" else server.kill()
    server.start()
    with WireClient(server.port) as client:
        assert committed(client, "simple") == {0: 5, 2: 7}
        topics = client.call(MetadataRequest(topics=None), 12, MetadataResponse).topics
        assert sorted((topic.name, len(topic.partitions)) for topic in topics) == [("__consumer_offsets", 4), ("t", 3)]
        while (steady := join(client, "members", "m1", "t", joined.member_epoch)).error_code == 14:
            time.sleep(0.01)
        assert (steady.error_code, steady.member_epoch) == (0, joined.member_epoch)
        assert commit(client, "simple", "t", {0: 6}) == {0: 0}
        assert committed(client, "simple") == {0: 6, 2: 7}


def test_kills_lose_no_acknowledged_commit(server: KcoordProcess) -> None:
    with WireClient(server.port) as client:
        create_topic(client, "t", 1)
    offset = 0
    for _ in range(3):
        with WireClient(server.port) as client:
            find_coordinator(client, "g")
            assert committed(client, "g") == ({0: offset} if offset else {})
            for _ in range(20):
                assert commit(client, "g", "t", {0: offset + 1}) == {0: 0}
                offset += 1
        server.kill()
        server.start()


def test_the_os_flush_policy_survives_a_kill_of_the_process(make_server: MakeServer) -> None:
    server = make_server(kcoord_log_flush_policy="os", offsets_topic_num_partitions="4").start()
    with WireClient(server.port) as client:
        create_topic(client, "t", 1)
        find_coordinator(client, "g")
        assert commit(client, "g", "t", {0: 5}) == {0: 0}
    server.kill()
    server.start()
    with WireClient(server.port) as client:
        assert committed(client, "g") == {0: 5}
