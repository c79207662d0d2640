# SPDX-License-Identifier: Apache-2.0
"""`kcoord log` and `kcoord groups restore` while a broker runs."""

from __future__ import annotations

import json
import shutil
import threading
import time
from pathlib import Path

import pytest

from kcoord.cli import main
from kcoord_protocol.errors import Errors
from kcoord_protocol.messages import (
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
    CreateTopicsRequest,
    CreateTopicsResponse,
    DeleteGroupsRequest,
    DeleteGroupsResponse,
    FindCoordinatorRequest,
    FindCoordinatorResponse,
    OffsetCommitRequest,
    OffsetCommitResponse,
    OffsetFetchRequest,
    OffsetFetchResponse,
)
from tests.integration.conftest import MakeServer
from tests.integration.wire import WireClient
from tests.support.kcoord_process import KcoordProcess
from tests.support.waiting import wait_until

GROUP = "readers"
TOPIC = "orders"
PARTITIONS = 3


def create_topic(client: WireClient) -> None:
    topic = CreateTopicsRequest.CreatableTopic(name=TOPIC, num_partitions=PARTITIONS, replication_factor=1)
    client.call(CreateTopicsRequest(topics=[topic], timeout_ms=5000), 7, CreateTopicsResponse)
    # The first FindCoordinator creates the offsets topic.
    client.call(FindCoordinatorRequest(coordinator_keys=[GROUP]), 4, FindCoordinatorResponse)


def commit(client: WireClient, offset: int, group_id: str = GROUP) -> None:
    """Commits the same offset for every partition."""
    topic = OffsetCommitRequest.OffsetCommitRequestTopic(
        name=TOPIC,
        partitions=[
            OffsetCommitRequest.OffsetCommitRequestPartition(
                partition_index=number, committed_offset=offset, committed_metadata=f"at {offset}"
            )
            for number in range(PARTITIONS)
        ],
    )
    request = OffsetCommitRequest(group_id=group_id, generation_id_or_member_epoch=-1, topics=[topic])
    wait_until(lambda: try_commit(client, request), f"{group_id} has committed {offset}")


def try_commit(client: WireClient, request: OffsetCommitRequest) -> bool:
    """Returns False while the coordinator is not ready yet."""
    answer = client.call(request, 9, OffsetCommitResponse)
    errors = {part.error_code for topic in answer.topics for part in topic.partitions}
    if errors <= {Errors.NOT_COORDINATOR, Errors.COORDINATOR_LOAD_IN_PROGRESS}:
        return False
    assert errors == {Errors.NONE}
    return True


def committed(client: WireClient, group_id: str = GROUP) -> list[tuple[int, str | None]]:
    group = OffsetFetchRequest.OffsetFetchRequestGroup(group_id=group_id, topics=None, member_id=None)
    while True:
        answer = client.call(OffsetFetchRequest(groups=[group]), 9, OffsetFetchResponse)
        if answer.groups[0].error_code != Errors.COORDINATOR_LOAD_IN_PROGRESS:
            break
        time.sleep(0.01)
    return [
        (part.committed_offset, part.metadata)
        for topic in answer.groups[0].topics
        for part in sorted(topic.partitions, key=lambda partition: partition.partition_index)
    ]


def delete_group(client: WireClient) -> None:
    answer = client.call(DeleteGroupsRequest(groups_names=[GROUP]), 2, DeleteGroupsResponse)
    assert answer.results[0].error_code == Errors.NONE


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def restore(server: KcoordProcess, to: str, *options: str) -> int:
    # The command uses the first of several brokers that answers.
    addresses = f"127.0.0.1:1,{server.address}"
    return main(["groups", "restore", "--bootstrap-server", addresses, "--group", GROUP, "--to", to, *options])


