# SPDX-License-Identifier: Apache-2.0
"""The quota on created and deleted partitions. The responses were observed in Kafka 4.4.0."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from kcoord_protocol.errors import Errors
from kcoord_protocol.messages import (
    CreatePartitionsRequest,
    CreatePartitionsResponse,
    CreateTopicsRequest,
    CreateTopicsResponse,
    DeleteTopicsRequest,
    DeleteTopicsResponse,
    FindCoordinatorRequest,
    FindCoordinatorResponse,
    MetadataRequest,
    MetadataResponse,
)
from tests.unit.server.people import Cluster, Person, running_cluster

ALICE = "User:alice"
THROTTLED = Errors.THROTTLING_QUOTA_EXCEEDED
RATE = 0.5
"""Tokens per second. The bucket has those of 11 windows of one second, 5.5."""

Created = tuple[int, dict[str, int]]
"""The throttle time and the errors by topic."""


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with running_cluster(allow_everyone_if_no_acl_found="true", auto_create_topics_enable="true") as cluster:
        await set_rate(cluster, RATE)
        yield cluster


async def set_rate(cluster: Cluster, rate: float) -> None:
    await cluster.set_quotas("alice", controller_mutation_rate=rate)


async def create(person: Person, topics: dict[str, int], version: int = 7, *, validate_only: bool = False) -> Created:
    """Creates topics with these numbers of partitions."""
    request = CreateTopicsRequest(
        topics=[
            CreateTopicsRequest.CreatableTopic(name=name, num_partitions=count, replication_factor=1)
            for name, count in topics.items()
        ],
        timeout_ms=1000,
        validate_only=validate_only,
    )
    response = await person.ask(request, version, CreateTopicsResponse)
    assert all(topic.error_message is None for topic in response.topics)
    return response.throttle_time_ms, {topic.name: topic.error_code for topic in response.topics}


async def delete(person: Person, name: str, version: int) -> tuple[int, int]:
    request = DeleteTopicsRequest(timeout_ms=1000)
    if version >= 6:
        request.topics = [DeleteTopicsRequest.DeleteTopicState(name=name)]
    else:
        request.topic_names = [name]
    response = await person.ask(request, version, DeleteTopicsResponse)
    (result,) = response.responses
    assert result.error_message is None
    return response.throttle_time_ms, result.error_code


async def add_partitions(person: Person, name: str, total: int, version: int) -> tuple[int, int]:
    topic = CreatePartitionsRequest.CreatePartitionsTopic(name=name, count=total, assignments=None)
    request = CreatePartitionsRequest(topics=[topic], timeout_ms=1000)
    response = await person.ask(request, version, CreatePartitionsResponse)
    (result,) = response.results
    assert result.error_message is None
    return response.throttle_time_ms, result.error_code


async def test_a_request_may_overdraw_the_bucket_once(cluster: Cluster) -> None:
    alice = Person(cluster.broker, ALICE)
    assert await create(alice, {"a": 8, "b": 1, "c": 1}) == (5000, {"a": 0, "b": THROTTLED, "c": THROTTLED})
    assert set(cluster.broker.image.topics) >= {"a"}
    assert alice.path.is_muted
    assert alice.path.take_throttle_ms() == 5000


async def overdraw(cluster: Cluster) -> None:
    """Leaves alice with a debt of 2.5 tokens. The request that makes the debt is not throttled."""
    assert await create(Person(cluster.broker, ALICE), {"a": 8}) == (0, {"a": 0})


async def test_who_owes_tokens_may_change_nothing(cluster: Cluster) -> None:
    assert await create(cluster.admin, {"p": 2}) == (0, {"p": 0})
    await overdraw(cluster)
    cluster.clock.now_ms += 1000
    before = cluster.broker.image.topics
    for version in (6, 5):
        assert await delete(Person(cluster.broker, ALICE), "p", version) == (4000, THROTTLED)
    for version in (7, 6):
        assert await create(Person(cluster.broker, ALICE), {"b": 1}, version) == (4000, {"b": THROTTLED})
    assert await add_partitions(Person(cluster.broker, ALICE), "a", 9, 3) == (4000, THROTTLED)
    assert cluster.broker.image.topics is before
    cluster.clock.now_ms += 4000
    assert await delete(Person(cluster.broker, ALICE), "p", 6) == (0, 0)


async def test_old_versions_are_only_delayed(cluster: Cluster) -> None:
    alice = Person(cluster.broker, ALICE)
    assert await create(alice, {"a": 2, "b": 2}, 5) == (0, {"a": 0, "b": 0})
    assert alice.path.take_throttle_ms() == 0
    assert await create(alice, {"c": 2}, 5) == (1000, {"c": 0})
    assert alice.path.take_throttle_ms() == 1000
    assert await delete(Person(cluster.broker, ALICE), "a", 4) == (5000, 0)
    assert await add_partitions(Person(cluster.broker, ALICE), "b", 3, 2) == (7000, 0)
    assert await create(Person(cluster.broker, ALICE), {"d": 1}, 7) == (7000, {"d": THROTTLED})


async def test_validation_counts_and_failed_changes_do_not(cluster: Cluster) -> None:
    alice = Person(cluster.broker, ALICE)
    assert await create(alice, {"a": 8, "b": 1}, validate_only=True) == (5000, {"a": 0, "b": THROTTLED})
    refused = CreateTopicsRequest(topics=[CreateTopicsRequest.CreatableTopic(name="a b")], timeout_ms=1000)
    alice = Person(cluster.broker, ALICE)
    response = await alice.ask(refused, 7, CreateTopicsResponse)
    assert (response.throttle_time_ms, response.topics[0].error_code) == (0, Errors.INVALID_TOPIC_EXCEPTION)
    assert not alice.path.is_muted


async def test_a_new_rate_takes_effect_and_other_users_are_free(cluster: Cluster) -> None:
    await overdraw(cluster)
    assert await create(Person(cluster.broker, "User:bob"), {"b": 50, "c": 50}) == (0, {"b": 0, "c": 0})
    await set_rate(cluster, 2.5)
    assert await create(Person(cluster.broker, ALICE), {"d": 1}) == (1000, {"d": THROTTLED})


@pytest.mark.parametrize("rate", [1e-7, 5e-324])
async def test_a_throttle_time_fits_its_field(cluster: Cluster, rate: float) -> None:
    await set_rate(cluster, rate)
    await overdraw(cluster)
    assert await create(Person(cluster.broker, ALICE), {"b": 1}) == (2**31 - 1, {"b": THROTTLED})


async def test_topics_that_metadata_creates_count(cluster: Cluster) -> None:
    request = MetadataRequest(topics=[MetadataRequest.MetadataRequestTopic(name="auto")])
    await overdraw(cluster)
    refused = await Person(cluster.broker, ALICE).ask(request, 12, MetadataResponse)
    assert refused.throttle_time_ms == 0
    assert [topic.error_code for topic in refused.topics] == [Errors.UNKNOWN_TOPIC_OR_PARTITION]
    cluster.clock.now_ms += 5000
    created = await Person(cluster.broker, ALICE).ask(request, 12, MetadataResponse)
    assert [topic.error_code for topic in created.topics] == [0]
    assert await create(Person(cluster.broker, ALICE), {"b": 1}) == (2000, {"b": THROTTLED})


async def test_a_topic_that_the_broker_needs_counts_for_nobody() -> None:
    async with running_cluster(allow_everyone_if_no_acl_found="true") as cluster:
        for name in ("__consumer_offsets", "__transaction_state"):
            await delete(cluster.admin, name, 6)
        await set_rate(cluster, RATE)
        await overdraw(cluster)
        request = FindCoordinatorRequest(key_type=0, coordinator_keys=["g"])
        await Person(cluster.broker, ALICE).ask(request, 4, FindCoordinatorResponse)
        assert "__consumer_offsets" in cluster.broker.image.topics


async def test_a_response_that_a_thread_encodes_has_the_throttle_time(cluster: Cluster) -> None:
    await overdraw(cluster)
    names = [f"t{number}" for number in range(50)]
    throttle_ms, codes = await create(Person(cluster.broker, ALICE), dict.fromkeys(names, 1), version=5)
    assert throttle_ms > 5_000
    assert codes == dict.fromkeys(names, 0)
