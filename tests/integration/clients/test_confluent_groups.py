# SPDX-License-Identifier: Apache-2.0
"""KIP-848 consumer groups with members of confluent-kafka (librdkafka)."""

from __future__ import annotations

import pytest
from confluent_kafka import (
    ConsumerGroupState,
    ConsumerGroupTopicPartitions,
    ConsumerGroupType,
    KafkaException,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewPartitions

from tests.support.confluent import (
    PolledConsumer,
    committed,
    create_topic,
    partitions_of,
    produce,
    wait_for_split,
)
from tests.support.kcoord_process import KcoordProcess
from tests.support.victim import Victim
from tests.support.waiting import wait_until


@pytest.fixture
def admin(broker: KcoordProcess) -> AdminClient:
    return AdminClient({"bootstrap.servers": broker.address})


def test_one_member_consumes_commits_and_is_described_and_deleted(
    broker: KcoordProcess, admin: AdminClient, name: str
) -> None:
    create_topic(broker.address, name, 3)
    produce(broker.address, name, 3, 10)
    with PolledConsumer(broker.address, name, [name], commit_each=True) as member:
        member.wait_for(30)
        described = admin.describe_consumer_groups([name])[name].result(20)
        assert (described.state, described.type) == (ConsumerGroupState.STABLE, ConsumerGroupType.CONSUMER)
        (only,) = described.members
        assert {
            (partition.topic, partition.partition) for partition in only.assignment.topic_partitions
        } == partitions_of(name, 3)
        assert described.partition_assignor == "uniform"
        with pytest.raises(KafkaException, match="NON_EMPTY_GROUP"):
            admin.delete_consumer_groups([name])[name].result(20)
    assert committed(broker.address, name, sorted(partitions_of(name, 3))) == dict.fromkeys(partitions_of(name, 3), 10)
    listed = {group.group_id: group.state for group in admin.list_consumer_groups().result(20).valid}
    assert listed[name] == ConsumerGroupState.EMPTY
    admin.delete_consumer_groups([name])[name].result(20)
    assert name not in {group.group_id for group in admin.list_consumer_groups().result(20).valid}
    assert committed(broker.address, name, [(name, 0)]) == {(name, 0): -1001}


def test_three_members_share_partitions_and_take_over(broker: KcoordProcess, name: str) -> None:
    create_topic(broker.address, name, 6)
    everything = partitions_of(name, 6)
    with PolledConsumer(broker.address, name, [name]) as first:
        wait_for_split([first], everything)
        with (
            PolledConsumer(broker.address, name, [name]) as second,
            PolledConsumer(broker.address, name, [name]) as third,
        ):
            wait_for_split([first, second, third], everything)
            before = set(first.assigned), set(second.assigned)
            third.close()
            wait_for_split([first, second], everything)
            assert before[0] <= first.assigned
            assert before[1] <= second.assigned
            produce(broker.address, name, 6, 5)
            wait_until(lambda: len(first.seen) + len(second.seen) == 30, "each message is read once")
        wait_for_split([first], everything)
        assert first.errors == second.errors == third.errors == []


def test_a_killed_member_loses_its_partitions_after_the_session_timeout(broker: KcoordProcess, name: str) -> None:
    create_topic(broker.address, name, 4)
    with (
        Victim("tests.support.member", broker.address, name, name) as victim,
        PolledConsumer(broker.address, name, [name]) as member,
    ):
        wait_until(lambda: len(member.assigned) == 2, "the member has half of the partitions")
        victim.kill()
        wait_for_split([member], partitions_of(name, 4))


def test_a_static_member_returns_to_its_partitions(broker: KcoordProcess, name: str) -> None:
    create_topic(broker.address, name, 4)
    everything = partitions_of(name, 4)
    with PolledConsumer(broker.address, name, [name], instance_id="one") as first:
        wait_for_split([first], everything)
        with PolledConsumer(broker.address, name, [name], instance_id="two") as second:
            wait_for_split([first, second], everything)
            owned, assignments_before = set(first.assigned), len(second.assignments)
            first.close()
            with PolledConsumer(broker.address, name, [name], instance_id="one") as again:
                wait_until(lambda: again.assigned == owned, "the member has its old partitions")
            assert second.assignments[assignments_before:] == []


def test_a_pattern_matches_topics_that_are_created_later(broker: KcoordProcess, name: str) -> None:
    create_topic(broker.address, f"{name}-a", 2)
    create_topic(broker.address, f"x-{name}-a", 1)
    with PolledConsumer(broker.address, name, [f"^{name}-[a-c]$"]) as member:
        wait_for_split([member], partitions_of(f"{name}-a", 2))
        create_topic(broker.address, f"{name}-b", 1)
        create_topic(broker.address, f"{name}-d", 1)
        wait_for_split([member], partitions_of(f"{name}-a", 2) | partitions_of(f"{name}-b", 1))


def test_added_partitions_are_assigned(broker: KcoordProcess, admin: AdminClient, name: str) -> None:
    create_topic(broker.address, name, 2)
    with PolledConsumer(broker.address, name, [name]) as first, PolledConsumer(broker.address, name, [name]) as second:
        wait_for_split([first, second], partitions_of(name, 2))
        admin.create_partitions([NewPartitions(name, 5)])[name].result(20)
        wait_for_split([first, second], partitions_of(name, 5))
        produce(broker.address, name, 5, 1)
        wait_until(lambda: len(first.seen) + len(second.seen) == 5, "a message of each partition is read")


def test_offsets_are_altered_and_listed_by_admins(broker: KcoordProcess, admin: AdminClient, name: str) -> None:
    create_topic(broker.address, name, 2)
    requested = ConsumerGroupTopicPartitions(name, [TopicPartition(name, 0, 7), TopicPartition(name, 1, 8)])
    admin.alter_consumer_group_offsets([requested])[name].result(20)
    listed = admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions(name)])[name].result(20)
    assert {(partition.partition, partition.offset) for partition in listed.topic_partitions} == {(0, 7), (1, 8)}