def test_a_deleted_group_is_restored_with_its_offsets(
    server: KcoordProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    with WireClient(server.port) as client:
        create_topic(client)
        commit(client, 10)
        commit(client, 20)
        time.sleep(0.01)
        before = now_ms()
        time.sleep(0.01)
        delete_group(client)
        assert committed(client) == []
        assert main(["log", "dump", str(server.data)]) == 0
        assert capsys.readouterr().out.count("(group-delete by User:ANONYMOUS)") > PARTITIONS
        assert restore(server, str(before), "--dry-run") == 0
        assert committed(client) == []
        lines = capsys.readouterr().out
        assert lines.count("restore") == lines.count("group-delete by User:ANONYMOUS") == PARTITIONS
        assert restore(server, str(before), "--json") == 0
        rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [(row["partition"], row["then"], row["now"], row["action"]) for row in rows] == [
            (number, 20, None, "restore") for number in range(PARTITIONS)
        ]
        assert all(row["deletedMs"] >= before and row["deletedBy"] == "User:ANONYMOUS" for row in rows)
        assert committed(client) == [(20, "at 20")] * PARTITIONS
        assert restore(server, str(before)) == 0
        assert "as it is" in capsys.readouterr().out


def test_offsets_of_a_time_are_restored_also_from_a_backup(
    server: KcoordProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with WireClient(server.port) as client:
        create_topic(client)
        commit(client, 10)
        time.sleep(0.01)
        early = now_ms()
        time.sleep(0.01)
        commit(client, 20)
        backup = tmp_path / "backup"
        assert main(["log", "backup", str(server.data), "--into", str(backup), "--verify"]) == 0
        assert "it would serve 2 topics, 1 groups, 3 offsets" in capsys.readouterr().out
        assert restore(server, str(early)) == 0
        assert committed(client) == [(10, "at 10")] * PARTITIONS
        delete_group(client)
        assert restore(server, str(now_ms()), "--from-folder", str(backup)) == 0
        assert committed(client) == [(20, "at 20")] * PARTITIONS


def test_a_group_with_members_is_not_restored(server: KcoordProcess, capsys: pytest.CaptureFixture[str]) -> None:
    with WireClient(server.port) as client:
        create_topic(client)
        commit(client, 10)
        request = ConsumerGroupHeartbeatRequest(
            group_id=GROUP,
            member_id="a-member",
            member_epoch=0,
            rebalance_timeout_ms=5000,
            subscribed_topic_names=[TOPIC],
            topic_partitions=[],
        )
        client.call(request, 1, ConsumerGroupHeartbeatResponse)
        assert restore(server, "1h") == 1
        assert "stop its members first" in capsys.readouterr().err
        assert committed(client) == [(10, "at 10")] * PARTITIONS


def test_restoring_nothing_is_an_error(server: KcoordProcess, capsys: pytest.CaptureFixture[str]) -> None:
    with WireClient(server.port) as client:
        create_topic(client)
        commit(client, 1, "another")
    assert restore(server, "2026-01-01T00:00:00Z") == 1
    assert "0 offsets were restored" in capsys.readouterr().err


def test_backups_during_writes_contain_every_commit_acknowledged_before(
    make_server: MakeServer, tmp_path: Path
) -> None:
    server = make_server().start()
    acknowledged: dict[str, int] = {}
    ending = threading.Event()

    def write(number: int) -> None:
        with WireClient(server.port) as client:
            offset = 0
            while not ending.is_set():
                offset += 1
                commit(client, offset, f"writer-{number}")
                acknowledged[f"writer-{number}"] = offset

    with WireClient(server.port) as client:
        create_topic(client)
    threads = [threading.Thread(target=write, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    backups = []
    try:
        for number in range(3):
            time.sleep(0.1)
            promised = dict(acknowledged)
            folder = tmp_path / f"backup{number}"
            assert main(["log", "backup", str(server.data), "--into", str(folder), "--verify"]) == 0
            backups.append((folder, promised))
        assert main(["log", "verify", str(server.data)]) == 0
    finally:
        ending.set()
        for thread in threads:
            thread.join(10)
    for folder, promised in backups[::2]:
        copy = make_server()
        shutil.copytree(folder, copy.data)
        copy.start()
        with WireClient(copy.port) as client:
            assert promised
            for group_id, offset in promised.items():
                offsets = committed(client, group_id)
                assert len(offsets) == PARTITIONS
                assert all(offset <= restored <= acknowledged[group_id] for restored, _ in offsets)
        assert copy.stop() == 0


def test_a_running_broker_is_not_repaired(server: KcoordProcess, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["log", "repair", str(server.data), "--yes"]) == 1
    assert "stop it first" in capsys.readouterr().err


def test_a_dump_of_a_running_broker(server: KcoordProcess, capsys: pytest.CaptureFixture[str]) -> None:
    with WireClient(server.port) as client:
        create_topic(client)
        commit(client, 10)
    capsys.readouterr()
    assert main(["log", "dump", str(server.data), "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    commits = [row for row in rows if row["partition"].startswith("__consumer_offsets")]
    assert [row["key"]["data"] for row in commits] == [
        {"group": GROUP, "topic": TOPIC, "partition": number} for number in range(PARTITIONS)
    ]
    assert {row["value"]["data"]["offset"] for row in commits} == {10}
    assert "TOPIC_RECORD" in {row["value"].get("type") for row in rows}
    assert main(["log", "dump", str(server.data), "--partition", commits[0]["partition"]]) == 0
    assert f'"group":"{GROUP}"' in capsys.readouterr().out
