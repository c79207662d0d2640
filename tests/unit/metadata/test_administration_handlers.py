# SPDX-License-Identifier: Apache-2.0
"""What Kafka 4.3.1 answers to the same requests of administrators.

DescribeQuorum, AlterReplicaLogDirs, UnregisterBroker, and the APIs of users, quotas and ACLs, which kcoord has none of.
"""

from __future__ import annotations

import os

import pytest

from kcoord.server.api.handlers import (
    alter_replica_log_dirs,
    create_acls,
    delete_acls,
    describe_acls,
    describe_client_quotas,
    describe_quorum,
    unregister_broker,
)
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import (
    AlterReplicaLogDirsRequest,
    AlterReplicaLogDirsResponse,
    CreateAclsRequest,
    DeleteAclsRequest,
    DescribeAclsRequest,
    DescribeClientQuotasRequest,
    DescribeQuorumRequest,
    UnregisterBrokerRequest,
)
from kcoord_protocol.uuid import ZERO_UUID
from tests.unit.metadata.cluster import Cluster, manual, registration
from tests.unit.metadata.serving import broker_of, context, settle

NOT_HERE = "This server does not host this topic-partition."


# DescribeQuorum


def quorum_request(**topics: list[int]) -> DescribeQuorumRequest:
    return DescribeQuorumRequest(
        topics=[
            DescribeQuorumRequest.TopicData(
                topic_name=name,
                partitions=[DescribeQuorumRequest.PartitionData(partition_index=index) for index in partitions],
            )
            for name, partitions in topics.items()
        ]
    )


@pytest.mark.parametrize("version", describe_quorum.VERSIONS)
async def test_quorum_of_one_voter(cluster: Cluster, version: int) -> None:
    cluster.register(registration(1), registration(2), registration(3))
    cluster.run(lambda machine, context: machine.fence_broker(context, 3, True))
    request = quorum_request(__cluster_metadata=[0])
    asked = context(ApiKey.DESCRIBE_QUORUM, version)
    response = await settle(describe_quorum.handle(broker_of(cluster), asked, request), version)
    (described,) = response.topics
    (partition,) = described.partitions
    end, read_at_ms = len(cluster.log), 1000 if version else -1
    assert (response.error_code, described.topic_name) == (0, "__cluster_metadata")
    assert (partition.error_code, partition.leader_id, partition.high_watermark) == (0, 1, end)
    for replicas, broker_id in ((partition.current_voters, 1), (partition.observers, 2)):
        (state,) = replicas
        assert (state.replica_id, state.log_end_offset, state.last_fetch_timestamp) == (broker_id, end, read_at_ms)
        assert (state.last_caught_up_timestamp, state.replica_directory_id) == (read_at_ms, ZERO_UUID)
    nodes = [
        (node.node_id, [(listener.name, listener.host, listener.port) for listener in node.listeners])
        for node in response.nodes
    ]
    assert nodes == ([(1, [("PLAINTEXT", "127.0.0.1", 9092)])] if version >= 2 else [])


@pytest.mark.parametrize(
    "topics",
    [{"x": [0]}, {"__cluster_metadata": [1]}, {"__cluster_metadata": [0, 0]}, {"__cluster_metadata": [0], "x": []}],
)
async def test_quorums_of_other_topics_and_partitions(cluster: Cluster, topics: dict[str, list[int]]) -> None:
    response = await settle(
        describe_quorum.handle(broker_of(cluster), context(ApiKey.DESCRIBE_QUORUM, 2), quorum_request(**topics)), 2
    )
    assert {
        topic.topic_name: [partition.partition_index for partition in topic.partitions] for topic in response.topics
    } == topics
    states = [partition for described in response.topics for partition in described.partitions]
    assert {(state.error_code, state.error_message, state.leader_id) for state in states} == {(3, NOT_HERE, 0)}
    assert (response.error_code, response.nodes) == (0, [])


async def test_a_quorum_without_partitions(cluster: Cluster) -> None:
    request = quorum_request(__cluster_metadata=[])
    response = describe_quorum.handle(broker_of(cluster), context(ApiKey.DESCRIBE_QUORUM, 1), request)
    assert [described.partitions for described in (await settle(response, 1)).topics] == [[]]


# AlterReplicaLogDirs


Moves = list[tuple[str, str, list[int]]]


