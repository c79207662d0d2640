# SPDX-License-Identifier: Apache-2.0
"""The pump: replies leave after their write, an exception does not stop it, timers fire. Also limits on connections."""

from __future__ import annotations

import asyncio

import pytest

from kcoord.config import BrokerConfig, ConfigError
from kcoord.server.client_quotas import ConnectionQuota
from kcoord.server.errors import StartError
from kcoord.server.net.connection import ReportLimiter
from kcoord.server.net.connection_limits import ConnectionLimits, limits_by_address
from kcoord_protocol.errors import Errors
from kcoord_protocol.messages import ConsumerGroupHeartbeatRequest, ListGroupsRequest, OffsetCommitRequest

from .harness import Harness


def join(group_id: str, epoch: int = 0) -> ConsumerGroupHeartbeatRequest:
    request = ConsumerGroupHeartbeatRequest(group_id=group_id, member_id="m", member_epoch=epoch)
    if epoch == 0:
        request.rebalance_timeout_ms = 1000
        request.subscribed_topic_names = ["t3"]
        request.topic_partitions = []
    return request


async def test_a_reply_waits_for_the_writes_that_it_depends_on() -> None:
    broker = await Harness(kcoord_log_flush_policy="fsync").open()
    first = broker.send(join("g"), 1)
    listed = [broker.send(ListGroupsRequest(), 5)]
    assert asyncio.isfuture(first)
    assert asyncio.isfuture(listed[0])
    await asyncio.wait_for(listed[0], 5)
    assert first.done()
    assert first.result().error_code == 0
    steady = broker.send(join("g", first.result().member_epoch), 1)
    assert not asyncio.isfuture(steady)
    assert broker.worker.close(5)


async def test_a_client_that_disconnects_does_not_stop_the_writes_of_other_clients() -> None:
    broker = await Harness(kcoord_log_flush_policy="fsync").open()
    gone = broker.send(join("g"), 1)
    assert asyncio.isfuture(gone)
    gone.cancel()
    assert (await broker.call(join("g2"), 1)).error_code == 0
    assert (await broker.call(join("g"), 1)).error_code == 0
    assert broker.worker.close(5)


async def test_an_exception_in_one_driver_does_not_stop_the_pump(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("oops")

    broker = await Harness().open()
    with monkeypatch.context() as patch:
        patch.setattr(broker.runtime, "append_observers", [fail])
        assert (await broker.call(join("g"), 1)).error_code == 0
    assert "An observer of the appends of shard" in caplog.text
    with monkeypatch.context() as patch:
        patch.setattr(broker.groups, "collect", fail)
        answer = broker.send(join("g2"), 1)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert "Collecting the ready work of the shards of groups failed" in caplog.text
    assert (await broker.call(join("g3"), 1)).error_code == 0
    assert asyncio.isfuture(answer)
    assert (await asyncio.wait_for(answer, 5)).error_code == 0


async def test_session_timers_fire_without_requests() -> None:
    broker = await Harness(
        group_consumer_min_session_timeout_ms="1000",
        group_consumer_session_timeout_ms="1000",
        group_consumer_min_heartbeat_interval_ms="1",
        group_consumer_heartbeat_interval_ms="500",
    ).open()
    joined = await broker.call(join("g"), 1)
    await asyncio.sleep(0)
    assert broker.worker.is_quiet
    broker.now += 999
    assert (await broker.call(join("g", joined.member_epoch), 1)).error_code == 0
    broker.now += 1001
    broker.wake()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert (await broker.call(join("g", joined.member_epoch), 1)).error_code == Errors.UNKNOWN_MEMBER_ID


async def test_the_commits_of_a_turn_are_one_batch_per_shard() -> None:
    broker = await Harness(kcoord_log_flush_policy="fsync").open()
    answers = [broker.send(OffsetCommitRequest(group_id=f"g{number}", topics=topics()), 9) for number in range(20)]
    for answer in answers:
        assert asyncio.isfuture(answer)
        response = await asyncio.wait_for(answer, 5)
        assert response.topics[0].partitions[0].error_code == 0
    assert broker.worker.is_quiet
    assert broker.runtime.statistics.batches_appended == 4
    assert broker.worker.close(5)


def topics() -> list[OffsetCommitRequest.OffsetCommitRequestTopic]:
    partition = OffsetCommitRequest.OffsetCommitRequestPartition(partition_index=0, committed_offset=1)
    return [OffsetCommitRequest.OffsetCommitRequestTopic(name="t1", partitions=[partition])]


def test_connection_limits_by_host() -> None:
    settings = {
        "max.connections": "3",
        "max.connections.per.ip": "1",
        "max.connections.per.ip.overrides": "10.0.0.9:5",
    }
    limits = ConnectionLimits(BrokerConfig.from_properties(settings))
    assert limits.refusal("10.0.0.1", 0.0) is None
    assert limits.refusal("10.0.0.1", 0.0) == "max.connections.per.ip=1 reached"
    assert limits.refusal("10.0.0.9", 0.0) is None
    assert limits.refusal("10.0.0.9", 0.0) is None
    assert limits.refusal("10.0.0.9", 0.0) == "max.connections=3 reached"
    limits.release("10.0.0.1")
    assert limits.refusal("10.0.0.1", 0.0) is None


def test_overrides_are_limits_of_addresses(caplog: pytest.LogCaptureFixture) -> None:
    assert limits_by_address("[0:0:0:0:0:0:0:1]:5, 10.0.0.9:7,FE80::A:0") == {"::1": 5, "10.0.0.9": 7, "fe80::a": 0}
    key = "max.connections.per.ip.overrides"
    with pytest.raises(StartError, match=r"no\.\.where:3 .*the host no\.\.where is unknown"):
        ConnectionLimits(BrokerConfig.from_properties({key: "no..where:3"}))
    config = BrokerConfig.from_properties({key: "localhost:1"})
    limits = ConnectionLimits(config)
    assert limits.refusal("127.0.0.1", 0.0) is None
    assert limits.refusal("127.0.0.1", 0.0) == "max.connections.per.ip=1 reached"
    (check,) = config.further_checks
    with pytest.raises(ConfigError, match=r"the host no\.\.where is unknown"):
        check(config.with_dynamic({key: "no..where:3"}))
    config.apply_dynamic({key: "no..where:3"})
    assert limits.refusal("127.0.0.1", 0.0) == "max.connections.per.ip=1 reached"
    assert "The limits on connections stay as they were" in caplog.text
    config.apply_dynamic({key: "localhost:2"})
    assert limits.refusal("127.0.0.1", 0.0) is None


def test_the_rate_of_new_connections_holds_over_the_quota_windows() -> None:
    settings = {
        "max.connection.creation.rate": "10",
        "quota.window.num": "2",
        "quota.window.size.seconds": "1",
    }
    config = BrokerConfig.from_properties(settings)
    limits = ConnectionLimits(config)
    waits = [limits.wait_seconds(100.0) for _ in range(25)]
    assert waits[:20] == [0.0] * 20
    assert waits[20:] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])
    assert limits.wait_seconds(100.7) == 0.0
    config.apply_dynamic({"max.connection.creation.rate": "1"})
    assert limits.wait_seconds(100.7) == pytest.approx(0.9)


