# SPDX-License-Identifier: Apache-2.0
"""DescribeTopicPartitions: pages, cursors and limits, as in Kafka 4.3.1."""

from __future__ import annotations

import pytest

from kcoord.server.api.handlers import (
    describe_topic_partitions,
)
from kcoord.server.broker import Broker
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import KafkaError
from kcoord_protocol.messages import (
    DescribeTopicPartitionsRequest,
    DescribeTopicPartitionsResponse,
)
from tests.unit.metadata.cluster import Cluster, topic
from tests.unit.metadata.serving import ALL_OF_A_TOPIC, broker_of, context


def describe_partitions(
    broker: Broker, names: list[str], limit: int = 2000, cursor: tuple[str, int] | None = None, version: int = 1
) -> DescribeTopicPartitionsResponse:
    request = DescribeTopicPartitionsRequest(
        topics=[DescribeTopicPartitionsRequest.TopicRequest(name=name) for name in names],
        response_partition_limit=limit,
        cursor=None
        if cursor is None
        else DescribeTopicPartitionsRequest.Cursor(topic_name=cursor[0], partition_index=cursor[1]),
    )
    request_context = context(ApiKey.DESCRIBE_TOPIC_PARTITIONS, version)
    try:
        response = describe_topic_partitions.handle(broker, request_context, request)
    except KafkaError as error:
        response = describe_topic_partitions.error_response(request, error, version)
    return DescribeTopicPartitionsResponse.decode(response.encode(version), version)


Page = tuple[list[tuple[str | None, int, list[int]]], tuple[str, int] | None]


def page(response: DescribeTopicPartitionsResponse) -> Page:
    topics = [
        (topic.name, topic.error_code, [part.partition_index for part in topic.partitions]) for topic in response.topics
    ]
    cursor = response.next_cursor
    return topics, None if cursor is None else (cursor.topic_name, cursor.partition_index)


@pytest.mark.parametrize(
    ("names", "limit", "cursor", "expected"),
    [
        (["t6", "t3"], 2000, None, ([("t3", 0, [0, 1, 2]), ("t6", 0, [0, 1, 2, 3, 4, 5])], None)),
        (["t3", "t3"], 2000, None, ([("t3", 0, [0, 1, 2])], None)),
        (["t3", "t6"], 2000, ("t3", 1), ([("t3", 0, [1, 2]), ("t6", 0, [0, 1, 2, 3, 4, 5])], None)),
        (["t3", "t6"], 2000, ("t6", 6), ([("t6", 0, [])], None)),
        (["t3", "t6"], 2000, ("t4", 0), ([("t3", 42, []), ("t6", 42, [])], None)),
        (["t6", "t3", "t3"], 2000, ("t3", -1), ([("t6", 42, []), ("t3", 42, []), ("t3", 42, [])], None)),
        (["t3", "t6"], 1, None, ([("t3", 0, [0])], ("t3", 1))),
        (["t3", "t6"], 0, ("t3", 2), ([("t3", 0, [2])], ("t6", 0))),
        (["t3", "t6"], -1, ("t6", 5), ([("t6", 0, [5])], None)),
        (["t3", "t6"], 4, None, ([("t3", 0, [0, 1, 2]), ("t6", 0, [0])], ("t6", 1))),
        (["t3", "t6"], 3, None, ([("t3", 0, [0, 1, 2])], ("t6", 0))),
        (["t3", "nope", "bad name!"], 1, None, ([("bad name!", 17, []), ("nope", 3, []), ("t3", 0, [0])], ("t3", 1))),
        (["nope", "t3"], 1, ("nope", 4), ([("nope", 3, []), ("t3", 0, [0])], ("t3", 1))),
        ([], 4, None, ([("t3", 0, [0, 1, 2]), ("t6", 0, [0])], ("t6", 1))),
        ([], 4, ("t4", 5), ([("t6", 0, [0, 1, 2, 3])], ("t6", 4))),
        ([], 4, ("z", 0), ([], None)),
        ([], 4, ("t3", -1), ([], None)),
    ],
)
def test_describe_topic_partitions(
    cluster: Cluster, names: list[str], limit: int, cursor: tuple[str, int] | None, expected: Page
) -> None:
    assert page(describe_partitions(broker_of(cluster), names, limit, cursor)) == expected


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5, 9, 100])
def test_paging_returns_every_partition_once(cluster: Cluster, limit: int) -> None:
    broker = broker_of(cluster)
    seen: list[tuple[str | None, int]] = []
    cursor: tuple[str, int] | None = None
    for _ in range(20):
        topics, cursor = page(describe_partitions(broker, [], limit, cursor))
        seen += [(name, index) for name, _, indexes in topics for index in indexes]
        if cursor is None:
            break
    assert seen == [("t3", index) for index in range(3)] + [("t6", index) for index in range(6)]


@pytest.mark.parametrize("version", describe_topic_partitions.VERSIONS)
def test_fields_of_a_described_partition(cluster: Cluster, version: int) -> None:
    (described,) = describe_partitions(broker_of(cluster), ["t3"], version=version).topics
    assert described.topic_id == cluster.image.topics["t3"].id
    assert described.topic_authorized_operations == ALL_OF_A_TOPIC
    partition = described.partitions[0]
    assert (partition.leader_id, partition.leader_epoch, partition.replica_nodes, partition.isr_nodes) == (
        1,
        0,
        [1],
        [1],
    )
    assert (partition.eligible_leader_replicas, partition.last_known_elr, partition.offline_replicas) == ([], [], [])
    assert partition.creation_time_ms == (1000 if version >= 1 else -1)


def test_limit_of_the_broker() -> None:
    cluster = Cluster({"max.request.partition.size.limit": "2"})
    cluster.create(topic("t", 5))
    assert page(describe_partitions(broker_of(cluster), [])) == ([("t", 0, [0, 1])], ("t", 2))
