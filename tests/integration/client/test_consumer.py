# SPDX-License-Identifier: Apache-2.0
"""The consumer: groups, rebalances, commits, positions."""

from __future__ import annotations

import asyncio
import time

import pytest

from kcoord.client import (
    AdminClient,
    AlterConfigOp,
    CommitFailedException,
    ConfigResource,
    ConfigResourceType,
    IllegalStateException,
    KafkaError,
    NoOffsetForPartitionException,
    OffsetAndMetadata,
    OffsetAndTimestamp,
    OffsetOutOfRangeException,
    Producer,
    TopicPartition,
)
from tests.integration.client.conftest import StartBroker, Target
from tests.integration.client.helpers import (
    Events,
    Member,
    consumer_of,
    create_topic,
    eventually,
    members_of,
    produce,
    read,
    until_shared,
    values,
)


class TestGroup:
    async def test_three_members_share_partitions_and_take_them_over(
        self, target: Target, admin: AdminClient, name: str
    ) -> None:
        partitions = await create_topic(admin, name, 6)
        async with members_of(target.address, name, None, None, None, topics=[name]) as members:
            await until_shared(members, partitions)
            await produce(target.address, *((partition, f"{partition}", None) for partition in partitions))
            await eventually(
                lambda: sorted(value for member in members for value in member.seen) == sorted(map(str, partitions)),
                "each record is read once",
            )
            await members[0].stop()
            await until_shared(members[1:], partitions)
            assert members[0].events.events[-1][0] == "revoked"
            newcomer = Member(target.address, name, members[1].events._owners)
            members.append(await newcomer.start(name))
            await until_shared(members[1:], partitions)
            await produce(target.address, *((partition, f"again {partition}", None) for partition in partitions))
            await eventually(lambda: sum(len(member.seen) for member in members) == 12, "nothing is read twice")

    async def test_a_static_member_keeps_its_partitions(self, target: Target, admin: AdminClient, name: str) -> None:
        partitions = await create_topic(admin, name, 4)
        async with members_of(target.address, name, "a", "b", topics=[name]) as members:
            await until_shared(members, partitions)
            owned, other = members[0].owned, len(members[1].events.events)
            await members[0].stop()
            again = Member(target.address, name, members[1].events._owners, group_instance_id="a")
            members.append(await again.start(name))
            await eventually(lambda: again.owned == owned, "the same partitions as before")
            assert len(members[1].events.events) == other
            async with consumer_of(target.address, name, group_instance_id="b") as intruder:
                intruder.subscribe([name])
                with pytest.raises(KafkaError, match="UNRELEASED_INSTANCE_ID"):
                    await intruder.poll(5000)

    async def test_a_static_member_can_leave_permanently(self, target: Target, admin: AdminClient, name: str) -> None:
        partitions = await create_topic(admin, name, 2)
        async with consumer_of(target.address, name, group_instance_id="a") as leaving:
            leaving.subscribe([name])
            while leaving.assignment != set(partitions):
                await leaving.poll(50)
            await leaving.close(leave_group=True)
        async with members_of(target.address, name, "b", topics=[name]) as members:
            await until_shared(members, partitions)

    async def test_pattern(self, target: Target, admin: AdminClient, name: str) -> None:
        first = await create_topic(admin, f"{name}-1", 1)
        second = await create_topic(admin, f"{name}-2", 2)
        await create_topic(admin, f"not-{name}", 1)
        async with consumer_of(target.address, name) as consumer:
            consumer.subscribe(pattern=f"{name}-.*")
            while consumer.assignment != {*first, *second}:
                await consumer.poll(50)
            await produce(target.address, *((partition, str(partition), None) for partition in [*first, *second]))
            assert sorted(values(await read(consumer, 3))) == sorted(map(str, [*first, *second]))
            # Kafka matches patterns with new topics only every ten minutes.
            if target.kind == "kcoord":
                third = await create_topic(admin, f"{name}-3", 1)
                while consumer.assignment != {*first, *second, *third}:
                    await consumer.poll(50)
            consumer.subscribe([f"{name}-2"])
            while consumer.assignment != set(second):
                await consumer.poll(50)

    async def test_an_invalid_pattern(self, target: Target, name: str) -> None:
        async with consumer_of(target.address, name) as consumer:
            consumer.subscribe(pattern="(")
            with pytest.raises(KafkaError, match="INVALID_REGULAR_EXPRESSION"):
                await consumer.poll(5000)

    async def test_an_unknown_assignor(self, target: Target, name: str) -> None:
        async with consumer_of(target.address, name, group_remote_assignor="best") as consumer:
            consumer.subscribe([name])
            with pytest.raises(KafkaError, match="UNSUPPORTED_ASSIGNOR"):
                await consumer.poll(5000)

    async def test_a_member_leaves_without_polls_and_joins_again(
        self, target: Target, admin: AdminClient, name: str
    ) -> None:
        partitions = await create_topic(admin, name, 2)
        events = Events()
        async with consumer_of(target.address, name, max_poll_interval_ms=500) as slow:
            slow.subscribe([name], listener=events)
            while slow.assignment != set(partitions):
                await slow.poll(50)
            async with members_of(target.address, name, None, topics=[name]) as members:
                await until_shared(members, partitions)
                with pytest.raises(CommitFailedException):
                    await slow.commit({partitions[0]: 0})
                while len(slow.assignment) != 1:
                    await slow.poll(50)
                await until_shared([*members], sorted(set(partitions) - slow.assignment))
            assert [kind for kind, _ in events.events] == ["assigned", "lost", "assigned"]

    async def test_a_member_whose_session_expired_is_fenced(
        self, target: Target, admin: AdminClient, name: str
    ) -> None:
        """A long pause of the process has this effect: the group continues without the member."""
        partitions = await create_topic(admin, name, 2)
        short = [
            AlterConfigOp("consumer.session.timeout.ms", "500"),
            AlterConfigOp("consumer.heartbeat.interval.ms", "100"),
        ]
        (await admin.incremental_alter_configs({ConfigResource(ConfigResourceType.GROUP, name): short})).all()
        events = Events()
        async with consumer_of(target.address, name) as consumer:
            consumer.subscribe([name], listener=events)
            while consumer.assignment != set(partitions):
                await consumer.poll(50)
            before = consumer.group_metadata
            # The whole event loop stands still, as in a stopped process.
            time.sleep(1.0)
            while len(events.events) < 3:
                await consumer.poll(50)
            assert [kind for kind, _ in events.events] == ["assigned", "lost", "assigned"]
            after = consumer.group_metadata
            assert after.member_id == before.member_id
            assert consumer.assignment == set(partitions)
            assert after.member_epoch > before.member_epoch

    async def test_unsubscribe_and_subscribe_again(self, target: Target, admin: AdminClient, name: str) -> None:
        partitions = await create_topic(admin, name, 1)
        events = Events()
        async with consumer_of(target.address, name) as consumer:
            consumer.subscribe([name], listener=events)
            while not consumer.assignment:
                await consumer.poll(50)
            await consumer.unsubscribe()
            assert consumer.assignment == frozenset() and consumer.subscription == frozenset()
            assert (await admin.describe_consumer_groups([name]))[name].state == "Empty"
            consumer.assign(partitions)
            await consumer.unsubscribe()
            consumer.subscribe([name], listener=events)
            while not consumer.assignment:
                await consumer.poll(50)
            assert [kind for kind, _ in events.events] == ["assigned", "revoked", "assigned"]

    async def test_an_error_of_a_listener_is_raised_and_the_group_continues(
        self, target: Target, admin: AdminClient, name: str
    ) -> None:
        (partition,) = await create_topic(admin, name)
        await produce(target.address, (partition, "a", None))

        class Failing(Events):
            async def on_partitions_assigned(self, partitions: frozenset[TopicPartition]) -> None:
                raise RuntimeError("no room")

        async with consumer_of(target.address, name) as consumer:
            consumer.subscribe([name], listener=Failing())
            with pytest.raises(RuntimeError, match="no room"):
                await read(consumer, 1)
            assert values(await read(consumer, 1)) == ["a"]

    async def test_a_subscription_to_a_topic_that_is_created_later(
        self, target: Target, admin: AdminClient, name: str
    ) -> None:
        async with consumer_of(target.address, name, allow_auto_create_topics=False) as consumer:
            consumer.subscribe([name])
            assert await consumer.poll(100) == []
            (partition,) = await create_topic(admin, name)
            await produce(target.address, (partition, "a", None))
            assert values(await read(consumer, 1)) == ["a"]

    async def test_a_deleted_topic_does_not_delay_a_rebalance(
        self, target: Target, admin: AdminClient, name: str
    ) -> None:
        """The coordinator rejects commits for the deleted topic. The revocation must not wait for them."""
        (stays,) = await create_topic(admin, name)
        (goes,) = await create_topic(admin, f"{name}-gone")
        await produce(target.address, (stays, "a", None), (goes, "b", None))
        async with consumer_of(target.address, name, auto_commit_interval_ms=20) as consumer:
            consumer.subscribe([stays.topic, goes.topic])
            await read(consumer, 2)
            (await admin.delete_topics([goes.topic])).all()
            async with asyncio.timeout(10):
                while consumer.assignment != {stays}:
                    await consumer.poll(20)
            await produce(target.address, (stays, "c", None))
            assert values(await read(consumer, 1)) == ["c"]
            await consumer.commit()
            assert await consumer.committed([stays]) == {stays: OffsetAndMetadata(2, "", 0)}


