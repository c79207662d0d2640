# SPDX-License-Identifier: Apache-2.0
"""The quota on the time of requests: what counts, what the client is told, and that fast paths respect it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from kcoord.metrics.measures import RequestMeasures
from kcoord.server.net.muting import Mute
from kcoord.server.net.path_settings import PathSettings
from kcoord.server.observe.broker_metrics import MeasuredPath
from kcoord.server.quota_use import response_bytes
from kcoord_protocol.acls import CLUSTER_NAME, AclOperation, PermissionType, ResourceType
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors
from kcoord_protocol.messages import (
    ApiVersionsRequest,
    ApiVersionsResponse,
    CreateTopicsRequest,
    CreateTopicsResponse,
    FetchRequest,
    FetchResponse,
    ListGroupsRequest,
    ListGroupsResponse,
    MetadataRequest,
    MetadataResponse,
    OffsetCommitRequest,
    OffsetCommitResponse,
    ProduceRequest,
    ProduceResponse,
    WriteTxnMarkersRequest,
    WriteTxnMarkersResponse,
)
from kcoord_protocol.record_batch import Record, encode_batch
from tests.unit.server.people import NOW_MS, Cluster, Person, allow, running_cluster

ALICE = "User:alice"
HALF_SECOND_NS = 500_000_000
"""A request that is answered at once costs twice this: before its response is encoded, and after."""
PERCENT = 10.0
"""A second of CPU time within ten seconds."""
WINDOW_MS = 1000
"""The longest throttle time."""


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with running_cluster(allow_everyone_if_no_acl_found="true") as cluster:
        await cluster.create_topics("t")
        await cluster.set_quotas("alice", request_percentage=PERCENT)
        cluster.clock.cpu_step_ns = HALF_SECOND_NS
        yield cluster


async def list_groups(person: Person) -> int:
    return (await person.ask(ListGroupsRequest(), 5, ListGroupsResponse)).throttle_time_ms


async def exhaust(cluster: Cluster) -> None:
    """Uses up all the time of alice, who is not throttled for that."""
    assert await list_groups(Person(cluster.broker, ALICE)) == 0


async def test_a_client_above_its_quota_is_throttled_for_a_window_at_most(cluster: Cluster) -> None:
    alice = Person(cluster.broker, ALICE)
    assert await list_groups(alice) == 0
    assert alice.path.take_throttle_ms() == 0
    assert await list_groups(alice) == WINDOW_MS
    assert alice.path.take_throttle_ms() == WINDOW_MS
    assert alice.path.is_muted


async def test_the_throttle_time_is_what_brings_the_rate_back(cluster: Cluster) -> None:
    cluster.clock.cpu_step_ns = HALF_SECOND_NS + 20_000_000
    await exhaust(cluster)
    cluster.clock.cpu_step_ns = 0
    # 104 percent of a second in ten seconds are 0.4 percent too much, which last for 400 ms.
    assert await list_groups(Person(cluster.broker, ALICE)) == 400
    cluster.clock.now_ms += 12_000
    assert await list_groups(Person(cluster.broker, ALICE)) == 0


async def test_every_response_with_the_field_has_the_time(cluster: Cluster) -> None:
    await exhaust(cluster)
    metadata = await Person(cluster.broker, ALICE).ask(MetadataRequest(topics=[]), 12, MetadataResponse)
    versions = await Person(cluster.broker, ALICE).ask(ApiVersionsRequest(), 3, ApiVersionsResponse)
    assert metadata.throttle_time_ms == versions.throttle_time_ms == WINDOW_MS
    alice = Person(cluster.broker, ALICE)
    await alice.ask(ApiVersionsRequest(), 0, ApiVersionsResponse)
    assert alice.path.take_throttle_ms() == WINDOW_MS


async def test_other_users_are_free(cluster: Cluster) -> None:
    bob = Person(cluster.broker, "User:bob")
    assert [await list_groups(bob) for _ in range(10)] == [0] * 10
    await cluster.set_quotas("alice", request_percentage=None, producer_byte_rate=1.0)
    assert cluster.broker.request_quota is None
    alice = Person(cluster.broker, ALICE)
    assert [await list_groups(alice) for _ in range(10)] == [0] * 10


async def test_the_larger_of_two_throttle_times_counts(cluster: Cluster) -> None:
    def topic(name: str, partitions: int) -> CreateTopicsRequest:
        new = CreateTopicsRequest.CreatableTopic(name=name, num_partitions=partitions, replication_factor=1)
        return CreateTopicsRequest(topics=[new], timeout_ms=1000)

    await cluster.set_quotas("alice", controller_mutation_rate=0.5)
    assert (await Person(cluster.broker, ALICE).ask(topic("a", 5), 7, CreateTopicsResponse)).throttle_time_ms == 0
    alice = Person(cluster.broker, ALICE)
    assert (await alice.ask(topic("b", 3), 7, CreateTopicsResponse)).throttle_time_ms == WINDOW_MS
    assert alice.path.take_throttle_ms() == WINDOW_MS
    alice = Person(cluster.broker, ALICE)
    refused = await alice.ask(topic("c", 1), 7, CreateTopicsResponse)
    assert (refused.throttle_time_ms, refused.topics[0].error_code) == (5000, Errors.THROTTLING_QUOTA_EXCEEDED)
    assert alice.path.take_throttle_ms() == 5000


def produce(topic_id: bytes) -> ProduceRequest:
    batch = encode_batch([Record(value=b"v" * 100, timestamp_ms=NOW_MS)])
    partition = ProduceRequest.PartitionProduceData(index=0, records=batch)
    topic = ProduceRequest.TopicProduceData(topic_id=topic_id, partition_data=[partition])
    return ProduceRequest(acks=-1, timeout_ms=1000, topic_data=[topic])


def fetch(topic_id: bytes, replica_id: int = -1) -> FetchRequest:
    partition = FetchRequest.FetchPartition(partition=0, partition_max_bytes=1 << 20)
    topic = FetchRequest.FetchTopic(topic_id=topic_id, partitions=[partition])
    request = FetchRequest(max_wait_ms=0, max_bytes=1 << 20, topics=[topic], session_epoch=-1)
    request.replica_state.replica_id = replica_id
    return request


async def test_a_throttled_fetch_is_empty_and_that_of_a_broker_is_exempt(cluster: Cluster) -> None:
    topic_id = cluster.topic_id("t")
    appended = await cluster.admin.ask(produce(topic_id), 13, ProduceResponse)
    assert appended.responses[0].partition_responses[0].error_code == 0
    first = await Person(cluster.broker, ALICE).ask(fetch(topic_id), 17, FetchResponse)
    assert first.throttle_time_ms == 0
    assert first.responses[0].partitions[0].records
    alice = Person(cluster.broker, ALICE)
    throttled = await alice.ask(fetch(topic_id), 17, FetchResponse)
    assert throttled.throttle_time_ms == WINDOW_MS
    assert not any(partition.records for topic in throttled.responses for partition in topic.partitions)
    assert alice.path.take_throttle_ms() == WINDOW_MS
    alice = Person(cluster.broker, ALICE)
    assert (await alice.ask(fetch(topic_id, 2), 17, FetchResponse)).throttle_time_ms == 0
    await alice.ask(WriteTxnMarkersRequest(), 1, WriteTxnMarkersResponse)
    assert alice.path.take_throttle_ms() == 0


async def test_markers_that_the_client_may_not_write_are_charged(cluster: Cluster) -> None:
    denial = allow(ALICE, AclOperation.ALL, ResourceType.CLUSTER, CLUSTER_NAME, permission_type=PermissionType.DENY)
    await cluster.grant(denial)
    await exhaust(cluster)
    alice = Person(cluster.broker, ALICE)
    await alice.ask(WriteTxnMarkersRequest(), 1, WriteTxnMarkersResponse)
    assert alice.path.take_throttle_ms() == WINDOW_MS


async def test_a_client_that_has_gone_is_charged(cluster: Cluster) -> None:
    """It could otherwise work without limit by closing its connection before each response."""
    waiting = fetch(cluster.topic_id("t"))
    waiting.max_wait_ms, waiting.min_bytes = 10_000, 1
    alice = Person(cluster.broker, ALICE)
    cluster.clock.cpu_step_ns = 60 * HALF_SECOND_NS
    answer = cluster.broker.spawn(alice.ask(waiting, 17, FetchResponse))
    while not alice.path.in_flight:
        await asyncio.sleep(0)
    cluster.clock.cpu_step_ns = 0
    alice.path.close()
    answer.cancel()
    await asyncio.wait([answer])
    assert await list_groups(Person(cluster.broker, ALICE)) == WINDOW_MS


async def test_a_request_is_not_charged_while_it_waits(cluster: Cluster) -> None:
    """The fetch waits for records, and its client is charged for its beginning and its end."""
    cluster.clock.cpu_step_ns = 0
    topic_id = cluster.topic_id("t")
    waiting = fetch(topic_id)
    waiting.max_wait_ms, waiting.min_bytes = 10_000, 1
    alice = Person(cluster.broker, ALICE)
    answer = cluster.broker.spawn(alice.ask(waiting, 17, FetchResponse))
    while not alice.path.in_flight:
        await asyncio.sleep(0)
    cluster.clock.cpu_step_ns = 60 * HALF_SECOND_NS
    cluster.clock.cpu_ns()
    cluster.clock.cpu_step_ns = 0
    await cluster.admin.ask(produce(topic_id), 13, ProduceResponse)
    response = await answer
    assert response.throttle_time_ms == 0
    assert response.responses[0].partitions[0].records


def commit(offset: int) -> OffsetCommitRequest:
    partition = OffsetCommitRequest.OffsetCommitRequestPartition(partition_index=0, committed_offset=offset)
    topic = OffsetCommitRequest.OffsetCommitRequestTopic(name="t", partitions=[partition])
    return OffsetCommitRequest(group_id="g", topics=[topic])


async def test_fast_paths_respect_a_quota_that_is_set_while_they_are_hot(cluster: Cluster) -> None:
    await cluster.set_quotas("alice", request_percentage=None)
    alice = Person(cluster.broker, ALICE)
    for offset in range(5):
        committed = await alice.ask(commit(offset), 9, OffsetCommitResponse)
        assert (committed.throttle_time_ms, committed.topics[0].partitions[0].error_code) == (0, 0)
    await cluster.set_quotas("alice", request_percentage=PERCENT)
    throttles = [(await alice.ask(commit(offset), 9, OffsetCommitResponse)).throttle_time_ms for offset in range(1)]
    assert throttles == [0]
    assert (await alice.ask(commit(7), 9, OffsetCommitResponse)).throttle_time_ms == WINDOW_MS
    assert alice.path.take_throttle_ms() == WINDOW_MS


async def test_metrics_have_the_throttle_times(cluster: Cluster) -> None:
    """ListGroups is answered at once, and OffsetCommit when its records are written."""
    requests = RequestMeasures()
    alice = Person(cluster.broker, ALICE)
    alice.path = MeasuredPath(requests, PathSettings.of(cluster.broker, "PLAINTEXT"), alice.path._on_response)
    alice.path.client.principal = ALICE
    assert await list_groups(alice) == 0
    assert requests.throttles == {}
    assert await list_groups(alice) == WINDOW_MS
    alice.path.unmute(Mute.THROTTLED)
    assert (await alice.ask(commit(1), 9, OffsetCommitResponse)).throttle_time_ms == WINDOW_MS
    throttles = {key: (histogram.count, histogram.sum_ms) for key, histogram in requests.throttles.items()}
    assert throttles == {ApiKey.LIST_GROUPS: (1, WINDOW_MS), ApiKey.OFFSET_COMMIT: (1, WINDOW_MS)}


@pytest.mark.parametrize("version", range(4, 19))
@pytest.mark.parametrize("sizes", [(), (0,), (5, 126, 127, 128), (16_382, 16_383, 20_000)])
def test_the_size_of_a_fetch_response(version: int, sizes: tuple[int, ...]) -> None:
    partitions = [
        FetchResponse.PartitionData(partition_index=index, aborted_transactions=None, records=b"x" * size)
        for index, size in enumerate(sizes)
    ]
    topic = FetchResponse.FetchableTopicResponse(partitions=partitions)
    response = FetchResponse(responses=[topic])
    assert response_bytes(response, version) == len(response.encode(version))
    assert [len(partition.records or b"") for partition in partitions] == list(sizes)
