# SPDX-License-Identifier: Apache-2.0
"""ApiVersions in front of an upstream lists what both sides have, and responses show the ports of the gateway."""

from __future__ import annotations

import asyncio
from typing import TypeAlias, TypeVar
from unittest.mock import AsyncMock

import pytest

from kcoord.metadata.upstream import UpstreamBroker, UpstreamPartition, UpstreamSnapshot, UpstreamTopic, follow
from kcoord.server.replies import internal_operation_context
from kcoord.server.shards.metadata_service import LocalMetadataService
from kcoord.upstream import gateway
from kcoord.upstream.cluster import BrokerVersions
from kcoord.upstream.versions import UNSERVED_APIS, common_versions, forwarded_versions
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors
from kcoord_protocol.framing import decode_request_header, decode_response_header, encode_response
from kcoord_protocol.messages import (
    ApiVersionsRequest,
    ApiVersionsResponse,
    CreateTopicsRequest,
    CreateTopicsResponse,
    DescribeClusterRequest,
    DescribeClusterResponse,
    DescribeConfigsRequest,
    DescribeConfigsResponse,
    FindCoordinatorRequest,
    FindCoordinatorResponse,
    IncrementalAlterConfigsRequest,
    IncrementalAlterConfigsResponse,
    ListConfigResourcesRequest,
    ListConfigResourcesResponse,
    Message,
    MetadataRequest,
    MetadataResponse,
)
from tests.unit.upstream.harness import NODE_ID, Dialogue, Stage, stage

R = TypeVar("R", bound=Message)
AlteredResource: TypeAlias = IncrementalAlterConfigsRequest.AlterConfigsResource
AlteredConfig: TypeAlias = IncrementalAlterConfigsRequest.AlterableConfig

VERSIONS = ApiVersionsRequest(client_software_name="a", client_software_version="1")
TOPIC_ID = bytes(range(16))
TOPIC = 2
GROUP = 32


def decoded(frame: bytes, kind: type[R], version: int) -> R:
    _, position = decode_response_header(frame, kind.api_key, version)
    return kind.decode(frame[position:], version)


async def ask_versions(
    on_stage: Stage, node_id: int | None, request: ApiVersionsRequest = VERSIONS
) -> ApiVersionsResponse:
    dialogue = on_stage.connect(node_id)
    version = 4 if request is VERSIONS else 5
    await dialogue.send(dialogue.frame(request, version))
    return decoded(dialogue.received[0], ApiVersionsResponse, version)


async def converse(dialogue: Dialogue, request: Message, version: int, sent: int, answer: Message) -> bytes:
    """Sends a request, which the upstream gets in version `sent`. Returns the frame that the client gets."""
    before = len(dialogue.passed_on)
    frame = dialogue.frame(request, version)
    await dialogue.send(frame)
    passed_on = dialogue.passed_on[before:]
    assert passed_on == frame[:6] + sent.to_bytes(2) + frame[8:]
    header, _ = decode_request_header(passed_on[4:])
    dialogue.link.data_received(
        encode_response(header.correlation_id, ApiKey(request.api_key), sent, answer.encode(sent))
    )
    await dialogue.settle()
    return dialogue.received[-1]


@pytest.mark.parametrize("node_id", [NODE_ID, None])
async def test_versions_are_those_of_both_sides(node_id: int | None) -> None:
    async with stage(kcoord_kip1327_revisions="*:off") as on_stage:
        versions = on_stage.upstream.versions[NODE_ID]
        ranges = {**versions.ranges, ApiKey.CREATE_TOPICS: range(5, 6), ApiKey.FIND_COORDINATOR: range(0, 4)}
        del ranges[ApiKey.DESCRIBE_QUORUM]
        ranges[ApiKey.CONSUMER_GROUP_HEARTBEAT] = range(0)
        on_stage.upstream.versions[NODE_ID] = BrokerVersions(ranges, versions.supported_features, {}, 3)
        response = await ask_versions(on_stage, node_id)
        listed = {api.api_key: (api.min_version, api.max_version) for api in response.api_keys}
        assert listed[ApiKey.PRODUCE][1] == 9
        assert listed[ApiKey.FETCH] == (4, 15)
        assert listed[ApiKey.METADATA] == (0, 13)
        assert listed[ApiKey.CREATE_TOPICS] == (5, 5)
        assert listed[ApiKey.FIND_COORDINATOR] == (0, 3)
        assert listed[ApiKey.CONSUMER_GROUP_HEARTBEAT] == (0, 1)
        assert listed[ApiKey.JOIN_GROUP] == (0, 9)
        assert ApiKey.DESCRIBE_QUORUM not in listed
        assert not UNSERVED_APIS & listed.keys()


