# SPDX-License-Identifier: Apache-2.0
"""What clients see of resources that ACLs do not allow them to use, through the real request path."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kcoord.server.api.api_table import Api, BoundApi, Client, RequestContext
from kcoord.server.api.authorization import MOST_LOGGED, TRACE
from kcoord.server.net.path_settings import PathSettings
from kcoord_protocol.acls import AclOperation, PatternType, PermissionType, ResourceType
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors
from kcoord_protocol.messages import (
    ConsumerGroupDescribeRequest,
    ConsumerGroupDescribeResponse,
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
    CreateTopicsRequest,
    CreateTopicsResponse,
    DeleteTopicsRequest,
    DeleteTopicsResponse,
    DescribeClusterRequest,
    DescribeClusterResponse,
    DescribeGroupsRequest,
    DescribeGroupsResponse,
    FetchRequest,
    FetchResponse,
    FindCoordinatorRequest,
    FindCoordinatorResponse,
    InitProducerIdRequest,
    InitProducerIdResponse,
    ListGroupsRequest,
    ListGroupsResponse,
    MetadataRequest,
    MetadataResponse,
    OffsetCommitRequest,
    OffsetCommitResponse,
    OffsetFetchRequest,
    OffsetFetchResponse,
)
from kcoord_protocol.uuid import ZERO_UUID
from tests.unit.server.people import Cluster, Person, allow, running_cluster

ALICE, BOB = "User:alice", "User:bob"
TOPIC, GROUP = ResourceType.TOPIC, ResourceType.GROUP
Op = AclOperation


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with running_cluster(auto_create_topics_enable="true") as running:
        await running.create_topics("mine", "other")
        yield running


def named(*names: str, **fields: Any) -> MetadataRequest:
    topics = [MetadataRequest.MetadataRequestTopic(name=name) for name in names]
    return MetadataRequest(topics=topics, **{"allow_auto_topic_creation": False, **fields})


def errors_by_name(response: MetadataResponse) -> dict[str | None, int]:
    return {topic.name: topic.error_code for topic in response.topics}


def heartbeat(member: str, epoch: int = 0, **fields: Any) -> ConsumerGroupHeartbeatRequest:
    if epoch == 0:
        fields = {"rebalance_timeout_ms": 60_000, "topic_partitions": [], **fields}
    return ConsumerGroupHeartbeatRequest(group_id="g", member_id=member, member_epoch=epoch, **fields)


def commit(topic: str, offset: int, group: str = "g") -> OffsetCommitRequest:
    partition = OffsetCommitRequest.OffsetCommitRequestPartition(partition_index=0, committed_offset=offset)
    return OffsetCommitRequest(
        group_id=group,
        generation_id_or_member_epoch=-1,
        topics=[OffsetCommitRequest.OffsetCommitRequestTopic(name=topic, partitions=[partition])],
    )


def fetch_offsets(*topics: str) -> OffsetFetchRequest:
    asked = [OffsetFetchRequest.OffsetFetchRequestTopics(name=topic, partition_indexes=[0]) for topic in topics]
    group = OffsetFetchRequest.OffsetFetchRequestGroup(group_id="g", topics=asked or None)
    return OffsetFetchRequest(groups=[group])


async def committed(person: Person, topic: str, offset: int) -> int:
    response = await person.ask(commit(topic, offset), 9, OffsetCommitResponse)
    return response.topics[0].partitions[0].error_code


# --- topics -----------------------------------------------------------------------------------------------------------


async def test_metadata_does_not_say_whether_a_hidden_topic_exists(cluster: Cluster) -> None:
    await cluster.grant(allow(ALICE, Op.READ, TOPIC, "mine"))
    alice = Person(cluster.broker, ALICE)
    by_name = await alice.ask(named("mine", "other", "nowhere"), 12, MetadataResponse)
    hidden = Errors.TOPIC_AUTHORIZATION_FAILED
    assert errors_by_name(by_name) == {"mine": 0, "other": hidden, "nowhere": hidden}
    assert {topic.topic_id for topic in by_name.topics} == {cluster.topic_id("mine"), ZERO_UUID}
    everything = await alice.ask(MetadataRequest(topics=None), 12, MetadataResponse)
    assert errors_by_name(everything) == {"mine": 0}
    ids = [cluster.topic_id("other"), bytes(15) + b"\1"]
    by_id = await alice.ask(
        MetadataRequest(topics=[MetadataRequest.MetadataRequestTopic(name=None, topic_id=id_) for id_ in ids]),
        12,
        MetadataResponse,
    )
    assert {topic.topic_id: topic.error_code for topic in by_id.topics} == {
        ids[0]: Errors.TOPIC_AUTHORIZATION_FAILED,
        ids[1]: Errors.UNKNOWN_TOPIC_ID,
    }
    assert {topic.name for topic in by_id.topics} == {None}


async def test_metadata_creates_only_topics_that_the_client_may_create(cluster: Cluster) -> None:
    await cluster.grant(
        allow(ALICE, Op.READ, TOPIC, "new-", pattern_type=PatternType.PREFIXED),
        allow(ALICE, Op.CREATE, TOPIC, "new-1"),
    )
    alice = Person(cluster.broker, ALICE)
    request = named("new-1", "new-2", "foreign", allow_auto_topic_creation=True)
    created = await alice.ask(request, 12, MetadataResponse)
    hidden = Errors.TOPIC_AUTHORIZATION_FAILED
    assert errors_by_name(created) == {"new-1": 0, "new-2": hidden, "foreign": hidden}
    assert "new-1" in cluster.broker.image.topics
    assert cluster.broker.image.topics.keys().isdisjoint({"new-2", "foreign"})
    await cluster.grant(allow(ALICE, Op.CREATE, ResourceType.CLUSTER, "kafka-cluster"))
    again = await alice.ask(named("new-2", allow_auto_topic_creation=True), 12, MetadataResponse)
    assert errors_by_name(again) == {"new-2": 0}


async def test_configs_of_new_topics_are_left_out_without_the_right(cluster: Cluster) -> None:
    await cluster.grant(allow(ALICE, Op.CREATE, TOPIC, "a"), allow(ALICE, Op.CREATE, TOPIC, "b"))
    await cluster.grant(allow(ALICE, Op.DESCRIBE_CONFIGS, TOPIC, "b"))
    topics = [CreateTopicsRequest.CreatableTopic(name=name, num_partitions=1, replication_factor=1) for name in "abc"]
    alice = Person(cluster.broker, ALICE)
    created = await alice.ask(CreateTopicsRequest(topics=topics, timeout_ms=1000), 7, CreateTopicsResponse)
    a, b, c = sorted(created.topics, key=lambda topic: topic.name)
    assert (a.error_code, a.topic_config_error_code, a.num_partitions, a.configs) == (
        0,
        Errors.TOPIC_AUTHORIZATION_FAILED,
        -1,
        [],
    )
    assert (b.error_code, b.topic_config_error_code, b.num_partitions) == (0, 0, 1)
    assert b.configs
    assert (c.error_code, c.error_message) == (Errors.TOPIC_AUTHORIZATION_FAILED, "Authorization failed.")


async def test_deletion_by_id_reveals_no_name(cluster: Cluster) -> None:
    await cluster.grant(allow(ALICE, Op.DESCRIBE, TOPIC, "mine"), allow(ALICE, Op.DELETE, TOPIC, "gone"))
    alice = Person(cluster.broker, ALICE)
    state = DeleteTopicsRequest.DeleteTopicState
    mine, other, unknown = cluster.topic_id("mine"), cluster.topic_id("other"), bytes(15) + b"\1"
    states = [state(name=None, topic_id=id_) for id_ in (mine, other, unknown)]
    states += [state(name=name) for name in ("nowhere", "gone")]
    deleted = await alice.ask(DeleteTopicsRequest(topics=states, timeout_ms=1000), 6, DeleteTopicsResponse)
    assert {(topic.name, topic.topic_id, topic.error_code) for topic in deleted.responses} == {
        ("mine", mine, Errors.TOPIC_AUTHORIZATION_FAILED),
        (None, other, Errors.TOPIC_AUTHORIZATION_FAILED),
        (None, unknown, Errors.UNKNOWN_TOPIC_ID),
        ("nowhere", ZERO_UUID, Errors.TOPIC_AUTHORIZATION_FAILED),
        ("gone", ZERO_UUID, Errors.UNKNOWN_TOPIC_OR_PARTITION),
    }
    assert {"mine", "other"} <= cluster.broker.image.topics.keys()
    await cluster.grant(allow(ALICE, Op.DELETE, TOPIC, "mine"))
    request = DeleteTopicsRequest(topics=[state(name="mine"), state(name="other")], timeout_ms=1000)
    deleted = await alice.ask(request, 6, DeleteTopicsResponse)
    assert {topic.name: topic.error_code for topic in deleted.responses} == {
        "mine": 0,
        "other": Errors.TOPIC_AUTHORIZATION_FAILED,
    }


async def test_a_fetch_session_loses_a_topic_with_the_right_to_read_it(cluster: Cluster) -> None:
    rights = allow(ALICE, Op.READ, TOPIC, "mine"), allow(ALICE, Op.READ, TOPIC, "other")
    await cluster.grant(*rights)
    alice = Person(cluster.broker, ALICE)
    partition = FetchRequest.FetchPartition(partition=0, partition_max_bytes=1 << 20)
    topics = [
        FetchRequest.FetchTopic(topic_id=cluster.topic_id(name), partitions=[partition]) for name in ("mine", "other")
    ]
    full = await alice.ask(FetchRequest(max_wait_ms=0, session_epoch=0, topics=topics), 17, FetchResponse)
    assert [topic.partitions[0].error_code for topic in full.responses] == [0, 0]
    await cluster.revoke(rights[1])
    rest = FetchRequest(max_wait_ms=0, session_id=full.session_id, session_epoch=1, topics=[])
    later = await alice.ask(rest, 17, FetchResponse)
    assert [(topic.topic_id, topic.partitions[0].error_code) for topic in later.responses] == [
        (cluster.topic_id("other"), Errors.TOPIC_AUTHORIZATION_FAILED)
    ]


async def test_authorized_operations_are_those_of_the_client(cluster: Cluster) -> None:
    await cluster.grant(
        allow(ALICE, Op.READ, TOPIC, "mine"),
        allow(ALICE, Op.READ, GROUP, "g"),
        allow(ALICE, Op.ALTER_CONFIGS, GROUP, "g"),
    )
    alice = Person(cluster.broker, ALICE)
    metadata = await alice.ask(named("mine", include_topic_authorized_operations=True), 12, MetadataResponse)
    assert metadata.topics[0].topic_authorized_operations == 1 << Op.READ | 1 << Op.DESCRIBE
    await alice.ask(heartbeat("m", subscribed_topic_names=["mine"]), 1, ConsumerGroupHeartbeatResponse)
    describe = ConsumerGroupDescribeRequest(group_ids=["g"], include_authorized_operations=True)
    described = await alice.ask(describe, 1, ConsumerGroupDescribeResponse)
    on_group = (Op.READ, Op.DESCRIBE, Op.DESCRIBE_CONFIGS, Op.ALTER_CONFIGS)
    assert described.groups[0].authorized_operations == sum(1 << operation for operation in on_group)
    ask_cluster = DescribeClusterRequest(include_cluster_authorized_operations=True)
    assert (await alice.ask(ask_cluster, 1, DescribeClusterResponse)).cluster_authorized_operations == 0
    await cluster.grant(allow(ALICE, Op.ALTER, ResourceType.CLUSTER, "kafka-cluster"))
    described_cluster = await alice.ask(ask_cluster, 1, DescribeClusterResponse)
    assert described_cluster.cluster_authorized_operations == 1 << Op.ALTER | 1 << Op.DESCRIBE


async def test_an_idempotent_producer_may_write_to_some_topic(cluster: Cluster) -> None:
    alice = Person(cluster.broker, ALICE)
    request = InitProducerIdRequest(transactional_id=None)
    refused = await alice.ask(request, 4, InitProducerIdResponse)
    assert (refused.error_code, refused.producer_id) == (Errors.CLUSTER_AUTHORIZATION_FAILED, -1)
    await cluster.grant(allow(ALICE, Op.WRITE, TOPIC, "mine"))
    assert (await alice.ask(request, 4, InitProducerIdResponse)).error_code == 0


# --- groups -----------------------------------------------------------------------------------------------------------


async def test_only_old_versions_of_find_coordinator_have_a_message(cluster: Cluster) -> None:
    """Observed in Kafka 4.4.0 with v4."""
    alice = Person(cluster.broker, ALICE)
    request = FindCoordinatorRequest(key_type=0, coordinator_keys=["g"])
    (hidden,) = (await alice.ask(request, 4, FindCoordinatorResponse)).coordinators
    assert (hidden.error_code, hidden.error_message) == (Errors.GROUP_AUTHORIZATION_FAILED, "")
    old = await alice.ask(FindCoordinatorRequest(key_type=0, key="g"), 3, FindCoordinatorResponse)
    assert (old.error_code, old.error_message) == (Errors.GROUP_AUTHORIZATION_FAILED, "Group authorization failed.")


async def test_a_group_with_a_hidden_topic_is_described_as_an_error(cluster: Cluster) -> None:
    await cluster.grant(allow(ALICE, Op.READ, GROUP, "g"), allow(BOB, Op.DESCRIBE, GROUP, "g"))
    await cluster.grant(allow(ALICE, Op.READ, TOPIC, "mine"))
    alice, bob = Person(cluster.broker, ALICE), Person(cluster.broker, BOB)
    await alice.ask(heartbeat("m", subscribed_topic_names=["mine"]), 1, ConsumerGroupHeartbeatResponse)
    request = ConsumerGroupDescribeRequest(group_ids=["g", "unknown"])
    hidden, other = (await bob.ask(request, 1, ConsumerGroupDescribeResponse)).groups[::-1]
    assert (other.group_id, other.error_code) == ("unknown", Errors.GROUP_AUTHORIZATION_FAILED)
    assert (hidden.group_id, hidden.error_code, hidden.members) == ("g", Errors.TOPIC_AUTHORIZATION_FAILED, [])
    assert hidden.error_message == ("The group has described topic(s) that the client is not authorized to describe.")
    assert (await alice.ask(request, 1, ConsumerGroupDescribeResponse)).groups[1].members
    # As in Kafka, DescribeGroups checks the group only.
    groups = (await bob.ask(DescribeGroupsRequest(groups=["g"]), 5, DescribeGroupsResponse)).groups
    assert groups[0].error_code != Errors.GROUP_AUTHORIZATION_FAILED


async def test_groups_are_listed_to_those_who_may_describe_them(cluster: Cluster) -> None:
    for group in ("g", "h"):
        await cluster.admin.answer_bytes(commit("mine", 1, group), 9)
    await cluster.grant(allow(ALICE, Op.DESCRIBE, GROUP, "g"))
    alice = Person(cluster.broker, ALICE)

    async def listed() -> set[str]:
        return {group.group_id for group in (await alice.ask(ListGroupsRequest(), 5, ListGroupsResponse)).groups}

    assert await listed() == {"g"}
    await cluster.grant(allow(ALICE, Op.DESCRIBE, ResourceType.CLUSTER, "kafka-cluster"))
    assert await listed() == {"g", "h"}


async def test_a_member_cannot_subscribe_to_a_hidden_topic(cluster: Cluster) -> None:
    await cluster.grant(allow(ALICE, Op.READ, GROUP, "g"), allow(ALICE, Op.READ, TOPIC, "mine"))
    alice = Person(cluster.broker, ALICE)
    for topics, error in ((["mine", "other"], Errors.TOPIC_AUTHORIZATION_FAILED), (["mine"], Errors.NONE)):
        request = heartbeat("m", subscribed_topic_names=topics)
        response = await alice.ask(request, 1, ConsumerGroupHeartbeatResponse)
        assert response.error_code == error


async def test_a_regular_expression_matches_only_topics_that_the_member_may_describe(cluster: Cluster) -> None:
    await cluster.grant(allow(ALICE, Op.READ, GROUP, "g"), allow(ALICE, Op.READ, TOPIC, "mine"))
    alice = Person(cluster.broker, ALICE)

    async def assigned(member_epoch: int) -> tuple[int, set[bytes]]:
        """Sends heartbeats until one has an assignment."""
        async with asyncio.timeout(10):
            while True:
                response = await alice.ask(
                    heartbeat(
                        "m",
                        member_epoch,
                        rebalance_timeout_ms=60_000,
                        subscribed_topic_regex=".*",
                        topic_partitions=[],
                    ),
                    1,
                    ConsumerGroupHeartbeatResponse,
                )
                assert response.error_code == 0
                # The expression is resolved in a thread.
                await asyncio.sleep(0)
                member_epoch = response.member_epoch
                assignment = response.assignment
                if assignment is not None and assignment.topic_partitions:
                    return member_epoch, {topic.topic_id for topic in assignment.topic_partitions}

    assert (await assigned(0))[1] == {cluster.topic_id("mine")}


async def test_offsets_of_hidden_topics_are_neither_committed_nor_fetched(cluster: Cluster) -> None:
    for topic in ("mine", "other"):
        assert await committed(cluster.admin, topic, 7) == 0
    await cluster.grant(allow(ALICE, Op.READ, GROUP, "g"), allow(ALICE, Op.READ, TOPIC, "mine"))
    alice = Person(cluster.broker, ALICE)
    for topic, error in (("mine", 0), ("other", 29), ("nowhere", 29)):
        assert await committed(alice, topic, 8) == error
    for version in (1, 5, 9):
        request = fetch_offsets("mine", "other")
        if version < 8:
            topics = [
                OffsetFetchRequest.OffsetFetchRequestTopic(name=name, partition_indexes=[0])
                for name in ("mine", "other")
            ]
            request = OffsetFetchRequest(group_id="g", topics=topics)
        response = await alice.ask(request, version, OffsetFetchResponse)
        fetched: Any = response.topics if version < 8 else response.groups[0].topics
        assert [
            (topic.name, topic.partitions[0].committed_offset, topic.partitions[0].error_code) for topic in fetched
        ] == [("mine", 8, 0), ("other", -1, Errors.TOPIC_AUTHORIZATION_FAILED)]
    everything = await alice.ask(fetch_offsets(), 9, OffsetFetchResponse)
    assert [topic.name for topic in everything.groups[0].topics] == ["mine"]


# --- fast paths -------------------------------------------------------------------------------------------------------


async def test_hot_fast_paths_follow_a_revoked_right(cluster: Cluster) -> None:
    on_group, on_topic = allow(ALICE, Op.READ, GROUP, "g"), allow(ALICE, Op.READ, TOPIC, "mine")
    await cluster.grant(on_group, on_topic)
    alice = Person(cluster.broker, ALICE)
    joined = await alice.ask(heartbeat("m", subscribed_topic_names=["mine"]), 1, ConsumerGroupHeartbeatResponse)
    steady = heartbeat("m", joined.member_epoch)
    partition = OffsetCommitRequest.OffsetCommitRequestPartition(partition_index=0, committed_offset=1)
    member_commit = OffsetCommitRequest(
        group_id="g",
        member_id="m",
        generation_id_or_member_epoch=joined.member_epoch,
        topics=[OffsetCommitRequest.OffsetCommitRequestTopic(name="mine", partitions=[partition])],
    )

    async def codes() -> list[int]:
        offsets = await alice.ask(fetch_offsets("mine"), 9, OffsetFetchResponse)
        topics = offsets.groups[0].topics
        metadata = await alice.ask(named("mine"), 12, MetadataResponse)
        return [
            (await alice.ask(steady, 1, ConsumerGroupHeartbeatResponse)).error_code,
            (await alice.ask(member_commit, 9, OffsetCommitResponse)).topics[0].partitions[0].error_code,
            topics[0].partitions[0].error_code if topics else offsets.groups[0].error_code,
            metadata.topics[0].error_code,
        ]

    for _ in range(4):
        assert await codes() == [0, 0, 0, 0]
    await cluster.revoke(on_topic)
    topic_error = Errors.TOPIC_AUTHORIZATION_FAILED
    for _ in range(2):
        assert await codes() == [0, topic_error, topic_error, topic_error]
    await cluster.grant(on_topic)
    for _ in range(4):
        assert await codes() == [0, 0, 0, 0]
    await cluster.revoke(on_group)
    group_error = Errors.GROUP_AUTHORIZATION_FAILED
    for _ in range(2):
        assert await codes() == [group_error, group_error, group_error, 0]
    # Who may not read a group, may still describe it.
    await cluster.grant(on_group, allow(ALICE, Op.READ, GROUP, "g", permission_type=PermissionType.DENY))
    assert await codes() == [group_error, group_error, 0, 0]


async def test_people_do_not_share_metadata_answers(cluster: Cluster) -> None:
    await cluster.grant(allow(ALICE, Op.READ, TOPIC, "mine"))
    settings = PathSettings.of(cluster.broker, "PLAINTEXT")
    alice, bob, admin = (Person(cluster.broker, name, settings) for name in (ALICE, BOB, "User:admin"))
    everything = MetadataRequest(topics=None)
    for _ in range(3):
        seen = [errors_by_name(await person.ask(everything, 12, MetadataResponse)) for person in (alice, bob, admin)]
        assert [set(names) - {"__consumer_offsets", "__transaction_state"} for names in seen] == [
            {"mine"},
            set(),
            {"mine", "other"},
        ]
    # A connection whose principal changes gets what the new principal may see.
    admin.path.client.principal = BOB
    assert errors_by_name(await admin.ask(everything, 12, MetadataResponse)) == {}


# --- others -----------------------------------------------------------------------------------------------------------


async def test_a_request_with_many_denials_does_not_fill_the_log(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    eve = Person(cluster.broker, "User:eve")
    names = [f"t{number}" for number in range(1000)]
    with caplog.at_level(logging.INFO, "kafka.authorizer.logger"):
        response = await eve.ask(named(*names), 12, MetadataResponse)
    assert {topic.error_code for topic in response.topics} == {Errors.TOPIC_AUTHORIZATION_FAILED}
    assert len(caplog.records) == MOST_LOGGED + 1
    last = "Principal = User:eve is denied more in this request = Metadata, which is left out here"
    assert caplog.records[-1].getMessage() == last


async def test_decisions_are_logged_with_the_text_of_kafka(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    await cluster.grant(allow(ALICE, Op.READ, TOPIC, "mine"))
    alice = Person(cluster.broker, ALICE)
    with caplog.at_level(logging.INFO, "kafka.authorizer.logger"):
        for _ in range(2):
            await alice.ask(named("mine", "other"), 12, MetadataResponse)
        await alice.ask(MetadataRequest(topics=None), 12, MetadataResponse)
    denied = (
        "Principal = User:alice is Denied operation = DESCRIBE from host = 192.0.2.1 on resource = Topic:LITERAL:other "
        "for request = Metadata with resourceRefCount = 1 based on rule DefaultDeny"
    )
    assert {record.getMessage() for record in caplog.records} == {denied}
    caplog.clear()
    with caplog.at_level(logging.DEBUG, "kafka.authorizer.logger"):
        for _ in range(3):
            await alice.ask(named("mine"), 12, MetadataResponse)
    assert len(caplog.records) == 3
    assert caplog.records[0].getMessage() == (
        "Principal = User:alice is Allowed operation = DESCRIBE from host = 192.0.2.1 on resource = Topic:LITERAL:mine "
        "for request = Metadata with resourceRefCount = 1 based on rule MatchingAcl(acl=StandardAcl["
        "resourceType=TOPIC, resourceName=mine, patternType=LITERAL, principal=User:alice, host=*, operation=READ, "
        "permissionType=ALLOW])"
    )


async def test_decisions_that_give_no_access_are_logged_at_trace(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    await cluster.grant(allow(ALICE, Op.READ, TOPIC, "mine"))
    alice = Person(cluster.broker, ALICE)
    everything = MetadataRequest(topics=None, include_topic_authorized_operations=True)
    with caplog.at_level(TRACE, "kafka.authorizer.logger"):
        await alice.ask(everything, 12, MetadataResponse)
    decisions = [
        (record.levelname, record.getMessage().partition(" is ")[2].partition(" from ")[0])
        for record in caplog.records
        if "Topic:LITERAL:mine" in record.getMessage() or "Topic:LITERAL:other" in record.getMessage()
    ]
    # `other` is left out of the response. Of `mine` the response has each operation that Alice may perform.
    assert ("TRACE", "Denied operation = DESCRIBE") in decisions
    assert ("DEBUG", "Allowed operation = DESCRIBE") in decisions
    assert ("TRACE", "Allowed operation = READ") in decisions
    assert ("TRACE", "Denied operation = ALTER") in decisions
    assert not [level for level, _ in decisions if level == "INFO"]


async def test_requests_of_the_broker_itself_need_no_rights(cluster: Cluster) -> None:
    api = BoundApi(Api(ApiKey.CREATE_TOPICS, range(2, 8)), 7)
    client = Client(cluster.broker.apis.form, "")
    context = RequestContext(ApiKey.CREATE_TOPICS, 7, 1, "", client, 0, rights=None)
    topic = CreateTopicsRequest.CreatableTopic(name="internal", num_partitions=1, replication_factor=1)
    response: Any = api.respond(cluster.broker, context, CreateTopicsRequest(topics=[topic], timeout_ms=1000))
    assert (await response).topics[0].error_code == 0
