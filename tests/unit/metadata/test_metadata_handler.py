# SPDX-License-Identifier: Apache-2.0
"""Metadata: every version can be encoded, and the responses are those of Kafka 4.3.1."""

from __future__ import annotations

import pytest

from kcoord.server.api.handlers import (
    metadata,
)
from kcoord.server.broker import Broker
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import (
    MetadataRequest,
    MetadataResponse,
)
from kcoord_protocol.uuid import ZERO_UUID
from tests.unit.metadata.cluster import Cluster
from tests.unit.metadata.serving import ALL_OF_A_CLUSTER, ALL_OF_A_TOPIC, NOT_ASKED, broker_of, context, settle


async def ask_metadata(
    broker: Broker,
    names: list[str] | None,
    version: int = 13,
    *,
    ids: list[bytes] | None = None,
    create: bool = False,
    operations: bool = False,
) -> MetadataResponse:
    topics = None if names is None else [MetadataRequest.MetadataRequestTopic(name=name) for name in names]
    if ids is not None:
        topics = [MetadataRequest.MetadataRequestTopic(name=None, topic_id=topic_id) for topic_id in ids]
    request = MetadataRequest(
        topics=topics,
        allow_auto_topic_creation=create,
        include_topic_authorized_operations=operations,
        include_cluster_authorized_operations=operations,
    )
    return await settle(metadata.handle(broker, context(ApiKey.METADATA, version), request), version)


def shape(response: MetadataResponse) -> list[tuple[str | None, int, int]]:
    return [(topic.name, topic.error_code, len(topic.partitions)) for topic in response.topics]


@pytest.mark.parametrize("version", metadata.VERSIONS)
async def test_metadata_of_all_topics_in_every_version(cluster: Cluster, version: int) -> None:
    response = await ask_metadata(broker_of(cluster), None if version else [], version)
    assert shape(response) == [("t3", 0, 3), ("t6", 0, 6)]
    (node,) = response.brokers
    assert (node.node_id, node.host, node.port) == (1, "box", 4711)
    assert node.rack == ("r1" if version >= 1 else None)
    assert response.controller_id == (1 if version >= 1 else -1)
    assert response.cluster_id == ("the-cluster" if version >= 2 else None)
    first = response.topics[0]
    assert first.topic_id == (cluster.image.topics["t3"].id if version >= 10 else ZERO_UUID)
    assert first.topic_authorized_operations == NOT_ASKED
    partition = first.partitions[2]
    assert (partition.partition_index, partition.leader_id, partition.replica_nodes, partition.isr_nodes) == (
        2,
        1,
        [1],
        [1],
    )
    assert partition.leader_epoch == (0 if version >= 7 else -1)
    assert partition.offline_replicas == []
    assert partition.creation_time_ms == (1000 if version >= 14 else -1)


async def test_metadata_by_name(cluster: Cluster) -> None:
    broker = broker_of(cluster)
    names = ["t3", "nope", "bad name!", "t3", "", "__transaction_state"]
    response = await ask_metadata(broker, names, operations=False)
    assert shape(response) == [
        ("t3", 0, 3),
        ("nope", Errors.UNKNOWN_TOPIC_OR_PARTITION, 0),
        ("bad name!", Errors.INVALID_TOPIC_EXCEPTION, 0),
        ("", Errors.INVALID_TOPIC_EXCEPTION, 0),
        ("__transaction_state", Errors.UNKNOWN_TOPIC_OR_PARTITION, 0),
    ]
    assert [topic.is_internal for topic in response.topics] == [False, False, False, False, True]
    assert shape(await ask_metadata(broker, [], 1)) == []
    assert shape(await ask_metadata(broker, None, 1)) != []


async def test_metadata_by_id(cluster: Cluster) -> None:
    broker = broker_of(cluster)
    known_id, unknown = cluster.image.topics["t3"].id, b"?" * 16
    response = await ask_metadata(broker, None, 12, ids=[known_id, unknown, known_id, ZERO_UUID], create=True)
    assert shape(response) == [("t3", 0, 3), (None, Errors.UNKNOWN_TOPIC_ID, 0)]
    assert response.topics[1].topic_id == unknown


@pytest.mark.parametrize("version", [10, 11])
async def test_metadata_by_id_before_version_12(cluster: Cluster, version: int) -> None:
    request = MetadataRequest(
        topics=[MetadataRequest.MetadataRequestTopic(name=None, topic_id=cluster.image.topics["t3"].id)]
    )
    with pytest.raises(KafkaError) as caught:
        metadata.handle(broker_of(cluster), context(ApiKey.METADATA, version), request)
    response = await settle(metadata.error_response(request, caught.value, version), version)
    assert (response.brokers, response.cluster_id) == ([], None)
    (answer,) = response.topics
    assert (answer.name, answer.topic_id, answer.error_code) == (
        "",
        cluster.image.topics["t3"].id,
        Errors.INVALID_REQUEST,
    )


async def test_a_topic_without_name_and_id(cluster: Cluster) -> None:
    with pytest.raises(KafkaError, match="Neither"):
        await ask_metadata(broker_of(cluster), None, 12, ids=[ZERO_UUID])


@pytest.mark.parametrize(("version", "cluster_operations"), [(8, ALL_OF_A_CLUSTER), (10, ALL_OF_A_CLUSTER), (11, None)])
async def test_authorized_operations(cluster: Cluster, version: int, cluster_operations: int | None) -> None:
    request = MetadataRequest(
        topics=[MetadataRequest.MetadataRequestTopic(name=name) for name in ("t3", "nope")],
        allow_auto_topic_creation=False,
        include_topic_authorized_operations=True,
        include_cluster_authorized_operations=cluster_operations is not None,
    )
    reply = metadata.handle(broker_of(cluster), context(ApiKey.METADATA, version), request)
    response = await settle(reply, version)
    assert [topic.topic_authorized_operations for topic in response.topics] == [ALL_OF_A_TOPIC, ALL_OF_A_TOPIC]
    assert response.cluster_authorized_operations == (cluster_operations or NOT_ASKED)


async def test_topics_are_created_on_demand(cluster: Cluster) -> None:
    broker = broker_of(cluster)
    assert shape(await ask_metadata(broker, ["new"], create=False)) == [("new", Errors.UNKNOWN_TOPIC_OR_PARTITION, 0)]
    names = ["new", "t3", "a_b", "a.b", "__consumer_offsets", "__cluster_metadata"]
    response = await ask_metadata(broker, names, create=True)
    assert shape(response) == [
        ("new", 0, 1),
        ("t3", 0, 3),
        ("a_b", 0, 1),
        ("a.b", 0, 1),
        ("__consumer_offsets", 0, 50),
        ("__cluster_metadata", Errors.UNKNOWN_TOPIC_OR_PARTITION, 0),
    ]
    assert cluster.image.topic_configs("__consumer_offsets")["cleanup.policy"] == "compact"
    response = await ask_metadata(broker, ["a-b", "n.e.w", "n_e.w"], create=True)
    assert [topic.error_code for topic in response.topics] == [0, 0, 0]
    assert shape(await ask_metadata(broker, ["n_e_w"], create=True)) == [("n_e_w", Errors.INVALID_TOPIC_EXCEPTION, 0)]


async def test_topics_are_not_created_if_the_broker_forbids_it() -> None:
    cluster = Cluster({"auto.create.topics.enable": "false"})
    response = await ask_metadata(broker_of(cluster), ["new"], create=True)
    assert shape(response) == [("new", Errors.UNKNOWN_TOPIC_OR_PARTITION, 0)]
