# SPDX-License-Identifier: Apache-2.0
"""KIP-1327 from end to end: creation times of brokers, and the positions where consumers begin in new partitions."""

from __future__ import annotations

import asyncio
import signal
import time
from typing import TypedDict, Unpack, cast

import pytest

from kcoord.client import (
    AdminClient,
    Consumer,
    ConsumerRebalanceListener,
    NoOffsetForPartitionException,
    Producer,
    TopicPartition,
    UnsupportedVersionException,
)
from kcoord.client.api_versions import Kip1327Revision
from kcoord.client.config import ConsumerOptions
from tests.integration.client.conftest import StartBroker, Target
from tests.integration.client.helpers import Partitions, consumer_of, create_topic, eventually, produce, read, values
from tests.support.confluent import PolledConsumer
from tests.unit.client.test_classification import FIVE_SECONDS_AGO, HOUR_AGO, LEO, MATRIX, NO_OFFSET, START

BEFORE = 20


class Revision(TypedDict, total=False):
    """The name of a client's software, and the revision of KIP-1327 that it uses."""

    client_software_name: str
    kip_1327_revision: Kip1327Revision


LATER_REVISION: Revision = {"client_software_name": "dekaf", "kip_1327_revision": "new-partitions"}
"""The revision that the client dekaf has released."""
REVISIONS = pytest.mark.parametrize("revision", [Revision(), LATER_REVISION], ids=["accepted", "later"])


async def join(address: str, group: str, topic: str, partitions: int, **options: Unpack[ConsumerOptions]) -> None:
    """Creates the group, without committed offsets."""
    settings: ConsumerOptions = {"enable_auto_commit": False, "auto_offset_reset": "latest", **options}
    async with consumer_of(address, group, **settings) as consumer:
        consumer.subscribe([topic])
        while len(consumer.assignment) < partitions:
            await consumer.poll(20)


async def grow(admin: AdminClient, topic: str, count: int) -> None:
    (await admin.create_partitions({topic: count})).all()

    async def has_grown() -> bool:
        return len((await admin.describe_topics([topic]))[topic].partitions) == count

    await eventually(has_grown, f"{count} partitions of {topic}")


class TestExpansionWhileRecordsAreProduced:
    async def lost(
        self,
        target: Target,
        admin: AdminClient,
        topic: str,
        new_partitions: str | None,
        expected: int,
        **options: Unpack[Revision],
    ) -> list[str]:
        """Returns the values that were produced after the group was created and that it never read.

        Waits until at most `expected` values are missing. A producer writes all the time. The topic gets a partition
        while the consumer is between two polls. So the new partition has records before the consumer can learn of it,
        even on a fast machine.
        """
        old, new = await self._setup(admin, topic)
        written: list[str] = []
        seen: list[str] = []
        async with (
            Producer(bootstrap_servers=target.address, linger_ms=0) as producer,
            consumer_of(
                target.address,
                topic,
                auto_offset_reset="latest",
                auto_offset_reset_new_partitions=new_partitions,
                metadata_max_age_ms=300_000,
                **options,
            ) as consumer,
        ):
            consumer.subscribe([topic])
            while consumer.assignment != {old}:
                await consumer.poll(20)
            await consumer.position(old)

            async def write(partition: TopicPartition, count: int) -> None:
                for _ in range(count):
                    value = f"{partition}/{len(written)}"
                    await producer.send_and_wait(topic, value, partition=partition.partition)
                    written.append(value)

            writing_on = asyncio.create_task(write(old, 200))
            await grow(admin, topic, 2)
            await write(new, BEFORE)
            while consumer.assignment != {old, new}:
                seen += values(await consumer.poll(20))
            await consumer.position(new)
            await write(new, 20)
            await writing_on
            while len(seen) < len(written) - expected:
                seen += values(await read(consumer, 1))
        assert len(seen) == len(set(seen))
        assert not set(seen) - set(written)
        return [value for value in written if value not in seen]

    async def _setup(self, admin: AdminClient, topic: str) -> tuple[TopicPartition, TopicPartition]:
        (old,) = await create_topic(admin, topic)
        return old, TopicPartition(topic, 1)

    async def test_latest_alone_loses_records_from_before_the_assignment(
        self, target: Target, admin: AdminClient, name: str
    ) -> None:
        lost = await self.lost(target, admin, name, None, BEFORE)
        assert len(lost) == BEFORE
        assert all(value.startswith(f"{name}-1/") for value in lost)

    async def test_earliest_for_new_partitions_loses_no_record(
        self, target: Target, admin: AdminClient, name: str
    ) -> None:
        """With a broker without creation times, the base policy applies, without an exception."""
        expected = 0 if target.has_kip_1327 else BEFORE
        assert len(await self.lost(target, admin, name, "earliest", expected)) == expected

    async def test_a_coordinator_that_lists_new_partitions_loses_no_record(self, kcoord: str, name: str) -> None:
        async with AdminClient(bootstrap_servers=kcoord) as admin:
            assert await self.lost(Target("kcoord", kcoord), admin, name, "earliest", 0, **LATER_REVISION) == []

    async def test_a_client_without_kip_1327_keeps_the_base_policy(self, kcoord: str, name: str) -> None:
        async with AdminClient(bootstrap_servers=kcoord) as admin:
            lost = await self.lost(Target("kcoord", kcoord), admin, name, "earliest", BEFORE, kip_1327_revision="off")
            assert len(lost) == BEFORE


