# SPDX-License-Identifier: Apache-2.0
"""A rolling change from kafka-python with a custom assignor that has user data to `kcoord.client`, and back."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping

from kafka.coordinator.assignors.abstract import AbstractPartitionAssignor
from kafka.protocol.consumer.metadata import ConsumerProtocolAssignment, ConsumerProtocolSubscription

from kcoord.client import (
    AdminClient,
    AssignmentSpec,
    AssignorMetadata,
    Consumer,
    ConsumerRebalanceListener,
    GroupAssignment,
    MemberAssignment,
    Metadata,
    PartitionAssignor,
    TopicPartition,
)
from kcoord.client.assignors import CLASSIC_VERSION
from tests.integration.client.conftest import StartBroker
from tests.integration.client.helpers import consumer_of, create_topic, eventually, produce
from tests.support.kafka_python import KafkaPythonMember
from tests.support.ownership import Ownership

NAME = "by-weight"
PARTITIONS = 6
Share = Mapping[str, list[TopicPartition]]


def shared_out(weights: Mapping[str, int], topic: str) -> Share:
    """Gives each partition to the member that has the fewest for its weight; both clients compute the same."""
    shares: dict[str, list[TopicPartition]] = {member_id: [] for member_id in weights}
    for partition in range(PARTITIONS):
        # The weight before the id: so the sizes of the shares do not depend on ids.
        taker = min(((len(shares[id_]) + 1) / weight, -weight, id_) for id_, weight in weights.items())[2]
        shares[taker].append(TopicPartition(topic, partition))
    return shares


class ClassicByWeight(AbstractPartitionAssignor):  # type: ignore[misc]
    """An assignor of kafka-python: the user data of a subscription is a weight, that of an assignment all weights."""

    name = NAME
    version = 0
    given: list[bytes]

    @classmethod
    def metadata(cls, topics: Collection[str]) -> ConsumerProtocolSubscription:
        return ConsumerProtocolSubscription(version=0, topics=sorted(topics), user_data=b"2")

    @classmethod
    def assign(cls, cluster: object, members: Collection[object]) -> dict[str, ConsumerProtocolAssignment]:
        weights = {m.member_id: int(m.metadata.user_data) for m in members}  # type: ignore[attr-defined]
        (topic,) = {topic for m in members for topic in m.metadata.topics}  # type: ignore[attr-defined]
        plan = f"of {sum(weights.values())}".encode()
        assigned = ConsumerProtocolAssignment.TopicPartition
        return {
            member_id: ConsumerProtocolAssignment(
                version=0,
                assigned_partitions=[assigned(topic=topic, partitions=[p.partition for p in share])] if share else [],
                user_data=plan,
            )
            for member_id, share in shared_out(weights, topic).items()
        }

    @classmethod
    def on_assignment(cls, assignment: ConsumerProtocolAssignment, generation: int) -> None:
        cls.given.append(assignment.user_data)


class ByWeight(PartitionAssignor):
    """The same for `kcoord.client`: it writes version -1, so that members of both protocols understand it."""

    name = NAME
    minimum_version = CLASSIC_VERSION

    def __init__(self) -> None:
        self.specs: list[AssignmentSpec] = []
        self.given: list[Metadata | None] = []

    def metadata(self) -> AssignorMetadata:
        return AssignorMetadata(Metadata(CLASSIC_VERSION, b"1"))

    def assign(self, spec: AssignmentSpec) -> GroupAssignment:
        self.specs.append(spec)
        weights = {member_id: int(member.metadata.data) for member_id, member in spec.members.items()}
        (topic,) = spec.topics
        plan = Metadata(CLASSIC_VERSION, f"of {sum(weights.values())}".encode())
        return GroupAssignment(
            {member_id: MemberAssignment(share, plan) for member_id, share in shared_out(weights, topic).items()}
        )

    def on_assignment(self, error: int, assignment: MemberAssignment, group_epoch: int) -> None:
        self.given.append(assignment.metadata)


class NewMember(ConsumerRebalanceListener):
    """A consumer of `kcoord.client` that commits what it has polled, and reports what it owns."""

    def __init__(self, ownership: Ownership) -> None:
        self.assignor = ByWeight()
        self.assigned: set[tuple[str, int]] = set()
        self.seen: list[tuple[str, int, int]] = []
        self._ownership = ownership
        self._ending = asyncio.Event()

    async def start(self, address: str, name: str) -> NewMember:
        started = asyncio.Event()
        self._task = asyncio.create_task(self._run(address, name, started))
        await started.wait()
        return self

    async def _run(self, address: str, name: str, started: asyncio.Event) -> None:
        async with consumer_of(
            address, name, group_local_assignors=[self.assignor], enable_auto_commit=False
        ) as consumer:
            consumer.subscribe([name], listener=self)
            started.set()
            while not self._ending.is_set():
                await self._poll(consumer)

    async def _poll(self, consumer: Consumer) -> None:
        records = await consumer.poll(100)
        if records:
            await consumer.commit()
            self.seen += [(record.topic, record.partition, record.offset) for record in records]

    async def close(self) -> None:
        self._ending.set()
        await self._task

    async def on_partitions_assigned(self, partitions: Collection[TopicPartition]) -> None:
        taken = {(partition.topic, partition.partition) for partition in partitions}
        self._ownership.took(self, taken)
        self.assigned |= taken

    async def on_partitions_revoked(self, partitions: Collection[TopicPartition]) -> None:
        given = {(partition.topic, partition.partition) for partition in partitions}
        self.assigned -= given
        self._ownership.gave(self, given)

    async def on_partitions_lost(self, partitions: Collection[TopicPartition]) -> None:
        await self.on_partitions_revoked(partitions)


async def test_a_group_with_a_custom_assignor_rolls_to_the_new_client_and_back(
    start_broker: StartBroker, name: str
) -> None:
    broker = start_broker(kcoord_client_assignors_enable="true")
    address, ownership = broker.address, Ownership()
    given: list[bytes] = []
    ClassicByWeight.given = given
    running: list[KafkaPythonMember | NewMember] = []
    everyone: list[KafkaPythonMember | NewMember] = []
    produced = 0

    async def add(is_new: bool) -> None:
        if is_new:
            member: KafkaPythonMember | NewMember = await NewMember(ownership).start(address, name)
        else:
            member = await asyncio.to_thread(
                KafkaPythonMember, address, name, [name], strategies=[ClassicByWeight], ownership=ownership
            )
        running.append(member)
        everyone.append(member)

    async def close(member: KafkaPythonMember | NewMember) -> None:
        if isinstance(member, NewMember):
            await member.close()
        else:
            await asyncio.to_thread(member.close)

    async def settle() -> None:
        """Waits until the members share all partitions by weight, and read what is produced then."""
        nonlocal produced
        weights = {str(i): 1 if isinstance(member, NewMember) else 2 for i, member in enumerate(running)}
        counts = sorted(len(share) for share in shared_out(weights, name).values())

        def is_shared() -> bool:
            return (
                sorted(len(member.assigned) for member in running) == counts
                and len(set().union(*(member.assigned for member in running))) == PARTITIONS
            )

        await eventually(is_shared, f"shares of {counts}", 40)
        await produce(address, *((TopicPartition(name, p), "x", None) for p in range(PARTITIONS)))
        produced += 1
        expected = {(name, p, offset) for p in range(PARTITIONS) for offset in range(produced)}
        await eventually(
            lambda: {record for member in everyone for record in [*member.seen]} == expected, "all is read", 40
        )

    async with AdminClient(bootstrap_servers=address) as admin:
        await create_topic(admin, name, PARTITIONS)

        async def group_type() -> str:
            return (await admin.describe_consumer_groups([name]))[name].group_type.lower()

        try:
            for _ in range(2):
                await add(is_new=False)
                await settle()
            assert (await group_type(), given[-1]) == ("classic", b"of 4")
            for is_new in (True, False):
                for _ in range(2):
                    await add(is_new)
                    await settle()
                    assert await group_type() == "consumer"
                    await close(running.pop(0))
                    await settle()
                assert await group_type() == ("consumer" if is_new else "classic")
            first = next(member for member in everyone if isinstance(member, NewMember))
            told = {member.metadata.data for member in first.assignor.specs[0].members.values()}
            assert told == {b"1", b"2"}
            assert Metadata(CLASSIC_VERSION, b"of 5") in first.assignor.given
            assert b"of 5" in given, "a classic member got what a new member computed"
        finally:
            for member in running:
                await close(member)
        committed = (await admin.list_consumer_group_offsets([name]))[name]
        offsets = {partition: offset.offset for partition, offset in committed.items() if offset is not None}
        assert offsets == {TopicPartition(name, p): produced for p in range(PARTITIONS)}
    assert ownership.conflicts == []
