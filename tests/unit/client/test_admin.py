# SPDX-License-Identifier: Apache-2.0
"""The admin client against scripted responses: its requests, and its results from the responses."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import pytest

from kcoord.client import (
    AclOperation,
    AdminClient,
    AlterConfigOp,
    AlterConfigOpType,
    AssignmentMetadata,
    ConfigEntry,
    ConfigResource,
    ConfigResourceType,
    ConfigSource,
    ConfigSynonym,
    ConsumerGroupDescription,
    CreatedTopic,
    FeatureMetadata,
    FeatureUpdate,
    GroupListing,
    IllegalStateException,
    KafkaError,
    MemberDescription,
    Metadata,
    NewPartitions,
    NewTopic,
    Node,
    OfferedAssignor,
    OffsetAndMetadata,
    OffsetSpec,
    TimeoutException,
    TopicDescription,
    TopicListing,
    TopicPartition,
    TopicPartitionInfo,
    UnsupportedVersionException,
    UpgradeType,
)
from kcoord.client.types import ListOffsetsResult
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors
from kcoord_protocol.message import Message
from kcoord_protocol.messages import (
    ApiVersionsResponse,
    ConsumerGroupDescribeRequest,
    ConsumerGroupDescribeResponse,
    ConsumerProtocolAssignment,
    ConsumerProtocolSubscription,
    CreatePartitionsRequest,
    CreatePartitionsResponse,
    CreateTopicsRequest,
    CreateTopicsResponse,
    DeleteGroupsRequest,
    DeleteGroupsResponse,
    DeleteRecordsRequest,
    DeleteRecordsResponse,
    DeleteTopicsRequest,
    DeleteTopicsResponse,
    DescribeClusterRequest,
    DescribeClusterResponse,
    DescribeConfigsRequest,
    DescribeConfigsResponse,
    DescribeGroupsRequest,
    DescribeGroupsResponse,
    DescribeTopicPartitionsRequest,
    DescribeTopicPartitionsResponse,
    IncrementalAlterConfigsRequest,
    IncrementalAlterConfigsResponse,
    ListConfigResourcesRequest,
    ListConfigResourcesResponse,
    ListGroupsRequest,
    ListGroupsResponse,
    ListOffsetsRequest,
    ListOffsetsResponse,
    MetadataResponse,
    OffsetCommitRequest,
    OffsetCommitResponse,
    OffsetDeleteRequest,
    OffsetDeleteResponse,
    OffsetFetchRequest,
    OffsetFetchResponse,
    UpdateFeaturesRequest,
    UpdateFeaturesResponse,
)
from tests.unit.client.fake_broker import NODE_ID, Answer, FakeBroker, Handler
from tests.unit.client.virtual_loop import running_loop

TOPIC_ID = b"T" * 16
NOT_ASKED = -(2**31)
TIMEOUT_MS = 5000


def canned(answers: Mapping[ApiKey, Message | Handler], **versions: tuple[int, int]) -> FakeBroker:
    """Returns a broker with one response per API, or with a function that returns the response."""

    def handler(answer: Message | Handler) -> Handler:
        return (lambda request, version: answer) if isinstance(answer, Message) else answer

    return FakeBroker({key: handler(answer) for key, answer in answers.items()}, **versions)


@asynccontextmanager
async def admin_of(broker: FakeBroker) -> AsyncIterator[AdminClient]:
    async with AdminClient(
        bootstrap_servers=broker.address,
        retry_backoff_ms=1,
        retry_backoff_max_ms=2,
        reconnect_backoff_ms=1,
        default_api_timeout_ms=TIMEOUT_MS,
    ) as admin:
        yield admin


def node_of(broker: FakeBroker) -> Node:
    return Node(NODE_ID, "127.0.0.1", broker.port)


def only_request(messages: list[Message], timeout_ms: int = TIMEOUT_MS) -> Message:
    """Returns the only request with its timeout set to 0, after checking that the timeout was the time left."""
    (message,) = messages
    left = message.timeout_ms  # type: ignore[attr-defined]
    assert timeout_ms - 2000 < left <= timeout_ms
    message.timeout_ms = 0  # type: ignore[attr-defined]
    return message


@asynccontextmanager
async def grown_cluster(
    key: ApiKey, *answers: Message | Handler
) -> AsyncIterator[tuple[AdminClient, FakeBroker, FakeBroker]]:
    """Yields a client that started when there was one broker. Now there are two, with these responses to an API."""
    first, second = (canned({key: answer}) for answer in answers)
    second.node_id = 2
    async with first, second, admin_of(first) as admin:
        first.peers = [second]
        yield admin, first, second


class TestLife:
    async def test_start_times_out_without_a_cluster(self) -> None:
        admin = AdminClient(bootstrap_servers=["nowhere:1", "[::1]:2"], default_api_timeout_ms=300)
        text = re.escape("find the cluster at nowhere:1,[::1]:2: timed out after 300 ms")
        with pytest.raises(TimeoutException, match=text):
            async with admin:
                raise AssertionError
        with pytest.raises(IllegalStateException, match="the client is closed"):
            await admin.list_topics()

    async def test_start_connects_and_close_closes_all_connections(self) -> None:
        async with FakeBroker() as broker:
            async with admin_of(broker):
                assert len(broker.requests_of(ApiKey.METADATA)) == 1
            assert running_loop().connections == set()


class TestTopics:
    async def test_describe_topics_knows_the_addresses_of_new_leaders(self) -> None:
        topic = DescribeTopicPartitionsResponse.DescribeTopicPartitionsResponseTopic(name="a")
        topic.partitions = [DescribeTopicPartitionsResponse.DescribeTopicPartitionsResponsePartition(leader_id=2)]
        answer = DescribeTopicPartitionsResponse(topics=[topic])
        async with grown_cluster(ApiKey.DESCRIBE_TOPIC_PARTITIONS, answer, answer) as (admin, _, second):
            (partition,) = (await admin.describe_topics(["a"]))["a"].partitions
            assert partition.leader == Node(2, "127.0.0.1", second.port)

    async def test_create(self) -> None:
        topic = CreateTopicsResponse.CreatableTopicResult
        config = CreateTopicsResponse.CreatableTopicConfigs
        answer = CreateTopicsResponse(
            topics=[
                topic(name="a", topic_id=TOPIC_ID, num_partitions=3, replication_factor=1),
                topic(name="b", topic_id=TOPIC_ID, configs=[config(name="cleanup.policy", value="delete")]),
                topic(name="c", error_code=Errors.TOPIC_ALREADY_EXISTS, error_message="there"),
                topic(name="d", num_partitions=0, replication_factor=0),
            ]
        )
        async with canned({ApiKey.CREATE_TOPICS: answer}) as broker, admin_of(broker) as admin:
            results = await admin.create_topics(
                [
                    NewTopic("a", 3, 1),
                    NewTopic("b", assignments={1: [3], 0: [2]}, num_partitions=7, replication_factor=7),
                    NewTopic("c", configs={"cleanup.policy": "compact"}),
                    NewTopic("d"),
                ]
            )
            asked = only_request(broker.requests_of(ApiKey.CREATE_TOPICS))
        replicas = CreateTopicsRequest.CreatableReplicaAssignment
        assert asked == CreateTopicsRequest(
            topics=[
                CreateTopicsRequest.CreatableTopic(name="a", num_partitions=3, replication_factor=1),
                CreateTopicsRequest.CreatableTopic(
                    name="b",
                    num_partitions=-1,
                    replication_factor=-1,
                    assignments=[
                        replicas(partition_index=0, broker_ids=[2]),
                        replicas(partition_index=1, broker_ids=[3]),
                    ],
                ),
                CreateTopicsRequest.CreatableTopic(
                    name="c",
                    num_partitions=-1,
                    replication_factor=-1,
                    configs=[CreateTopicsRequest.CreatableTopicConfig(name="cleanup.policy", value="compact")],
                ),
                CreateTopicsRequest.CreatableTopic(name="d", num_partitions=-1, replication_factor=-1),
            ],
            timeout_ms=0,
            validate_only=False,
        )
        assert results.values == {
            "a": CreatedTopic("a", TOPIC_ID, 3, 1, None),
            "b": CreatedTopic("b", TOPIC_ID, None, None, {"cleanup.policy": "delete"}),
            "d": CreatedTopic("d", bytes(16), 0, 0, None),
        }
        assert str(results.error("c")) == str(KafkaError(Errors.TOPIC_ALREADY_EXISTS, "there"))

    async def test_validate_only_creates_nothing(self) -> None:
        answer = CreateTopicsResponse(topics=[CreateTopicsResponse.CreatableTopicResult(name="a")])
        async with canned({ApiKey.CREATE_TOPICS: answer}) as broker, admin_of(broker) as admin:
            await admin.create_topics([NewTopic("a")], validate_only=True, timeout_ms=3000)
            asked = only_request(broker.requests_of(ApiKey.CREATE_TOPICS), 3000)
        assert isinstance(asked, CreateTopicsRequest) and asked.validate_only

    @pytest.mark.parametrize("highest", [5, 6])
    async def test_delete(self, highest: int) -> None:
        topic = DeleteTopicsResponse.DeletableTopicResult
        answer = DeleteTopicsResponse(
            responses=[topic(name="a"), topic(name="b", error_code=Errors.UNKNOWN_TOPIC_OR_PARTITION)]
        )
        broker = canned({ApiKey.DELETE_TOPICS: answer}, delete_topics=(1, highest))
        async with broker, admin_of(broker) as admin:
            results = await admin.delete_topics(["a", "b"])
            asked = only_request(broker.requests_of(ApiKey.DELETE_TOPICS))
        state = DeleteTopicsRequest.DeleteTopicState
        if highest == 6:
            assert asked == DeleteTopicsRequest(topics=[state(name="a"), state(name="b")], timeout_ms=0)
        else:
            assert asked == DeleteTopicsRequest(topic_names=["a", "b"], timeout_ms=0)
        assert results.values == {"a": None}
        assert results.errors["b"].error is Errors.UNKNOWN_TOPIC_OR_PARTITION

    async def test_create_partitions(self) -> None:
        topic = CreatePartitionsResponse.CreatePartitionsTopicResult
        answer = CreatePartitionsResponse(
            results=[topic(name="a"), topic(name="b", error_code=Errors.INVALID_PARTITIONS, error_message="why")]
        )
        async with canned({ApiKey.CREATE_PARTITIONS: answer}) as broker, admin_of(broker) as admin:
            results = await admin.create_partitions({"a": 4, "b": NewPartitions(3, [[1], [2]])})
            asked = only_request(broker.requests_of(ApiKey.CREATE_PARTITIONS))
            await admin.create_partitions({"a": 4, "b": 1}, validate_only=True)
            checked = broker.requests_of(ApiKey.CREATE_PARTITIONS)[1]
        replicas = CreatePartitionsRequest.CreatePartitionsAssignment
        assert asked == CreatePartitionsRequest(
            topics=[
                CreatePartitionsRequest.CreatePartitionsTopic(name="a", count=4, assignments=None),
                CreatePartitionsRequest.CreatePartitionsTopic(
                    name="b", count=3, assignments=[replicas(broker_ids=[1]), replicas(broker_ids=[2])]
                ),
            ],
            timeout_ms=0,
            validate_only=False,
        )
        assert isinstance(checked, CreatePartitionsRequest) and checked.validate_only
        assert results.values == {"a": None}
        assert "why" in str(results.error("b"))

    async def test_list(self) -> None:
        async with FakeBroker() as broker, admin_of(broker) as admin:
            for name in ("b", "a", "__internal"):
                broker.add_topic(name, TOPIC_ID, [-1])
            broker.topics[-1].is_internal = True
            assert await admin.list_topics() == [TopicListing("a", TOPIC_ID, False), TopicListing("b", TOPIC_ID, False)]
            listed = await admin.list_topics(include_internal=True)
            assert [(topic.name, topic.is_internal) for topic in listed] == [
                ("__internal", True),
                ("a", False),
                ("b", False),
            ]

    async def test_describe_topics_page_by_page(self) -> None:
        topic = DescribeTopicPartitionsResponse.DescribeTopicPartitionsResponseTopic
        partition = DescribeTopicPartitionsResponse.DescribeTopicPartitionsResponsePartition

        def describe(request: Message, version: int) -> Answer:
            assert isinstance(request, DescribeTopicPartitionsRequest)
            if request.cursor is None:
                cursor = DescribeTopicPartitionsResponse.Cursor(topic_name="b", partition_index=1)
                first = partition(
                    partition_index=0, leader_id=NODE_ID, leader_epoch=5, replica_nodes=[1], isr_nodes=[1]
                )
                first.offline_replicas, first.creation_time_ms = [2], 1000
                return DescribeTopicPartitionsResponse(
                    topics=[
                        topic(name="a", error_code=Errors.UNKNOWN_TOPIC_OR_PARTITION),
                        topic(
                            name="b",
                            topic_id=TOPIC_ID,
                            is_internal=True,
                            partitions=[first],
                            topic_authorized_operations=1 << AclOperation.READ | 1 << AclOperation.WRITE,
                        ),
                    ],
                    next_cursor=cursor,
                )
            second = partition(partition_index=1, leader_id=9, creation_time_ms=-1)
            second.eligible_leader_replicas, second.last_known_elr = [3], [4]
            return DescribeTopicPartitionsResponse(
                topics=[
                    topic(name="b", topic_id=TOPIC_ID, is_internal=True, partitions=[second]),
                    topic(name="c", topic_id=TOPIC_ID, partitions=[partition(creation_time_ms=0)]),
                ]
            )

        async with canned({ApiKey.DESCRIBE_TOPIC_PARTITIONS: describe}) as broker, admin_of(broker) as admin:
            results = await admin.describe_topics(["c", "a", "b"], partitions_per_page=2)
            asked = broker.requests_of(ApiKey.DESCRIBE_TOPIC_PARTITIONS)
            leader = node_of(broker)
        topic_request = DescribeTopicPartitionsRequest.TopicRequest
        assert asked == [
            DescribeTopicPartitionsRequest(
                topics=[topic_request(name="a"), topic_request(name="b"), topic_request(name="c")],
                response_partition_limit=2,
                cursor=None,
            ),
            DescribeTopicPartitionsRequest(
                topics=[topic_request(name="b"), topic_request(name="c")],
                response_partition_limit=2,
                cursor=DescribeTopicPartitionsRequest.Cursor(topic_name="b", partition_index=1),
            ),
        ]
        assert results.errors.keys() == {"a"}
        assert results["b"] == TopicDescription(
            "b",
            TOPIC_ID,
            True,
            [
                TopicPartitionInfo(0, leader, 5, [1], [1], [2], 1000, None, None),
                TopicPartitionInfo(1, None, -1, [], [], [], None, [3], [4]),
            ],
            frozenset({AclOperation.READ, AclOperation.WRITE}),
        )
        assert results["c"].partitions[0].creation_time_ms == 0
        assert results["b"].topic_id_text == "VFRUVFRUVFRUVFRUVFRUVA"

    async def test_describe_topics_with_metadata(self) -> None:
        async with FakeBroker() as broker, admin_of(broker) as admin:
            broker.add_topic("a", TOPIC_ID, [1000, -1])
            broker.topics[0].partitions.reverse()
            broker.topics[0].partitions[0].leader_id = -1
            broker.add_topic("b", TOPIC_ID, [])
            broker.topics[1].error_code = Errors.INVALID_TOPIC_EXCEPTION
            results = await admin.describe_topics(["a", "b"])
            leader = node_of(broker)
            *_, asked = broker.requests_of(ApiKey.METADATA)
            assert not asked.allow_auto_topic_creation  # type: ignore[attr-defined]
            assert asked.include_topic_authorized_operations  # type: ignore[attr-defined]
        assert results["a"] == TopicDescription(
            "a",
            TOPIC_ID,
            False,
            [
                TopicPartitionInfo(0, leader, 0, [], [], [], 1000),
                TopicPartitionInfo(1, None, 0, [], [], [], None),
            ],
            None,
        )
        assert results.errors["b"].error is Errors.INVALID_TOPIC_EXCEPTION


class TestCluster:
    async def test_describe(self) -> None:
        broker_of = DescribeClusterResponse.DescribeClusterBroker
        answer = DescribeClusterResponse(
            cluster_id="c",
            controller_id=2,
            brokers=[broker_of(broker_id=2, host="b", port=2, rack="r"), broker_of(broker_id=1, host="a", port=1)],
            cluster_authorized_operations=1 << AclOperation.ALTER,
        )
        async with canned({ApiKey.DESCRIBE_CLUSTER: answer}) as broker, admin_of(broker) as admin:
            described = await admin.describe_cluster(include_authorized_operations=True)
            answer.cluster_authorized_operations = NOT_ASKED
            answer.controller_id = 3
            without = await admin.describe_cluster()
            asked = broker.requests_of(ApiKey.DESCRIBE_CLUSTER)
        assert asked == [
            DescribeClusterRequest(include_cluster_authorized_operations=True),
            DescribeClusterRequest(include_cluster_authorized_operations=False),
        ]
        assert described.cluster_id == "c"
        assert described.nodes == [Node(1, "a", 1), Node(2, "b", 2, "r")]
        assert described.controller == Node(2, "b", 2, "r")
        assert described.authorized_operations == frozenset({AclOperation.ALTER})
        assert (without.controller, without.authorized_operations) == (None, None)

    async def test_describe_raises_the_error_of_the_response(self) -> None:
        answer = DescribeClusterResponse(error_code=Errors.MISMATCHED_ENDPOINT_TYPE, error_message="why")
        async with canned({ApiKey.DESCRIBE_CLUSTER: answer}) as broker, admin_of(broker) as admin:
            with pytest.raises(KafkaError, match="why"):
                await admin.describe_cluster()

    async def test_features(self) -> None:
        def versions(request: Message, version: int) -> Answer:
            answer = ApiVersionsResponse(api_keys=broker.api_versions(), finalized_features_epoch=epoch)
            answer.finalized_features = [
                ApiVersionsResponse.FinalizedFeatureKey(name="group.version", max_version_level=1, min_version_level=0)
            ]
            answer.supported_features = [
                ApiVersionsResponse.SupportedFeatureKey(name="group.version", min_version=0, max_version=2)
            ]
            return answer

        broker, epoch = FakeBroker({ApiKey.API_VERSIONS: versions}), 0
        async with broker, admin_of(broker) as admin:
            assert await admin.describe_features() == FeatureMetadata(
                {"group.version": 1}, 0, {"group.version": (0, 2)}
            )
            epoch = -1
            assert (await admin.describe_features()).finalized_epoch is None

    async def test_update_features(self) -> None:
        result = UpdateFeaturesResponse.UpdatableFeatureResult
        answers = [
            UpdateFeaturesResponse(),
            UpdateFeaturesResponse(results=[result(feature="b", error_code=Errors.INVALID_UPDATE_VERSION)]),
            UpdateFeaturesResponse(error_code=Errors.FEATURE_UPDATE_FAILED, error_message="why"),
        ]
        handler: Handler = lambda request, version: answers.pop(0)  # noqa: E731
        broker = canned({ApiKey.UPDATE_FEATURES: handler}, update_features=(1, 1))
        updates = {"a": FeatureUpdate(2), "b": FeatureUpdate(0, UpgradeType.SAFE_DOWNGRADE)}
        async with broker, admin_of(broker) as admin:
            assert (await admin.update_features(updates)).all() == {"a": None, "b": None}
            asked = only_request(broker.requests_of(ApiKey.UPDATE_FEATURES))
            some = await admin.update_features(updates, validate_only=True)
            none = await admin.update_features(updates)
            checked = broker.requests_of(ApiKey.UPDATE_FEATURES)[1]
        update = UpdateFeaturesRequest.FeatureUpdateKey
        assert asked == UpdateFeaturesRequest(
            timeout_ms=0,
            feature_updates=[
                update(feature="a", max_version_level=2, upgrade_type=1),
                update(feature="b", max_version_level=0, upgrade_type=2),
            ],
            validate_only=False,
        )
        assert isinstance(checked, UpdateFeaturesRequest) and checked.validate_only
        assert (some.values, [*some.errors]) == ({"a": None}, ["b"])
        assert {name: error.error for name, error in none.errors.items()} == dict.fromkeys(
            updates, Errors.FEATURE_UPDATE_FAILED
        )

    async def test_update_features_needs_a_version_with_upgrade_types(self) -> None:
        broker = canned({ApiKey.UPDATE_FEATURES: UpdateFeaturesResponse()}, update_features=(0, 0))
        async with broker, admin_of(broker) as admin:
            results = await admin.update_features({"a": FeatureUpdate(1)})
        assert isinstance(results.error("a"), UnsupportedVersionException)


class TestRepetition:
    async def test_a_moved_controller_is_looked_up_again(self) -> None:
        errors = [Errors.NOT_CONTROLLER, Errors.NONE]

        def create(request: Message, version: int) -> Answer:
            code = errors.pop(0)
            return CreateTopicsResponse(topics=[CreateTopicsResponse.CreatableTopicResult(name="a", error_code=code)])

        async with canned({ApiKey.CREATE_TOPICS: create}) as broker, admin_of(broker) as admin:
            assert (await admin.create_topics([NewTopic("a")]))["a"].name == "a"
            assert len(broker.requests_of(ApiKey.CREATE_TOPICS)) == 2

    async def test_only_keys_with_retriable_errors_are_repeated(self) -> None:
        codes = {"a": [Errors.NONE], "b": [Errors.REQUEST_TIMED_OUT, Errors.NONE], "c": [Errors.TOPIC_ALREADY_EXISTS]}

        def create(request: Message, version: int) -> Answer:
            assert isinstance(request, CreateTopicsRequest)
            result = CreateTopicsResponse.CreatableTopicResult
            return CreateTopicsResponse(
                topics=[result(name=topic.name, error_code=codes[topic.name].pop(0)) for topic in request.topics]
            )

        async with canned({ApiKey.CREATE_TOPICS: create}) as broker, admin_of(broker) as admin:
            results = await admin.create_topics([NewTopic(name) for name in "abc"])
            names = [[topic.name for topic in request.topics] for request in broker.requests_of(ApiKey.CREATE_TOPICS)]  # type: ignore[attr-defined]
        assert names == [["a", "b", "c"], ["b"]]
        assert ([*results], [*results.values], [*results.errors]) == (["a", "b", "c"], ["a", "b"], ["c"])

    async def test_the_deadline_leaves_the_last_error(self) -> None:
        result = CreateTopicsResponse.CreatableTopicResult(name="a", error_code=Errors.REQUEST_TIMED_OUT)
        broker = canned({ApiKey.CREATE_TOPICS: CreateTopicsResponse(topics=[result])})
        async with broker, admin_of(broker) as admin:
            results = await admin.create_topics([NewTopic("a")], timeout_ms=60)
            assert len(broker.requests_of(ApiKey.CREATE_TOPICS)) > 1
        error = results.error("a")
        assert error is not None and error.error is Errors.REQUEST_TIMED_OUT

    async def test_no_response(self) -> None:
        nothing: Handler = lambda request, version: None  # noqa: E731
        async with canned({ApiKey.CREATE_TOPICS: nothing}) as broker, admin_of(broker) as admin:
            results = await admin.create_topics([NewTopic("a")], timeout_ms=40)
        assert isinstance(results.error("a"), TimeoutException)

    async def test_keys_missing_in_the_response_fail(self) -> None:
        async with canned({ApiKey.CREATE_TOPICS: CreateTopicsResponse()}) as broker, admin_of(broker) as admin:
            results = await admin.create_topics([NewTopic("a")])
        assert "left this out" in str(results.error("a"))


class TestPartitions:
    async def test_list_offsets(self) -> None:
        partition = ListOffsetsResponse.ListOffsetsPartitionResponse
        answer = ListOffsetsResponse(
            topics=[
                ListOffsetsResponse.ListOffsetsTopicResponse(
                    name="a",
                    partitions=[
                        partition(partition_index=0, offset=7, timestamp=8, leader_epoch=9),
                        partition(partition_index=1, error_code=Errors.TOPIC_AUTHORIZATION_FAILED),
                    ],
                )
            ]
        )
        async with canned({ApiKey.LIST_OFFSETS: answer}) as broker, admin_of(broker) as admin:
            broker.add_topic("a", TOPIC_ID, [-1, -1])
            broker.topics[0].partitions[1].leader_epoch = 4
            partition_0, partition_1, absent = (TopicPartition("a", number) for number in range(3))
            specs = {
                partition_1: OffsetSpec.for_timestamp(5),
                partition_0: OffsetSpec.latest(),
                absent: OffsetSpec.earliest(),
            }
            results = await admin.list_offsets(specs, read_committed=True)
            asked = only_request(broker.requests_of(ApiKey.LIST_OFFSETS))
            await admin.list_offsets({partition_0: OffsetSpec.latest()})
            plain = broker.requests_of(ApiKey.LIST_OFFSETS)[-1]
        requested = ListOffsetsRequest.ListOffsetsPartition
        assert asked == ListOffsetsRequest(
            replica_id=-1,
            isolation_level=1,
            topics=[
                ListOffsetsRequest.ListOffsetsTopic(
                    name="a",
                    partitions=[
                        requested(partition_index=0, current_leader_epoch=0, timestamp=-1),
                        requested(partition_index=1, current_leader_epoch=4, timestamp=5),
                    ],
                )
            ],
            timeout_ms=0,
        )
        assert isinstance(plain, ListOffsetsRequest) and plain.isolation_level == 0
        assert results.values == {partition_0: ListOffsetsResult(7, 8, 9)}
        assert results.errors[partition_1].error is Errors.TOPIC_AUTHORIZATION_FAILED
        assert results.errors[absent].error is Errors.UNKNOWN_TOPIC_OR_PARTITION

    @pytest.mark.parametrize(
        ("spec", "timestamp", "lowest"),
        [
            (OffsetSpec.latest(), -1, 1),
            (OffsetSpec.earliest(), -2, 1),
            (OffsetSpec.max_timestamp(), -3, 7),
            (OffsetSpec.earliest_local(), -4, 8),
            (OffsetSpec(-5), -5, 9),
            (OffsetSpec(-6), -6, 11),
            (OffsetSpec.for_timestamp(0), 0, 1),
        ],
    )
    async def test_special_timestamps_need_a_version_that_has_them(
        self, spec: OffsetSpec, timestamp: int, lowest: int
    ) -> None:
        assert spec.timestamp == timestamp
        partition = ListOffsetsResponse.ListOffsetsPartitionResponse(partition_index=0, offset=3)
        topic = ListOffsetsResponse.ListOffsetsTopicResponse(name="a", partitions=[partition])
        answer = ListOffsetsResponse(topics=[topic])
        for highest in (lowest, lowest - 1):
            broker = canned({ApiKey.LIST_OFFSETS: answer}, list_offsets=(0, highest))
            async with broker, admin_of(broker) as admin:
                broker.add_topic("a", TOPIC_ID, [-1])
                results = await admin.list_offsets({TopicPartition("a", 0): spec})
                assert bool(results.errors) is (highest < lowest)

    def test_a_negative_timestamp_is_rejected(self) -> None:
        with pytest.raises(ValueError, match="negative"):
            OffsetSpec.for_timestamp(-1)

    async def test_delete_records(self) -> None:
        partition = DeleteRecordsResponse.DeleteRecordsPartitionResult
        answer = DeleteRecordsResponse(
            topics=[
                DeleteRecordsResponse.DeleteRecordsTopicResult(
                    name="a",
                    partitions=[
                        partition(partition_index=0, low_watermark=5),
                        partition(partition_index=1, error_code=Errors.OFFSET_OUT_OF_RANGE),
                    ],
                )
            ]
        )
        async with canned({ApiKey.DELETE_RECORDS: answer}) as broker, admin_of(broker) as admin:
            broker.add_topic("a", TOPIC_ID, [-1, -1])
            partition_0, partition_1 = TopicPartition("a", 0), TopicPartition("a", 1)
            results = await admin.delete_records({partition_1: -1, partition_0: 5})
            asked = only_request(broker.requests_of(ApiKey.DELETE_RECORDS))
        requested = DeleteRecordsRequest.DeleteRecordsPartition
        topic = DeleteRecordsRequest.DeleteRecordsTopic(
            name="a", partitions=[requested(partition_index=0, offset=5), requested(partition_index=1, offset=-1)]
        )
        assert asked == DeleteRecordsRequest(topics=[topic], timeout_ms=0)
        assert (results.values, results.errors[partition_1].error) == ({partition_0: 5}, Errors.OFFSET_OUT_OF_RANGE)

    async def test_a_partition_without_a_leader_is_looked_up_again(self) -> None:
        partition = DeleteRecordsResponse.DeleteRecordsPartitionResult(partition_index=0, low_watermark=5)
        topic = DeleteRecordsResponse.DeleteRecordsTopicResult(name="a", partitions=[partition])
        broker = canned({ApiKey.DELETE_RECORDS: DeleteRecordsResponse(topics=[topic])})
        metadata = broker.handlers[ApiKey.METADATA]

        def elected(request: Message, version: int) -> Answer:
            broker.topics[0].partitions[0].leader_id = NODE_ID if len(broker.requests_of(ApiKey.METADATA)) > 3 else -1
            answer = metadata(request, version)
            assert isinstance(answer, MetadataResponse)
            return answer

        async with broker:
            broker.add_topic("a", TOPIC_ID, [-1])
            broker.handlers[ApiKey.METADATA] = elected
            async with admin_of(broker) as admin:
                results = await admin.delete_records({TopicPartition("a", 0): 5})
                assert results.all() == {TopicPartition("a", 0): 5}
                assert len(broker.requests_of(ApiKey.DELETE_RECORDS)) == 1


class TestGroups:
    async def test_groups_of_new_brokers_are_listed(self) -> None:
        answers = [
            ListGroupsResponse(groups=[ListGroupsResponse.ListedGroup(group_id=group_id)]) for group_id in ("b", "a")
        ]
        async with grown_cluster(ApiKey.LIST_GROUPS, *answers) as (admin, *_):
            assert [group.group_id for group in await admin.list_groups()] == ["a", "b"]

    async def test_list(self) -> None:
        group = ListGroupsResponse.ListedGroup
        answer = ListGroupsResponse(
            groups=[
                group(group_id="c", protocol_type="connect", group_state="Stable", group_type="classic"),
                group(group_id="b", protocol_type="consumer", group_state="Empty", group_type="consumer"),
                group(group_id="a", protocol_type="", group_state="Empty", group_type="classic"),
            ]
        )
        async with canned({ApiKey.LIST_GROUPS: answer}) as broker, admin_of(broker) as admin:
            listed = await admin.list_groups(states=["Stable", "Empty", "Stable"], types=["consumer", "classic"])
            consumers = await admin.list_consumer_groups()
            asked = broker.requests_of(ApiKey.LIST_GROUPS)
        assert asked == [
            ListGroupsRequest(states_filter=["Empty", "Stable"], types_filter=["classic", "consumer"]),
            ListGroupsRequest(),
        ]
        assert listed == [
            GroupListing("a", "", "Empty", "Classic"),
            GroupListing("b", "consumer", "Empty", "Consumer"),
            GroupListing("c", "connect", "Stable", "Classic"),
        ]
        assert [listing.group_id for listing in consumers] == ["a", "b"]
        assert [listing.is_simple for listing in listed] == [True, False, False]

    @pytest.mark.parametrize(
        ("highest", "states", "types", "works"),
        [(3, [], [], True), (3, ["Empty"], [], False), (4, ["Empty"], [], True), (4, [], ["consumer"], False)],
    )
    async def test_a_filter_that_the_broker_does_not_support_fails(
        self, highest: int, states: list[str], types: list[str], works: bool
    ) -> None:
        broker = canned({ApiKey.LIST_GROUPS: ListGroupsResponse()}, list_groups=(0, highest))
        async with broker, admin_of(broker) as admin:
            if works:
                assert await admin.list_groups(states=states, types=types) == []
            else:
                with pytest.raises(UnsupportedVersionException):
                    await admin.list_groups(states=states, types=types)

    async def test_listing_fails_as_a_whole(self) -> None:
        answer = ListGroupsResponse(error_code=Errors.CLUSTER_AUTHORIZATION_FAILED)
        async with canned({ApiKey.LIST_GROUPS: answer}) as broker, admin_of(broker) as admin:
            with pytest.raises(KafkaError, match="CLUSTER_AUTHORIZATION_FAILED"):
                await admin.list_groups()

    async def test_describe(self) -> None:
        partitions = ConsumerGroupDescribeResponse.TopicPartitions
        assignment = ConsumerGroupDescribeResponse.Assignment
        member = ConsumerGroupDescribeResponse.Member(
            member_id="m",
            instance_id="i",
            rack_id="r",
            member_epoch=6,
            client_id="c",
            client_host="/h",
            subscribed_topic_names=["t", "u"],
            subscribed_topic_regex="",
            assignment=assignment(topic_partitions=[partitions(topic_id=TOPIC_ID, topic_name="t", partitions=[0, 1])]),
            target_assignment=assignment(
                topic_partitions=[partitions(topic_id=TOPIC_ID, topic_name="t", partitions=[1])]
            ),
            member_type=1,
        )
        classic = ConsumerGroupDescribeResponse.Member(member_id="n", subscribed_topic_regex="x.*", member_type=0)
        unknown = ConsumerGroupDescribeResponse.Member(member_id="o", member_type=-1)
        described = ConsumerGroupDescribeResponse.DescribedGroup
        answer = ConsumerGroupDescribeResponse(
            groups=[
                described(
                    group_id="g",
                    group_state="Stable",
                    group_epoch=7,
                    assignment_epoch=6,
                    assignor_name="uniform",
                    members=[member, classic, unknown],
                    authorized_operations=1 << AclOperation.DELETE,
                ),
                described(group_id="h", error_code=Errors.GROUP_AUTHORIZATION_FAILED, error_message="no"),
                described(group_id="i", error_code=Errors.GROUP_ID_NOT_FOUND, error_message="classic"),
            ]
        )
        group = DescribeGroupsResponse.DescribedGroup
        dead = DescribeGroupsResponse(groups=[group(group_id="i", group_state="Dead")])
        answers: dict[ApiKey, Message | Handler] = {
            ApiKey.CONSUMER_GROUP_DESCRIBE: answer,
            ApiKey.DESCRIBE_GROUPS: dead,
        }
        async with canned(answers) as broker, admin_of(broker) as admin:
            results = await admin.describe_consumer_groups(["g", "h", "i"], include_authorized_operations=True)
            asked = broker.requests_of(ApiKey.CONSUMER_GROUP_DESCRIBE), broker.requests_of(ApiKey.DESCRIBE_GROUPS)
            coordinator = node_of(broker)
        assert asked == (
            [ConsumerGroupDescribeRequest(group_ids=["g", "h", "i"], include_authorized_operations=True)],
            [DescribeGroupsRequest(groups=["i"], include_authorized_operations=True)],
        )
        partition_0, partition_1 = TopicPartition("t", 0), TopicPartition("t", 1)
        nothing: frozenset[TopicPartition] = frozenset()
        assert results["g"] == ConsumerGroupDescription(
            "g",
            "Consumer",
            "Stable",
            "consumer",
            "uniform",
            [
                MemberDescription(
                    "m",
                    "i",
                    "c",
                    "/h",
                    frozenset({partition_0, partition_1}),
                    "r",
                    6,
                    frozenset({partition_1}),
                    ("t", "u"),
                    None,
                    True,
                ),
                MemberDescription("n", None, "", "", nothing, None, 0, nothing, (), "x.*", False),
                MemberDescription("o", None, "", "", nothing, None, 0, nothing, (), None, None),
            ],
            coordinator,
            7,
            6,
            None,
            frozenset({AclOperation.DELETE}),
        )
        assert results.errors["h"].error is Errors.GROUP_AUTHORIZATION_FAILED
        assert results.errors["i"].error is Errors.GROUP_ID_NOT_FOUND
        assert "Group i not found" in str(results.errors["i"])

    async def test_describe_client_side_assignors(self) -> None:
        assignment = ConsumerGroupDescribeResponse.Assignment
        member = ConsumerGroupDescribeResponse.Member(
            member_id="m",
            assignment=assignment(error=3, metadata_version=1, metadata_bytes=b"old"),
            target_assignment=assignment(error=-2, metadata_version=2, metadata_bytes=b"new"),
            client_assignors=[
                ConsumerGroupDescribeResponse.ClientAssignor(
                    name="a",
                    minimum_version=-1,
                    maximum_version=4,
                    reason=5,
                    metadata_version=2,
                    metadata_bytes=b"mine",
                )
            ],
        )
        described = ConsumerGroupDescribeResponse.DescribedGroup
        answer = ConsumerGroupDescribeResponse(
            groups=[
                described(
                    group_id="g",
                    assignor_name="a",
                    members=[member],
                    assignor_side=1,
                    computing_member_id="m",
                    computing_until_ms=1000,
                    failed_computations=2,
                    assignor_error="no",
                ),
                described(group_id="h", assignor_name="uniform"),
            ]
        )
        async with canned({ApiKey.CONSUMER_GROUP_DESCRIBE: answer}) as broker, admin_of(broker) as admin:
            groups = (await admin.describe_consumer_groups(["g", "h"])).all()
        group, (seen,) = groups["g"], groups["g"].members
        assert (group.is_assigned_by_member, group.computing_member_id, group.computing_until_ms) == (True, "m", 1000)
        assert (group.failed_computations, group.assignor_error) == (2, "no")
        assert seen.assignment_metadata == AssignmentMetadata(3, 1, b"old")
        assert seen.target_metadata == AssignmentMetadata(-2, 2, b"new")
        assert seen.client_assignors == (OfferedAssignor("a", -1, 4, 5, Metadata(2, b"mine")),)
        other = groups["h"]
        assert (other.is_assigned_by_member, other.computing_member_id, other.computing_until_ms) == (False, None, None)

    async def test_describe_classic_groups(self) -> None:
        subscription = ConsumerProtocolSubscription(topics=["t", "u"])
        assigned = ConsumerProtocolAssignment(
            assigned_partitions=[ConsumerProtocolAssignment.TopicPartition(topic="t", partitions=[2])]
        )
        sound = DescribeGroupsResponse.DescribedGroupMember(
            member_id="m",
            group_instance_id="i",
            client_id="c",
            client_host="/h",
            member_metadata=b"\x00\x01" + subscription.encode(1),
            member_assignment=b"\x00\x01" + assigned.encode(1),
        )
        newer = DescribeGroupsResponse.DescribedGroupMember(
            member_id="n", member_metadata=b"\x00\x7f" + subscription.encode(0), member_assignment=b""
        )
        damaged = DescribeGroupsResponse.DescribedGroupMember(
            member_id="o", member_metadata=b"\x00\x00\xff", member_assignment=b"\x00\x7f" + assigned.encode(3)
        )
        empty = DescribeGroupsResponse.DescribedGroupMember(member_id="p", member_metadata=b"", member_assignment=b"")
        group = DescribeGroupsResponse.DescribedGroup
        answer = DescribeGroupsResponse(
            groups=[
                group(
                    group_id="g",
                    group_state="Stable",
                    protocol_type="consumer",
                    protocol_data="range",
                    members=[sound, newer, damaged, empty],
                ),
                group(group_id="h", group_state="Stable", protocol_type="connect", members=[sound]),
                group(group_id="i", error_code=Errors.GROUP_AUTHORIZATION_FAILED, group_state="Dead"),
            ]
        )
        async with canned({ApiKey.DESCRIBE_GROUPS: answer}) as broker, admin_of(broker) as admin:
            results = await admin.describe_consumer_groups(["g", "h", "i"])
            coordinator = node_of(broker)
            asked = broker.requests_of(ApiKey.DESCRIBE_GROUPS)
        assert asked == [DescribeGroupsRequest(groups=["g", "h", "i"], include_authorized_operations=False)]
        two = frozenset({TopicPartition("t", 2)})
        nothing: frozenset[TopicPartition] = frozenset()
        assert results["g"] == ConsumerGroupDescription(
            "g",
            "Classic",
            "Stable",
            "consumer",
            "range",
            [
                MemberDescription("m", "i", "c", "/h", two, subscribed_topic_names=("t", "u")),
                MemberDescription("n", None, "", "", nothing, subscribed_topic_names=("t", "u")),
                MemberDescription("o", None, "", "", two, has_unreadable_subscription=True),
                MemberDescription("p", None, "", "", nothing),
            ],
            coordinator,
        )
        assert results["h"].members == [MemberDescription("m", "i", "c", "/h", nothing)]
        assert results.errors["i"].error is Errors.GROUP_AUTHORIZATION_FAILED

    async def test_a_moved_coordinator_is_looked_up_again(self) -> None:
        errors = [Errors.NOT_COORDINATOR, Errors.COORDINATOR_LOAD_IN_PROGRESS, Errors.NONE]

        def delete(request: Message, version: int) -> Answer:
            result = DeleteGroupsResponse.DeletableGroupResult(group_id="g", error_code=errors.pop(0))
            return DeleteGroupsResponse(results=[result])

        async with canned({ApiKey.DELETE_GROUPS: delete}) as broker, admin_of(broker) as admin:
            assert (await admin.delete_consumer_groups(["g"])).all() == {"g": None}
            assert broker.requests_of(ApiKey.DELETE_GROUPS) == [DeleteGroupsRequest(groups_names=["g"])] * 3
            assert len(broker.requests_of(ApiKey.FIND_COORDINATOR)) == 3

    async def test_groups_without_a_coordinator(self) -> None:
        async with canned({ApiKey.DELETE_GROUPS: DeleteGroupsResponse()}) as broker:
            find = broker.handlers[ApiKey.FIND_COORDINATOR]

            def forbidden(request: Message, version: int) -> Answer:
                answer = find(request, version)
                answer.coordinators[0].error_code = Errors.GROUP_AUTHORIZATION_FAILED  # type: ignore[union-attr]
                return answer  # type: ignore[return-value]

            broker.handlers[ApiKey.FIND_COORDINATOR] = forbidden
            async with admin_of(broker) as admin:
                results = await admin.delete_consumer_groups(["g"])
                assert broker.requests_of(ApiKey.DELETE_GROUPS) == []
        assert results.errors["g"].error is Errors.GROUP_AUTHORIZATION_FAILED


ZERO, ONE = TopicPartition("t", 0), TopicPartition("t", 1)


class TestGroupOffsets:
    @pytest.mark.parametrize("require_stable", [False, True])
    @pytest.mark.parametrize("highest", [6, 7, 8, 10])
    async def test_list(self, highest: int, require_stable: bool) -> None:
        if highest < 8:
            single = OffsetFetchResponse.OffsetFetchResponsePartition
            topic = OffsetFetchResponse.OffsetFetchResponseTopic(
                name="t",
                partitions=[
                    single(partition_index=0, committed_offset=5, committed_leader_epoch=2, metadata="m"),
                    single(partition_index=1, committed_offset=-1),
                ],
            )
            answer = OffsetFetchResponse(topics=[topic])
        else:
            of_group = OffsetFetchResponse.OffsetFetchResponsePartitions
            topics = OffsetFetchResponse.OffsetFetchResponseTopics(
                name="t",
                partitions=[
                    of_group(partition_index=0, committed_offset=5, committed_leader_epoch=2, metadata="m"),
                    of_group(partition_index=1, committed_offset=-1),
                ],
            )
            answer = OffsetFetchResponse(
                groups=[OffsetFetchResponse.OffsetFetchResponseGroup(group_id=name, topics=[topics]) for name in "gh"]
            )
        broker = canned({ApiKey.OFFSET_FETCH: answer}, offset_fetch=(1, highest))
        async with broker, admin_of(broker) as admin:
            results = await admin.list_consumer_group_offsets(
                {"g": [ONE, ZERO], "h": None}, require_stable=require_stable
            )
            asked = broker.requests_of(ApiKey.OFFSET_FETCH)
            versions = {version for key, version, _ in broker.requests if key is ApiKey.OFFSET_FETCH}
        assert [*results.all().values()] == [{ZERO: OffsetAndMetadata(5, "m", 2), ONE: None}] * 2
        if highest < 8:
            requested_topic = OffsetFetchRequest.OffsetFetchRequestTopic(name="t", partition_indexes=[0, 1])
            stable = require_stable and highest == 7
            assert asked == [
                OffsetFetchRequest(group_id="g", topics=[requested_topic], require_stable=stable),
                OffsetFetchRequest(group_id="h", topics=None, require_stable=stable),
            ]
            assert versions == {highest}
        else:
            named = OffsetFetchRequest.OffsetFetchRequestTopics(name="t", partition_indexes=[0, 1])
            group = OffsetFetchRequest.OffsetFetchRequestGroup
            assert asked == [
                OffsetFetchRequest(
                    groups=[group(group_id="g", topics=[named]), group(group_id="h", topics=None)],
                    require_stable=require_stable,
                )
            ]
            assert versions == {min(highest, 9)}

    async def test_an_error_of_the_group_or_of_a_partition(self) -> None:
        group = OffsetFetchResponse.OffsetFetchResponseGroup
        partition = OffsetFetchResponse.OffsetFetchResponsePartitions(
            partition_index=3, error_code=Errors.TOPIC_AUTHORIZATION_FAILED
        )
        topic = OffsetFetchResponse.OffsetFetchResponseTopics(name="t", partitions=[partition])
        answer = OffsetFetchResponse(
            groups=[
                group(group_id="g", error_code=Errors.GROUP_AUTHORIZATION_FAILED),
                group(group_id="h", topics=[topic]),
            ]
        )
        async with canned({ApiKey.OFFSET_FETCH: answer}) as broker, admin_of(broker) as admin:
            results = await admin.list_consumer_group_offsets(["g", "h"])
        assert results.errors["g"].error is Errors.GROUP_AUTHORIZATION_FAILED
        assert results.errors["h"].error is Errors.TOPIC_AUTHORIZATION_FAILED and "t-3" in str(results.errors["h"])

    async def test_alter(self) -> None:
        partition = OffsetCommitResponse.OffsetCommitResponsePartition
        partitions = [partition(partition_index=0), partition(partition_index=1, error_code=Errors.UNKNOWN_MEMBER_ID)]
        topic = OffsetCommitResponse.OffsetCommitResponseTopic(name="t", partitions=partitions)
        async with (
            canned({ApiKey.OFFSET_COMMIT: OffsetCommitResponse(topics=[topic])}) as broker,
            admin_of(broker) as admin,
        ):
            results = await admin.alter_consumer_group_offsets("g", {ONE: 4, ZERO: OffsetAndMetadata(3, "m", 2)})
            asked = broker.requests_of(ApiKey.OFFSET_COMMIT)
            assert {version for key, version, _ in broker.requests if key is ApiKey.OFFSET_COMMIT} == {9}
        requested = OffsetCommitRequest.OffsetCommitRequestPartition
        assert asked == [
            OffsetCommitRequest(
                group_id="g",
                topics=[
                    OffsetCommitRequest.OffsetCommitRequestTopic(
                        name="t",
                        partitions=[
                            requested(
                                partition_index=0,
                                committed_offset=3,
                                committed_leader_epoch=2,
                                committed_metadata="m",
                            ),
                            requested(
                                partition_index=1,
                                committed_offset=4,
                                committed_leader_epoch=-1,
                                committed_metadata="",
                            ),
                        ],
                    )
                ],
            )
        ]
        assert results.values == {ZERO: None}
        assert results.errors[ONE].error is Errors.UNKNOWN_MEMBER_ID

    async def test_delete(self) -> None:
        partition = OffsetDeleteResponse.OffsetDeleteResponsePartition
        topic = OffsetDeleteResponse.OffsetDeleteResponseTopic(
            name="t",
            partitions=[
                partition(partition_index=0),
                partition(partition_index=1, error_code=Errors.GROUP_SUBSCRIBED_TO_TOPIC),
            ],
        )
        answers = [
            OffsetDeleteResponse(error_code=Errors.COORDINATOR_LOAD_IN_PROGRESS),
            OffsetDeleteResponse(topics=[topic]),
            OffsetDeleteResponse(error_code=Errors.GROUP_ID_NOT_FOUND),
        ]
        handler: Handler = lambda request, version: answers.pop(0)  # noqa: E731
        async with canned({ApiKey.OFFSET_DELETE: handler}) as broker, admin_of(broker) as admin:
            result = await admin.delete_consumer_group_offsets("g", [ONE, ZERO])
            asked = broker.requests_of(ApiKey.OFFSET_DELETE)
            absent = await admin.delete_consumer_group_offsets("g", [ONE, ZERO])
        requested = OffsetDeleteRequest.OffsetDeleteRequestPartition
        topics = OffsetDeleteRequest.OffsetDeleteRequestTopic(
            name="t", partitions=[requested(partition_index=0), requested(partition_index=1)]
        )
        assert asked == [OffsetDeleteRequest(group_id="g", topics=[topics])] * 2
        result.partition_result(ZERO)
        with pytest.raises(KafkaError, match="GROUP_SUBSCRIBED_TO_TOPIC"):
            result.partition_result(ONE)
        with pytest.raises(KafkaError, match="GROUP_SUBSCRIBED_TO_TOPIC"):
            result.all()
        with pytest.raises(ValueError, match="t-2"):
            result.partition_result(TopicPartition("t", 2))
        assert result.results.errors.keys() == {ONE}
        assert {error.error for error in absent.results.errors.values()} == {Errors.GROUP_ID_NOT_FOUND}
        assert len(absent.results.errors) == 2


TOPIC = ConfigResource(ConfigResourceType.TOPIC, "t")
BROKER = ConfigResource(ConfigResourceType.BROKER, str(NODE_ID))
ALL_BROKERS = ConfigResource(ConfigResourceType.BROKER, "")


class TestConfigs:
    async def test_configs_of_a_new_broker_come_from_that_broker(self) -> None:
        def describe(request: Message, version: int) -> Answer:
            result = DescribeConfigsResponse.DescribeConfigsResult(resource_type=4, resource_name="2")
            return DescribeConfigsResponse(results=[result])

        resource = ConfigResource(ConfigResourceType.BROKER, "2")
        async with grown_cluster(ApiKey.DESCRIBE_CONFIGS, describe, describe) as (admin, first, second):
            for _ in range(2):
                assert (await admin.describe_configs([resource])).all() == {resource: {}}
            assert (
                len(first.requests_of(ApiKey.DESCRIBE_CONFIGS)),
                len(second.requests_of(ApiKey.DESCRIBE_CONFIGS)),
            ) == (0, 2)
            assert len(first.requests_of(ApiKey.METADATA) + second.requests_of(ApiKey.METADATA)) == 2

    @pytest.mark.parametrize("returns", [True, False], ids=["at another address", "not at all"])
    async def test_a_broker_that_is_away_fails_only_its_own_configs(self, returns: bool) -> None:
        def describe(request: Message, version: int) -> Answer:
            assert isinstance(request, DescribeConfigsRequest)
            result = DescribeConfigsResponse.DescribeConfigsResult
            return DescribeConfigsResponse(
                results=[
                    result(resource_type=resource.resource_type, resource_name=resource.resource_name)
                    for resource in request.resources
                ]
            )

        resource = ConfigResource(ConfigResourceType.BROKER, "2")
        async with grown_cluster(ApiKey.DESCRIBE_CONFIGS, describe, describe) as (admin, _, second):
            (await admin.describe_configs([resource])).all()
            await second.__aexit__()
            if returns:
                second.port = 0
                await second.open()
            results = await admin.describe_configs([resource, BROKER], timeout_ms=2000)
            assert results.errors.keys() == (set() if returns else {resource})
            assert results[BROKER] == {}

    async def test_brokers_alter_their_own_configs_and_the_controller_all_others(self) -> None:
        def alter(request: Message, version: int) -> Answer:
            assert isinstance(request, IncrementalAlterConfigsRequest)
            result = IncrementalAlterConfigsResponse.AlterConfigsResourceResponse
            return IncrementalAlterConfigsResponse(
                responses=[
                    result(resource_type=resource.resource_type, resource_name=resource.resource_name)
                    for resource in request.resources
                ]
            )

        node = ConfigResource(ConfigResourceType.BROKER, "2")
        async with grown_cluster(ApiKey.INCREMENTAL_ALTER_CONFIGS, alter, alter) as (admin, first, second):
            (await admin.incremental_alter_configs({node: [], TOPIC: []})).all()
            (to_controller,) = first.requests_of(ApiKey.INCREMENTAL_ALTER_CONFIGS)
            (to_node,) = second.requests_of(ApiKey.INCREMENTAL_ALTER_CONFIGS)
        altered = [
            [resource.resource_name for resource in request.resources]
            for request in (to_controller, to_node)
            if isinstance(request, IncrementalAlterConfigsRequest)
        ]
        assert altered == [["t"], ["2"]]

    async def test_describe(self) -> None:
        synonym = DescribeConfigsResponse.DescribeConfigsSynonym
        config = DescribeConfigsResponse.DescribeConfigsResourceResult
        result = DescribeConfigsResponse.DescribeConfigsResult

        def describe(request: Message, version: int) -> Answer:
            assert isinstance(request, DescribeConfigsRequest)
            results: dict[int, DescribeConfigsResponse.DescribeConfigsResult] = {
                TOPIC.type: result(
                    resource_type=TOPIC.type,
                    resource_name="t",
                    configs=[
                        config(
                            name="cleanup.policy",
                            value="compact",
                            config_source=1,
                            read_only=True,
                            is_sensitive=True,
                            synonyms=[synonym(name="log.cleanup.policy", value="delete", source=5)],
                            documentation="doc",
                        ),
                        config(name="new", value=None, config_source=99, documentation=None),
                    ],
                ),
                BROKER.type: result(
                    resource_type=BROKER.type,
                    resource_name=request.resources[0].resource_name,
                    configs=[config(name="node.id", value="1", config_source=5)],
                ),
            }
            return DescribeConfigsResponse(results=[results[resource.resource_type] for resource in request.resources])

        async with canned({ApiKey.DESCRIBE_CONFIGS: describe}) as broker, admin_of(broker) as admin:
            results = await admin.describe_configs({TOPIC: ["cleanup.policy"], BROKER: None}, include_synonyms=True)
            defaults = await admin.describe_configs([ALL_BROKERS], include_documentation=True)
            asked = broker.requests_of(ApiKey.DESCRIBE_CONFIGS)
            absent = await admin.describe_configs([ConfigResource(ConfigResourceType.BROKER, "9")], timeout_ms=30)
        resource = DescribeConfigsRequest.DescribeConfigsResource
        assert asked == [
            DescribeConfigsRequest(
                resources=[resource(resource_type=2, resource_name="t", configuration_keys=["cleanup.policy"])],
                include_synonyms=True,
            ),
            DescribeConfigsRequest(
                resources=[resource(resource_type=4, resource_name="1", configuration_keys=None)], include_synonyms=True
            ),
            DescribeConfigsRequest(
                resources=[resource(resource_type=4, resource_name="", configuration_keys=None)],
                include_documentation=True,
            ),
        ]
        synonyms = (ConfigSynonym("log.cleanup.policy", "delete", ConfigSource.DEFAULT_CONFIG),)
        assert results[TOPIC] == {
            "cleanup.policy": ConfigEntry(
                "cleanup.policy", "compact", ConfigSource.DYNAMIC_TOPIC_CONFIG, True, True, synonyms, "doc"
            ),
            "new": ConfigEntry("new", None, ConfigSource.UNKNOWN),
        }
        assert results[BROKER]["node.id"].is_default and not results[TOPIC]["new"].is_default
        assert defaults[ALL_BROKERS].keys() == {"node.id"}
        assert len(absent.errors) == 1

    async def test_alter(self) -> None:
        def alter(request: Message, version: int) -> Answer:
            assert isinstance(request, IncrementalAlterConfigsRequest)
            response = IncrementalAlterConfigsResponse.AlterConfigsResourceResponse
            return IncrementalAlterConfigsResponse(
                responses=[
                    response(
                        resource_type=resource.resource_type,
                        resource_name=resource.resource_name,
                        error_code=Errors.INVALID_CONFIG if resource.resource_type == 4 else Errors.NONE,
                        error_message="why",
                    )
                    for resource in request.resources
                ]
            )

        changes = {
            TOPIC: [
                AlterConfigOp("a", "1"),
                AlterConfigOp("b", operation=AlterConfigOpType.DELETE),
                AlterConfigOp("c", "2", AlterConfigOpType.APPEND),
            ],
            BROKER: [AlterConfigOp("d", "3", AlterConfigOpType.SUBTRACT)],
        }
        async with canned({ApiKey.INCREMENTAL_ALTER_CONFIGS: alter}) as broker, admin_of(broker) as admin:
            results = await admin.incremental_alter_configs(changes)
            asked = broker.requests_of(ApiKey.INCREMENTAL_ALTER_CONFIGS)
            await admin.incremental_alter_configs({TOPIC: []}, validate_only=True)
            checked = broker.requests_of(ApiKey.INCREMENTAL_ALTER_CONFIGS)[-1]
        config = IncrementalAlterConfigsRequest.AlterableConfig
        resource = IncrementalAlterConfigsRequest.AlterConfigsResource
        of_topic = [
            config(name="a", config_operation=0, value="1"),
            config(name="b", config_operation=1, value=None),
            config(name="c", config_operation=2, value="2"),
        ]
        of_broker = [config(name="d", config_operation=3, value="3")]
        assert asked == [
            IncrementalAlterConfigsRequest(
                resources=[resource(resource_type=2, resource_name="t", configs=of_topic)], validate_only=False
            ),
            IncrementalAlterConfigsRequest(
                resources=[resource(resource_type=4, resource_name="1", configs=of_broker)], validate_only=False
            ),
        ]
        assert isinstance(checked, IncrementalAlterConfigsRequest) and checked.validate_only
        assert results.values == {TOPIC: None}
        assert "why" in str(results.errors[BROKER])

    @pytest.mark.parametrize(
        ("types", "highest", "works"),
        [
            ([ConfigResourceType.CLIENT_METRICS], 0, True),
            ([], 0, False),
            ([ConfigResourceType.GROUP], 0, False),
            ([ConfigResourceType.CLIENT_METRICS, ConfigResourceType.GROUP], 0, False),
            ([ConfigResourceType.GROUP, ConfigResourceType.TOPIC, ConfigResourceType.GROUP], 1, True),
        ],
    )
    async def test_list_config_resources(self, types: list[ConfigResourceType], highest: int, works: bool) -> None:
        resource = ListConfigResourcesResponse.ConfigResource(resource_name="m", resource_type=16)
        answer = ListConfigResourcesResponse(config_resources=[resource])
        broker = canned({ApiKey.LIST_CONFIG_RESOURCES: answer}, list_config_resources=(0, highest))
        async with broker, admin_of(broker) as admin:
            if not works:
                with pytest.raises(UnsupportedVersionException):
                    await admin.list_config_resources(types)
                return
            listed = await admin.list_config_resources(types)
            assert listed == [ConfigResource(ConfigResourceType.CLIENT_METRICS, "m")]
            if highest:
                assert broker.requests_of(ApiKey.LIST_CONFIG_RESOURCES) == [
                    ListConfigResourcesRequest(resource_types=[2, 32])
                ]

    async def test_list_config_resources_fails_as_a_whole(self) -> None:
        answer = ListConfigResourcesResponse(error_code=Errors.CLUSTER_AUTHORIZATION_FAILED)
        async with canned({ApiKey.LIST_CONFIG_RESOURCES: answer}) as broker, admin_of(broker) as admin:
            with pytest.raises(KafkaError, match="CLUSTER_AUTHORIZATION_FAILED"):
                await admin.list_config_resources()