async def test_features_are_the_upstreams_with_two_exceptions() -> None:
    async with stage() as on_stage:
        response = await ask_versions(on_stage, NODE_ID)
        assert {feature.name: feature.max_version_level for feature in response.finalized_features} == {
            "group.version": 1,
            "transaction.version": 1,
        }
        supported = {feature.name: feature.max_version for feature in response.supported_features}
        assert supported == {"group.version": 1, "transaction.version": 1}
        assert response.finalized_features_epoch == 7


async def test_creation_times_are_offered_to_clients_that_know_them() -> None:
    async with stage(kcoord_kip1327_revisions="*:creation-time") as on_stage:
        listed = {api.api_key: api.max_version for api in (await ask_versions(on_stage, NODE_ID)).api_keys}
        assert listed[ApiKey.METADATA] == 14
        assert listed[ApiKey.DESCRIBE_TOPIC_PARTITIONS] == 1


@pytest.mark.parametrize(
    ("port", "cluster_id", "node_id", "error"),
    [
        (NODE_ID, "own", NODE_ID, Errors.NONE),
        (NODE_ID, "own", 100, Errors.REBOOTSTRAP_REQUIRED),
        (NODE_ID, "other", NODE_ID, Errors.REBOOTSTRAP_REQUIRED),
        (None, "own", 100, Errors.NONE),
        (None, "own", NODE_ID, Errors.REBOOTSTRAP_REQUIRED),
    ],
)
async def test_each_port_knows_the_cluster_and_the_broker_it_stands_for(
    port: int | None, cluster_id: str, node_id: int, error: Errors
) -> None:
    """KIP-1242."""
    async with stage() as on_stage:
        expected = on_stage.broker.cluster_id if cluster_id == "own" else cluster_id
        request = ApiVersionsRequest(
            client_software_name="a", client_software_version="1", cluster_id=expected, node_id=node_id
        )
        assert (await ask_versions(on_stage, port, request)).error_code == error


def test_common_versions_are_those_of_all_brokers() -> None:
    old = BrokerVersions({1: range(4, 12), 3: range(0, 9)}, {}, {"a": 1}, 1)
    new = BrokerVersions({1: range(6, 18), 55: range(0, 2)}, {}, {"a": 2}, 5)
    assert common_versions([old, new]) == BrokerVersions({1: range(6, 12)}, {}, {"a": 2}, 5)
    assert common_versions([]) == BrokerVersions({})


def test_an_api_without_a_common_version_is_not_passed_on() -> None:
    assert forwarded_versions(BrokerVersions({ApiKey.FETCH: range(16, 19), ApiKey.CREATE_ACLS: range(1, 2)})) == {
        ApiKey.CREATE_ACLS: range(1, 2)
    }


def metadata(topics: list[MetadataResponse.MetadataResponseTopic]) -> MetadataResponse:
    brokers = [
        MetadataResponse.MetadataResponseBroker(node_id=NODE_ID, host="upstream", port=1, rack="a"),
        MetadataResponse.MetadataResponseBroker(node_id=2, host="has-no-port", port=2, rack=None),
    ]
    return MetadataResponse(brokers=brokers, cluster_id="upstream", controller_id=NODE_ID, topics=topics)


async def add_topic(on_stage: Stage, name: str = "t") -> int:
    """Adds a topic with one partition to the image. Returns its creation time."""
    service = on_stage.broker.metadata
    assert isinstance(service, LocalMetadataService)
    topic = UpstreamTopic(name, TOPIC_ID, [UpstreamPartition(NODE_ID, 3, (NODE_ID,), (NODE_ID,))])
    snapshot = UpstreamSnapshot([UpstreamBroker(NODE_ID, "upstream", 1, "a")], [topic])
    await service.call(
        lambda machine, context, request: follow(machine.image, request, {TOPIC_ID: [context.now_ms]}),
        snapshot,
        internal_operation_context(on_stage.broker.now_ms()),
    )
    return on_stage.broker.image.topics[name].partitions[0].creation_time_ms


