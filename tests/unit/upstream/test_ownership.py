# SPDX-License-Identifier: Apache-2.0
"""Several instances: what one of them answers for all, and what it does when it owns no shards any more."""

from __future__ import annotations

import asyncio

import pytest

from kcoord.client.cluster import Cluster
from kcoord.metadata.shared import new_record_version_record
from kcoord.runtime.shard_map import RECORD_VERSION, Instance, ShardMap
from kcoord.runtime.waiting import ShardState
from kcoord.upstream import instance_group
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import (
    DescribeClusterRequest,
    DescribeClusterResponse,
    DescribeGroupsRequest,
    DescribeGroupsResponse,
    FindCoordinatorRequest,
    FindCoordinatorResponse,
    MetadataRequest,
    MetadataResponse,
)
from tests.unit.upstream.harness import NODE_ID, Stage, stage
from tests.unit.upstream.test_versions import converse, decoded

OWN_ID = 100
LESSER, GREATER = 99, 101
TAKEN = ShardMap(10, 1, {}, [LESSER])
"""The map of a later generation, in which another instance owns the only shard of these tests."""


def other(node_id: int, *broker_ids: int) -> Instance:
    return Instance(node_id, f"host{node_id}", 9000 + node_id, "r", dict.fromkeys(broker_ids, 7000))


async def find(on_stage: Stage, port: int | None = None) -> tuple[int, int, str, int]:
    dialogue = on_stage.connect(port)
    await dialogue.send(dialogue.frame(FindCoordinatorRequest(coordinator_keys=["g"]), 4))
    (answer,) = decoded(dialogue.received[-1], FindCoordinatorResponse, 4).coordinators
    return answer.error_code, answer.node_id, answer.host, answer.port


async def describe(on_stage: Stage) -> int:
    dialogue = on_stage.connect(None)
    await dialogue.send(dialogue.frame(DescribeGroupsRequest(groups=["g"]), 5))
    (group,) = decoded(dialogue.received[-1], DescribeGroupsResponse, 5).groups
    return group.error_code


async def test_every_port_names_the_owner_of_a_group() -> None:
    async with stage() as on_stage:
        assert await find(on_stage) == (0, OWN_ID, "gateway", 9092)
        await on_stage.rebalance(other(LESSER), other(GREATER))
        assert await find(on_stage) == (0, OWN_ID, "gateway", 9092), "it keeps its shard"
        await on_stage.rebalance(other(LESSER), last=TAKEN)
        for port in (None, NODE_ID):
            assert await find(on_stage, port) == (0, LESSER, "host99", 9099)


async def test_there_are_no_coordinators_of_share_groups() -> None:
    async with stage() as on_stage:
        dialogue = on_stage.connect(None)
        await dialogue.send(dialogue.frame(FindCoordinatorRequest(key_type=2, coordinator_keys=["g:t:0"]), 6))
        (answer,) = decoded(dialogue.received[-1], FindCoordinatorResponse, 6).coordinators
        assert answer.error_code == Errors.INVALID_REQUEST


async def test_an_instance_that_loses_a_shard_closes_it() -> None:
    async with stage() as on_stage:
        assert await describe(on_stage) == Errors.NONE
        await on_stage.rebalance(other(LESSER), last=TAKEN)
        assert await describe(on_stage) == Errors.NOT_COORDINATOR
        assert on_stage.broker.why_not_ready() is None, "it names the owner"
        figures = on_stage.broker.instance_figures()
        assert figures is not None
        assert (figures.shards, figures.instances, figures.generation) == (0, 2, 2)
        assert on_stage.broker.groups.shards.state(0) is ShardState.CLOSED
        await on_stage.rebalance()
        await on_stage.broker.groups.loaded()
        assert await describe(on_stage) == Errors.NONE


async def test_all_instances_are_brokers_and_share_the_ports_of_the_upstream() -> None:
    async with stage() as on_stage:
        await on_stage.rebalance(other(GREATER, NODE_ID), other(LESSER, NODE_ID))
        assert on_stage.group.shard_map is not None
        place = on_stage.group.shard_map.address_of_broker(NODE_ID)
        assert place is not None
        brokers = [MetadataResponse.MetadataResponseBroker(node_id=NODE_ID, host="upstream", port=1)]
        frame = await converse(
            on_stage.connect(), MetadataRequest(topics=[]), 12, 12, MetadataResponse(brokers=brokers, topics=[])
        )
        expected = [
            (NODE_ID, *place),
            (LESSER, "host99", 9099),
            (OWN_ID, "gateway", 9092),
            (GREATER, "host101", 9101),
        ]
        shown = decoded(frame, MetadataResponse, 12).brokers
        assert [(broker.node_id, broker.host, broker.port) for broker in shown] == expected
        nodes = [DescribeClusterResponse.DescribeClusterBroker(broker_id=NODE_ID, host="upstream", port=1)]
        frame = await converse(
            on_stage.connect(), DescribeClusterRequest(), 2, 2, DescribeClusterResponse(brokers=nodes)
        )
        cluster = decoded(frame, DescribeClusterResponse, 2).brokers
        assert [(broker.broker_id, broker.host, broker.port) for broker in cluster] == expected


