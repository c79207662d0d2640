# SPDX-License-Identifier: Apache-2.0
"""Groups whose members compute their assignments (KIP-848 client-side assignors), with a broker in its own process."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from kcoord.client import (
    AdminClient,
    AssignmentSpec,
    AssignorException,
    AssignorMetadata,
    Consumer,
    ConsumerConfig,
    ConsumerGroupDescription,
    Errors,
    GroupAssignment,
    KafkaError,
    LagAssignor,
    MemberAssignment,
    Metadata,
    PartitionAssignor,
    TopicPartition,
    UnsupportedVersionException,
)
from kcoord.runtime.serde import partition_for
from tests.docs.terminal import blocks_of
from tests.integration.client.conftest import StartBroker
from tests.integration.client.helpers import (
    Events,
    Member,
    consumer_of,
    create_topic,
    eventually,
    produce,
)
from tests.integration.test_reassignment import reassign
from tests.support.kcoord_process import KcoordProcess
from tests.support.shared import ROOT

GUIDE = ROOT / "docs" / "guides" / "client-assignor.md"
WEIGHTS = next(block.text for block in blocks_of(GUIDE.read_text()) if block.title == "weights.py")
_names: dict[str, type[PartitionAssignor]] = {}
exec(compile(WEIGHTS, "docs/guides/client-assignor.md", "exec"), _names)
StickyByWeight: Callable[..., PartitionAssignor] = _names["StickyByWeight"]
PARTITIONS = 12


@pytest.fixture
def broker(start_broker: StartBroker) -> KcoordProcess:
    return start_broker(kcoord_client_assignors_enable="true")


@pytest.fixture
async def admin(broker: KcoordProcess) -> AsyncIterator[AdminClient]:
    async with AdminClient(bootstrap_servers=broker.address) as client:
        yield client


class Noting(PartitionAssignor):
    """The assignor of the guide, with notes of what it computes and learns."""

    name = "sticky-by-weight"

    def __init__(self, weight: int = 1, *, versions: tuple[int, int] = (0, 0), name: str = name) -> None:
        self._inner = StickyByWeight(weight)
        self.minimum_version, self.maximum_version = versions
        self.name = name
        self.specs: list[AssignmentSpec] = []
        self.learned: list[tuple[int, int, Metadata | None]] = []
        """(epoch, number of partitions, metadata)"""
        self.errors: list[int] = []
        self.failure: Exception | None = None
        self.is_invalid = False
        self.error = 0
        self.hold: threading.Event | None = None

    @property
    def weight(self) -> int:
        return self._inner.weight  # type: ignore[attr-defined, no-any-return]

    @weight.setter
    def weight(self, weight: int) -> None:
        self._inner.weight = weight  # type: ignore[attr-defined]

    def metadata(self) -> AssignorMetadata:
        return AssignorMetadata(Metadata(self.maximum_version, self._inner.metadata().metadata.data))

    def assign(self, spec: AssignmentSpec) -> GroupAssignment:
        self.specs.append(spec)
        if self.hold is not None:
            self.hold.wait(30)
        if self.failure is not None:
            raise self.failure
        if self.error:
            return GroupAssignment(error=self.error)
        result = self._inner.assign(spec)
        if self.is_invalid:
            zero = MemberAssignment([TopicPartition(topic, 0) for topic in spec.topics])
            return GroupAssignment(dict.fromkeys(spec.members, zero))
        tag = f"epoch {spec.group_epoch}".encode()
        return GroupAssignment(
            {
                member_id: MemberAssignment(
                    assignment.target_partitions, Metadata(spec.members[member_id].metadata.version, tag)
                )
                for member_id, assignment in result.members.items()
            }
        )

    def on_assignment(self, error: int, assignment: MemberAssignment, group_epoch: int) -> None:
        self.errors.append(error)
        self.learned.append((group_epoch, len(assignment.target_partitions), assignment.metadata))


class Group:
    """Members of one group that share `owners`, which checks that no partition has two owners."""

    def __init__(self, broker: KcoordProcess, name: str) -> None:
        self._broker = broker
        self.name = name
        self._owners: dict[TopicPartition, Events] = {}
        self.members: list[Member] = []

    async def join(self, *assignors: PartitionAssignor, **options: object) -> Member:
        member = Member(
            self._broker.address,
            self.name,
            self._owners,
            group_local_assignors=assignors,
            **options,  # type: ignore[arg-type]
        )
        self.members.append(member)
        return await member.start(self.name)

    async def leave(self, member: Member) -> None:
        self.members.remove(member)
        await member.stop()

    async def until_owned(self, *counts: int) -> None:
        """Waits until the members own all partitions, in these numbers, and nothing is pending."""

        def owned() -> list[int]:
            return [len(member.owned) for member in self.members]

        await eventually(lambda: owned() == [*counts], lambda: f"{counts} partitions; now {owned()}")
        assert len(frozenset().union(*(member.owned for member in self.members))) == sum(counts)


@asynccontextmanager
async def group_of(
    broker: KcoordProcess, admin: AdminClient, name: str, count: int = PARTITIONS
) -> AsyncIterator[Group]:
    await create_topic(admin, name, count)
    group = Group(broker, name)
    try:
        yield group
    finally:
        for member in [*group.members]:
            await group.leave(member)


async def described(admin: AdminClient, name: str) -> ConsumerGroupDescription:
    return (await admin.describe_consumer_groups([name]))[name]


async def until_settled(admin: AdminClient, name: str, members: int) -> ConsumerGroupDescription:
    """Waits until the target is of the group's epoch and all members have reached it."""
    description: ConsumerGroupDescription | None = None

    async def is_settled() -> bool:
        nonlocal description
        description = await described(admin, name)
        return (
            len(description.members) == members
            and description.target_assignment_epoch == description.group_epoch
            and all(member.member_epoch == description.group_epoch for member in description.members)
            and all(member.assignment == member.target_assignment for member in description.members)
        )

    await eventually(is_settled, f"{name} is settled")
    assert description is not None
    return description