def moves_request(moves: Moves) -> AlterReplicaLogDirsRequest:
    return AlterReplicaLogDirsRequest(
        dirs=[
            AlterReplicaLogDirsRequest.AlterReplicaLogDir(
                path=path,
                topics=[AlterReplicaLogDirsRequest.AlterReplicaLogDirTopic(name=name, partitions=partitions)],
            )
            for path, name, partitions in moves
        ]
    )


def results(response: AlterReplicaLogDirsResponse) -> dict[tuple[str, int], Errors]:
    return {
        (described.topic_name, partition.partition_index): Errors(partition.error_code)
        for described in response.results
        for partition in described.partitions
    }


HERE = "HERE"


@pytest.mark.parametrize("version", alter_replica_log_dirs.VERSIONS)
@pytest.mark.parametrize(
    ("moves", "errors"),
    [
        ([(HERE, "t", [0, 0])], {("t", 0): Errors.NONE}),
        ([("/nowhere", "t", [0])], {("t", 0): Errors.LOG_DIR_NOT_FOUND}),
        ([("/nowhere", "nope", [0])], {("nope", 0): Errors.LOG_DIR_NOT_FOUND}),
        ([(HERE + "/", "t", [0])], {("t", 0): Errors.LOG_DIR_NOT_FOUND}),
        ([(HERE, "t", [5, -1])], dict.fromkeys([("t", 5), ("t", -1)], Errors.UNKNOWN_TOPIC_OR_PARTITION)),
        ([(HERE, "nope", [0])], {("nope", 0): Errors.UNKNOWN_TOPIC_OR_PARTITION}),
        ([(HERE, "elsewhere", [0])], {("elsewhere", 0): Errors.REPLICA_NOT_AVAILABLE}),
        ([(HERE, "t", [0, 1]), ("/no", "t", [0])], {("t", 0): Errors.LOG_DIR_NOT_FOUND, ("t", 1): Errors.NONE}),
        ([("/no", "t", [0]), (HERE, "t", [0])], {("t", 0): Errors.NONE}),
        ([(HERE, "t", [])], {}),
        ([], {}),
    ],
)
async def test_replicas_and_their_folder(version: int, moves: Moves, errors: dict[tuple[str, int], Errors]) -> None:
    cluster = Cluster({"log.dirs": "data/logs", "node.id": "1"})
    cluster.register(registration(1), registration(2))
    cluster.create(manual("t", (0, [2, 1]), (1, [1, 2])), manual("elsewhere", (0, [2])))
    folder = os.path.abspath("data/logs")
    request = moves_request([(path.replace(HERE, folder), name, partitions) for path, name, partitions in moves])
    asked = context(ApiKey.ALTER_REPLICA_LOG_DIRS, version)
    assert results(await settle(alter_replica_log_dirs.handle(broker_of(cluster), asked, request), version)) == errors
    failed = alter_replica_log_dirs.error_response(request, KafkaError(Errors.UNKNOWN_SERVER_ERROR), version)
    assert results(failed) == dict.fromkeys(errors, Errors.UNKNOWN_SERVER_ERROR)


# UnregisterBroker


async def test_unregister_a_broker(cluster: Cluster) -> None:
    cluster.register(registration(1), registration(2))
    cluster.create(manual("t", (0, [2, 1])))
    broker = broker_of(cluster)
    asked = context(ApiKey.UNREGISTER_BROKER, 0)
    response = await settle(unregister_broker.handle(broker, asked, UnregisterBrokerRequest(broker_id=2)), 0)
    assert (response.error_code, response.error_message) == (0, "")
    assert set(broker.image.brokers) == {1}
    partition = broker.image.partition("t", 0)
    assert partition is not None
    assert (partition.leader, partition.isr, partition.replicas) == (1, [1], [2, 1])
    with pytest.raises(KafkaError, match="Broker ID 2 is not currently registered") as caught:
        unregister_broker.handle(broker, asked, UnregisterBrokerRequest(broker_id=2))
    failed = await settle(unregister_broker.error_response(UnregisterBrokerRequest(), caught.value, 0), 0)
    assert (failed.error_code, failed.error_message) == (102, "Broker ID 2 is not currently registered")
    with pytest.raises(KafkaError, match="Broker ID 1 is the only broker in service"):
        unregister_broker.handle(broker, asked, UnregisterBrokerRequest(broker_id=1))