async def test_metadata_has_the_ports_of_the_gateway_and_kcoord() -> None:
    async with stage(broker_rack="r") as on_stage:
        creation_time_ms = await add_topic(on_stage)
        partition = MetadataResponse.MetadataResponsePartition(partition_index=0, leader_id=NODE_ID, leader_epoch=3)
        topic = MetadataResponse.MetadataResponseTopic(name="t", topic_id=TOPIC_ID, partitions=[partition])
        request = MetadataRequest(topics=[MetadataRequest.MetadataRequestTopic(name="t")])
        for version in (0, 8, 12, 13, 14):
            sent = min(version, 13)
            frame = await converse(on_stage.connect(), request, version, sent, metadata([topic]))
            response = decoded(frame, MetadataResponse, version)
            assert [(broker.node_id, broker.host, broker.port) for broker in response.brokers] == [
                (NODE_ID, "gateway", 9101),
                (100, "gateway", 9092),
            ]
            if version:
                assert response.brokers[-1].rack == "r"
                assert response.controller_id == NODE_ID
            (shown,) = response.topics[0].partitions
            assert shown.leader_id == NODE_ID
            assert shown.creation_time_ms == (creation_time_ms if version == 14 else -1)


async def test_cluster_descriptions_have_the_ports_of_the_gateway_and_kcoord() -> None:
    async with stage() as on_stage:
        brokers = [DescribeClusterResponse.DescribeClusterBroker(broker_id=NODE_ID, host="upstream", port=1)]
        answer = DescribeClusterResponse(cluster_id="upstream", controller_id=NODE_ID, brokers=brokers)
        response = decoded(
            await converse(on_stage.connect(), DescribeClusterRequest(), 2, 2, answer), DescribeClusterResponse, 2
        )
        assert [(broker.broker_id, broker.host, broker.port) for broker in response.brokers] == [
            (NODE_ID, "gateway", 9101),
            (100, "gateway", 9092),
        ]


@pytest.mark.parametrize("version", [3, 6])
async def test_coordinators_of_groups_are_here_and_those_of_transactions_in_the_upstream(version: int) -> None:
    async with stage() as on_stage:
        dialogue = on_stage.connect(None)
        request = FindCoordinatorRequest(key_type=1)
        answer = FindCoordinatorResponse()
        if version < 4:
            request.key, answer.node_id, answer.host, answer.port = "x", NODE_ID, "upstream", 1
        else:
            request.coordinator_keys = ["x", "y"]
            answer.coordinators = [
                FindCoordinatorResponse.Coordinator(key="x", node_id=NODE_ID, host="upstream", port=1),
                FindCoordinatorResponse.Coordinator(key="y", node_id=2, host="has-no-port", port=2),
            ]
        response = decoded(
            await converse(dialogue, request, version, version, answer), FindCoordinatorResponse, version
        )
        coordinator = response.coordinators[0] if version >= 4 else response
        assert (coordinator.node_id, coordinator.host, coordinator.port, coordinator.error_code) == (
            NODE_ID,
            "gateway",
            9101,
            0,
        )
        if version >= 4:
            assert response.coordinators[1].error_code == Errors.COORDINATOR_NOT_AVAILABLE
            assert response.coordinators[1].node_id == -1
        written = dialogue.transport.written
        request = FindCoordinatorRequest(key_type=0, key="g", coordinator_keys=["g"])
        if version >= 4:
            request.key = ""
        else:
            request.coordinator_keys = []
        count = len(dialogue.received)
        await dialogue.send(dialogue.frame(request, version))
        while len(dialogue.received) == count:
            await dialogue.settle()
        response = decoded(dialogue.received[-1], FindCoordinatorResponse, version)
        coordinator = response.coordinators[0] if version >= 4 else response
        assert coordinator.node_id == on_stage.broker.node_id
        assert dialogue.transport.written == written


async def test_configs_of_groups_are_kcoords_and_all_others_the_upstreams() -> None:
    Resource = DescribeConfigsRequest.DescribeConfigsResource
    async with stage() as on_stage:
        dialogue = on_stage.connect()
        request = DescribeConfigsRequest(resources=[Resource(resource_type=TOPIC, resource_name="t")])
        await converse(dialogue, request, 4, 4, DescribeConfigsResponse())
        count = len(dialogue.transport.written)
        for resource_type, name in ((GROUP, "g"), (4, str(on_stage.broker.node_id))):
            request = DescribeConfigsRequest(resources=[Resource(resource_type=resource_type, resource_name=name)])
            await dialogue.send(dialogue.frame(request, 4))
            (result,) = decoded(dialogue.received[-1], DescribeConfigsResponse, 4).results
            assert (result.error_code, result.resource_name) == (0, name)
            assert result.configs
        await dialogue.send(dialogue.frame(ListConfigResourcesRequest(resource_types=[GROUP]), 1))
        assert decoded(dialogue.received[-1], ListConfigResourcesResponse, 1).error_code == 0
        assert len(dialogue.transport.written) == count


