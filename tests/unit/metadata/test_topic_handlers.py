# SPDX-License-Identifier: Apache-2.0
"""The handlers of topics and the cluster, in every version, and the error responses of all metadata APIs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from kcoord.server.api.handlers import (
    alter_configs,
    alter_partition_reassignments,
    create_partitions,
    create_topics,
    delete_topics,
    describe_cluster,
    describe_configs,
    describe_log_dirs,
    elect_leaders,
    incremental_alter_configs,
    list_config_resources,
    list_partition_reassignments,
    metadata,
)
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import (
    AlterConfigsRequest,
    AlterPartitionReassignmentsRequest,
    CreatePartitionsRequest,
    CreateTopicsRequest,
    DeleteTopicsRequest,
    DescribeClusterRequest,
    DescribeConfigsRequest,
    DescribeLogDirsRequest,
    ElectLeadersRequest,
    IncrementalAlterConfigsRequest,
    ListConfigResourcesRequest,
    ListPartitionReassignmentsRequest,
    Message,
    MetadataRequest,
)
from kcoord_protocol.uuid import ZERO_UUID
from tests.fuzz.verdicts import error_codes
from tests.unit.metadata.cluster import Cluster, topic
from tests.unit.metadata.serving import ALL_OF_A_CLUSTER, broker_of, context, settle


@pytest.mark.parametrize("version", describe_cluster.VERSIONS)
async def test_describe_cluster(cluster: Cluster, version: int) -> None:
    broker = broker_of(cluster)
    request = DescribeClusterRequest(include_cluster_authorized_operations=True)
    response = await settle(
        describe_cluster.handle(broker, context(ApiKey.DESCRIBE_CLUSTER, version), request), version
    )
    assert (response.cluster_id, response.controller_id) == ("the-cluster", 1)
    assert response.cluster_authorized_operations == ALL_OF_A_CLUSTER
    (node,) = response.brokers
    assert (node.broker_id, node.host, node.port, node.rack) == (1, "box", 4711, "r1")


@pytest.mark.parametrize(
    ("endpoint_type", "error"), [(2, Errors.MISMATCHED_ENDPOINT_TYPE), (9, Errors.UNSUPPORTED_ENDPOINT_TYPE)]
)
async def test_describe_cluster_of_other_endpoints(cluster: Cluster, endpoint_type: int, error: Errors) -> None:
    request = DescribeClusterRequest(endpoint_type=endpoint_type)
    with pytest.raises(KafkaError) as caught:
        describe_cluster.handle(broker_of(cluster), context(ApiKey.DESCRIBE_CLUSTER, 2), request)
    response = await settle(describe_cluster.error_response(request, caught.value, 2), 2)
    assert (response.error_code, response.brokers) == (error, [])


@pytest.mark.parametrize("version", create_topics.VERSIONS)
async def test_create_topics_in_every_version(cluster: Cluster, version: int) -> None:
    request = CreateTopicsRequest(topics=[topic("a", 2), topic("b"), topic("t3"), topic("bad name!")])
    reply = create_topics.handle(broker_of(cluster), context(ApiKey.CREATE_TOPICS, version), request)
    response = await settle(reply, version)
    assert [topic.error_code for topic in response.topics] == [0, 0, 36, 17]
    assert response.topics[0].num_partitions == (2 if version >= 5 else -1)
    assert response.topics[0].error_message is None
    created = cluster.image.topics
    assert created["a"].id != created["b"].id
    assert response.topics[0].topic_id == (created["a"].id if version >= 7 else ZERO_UUID)


@pytest.mark.parametrize("version", create_partitions.VERSIONS)
async def test_create_partitions_in_every_version(cluster: Cluster, version: int) -> None:
    request = CreatePartitionsRequest(
        topics=[CreatePartitionsRequest.CreatePartitionsTopic(name="t3", count=4, assignments=None)], timeout_ms=1
    )
    reply = create_partitions.handle(broker_of(cluster), context(ApiKey.CREATE_PARTITIONS, version), request)
    response = await settle(reply, version)
    assert [(result.name, result.error_code, result.error_message) for result in response.results] == [("t3", 0, None)]
    assert len(cluster.image.topics["t3"].partitions) == 4


@pytest.mark.parametrize("version", delete_topics.VERSIONS)
async def test_delete_topics_in_every_version(cluster: Cluster, version: int) -> None:
    request = DeleteTopicsRequest(topic_names=["t3", "nope"], timeout_ms=1)
    if version >= 6:
        states = [DeleteTopicsRequest.DeleteTopicState(name=name) for name in ("t3", "nope")]
        request = DeleteTopicsRequest(topics=states, timeout_ms=1)
    reply = delete_topics.handle(broker_of(cluster), context(ApiKey.DELETE_TOPICS, version), request)
    response = await settle(reply, version)
    assert [(result.name, result.error_code) for result in response.responses] == [("t3", 0), ("nope", 3)]
    assert "t3" not in cluster.image.topics


@pytest.mark.parametrize("timeout_ms", [0, -1])
async def test_a_request_without_time_left_times_out(cluster: Cluster, timeout_ms: int) -> None:
    """Kafka 4.3.1 rejects such requests even if they only validate. It answers requests without topics."""
    create = CreateTopicsRequest(topics=[topic("a")], timeout_ms=timeout_ms, validate_only=True)
    new_partitions = CreatePartitionsRequest.CreatePartitionsTopic(name="t3", count=4, assignments=None)
    new_replicas = AlterPartitionReassignmentsRequest.ReassignableTopic(
        name="t3", partitions=[AlterPartitionReassignmentsRequest.ReassignablePartition(replicas=[1])]
    )
    elections = [ElectLeadersRequest.TopicPartitions(topic="t3", partitions=[0])]
    requests: list[tuple[Any, Message, int]] = [
        (create_topics, create, 7),
        (create_partitions, CreatePartitionsRequest(topics=[new_partitions], timeout_ms=timeout_ms), 3),
        (delete_topics, DeleteTopicsRequest(topic_names=["t3"], timeout_ms=timeout_ms), 5),
        (elect_leaders, ElectLeadersRequest(topic_partitions=elections, timeout_ms=timeout_ms), 2),
        (elect_leaders, ElectLeadersRequest(topic_partitions=None, timeout_ms=timeout_ms), 2),
        (
            alter_partition_reassignments,
            AlterPartitionReassignmentsRequest(topics=[new_replicas], timeout_ms=timeout_ms),
            1,
        ),
    ]
    for handler, request, version in requests:
        with pytest.raises(KafkaError) as caught:
            handler.handle(broker_of(cluster), context(handler.API_KEY, version), request)
        assert caught.value.error == Errors.REQUEST_TIMED_OUT
        response = await settle(handler.error_response(request, caught.value, version), version)
        assert set(error_codes(response)) <= {0, Errors.REQUEST_TIMED_OUT}
    assert len(cluster.image.topics["t3"].partitions) == 3
    nothing = ElectLeadersRequest(election_type=9, topic_partitions=[], timeout_ms=timeout_ms)
    reply = elect_leaders.handle(broker_of(cluster), context(ApiKey.ELECT_LEADERS, 2), nothing)
    assert (await settle(reply, 2)).error_code == Errors.NONE


ID = bytes(15) + b"\x01"


@pytest.mark.parametrize(
    ("handler", "request_", "version"),
    [
        (create_topics, CreateTopicsRequest(topics=[topic("a"), topic("a")], timeout_ms=0), 7),
        (create_topics, CreateTopicsRequest(topics=[topic("__cluster_metadata")], timeout_ms=0), 7),
        (
            create_partitions,
            CreatePartitionsRequest(
                topics=[CreatePartitionsRequest.CreatePartitionsTopic(name="t3", count=4)] * 2, timeout_ms=0
            ),
            3,
        ),
        (delete_topics, DeleteTopicsRequest(topic_names=["t3", "t3"], timeout_ms=0), 5),
        (
            delete_topics,
            DeleteTopicsRequest(topics=[DeleteTopicsRequest.DeleteTopicState(name="t3", topic_id=ID)], timeout_ms=0),
            6,
        ),
        (
            delete_topics,
            DeleteTopicsRequest(topics=[DeleteTopicsRequest.DeleteTopicState(name=None)], timeout_ms=0),
            6,
        ),
        (
            delete_topics,
            DeleteTopicsRequest(
                topics=[DeleteTopicsRequest.DeleteTopicState(name=None, topic_id=ID)] * 2, timeout_ms=0
            ),
            6,
        ),
    ],
)
async def test_a_request_without_time_left_that_asks_for_nothing_valid(
    cluster: Cluster, handler: Any, request_: Message, version: int
) -> None:
    """Kafka 4.3.1 returns the error of each topic before it checks the time."""
    reply = handler.handle(broker_of(cluster), context(handler.API_KEY, version), request_)
    codes = list(error_codes(await settle(reply, version)))
    assert Errors.INVALID_REQUEST in codes
    assert Errors.REQUEST_TIMED_OUT not in codes
    assert len(cluster.image.topics["t3"].partitions) == 3


FAILURE = KafkaError(Errors.NOT_CONTROLLER, "not now")

FAILED_REQUESTS: list[tuple[object, Message]] = [
    (metadata, MetadataRequest(topics=None)),
    (create_topics, CreateTopicsRequest(topics=[topic("a")])),
    (create_partitions, CreatePartitionsRequest(topics=[CreatePartitionsRequest.CreatePartitionsTopic(name="a")])),
    (delete_topics, DeleteTopicsRequest(topic_names=["a"])),
    (
        describe_configs,
        DescribeConfigsRequest(resources=[DescribeConfigsRequest.DescribeConfigsResource(resource_name="a")]),
    ),
    (
        alter_configs,
        AlterConfigsRequest(resources=[AlterConfigsRequest.AlterConfigsResource(resource_name="a")]),
    ),
    (
        incremental_alter_configs,
        IncrementalAlterConfigsRequest(
            resources=[IncrementalAlterConfigsRequest.AlterConfigsResource(resource_name="a")]
        ),
    ),
    (list_config_resources, ListConfigResourcesRequest()),
    (
        alter_partition_reassignments,
        AlterPartitionReassignmentsRequest(topics=[AlterPartitionReassignmentsRequest.ReassignableTopic(name="a")]),
    ),
    (
        elect_leaders,
        ElectLeadersRequest(topic_partitions=[ElectLeadersRequest.TopicPartitions(topic="a", partitions=[0])]),
    ),
    (elect_leaders, ElectLeadersRequest(topic_partitions=None)),
    (describe_log_dirs, DescribeLogDirsRequest(topics=None)),
    (list_partition_reassignments, ListPartitionReassignmentsRequest(topics=None)),
    (describe_cluster, DescribeClusterRequest()),
]


@pytest.mark.parametrize(("module", "request_"), FAILED_REQUESTS)
def test_error_responses_can_be_encoded_in_every_version(module: object, request_: Message) -> None:
    versions = cast("range", vars(module)["VERSIONS"])
    make = cast("Callable[[Message, KafkaError, int], Message]", vars(module)["error_response"])
    for version in versions:
        response = make(request_, FAILURE, version)
        assert type(response).decode(response.encode(version), version) is not None