async def next_error(consumer: Consumer) -> Exception:
    """Polls until `poll` raises an error of an assignor or of the broker, and returns it."""
    async with asyncio.timeout(20):
        while True:
            try:
                await consumer.poll(50)
            except (AssignorException, KafkaError) as error:
                return error


class TestComputing:
    async def test_three_members_share_by_weight(self, broker: KcoordProcess, admin: AdminClient, name: str) -> None:
        async with group_of(broker, admin, name) as group:
            assignors = [Noting(weight) for weight in (1, 2, 3)]
            for assignor in assignors:
                await group.join(assignor)
            await group.until_owned(2, 4, 6)
            description = await until_settled(admin, name, 3)
            assert description.assignor == "sticky-by-weight"
            assert description.is_assigned_by_member
            assert (description.computing_member_id, description.failed_computations) == (None, 0)
            tag = f"epoch {description.group_epoch}".encode()
            for member in description.members:
                (offered,) = member.client_assignors
                assert (offered.name, offered.minimum_version, offered.maximum_version) == ("sticky-by-weight", 0, 0)
                assert member.assignment_metadata == member.target_metadata == (0, 0, tag)
            offers = [member.client_assignors[0].metadata.data for member in description.members]
            assert sorted(int.from_bytes(data, "big") for data in offers) == [1, 2, 3]
            for assignor, count in zip(assignors, (2, 4, 6), strict=True):
                epochs = [epoch for epoch, _, _ in assignor.learned]
                assert epochs == sorted(set(epochs))
                assert assignor.learned[-1] == (description.group_epoch, count, Metadata(0, tag))
                assert set(assignor.errors) == {0}

            await group.leave(group.members[2])
            await group.until_owned(4, 8)

    async def test_new_metadata_and_requests_make_new_assignments(
        self, broker: KcoordProcess, admin: AdminClient, name: str
    ) -> None:
        async with group_of(broker, admin, name) as group:
            first, second = Noting(1), Noting(1)
            await group.join(first)
            await group.join(second)
            await group.until_owned(6, 6)
            second.weight = 3
            group.members[1].consumer.update_assignor_metadata()
            await group.until_owned(3, 9)
            before = (await until_settled(admin, name, 2)).group_epoch
            specs = len(first.specs) + len(second.specs)
            for number in (1, 2):
                group.members[0].consumer.request_reassignment(7)
                computed = specs + number
                await eventually(lambda computed=computed: len(first.specs) + len(second.specs) == computed, "a spec")  # type: ignore[misc]
                after = await until_settled(admin, name, 2)
                assert after.group_epoch == (before or 0) + number
                newest = max(first.specs + second.specs, key=lambda spec: spec.group_epoch)
                assert sorted(member.reason for member in newest.members.values()) == [0, 7]
            await group.until_owned(3, 9)

    async def test_an_error_of_the_assignor_reaches_all_members(
        self, broker: KcoordProcess, admin: AdminClient, name: str
    ) -> None:
        async with group_of(broker, admin, name) as group:
            assignors = [Noting(), Noting()]
            for assignor in assignors:
                await group.join(assignor)
            await group.until_owned(6, 6)
            await until_settled(admin, name, 2)
            for assignor in assignors:
                assignor.error = 5
            group.members[0].consumer.request_reassignment()
            await eventually(lambda: all(assignor.errors[-1] == 5 for assignor in assignors), "the error")
            description = await until_settled(admin, name, 2)
            assert [member.assignment_metadata.error for member in description.members] == [5, 5]
            await group.until_owned(6, 6)

    async def test_the_coordinator_restarts_while_a_member_computes(
        self, broker: KcoordProcess, admin: AdminClient, name: str
    ) -> None:
        async with group_of(broker, admin, name) as group:
            assignor = Noting()
            assignor.hold = threading.Event()
            await group.join(assignor)
            await eventually(lambda: len(assignor.specs) == 1, "a computation")
            broker.kill()
            broker.start()
            await asyncio.sleep(1)
            assignor.hold.set()
            assignor.hold = None
            await group.until_owned(PARTITIONS)
            await until_settled(admin, name, 1)

    async def test_the_coordinator_moves_to_another_worker_while_a_member_computes(
        self, start_broker: StartBroker, name: str
    ) -> None:
        broker = start_broker(
            kcoord_client_assignors_enable="true", group_coordinator_threads="2", offsets_topic_num_partitions="2"
        )
        async with AdminClient(bootstrap_servers=broker.address) as admin, group_of(broker, admin, name) as group:
            shard, nodes = partition_for(name, 2), [node.node_id for node in (await admin.describe_cluster()).nodes]
            assignors = [Noting(), Noting()]
            for assignor in assignors:
                await group.join(assignor)
            await group.until_owned(6, 6)
            before = await until_settled(admin, name, 2)
            hold = threading.Event()
            for assignor in assignors:
                assignor.hold = hold
            group.members[0].consumer.request_reassignment()
            computed = sum(len(assignor.specs) for assignor in assignors)
            await eventually(lambda: sum(len(assignor.specs) for assignor in assignors) > computed, "a computation")
            (target,) = {*nodes} - {before.coordinator.node_id}
            assert reassign(broker.port, "__consumer_offsets", {shard: [target]}) == {shard: 0}
            hold.set()
            after = await until_settled(admin, name, 2)
            assert after.coordinator.node_id == target
            assert after.group_epoch == (before.group_epoch or 0) + 1
            assert after.is_assigned_by_member and after.failed_computations == 0
            assert {member.target_metadata.data for member in after.members} == {f"epoch {after.group_epoch}".encode()}
            await group.until_owned(6, 6)
            assert all(event != "lost" for member in group.members for event, _ in member.events.events)

    async def test_metadata_survives_compaction_and_a_kill(self, start_broker: StartBroker, name: str) -> None:
        """The group is the same after the start as before, and no member computes again."""
        broker = start_broker(
            kcoord_client_assignors_enable="true",
            offsets_topic_num_partitions="1",
            offsets_topic_segment_bytes="2000",
            log_cleaner_backoff_ms="50",
            group_consumer_session_timeout_ms="10000",
        )
        async with AdminClient(bootstrap_servers=broker.address) as admin, group_of(broker, admin, name) as group:
            assignors = [Noting(1), Noting(2)]
            for assignor in assignors:
                await group.join(assignor)
            await group.until_owned(4, 8)
            checkpoint = broker.data / "cleaner-offset-checkpoint"
            for weight in (1, 2):
                assignors[0].weight = 2 * weight
                group.members[0].consumer.update_assignor_metadata()
                await group.until_owned(*((6, 6), (8, 4))[weight - 1])
            before = await until_settled(admin, name, 2)
            offset = TopicPartition(name, 0)

            async def is_cleaned() -> bool:
                """Other groups fill the log, so that its cleaner reaches the records of this one."""
                await admin.alter_consumer_group_offsets("other", {offset: 1})
                return checkpoint.exists() and "__consumer_offsets 0" in checkpoint.read_text()

            await eventually(is_cleaned, "a cleaned log")
            computed = [len(assignor.specs) for assignor in assignors]
            broker.restart(signal.SIGKILL)
            after = await until_settled(admin, name, 2)
            assert after == before
            await asyncio.sleep(1)  # Some heartbeats pass.
            assert await until_settled(admin, name, 2) == before
            assert [len(assignor.specs) for assignor in assignors] == computed


