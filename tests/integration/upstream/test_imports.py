# SPDX-License-Identifier: Apache-2.0
"""Groups of the upstream's own coordinator move to kcoord: another kcoord is the upstream here."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

from kcoord.client import AdminClient, Consumer, ConsumerGroupMetadata, OffsetAndMetadata, Producer, TopicPartition
from kcoord.runtime.serde import CoordinatorSerde
from kcoord.testing import KcoordBroker, start_broker
from kcoord.upstream.own_topics import OFFSETS_TOPIC
from kcoord_protocol.api_keys import response_class
from kcoord_protocol.errors import Errors
from kcoord_protocol.messages import (
    ConsumerGroupDescribeRequest,
    ConsumerGroupHeartbeatRequest,
    DescribeGroupsRequest,
    FindCoordinatorRequest,
    FindCoordinatorResponse,
    JoinGroupRequest,
    Message,
    OffsetCommitRequest,
    OffsetCommitResponse,
    OffsetCommitValue,
    OffsetDeleteRequest,
    OffsetFetchRequest,
    OffsetFetchResponse,
)
from tests.integration.upstream.gateways import Gateways
from tests.integration.wire import WireClient
from tests.support.kcoord_process import KcoordProcess

TOPIC = "orders"
NUMBERS = count()
SERDE = CoordinatorSerde()
FIRST = TopicPartition(TOPIC, 0)
SECOND = TopicPartition(TOPIC, 1)


@pytest.fixture(scope="module")
def upstream() -> Iterator[KcoordBroker]:
    with start_broker() as broker:
        broker.create_topic(TOPIC, 3)
        yield broker


@pytest.fixture
def group(upstream: KcoordBroker) -> Iterator[str]:
    """A group that the upstream has offsets of."""
    group_id = f"group{next(NUMBERS)}"
    upstream.commit(group_id, {TOPIC: {0: 10, 1: 20}})
    yield group_id
    upstream.clear_faults()


@pytest.fixture(scope="module")
def gateways(upstream: KcoordBroker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateways]:
    gateways = Gateways(upstream.bootstrap_servers, tmp_path_factory)
    yield gateways
    gateways.stop()


@pytest.fixture
def gateway(gateways: Gateways) -> KcoordProcess:
    return gateways.last()


async def committed(gateway: KcoordProcess, group_id: str) -> dict[TopicPartition, OffsetAndMetadata | None]:
    async with AdminClient(bootstrap_servers=gateway.address) as admin:
        return (await admin.list_consumer_group_offsets([group_id]))[group_id]


async def test_offsets_come_over_with_epochs_and_metadata(upstream: KcoordBroker, gateway: KcoordProcess) -> None:
    offsets = {FIRST: OffsetAndMetadata(5, "since\nMonday", 3), SECOND: OffsetAndMetadata(7)}
    async with AdminClient(bootstrap_servers=upstream.bootstrap_servers) as admin:
        (await admin.alter_consumer_group_offsets("epochs", offsets)).all()
    assert await committed(gateway, "epochs") == offsets


def logged(upstream: KcoordBroker, group_id: str) -> list[str]:
    """Returns the records of a group in the log of the groups: their names, and the offsets."""
    lines = []
    for stored in upstream.records(OFFSETS_TOPIC):
        record = SERDE.deserialize(stored.key, stored.value)
        if record is None or getattr(record.key, "group", None) != group_id:
            continue
        value = record.value
        offset = f" {value.offset}" if isinstance(value, OffsetCommitValue) else "" if value is not None else " gone"
        lines.append(f"{type(record.key).__name__.removesuffix('Key')}{offset}")
    return lines


def ask(gateway: KcoordProcess, request: Message, version: int) -> Message:
    with WireClient(gateway.port) as client:
        return client.call(request, version, response_class(request.api_key))


def first_requests() -> list[tuple[Message, int]]:
    """Returns a request of each API of groups. The id of the group is filled in later."""
    commit = OffsetCommitRequest.OffsetCommitRequestPartition(partition_index=2, committed_offset=1)
    offset = OffsetDeleteRequest.OffsetDeleteRequestPartition(partition_index=2)
    protocol = JoinGroupRequest.JoinGroupRequestProtocol(name="range", metadata=b"")
    return [
        (FindCoordinatorRequest(key="", key_type=0), 3),
        (FindCoordinatorRequest(coordinator_keys=[""], key_type=0), 6),
        (JoinGroupRequest(session_timeout_ms=10_000, protocol_type="consumer", protocols=[protocol]), 3),
        (
            ConsumerGroupHeartbeatRequest(
                member_id="m", rebalance_timeout_ms=1000, subscribed_topic_names=[TOPIC], topic_partitions=[]
            ),
            1,
        ),
        (OffsetFetchRequest(topics=None), 2),
        (OffsetFetchRequest(groups=[OffsetFetchRequest.OffsetFetchRequestGroup(topics=None)]), 8),
        (
            OffsetCommitRequest(topics=[OffsetCommitRequest.OffsetCommitRequestTopic(name=TOPIC, partitions=[commit])]),
            2,
        ),
        (DescribeGroupsRequest(groups=[""]), 5),
        (ConsumerGroupDescribeRequest(group_ids=[""]), 0),
        (
            OffsetDeleteRequest(topics=[OffsetDeleteRequest.OffsetDeleteRequestTopic(name=TOPIC, partitions=[offset])]),
            0,
        ),
    ]


def with_group(request: Message, group_id: str) -> Message:
    """Returns the request with the id of the group at the place that its API has for it."""
    match request:
        case FindCoordinatorRequest() if request.coordinator_keys:
            request.coordinator_keys = [group_id]
        case FindCoordinatorRequest():
            request.key = group_id
        case OffsetFetchRequest() if request.groups:
            request.groups[0].group_id = group_id
        case DescribeGroupsRequest():
            request.groups = [group_id]
        case ConsumerGroupDescribeRequest():
            request.group_ids = [group_id]
        case (
            JoinGroupRequest()
            | ConsumerGroupHeartbeatRequest()
            | OffsetFetchRequest()
            | OffsetCommitRequest()
            | OffsetDeleteRequest()
        ):
            request.group_id = group_id
    return request


@pytest.mark.parametrize(
    ("request_", "version"), first_requests(), ids=lambda value: getattr(value, "message_name", value)
)
async def test_a_group_is_imported_before_the_first_response(
    upstream: KcoordBroker, gateway: KcoordProcess, group: str, request_: Message, version: int
) -> None:
    ask(gateway, with_group(request_, group), version)
    assert logged(upstream, group)[:3] == ["GroupImport", "OffsetCommit 10", "OffsetCommit 20"]
    assert await committed(gateway, group) == {FIRST: OffsetAndMetadata(10), SECOND: OffsetAndMetadata(20)} | (
        {TopicPartition(TOPIC, 2): OffsetAndMetadata(1)} if isinstance(request_, OffsetCommitRequest) else {}
    )


async def commit(address: str, group_id: str, offset: int) -> None:
    async with AdminClient(bootstrap_servers=address) as admin:
        (await admin.alter_consumer_group_offsets(group_id, {FIRST: offset})).all()


async def delete(gateway: KcoordProcess, group_id: str) -> None:
    async with AdminClient(bootstrap_servers=gateway.address) as admin:
        (await admin.delete_consumer_groups([group_id])).all()


async def test_a_group_that_has_moved_on_is_not_overwritten(
    upstream: KcoordBroker, gateways: Gateways, group: str
) -> None:
    gateway = gateways.start()
    await commit(gateway.address, group, 11)
    upstream.commit(group, {TOPIC: {0: 12, 2: 5}})
    moved = {FIRST: OffsetAndMetadata(11), SECOND: OffsetAndMetadata(20)}
    assert await committed(gateway, group) == moved
    gateway.restart(signal.SIGKILL)
    assert await committed(gateway, group) == moved
    gateway.kill()
    assert await committed(gateways.start(), group) == moved


async def test_a_group_that_was_deleted_does_not_come_back(
    upstream: KcoordBroker, gateways: Gateways, group: str
) -> None:
    gateway, begun = gateways.start(), f"{group}-begun"
    await committed(gateway, group)
    await commit(gateway.address, begun, 1)
    for group_id in (group, begun):
        await delete(gateway, group_id)
        upstream.commit(group_id, {TOPIC: {0: 12}})
        assert await committed(gateway, group_id) == {}
    gateway.restart(signal.SIGKILL)
    gateway.kill()
    successor = gateways.start()
    for group_id in (group, begun):
        assert await committed(successor, group_id) == {}


async def test_offsets_without_a_group_stay_deleted_after_a_restart(
    upstream: KcoordBroker, gateways: Gateways, group: str
) -> None:
    gateway = gateways.start()
    async with AdminClient(bootstrap_servers=gateway.address) as admin:
        (await admin.delete_consumer_group_offsets(group, [FIRST, SECOND])).all()
    gateway.restart(signal.SIGKILL)
    assert await committed(gateway, group) == {}


async def test_looking_at_unknown_groups_writes_nothing(upstream: KcoordBroker, gateway: KcoordProcess) -> None:
    for number in range(10):
        assert await committed(gateway, f"unknown{number}") == {}
    assert not [line for number in range(10) for line in logged(upstream, f"unknown{number}")]


async def test_a_group_with_members_in_the_upstream_waits_for_their_end(
    upstream: KcoordBroker, gateway: KcoordProcess, group: str
) -> None:
    async with Consumer(
        bootstrap_servers=upstream.bootstrap_servers, group_id=group, enable_auto_commit=False
    ) as consumer:
        consumer.subscribe([TOPIC])
        async with asyncio.timeout(30):
            while not consumer.assignment:
                await consumer.poll(100)
        located = ask(gateway, FindCoordinatorRequest(coordinator_keys=[group], key_type=0), 4)
        assert isinstance(located, FindCoordinatorResponse)
        (coordinator,) = located.coordinators
        assert coordinator.error_code == Errors.COORDINATOR_NOT_AVAILABLE
        assert coordinator.error_message is not None
        assert f"group {group} is in use in the upstream: it is " in coordinator.error_message
        fetch = with_group(OffsetFetchRequest(topics=None), group)
        answer = ask(gateway, fetch, 2)
        assert isinstance(answer, OffsetFetchResponse)
        assert answer.error_code == Errors.COORDINATOR_LOAD_IN_PROGRESS
        # A client simply waits. It gets the last commit of the member that leaves.
        waiting = asyncio.create_task(committed(gateway, group))
        await consumer.commit({FIRST: 13})
        assert not waiting.done()
    assert (await waiting)[FIRST] == OffsetAndMetadata(13)
    lines = [line for line in gateway.log.splitlines() if f"Group {group} is not served" in line]
    assert 1 <= len(lines) <= 3, "each state of the group is logged once"


async def test_offsets_of_an_open_transaction_are_waited_for(
    upstream: KcoordBroker, gateways: Gateways, group: str
) -> None:
    gateway = gateways.last(kcoord_upstream_request_timeout_ms="500")
    async with Producer(bootstrap_servers=upstream.bootstrap_servers, transactional_id=group) as producer:
        await producer.init_transactions()
        await producer.begin_transaction()
        await producer.send_offsets_to_transaction({FIRST: OffsetAndMetadata(14)}, ConsumerGroupMetadata(group))
        waiting = asyncio.create_task(committed(gateway, group))
        wait = f"an open transaction in the upstream has offsets of group {group}"
        async with asyncio.timeout(20):
            while wait not in gateway.log:
                await asyncio.sleep(0.1)
        await producer.commit_transaction()
    assert (await waiting)[FIRST] == OffsetAndMetadata(14)


@pytest.mark.parametrize("commits", [True, False])
async def test_a_transaction_adds_to_what_is_imported(gateway: KcoordProcess, group: str, commits: bool) -> None:
    async with Producer(bootstrap_servers=gateway.address, transactional_id=group) as producer:
        await producer.init_transactions()
        await producer.begin_transaction()
        await producer.send_offsets_to_transaction({FIRST: OffsetAndMetadata(15)}, ConsumerGroupMetadata(group))
        await (producer.commit_transaction() if commits else producer.abort_transaction())
    offsets = {FIRST: OffsetAndMetadata(15 if commits else 10), SECOND: OffsetAndMetadata(20)}
    assert await committed(gateway, group) == offsets


@pytest.mark.parametrize(
    "fault",
    [
        {"api": "OffsetFetch", "error": "COORDINATOR_LOAD_IN_PROGRESS"},
        {"api": "FindCoordinator", "error": "COORDINATOR_NOT_AVAILABLE"},
        {"api": "DescribeGroups", "close": True},
        {"api": "OffsetFetch", "drop": True},
        {"api": "OffsetFetch", "error": "GROUP_AUTHORIZATION_FAILED"},
    ],
    ids=str,
)
async def test_nothing_is_served_from_an_empty_state_if_the_upstream_does_not_answer(
    upstream: KcoordBroker, gateways: Gateways, group: str, fault: dict[str, Any]
) -> None:
    gateway = gateways.last(kcoord_upstream_request_timeout_ms="500")
    with upstream.inject_fault(**fault, client_id="kcoord-1000000", times=None) as injected:
        fetched = ask(gateway, with_group(OffsetFetchRequest(topics=None), group), 2)
        assert isinstance(fetched, OffsetFetchResponse)
        assert fetched.error_code == Errors.COORDINATOR_LOAD_IN_PROGRESS
        commit = OffsetCommitRequest.OffsetCommitRequestPartition(partition_index=2, committed_offset=1)
        topic = OffsetCommitRequest.OffsetCommitRequestTopic(name=TOPIC, partitions=[commit])
        done = ask(gateway, OffsetCommitRequest(group_id=group, topics=[topic]), 2)
        assert isinstance(done, OffsetCommitResponse)
        assert done.topics[0].partitions[0].error_code == Errors.COORDINATOR_LOAD_IN_PROGRESS
        assert injected.hits
    assert await committed(gateway, group) == {FIRST: OffsetAndMetadata(10), SECOND: OffsetAndMetadata(20)}
    if fault.get("error") == "GROUP_AUTHORIZATION_FAILED":
        assert f"kcoord's user in the upstream lacks the right Describe on group {group}" in gateway.log


async def test_off_imports_nothing(upstream: KcoordBroker, gateways: Gateways, group: str) -> None:
    gateway = gateways.start(kcoord_upstream_import="off")
    assert await committed(gateway, group) == {}
    await commit(gateway.address, group, 1)
    assert await committed(gateway, group) == {FIRST: OffsetAndMetadata(1)}


async def test_many_groups_move_at_once(upstream: KcoordBroker, gateway: KcoordProcess, group: str) -> None:
    group_ids = [f"{group}-{number}" for number in range(100)]
    async with AdminClient(bootstrap_servers=upstream.bootstrap_servers) as admin:
        await asyncio.gather(
            *(
                admin.alter_consumer_group_offsets(group_id, {FIRST: number})
                for number, group_id in enumerate(group_ids)
            )
        )
    async with AdminClient(bootstrap_servers=gateway.address) as admin:
        offsets = (await admin.list_consumer_group_offsets(group_ids)).all()
    assert [offsets[group_id] for group_id in group_ids] == [
        {FIRST: OffsetAndMetadata(number)} for number in range(100)
    ]