async def test_a_broker_without_creation_times_leads_to_the_base_policy(start_broker: StartBroker, name: str) -> None:
    broker = start_broker(kcoord_kip1327_enable="false")
    target = Target("disabled", broker.address)
    async with AdminClient(bootstrap_servers=broker.address) as admin:
        lost = await TestExpansionWhileRecordsAreProduced().lost(target, admin, name, "earliest", BEFORE)
        assert len(lost) == BEFORE
        described = (await admin.describe_topics([name]))[name]
        assert {partition.creation_time_ms for partition in described.partitions} == {None}
        assert (await admin.describe_consumer_groups([name]))[name].group_creation_time_ms is None
        async with consumer_of(
            broker.address,
            f"{name}-2",
            auto_offset_reset="latest",
            auto_offset_reset_new_partitions="earliest",
        ) as consumer:
            consumer.subscribe([name])
            while len(consumer.assignment) < 2:
                await consumer.poll(20)
            assert consumer.group_creation_time_ms is None
            partitions = sorted(consumer.assignment)
            assert {
                partition: await consumer.position(partition) for partition in partitions
            } == await consumer.end_offsets(partitions)


@pytest.mark.java
@pytest.mark.parametrize("target", ["kafka"], indirect=True)
async def test_apache_kafka_leads_to_the_base_policy(target: Target, admin: AdminClient, name: str) -> None:
    await create_topic(admin, name)
    await join(target.address, name, name, 1)
    await grow(admin, name, 2)
    await produce(target.address, (TopicPartition(name, 1), "a", None))
    async with consumer_of(
        target.address, name, auto_offset_reset="latest", auto_offset_reset_new_partitions="earliest"
    ) as consumer:
        consumer.subscribe([name])
        while len(consumer.assignment) < 2:
            await consumer.poll(20)
        assert await consumer.position(TopicPartition(name, 1)) == 1
        assert consumer.group_creation_time_ms is None