class TestFailures:
    async def test_a_member_is_killed_while_it_computes(
        self, broker: KcoordProcess, admin: AdminClient, name: str, tmp_path: Path
    ) -> None:
        async with group_of(broker, admin, name) as group:
            with hanging_member(broker, name, tmp_path) as hanging:
                await eventually((tmp_path / "computing").exists, "the member computes")
                description = await described(admin, name)
                assert description.computing_member_id == description.members[0].member_id
                assert description.computing_until_ms is not None
                await group.join(Noting())
                await group.join(Noting())
                hanging.kill()
                await group.until_owned(6, 6)
            description = await until_settled(admin, name, 2)
            assert description.failed_computations == 0

    async def test_a_member_whose_assignor_raises(self, broker: KcoordProcess, admin: AdminClient, name: str) -> None:
        bad, good = Noting(), Noting()
        bad.failure = ZeroDivisionError("no weight")
        async with group_of(broker, admin, name) as group:
            async with consumer_of(broker.address, name, group_local_assignors=[bad]) as consumer:
                consumer.subscribe([name])
                errors = [await next_error(consumer)]
                description = await described(admin, name)
                assert description.failed_computations == 1
                assert description.assignor_error
                assert consumer.assignment == frozenset()
                await group.join(good)
                async with asyncio.timeout(20):
                    while len(consumer.assignment) != 6:
                        try:
                            await consumer.poll(50)
                        except AssignorException as error:
                            errors.append(error)
                await group.until_owned(6)
                assert [error.__cause__ for error in errors] == [bad.failure] * len(bad.specs)
                assert len(good.specs) >= 1
                await consumer.unsubscribe()
            await group.until_owned(PARTITIONS)

    async def test_an_invalid_assignment(self, broker: KcoordProcess, admin: AdminClient, name: str) -> None:
        """The assignor gives partition 1 to nobody."""
        await create_topic(admin, name, 2)
        bad = Noting()
        bad.is_invalid = True
        async with consumer_of(broker.address, name, group_local_assignors=[bad]) as consumer:
            consumer.subscribe([name])
            error = await next_error(consumer)
            assert isinstance(error, KafkaError) and error.error is Errors.INVALID_ASSIGNMENT
            description = await described(admin, name)
            assert description.failed_computations == 1
            bad.is_invalid = False
            async with asyncio.timeout(20):
                while len(consumer.assignment) != 2:
                    await consumer.poll(100)
            assert len(bad.specs) == 2

    async def test_a_broker_that_does_not_serve_client_side_assignors(self, start_broker: StartBroker) -> None:
        broker = start_broker()
        async with consumer_of(broker.address, "g", group_local_assignors=[Noting()]) as consumer:
            with pytest.raises(UnsupportedVersionException, match=r"kcoord\.client\.assignors\.enable"):
                consumer.subscribe(["t"])


