# SPDX-License-Identifier: Apache-2.0
"""The invariants, by the names of the reliability list. Each is told what it needs, or looks at the broker after a
step.

Ownership is what clients believe, as their own rules allow: who has to assume that the coordinator has given it up owns
nothing. Epochs and offsets are what responses promised.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, TypeAlias

from kcoord.coordinator.group.shard import GroupCoordinatorShard
from kcoord.coordinator.result import OperationContext
from kcoord.coordinator.runtime.runtime import CoordinatorRuntime
from kcoord.coordinator.runtime.serde import CoordinatorSerde
from kcoord.coordinator.service import partition_for
from kcoord.metadata.image import MetadataImage
from kcoord.simulation.broker import Process, SimulatedBroker
from kcoord.simulation.trace import ViolationError
from protocol.messages import ConsumerGroupDescribeResponse, OffsetFetchRequest, OffsetFetchResponse

TopicPartition: TypeAlias = tuple[bytes, int]
_REBUILD_EVERY_STEPS: Final = 200


class Ownership:
    """I-1: no partition is owned by two members of a group."""

    def __init__(self) -> None:
        self._owners: dict[tuple[str, TopicPartition], str] = {}

    def grant(self, group_id: str, owner: str, partitions: Iterable[TopicPartition]) -> None:
        for partition in sorted(partitions):
            other = self._owners.setdefault((group_id, partition), owner)
            if other != owner:
                text = f"group {group_id}: {owner} was given {partition[0].hex()}-{partition[1]}, which {other} owns"
                raise ViolationError("I-1 one owner", text)

    def release(self, group_id: str, owner: str, partitions: Iterable[TopicPartition]) -> None:
        for partition in partitions:
            if self._owners.get((group_id, partition)) == owner:
                del self._owners[group_id, partition]

    def owned(self, group_id: str) -> dict[TopicPartition, str]:
        return {partition: owner for (group, partition), owner in self._owners.items() if group == group_id}


class ToldEpochs:
    """I-5: the epochs that a group's member is told never go back, across crashes and rejoins."""

    def __init__(self) -> None:
        self._epochs: dict[tuple[str, str], int] = {}

    def told(self, group_id: str, member_id: str, epoch: int) -> None:
        before = self._epochs.get((group_id, member_id), 0)
        if epoch < before:
            text = f"member {member_id} of group {group_id} was told {before}, then {epoch}"
            raise ViolationError("I-5 epochs grow", text)
        self._epochs[group_id, member_id] = epoch


class AcknowledgedCommits:
    """I-11, I-12: what was acknowledged is answered, or something later. Committed offsets grow with every attempt."""

    def __init__(self) -> None:
        self._acknowledged: dict[tuple[str, str, int], int] = {}
        self._attempts = 0

    def next_offset(self) -> int:
        self._attempts += 1
        return self._attempts

    def acknowledge(self, group_id: str, topic: str, partition: int, offset: int) -> None:
        key = (group_id, topic, partition)
        self._acknowledged[key] = max(self._acknowledged.get(key, 0), offset)

    def of_group(self, group_id: str) -> dict[tuple[str, int], int]:
        return {
            (topic, partition): offset
            for (group, topic, partition), offset in self._acknowledged.items()
            if group == group_id
        }

    def check(
        self,
        group_id: str,
        expected: dict[tuple[str, int], int],
        response: OffsetFetchResponse.OffsetFetchResponseGroup,
    ) -> None:
        """`expected` are the commits that were acknowledged before the fetch was sent."""
        fetched = {
            (topic.name, partition.partition_index): partition.committed_offset
            for topic in response.topics
            for partition in topic.partitions
        }
        for (topic_name, number), offset in sorted(expected.items()):
            found = fetched.get((topic_name, number), -1)
            if found < offset:
                text = f"group {group_id} {topic_name}-{number}: {offset} was acknowledged, {found} is answered"
                raise ViolationError("I-11 no acknowledged commit is lost", text)