@pytest.mark.parametrize("validate_only", [False, True])
async def test_configs_of_groups_go_through_the_log_that_all_instances_share(validate_only: bool) -> None:
    name = "consumer.session.timeout.ms"
    async with stage() as on_stage:
        dialogue = on_stage.connect()

        async def alter(value: str, *further: AlteredResource) -> list[int]:
            resource = AlteredResource(
                resource_type=GROUP, resource_name="g", configs=[AlteredConfig(name=name, value=value)]
            )
            request = IncrementalAlterConfigsRequest(resources=[resource, *further], validate_only=validate_only)
            count = len(dialogue.received)
            await dialogue.send(dialogue.frame(request, 1))
            while len(dialogue.received) == count:
                await dialogue.settle()
            responses = decoded(dialogue.received[-1], IncrementalAlterConfigsResponse, 1).responses
            return [response.error_code for response in responses]

        assert await alter("1") == [Errors.INVALID_CONFIG]
        own = AlteredResource(
            resource_type=4,
            resource_name=str(on_stage.broker.node_id),
            configs=[AlteredConfig(name="log.cleaner.backoff.ms", value="1000")],
        )
        assert await alter("50000", own) == [0, 0]
        expected = {} if validate_only else {"g": {name: "50000"}}
        assert on_stage.shared.state.group_configs == expected
        assert on_stage.broker.image.configs.get((GROUP, "g"), {}) == expected.get("g", {})
        assert bool(on_stage.broker.image.broker_configs(on_stage.broker.node_id)) is not validate_only


async def test_configs_that_another_instance_has_set_replace_the_own_ones() -> None:
    async with stage() as on_stage:
        metadata, state = on_stage.gateway.metadata, on_stage.shared.state
        state.group_configs["g"] = {"consumer.session.timeout.ms": "50000"}
        await metadata.follow_shared()
        assert on_stage.broker.image.configs[GROUP, "g"] == {"consumer.session.timeout.ms": "50000"}
        state.group_configs.clear()
        await metadata.follow_shared()
        assert (GROUP, "g") not in on_stage.broker.image.configs


async def test_new_partitions_get_their_times_in_the_log_that_all_instances_share() -> None:
    async with stage() as on_stage:
        metadata, state = on_stage.gateway.metadata, on_stage.shared.state
        partition = UpstreamPartition(NODE_ID, 0, (NODE_ID,), (NODE_ID,))
        state.creation_times[TOPIC_ID] = [7]
        assert metadata.lacks_partitions()
        await metadata.follow_upstream(UpstreamSnapshot([], [UpstreamTopic("t", TOPIC_ID, [partition, partition])]))
        times = [partition.creation_time_ms for partition in on_stage.broker.image.topics["t"].partitions]
        assert times == list(state.creation_times[TOPIC_ID])
        assert times[0] == 7 < times[1]
        assert not metadata.lacks_partitions()
        await metadata.follow_upstream(UpstreamSnapshot([], [], ["t"]))
        assert state.creation_times == {}
        assert "t" not in on_stage.broker.image.topics


async def test_one_request_cannot_change_configs_of_both_sides() -> None:
    Resource = IncrementalAlterConfigsRequest.AlterConfigsResource
    async with stage() as on_stage:
        dialogue = on_stage.connect()
        resources = [Resource(resource_type=TOPIC, resource_name="t"), Resource(resource_type=GROUP, resource_name="g")]
        await dialogue.send(dialogue.frame(IncrementalAlterConfigsRequest(resources=resources), 1))
        responses = decoded(dialogue.received[-1], IncrementalAlterConfigsResponse, 1).responses
        assert {answer.error_code for answer in responses} == {Errors.INVALID_REQUEST}
        assert not on_stage.upstream.opened


async def test_a_response_about_a_new_topic_waits_until_groups_can_consume_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async with stage() as on_stage:
        looks = 0

        async def look() -> None:
            nonlocal looks
            looks += 1
            if looks == 3:
                await add_topic(on_stage)

        monkeypatch.setattr(on_stage.gateway, "look", look)
        dialogue = on_stage.connect()
        request = CreateTopicsRequest(topics=[CreateTopicsRequest.CreatableTopic(name="t")])
        await dialogue.send(dialogue.frame(request, 7))
        answer = CreateTopicsResponse(topics=[CreateTopicsResponse.CreatableTopicResult(name="t", topic_id=TOPIC_ID)])
        data = encode_response(1, ApiKey.CREATE_TOPICS, 7, answer.encode(7))
        dialogue.link.data_received(data)
        while not dialogue.client.written:
            await dialogue.settle()
        assert "t" in on_stage.broker.image.topics
        assert dialogue.client.written == data
        assert looks == 3