class TestCommits:
    async def test_commits_and_a_restart_at_the_committed_offsets(
        self, target: Target, admin: AdminClient, name: str
    ) -> None:
        partitions = await create_topic(admin, name, 2)
        await produce(
            target.address, *((partition, f"{number}", None) for partition in partitions for number in range(4))
        )
        async with consumer_of(target.address, name, enable_auto_commit=False) as consumer:
            consumer.subscribe([name])
            await read(consumer, 8)
            assert await consumer.committed(partitions) == dict.fromkeys(partitions)
            await consumer.commit({partitions[0]: 1, partitions[1]: OffsetAndMetadata(2, "note")})
            first = consumer.commit_async({partitions[0]: 2})
            last = consumer.commit_async({partitions[0]: 3})
            await asyncio.gather(first, last)
            committed = await consumer.committed(partitions)
            assert committed == {partitions[0]: OffsetAndMetadata(3), partitions[1]: OffsetAndMetadata(2, "note")}
        async with consumer_of(target.address, name, enable_auto_commit=False) as consumer:
            consumer.subscribe([name])
            seen = await read(consumer, 3)
            assert sorted((record.partition, record.offset) for record in seen) == [(0, 3), (1, 2), (1, 3)]
            await consumer.commit()
        committed = (await admin.list_consumer_group_offsets([name]))[name]
        assert {offset.offset for offset in committed.values() if offset is not None} == {4}

    async def test_automatic_commits_at_the_interval_and_at_close(
        self, target: Target, admin: AdminClient, name: str
    ) -> None:
        (partition,) = await create_topic(admin, name)
        await produce(target.address, *((partition, str(number), None) for number in range(5)))
        async with consumer_of(target.address, name, auto_commit_interval_ms=50, max_poll_records=1) as consumer:
            consumer.subscribe([name])
            await read(consumer, 2)

            async def is_committed() -> bool:
                await consumer.poll(10, max_records=1)
                return (await consumer.committed([partition]))[partition] == OffsetAndMetadata(5, "", 0)

            await eventually(is_committed, "all five are committed")
        async with consumer_of(target.address, name, max_poll_records=1) as consumer:
            consumer.subscribe([name])
            await produce(target.address, (partition, "5", None), (partition, "6", None))
            assert values(await read(consumer, 1)) == ["5"]
        assert (await admin.list_consumer_group_offsets([name]))[name] == {partition: OffsetAndMetadata(6, "", 0)}

    async def test_iteration_commits_only_returned_records(self, target: Target, admin: AdminClient, name: str) -> None:
        (partition,) = await create_topic(admin, name)
        await produce(target.address, *((partition, str(number), None) for number in range(5)))
        async with consumer_of(target.address, name) as consumer:
            consumer.subscribe([name])
            async for record in consumer:
                if record.offset == 2:
                    break
        assert (await admin.list_consumer_group_offsets([name]))[name] == {partition: OffsetAndMetadata(3, "", 0)}

    async def test_commits_without_a_group_fail(self, target: Target, admin: AdminClient, name: str) -> None:
        partitions = await create_topic(admin, name)
        async with consumer_of(target.address) as consumer:
            consumer.assign(partitions)
            for refused in (consumer.commit(), consumer.committed(partitions)):
                with pytest.raises(IllegalStateException, match="group_id"):
                    await refused
            with pytest.raises(IllegalStateException, match="group_id"):
                consumer.subscribe([name])

    async def test_assigned_partitions_with_a_group_id(self, target: Target, admin: AdminClient, name: str) -> None:
        (partition,) = await create_topic(admin, name)
        await produce(target.address, (partition, "a", None), (partition, "b", None))
        for expected in ("a", "b"):
            async with consumer_of(target.address, name, max_poll_records=1) as consumer:
                consumer.assign([partition])
                assert values(await read(consumer, 1)) == [expected]


