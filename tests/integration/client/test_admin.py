# SPDX-License-Identifier: Apache-2.0
"""Each call of the admin client."""

from __future__ import annotations

import time

import pytest

from kcoord.client import (
    AclOperation,
    AdminClient,
    AlterConfigOp,
    AlterConfigOpType,
    ConfigResource,
    ConfigResourceType,
    ConfigSource,
    Errors,
    KafkaError,
    NewPartitions,
    NewTopic,
    OffsetAndMetadata,
    OffsetSpec,
    TimeoutException,
    TopicPartition,
)
from tests.integration.client.conftest import Target
from tests.integration.client.helpers import (
    consumer_of,
    create_topic,
    eventually,
    members_of,
    produce,
    read,
    until_shared,
)

MISSING = "there-is-no-such-thing"


class TestTopics:
    async def test_topics_are_created_described_extended_and_deleted(
        self, target: Target, admin: AdminClient, name: str
    ) -> None:
        before_ms = int(time.time() * 1000) - 1000
        created = await admin.create_topics(
            [NewTopic(name, 2, 1, configs={"retention.ms": "1000"}), NewTopic("not legal", 1, 1)]
        )
        assert (created[name].num_partitions, created[name].replication_factor) == (2, 1)
        assert (created[name].configs or {})["retention.ms"] == "1000"
        assert created.errors["not legal"].error is Errors.INVALID_TOPIC_EXCEPTION
        with pytest.raises(KafkaError, match="INVALID_TOPIC_EXCEPTION"):
            created.all()
        again = await admin.create_topics([NewTopic(name, 2, 1)])
        assert again.errors[name].error is Errors.TOPIC_ALREADY_EXISTS

        (await admin.create_partitions({name: 3})).all()

        async def has_grown() -> bool:
            return len((await admin.describe_topics([name]))[name].partitions) == 3

        await eventually(has_grown, "three partitions")
        described = await admin.describe_topics([name, MISSING])
        assert described.errors[MISSING].error is Errors.UNKNOWN_TOPIC_OR_PARTITION
        topic = described[name]
        assert topic.topic_id == created[name].topic_id
        assert [partition.partition for partition in topic.partitions] == [0, 1, 2]
        assert all(
            partition.leader is not None and partition.isr == partition.replicas for partition in topic.partitions
        )
        assert (await admin.describe_topic_ids([topic.topic_id]))[topic.topic_id].name == name
        assert topic.authorized_operations is not None and AclOperation.READ in topic.authorized_operations
        times = [partition.creation_time_ms for partition in topic.partitions]
        if target.has_kip_1327:
            times_ms = [time_ms for time_ms in times if time_ms is not None]
            assert len(times_ms) == 3 and before_ms < times_ms[0] == times_ms[1] < times_ms[2]
        else:
            assert times == [None, None, None]

        listed = {listing.name: listing for listing in await admin.list_topics()}
        assert listed[name].topic_id == topic.topic_id and not listed[name].is_internal
        deleted = await admin.delete_topics([name, MISSING])
        assert deleted.error(name) is None
        assert deleted.errors[MISSING].error is Errors.UNKNOWN_TOPIC_OR_PARTITION

        async def is_gone() -> bool:
            return name not in {listing.name for listing in await admin.list_topics()}

        await eventually(is_gone, "the topic is deleted")

        async def has_no_id() -> bool:
            error = (await admin.describe_topic_ids([topic.topic_id])).error(topic.topic_id)
            return error is not None and error.error is Errors.UNKNOWN_TOPIC_ID

        await eventually(has_no_id, "no topic has the id")

    async def test_validate_only_changes_nothing(self, admin: AdminClient, name: str) -> None:
        (await admin.create_topics([NewTopic(name, 2, 1)], validate_only=True)).all()
        assert name not in {listing.name for listing in await admin.list_topics()}
        await create_topic(admin, name)
        (await admin.create_partitions({name: NewPartitions(5)}, validate_only=True)).all()
        assert len((await admin.describe_topics([name]))[name].partitions) == 1
        shrunk = await admin.create_partitions({name: 1})
        assert shrunk.errors[name].error is Errors.INVALID_PARTITIONS

    async def test_describe_topics_with_more_partitions_than_a_page(
        self, admin: AdminClient, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("kcoord.client.admin.topics.PARTITIONS_PER_PAGE", 3)
        topics = [f"{name}-{index}" for index in range(3)]
        for topic in topics:
            await create_topic(admin, topic, 4)
        described = (await admin.describe_topics([*topics, MISSING])).values
        assert sorted(described) == topics
        assert all(
            [partition.partition for partition in topic.partitions] == [0, 1, 2, 3] for topic in described.values()
        )

    async def test_describe_cluster(self, target: Target, admin: AdminClient) -> None:
        described = await admin.describe_cluster(include_authorized_operations=True)
        assert described.controller in described.nodes
        assert [f"{node.host}:{node.port}" for node in described.nodes] == [target.address]
        assert described.authorized_operations is not None and AclOperation.CREATE in described.authorized_operations
        assert (await admin.describe_cluster()).authorized_operations is None

    async def test_list_offsets_and_delete_records(self, target: Target, admin: AdminClient, name: str) -> None:
        (partition,) = await create_topic(admin, name)
        now_ms = int(time.time() * 1000)
        await produce(target.address, *((partition, str(index), now_ms + index * 10) for index in range(5)))
        unknown = TopicPartition(name, 7)

        async def offset(spec: OffsetSpec) -> int:
            offsets = await admin.list_offsets({partition: spec, unknown: spec})
            assert offsets.errors[unknown].error is Errors.UNKNOWN_TOPIC_OR_PARTITION
            return offsets[partition].offset

        assert await offset(OffsetSpec.earliest()) == 0
        assert await offset(OffsetSpec.latest()) == 5
        assert await offset(OffsetSpec.max_timestamp()) == 4
        assert await offset(OffsetSpec.for_timestamp(now_ms + 11)) == 2
        assert await offset(OffsetSpec.for_timestamp(now_ms + 1000)) == -1
        assert (await admin.delete_records({partition: 2}))[partition] == 2
        assert await offset(OffsetSpec.earliest()) == 2
        assert (await admin.delete_records({partition: 9})).errors[partition].error is Errors.OFFSET_OUT_OF_RANGE


class TestGroups:
    async def test_a_group_with_members(self, target: Target, admin: AdminClient, name: str) -> None:
        partitions = await create_topic(admin, name, 4)
        before_ms = int(time.time() * 1000) - 1000
        async with members_of(target.address, name, None, "instance", topics=[name]) as members:
            await until_shared(members, partitions)

            async def is_stable() -> bool:
                return (await admin.describe_consumer_groups([name]))[name].state == "Stable"

            await eventually(is_stable, "a stable group")
            described = (await admin.describe_consumer_groups([name], include_authorized_operations=True))[name]
            by_id = {member.member_id: member for member in described.members}
            for member in members:
                description = by_id[member.consumer.group_metadata.member_id]
                assert description.assignment == description.target_assignment == member.owned
                assert (description.member_epoch, description.upgraded) == (described.group_epoch, True)
                assert description.subscribed_topic_names == (name,)
            assert {member.group_instance_id for member in described.members} == {None, "instance"}
            assert (described.group_type, described.protocol_type) == ("Consumer", "consumer")
            assert described.group_epoch == described.target_assignment_epoch
            assert described.authorized_operations is not None
            assert AclOperation.DELETE in described.authorized_operations
            if target.has_kip_1327:
                assert described.group_creation_time_ms is not None
                assert before_ms < described.group_creation_time_ms < time.time() * 1000 + 1000
                assert members[0].consumer.group_creation_time_ms == described.group_creation_time_ms
            else:
                assert described.group_creation_time_ms is None

            listed = {group.group_id: group for group in await admin.list_consumer_groups()}
            assert (listed[name].state, listed[name].group_type) == ("Stable", "Consumer")
            assert name in {group.group_id for group in await admin.list_groups(states=["Stable"], types=["consumer"])}
            assert name not in {group.group_id for group in await admin.list_groups(types=["classic"])}

            assert (await admin.delete_consumer_groups([name])).errors[name].error is Errors.NON_EMPTY_GROUP
            altered = await admin.alter_consumer_group_offsets(name, {partitions[0]: 1})
            assert altered.errors[partitions[0]].error is Errors.UNKNOWN_MEMBER_ID
            await members[0].consumer.commit({partitions[0]: 1})
            refused = await admin.delete_consumer_group_offsets(name, partitions[:1])
            with pytest.raises(KafkaError, match="GROUP_SUBSCRIBED_TO_TOPIC"):
                refused.all()

    async def test_unknown_groups(self, admin: AdminClient) -> None:
        assert (await admin.describe_consumer_groups([MISSING])).errors[MISSING].error is Errors.GROUP_ID_NOT_FOUND
        assert (await admin.delete_consumer_groups([MISSING])).errors[MISSING].error is Errors.GROUP_ID_NOT_FOUND
        assert (await admin.list_consumer_group_offsets([MISSING]))[MISSING] == {}
        partition = TopicPartition("t", 0)
        gone = await admin.delete_consumer_group_offsets(MISSING, [partition])
        with pytest.raises(KafkaError, match="GROUP_ID_NOT_FOUND"):
            gone.partition_result(partition)

    async def test_offsets_of_a_group(self, admin: AdminClient, name: str) -> None:
        partitions = await create_topic(admin, name, 3)
        unknown = TopicPartition(name, 9)
        altered = await admin.alter_consumer_group_offsets(
            name, {partitions[0]: 5, partitions[1]: OffsetAndMetadata(7, "note", 0), unknown: 1}
        )
        assert altered.errors.keys() == {unknown}
        assert altered.errors[unknown].error is Errors.UNKNOWN_TOPIC_OR_PARTITION
        everything = await admin.list_consumer_group_offsets([name, f"{name}-other"])
        assert everything.all() == {
            name: {partitions[0]: OffsetAndMetadata(5), partitions[1]: OffsetAndMetadata(7, "note", 0)},
            f"{name}-other": {},
        }
        some = await admin.list_consumer_group_offsets({name: partitions[1:]}, require_stable=True)
        assert some[name] == {partitions[1]: OffsetAndMetadata(7, "note", 0), partitions[2]: None}

        deleted = await admin.delete_consumer_group_offsets(name, [partitions[0], unknown])
        deleted.partition_result(partitions[0])
        with pytest.raises(KafkaError, match="UNKNOWN_TOPIC_OR_PARTITION"):
            deleted.partition_result(unknown)
        with pytest.raises(KafkaError, match="UNKNOWN_TOPIC_OR_PARTITION"):
            deleted.all()
        with pytest.raises(ValueError, match="not among"):
            deleted.partition_result(partitions[2])
        assert (await admin.list_consumer_group_offsets([name]))[name].keys() == {partitions[1]}

        simple = {group.group_id: group for group in await admin.list_groups()}[name]
        assert (simple.is_simple, simple.state, simple.group_type) == (True, "Empty", "Classic")
        (await admin.delete_consumer_groups([name])).all()
        assert (await admin.list_consumer_group_offsets([name]))[name] == {}

    async def test_an_empty_group_can_be_deleted(self, target: Target, admin: AdminClient, name: str) -> None:
        (partition,) = await create_topic(admin, name)
        await produce(target.address, (partition, "a", None))
        async with consumer_of(target.address, name) as consumer:
            consumer.subscribe([name])
            await read(consumer, 1)
        assert (await admin.describe_consumer_groups([name]))[name].state == "Empty"
        assert (await admin.list_consumer_group_offsets([name]))[name] == {partition: OffsetAndMetadata(1, "", 0)}
        (await admin.delete_consumer_groups([name])).all()


class TestConfigs:
    async def test_configs_of_a_topic(self, admin: AdminClient, name: str) -> None:
        await create_topic(admin, name)
        resource = ConfigResource(ConfigResourceType.TOPIC, name)
        described = await admin.describe_configs([resource], include_synonyms=True, include_documentation=True)
        retention = described[resource]["retention.ms"]
        assert (retention.value, retention.is_default) == ("604800000", True)
        assert retention.documentation
        change = {
            resource: [
                AlterConfigOp("retention.ms", "1000"),
                AlterConfigOp("cleanup.policy", "compact", AlterConfigOpType.APPEND),
            ]
        }
        (await admin.incremental_alter_configs(change, validate_only=True)).all()
        (await admin.incremental_alter_configs(change)).all()

        async def is_changed() -> bool:
            configs = (await admin.describe_configs({resource: ["retention.ms", "cleanup.policy"]}))[resource]
            assert configs.keys() == {"retention.ms", "cleanup.policy"}
            return (
                configs["retention.ms"].source is ConfigSource.DYNAMIC_TOPIC_CONFIG
                and configs["cleanup.policy"].value == "delete,compact"
            )

        await eventually(is_changed, "changed configs")
        reset = {resource: [AlterConfigOp("retention.ms", None, AlterConfigOpType.DELETE)]}
        (await admin.incremental_alter_configs(reset)).all()

        async def is_default() -> bool:
            return (await admin.describe_configs([resource]))[resource]["retention.ms"].is_default

        await eventually(is_default, "the default again")
        refused = await admin.incremental_alter_configs({resource: [AlterConfigOp("retention.ms", "soon")]})
        assert refused.errors[resource].error is Errors.INVALID_CONFIG

    async def test_configs_of_a_broker(self, admin: AdminClient) -> None:
        (node,) = (await admin.describe_cluster()).nodes
        resource = ConfigResource(ConfigResourceType.BROKER, str(node.node_id))
        configs = (await admin.describe_configs([resource]))[resource]
        assert configs["offsets.topic.num.partitions"].source is ConfigSource.STATIC_BROKER_CONFIG
        assert configs["offsets.topic.num.partitions"].is_read_only

    async def test_configs_of_a_group(self, admin: AdminClient, name: str) -> None:
        resource = ConfigResource(ConfigResourceType.GROUP, name)
        change = {resource: [AlterConfigOp("consumer.session.timeout.ms", "3500")]}
        (await admin.incremental_alter_configs(change)).all()

        async def is_listed() -> bool:
            return resource in await admin.list_config_resources([ConfigResourceType.GROUP])

        await eventually(is_listed, "the group has configs")
        config = (await admin.describe_configs([resource]))[resource]["consumer.session.timeout.ms"]
        assert (config.value, config.source) == ("3500", ConfigSource.GROUP_CONFIG)
        refused = await admin.incremental_alter_configs({resource: [AlterConfigOp("consumer.session.timeout.ms", "1")]})
        assert refused.errors[resource].error is Errors.INVALID_CONFIG


async def test_start_times_out_without_a_cluster() -> None:
    client = AdminClient(bootstrap_servers="127.0.0.1:1", default_api_timeout_ms=200)
    with pytest.raises(TimeoutException):
        await client.start()
    await client.close()