class BrokerChecks:
    """Looks into the broker after every step, as far as a shard has changed since the last look."""

    def __init__(
        self, broker: SimulatedBroker, group_ids: list[str], shards: int, commits: AcknowledgedCommits
    ) -> None:
        self._broker = broker
        self._group_ids = group_ids
        self._shards = shards
        self._commits = commits
        self._seen: dict[str, tuple[Process, int]] = {}
        self._steps = 0

    def after_step(self, now_ms: int) -> None:
        self._steps += 1
        process = self._broker.process
        if process is None:
            return
        if process.runtime.statistics.operations_failed:
            raise ViolationError("I-0 no unexpected error", "an operation, timer or task raised an exception")
        for group_id in self._group_ids:
            shard_id = partition_for(group_id, self._shards)
            machine = process.runtime.machine(shard_id)
            if machine is None:
                continue
            seen = (process, process.runtime.offsets(shard_id)[1])
            if self._seen.get(group_id) != seen:
                self._seen[group_id] = seen
                self._check_group(machine, OperationContext(now_ms), group_id)
        if self._steps % _REBUILD_EVERY_STEPS == 0:
            self.rebuild()

    def describe(self, group_id: str, now_ms: int) -> ConsumerGroupDescribeResponse.DescribedGroup | None:
        process = self._broker.process
        machine = process.runtime.machine(partition_for(group_id, self._shards)) if process is not None else None
        if machine is None:
            return None
        return machine.consumer_group_describe(OperationContext(now_ms), [group_id]).response[0]

    def rebuild(self) -> None:
        """I-17: the state in memory is the state of the log; looked at only where nothing is being written."""
        process = self._broker.process
        if process is None or not process.is_quiet():
            return
        for shard_id in process.runtime.active_shards():
            machine = process.runtime.machine(shard_id)
            assert machine is not None
            rebuilt = _rebuilt(process, shard_id, self._broker).hard_state()
            live = machine.hard_state()
            if rebuilt != live:
                raise ViolationError("I-17 live state is the log's state", _difference(shard_id, live, rebuilt))

    def _check_group(self, machine: GroupCoordinatorShard, context: OperationContext, group_id: str) -> None:
        request = OffsetFetchRequest.OffsetFetchRequestGroup(group_id=group_id, topics=None)
        fetched = machine.fetch_offsets(context, request, False).response
        self._commits.check(group_id, self._commits.of_group(group_id), fetched)
        group = machine.consumer_group_describe(context, [group_id]).response[0]
        if not group.error_code:
            check_described_group(group)


def check_described_group(group: ConsumerGroupDescribeResponse.DescribedGroup) -> None:
    """I-5 and I-7, and I-1 from the coordinator's side."""
    if not group.assignment_epoch <= group.group_epoch:
        raise ViolationError("I-5 epochs are ordered", f"{group.group_id}: {group}")
    owners: dict[TopicPartition, str] = {}
    targets: dict[TopicPartition, str] = {}
    for member in group.members:
        if member.member_epoch > group.assignment_epoch:
            raise ViolationError("I-5 epochs are ordered", f"{group.group_id}: {group}")
        for assignment, taken in ((member.assignment, owners), (member.target_assignment, targets)):
            for partition in described_partitions(assignment):
                if taken.setdefault(partition, member.member_id) != member.member_id:
                    raise ViolationError("I-1 one owner", f"{group.group_id}: {partition} twice in {group}")
        is_done = member.member_epoch == group.group_epoch and described_partitions(
            member.assignment
        ) == described_partitions(member.target_assignment)
        if group.group_state == "Stable" and not is_done:
            raise ViolationError("I-7 stable means settled", f"{group.group_id}: {group}")


def described_partitions(assignment: ConsumerGroupDescribeResponse.Assignment) -> set[TopicPartition]:
    return {(topic.topic_id, partition) for topic in assignment.topic_partitions for partition in topic.partitions}


def _rebuilt(process: Process, shard_id: int, broker: SimulatedBroker) -> GroupCoordinatorShard:
    """A fresh state machine from what the log holds, without any planted fault."""
    runtime: CoordinatorRuntime[GroupCoordinatorShard] = CoordinatorRuntime(
        lambda _: GroupCoordinatorShard(broker.config, MetadataImage.empty()), CoordinatorSerde()
    )
    log = process.logs[shard_id]
    runtime.load(shard_id, log.batches(log.start_offset), 0, log.end_offset)
    machine = runtime.machine(shard_id)
    assert machine is not None
    return machine


def _difference(shard_id: int, live: object, rebuilt: object) -> str:
    return f"shard {shard_id}\n  in memory: {live}\n  of the log: {rebuilt}"