class TestPositions:
    async def test_seek_pause_and_lookups(self, target: Target, admin: AdminClient, name: str) -> None:
        partitions = first, second = await create_topic(admin, name, 2)
        now_ms = int(time.time() * 1000)
        await produce(
            target.address,
            *((partition, f"{number}", now_ms + number * 100) for partition in partitions for number in range(5)),
        )
        async with consumer_of(target.address) as consumer:
            consumer.assign(partitions)
            assert await consumer.beginning_offsets(partitions) == {first: 0, second: 0}
            assert await consumer.end_offsets(partitions) == {first: 5, second: 5}
            assert await consumer.offsets_for_times({first: now_ms + 150, second: now_ms + 9999}) == {
                first: OffsetAndTimestamp(2, now_ms + 200, 0),
                second: None,
            }
            assert await consumer.partitions_for(name) == [0, 1]
            assert await consumer.position(first) == 0
            consumer.pause([second])
            assert consumer.paused == {second}
            assert {record.partition for record in await read(consumer, 5)} == {0}
            consumer.seek(first, 3)
            assert await consumer.position(first) == 3
            assert [record.offset for record in await read(consumer, 2)] == [3, 4]
            consumer.seek_to_beginning([first])
            assert [record.offset for record in await read(consumer, 5)] == [0, 1, 2, 3, 4]
            consumer.seek_to_end([second])
            consumer.resume([second])
            assert await consumer.position(second) == 5
            await produce(target.address, (second, "new", None))
            assert values(await read(consumer, 1)) == ["new"]
            with pytest.raises(IllegalStateException):
                consumer.seek(TopicPartition(name, 9), 0)

    async def test_reset_policies(self, target: Target, admin: AdminClient, name: str) -> None:
        (partition,) = await create_topic(admin, name)
        now_ms = int(time.time() * 1000)
        times = (now_ms - 7_200_000, now_ms - 1_800_000, now_ms - 10_000)
        await produce(target.address, *((partition, str(time_ms), time_ms) for time_ms in times))
        policies = {
            "earliest": 0,
            "latest": 3,
            "by_duration:PT1H": 1,
            "by_duration:PT60S": 2,
            "by_duration:PT0.001S": 3,
        }
        for policy, expected in policies.items():
            async with consumer_of(target.address, auto_offset_reset=policy) as consumer:
                consumer.assign([partition])
                assert await consumer.position(partition) == expected, policy

    async def test_the_policy_none(self, target: Target, admin: AdminClient, name: str) -> None:
        (partition,) = await create_topic(admin, name)
        await produce(target.address, (partition, "a", None))
        async with consumer_of(target.address, name, auto_offset_reset="none") as consumer:
            consumer.subscribe([name])
            for _ in range(2):
                with pytest.raises(NoOffsetForPartitionException) as failure:
                    await read(consumer, 1)
                assert failure.value.partitions == [partition]
            consumer.seek(partition, 0)
            assert values(await read(consumer, 1)) == ["a"]
            (await admin.delete_records({partition: 1})).all()
            consumer.seek(partition, 0)
            with pytest.raises(OffsetOutOfRangeException) as out_of_range:
                await read(consumer, 1)
            assert out_of_range.value.positions == {partition: 0}

    async def test_out_of_range_uses_the_base_policy(self, target: Target, admin: AdminClient, name: str) -> None:
        (partition,) = await create_topic(admin, name)
        await produce(target.address, *((partition, str(number), None) for number in range(4)))
        (await admin.delete_records({partition: 2})).all()
        for policy in ("earliest", "latest"):
            group = f"{name}-{policy}"
            (await admin.alter_consumer_group_offsets(group, {partition: 1})).all()
            async with consumer_of(
                target.address,
                group,
                auto_offset_reset=policy,
                auto_offset_reset_new_partitions="earliest" if policy == "latest" else "latest",
            ) as consumer:
                consumer.subscribe([name])
                if policy == "earliest":
                    assert [record.offset for record in await read(consumer, 2)] == [2, 3]
                    continue
                while not consumer.assignment or await consumer.position(partition) == 1:
                    await consumer.poll(20)
                assert await consumer.position(partition) == 4