@REVISIONS
async def test_the_matrix_against_a_broker(kcoord: str, name: str, revision: Revision) -> None:
    """Each row of the matrix has its own group. All groups are older than partition 1 and newer than partition 0."""
    async with AdminClient(bootstrap_servers=kcoord) as admin:
        (old,) = await create_topic(admin, name)
        new = TopicPartition(name, 1)
        groups = [f"{name}-{index}" for index in range(len(MATRIX))]
        await asyncio.gather(*(join(kcoord, group, name, 1, **revision) for group in groups))
        await grow(admin, name, 2)
        now_ms = int(time.time() * 1000)
        times = (now_ms - 7_200_000, now_ms - 1_800_000, now_ms - 1_000)
        await produce(kcoord, *((partition, "x", time_ms) for partition in (old, new) for time_ms in times))
        for group, (base, policy, pre_existing, newly_expanded) in zip(groups, MATRIX, strict=True):
            positions = await first_positions(kcoord, group, name, base, policy, **revision)
            assert positions == {old: OFFSETS[pre_existing], new: OFFSETS[newly_expanded]}, (base, policy)


OFFSETS = {LEO: 3, START: 0, HOUR_AGO: 1, FIVE_SECONDS_AGO: 2, NO_OFFSET: None}


class Pausing(ConsumerRebalanceListener):
    """A listener that pauses assigned partitions, so that they keep their first position."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer

    def on_partitions_assigned(self, partitions: Partitions) -> None:
        self._consumer.pause(partitions)


async def note(consumer: Consumer, partition: TopicPartition, positions: dict[TopicPartition, int | None]) -> None:
    positions[partition] = await consumer.position(partition)


async def first_positions(
    address: str,
    group: str,
    topic: str,
    base: str,
    new_partitions: str | None,
    **options: Unpack[Revision],
) -> dict[TopicPartition, int | None]:
    """Returns where a member begins to read both partitions, None for NoOffsetForPartitionException."""
    async with consumer_of(
        address,
        group,
        enable_auto_commit=False,
        auto_offset_reset=base,
        # A minute instead of the five seconds in the KIP's table: the test must not fail on a slow machine.
        auto_offset_reset_new_partitions=new_partitions and new_partitions.replace("PT5S", "PT60S"),
        **options,
    ) as consumer:
        consumer.subscribe([topic], listener=Pausing(consumer))
        positions: dict[TopicPartition, int | None] = {}
        async with asyncio.timeout(20):
            while len(positions) < 2:
                missing = consumer.assignment - positions.keys()
                for attempt in (consumer.poll(10), *(note(consumer, partition, positions) for partition in missing)):
                    try:
                        await attempt
                    except NoOffsetForPartitionException as error:
                        positions |= dict.fromkeys(error.partitions)
        return positions


class TestCreationTimes:
    """Creation times are recorded once and never change."""

    async def times(self, address: str, topic: str, group: str) -> tuple[list[int], int]:
        async with AdminClient(bootstrap_servers=address) as admin:
            described = (await admin.describe_topics([topic]))[topic]
            group_ms = (await admin.describe_consumer_groups([group]))[group].group_creation_time_ms
        partition_times = [
            partition.creation_time_ms for partition in described.partitions if partition.creation_time_ms is not None
        ]
        assert len(partition_times) == len(described.partitions) and group_ms is not None
        return partition_times, group_ms

    async def test_creation_times_survive_restarts_growth_and_rebalances(
        self, start_broker: StartBroker, name: str
    ) -> None:
        broker = start_broker()
        async with AdminClient(bootstrap_servers=broker.address) as admin:
            await create_topic(admin, name, 2)
        await join(broker.address, name, name, 2)
        first = await self.times(broker.address, name, name)
        for how in (signal.SIGTERM, signal.SIGKILL):
            await asyncio.to_thread(broker.restart, how)
            assert await self.times(broker.address, name, name) == first
        async with AdminClient(bootstrap_servers=broker.address) as admin:
            await grow(admin, name, 3)
        await join(broker.address, name, name, 3)
        partition_times, group_ms = await self.times(broker.address, name, name)
        assert (partition_times[:2], group_ms) == first
        assert partition_times[2] > max(first[0][1], group_ms)
        await asyncio.to_thread(broker.restart)
        assert await self.times(broker.address, name, name) == (partition_times, group_ms)

    async def test_recreated_topics_and_groups_are_newer(self, kcoord: str, name: str) -> None:
        async with AdminClient(bootstrap_servers=kcoord) as admin:
            await create_topic(admin, name)
            await join(kcoord, name, name, 1)
            (old_topic,), old_group = await self.times(kcoord, name, name)
            (await admin.delete_consumer_groups([name])).all()
            (await admin.delete_topics([name])).all()
            await create_topic(admin, name)
            await join(kcoord, name, name, 1)
            (new_topic,), new_group = await self.times(kcoord, name, name)
            assert new_topic > old_topic
            assert new_group > old_group

    async def test_a_group_of_offsets_alone_is_created_by_its_first_member(self, kcoord: str, name: str) -> None:
        async with AdminClient(bootstrap_servers=kcoord) as admin:
            (partition,) = await create_topic(admin, name)
            (await admin.alter_consumer_group_offsets(name, {partition: 0})).all()
            assert (await admin.describe_consumer_groups([name]))[name].group_creation_time_ms is None
            await grow(admin, name, 2)
            await join(kcoord, name, name, 2)
            times, group_ms = await self.times(kcoord, name, name)
            assert group_ms >= max(times)
            assert (await admin.list_consumer_group_offsets([name]))[name] != {}

    async def test_a_classic_group_gets_its_creation_time_when_it_is_converted(self, kcoord: str, name: str) -> None:
        async with AdminClient(bootstrap_servers=kcoord) as admin:
            partitions = await create_topic(admin, name, 2)
            classic = await asyncio.to_thread(PolledConsumer, kcoord, name, [name], classic="cooperative-sticky")
            try:
                await eventually(lambda: len(classic.assigned) == 2, "the classic member owns all partitions")
                assert (await admin.describe_consumer_groups([name]))[name].group_creation_time_ms is None
                async with consumer_of(kcoord, name, enable_auto_commit=False) as consumer:
                    consumer.subscribe([name])
                    while len(consumer.assignment) < 1:
                        await consumer.poll(20)
                    described = (await admin.describe_consumer_groups([name]))[name]
                    made_ms = described.group_creation_time_ms
                    assert made_ms is not None and made_ms == consumer.group_creation_time_ms
                    upgraded = {member.upgraded for member in described.members}
                    assert upgraded == {True, False}
                    await asyncio.to_thread(classic.close)
                    while consumer.assignment != set(partitions):
                        await consumer.poll(20)
                    assert (await self.times(kcoord, name, name))[1] == made_ms
            finally:
                await asyncio.to_thread(classic.close)
            assert (await self.times(kcoord, name, name))[1] == made_ms


async def test_a_committed_offset_comes_first(kcoord: str, name: str) -> None:
    async with AdminClient(bootstrap_servers=kcoord) as admin:
        await create_topic(admin, name)
        await join(kcoord, name, name, 1)
        await grow(admin, name, 2)
        new = TopicPartition(name, 1)
        await produce(kcoord, *((new, str(number), None) for number in range(4)))
        (await admin.alter_consumer_group_offsets(name, {new: 3})).all()
        async with consumer_of(
            kcoord, name, auto_offset_reset="latest", auto_offset_reset_new_partitions="earliest"
        ) as consumer:
            consumer.subscribe([name])
            assert values(await read(consumer, 1)) == ["3"]
        # If the position is out of range, the base policy applies, although the partition is new.
        (await admin.alter_consumer_group_offsets(name, {new: 1})).all()
        (await admin.delete_records({new: 3})).all()
        async with consumer_of(
            kcoord, name, auto_offset_reset="latest", auto_offset_reset_new_partitions="earliest"
        ) as consumer:
            consumer.subscribe([name])
            while len(consumer.assignment) < 2 or await consumer.position(new) == 1:
                await consumer.poll(20)
            assert await consumer.position(new) == 4


async def test_versions_and_creation_times_by_revision(kcoord: str, name: str) -> None:
    """Without v2 the broker sends the group's time to this client in a tagged field of v1, but not to known clients."""
    async with AdminClient(bootstrap_servers=kcoord) as admin:
        await create_topic(admin, name)
        await join(kcoord, name, name, 1)
        made_ms = (await admin.describe_consumer_groups([name]))[name].group_creation_time_ms
    assert made_ms is not None
    for software, revision, expected in [
        ("kcoord", "creation-time", (made_ms, made_ms, True)),
        ("kcoord", "off", (made_ms, made_ms, False)),
        ("dekaf", "new-partitions", (None, None, False)),
        ("dekaf", "off", (None, None, False)),
        ("librdkafka", "creation-time", (None, None, False)),
    ]:
        options = Revision(client_software_name=software, kip_1327_revision=cast("Kip1327Revision", revision))
        async with (
            AdminClient(bootstrap_servers=kcoord, **options) as admin,
            consumer_of(kcoord, name, **options) as consumer,
        ):
            consumer.subscribe([name])
            while not consumer.assignment:
                await consumer.poll(20)
            described = (await admin.describe_consumer_groups([name]))[name]
            (partition,) = (await admin.describe_topics([name]))[name].partitions
            creation_times = (
                described.group_creation_time_ms,
                consumer.group_creation_time_ms,
                bool(partition.creation_time_ms),
            )
            assert creation_times == expected, (software, revision)