def test_an_unregistered_broker_is_registered_at_the_next_start(cluster: Cluster) -> None:
    cluster.register(registration(1), registration(2))
    cluster.create(manual("t", (0, [1]), (1, [1])))
    cluster.run(lambda machine, context: machine.unregister_broker(context, 1))
    assert set(cluster.image.brokers) == {2}
    assert [partition.leader for partition in cluster.image.topics["t"].partitions] == [-1, -1]
    cluster.register(registration(1), registration(2))
    assert set(cluster.image.brokers) == {1, 2}
    assert [partition.leader for partition in cluster.image.topics["t"].partitions] == [1, 2]


# Quotas and ACLs


Component = DescribeClientQuotasRequest.ComponentData


def component(entity_type: str, match_type: int = 2, match: str | None = None) -> Component:
    return Component(entity_type=entity_type, match_type=match_type, match=match)


@pytest.mark.parametrize("version", describe_client_quotas.VERSIONS)
@pytest.mark.parametrize(
    "components",
    [
        [],
        [component("user", 0, "")],
        [component("user", 1), component("client-id")],
        [component("ip", 0, "no address")],
    ],
)
async def test_there_are_no_quotas(cluster: Cluster, version: int, components: list[Component]) -> None:
    request = DescribeClientQuotasRequest(components=components)
    asked = context(ApiKey.DESCRIBE_CLIENT_QUOTAS, version)
    response = await settle(describe_client_quotas.handle(broker_of(cluster), asked, request), version)
    assert (response.error_code, response.error_message, response.entries) == (0, "", [])


@pytest.mark.parametrize(
    ("components", "error", "text"),
    [
        ([component("nope", 9)], Errors.UNSUPPORTED_VERSION, "Unsupported entity type nope"),
        ([component("")], Errors.INVALID_REQUEST, "Invalid empty entity type."),
        ([component("user", 3)], Errors.INVALID_REQUEST, "Unknown match type 3"),
        (
            [component("user", 0)],
            Errors.INVALID_REQUEST,
            "Request specified MATCH_TYPE_EXACT, but set match string to null.",
        ),
        (
            [component("user", 1, "x")],
            Errors.INVALID_REQUEST,
            "Request specified MATCH_TYPE_DEFAULT, but also specified a match string.",
        ),
        (
            [component("user", 0, "a"), component("user", 9, "b")],
            Errors.INVALID_REQUEST,
            "Entity type user cannot appear more than once in the filter.",
        ),
        (
            [component("user"), component("ip")],
            Errors.INVALID_REQUEST,
            "Invalid entity filter component combination. IP filter component should not be used with user or "
            "clientId filter component.",
        ),
    ],
)
async def test_invalid_filters_of_quotas(
    cluster: Cluster, components: list[Component], error: Errors, text: str
) -> None:
    request = DescribeClientQuotasRequest(components=components)
    with pytest.raises(KafkaError) as caught:
        describe_client_quotas.handle(broker_of(cluster), context(ApiKey.DESCRIBE_CLIENT_QUOTAS, 1), request)
    response = await settle(describe_client_quotas.error_response(request, caught.value, 1), 1)
    assert (response.error_code, response.error_message, response.entries) == (error, text, None)


@pytest.mark.parametrize("version", describe_acls.VERSIONS)
async def test_acls_without_an_authorizer(cluster: Cluster, version: int) -> None:
    broker = broker_of(cluster)
    with pytest.raises(KafkaError) as caught:
        describe_acls.handle(broker, context(ApiKey.DESCRIBE_ACLS, version), DescribeAclsRequest())
    described = await settle(describe_acls.error_response(DescribeAclsRequest(), caught.value, version), version)
    assert (described.error_code, described.error_message) == (54, "No Authorizer is configured on the broker")
    creation = CreateAclsRequest(creations=[CreateAclsRequest.AclCreation()] * 2)
    with pytest.raises(KafkaError) as caught:
        create_acls.handle(broker, context(ApiKey.CREATE_ACLS, version), creation)
    created = await settle(create_acls.error_response(creation, caught.value, version), version)
    expected = [(54, "No Authorizer is configured.")] * 2
    assert [(result.error_code, result.error_message) for result in created.results] == expected
    deletion = DeleteAclsRequest(filters=[DeleteAclsRequest.DeleteAclsFilter()] * 2)
    with pytest.raises(KafkaError) as caught:
        delete_acls.handle(broker, context(ApiKey.DELETE_ACLS, version), deletion)
    deleted = await settle(delete_acls.error_response(deletion, caught.value, version), version)
    assert [(result.error_code, result.error_message) for result in deleted.filter_results] == expected
