# SPDX-License-Identifier: Apache-2.0
"""CreateTopics, CreatePartitions and DeleteTopics, with the error codes of Kafka 4.3.1 for the same requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest

from kcoord.metadata.image import ImageBuilder, TopicImage
from kcoord.metadata.topics import MAX_NEW_PARTITIONS
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import (
    CreatePartitionsRequest,
    CreatePartitionsResponse,
    DeleteTopicsRequest,
    DeleteTopicsResponse,
    PartitionRecord,
    TopicRecord,
)
from kcoord_protocol.uuid import ZERO_UUID
from tests.unit.metadata.cluster import DIRECTORY_ID, Cluster, Topic, manual, registration, topic


def create_partitions(
    cluster: Cluster, *topics: tuple[str, int, list[list[int]] | None], validate_only: bool = False
) -> list[CreatePartitionsResponse.CreatePartitionsTopicResult]:
    request = CreatePartitionsRequest(
        topics=[
            CreatePartitionsRequest.CreatePartitionsTopic(
                name=name,
                count=count,
                assignments=None
                if assignments is None
                else [
                    CreatePartitionsRequest.CreatePartitionsAssignment(broker_ids=broker_ids)
                    for broker_ids in assignments
                ],
            )
            for name, count, assignments in topics
        ],
        validate_only=validate_only,
    )
    return cluster.run(lambda machine, context: machine.create_partitions(context, request)).results


def delete(
    cluster: Cluster, *states: tuple[str | None, bytes], api_version: int = 6
) -> list[DeleteTopicsResponse.DeletableTopicResult]:
    if api_version < 6:
        request = DeleteTopicsRequest(topic_names=[name for name, _ in states if name is not None])
    else:
        request = DeleteTopicsRequest(
            topics=[DeleteTopicsRequest.DeleteTopicState(name=name, topic_id=topic_id) for name, topic_id in states]
        )
    return cluster.run(lambda machine, context: machine.delete_topics(context, request), api_version).responses


def test_records_and_response_of_a_new_topic() -> None:
    cluster = Cluster()
    start = len(cluster.log)
    (answer,) = cluster.create(topic("a", 2, retention_ms="5"))
    kinds = [type(record.value).__name__ for record in cluster.log[start:]]
    assert kinds == ["TopicRecord", "ConfigRecord", "PartitionRecord", "PartitionRecord"]
    assert [record.value_version for record in cluster.log[start:]] == [0, 0, 2, 2]
    assert (answer.error_code, answer.num_partitions, answer.replication_factor) == (0, 2, 1)
    created = cluster.image.topics["a"]
    assert answer.topic_id == created.id != ZERO_UUID
    assert [partition.creation_time_ms for partition in created.partitions] == [1000, 1000]
    assert [partition.directories for partition in created.partitions] == [[DIRECTORY_ID], [DIRECTORY_ID]]
    assert answer.configs is not None
    described = {entry.name: (entry.value, entry.config_source) for entry in answer.configs}
    assert len(described) == 37
    assert described["retention.ms"] == ("5", 1)
    assert described["segment.bytes"] == ("1073741824", 5)


def test_rebuilding_from_the_log_gives_the_live_image() -> None:
    cluster = Cluster()
    cluster.create(topic("a", 2, retention_ms="5"), topic("b"))
    create_partitions(cluster, ("a", 4, None))
    delete(cluster, ("b", ZERO_UUID))
    rebuilt = ImageBuilder.of(cluster.log)
    rebuilt.epoch = cluster.image.epoch
    assert rebuilt == cluster.image


@pytest.mark.parametrize(
    ("creatable", "error"),
    [
        (topic("", 1), Errors.INVALID_TOPIC_EXCEPTION),
        (topic(".", 1), Errors.INVALID_TOPIC_EXCEPTION),
        (topic("..", 1), Errors.INVALID_TOPIC_EXCEPTION),
        (topic("bad name!", 1), Errors.INVALID_TOPIC_EXCEPTION),
        (topic("ä", 1), Errors.INVALID_TOPIC_EXCEPTION),
        (topic("x" * 250, 1), Errors.INVALID_TOPIC_EXCEPTION),
        (topic("x" * 249, 1), Errors.NONE),
        (topic("t", 1), Errors.TOPIC_ALREADY_EXISTS),
        (topic("x_y", 1), Errors.INVALID_TOPIC_EXCEPTION),
        (topic("x-y", 1), Errors.NONE),
        (topic("__cluster_metadata", 1), Errors.INVALID_REQUEST),
        (topic("__consumer_offsets", 3), Errors.INVALID_PARTITIONS),
        (topic("__consumer_offsets", 50), Errors.NONE),
        (topic("n", 0), Errors.INVALID_PARTITIONS),
        (topic("n", -2), Errors.INVALID_PARTITIONS),
        (topic("n", -1, -1), Errors.NONE),
        (topic("n", 1, 0), Errors.INVALID_REPLICATION_FACTOR),
        (topic("n", 1, -2), Errors.INVALID_REPLICATION_FACTOR),
        (topic("n", 1, 3), Errors.INVALID_REPLICATION_FACTOR),
        (manual("n", (0, [1]), (1, [1])), Errors.NONE),
        (topic("n", 2, -1, [(0, [1])]), Errors.INVALID_REQUEST),
        (topic("n", -1, 1, [(0, [1])]), Errors.INVALID_REQUEST),
        (manual("__consumer_offsets", (0, [1])), Errors.INVALID_PARTITIONS),
        (manual("n", (0, [2])), Errors.INVALID_REPLICA_ASSIGNMENT),
        (manual("n", (0, [1, 1])), Errors.INVALID_REPLICA_ASSIGNMENT),
        (manual("n", (0, [])), Errors.INVALID_REPLICA_ASSIGNMENT),
        (manual("n", (1, [1])), Errors.INVALID_REPLICA_ASSIGNMENT),
        (manual("n", (0, [1]), (0, [1])), Errors.INVALID_REPLICA_ASSIGNMENT),
        (topic("n", no_such_key="1"), Errors.INVALID_CONFIG),
        (topic("n", retention_ms="x"), Errors.INVALID_CONFIG),
        (topic("n", retention_ms=None), Errors.INVALID_CONFIG),
        (topic("n", remote_storage_enable="true"), Errors.INVALID_CONFIG),
        (topic("n", 1, 1, (), cleanup_policy="compact,delete"), Errors.NONE),
    ],
)
def test_create_errors(creatable: Topic, error: Errors) -> None:
    cluster = Cluster()
    cluster.create(topic("t"), topic("x.y"))
    assert cluster.create_error(creatable) == error


def test_broker_defaults() -> None:
    cluster = Cluster({"num.partitions": "3", "offsets.topic.num.partitions": "4", "default.replication.factor": "3"})
    plain, internal = cluster.create(topic("n", -1, -1), topic("__consumer_offsets", -1, -1))
    assert (plain.error_code, plain.num_partitions, plain.replication_factor) == (0, 3, 1)
    assert internal.num_partitions == 4
    assert cluster.image.topics["__consumer_offsets"].internal


def test_a_topic_that_fails_does_not_affect_other_topics() -> None:
    cluster = Cluster()
    answers = cluster.create(topic("a"), topic("b", 0), topic("c"), topic("c"), topic("d"))
    assert [(answer.name, answer.error_code) for answer in answers] == [
        ("a", 0),
        ("b", Errors.INVALID_PARTITIONS),
        ("c", Errors.INVALID_REQUEST),
        ("d", 0),
    ]
    assert list(cluster.image.topics) == ["a", "d"]


def test_validating_creates_nothing() -> None:
    cluster = Cluster()
    before = cluster.image
    good, bad = cluster.create(topic("a"), topic("b", 0), validate_only=True)
    assert (good.error_code, good.num_partitions) == (0, 1)
    assert good.topic_id != ZERO_UUID, "Kafka 4.4.0 returns the id that the topic would get"
    assert bad.error_code == Errors.INVALID_PARTITIONS
    assert cluster.image is before


@pytest.mark.parametrize("counts", [(MAX_NEW_PARTITIONS, 1), (MAX_NEW_PARTITIONS + 1, -(2**31))])
def test_too_many_partitions_at_once(counts: tuple[int, int]) -> None:
    cluster = Cluster()
    with pytest.raises(KafkaError) as caught:
        cluster.create(topic("a", counts[0]), topic("b", counts[1]))
    assert caught.value.error is Errors.POLICY_VIOLATION


def test_as_many_partitions_as_allowed_at_once() -> None:
    created = Cluster().create(topic("a", MAX_NEW_PARTITIONS - 1), topic("b"))
    assert [result.num_partitions for result in created] == [MAX_NEW_PARTITIONS - 1, 1]


def test_too_many_partitions_by_the_default_of_the_broker() -> None:
    cluster = Cluster({"num.partitions": str(MAX_NEW_PARTITIONS // 2)})
    with pytest.raises(KafkaError) as caught:
        cluster.create(*(topic(name, -1) for name in "abc"))
    assert caught.value.error is Errors.POLICY_VIOLATION


def test_creation_times_never_go_back() -> None:
    """A partition that is younger than the group is new to it (KIP-1327), also if the clock was set back."""
    cluster = Cluster()
    cluster.now_ms = 5000
    cluster.create(topic("a"))
    cluster.now_ms = 4000
    cluster.create(topic("b"))
    create_partitions(cluster, ("a", 2, None))
    cluster.now_ms = 6000
    create_partitions(cluster, ("a", 3, None))
    assert [partition.creation_time_ms for partition in cluster.image.topics["a"].partitions] == [5000, 5000, 6000]
    assert cluster.image.topics["b"].partitions[0].creation_time_ms == 5000


def test_partitions_are_spread_over_the_brokers() -> None:
    cluster = Cluster()
    cluster.register(registration(), registration(2))
    cluster.create(topic("a", 3))
    cluster.create(topic("b", 2))
    leaders = {
        name: [partition.leader for partition in image.partitions] for name, image in cluster.image.topics.items()
    }
    assert leaders == {"a": [1, 2, 1], "b": [2, 1]}
    cluster.create(topic("c", 2, 2))
    assert [partition.replicas for partition in cluster.image.topics["c"].partitions] == [[1, 2], [2, 1]]
    assert [partition.isr for partition in cluster.image.topics["c"].partitions] == [[1, 2], [2, 1]]
    assert cluster.create_error(topic("d", 1, 3)) == Errors.INVALID_REPLICATION_FACTOR
    assert cluster.create_error(manual("m", (0, [1, 2]))) == Errors.NONE
    assert cluster.create_error(manual("e", (0, [1, 2]), (1, [1]))) == Errors.INVALID_REPLICA_ASSIGNMENT
    assert cluster.create_error(manual("e", (0, [1, 3]))) == Errors.INVALID_REPLICA_ASSIGNMENT
    create_partitions(cluster, ("c", 3, None))
    assert [partition.replicas for partition in cluster.image.topics["c"].partitions] == [[1, 2], [2, 1], [1, 2]]
    assert create_partitions(cluster, ("c", 4, [[1]]))[0].error_code == Errors.INVALID_REPLICA_ASSIGNMENT


def test_partitions_of_the_coordinators_are_placed_by_their_number() -> None:
    cluster = Cluster()
    cluster.register(registration(), registration(2), registration(3))
    cluster.create(topic("a", 1))
    cluster.ensure_topic("__consumer_offsets")
    leaders = [partition.leader for partition in cluster.image.topics["__consumer_offsets"].partitions]
    assert leaders == [1 + number % 3 for number in range(len(leaders))]


def test_racks_alternate() -> None:
    cluster = Cluster()
    racks = {1: "x", 2: "x", 3: "y", 4: "y"}
    cluster.register(*(replace(registration(broker_id), rack=rack) for broker_id, rack in racks.items()))
    cluster.create(topic("a", 8, 2))
    replicas = [partition.replicas for partition in cluster.image.topics["a"].partitions]
    assert all(racks[first] != racks[second] for first, second in replicas)
    assert Counter(first for first, _ in replicas) == dict.fromkeys(racks, 2)
    assert Counter(second for _, second in replicas) == dict.fromkeys(racks, 2)


@pytest.mark.parametrize("factor", [1, 2, 3])
@pytest.mark.parametrize("before", [0, 1, 2])
def test_partitions_that_are_added_continue_the_placement(factor: int, before: int) -> None:
    """A topic that grew is like one that was created so large, wherever it stands among the topics."""

    def replicas(first_count: int) -> list[list[int]]:
        cluster = Cluster()
        cluster.register(*(registration(broker_id, rack="xxyz"[broker_id - 1]) for broker_id in (1, 2, 3, 4)))
        cluster.create(*(topic(f"before{number}") for number in range(before)))
        cluster.create(topic("t", first_count, factor))
        cluster.create(topic("later"))
        if first_count < 7:
            assert [answer.error_code for answer in create_partitions(cluster, ("t", 7, None))] == [0]
        return [partition.replicas for partition in cluster.image.topics["t"].partitions]

    at_once = replicas(7)
    assert all(len(set(brokers)) == factor for brokers in at_once)
    assert replicas(1) == replicas(2) == replicas(6) == at_once


def test_partitions_move_if_the_set_of_brokers_changes() -> None:
    cluster = Cluster()
    cluster.register(registration(), registration(2), registration(3))
    cluster.create(topic("a", 3, 3))
    cluster.ensure_topic("__consumer_offsets")
    epochs = {partition.partition_id: partition.leader_epoch for partition in cluster.image.topics["a"].partitions}
    assert not cluster.register(registration(), registration(2), registration(3))
    cluster.register(registration())
    assert list(cluster.image.brokers) == [1]
    for image in cluster.image.topics.values():
        assert all(
            partition.leader == 1 and partition.replicas == partition.isr == [1] for partition in image.partitions
        )
    moved = [
        partition
        for partition in cluster.image.topics["a"].partitions
        if partition.leader_epoch > epochs[partition.partition_id]
    ]
    assert [partition.partition_id for partition in moved] == [1, 2]
    cluster.register(registration(), registration(2))
    leaders = [partition.leader for partition in cluster.image.topics["__consumer_offsets"].partitions]
    assert leaders == [1 + number % 2 for number in range(len(leaders))]


@pytest.mark.parametrize(
    ("count", "assignments", "error"),
    [
        (4, None, Errors.NONE),
        (3, None, Errors.INVALID_PARTITIONS),
        (2, None, Errors.INVALID_PARTITIONS),
        (0, None, Errors.INVALID_PARTITIONS),
        (-1, None, Errors.INVALID_PARTITIONS),
        (5, [[1], [1]], Errors.NONE),
        (5, [[1]], Errors.INVALID_REPLICA_ASSIGNMENT),
        (4, [], Errors.INVALID_REPLICA_ASSIGNMENT),
        (4, [[2]], Errors.INVALID_REPLICA_ASSIGNMENT),
        (4, [[1, 1]], Errors.INVALID_REPLICA_ASSIGNMENT),
        (4, [[]], Errors.INVALID_REPLICA_ASSIGNMENT),
    ],
)
def test_create_partitions(count: int, assignments: list[list[int]] | None, error: Errors) -> None:
    cluster = Cluster()
    cluster.create(topic("t", 3))
    (answer,) = create_partitions(cluster, ("t", count, assignments))
    assert (answer.name, answer.error_code) == ("t", error)
    partitions = cluster.image.topics["t"].partitions
    assert [partition.partition_id for partition in partitions] == list(range(3 if error else count))


def test_a_topic_with_one_partition_grows_as_the_request_says() -> None:
    cluster = Cluster()
    cluster.register(registration(), registration(2))
    cluster.create(topic("t"))
    assert [answer.error_code for answer in create_partitions(cluster, ("t", 3, [[2], [1]]))] == [0]
    assert [partition.replicas for partition in cluster.image.topics["t"].partitions] == [[1], [2], [1]]


def test_create_partitions_of_several_topics() -> None:
    cluster = Cluster()
    cluster.create(topic("a"), topic("b"), topic("__consumer_offsets", -1))
    answers = create_partitions(
        cluster, ("a", 2, None), ("nope", 2, None), ("b", 2, None), ("b", 3, None), ("__consumer_offsets", 60, None)
    )
    assert [(answer.name, answer.error_code) for answer in answers] == [
        ("a", 0),
        ("nope", Errors.UNKNOWN_TOPIC_OR_PARTITION),
        ("b", Errors.INVALID_REQUEST),
        ("__consumer_offsets", Errors.INVALID_PARTITIONS),
    ]
    assert len(cluster.image.topics["b"].partitions) == 1


@pytest.mark.parametrize(
    "added", [(MAX_NEW_PARTITIONS + 1,), (MAX_NEW_PARTITIONS, 1), (MAX_NEW_PARTITIONS + 1, -(2**31))]
)
def test_too_many_new_partitions_of_all_topics(added: tuple[int, ...]) -> None:
    """The whole request fails, as in Kafka 4.4.0."""
    cluster = Cluster()
    cluster.create(topic("a"), topic("b"))
    with pytest.raises(KafkaError) as caught:
        create_partitions(
            cluster, ("nope", 3, None), *((name, 1 + n, None) for name, n in zip("ab", added, strict=False))
        )
    assert caught.value.error is Errors.POLICY_VIOLATION


def test_a_request_looks_through_the_topics_once() -> None:
    passes = 0

    class Topics(dict[str, TopicImage]):
        def __iter__(self) -> Iterator[str]:
            nonlocal passes
            passes += 1
            return super().__iter__()

    cluster = Cluster()
    names = [f"t{number}" for number in range(20)]
    cluster.create(*map(topic, names))
    cluster.image.topics = Topics(cluster.image.topics)
    request = CreatePartitionsRequest(
        topics=[CreatePartitionsRequest.CreatePartitionsTopic(name=name, count=2, assignments=None) for name in names]
    )
    result = cluster.machine.create_partitions(cluster.context(), request)
    assert len(result.records) == 20
    assert passes == 1


def test_validating_adds_no_partitions() -> None:
    cluster = Cluster()
    cluster.create(topic("a"))
    (answer,) = create_partitions(cluster, ("a", 2, None), validate_only=True)
    assert answer.error_code == 0
    assert len(cluster.image.topics["a"].partitions) == 1


def test_delete_by_name_and_by_id() -> None:
    cluster = Cluster()
    a, b, c = (result.topic_id for result in cluster.create(topic("a"), topic("b"), topic("c")))
    answers = delete(cluster, ("a", ZERO_UUID), (None, b))
    assert [(answer.name, answer.topic_id, answer.error_code) for answer in answers] == [("a", a, 0), ("b", b, 0)]
    (answer,) = delete(cluster, ("c", ZERO_UUID), api_version=1)
    assert (answer.name, answer.error_code) == ("c", 0)
    assert cluster.image.topics == {}
    assert c not in cluster.image.topics_by_id


def test_internal_topics_can_be_deleted() -> None:
    cluster = Cluster()
    cluster.ensure_topic("__consumer_offsets")
    (answer,) = delete(cluster, ("__consumer_offsets", ZERO_UUID))
    assert answer.error_code == Errors.NONE
    assert "__consumer_offsets" not in cluster.image.topics


def test_delete_errors() -> None:
    cluster = Cluster()
    a, b = (result.topic_id for result in cluster.create(topic("a"), topic("b")))
    unknown = b"?" * 16
    answers = delete(
        cluster,
        ("nope", ZERO_UUID),
        (None, unknown),
        (None, ZERO_UUID),
        ("a", a),
        ("b", ZERO_UUID),
        ("b", ZERO_UUID),
    )
    assert [(answer.name, answer.topic_id, answer.error_code) for answer in answers] == [
        ("nope", ZERO_UUID, Errors.UNKNOWN_TOPIC_OR_PARTITION),
        (None, unknown, Errors.UNKNOWN_TOPIC_ID),
        (None, ZERO_UUID, Errors.INVALID_REQUEST),
        ("a", a, Errors.INVALID_REQUEST),
        ("b", ZERO_UUID, Errors.INVALID_REQUEST),
    ]
    answers = delete(cluster, (None, b), ("b", ZERO_UUID))
    assert [(answer.name, answer.topic_id, answer.error_code) for answer in answers] == [
        ("b", b, Errors.INVALID_REQUEST)
    ]
    assert sorted(cluster.image.topics) == ["a", "b"]


@pytest.mark.parametrize(("api_version", "error"), [(1, Errors.INVALID_REQUEST), (3, Errors.TOPIC_DELETION_DISABLED)])
def test_deletion_disabled(api_version: int, error: Errors) -> None:
    cluster = Cluster({"delete.topic.enable": "false"})
    cluster.create(topic("a"))
    with pytest.raises(KafkaError) as caught:
        delete(cluster, ("a", ZERO_UUID), api_version=api_version)
    assert caught.value.error is error


def test_a_topic_that_is_created_again_has_another_id() -> None:
    cluster = Cluster()
    (first,) = cluster.create(topic("a", 2, retention_ms="5"))
    delete(cluster, ("a", ZERO_UUID))
    (second,) = cluster.create(topic("a"))
    assert first.topic_id != second.topic_id
    assert len(cluster.image.topics["a"].partitions) == 1
    assert cluster.image.topic_configs("a") == {}


def test_internal_topics_are_created_once_with_their_own_configs() -> None:
    cluster = Cluster({"offsets.topic.num.partitions": "4", "offsets.topic.segment.bytes": "2000000"})
    start = len(cluster.log)
    result = cluster.ensure_topic("__consumer_offsets")
    records = cluster.log[start:]
    assert (result.error_code, result.topic_id) == (0, cluster.image.topics["__consumer_offsets"].id)
    assert isinstance(records[0].value, TopicRecord)
    assert sum(isinstance(record.value, PartitionRecord) for record in records) == 4
    assert cluster.image.topic_configs("__consumer_offsets") == {
        "cleanup.policy": "compact",
        "compression.type": "producer",
        "segment.bytes": "2000000",
    }
    before = cluster.image
    assert cluster.ensure_topic("__consumer_offsets").error_code == Errors.TOPIC_ALREADY_EXISTS
    assert cluster.image is before


def test_small_segments_of_internal_topics() -> None:
    cluster = Cluster({"offsets.topic.segment.bytes": "1000"})
    cluster.ensure_topic("__consumer_offsets")
    assert cluster.image.topic_configs("__consumer_offsets")["internal.segment.bytes"] == "1000"
    cluster.ensure_topic("__transaction_state")
    assert cluster.image.topic_configs("__transaction_state")["segment.bytes"] == "104857600"