class TestToStartTime:
    """KIP-1282: a group reads the records since its creation."""

    async def position(
        self, address: str, group: str, partition: TopicPartition, **options: Unpack[ConsumerOptions]
    ) -> int:
        settings: ConsumerOptions = {"auto_offset_reset": "to_start_time", "enable_auto_commit": False, **options}
        async with consumer_of(address, group, **settings) as consumer:
            consumer.subscribe([partition.topic], listener=Pausing(consumer))
            while partition not in consumer.assignment:
                await consumer.poll(20)
            return await consumer.position(partition)

    @pytest.mark.parametrize("revision", ["creation-time", "off"])
    async def test_a_group_reads_records_from_its_creation_on(
        self, kcoord: str, name: str, revision: Kip1327Revision
    ) -> None:
        """With revision `off` the time is in the tagged field of v1."""
        async with AdminClient(bootstrap_servers=kcoord) as admin:
            (old,) = await create_topic(admin, name)
            new = TopicPartition(name, 1)
            now_ms = int(time.time() * 1000)
            await produce(kcoord, *((old, "before", now_ms - 60_000) for _ in range(3)))
            # The group is new and no record is as new, so it begins at the end of the log.
            assert await self.position(kcoord, name, old, kip_1327_revision=revision) == 3
            await produce(kcoord, *((old, "after", now_ms + 60_000) for _ in range(2)))
            assert await self.position(kcoord, name, old, kip_1327_revision=revision) == 3
            await grow(admin, name, 2)
            await produce(kcoord, *((new, "after", now_ms + 60_000) for _ in range(2)))
            assert await self.position(kcoord, name, new, kip_1327_revision=revision) == 0
            # The position is out of range, so the group begins at the oldest record that is left.
            (await admin.alter_consumer_group_offsets(name, {old: 1})).all()
            (await admin.delete_records({old: 4})).all()
            async with consumer_of(kcoord, name, auto_offset_reset="to_start_time") as consumer:
                consumer.subscribe([name])
                while len(consumer.assignment) < 2 or await consumer.position(old) < 4:
                    await consumer.poll(20)

    async def test_an_unknown_creation_time_raises_an_error(self, kcoord: str, name: str) -> None:
        async with AdminClient(bootstrap_servers=kcoord) as admin:
            (partition,) = await create_topic(admin, name)
        with pytest.raises(UnsupportedVersionException, match=f"KIP-1282.*{name}-0"):
            await self.position(kcoord, name, partition, client_software_name="librdkafka")
        async with consumer_of(kcoord, f"{name}-2", auto_offset_reset="to_start_time") as consumer:
            consumer.assign([partition])
            with pytest.raises(UnsupportedVersionException, match=f"KIP-1282.*{name}-0"):
                await consumer.position(partition)