def test_a_flood_delays_later_clients_by_the_quota_windows_at_most() -> None:
    limits = ConnectionLimits(BrokerConfig.from_properties({"max.connection.creation.rate": "10"}))
    waits = []
    for number in range(50_000):
        now_seconds = 100 + number / 500
        if limits.refusal("10.0.0.1", now_seconds) is None:
            waits.append(limits.wait_seconds(now_seconds))
            limits.release("10.0.0.1")
    assert max(waits) == pytest.approx(11.1, abs=0.1)
    assert len(waits) == pytest.approx(10 * (100 + 11 + 11), abs=2), "the rate, what was unused before, what waits now"
    refused = "max.connection.creation.rate=10 is exceeded by all connections of 11 s"
    assert limits.wait_seconds(200.0) == pytest.approx(11, abs=0.1)
    assert limits.refusal("10.0.0.1", 200.0) == refused
    assert limits.refusal("10.0.0.1", 200.2) is None


def test_connections_above_the_quota_of_their_address_take_no_turn() -> None:
    """The first ten are within the quota, and count for max.connection.creation.rate. The others wait a second."""
    quota = ConnectionQuota(11, 1000)
    quota.change_limits({(("ip", None),): {"connection_creation_rate": 1.0}})
    limits = ConnectionLimits(BrokerConfig.from_properties({"max.connection.creation.rate": "1"}), lambda: quota)
    delays = []
    for _ in range(12):
        assert limits.refusal("10.0.0.1", 100.0) is None
        delays.append(limits.delay_seconds("10.0.0.1", 100.0))
    assert delays == [0.0] * 10 + [1.0] * 2
    assert limits.delay_seconds("10.0.0.1", 101.0) == 1.0
    assert limits.delay_seconds("10.0.0.1", 111.0) == 0.0


def test_a_changed_limit_applies_at_once() -> None:
    config = BrokerConfig.from_properties({})
    limits = ConnectionLimits(config)
    assert limits.refusal("10.0.0.1", 0.0) is None
    config.apply_dynamic({"max.connections": "1"})
    assert limits.refusal("10.0.0.2", 0.0) == "max.connections=1 reached"


def test_log_lines_that_strangers_cause_are_limited(caplog: pytest.LogCaptureFixture) -> None:
    limiter = ReportLimiter()
    for number in range(25):
        limiter.report(1.5, f"line {number}")
    limiter.report(2.1, "next second")
    lines = [record.getMessage() for record in caplog.records]
    assert lines[:10] == [f"line {number}" for number in range(10)]
    assert lines[10:] == ["15 more lines about refused connections were left out", "next second"]