async def test_the_record_version_that_all_instances_read_is_shared() -> None:
    async with stage() as on_stage:
        state = on_stage.shared.state
        state.record_version = RECORD_VERSION - 1
        await on_stage.rebalance(other(LESSER))
        while state.record_version < RECORD_VERSION:
            await asyncio.sleep(0)


async def test_an_instance_that_cannot_read_the_records_of_the_others_owns_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with stage() as on_stage:
        assert await describe(on_stage) == Errors.NONE
        await on_stage.shared.append([new_record_version_record(RECORD_VERSION + 1)])
        await on_stage.rebalance()
        assert not on_stage.broker.groups.shard_ids
        assert on_stage.ownership.failed.result().error is Errors.UNSUPPORTED_VERSION
        # The process ends, and gets another map before that.
        await on_stage.rebalance(other(LESSER))
        await asyncio.sleep(0.01)
        assert not on_stage.broker.groups.shard_ids
        assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_request_after_the_end_of_the_lease_finds_all_shards_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No timer runs between the time at which the process continues and the request."""
    async with stage() as on_stage:
        assert await describe(on_stage) == Errors.NONE
        late_ms = instance_group.lease_clock_ms() + on_stage.broker.config.kcoord_upstream_session_timeout_ms
        monkeypatch.setattr(instance_group, "lease_clock_ms", lambda: late_ms)
        on_stage.group_of_all.error = KafkaError(Errors.NETWORK_EXCEPTION)
        assert await describe(on_stage) == Errors.NOT_COORDINATOR
        assert (await find(on_stage))[:2] == (Errors.COORDINATOR_NOT_AVAILABLE, -1)
        assert not on_stage.broker.groups.shard_ids
        assert on_stage.broker.why_not_ready() == "the upstream does not confirm this instance; it owns no shards"
        figures = on_stage.broker.instance_figures()
        assert figures is not None
        assert (figures.shards, figures.lease_ms, figures.lost_leases) == (0, 0, 1)
        # The upstream answers again: it has not given the shards to anyone.
        on_stage.group_of_all.error = None
        on_stage.group.hurry()
        while (await find(on_stage))[0]:
            await asyncio.sleep(0)
        await on_stage.broker.groups.loaded()
        assert await describe(on_stage) == Errors.NONE


def test_the_clock_of_logs_begins_at_the_wall_clock_and_counts_while_the_machine_is_suspended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock_ms = instance_group.log_clock()
    began_ms, later_ms = clock_ms(), instance_group.lease_clock_ms() + 86_400_000
    assert abs(began_ms - Cluster.wall_clock_ms()) < 60_000
    monkeypatch.setattr(instance_group, "lease_clock_ms", lambda: later_ms)
    assert clock_ms() >= began_ms + 86_400_000


async def test_a_failure_that_nobody_expects_is_an_answer_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with stage() as on_stage:
        failing = on_stage.group_of_all

        async def beat(request: object) -> bool:
            raise ZeroDivisionError

        with monkeypatch.context() as broken:
            broken.setattr(failing, "beat", beat)
            on_stage.group.hurry()
            await asyncio.sleep(0.01)
        assert "Heartbeat in the group kcoord of the upstream failed" in caplog.text
        failing.rebalances = True
        while failing.rebalances:
            await asyncio.sleep(0.01)


async def test_a_stop_leaves_the_group_without_shards() -> None:
    async with stage() as on_stage:
        await on_stage.ownership.leave()
        assert on_stage.group_of_all.has_left
        assert on_stage.shared.announced == [OWN_ID] * 2
        assert not on_stage.broker.groups.shard_ids
        assert not on_stage.group.holds_lease()


async def test_the_announcement_of_an_instance_causes_a_heartbeat_at_once() -> None:
    async with stage() as on_stage:
        await on_stage.rebalance(other(LESSER))
        group = on_stage.group_of_all
        group.others, group.rebalances = [], True
        on_stage.shared.on_instance(OWN_ID)
        await asyncio.sleep(0.01)
        assert group.rebalances, "its own hint changes nothing"
        on_stage.shared.on_instance(LESSER)
        await asyncio.sleep(0.01)
        assert not group.rebalances, "it has joined again"


async def test_a_process_that_was_replaced_gives_everything_up() -> None:
    async with stage() as on_stage:
        on_stage.group_of_all.error = KafkaError(Errors.FENCED_INSTANCE_ID)
        on_stage.group.hurry()
        error = await on_stage.ownership.failed
        assert error.error is Errors.FENCED_INSTANCE_ID
        assert await describe(on_stage) == Errors.NOT_COORDINATOR


async def test_other_ports_of_this_instance_are_announced() -> None:
    async with stage() as on_stage:
        on_stage.gateway.ports[2] = 9102
        on_stage.ownership.join(on_stage.gateway.instance())
        while on_stage.group_of_all.generation < 2:
            await asyncio.sleep(0)
        await on_stage.rebalance(other(LESSER))
        assert on_stage.ownership.address_of_broker(2) == ("gateway", 9102)
        assert on_stage.ownership.address_of_broker(3) is None
