# SPDX-License-Identifier: Apache-2.0
"""The online migration of KIP-848.

The confluent-kafka members of a live group change one by one from the classic protocol to the consumer protocol and
back, while records are produced and consumed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from confluent_kafka import ConsumerGroupType, Producer
from confluent_kafka.admin import AdminClient

from kcoord_protocol.errors import Errors
from kcoord_protocol.messages import ConsumerGroupHeartbeatRequest, ConsumerGroupHeartbeatResponse
from tests.integration.clients.conftest import StartBroker
from tests.integration.wire import WireClient
from tests.support.confluent import PolledConsumer, committed, create_topic, partitions_of, wait_for_split
from tests.support.kcoord_process import KcoordProcess
from tests.support.ownership import Ownership
from tests.support.waiting import wait_until

PARTITIONS = 6
PAUSE_SECONDS = 0.01
REBALANCE_SECONDS = 6.0
"""An upper bound for a rebalance on a busy machine. Members learn of it by their heartbeats, every 300 ms."""


class SteadyProducer:
    """Produces records to each partition until it is closed."""

    def __init__(self, address: str, topic: str) -> None:
        self.produced = dict.fromkeys(sorted(partitions_of(topic, PARTITIONS)), 0)
        self._producer = Producer({"bootstrap.servers": address, "linger.ms": 0})
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ending.wait(PAUSE_SECONDS * PARTITIONS):
            for topic, partition in self.produced:
                self._producer.produce(topic, b"x", partition=partition)
                self.produced[topic, partition] += 1
            self._producer.poll(0)

    def close(self) -> None:
        self._ending.set()
        self._thread.join(10)
        assert self._producer.flush(10) == 0


class Fleet:
    """Three members that are replaced one by one, and all records that they and their predecessors have seen."""

    def __init__(self, broker: KcoordProcess, group_id: str, topic: str) -> None:
        self.ownership = Ownership()
        self.partitions = partitions_of(topic, PARTITIONS)
        self._broker = broker
        self._group_id = group_id
        self._topic = topic
        self._admin = AdminClient({"bootstrap.servers": broker.address})
        self._running: list[PolledConsumer] = []
        self._all: list[PolledConsumer] = []

    def add(self, classic: str | None) -> None:
        member = PolledConsumer(
            self._broker.address,
            self._group_id,
            [self._topic],
            commit_each=True,
            classic=classic,
            ownership=self.ownership,
        )
        self._running.append(member)
        self._all.append(member)

    def roll(self, classic: str | None) -> None:
        """Replaces each member by a member of the other protocol, as a rolling restart of an application does."""
        for _ in range(len(self._running)):
            self._running.pop(0).close()
            self.add(classic)
            self.settle()

    def settle(self) -> None:
        """Waits until the members share all partitions evenly and each member reads new records."""
        wait_for_split(self._running, self.partitions)
        seen = [len(member.seen) for member in self._running]
        wait_until(
            lambda: all(len(member.seen) > before for member, before in zip(self._running, seen, strict=True)),
            "each member reads new records",
        )

    def group_type(self) -> ConsumerGroupType:
        listed = self._admin.list_consumer_groups().result(20).valid
        (group_type,) = (group.type for group in listed if group.group_id == self._group_id)
        assert isinstance(group_type, ConsumerGroupType)
        return group_type

    def seen(self) -> set[tuple[str, int, int]]:
        return {record for member in self._all for record in list(member.seen)}

    def errors(self) -> list[str]:
        return [error for member in self._all for error in member.errors]

    def close(self) -> None:
        for member in self._all:
            member.close()


@pytest.fixture
def fleet(broker: KcoordProcess, name: str) -> Iterator[Fleet]:
    create_topic(broker.address, name, PARTITIONS)
    members = Fleet(broker, name, name)
    yield members
    members.close()


@pytest.mark.parametrize("strategy", ["range", "roundrobin"])
def test_a_live_group_rolls_to_the_consumer_protocol_and_back(
    broker: KcoordProcess, fleet: Fleet, name: str, strategy: str
) -> None:
    producer = SteadyProducer(broker.address, name)
    try:
        for _ in range(3):
            fleet.add(strategy)
        fleet.settle()
        assert fleet.group_type() == ConsumerGroupType.CLASSIC
        fleet.roll(None)
        assert fleet.group_type() == ConsumerGroupType.CONSUMER
        fleet.roll(strategy)
        assert fleet.group_type() == ConsumerGroupType.CLASSIC
    finally:
        producer.close()
    produced = {(*partition, offset) for partition, count in producer.produced.items() for offset in range(count)}
    wait_until(lambda: fleet.seen() == produced, "every record is consumed")
    fleet.close()
    assert (fleet.ownership.conflicts, fleet.errors()) == ([], [])
    assert fleet.ownership.longest_gap_seconds < REBALANCE_SECONDS
    assert committed(broker.address, name, sorted(fleet.partitions)) == producer.produced


def test_a_group_whose_assignments_hold_user_data_is_not_converted(broker: KcoordProcess, name: str) -> None:
    """librdkafka's cooperative-sticky writes user data in a second generation. Kafka 4.3.1 rejects this too."""
    create_topic(broker.address, name, 2)
    with PolledConsumer(broker.address, name, [name], classic="cooperative-sticky") as first:
        wait_for_split([first], partitions_of(name, 2))
        with PolledConsumer(broker.address, name, [name], classic="cooperative-sticky") as second:
            wait_for_split([first, second], partitions_of(name, 2))
            assert_refused(broker, name)
            assert len(first.assigned) == len(second.assigned) == 1


def assert_refused(broker: KcoordProcess, group_id: str) -> None:
    request = ConsumerGroupHeartbeatRequest(
        group_id=group_id,
        member_id="new",
        rebalance_timeout_ms=1000,
        subscribed_topic_names=["any"],
        topic_partitions=[],
    )
    with WireClient(broker.port) as client:
        answer = client.call(request, 1, ConsumerGroupHeartbeatResponse)
    assert (answer.error_code, answer.error_message) == (
        Errors.GROUP_ID_NOT_FOUND,
        f"Cannot upgrade classic group {group_id} to consumer group because an unsupported custom assignor is in use. "
        "Please refer to the documentation or switch to a default assignor before re-attempting the upgrade.",
    )


def test_static_members_keep_their_partitions_when_they_change_the_protocol(
    start_broker: StartBroker, name: str
) -> None:
    broker = start_broker(group_consumer_session_timeout_ms="20000")
    create_topic(broker.address, name, 4)
    everything = partitions_of(name, 4)
    with PolledConsumer(broker.address, name, [name], instance_id="one", classic="range") as first:
        wait_for_split([first], everything)
        with PolledConsumer(broker.address, name, [name], instance_id="two", classic="range") as second:
            wait_for_split([first, second], everything)
            owned = set(first.assigned), set(second.assigned)
            first.close()
            with PolledConsumer(broker.address, name, [name], instance_id="one") as new_one:
                wait_until(lambda: new_one.assigned == owned[0], "it has the partitions of the first member")
                second.close()
                with PolledConsumer(broker.address, name, [name], instance_id="two") as new_two:
                    wait_until(lambda: new_two.assigned == owned[1], "it has the partitions of the second member")
                    assert [assignment for assignment in new_one.assignments if assignment[0] == "revoked"] == []
