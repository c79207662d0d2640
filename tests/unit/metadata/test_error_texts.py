# SPDX-License-Identifier: Apache-2.0
"""Error texts, which scripts and people search for. Each is the text of Kafka 4.3.1 for the same request."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kcoord.server.api.handlers import describe_configs
from kcoord.server.observe import broker_loggers
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import (
    AlterConfigsRequest,
    AlterPartitionReassignmentsRequest,
    CreatePartitionsRequest,
    CreateTopicsRequest,
    DeleteTopicsRequest,
    DescribeConfigsRequest,
    ElectLeadersRequest,
    IncrementalAlterConfigsRequest,
)
from tests.unit.metadata.cluster import Cluster, manual, topic
from tests.unit.metadata.serving import broker_of, context, settle

DUPLICATE_NAME = "Duplicate topic name."
NO_TOPIC = "This server does not host this topic-partition."
ILLEGAL_NAME = (
    "Topic name is invalid: 'a b' contains one or more characters other than ASCII alphanumerics, '.', '_' and '-'"
)
FACTOR_GIVEN = "A manual partition assignment was specified, but replication factor was not set to -1."
COUNT_GIVEN = "A manual partition assignment was specified, but numPartitions was not set to -1."
EMPTY = "The manual partition assignment includes an empty replica list."
TWICE = "The manual partition assignment includes the broker 1 more than once."
NOT_REGISTERED = "The manual partition assignment includes broker 99, but no such broker is registered."
NO_SEQUENCE = "partitions should be a consecutive 0-based integer sequence"
NO_PARTITIONS = "Number of partitions was set to an invalid non-positive value."


@pytest.fixture
def cluster() -> Cluster:
    cluster = Cluster({"node.id": "1"})
    assert [result.error_code for result in cluster.create(topic("t", 2), topic("e.x"))] == [0, 0]
    return cluster


@pytest.mark.parametrize(
    ("asked", "error", "text"),
    [
        (topic("t"), Errors.TOPIC_ALREADY_EXISTS, "Topic 't' already exists."),
        (topic("e_x"), Errors.INVALID_TOPIC_EXCEPTION, "Topic 'e_x' collides with existing topic: e.x"),
        (
            topic(""),
            Errors.INVALID_TOPIC_EXCEPTION,
            "Topic name is invalid: the empty string is not allowed",
        ),
        (topic("a b"), Errors.INVALID_TOPIC_EXCEPTION, ILLEGAL_NAME),
        (topic(".."), Errors.INVALID_TOPIC_EXCEPTION, "Topic name is invalid: '..' is not allowed"),
        (
            topic("a" * 250),
            Errors.INVALID_TOPIC_EXCEPTION,
            f"Topic name is invalid: the length of '{'a' * 250}' is longer than the max allowed length 249",
        ),
        (
            topic("__cluster_metadata"),
            Errors.INVALID_REQUEST,
            "Creation of internal topic __cluster_metadata is prohibited.",
        ),
        (topic("n", 0), Errors.INVALID_PARTITIONS, NO_PARTITIONS),
        (topic("n", 1, 1, [(0, [1])]), Errors.INVALID_REQUEST, FACTOR_GIVEN),
        (topic("n", 1, -1, [(0, [1])]), Errors.INVALID_REQUEST, COUNT_GIVEN),
        (manual("n", (1, [1])), Errors.INVALID_REPLICA_ASSIGNMENT, NO_SEQUENCE),
        (
            manual("n", (0, [1]), (0, [1])),
            Errors.INVALID_REPLICA_ASSIGNMENT,
            "Found multiple manual partition assignments for partition 0",
        ),
        (manual("n", (0, [])), Errors.INVALID_REPLICA_ASSIGNMENT, EMPTY),
        (manual("n", (0, [1, 1])), Errors.INVALID_REPLICA_ASSIGNMENT, TWICE),
        (manual("n", (0, [99])), Errors.INVALID_REPLICA_ASSIGNMENT, NOT_REGISTERED),
        (topic("n", nope="1"), Errors.INVALID_CONFIG, "Unknown topic config name: nope"),
        (
            topic("n", retention_ms=None),
            Errors.INVALID_CONFIG,
            "Null value not supported for topic configs: retention.ms",
        ),
    ],
)
def test_create_topics(cluster: Cluster, asked: CreateTopicsRequest.CreatableTopic, error: Errors, text: str) -> None:
    (result,) = cluster.create(asked)
    assert (result.error_code, result.error_message) == (error, text)


def test_create_topics_with_a_duplicate_name(cluster: Cluster) -> None:
    (result,) = cluster.create(topic("n"), topic("n"))
    assert (result.error_code, result.error_message) == (Errors.INVALID_REQUEST, DUPLICATE_NAME)


@pytest.mark.parametrize(
    ("count", "assignment", "error", "text"),
    [
        (2, None, Errors.INVALID_PARTITIONS, "Topic already has 2 partition(s)."),
        (
            1,
            None,
            Errors.INVALID_PARTITIONS,
            "The topic t currently has 2 partition(s); 1 would not be an increase.",
        ),
        (
            4,
            [[1]],
            Errors.INVALID_REPLICA_ASSIGNMENT,
            "Attempted to add 2 additional partition(s), but only 1 assignment(s) were specified.",
        ),
        (3, [[99]], Errors.INVALID_REPLICA_ASSIGNMENT, NOT_REGISTERED),
    ],
)
def test_create_partitions(
    cluster: Cluster, count: int, assignment: list[list[int]] | None, error: Errors, text: str
) -> None:
    kind = CreatePartitionsRequest.CreatePartitionsAssignment
    assignments = None if assignment is None else [kind(broker_ids=replicas) for replicas in assignment]
    asked = CreatePartitionsRequest.CreatePartitionsTopic(name="t", count=count, assignments=assignments)
    request = CreatePartitionsRequest(topics=[asked])
    (result,) = cluster.run(lambda machine, context: machine.create_partitions(context, request)).results
    assert (result.error_code, result.error_message) == (error, text)


State = DeleteTopicsRequest.DeleteTopicState


@pytest.mark.parametrize(
    ("states", "error", "text"),
    [
        ([State(name="nope")], Errors.UNKNOWN_TOPIC_OR_PARTITION, NO_TOPIC),
        ([State(name=None, topic_id=b"x" * 16)], Errors.UNKNOWN_TOPIC_ID, "This server does not host this topic ID."),
        ([State(name=None)], Errors.INVALID_REQUEST, "Neither topic name nor id were specified."),
        (
            [State(name="t", topic_id=b"x" * 16)],
            Errors.INVALID_REQUEST,
            "You may not specify both topic name and topic id.",
        ),
        ([State(name="t")] * 2, Errors.INVALID_REQUEST, DUPLICATE_NAME),
        ([State(name=None, topic_id=b"x" * 16)] * 2, Errors.INVALID_REQUEST, "Duplicate topic id."),
    ],
)
def test_delete_topics(cluster: Cluster, states: list[State], error: Errors, text: str) -> None:
    request = DeleteTopicsRequest(topics=states)
    (result,) = cluster.run(lambda machine, context: machine.delete_topics(context, request), 6).responses
    assert (result.error_code, result.error_message) == (error, text)


@pytest.mark.parametrize(
    ("name", "index", "replicas", "error", "text"),
    [
        ("nope", 0, [1], Errors.UNKNOWN_TOPIC_OR_PARTITION, "Unable to find a topic named nope."),
        ("t", 9, [1], Errors.UNKNOWN_TOPIC_OR_PARTITION, "Unable to find partition t:9."),
        ("t", 0, [], Errors.INVALID_REPLICA_ASSIGNMENT, EMPTY),
        ("t", 0, [1, 1], Errors.INVALID_REPLICA_ASSIGNMENT, TWICE),
        ("t", 0, [99], Errors.INVALID_REPLICA_ASSIGNMENT, NOT_REGISTERED),
    ],
)
def test_reassignments(cluster: Cluster, name: str, index: int, replicas: list[int], error: Errors, text: str) -> None:
    partition = AlterPartitionReassignmentsRequest.ReassignablePartition(partition_index=index, replicas=replicas)
    asked = AlterPartitionReassignmentsRequest.ReassignableTopic(name=name, partitions=[partition])
    request = AlterPartitionReassignmentsRequest(topics=[asked])
    response = cluster.run(lambda machine, context: machine.alter_partition_reassignments(context, request))
    (result,) = response.responses[0].partitions
    assert (result.error_code, result.error_message) == (error, text)


@pytest.mark.parametrize(
    ("name", "index", "error", "text"),
    [
        ("nope", 0, Errors.UNKNOWN_TOPIC_OR_PARTITION, "No such topic as nope"),
        ("t", 9, Errors.UNKNOWN_TOPIC_OR_PARTITION, "No such partition as t-9"),
        ("t", 0, Errors.ELECTION_NOT_NEEDED, "Leader election not needed for topic partition."),
    ],
)
def test_elections(cluster: Cluster, name: str, index: int, error: Errors, text: str) -> None:
    request = ElectLeadersRequest(
        topic_partitions=[ElectLeadersRequest.TopicPartitions(topic=name, partitions=[index])]
    )
    response = cluster.run(lambda machine, context: machine.elect_leaders(context, request), 2)
    (result,) = response.replica_election_results[0].partition_result
    assert (result.error_code, result.error_message) == (error, text)


TOPIC, BROKER, BROKER_LOGGER, CLIENT_METRICS, GROUP = 2, 4, 8, 16, 32
SET, APPEND = 0, 2
NO_DEFAULT_GROUP = "Default group resources are not allowed."


@pytest.mark.parametrize(
    ("kind", "name", "changes", "error", "text"),
    [
        (GROUP, "", [], Errors.INVALID_REQUEST, NO_DEFAULT_GROUP),
        (TOPIC, "", [], Errors.INVALID_REQUEST, "Default topic resources are not allowed."),
        (CLIENT_METRICS, "", [], Errors.INVALID_REQUEST, "Subscription name can't be empty"),
        (TOPIC, "nope", [], Errors.UNKNOWN_TOPIC_OR_PARTITION, "The topic 'nope' does not exist."),
        (TOPIC, "a b", [], Errors.INVALID_TOPIC_EXCEPTION, ILLEGAL_NAME),
        (BROKER, "x", [], Errors.INVALID_REQUEST, "Node id must be an integer, but it is: x"),
        (BROKER, "9999999999", [], Errors.INVALID_REQUEST, "Node id must be an integer, but it is: 9999999999"),
        (BROKER, "-1", [], Errors.INVALID_REQUEST, "Unexpected broker id, expected 1, but received -1"),
        (BROKER, "99", [], Errors.INVALID_REQUEST, "Unexpected broker id, expected 1, but received 99"),
        (TOPIC, "t", [("a", SET, "1"), ("a", SET, "2")], Errors.INVALID_REQUEST, "Error due to duplicate config keys"),
        (1, "x", [], Errors.INVALID_REQUEST, "Unknown resource type 1"),
        (TOPIC, "t", [("a", SET, None)], Errors.INVALID_REQUEST, "Null value not supported for : a"),
        (
            TOPIC,
            "t",
            [("retention.ms", APPEND, "1")],
            Errors.INVALID_CONFIG,
            "Can't APPEND to key retention.ms because its type is not LIST.",
        ),
        (CLIENT_METRICS, "s", [("a", SET, "1")], Errors.INVALID_REQUEST, "Unknown client metrics configuration: a"),
        (
            CLIENT_METRICS,
            "s",
            [("interval.ms", SET, "1")],
            Errors.INVALID_REQUEST,
            "Invalid value 1 for interval.ms, interval must be between 100 and 3600000 (1 hour)",
        ),
        (
            CLIENT_METRICS,
            "s",
            [("match", SET, "nope=x")],
            Errors.INVALID_CONFIG,
            "Illegal client matching pattern: nope=x",
        ),
    ],
)
def test_altered_configs(
    cluster: Cluster, kind: int, name: str, changes: Sequence[tuple[str, int, str | None]], error: Errors, text: str
) -> None:
    entry = IncrementalAlterConfigsRequest.AlterableConfig
    asked = IncrementalAlterConfigsRequest.AlterConfigsResource(
        resource_type=kind,
        resource_name=name,
        configs=[entry(name=key, config_operation=operation, value=value) for key, operation, value in changes],
    )
    request = IncrementalAlterConfigsRequest(resources=[asked])
    (result,) = cluster.run(lambda machine, context: machine.incremental_alter_configs(context, request)).responses
    assert (result.error_code, result.error_message) == (error, text)


def test_all_configs_of_a_group_without_a_name(cluster: Cluster) -> None:
    asked = AlterConfigsRequest.AlterConfigsResource(resource_type=GROUP, resource_name="")
    request = AlterConfigsRequest(resources=[asked])
    (result,) = cluster.run(lambda machine, context: machine.alter_configs(context, request)).responses
    assert (result.error_code, result.error_message) == (Errors.INVALID_REQUEST, NO_DEFAULT_GROUP)


@pytest.mark.parametrize(
    ("kind", "name", "error", "text"),
    [
        (GROUP, "", Errors.INVALID_REQUEST, "Group name must not be empty"),
        (CLIENT_METRICS, "", Errors.INVALID_REQUEST, "Client metrics subscription name must not be empty"),
        (TOPIC, "a b", Errors.INVALID_TOPIC_EXCEPTION, ILLEGAL_NAME),
        (
            BROKER,
            "99",
            Errors.INVALID_REQUEST,
            "Unexpected broker id, expected 1 or empty string, but received 99",
        ),
        (BROKER, "x", Errors.INVALID_REQUEST, "Broker id must be an integer, but it is: x"),
        (BROKER_LOGGER, "", Errors.INVALID_REQUEST, "Broker id must not be empty"),
        (BROKER_LOGGER, "x", Errors.INVALID_REQUEST, "Broker id must be an integer, but it is: x"),
        (BROKER_LOGGER, "2", Errors.INVALID_REQUEST, "Unexpected broker id, expected 1 but received 2"),
    ],
)
async def test_described_configs(cluster: Cluster, kind: int, name: str, error: Errors, text: str) -> None:
    resource = DescribeConfigsRequest.DescribeConfigsResource(resource_type=kind, resource_name=name)
    request = DescribeConfigsRequest(resources=[resource])
    asked = context(ApiKey.DESCRIBE_CONFIGS, 4)
    (result,) = (await settle(describe_configs.handle(broker_of(cluster), asked, request), 4)).results
    assert (result.error_code, result.error_message) == (error, text)


@pytest.mark.parametrize(
    ("name", "operation", "text"),
    [
        ("", SET, "Node id must be an integer, but it is: "),
        ("2", SET, "Unexpected node id. Expected 1, but received 2"),
        ("1", APPEND, "APPEND operation is not allowed for the BROKER_LOGGER resource"),
        ("1", 9, "Unknown operation type 9 is not allowed for the BROKER_LOGGER resource"),
    ],
)
def test_levels_of_loggers(name: str, operation: int, text: str) -> None:
    change = IncrementalAlterConfigsRequest.AlterableConfig(name="root", config_operation=operation, value="INFO")
    with pytest.raises(KafkaError) as caught:
        broker_loggers.alter_levels(name, 1, [change], validate_only=True)
    assert (caught.value.error, caught.value.message) == (Errors.INVALID_REQUEST, text)
