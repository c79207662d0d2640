# SPDX-License-Identifier: Apache-2.0
"""Requests about a group wait for its import. Nothing is answered from an empty state."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import pytest

from kcoord.coordinator.group.imports import ImportedOffset, ImportOutcome, ImportRequest
from kcoord.runtime.waiting import ShardState
from kcoord.server.api.api_table import Client, RequestContext
from kcoord.server.api.auto_create import ensure_internal_topic
from kcoord.upstream import group_imports
from kcoord.upstream.group_imports import NotFetchedError
from kcoord_protocol.api_keys import ApiKey, response_class
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.framing import decode_response_header
from kcoord_protocol.messages import (
    DeleteGroupsRequest,
    DeleteGroupsResponse,
    DescribeGroupsRequest,
    DescribeGroupsResponse,
    FindCoordinatorRequest,
    FindCoordinatorResponse,
    HeartbeatRequest,
    HeartbeatResponse,
    JoinGroupRequest,
    JoinGroupResponse,
    Message,
    OffsetCommitRequest,
    OffsetCommitResponse,
    OffsetFetchRequest,
    OffsetFetchResponse,
)
from tests.unit.upstream.harness import Dialogue, Stage, stage

R = TypeVar("R", bound=Message)

OFFSETS = [ImportedOffset("t", 0, 5, -1, "")]
FETCH_VERSION = 8


class Moving:
    """A broker that imports groups, and one of its clients."""

    def __init__(self, on_stage: Stage) -> None:
        self.other = on_stage.upstream
        self.broker = on_stage.broker
        self.imports = on_stage.imports
        self.client = on_stage.connect(None)

    async def ask(self, request: Message, version: int, answer: type[R]) -> R:
        """Sends a request and returns its response."""
        before = len(self.client.received)
        await self.client.send(self.client.frame(request, version))
        await until_received(self.client, before + 1)
        return self.response(-1, version, answer)

    def response(self, number: int, version: int, answer: type[R]) -> R:
        frame = self.client.received[number]
        api_key = ApiKey(answer.api_key)
        assert answer is response_class(api_key)
        _, start = decode_response_header(frame, api_key, version)
        return answer.decode(frame[start:], version)

    async def fetched(self, group_id: str = "g") -> tuple[int, dict[int, int]]:
        """Returns the error and the committed offsets of topic t."""
        answer = await self.ask(fetch(group_id), FETCH_VERSION, OffsetFetchResponse)
        return of_group(answer.groups[0])


async def until_received(client: Dialogue, count: int) -> None:
    async with asyncio.timeout(5):
        while len(client.received) < count:
            await asyncio.sleep(0)
            await client.settle()


def of_group(group: OffsetFetchResponse.OffsetFetchResponseGroup) -> tuple[int, dict[int, int]]:
    partitions = [partition for topic in group.topics for partition in topic.partitions]
    return group.error_code, {partition.partition_index: partition.committed_offset for partition in partitions}


def fetch(*group_ids: str) -> OffsetFetchRequest:
    return OffsetFetchRequest(
        groups=[OffsetFetchRequest.OffsetFetchRequestGroup(group_id=group_id, topics=None) for group_id in group_ids]
    )


def failing(error: Errors) -> Callable[..., object]:
    def fail(*_: object) -> object:
        raise KafkaError(error)

    return fail


def commit(group_id: str, offset: int) -> OffsetCommitRequest:
    partition = OffsetCommitRequest.OffsetCommitRequestPartition(partition_index=0, committed_offset=offset)
    topic = OffsetCommitRequest.OffsetCommitRequestTopic(name="t", partitions=[partition])
    return OffsetCommitRequest(group_id=group_id, topics=[topic])


@asynccontextmanager
async def moving(*, on_demand: bool = True) -> AsyncIterator[Moving]:
    async with stage(imports_on_demand=on_demand) as on_stage:
        broker = on_stage.broker
        client = Client(broker.apis.form, "PLAINTEXT", principal="")
        host = RequestContext(ApiKey.CREATE_TOPICS, 0, 0, "", client, broker.now_ms(), rights=None)
        created = ensure_internal_topic(broker, host, "t")
        if asyncio.isfuture(created):
            await created
        yield Moving(on_stage)


async def test_requests_about_a_group_share_one_fetch_and_wait_for_it() -> None:
    async with moving() as case:
        case.other.groups["g"] = OFFSETS
        case.other.gate.clear()
        for _ in range(3):
            await case.client.send(case.client.frame(fetch("g"), FETCH_VERSION))
        await case.client.send(case.client.frame(FindCoordinatorRequest(coordinator_keys=["g", "h"]), 4))
        assert case.client.received == []
        assert case.other.fetched == ["g", "h"]
        case.other.gate.set()
        await until_received(case.client, 4)
        for number in range(3):
            assert of_group(case.response(number, FETCH_VERSION, OffsetFetchResponse).groups[0]) == (0, {0: 5})
        coordinators = case.response(3, 4, FindCoordinatorResponse).coordinators
        assert [coordinator.error_code for coordinator in coordinators] == [0, 0]
        assert case.broker.groups.counters.imports == {"imported": 1, "offsets": 1}


async def test_a_group_is_fetched_once_and_its_own_commits_stay() -> None:
    async with moving() as case:
        case.other.groups["g"] = OFFSETS
        await case.ask(commit("g", 9), 8, OffsetCommitResponse)
        case.other.groups["g"] = [ImportedOffset("t", 0, 6, -1, "")]
        assert await case.fetched() == (0, {0: 9})
        await case.ask(DeleteGroupsRequest(groups_names=["g"]), 1, DeleteGroupsResponse)
        assert await case.fetched() == (0, {})
        assert case.other.fetched == ["g"]


async def test_a_group_that_begins_here_is_never_imported() -> None:
    async with moving() as case:
        assert await case.fetched() == (0, {})
        machine = case.broker.groups.shards.machine(0)
        assert machine is not None
        assert not machine.has_import("g"), "looking at a group leaves no record"
        await case.ask(commit("g", 1), 8, OffsetCommitResponse)
        case.other.groups["g"] = OFFSETS
        await case.ask(DeleteGroupsRequest(groups_names=["g"]), 1, DeleteGroupsResponse)
        assert await case.fetched() == (0, {})


@pytest.mark.parametrize(
    "failure",
    [KafkaError(Errors.REQUEST_TIMED_OUT, "no answer"), KafkaError(Errors.NON_EMPTY_GROUP, "it is Stable")],
    ids=lambda error: error.error.name,
)
async def test_without_the_offsets_every_api_fails_with_an_error_that_passes(
    failure: KafkaError, caplog: pytest.LogCaptureFixture
) -> None:
    async with moving() as case:
        case.other.groups["g"] = failure
        with caplog.at_level(logging.WARNING):
            loading = Errors.COORDINATOR_LOAD_IN_PROGRESS
            assert await case.fetched() == (loading, {})
            committed = await case.ask(commit("g", 1), 8, OffsetCommitResponse)
            assert committed.topics[0].partitions[0].error_code == loading
            join = JoinGroupRequest(
                group_id="g",
                session_timeout_ms=10_000,
                protocol_type="consumer",
                protocols=[JoinGroupRequest.JoinGroupRequestProtocol(name="range")],
            )
            assert (await case.ask(join, 3, JoinGroupResponse)).error_code == loading
            coordinator = await case.ask(FindCoordinatorRequest(key="g"), 3, FindCoordinatorResponse)
            assert coordinator.error_code == Errors.COORDINATOR_NOT_AVAILABLE
        message = f"Group g is not served: its offsets cannot be imported: {failure.message}"
        assert [record.getMessage() for record in caplog.records] == [message]
        assert case.broker.groups.counters.imports == {"failed": 4}
        case.other.groups["g"] = OFFSETS
        assert await case.fetched() == (0, {0: 5})


async def test_a_group_that_cannot_be_imported_does_not_fail_others_in_the_same_request() -> None:
    async with moving() as case:
        case.other.groups = {"g": KafkaError(Errors.NON_EMPTY_GROUP, "it is Stable"), "h": OFFSETS}
        answer = await case.ask(fetch("g", "h"), FETCH_VERSION, OffsetFetchResponse)
        assert {group.group_id: of_group(group) for group in answer.groups} == {
            "g": (Errors.COORDINATOR_LOAD_IN_PROGRESS, {}),
            "h": (0, {0: 5}),
        }
        described = await case.ask(DescribeGroupsRequest(groups=["g", "h"]), 5, DescribeGroupsResponse)
        assert {group.group_id: group.error_code for group in described.groups} == {
            "g": Errors.COORDINATOR_LOAD_IN_PROGRESS,
            "h": 0,
        }


async def test_requests_of_members_need_no_import() -> None:
    async with moving() as case:
        heartbeat = HeartbeatRequest(group_id="g", generation_id=1, member_id="m")
        answer = await case.ask(heartbeat, 3, HeartbeatResponse)
        assert answer.error_code == Errors.UNKNOWN_MEMBER_ID
        assert case.other.fetched == []


async def test_requests_wait_while_their_shard_is_loaded_and_keep_their_order() -> None:
    async with moving() as case:
        await case.ask(commit("g", 1), 8, OffsetCommitResponse)
        groups = case.broker.groups
        groups.own([])
        async with asyncio.timeout(5):
            while not groups.own([0]):
                await asyncio.sleep(0)
        assert groups.shards.state(0) is ShardState.LOADING
        offsets = range(2, 30)
        for offset in offsets:
            await case.client.send(case.client.frame(commit("g", offset), 8))
        await until_received(case.client, 1 + len(offsets))
        for number, _ in enumerate(offsets, 1):
            answer = case.response(number, 8, OffsetCommitResponse)
            assert answer.topics[0].partitions[0].error_code == Errors.NONE
        assert await case.fetched() == (0, {0: offsets[-1]})


async def test_a_request_waits_for_a_load_for_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_imports, "LOAD_SECONDS", 0.01)
    async with moving() as case:
        groups = case.broker.groups
        monkeypatch.setattr(type(groups.shards), "is_loading", True)
        monkeypatch.setattr(groups.shards, "state", lambda _: ShardState.LOADING)
        monkeypatch.setattr(groups.shards, "active_for", lambda _: None)
        monkeypatch.setattr(groups, "call_shard", failing(Errors.COORDINATOR_LOAD_IN_PROGRESS))
        assert (await case.fetched())[0] == Errors.COORDINATOR_LOAD_IN_PROGRESS


async def test_without_imports_on_demand_only_a_command_imports() -> None:
    async with moving(on_demand=False) as case:
        case.other.groups = dict.fromkeys(("g", "begun"), OFFSETS)
        assert await case.fetched() == (0, {})
        await case.ask(commit("begun", 1), 8, OffsetCommitResponse)
        await case.ask(DeleteGroupsRequest(groups_names=["begun"]), 1, DeleteGroupsResponse)
        assert case.other.fetched == []
        assert await case.imports.run(ImportRequest("g", dry_run=True)) == (ImportOutcome.IMPORTED, 1)
        assert await case.fetched() == (0, {})
        assert await case.imports.run(ImportRequest("g")) == (ImportOutcome.IMPORTED, 1)
        assert await case.fetched() == (0, {0: 5})
        assert await case.imports.run(ImportRequest("g")) == (ImportOutcome.PRESENT, 0)
        assert await case.imports.run(ImportRequest("begun")) == (ImportOutcome.DEPARTED, 0)
        assert await case.imports.run(ImportRequest("begun", again=True)) == (ImportOutcome.IMPORTED, 1)
        assert await case.imports.run(ImportRequest("other")) == (ImportOutcome.NOTHING, 0)
        case.other.groups["other"] = KafkaError(Errors.GROUP_AUTHORIZATION_FAILED, "it lacks a right")
        with pytest.raises(NotFetchedError, match="it lacks a right"):
            await case.imports.run(ImportRequest("other"))


async def test_a_limit_of_the_shard_fails_the_request_for_good() -> None:
    async with moving() as case:
        long = "g" * 5_000
        case.other.groups[long] = OFFSETS
        assert (await case.fetched(long))[0] == Errors.INVALID_GROUP_ID


async def test_import_records_are_forgotten_when_the_other_coordinator_has_no_offsets() -> None:
    async with moving() as case:
        members = KafkaError(Errors.NON_EMPTY_GROUP, "it is Stable")
        case.other.groups = {"gone": OFFSETS, "kept": OFFSETS, "used": OFFSETS, "here": OFFSETS}
        for group_id in case.other.groups:
            await case.fetched(group_id)
        departed = DeleteGroupsRequest(groups_names=["gone", "kept", "used"])
        await case.ask(departed, 1, DeleteGroupsResponse)
        case.other.groups = {"kept": OFFSETS, "used": members}
        assert await case.imports.forget() == 1
        machine = case.broker.groups.shards.machine(0)
        assert machine is not None
        assert sorted(machine.departed_groups()) == ["kept", "used"]
        case.other.groups = dict.fromkeys(("kept", "used"), KafkaError(Errors.REQUEST_TIMED_OUT, "no answer"))
        assert await case.imports.forget() == 0
        assert sorted(machine.departed_groups()) == ["kept", "used"]