@pytest.mark.parametrize(
    ("topic_id", "partitions"),
    [pytest.param(bytes(reversed(TOPIC_ID)), 1, id="created again"), pytest.param(TOPIC_ID, 2, id="more partitions")],
)
async def test_metadata_about_a_changed_topic_waits_until_groups_have_the_change(
    topic_id: bytes, partitions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then, offsets of the new topic would count as those of the old one, and would be deleted with it."""
    async with stage() as on_stage:
        await add_topic(on_stage)
        shown = [UpstreamPartition(NODE_ID, 3, (NODE_ID,), (NODE_ID,))] * partitions
        snapshot = UpstreamSnapshot([], [UpstreamTopic("t", topic_id, shown)], ["t"])
        looks = 0

        async def look() -> None:
            nonlocal looks
            looks += 1
            if looks == 2:
                await on_stage.gateway.metadata.follow_upstream(snapshot)

        monkeypatch.setattr(on_stage.gateway, "look", look)
        dialogue = on_stage.connect()
        answer = metadata(
            [
                MetadataResponse.MetadataResponseTopic(
                    name="t",
                    topic_id=topic_id,
                    partitions=[
                        MetadataResponse.MetadataResponsePartition(partition_index=number)
                        for number in range(partitions)
                    ],
                )
            ]
        )
        request = MetadataRequest(topics=[MetadataRequest.MetadataRequestTopic(name="t")])
        await dialogue.send(dialogue.frame(request, 12))
        dialogue.link.data_received(encode_response(1, ApiKey.METADATA, 12, answer.encode(12)))
        while not dialogue.client.written:
            await dialogue.settle()
        topic = on_stage.broker.image.topics["t"]
        assert (topic.id, len(topic.partitions), looks) == (topic_id, partitions, 2)
        await converse(dialogue, request, 12, 12, answer)
        assert looks == 2


async def test_no_response_waits_for_topics_that_were_only_validated(monkeypatch: pytest.MonkeyPatch) -> None:
    async with stage() as on_stage:
        look = AsyncMock()
        monkeypatch.setattr(on_stage.gateway, "look", look)
        topics = [CreateTopicsRequest.CreatableTopic(name="t")]
        answer = CreateTopicsResponse(topics=[CreateTopicsResponse.CreatableTopicResult(name="t", topic_id=TOPIC_ID)])
        dialogue = on_stage.connect()
        request = CreateTopicsRequest(topics=topics, validate_only=True)
        received = await converse(dialogue, request, 7, 7, answer)
        assert decoded(received, CreateTopicsResponse, 7) == answer
        look.assert_not_awaited()


async def test_only_one_response_waits_for_a_topic_that_kcoords_user_may_not_see(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gateway, "KNOWN_SECONDS", 0.1)
    async with stage() as on_stage:
        look = AsyncMock()
        monkeypatch.setattr(on_stage.gateway, "look", look)
        dialogue = on_stage.connect()
        seen = MetadataResponse(topics=[MetadataResponse.MetadataResponseTopic(name="t", topic_id=TOPIC_ID)])
        request = MetadataRequest(topics=[MetadataRequest.MetadataRequestTopic(name="t")])
        await dialogue.send(dialogue.frame(request, 12))
        dialogue.link.data_received(encode_response(1, ApiKey.METADATA, 12, seen.encode(12)))
        while not dialogue.client.written:
            await asyncio.sleep(0.01)
            await dialogue.settle()
        before = look.await_count
        assert before > 1
        await converse(dialogue, request, 12, 12, seen)
        assert len(dialogue.received) == 2
        assert look.await_count == before


async def test_a_response_leaves_although_the_look_before_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    async with stage() as on_stage:

        async def look() -> None:
            raise AssertionError("planted")

        monkeypatch.setattr(on_stage.gateway, "look", look)
        request = CreateTopicsRequest(topics=[CreateTopicsRequest.CreatableTopic(name="t")])
        answer = CreateTopicsResponse(topics=[CreateTopicsResponse.CreatableTopicResult(name="t", topic_id=TOPIC_ID)])
        dialogue = on_stage.connect()
        await converse(dialogue, request, 7, 7, answer)
        assert len(dialogue.received) == 1
