# SPDX-License-Identifier: Apache-2.0
"""Large responses are the same bytes as small ones, but a thread makes them, and other requests run in between."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from itertools import pairwise
from types import ModuleType
from typing import cast

import pytest

from kcoord.coordinator.transaction.shard import TransactionCoordinatorShard
from kcoord.metadata.image import MetadataImage
from kcoord.runtime.result import CoordinatorResult, OperationContext
from kcoord.runtime.shard_set import REPLIES_AT_ONCE
from kcoord.server import large_responses
from kcoord.server.api import fan_out
from kcoord.server.api.handlers import (
    consumer_group_describe,
    describe_groups,
    describe_transactions,
    describe_user_scram_credentials,
    list_groups,
    list_transactions,
    metadata,
)
from kcoord.server.large_responses import EncodedResponse, encode_in_parts, free
from kcoord_protocol.errors import Errors
from kcoord_protocol.message import Struct
from kcoord_protocol.messages import (
    ConsumerGroupDescribeRequest,
    ConsumerGroupHeartbeatRequest,
    CreateTopicsResponse,
    DeleteGroupsRequest,
    DescribeGroupsRequest,
    DescribeTransactionsRequest,
    DescribeTransactionsResponse,
    DescribeUserScramCredentialsRequest,
    InitProducerIdRequest,
    JoinGroupRequest,
    JoinGroupResponse,
    ListGroupsRequest,
    ListGroupsResponse,
    ListTransactionsRequest,
    ListTransactionsResponse,
    Message,
    MetadataRequest,
    MetadataResponse,
    OffsetCommitRequest,
)
from tests.unit.server.harness import SHARDS, Harness, image_of

LARGE = 2


async def with_groups() -> Harness:
    """Returns a broker with simple groups, groups of three members of both types, and transactional ids."""
    harness = await Harness(group_initial_rebalance_delay_ms="0").open()
    for number in range(3):
        join = ConsumerGroupHeartbeatRequest(
            group_id="consumer",
            member_id=f"m{number}",
            rebalance_timeout_ms=1_000,
            subscribed_topic_names=["t3"],
            topic_partitions=[],
        )
        assert (await harness.call(join, 1)).error_code == 0
        protocol = JoinGroupRequest.JoinGroupRequestProtocol(name="range", metadata=b"x")
        joined = harness.send(
            JoinGroupRequest(
                group_id="classic",
                session_timeout_ms=10_000,
                rebalance_timeout_ms=10_000,
                group_instance_id=f"i{number}",
                protocol_type="consumer",
                protocols=[protocol],
            ),
            5,
        )
        await asyncio.sleep(0)
        assert joined is not None
    partition = OffsetCommitRequest.OffsetCommitRequestPartition(partition_index=0, committed_offset=1)
    topic = OffsetCommitRequest.OffsetCommitRequestTopic(name="t1", partitions=[partition])
    for number in range(20):
        commit = OffsetCommitRequest(group_id=f"g{number}", generation_id_or_member_epoch=-1, topics=[topic])
        await harness.call(commit, 8)
    harness.broker.topics.producer_ids.add_block(0, 1_000)
    all_shards = range(SHARDS)
    harness.broker.transactions.shards.open_shards(SHARDS, all_shards, set(all_shards), harness.now)
    for number in range(20):
        init = InitProducerIdRequest(transactional_id=f"id{number}", transaction_timeout_ms=1_000)
        assert (await harness.call(init, 5)).error_code == 0
    return harness


async def answer(harness: Harness, request: Message, version: int) -> tuple[bytes, bool]:
    """Returns the encoded response, and whether a thread has encoded it."""
    response = harness.send(request, version)
    if asyncio.isfuture(response):
        response = await response
    return response.encode(version), isinstance(response, EncodedResponse)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("handler", "request_"),
    [
        (consumer_group_describe, ConsumerGroupDescribeRequest(group_ids=["consumer", "g1", "none"])),
        (describe_groups, DescribeGroupsRequest(groups=["classic", "g1", "none"])),
        (describe_transactions, DescribeTransactionsRequest(transactional_ids=["id1", "none", "id2", "id1", ""])),
        (
            describe_user_scram_credentials,
            DescribeUserScramCredentialsRequest(
                users=[DescribeUserScramCredentialsRequest.UserName(name=name) for name in "aba"]
            ),
        ),
        (list_groups, ListGroupsRequest()),
        (list_transactions, ListTransactionsRequest(state_filters=["Empty", "none"], producer_id_filters=[1, 4, 5, 9])),
        (metadata, MetadataRequest(topics=None)),
        (metadata, MetadataRequest(topics=[MetadataRequest.MetadataRequestTopic(name=name) for name in "ab"])),
    ],
)
async def test_a_large_response_has_the_same_bytes_as_a_small_one(
    monkeypatch: pytest.MonkeyPatch, handler: ModuleType, request_: Message
) -> None:
    harness = await with_groups()
    harness.broker.image = image_of({"a": 2, "b": 3, **{f"t{number}": 1 for number in range(130)}})
    for version in handler.VERSIONS:
        if version == 0 and handler is metadata:
            continue
        monkeypatch.undo()
        small, was_encoded = await answer(harness, request_, version)
        assert not was_encoded
        monkeypatch.setattr(handler, "LARGE_RESPONSE_ITEMS", LARGE)
        monkeypatch.setattr(large_responses, "_ENCODED_AT_ONCE", 3)
        large, was_encoded = await answer(harness, request_, version)
        assert was_encoded
        assert large == small


async def test_the_members_of_a_large_classic_group_are_answered_in_several_turns() -> None:
    harness = await Harness(group_initial_rebalance_delay_ms="3000").open()
    join = JoinGroupRequest(
        group_id="large",
        session_timeout_ms=10_000,
        rebalance_timeout_ms=10_000,
        protocol_type="consumer",
        protocols=[JoinGroupRequest.JoinGroupRequestProtocol(name="range", metadata=b"x")],
    )
    waiting = [cast("asyncio.Future[JoinGroupResponse]", harness.send(join, 3)) for _ in range(2 * REPLIES_AT_ONCE + 1)]
    # A member that joins during the delay extends it once.
    await harness.pass_time(3_000)
    harness.now += 3_000
    harness.worker.on_clock_moved()
    answered = [0]
    for _ in range(20):
        await asyncio.sleep(0)
        answered.append(sum(future.done() for future in waiting))
    assert answered[-1] == len(waiting)
    assert max(after - before for before, after in pairwise(answered)) == REPLIES_AT_ONCE
    leaders = [future.result() for future in waiting if future.result().members]
    assert [len(leader.members) for leader in leaders] == [len(waiting)]


def test_long_lists_of_items_are_encoded_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    config = CreateTopicsResponse.CreatableTopicConfigs(name="c", value="v")
    topics = [
        CreateTopicsResponse.CreatableTopicResult(name=f"t{number}", configs=[config] * 30) for number in range(20)
    ]
    response, sizes = CreateTopicsResponse(topics=topics), []
    whole, encode = response.encode(7), CreateTopicsResponse.encode

    def noted(message: CreateTopicsResponse, version: int) -> bytes:
        sizes.append(len(message.topics))
        return encode(message, version)

    monkeypatch.setattr(CreateTopicsResponse, "encode", noted)
    monkeypatch.setattr(large_responses, "_ENCODED_AT_ONCE", 100)
    assert encode_in_parts(response, 7) == whole
    assert max(sizes) == 3


async def test_a_thread_makes_a_large_response() -> None:
    harness = await Harness().open()
    threads: list[int] = []

    def make() -> ListGroupsResponse:
        threads.append(threading.get_ident())
        return ListGroupsResponse(error_code=7)

    response = await harness.broker.made_in_thread(make, 5)
    assert response.encode(5) == ListGroupsResponse(error_code=7).encode(5)
    assert threads != [threading.get_ident()]


@pytest.mark.parametrize(
    ("handler", "request_", "listed_type"),
    [
        (list_groups, ListGroupsRequest(), ListGroupsResponse.ListedGroup),
        (list_transactions, ListTransactionsRequest(), ListTransactionsResponse.TransactionState),
    ],
)
async def test_long_lists_take_several_turns(
    monkeypatch: pytest.MonkeyPatch, handler: ModuleType, request_: Message, listed_type: type[Struct]
) -> None:
    harness = await with_groups()
    monkeypatch.setattr(handler, "LARGE_RESPONSE_ITEMS", LARGE)
    monkeypatch.setattr(fan_out, "LISTED_PER_TURN", 2)
    listed: Counter[int] = Counter()
    service = harness.groups if handler is list_groups else harness.broker.transactions
    call_shard = service.call_shard
    turn = 0

    def count() -> None:
        nonlocal turn
        turn += 1
        ticking.append(asyncio.get_running_loop().call_soon(count))

    def noted(*arguments: object) -> object:
        reply: object = call_shard(*arguments)  # type: ignore[arg-type]
        listed[turn] += sum(isinstance(item, listed_type) for item in cast("list[object]", reply))
        return reply

    monkeypatch.setattr(service, "call_shard", noted)
    ticking = [asyncio.get_running_loop().call_soon(count)]
    await answer(harness, request_, handler.VERSIONS.stop - 1)
    ticking[-1].cancel()
    assert listed.total() == (22 if handler is list_groups else 20)
    assert max(listed.values()) == 2


async def test_equal_metadata_requests_share_a_response_until_the_image_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness = await Harness().open()
    monkeypatch.setattr(metadata, "LARGE_RESPONSE_ITEMS", LARGE)
    made: list[MetadataImage] = []
    topics = metadata._topics

    def noted(image: MetadataImage, *arguments: object) -> object:
        made.append(image)
        return topics(image, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(metadata, "_topics", noted)
    request = MetadataRequest(topics=None)
    for image in (image_of({"a": 5}), image_of({"a": 6})):
        harness.broker.image = image
        futures = [harness.send(request, 13) for _ in range(3)]
        first, second, third = await asyncio.gather(*futures)  # type: ignore[call-overload]
        first.throttle_time_ms = 100
        assert (second.throttle_time_ms, second.encode(13)) == (0, third.encode(13))
        made_before = len(made)
        assert await answer(harness, request, 13) == (second.encode(13), True)
        assert len(made) == made_before
        await answer(harness, request, 12)
    assert len(made) == 4


async def test_a_client_that_is_gone_does_not_cancel_a_shared_response(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = await Harness().open()
    monkeypatch.setattr(metadata, "LARGE_RESPONSE_ITEMS", LARGE)
    harness.broker.image = image_of({"a": 5})
    gone, waiting = harness.send(MetadataRequest(topics=None), 13), harness.send(MetadataRequest(topics=None), 13)
    assert asyncio.isfuture(gone) and asyncio.isfuture(waiting)
    gone.cancel()
    assert isinstance(await waiting, EncodedResponse)


def test_a_response_is_freed_but_not_the_lists_of_others() -> None:
    """The replicas in a response to Metadata are lists of the image."""
    replicas = [1, 2]
    partition = MetadataResponse.MetadataResponsePartition(replica_nodes=replicas)
    few = MetadataResponse(topics=[MetadataResponse.MetadataResponseTopic(partitions=[partition])])
    many = MetadataResponse(topics=[MetadataResponse.MetadataResponseTopic(partitions=[partition])] * 1_001)
    topic = few.topics[0]
    free(few)
    free(many)
    assert (few.topics, many.topics, topic.partitions, replicas) == ([], [], [], [1, 2])


async def test_a_request_with_many_groups_takes_several_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = await with_groups()
    monkeypatch.setattr(fan_out, "NAMED_PER_TURN", 4)
    names = [f"g{number}" for number in range(20)]
    answered = harness.send(DeleteGroupsRequest(groups_names=[*names, "consumer", "none", "g1"]), 2)
    assert asyncio.isfuture(answered)
    turns = 0
    while not answered.done():
        await asyncio.sleep(0)
        turns += 1
    results = answered.result().results
    assert turns >= 5
    assert [result.group_id for result in results] == [*names, "consumer", "none"]
    codes = [Errors.NONE] * 20 + [Errors.NON_EMPTY_GROUP, Errors.GROUP_ID_NOT_FOUND]
    assert [result.error_code for result in results] == codes
    listed = await harness.call(ListGroupsRequest(), 5)
    assert {group.group_id for group in listed.groups} == {"classic", "consumer"}


async def test_a_request_with_many_transactional_ids_takes_several_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = await with_groups()
    monkeypatch.setattr(fan_out, "NAMED_PER_TURN", 4)
    described: list[int] = []
    describe = TransactionCoordinatorShard.describe_transactions

    def noted(
        shard: TransactionCoordinatorShard, context: OperationContext, ids: list[str]
    ) -> CoordinatorResult[list[DescribeTransactionsResponse.TransactionState]]:
        described.append(len(ids))
        return describe(shard, context, ids)

    monkeypatch.setattr(TransactionCoordinatorShard, "describe_transactions", noted)
    ids = ["none", *(f"id{number}" for number in range(20)), "id1"]
    answered = harness.send(DescribeTransactionsRequest(transactional_ids=ids), 0)
    assert asyncio.isfuture(answered)
    assert not described
    asked = [0]
    while not answered.done():
        await asyncio.sleep(0)
        asked.append(len(described))
    assert max(after - before for before, after in pairwise(asked)) == 1
    assert max(described) <= 4 and sum(described) == 21
    states = answered.result().transaction_states
    assert [state.transactional_id for state in states] == ids
    assert [state.error_code for state in states] == [Errors.TRANSACTIONAL_ID_NOT_FOUND] + [Errors.NONE] * 21