async def test_a_consumer_continues_after_restarts_of_the_broker(start_broker: StartBroker, name: str) -> None:
    broker = start_broker()
    async with AdminClient(bootstrap_servers=broker.address) as admin:
        (partition,) = await create_topic(admin, name)
        async with (
            Producer(bootstrap_servers=broker.address) as producer,
            consumer_of(broker.address, name, auto_commit_interval_ms=100) as consumer,
        ):
            consumer.subscribe([name])
            await producer.send_and_wait(name, "0")
            assert values(await read(consumer, 1)) == ["0"]
            for number in (1, 2):
                if number == 1:
                    await asyncio.to_thread(broker.restart)
                else:
                    await asyncio.to_thread(broker.kill)
                    await asyncio.to_thread(broker.start)
                await producer.send_and_wait(name, str(number))
                assert values(await read(consumer, 1)) == [str(number)]
            assert consumer.assignment == {partition}


async def test_close_ends_at_its_timeout(start_broker: StartBroker, name: str) -> None:
    broker = start_broker()
    async with AdminClient(bootstrap_servers=broker.address) as admin:
        (partition,) = await create_topic(admin, name)
        await produce(broker.address, (partition, "a", None))
        async with consumer_of(broker.address, name) as consumer:
            consumer.subscribe([name])
            await read(consumer, 1)
            await asyncio.to_thread(broker.kill)
            async with asyncio.timeout(5):
                await consumer.close(timeout_ms=500)


async def test_concurrent_polls_are_rejected(target: Target, admin: AdminClient, name: str) -> None:
    partitions = await create_topic(admin, name)
    async with consumer_of(target.address) as consumer:
        consumer.assign(partitions)
        polling = asyncio.create_task(consumer.poll(5000))
        await asyncio.sleep(0)
        with pytest.raises(IllegalStateException, match="polled"):
            await consumer.poll(0)
        polling.cancel()
    with pytest.raises(IllegalStateException):
        await consumer.poll(0)