class TestChanges:
    async def test_versions_that_do_not_overlap(self, broker: KcoordProcess, admin: AdminClient, name: str) -> None:
        async with group_of(broker, admin, name) as group:
            await group.join(Noting(versions=(0, 1)))
            await group.until_owned(PARTITIONS)
            async with consumer_of(broker.address, name, group_local_assignors=[Noting(versions=(2, 3))]) as consumer:
                consumer.subscribe([name])
                error = await next_error(consumer)
                assert isinstance(error, KafkaError) and error.error is Errors.UNSUPPORTED_ASSIGNOR
            assert len(group.members[0].owned) == PARTITIONS

    async def test_only_members_that_read_all_versions_compute(
        self, broker: KcoordProcess, admin: AdminClient, name: str
    ) -> None:
        """A rolling change of the metadata's version, as in the guide."""
        async with group_of(broker, admin, name) as group:
            old = [Noting(), Noting()]
            both = [Noting(versions=(0, 1)), Noting(versions=(0, 1))]
            for assignor in old:
                await group.join(assignor)
            await group.until_owned(6, 6)
            for assignor in both:
                await group.leave(group.members[0])
                await group.until_owned(PARTITIONS)
                computed = sum(len(noting.specs) for noting in old)
                await group.join(assignor)
                await group.until_owned(6, 6)
                assert sum(len(noting.specs) for noting in old) == computed, "an old member read new metadata"
            seen = [
                member.metadata.version for noting in both for spec in noting.specs for member in spec.members.values()
            ]
            assert {0, 1} == set(seen)
            newest = Noting(versions=(1, 1))
            await group.leave(group.members[0])
            await group.join(newest)
            await group.until_owned(6, 6)
            assert newest.learned[-1][2] is not None and newest.learned[-1][2].version == 1

    async def test_from_one_assignor_to_another(self, broker: KcoordProcess, admin: AdminClient, name: str) -> None:
        """A rolling change in two rounds, as in the guide."""
        async with group_of(broker, admin, name) as group:
            for names in (["old"], ["new", "old"], ["new"]):
                joined = []
                for _ in range(2):
                    if len(group.members) == 2:
                        await group.leave(group.members[0])
                    assignors = [Noting(name=assignor) for assignor in names]
                    await group.join(*assignors)
                    joined.append(assignors)
                await group.until_owned(6, 6)
                description = await until_settled(admin, name, 2)
                assert description.is_assigned_by_member
                assert description.assignor == names[0]
                epoch = description.group_epoch or 0
                for computing, *unused in joined:
                    await eventually(lambda noting=computing, epoch=epoch: noting.learned[-1][0] == epoch, "the epoch")  # type: ignore[misc]
                    assert computing.learned[-1][2] is not None
                    assert all(learned < epoch for noting in unused for learned, _, _ in noting.learned)

    async def test_a_member_without_assignors_leaves_the_assignment_to_the_broker(
        self, broker: KcoordProcess, admin: AdminClient, name: str
    ) -> None:
        async with group_of(broker, admin, name) as group:
            assignor = Noting(3)
            await group.join(assignor)
            await group.until_owned(PARTITIONS)
            await group.join()
            await group.until_owned(6, 6)
            description = await until_settled(admin, name, 2)
            assert not description.is_assigned_by_member
            assert description.assignor == "uniform"
            assert assignor.learned[-1] == (description.group_epoch, 6, None)
            await group.leave(group.members[1])
            await group.until_owned(PARTITIONS)
            assert (await until_settled(admin, name, 1)).is_assigned_by_member


