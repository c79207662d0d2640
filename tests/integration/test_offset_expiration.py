# SPDX-License-Identifier: Apache-2.0
"""Offsets expire.

The times and retentions that old clients send survive a restart, and `kcoord groups expiry` shows them.
"""

from __future__ import annotations

import json
import time

import pytest

from kcoord.cli import main
from kcoord.testing import start_broker
from kcoord_protocol.errors import Errors
from kcoord_protocol.messages import (
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
    OffsetCommitRequest,
    OffsetCommitResponse,
)
from tests.integration.conftest import MakeServer
from tests.integration.test_log_commands import TOPIC, committed, create_topic, now_ms
from tests.integration.wire import WireClient
from tests.support.waiting import wait_until

SETTINGS = {"offsets_retention_minutes": "1", "offsets_retention_check_interval_ms": "200"}
MINUTE_MS = 60_000


def commit(client: WireClient, group_id: str, version: int, *, time_ms: int = -1, retention_ms: int = -1) -> None:
    partition = OffsetCommitRequest.OffsetCommitRequestPartition(
        partition_index=0, committed_offset=5, commit_timestamp=time_ms
    )
    topic = OffsetCommitRequest.OffsetCommitRequestTopic(name=TOPIC, partitions=[partition])
    request = OffsetCommitRequest(
        group_id=group_id, generation_id_or_member_epoch=-1, retention_time_ms=retention_ms, topics=[topic]
    )

    def is_taken() -> bool:
        answer = client.call(request, version, OffsetCommitResponse)
        error = answer.topics[0].partitions[0].error_code
        assert error in (Errors.NONE, Errors.NOT_COORDINATOR, Errors.COORDINATOR_LOAD_IN_PROGRESS)
        return error == Errors.NONE

    wait_until(is_taken, f"{group_id} has committed")


def expiry(address: str, capsys: pytest.CaptureFixture[str], *options: str) -> list[dict[str, object]]:
    capsys.readouterr()
    assert main(["groups", "expiry", "--bootstrap-server", address, "--json", *options]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert isinstance(rows, list)
    return [row for row in rows if row["topic"] is not None]


def test_times_and_retentions_of_old_clients_survive_a_restart(capsys: pytest.CaptureFixture[str]) -> None:
    config = {"offsets.retention.minutes": "60", "offsets.retention.check.interval.ms": "1000"}
    with start_broker(config) as broker:
        begin_ms = broker.now_ms
        with WireClient(broker.port) as client:
            create_topic(client)
            commit(client, "v1-old", 1, time_ms=begin_ms - 55 * MINUTE_MS)
            commit(client, "v1-new", 1, time_ms=begin_ms + 60 * MINUTE_MS)
            for version in (2, 3, 4):
                commit(client, f"v{version}-short", version, retention_ms=5 * MINUTE_MS)
                commit(client, f"v{version}-long", version, retention_ms=300 * MINUTE_MS)
            commit(client, "v9", 9)
        broker.restart()
        rows = {str(row["group"]): row for row in expiry(broker.bootstrap_servers, capsys)}
        assert rows["v1-old"]["expires_ms"] == begin_ms + 5 * MINUTE_MS
        assert rows["v1-new"]["expires_ms"] == begin_ms + 120 * MINUTE_MS
        assert {rows[f"v{version}-short"]["because"] for version in (2, 3, 4)} == {"retention of the commit"}
        assert {rows[f"v{version}-long"]["retention_ms"] for version in (2, 3, 4)} == {300 * MINUTE_MS}
        assert rows["v9"]["retention_ms"] == 60 * MINUTE_MS
        short = {"v1-old", *(f"v{version}-short" for version in (2, 3, 4))}
        with WireClient(broker.port) as client:
            broker.advance_clock(60)
            assert all(committed(client, group) for group in rows)
            broker.advance_clock(6 * 60)
            wait_until(
                lambda: not any(committed(client, group) for group in short),
                "the offsets with a short retention have expired",
            )
            assert all(committed(client, group) for group in rows.keys() - short)
            broker.advance_clock(56 * 60)
            wait_until(lambda: not committed(client, "v9"), "the offset with the default retention has expired")
            assert committed(client, "v1-new")
            assert committed(client, "v4-long")


def test_expiry_shows_the_reason(make_server: MakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server = make_server(**SETTINGS).start()
    alter = ["configs", "--bootstrap-server", server.address, "--entity-type", "groups", "--alter"]
    assert main([*alter, "--entity-name", "own", "--add-config", "kcoord.offsets.retention.minutes=5"]) == 0
    with WireClient(server.port) as client:
        create_topic(client)
        for group_id in ("live", "left", "own"):
            commit(client, group_id, 9)
        for group_id in ("live", "left"):
            beat(client, group_id, 0)
        before_ms = now_ms()
        beat(client, "left", -1)
    (live,) = expiry(server.address, capsys, "--group", "live")
    assert (live["expires_ms"], live["because"]) == (None, "subscribed")
    (left,) = expiry(server.address, capsys, "--group", "left")
    assert left["because"] == "group empty"
    assert isinstance(left["expires_ms"], int)
    assert before_ms + MINUTE_MS <= left["expires_ms"] <= now_ms() + MINUTE_MS
    (own,) = expiry(server.address, capsys, "--group", "own")
    assert (own["retention_ms"], own["because"]) == (5 * MINUTE_MS, "never had members")
    assert main(["groups", "expiry", "--bootstrap-server", server.address]) == 0
    printed = capsys.readouterr().out
    assert "0:05:00 after the commit: the group never had members" in printed
    assert "kept: a member of the group subscribes to the topic" in printed
    assert main(["groups", "expiry", "--bootstrap-server", server.address, "--group", "nobody"]) == 1
    assert "group nobody does not exist" in capsys.readouterr().err


def beat(client: WireClient, group_id: str, epoch: int) -> None:
    request = ConsumerGroupHeartbeatRequest(
        group_id=group_id,
        member_id="a-member",
        member_epoch=epoch,
        rebalance_timeout_ms=5000,
        subscribed_topic_names=[TOPIC],
        topic_partitions=[],
    )
    deadline = time.monotonic() + 10
    while client.call(request, 1, ConsumerGroupHeartbeatResponse).error_code != Errors.NONE:
        assert time.monotonic() < deadline
        time.sleep(0.01)
