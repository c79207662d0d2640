# SPDX-License-Identifier: Apache-2.0
"""Classic groups with members of kafka-python.

Assignments, static members, a killed member, patterns, admin calls, transactions.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kafka import KafkaConsumer, KafkaProducer, TopicPartition
from kafka.admin import KafkaAdminClient
from kafka.coordinator.assignors.cooperative_sticky import CooperativeStickyAssignor
from kafka.coordinator.assignors.range import RangePartitionAssignor
from kafka.errors import KafkaError
from kafka.structs import OffsetAndMetadata

from tests.support.confluent import committed, create_topic, partitions_of, produce, wait_for_split
from tests.support.kafka_python import POLL_MS, KafkaPythonMember
from tests.support.kcoord_process import KcoordProcess
from tests.support.ownership import Ownership
from tests.support.victim import Victim
from tests.support.waiting import wait_until


@pytest.fixture
def admin(broker: KcoordProcess) -> Iterator[KafkaAdminClient]:
    client = KafkaAdminClient(bootstrap_servers=broker.address)
    yield client
    client.close()


@pytest.mark.parametrize("strategy", [RangePartitionAssignor, CooperativeStickyAssignor], ids=["range", "cooperative"])
def test_three_members_share_partitions_commit_and_hand_over(broker: KcoordProcess, name: str, strategy: type) -> None:
    create_topic(broker.address, name, 6)
    produce(broker.address, name, 6, 5)
    everything, ownership = partitions_of(name, 6), Ownership()
    members: list[KafkaPythonMember] = []
    try:
        for _ in range(3):
            members.append(KafkaPythonMember(broker.address, name, [name], strategies=[strategy], ownership=ownership))
            wait_for_split(members, everything)
        produce(broker.address, name, 6, 5)
        wait_until(lambda: sum(len(set(member.seen)) for member in members) >= 60, "all records are read")
        members[0].close()
        wait_for_split(members[1:], everything)
    finally:
        for member in members:
            member.close()
    assert ownership.conflicts == []
    assert {record for member in members for record in member.seen} == {
        (*partition, n) for partition in everything for n in range(10)
    }
    assert committed(broker.address, name, sorted(everything)) == dict.fromkeys(everything, 10)


def test_a_cooperative_rebalance_revokes_only_partitions_that_move(broker: KcoordProcess, name: str) -> None:
    create_topic(broker.address, name, 4)
    with KafkaPythonMember(broker.address, name, [name], strategies=[CooperativeStickyAssignor]) as first:
        wait_for_split([first], partitions_of(name, 4))
        with KafkaPythonMember(broker.address, name, [name], strategies=[CooperativeStickyAssignor]) as second:
            wait_for_split([first, second], partitions_of(name, 4))
            assert [len(revoked) for revoked in first.revoked if revoked] == [2]


def test_a_killed_member_loses_its_partitions_after_its_session_timeout(broker: KcoordProcess, name: str) -> None:
    create_topic(broker.address, name, 4)
    with (
        Victim("tests.support.kafka_python", broker.address, name, name) as victim,
        KafkaPythonMember(broker.address, name, [name]) as member,
    ):
        wait_until(lambda: len(member.assigned) == 2, "the member has half of the partitions")
        victim.kill()
        wait_for_split([member], partitions_of(name, 4))


def test_a_static_member_gets_its_partitions_back(broker: KcoordProcess, name: str) -> None:
    create_topic(broker.address, name, 4)
    everything = partitions_of(name, 4)
    with KafkaPythonMember(broker.address, name, [name], instance_id="one") as first:
        wait_for_split([first], everything)
        with KafkaPythonMember(broker.address, name, [name], instance_id="two") as second:
            wait_for_split([first, second], everything)
            owned = set(first.assigned)
            first.close()
            with KafkaPythonMember(broker.address, name, [name], instance_id="one") as again:
                wait_until(lambda: again.assigned == owned, "the member has its old partitions")
                wait_for_split([again, second], everything)


def test_a_pattern_matches_topics_that_are_created_later(broker: KcoordProcess, name: str) -> None:
    create_topic(broker.address, f"{name}-a", 2)
    with KafkaPythonMember(broker.address, name, pattern=f"^{name}-[a-c]$") as member:
        wait_for_split([member], partitions_of(f"{name}-a", 2))
        create_topic(broker.address, f"{name}-b", 1)
        create_topic(broker.address, f"{name}-d", 1)
        wait_for_split([member], partitions_of(f"{name}-a", 2) | partitions_of(f"{name}-b", 1))


def test_admins_see_and_change_a_group(broker: KcoordProcess, admin: KafkaAdminClient, name: str) -> None:
    create_topic(broker.address, name, 2)
    produce(broker.address, name, 2, 3)
    partitions = [TopicPartition(name, 0), TopicPartition(name, 1)]
    with KafkaPythonMember(broker.address, name, [name]) as member:
        wait_until(lambda: len(member.seen) == 6, "all records are read")
        (listed,) = (group for group in admin.list_groups() if group["group_id"] == name)
        assert (listed["protocol_type"], listed["group_state"], listed["group_type"]) == (
            "consumer",
            "Stable",
            "classic",
        )
        described = admin.describe_groups([name])[name]
        (only,) = described["members"]
        assert described["group_state"] == "Stable" and name in repr(only)
        with pytest.raises(KafkaError, match=r"(?i)group"):
            admin.delete_group_offsets("no-such-group", partitions)
        assert admin.delete_groups([name])[name] != "OK"
    assert {
        partition: metadata.offset for partition, metadata in admin.list_group_offsets({name: None})[name].items()
    } == dict.fromkeys(partitions, 3)
    admin.delete_group_offsets(name, partitions[:1])
    assert list(admin.list_group_offsets({name: None})[name]) == partitions[1:]
    assert admin.delete_groups([name])[name] == "OK"
    assert name not in {group["group_id"] for group in admin.list_groups()}


def test_a_transaction_commits_records_and_offsets_together(broker: KcoordProcess, name: str) -> None:
    """Consume, transform, produce: the next transaction does the work of an aborted transaction again."""
    source, target = f"{name}-in", f"{name}-out"
    create_topic(broker.address, source, 1)
    create_topic(broker.address, target, 1)
    produce(broker.address, source, 1, 5)
    producer = KafkaProducer(bootstrap_servers=broker.address, transactional_id=name)
    producer.init_transactions()
    for attempt in ("aborted", "committed"):
        consumer = KafkaConsumer(
            source,
            bootstrap_servers=broker.address,
            group_id=name,
            auto_offset_reset="earliest",
            enable_auto_commit=False,
        )
        # The consumer must know the partitions before it joins, because of POLL_MS.
        consumer.partitions_for_topic(source)
        producer.begin_transaction()
        for value in poll_values(consumer, 5):
            producer.send(target, value + attempt.encode(), partition=0)
        offsets = {TopicPartition(source, 0): OffsetAndMetadata(5, "", -1)}
        producer.send_offsets_to_transaction(offsets, consumer.group_metadata())
        if attempt == "aborted":
            producer.abort_transaction()
        else:
            producer.commit_transaction()
        consumer.close()
        expected = -1001 if attempt == "aborted" else 5
        assert committed(broker.address, name, [(source, 0)]) == {(source, 0): expected}
    producer.close()
    reader = KafkaConsumer(
        target,
        bootstrap_servers=broker.address,
        auto_offset_reset="earliest",
        isolation_level="read_committed",
        group_id=None,
    )
    assert poll_values(reader, 5) == [f"0:{number}committed".encode() for number in range(5)]
    reader.close()


def poll_values(consumer: KafkaConsumer, count: int) -> list[bytes]:
    """Polls until the consumer has at least `count` values; returns them."""
    values: list[bytes] = []

    def is_enough() -> bool:
        values.extend(record.value for batch in consumer.poll(timeout_ms=POLL_MS).values() for record in batch)
        return len(values) >= count

    wait_until(is_enough, f"{count} records")
    return values