class TestLagAssignor:
    async def test_lag_is_balanced(self, broker: KcoordProcess, admin: AdminClient, name: str) -> None:
        """The group has stopped with a lag of 300 records in each of two partitions, and starts again."""
        first, second, third, fourth = await create_topic(admin, name, 4)
        (await admin.alter_consumer_group_offsets(name, {first: 0, second: 0, third: 300})).all()
        lags = {first: 300, second: 300, third: 0, fourth: 10}
        records = [*[first] * 300, *[second] * 300, *[third] * 300, *[fourth] * 10]
        await produce(broker.address, *((partition, "x", None) for partition in records))
        assignor = LagAssignor(partition_cost=1)
        assignor.configure(ConsumerConfig(bootstrap_servers=broker.address).settings())
        assert await assignor._measure(name, list(lags)) == lags
        group = Group(broker, name)
        try:
            for _ in range(2):
                # The members read, but commit nothing, so the lag stays.
                await group.join(LagAssignor(partition_cost=1), enable_auto_commit=False)

            def is_balanced() -> bool:
                """The other two partitions weigh so little that they may stay with a member that was alone at first."""
                owned = [member.owned for member in group.members]
                return frozenset().union(*owned) == lags.keys() and all(
                    len(partitions & {first, second}) == 1 for partitions in owned
                )

            await eventually(is_balanced, lambda: f"balanced lag; now {[member.owned for member in group.members]}")
        finally:
            for member in [*group.members]:
                await group.leave(member)


HANGING = """
import asyncio, pathlib, sys, time
from kcoord.client import AssignmentSpec, Consumer, GroupAssignment, PartitionAssignor

class Hanging(PartitionAssignor):
    name = "sticky-by-weight"

    def assign(self, spec: AssignmentSpec) -> GroupAssignment:
        pathlib.Path(sys.argv[3]).touch()
        time.sleep(600)
        raise AssertionError

async def main() -> None:
    address, name = sys.argv[1:3]
    async with Consumer(bootstrap_servers=address, group_id=name, group_local_assignors=[Hanging]) as consumer:
        consumer.subscribe([name])
        async for record in consumer:
            pass

asyncio.run(main())
"""


@contextmanager
def hanging_member(broker: KcoordProcess, name: str, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a member in a process of its own, whose assignor never returns."""
    with subprocess.Popen([sys.executable, "-c", HANGING, broker.address, name, folder / "computing"]) as process:
        try:
            yield process
        finally:
            process.kill()
