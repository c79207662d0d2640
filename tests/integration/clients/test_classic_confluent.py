# SPDX-License-Identifier: Apache-2.0
"""Classic groups with members of confluent-kafka (librdkafka). Its KIP-848 groups are in test_confluent_groups."""

from __future__ import annotations

import pytest
from confluent_kafka import ConsumerGroupState, ConsumerGroupType, KafkaException
from confluent_kafka.admin import AdminClient

from tests.integration.clients.conftest import StartBroker
from tests.support.confluent import (
    PolledConsumer,
    committed,
    create_topic,
    partitions_of,
    produce,
    wait_for_split,
)
from tests.support.kcoord_process import KcoordProcess
from tests.support.ownership import Ownership
from tests.support.victim import Victim
from tests.support.waiting import wait_until


@pytest.mark.parametrize("strategy", ["range", "roundrobin", "cooperative-sticky"])
def test_three_members_share_partitions_commit_and_hand_over(broker: KcoordProcess, name: str, strategy: str) -> None:
    create_topic(broker.address, name, 6)
    everything, ownership = partitions_of(name, 6), Ownership()
    members: list[PolledConsumer] = []
    try:
        for _ in range(3):
            members.append(
                PolledConsumer(broker.address, name, [name], classic=strategy, commit_each=True, ownership=ownership)
            )
            wait_for_split(members, everything)
        produce(broker.address, name, 6, 5)
        wait_until(lambda: len({record for member in members for record in member.seen}) == 30, "all records are read")
        members[0].close()
        wait_for_split(members[1:], everything)
    finally:
        for member in members:
            member.close()
    assert (ownership.conflicts, [member.errors for member in members]) == ([], [[], [], []])
    assert committed(broker.address, name, sorted(everything)) == dict.fromkeys(everything, 5)


def test_a_killed_member_loses_its_partitions_after_its_session_timeout(broker: KcoordProcess, name: str) -> None:
    create_topic(broker.address, name, 4)
    with (
        Victim("tests.support.member", broker.address, name, name, "range") as victim,
        PolledConsumer(broker.address, name, [name], classic="range") as member,
    ):
        wait_until(lambda: len(member.assigned) == 2, "the member has half of the partitions")
        victim.kill()
        wait_for_split([member], partitions_of(name, 4))


@pytest.mark.parametrize("strategy", ["range", "cooperative-sticky"])
def test_a_static_member_returns_without_a_rebalance(broker: KcoordProcess, name: str, strategy: str) -> None:
    create_topic(broker.address, name, 4)
    everything = partitions_of(name, 4)
    with PolledConsumer(broker.address, name, [name], instance_id="one", classic=strategy) as first:
        wait_for_split([first], everything)
        with PolledConsumer(broker.address, name, [name], instance_id="two", classic=strategy) as second:
            wait_for_split([first, second], everything)
            owned, assignments_before = set(first.assigned), len(second.assignments)
            first.close()
            with PolledConsumer(broker.address, name, [name], instance_id="one", classic=strategy) as again:
                wait_until(lambda: again.assigned == owned, "the member has its old partitions")
            assert [moved for _, moved in second.assignments[assignments_before:] if moved] == []


def test_a_pattern_matches_topics_that_are_created_later(broker: KcoordProcess, name: str) -> None:
    create_topic(broker.address, f"{name}-a", 2)
    with PolledConsumer(broker.address, name, [f"^{name}-[a-c]$"], classic="range") as member:
        wait_for_split([member], partitions_of(f"{name}-a", 2))
        create_topic(broker.address, f"{name}-b", 1)
        create_topic(broker.address, f"{name}-d", 1)
        wait_for_split([member], partitions_of(f"{name}-a", 2) | partitions_of(f"{name}-b", 1))


def test_admins_see_and_delete_a_group(broker: KcoordProcess, name: str) -> None:
    admin = AdminClient({"bootstrap.servers": broker.address})
    create_topic(broker.address, name, 2)
    produce(broker.address, name, 2, 3)
    with PolledConsumer(broker.address, name, [name], classic="range", commit_each=True) as member:
        member.wait_for(6)
        (listed,) = (group for group in admin.list_consumer_groups().result(20).valid if group.group_id == name)
        assert (listed.state, listed.type) == (ConsumerGroupState.STABLE, ConsumerGroupType.CLASSIC)
        described = admin.describe_consumer_groups([name])[name].result(20)
        (only,) = described.members
        assert (described.state, described.partition_assignor) == (ConsumerGroupState.STABLE, "range")
        assert {
            (partition.topic, partition.partition) for partition in only.assignment.topic_partitions
        } == partitions_of(name, 2)
        with pytest.raises(KafkaException, match="NON_EMPTY_GROUP"):
            admin.delete_consumer_groups([name])[name].result(20)
    admin.delete_consumer_groups([name])[name].result(20)
    assert name not in {group.group_id for group in admin.list_consumer_groups().result(20).valid}


def test_the_offsets_topic_can_be_deleted_and_is_created_again(start_broker: StartBroker, name: str) -> None:
    """As in Kafka, this deletes all groups and offsets."""
    broker = start_broker()
    admin = AdminClient({"bootstrap.servers": broker.address})
    create_topic(broker.address, name, 1)
    produce(broker.address, name, 1, 3)
    with PolledConsumer(broker.address, name, [name], classic="range", commit_each=True) as member:
        member.wait_for(3)
    assert committed(broker.address, name, [(name, 0)]) == {(name, 0): 3}
    admin.delete_topics(["__consumer_offsets"])["__consumer_offsets"].result(20)
    wait_until(lambda: committed(broker.address, name, [(name, 0)]) == {(name, 0): -1001}, "the offsets are deleted")
    with PolledConsumer(broker.address, name, [name], classic="range", commit_each=True) as member:
        member.wait_for(3)
    broker.restart()
    assert committed(broker.address, name, [(name, 0)]) == {(name, 0): 3}
