# SPDX-License-Identifier: Apache-2.0
"""The invariants of the broker's state, checked after every step of a run.

`BrokerChecks.after_step` checks a group only if its shard's log or the group's version has changed since the last
check. Every `_REBUILD_EVERY_STEPS` steps it also compares the state machines with what their logs replay to (I-17).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final, TypeAlias

from kcoord.coordinator.group.classic.group import ClassicGroup
from kcoord.coordinator.group.consumer.assignment import metadata_hash
from kcoord.coordinator.group.consumer.group import ConsumerGroup, ConsumerGroupMember, MemberState
from kcoord.coordinator.group.group import Group
from kcoord.coordinator.group.migration import unfinished
from kcoord.coordinator.group.shard import GroupCoordinatorShard
from kcoord.coordinator.transaction.shard import TransactionCoordinatorShard
from kcoord.metadata.image import MetadataImage
from kcoord.runtime.result import OperationContext
from kcoord.runtime.serde import TRANSACTION_RECORDS, CoordinatorSerde
from kcoord.runtime.shard_set import ShardSet
from kcoord.simulation.broker import SimulatedBroker
from kcoord.simulation.checkers import AcknowledgedCommits, TopicPartition
from kcoord.simulation.options import TOMBSTONES_KEPT_MS
from kcoord.simulation.process import TOPICS, SimulatedProcess
from kcoord.simulation.trace import ViolationError
from kcoord.storage.snapshot import SnapshotError, may_miss_deletions, read_snapshot
from kcoord_protocol.messages import OffsetCommitKey, OffsetFetchRequest

_REBUILD_EVERY_STEPS: Final = 300
_COMMITS_EVERY_STEPS: Final = 10

_Seen: TypeAlias = tuple[SimulatedProcess, int, int]


class BrokerChecks:
    """The checks of one run. `group_ids` are checked group by group, all other groups as parts of their shards."""

    def __init__(self, broker: SimulatedBroker, group_ids: list[str], commits: AcknowledgedCommits) -> None:
        self._broker = broker
        self._group_ids = group_ids
        self._commits = commits
        self._seen: dict[str, _Seen] = {}
        self._lives: dict[str, tuple[object, str, int, bool]] = {}
        self._epochs: dict[str, tuple[object, int, int]] = {}
        self._states: dict[str, str] = {}
        self._steps = 0
        self._actions = 0
        self._has_acted_once = True
        self._activity: tuple[SimulatedProcess, int, int] | None = None
        """The process and its counts of actions and turns at the last check."""

    def after_step(self) -> None:
        """Raises ViolationError if an invariant does not hold after a step."""
        self._steps += 1
        if self._broker.observer.violation is not None:
            raise self._broker.observer.violation
        process = self._broker.process
        if process is None:
            return
        runtime = process.broker.groups.shards
        for statistics in (runtime.statistics, process.broker.transactions.shards.statistics):
            if statistics.operations_failed or statistics.invariants_broken:
                raise ViolationError("I-0 no unexpected error", "an operation, timer or task raised an exception")
        self._has_acted_once = process.loop.actions <= self._actions + 1
        self._actions = process.loop.actions
        activity = process, process.loop.actions, process.loop.turns
        if activity != self._activity:
            self._activity = activity
            self._check_groups(process)
        if self._steps % _REBUILD_EVERY_STEPS == 0:
            self.rebuild()

    def _check_groups(self, process: SimulatedProcess) -> None:
        runtime = process.broker.groups.shards
        for group_id in self._group_ids:
            shard_id = self._broker.group_shard(group_id)
            machine = runtime.machine(shard_id)
            if machine is None:
                continue
            group = machine.group(group_id)
            version = getattr(group, "version", -1)
            seen = (process, runtime.offsets(shard_id)[1], version)
            if self._seen.get(group_id) != seen:
                self._seen[group_id] = seen
                self._check_group(machine, group, group_id)

    def group(self, group_id: str) -> Group | None:
        """Returns the group from its shard; None if there is no such group or the shard is not active."""
        process = self._broker.process
        machine = process.machine_of(group_id) if process is not None else None
        return machine.group(group_id) if machine is not None else None

    def _check_group(self, machine: GroupCoordinatorShard, group: Group | None, group_id: str) -> None:
        self._note_state(group_id, group)
        if self._steps % _COMMITS_EVERY_STEPS == 0:
            request = OffsetFetchRequest.OffsetFetchRequestGroup(group_id=group_id, topics=None)
            fetched = machine.fetch_offsets(OperationContext(0), request, False).response
            self._commits.check(self._commits.of_group(group_id), fetched)
        if group is None:
            self._lives.pop(group_id, None)
            return
        self._check_life(machine, group_id, group)
        self._check_downgrade(group)
        if isinstance(group, ConsumerGroup):
            check_consumer_group(group, self._broker.image, self._broker.config.group_consumer_max_size)
            self._check_epochs(machine, group)
        elif isinstance(group, ClassicGroup):
            check_classic_group(group, self._broker.config.group_max_size)

    def _note_state(self, group_id: str, group: Group | None) -> None:
        """Counts the transition if the group's type or state has changed since the last check."""
        state = f"{group.type.value} {group.state.value}" if group is not None else "none"
        before = self._states.get(group_id, "none")
        if before != state:
            self._states[group_id] = state
            self._broker.observer.transitions[f"group: {before} -> {state}"] += 1

    def _check_life(self, machine: GroupCoordinatorShard, group_id: str, group: Group) -> None:
        """I-20: a group that is converted with its members continues at its epoch or a later one."""
        epoch = group.group_epoch if isinstance(group, ConsumerGroup) else getattr(group, "generation", 0)
        before = self._lives.get(group_id)
        self._lives[group_id] = machine, group.type.value, epoch, group.is_empty()
        if before is None or before[0] is not machine or before[1] == group.type.value or before[3]:
            return
        if not self._has_acted_once:
            # With several actions since the last check, the group may have been deleted and created again.
            return
        self._broker.trace.add("converted", f"{group_id} {before[1]} {before[2]} to {group.type.value} {epoch}")
        if not group.is_empty() and epoch < before[2]:
            text = f"{group_id} was {before[1]} at {before[2]} and is {group.type.value} at {epoch}"
            raise ViolationError("I-20 a conversion keeps the epoch", text)

    def _check_downgrade(self, group: Group) -> None:
        """I-20: a downgrade is carried out. A timer for its next step is armed until it is complete, even after a load.

        A consumer group with classic members only becomes a classic group, which rebalances if it has to.
        """
        process = self._broker.process
        shard = (
            process.broker.groups.shards.active(self._broker.group_shard(group.group_id))
            if process is not None
            else None
        )
        if shard is None or not isinstance(group, ConsumerGroup | ClassicGroup):
            return
        timer = unfinished(self._broker.config, group, 0)
        if timer is not None and shard.timers.deadline_ms(timer.key) is None:
            text = f"{group.type.value} group {group.group_id} has no timer {timer.key.kind}"
            raise ViolationError("I-20 a downgrade is carried out", text)

    def _check_epochs(self, machine: GroupCoordinatorShard, group: ConsumerGroup) -> None:
        """I-5: the epochs of a group never decrease while it exists. I-6: an empty group has no outdated target."""
        if self._broker.config.is_kafka_4_4 and group.is_empty() and group.assignment_epoch != group.group_epoch:
            text = f"{group.group_id} is empty at group epoch {group.group_epoch}, assignment {group.assignment_epoch}"
            raise ViolationError("I-6 an empty group has nothing left", text)
        before = self._epochs.get(group.group_id)
        self._epochs[group.group_id] = group, group.group_epoch, group.assignment_epoch
        if before is None or before[0] is not group:
            return
        if group.group_epoch < before[1] or group.assignment_epoch < before[2]:
            text = (
                f"{group.group_id}: group and assignment epoch went from {before[1:]} to "
                f"{(group.group_epoch, group.assignment_epoch)}"
            )
            raise ViolationError("I-5 epochs grow", text)

    # The log.

    def rebuild(self) -> None:
        """I-17: the state in memory is what the log, compacted or not, and the snapshot replay to.

        Does nothing while the process has writes in flight.
        """
        process = self._broker.process
        if process is None or not process.is_quiet:
            return
        for shard_id in process.broker.groups.shards.active_shards():
            machine = process.broker.groups.shards.machine(shard_id)
            assert machine is not None
            live = machine.hard_state()
            self._check_counts(process, shard_id, machine)
            check_expiry(machine)
            for name, rebuilt in self._rebuilt(process, shard_id):
                if rebuilt.hard_state() != live:
                    raise ViolationError("I-17 live state is the log's state", _difference(name, live, rebuilt))
        for shard_id in process.broker.transactions.shards.active_shards():
            transactions = process.broker.transactions.shards.machine(shard_id)
            assert transactions is not None
            if self._rebuilt_transactions(process, shard_id) != transactions.hard_state():
                raise ViolationError("I-17 live state is the log's state", f"transactions {shard_id}")

    def _check_counts(self, process: SimulatedProcess, shard_id: int, machine: GroupCoordinatorShard) -> None:
        """I-29: without writes in flight, the offsets of shard and log are equal, and groups by type add up."""
        durable, following = process.broker.groups.shards.offsets(shard_id)
        log = process.folder.internal_log(TOPICS["groups"], shard_id)
        end_offset = log.end_offset if log is not None else 0
        if not durable == following == end_offset:
            text = f"shard {shard_id}: {durable} durable, {following} next, the log ends at {end_offset}"
            raise ViolationError("I-29 counts add up", text)
        context = OperationContext(0)
        groups = machine.list_groups(context, [], []).response
        by_type = [machine.list_groups(context, [], [kind]).response for kind in ("classic", "consumer")]
        if len(groups) != sum(map(len, by_type)):
            raise ViolationError("I-29 counts add up", f"{len(groups)} groups, by type {list(map(len, by_type))}")

    def _rebuilt(self, process: SimulatedProcess, shard_id: int) -> list[tuple[str, GroupCoordinatorShard]]:
        """Returns fresh state machines with their names: one from the whole log, one from the snapshot if it is usable.

        They are the real state machine even if a fault has planted another one.
        """
        log = process.folder.internal_log(TOPICS["groups"], shard_id)
        if log is None:
            return []
        config = self._broker.config
        runtime: ShardSet[GroupCoordinatorShard] = ShardSet(
            lambda _: GroupCoordinatorShard(config, MetadataImage.empty()), CoordinatorSerde()
        )
        runtime.load(0, log.batches(log.start_offset), 0, log.end_offset)
        machines = [("the log", runtime.machine(0))]
        try:
            snapshot = read_snapshot(self._broker.disk, log.directory)
        except (OSError, SnapshotError):
            snapshot = None
        fits = snapshot is not None and log.start_offset <= snapshot.offset <= snapshot.end_offset <= log.end_offset
        if snapshot and fits and not may_miss_deletions(snapshot, log, process.broker.now_ms(), TOMBSTONES_KEPT_MS):
            runtime.load(1, log.batches(snapshot.offset), 0, log.end_offset, snapshot.chunks)
            machines.append(("the snapshot", runtime.machine(1)))
        return [(f"shard {shard_id}, {name}", machine) for name, machine in machines if machine is not None]

    def _rebuilt_transactions(self, process: SimulatedProcess, shard_id: int) -> Mapping[str, object]:
        log = process.folder.internal_log(TOPICS["transactions"], shard_id)
        runtime: ShardSet[TransactionCoordinatorShard] = ShardSet(
            lambda _: TransactionCoordinatorShard(self._broker.config, MetadataImage.empty(), 0),
            CoordinatorSerde(TRANSACTION_RECORDS),
        )
        if log is None:
            runtime.load(0, (), 0)
        else:
            runtime.load(0, log.batches(log.start_offset), 0, log.end_offset)
        machine = runtime.machine(0)
        assert machine is not None
        return machine.hard_state()


def check_expiry(machine: GroupCoordinatorShard) -> None:
    """I-14 at its limit: an offset with an expire timestamp expires at that millisecond and not before.

    Asks the shard to expire its offsets and applies nothing. Checks the first such offset of a simple group.
    """
    offsets = machine.hard_state()["offsets"]
    assert isinstance(offsets, dict)
    for key, offset in offsets.items():
        group = machine.group(key[0])
        expires_ms = offset.expire_timestamp_ms
        if expires_ms < 0 or not isinstance(group, ClassicGroup) or not group.is_simple():
            continue
        for now_ms in (expires_ms - 1, expires_ms):
            expired = machine.expire_offsets(OperationContext(now_ms)).records
            is_gone = any(
                (record.key.group, record.key.topic, record.key.partition) == key
                for record in expired
                if isinstance(record.key, OffsetCommitKey)
            )
            if is_gone != (now_ms == expires_ms):
                text = f"{key} expires at {expires_ms}; at {now_ms} it {'has' if is_gone else 'has not'} expired"
                raise ViolationError("I-14 offsets do not expire early", text)
        return


def _difference(name: str, live: Mapping[str, object], rebuilt: GroupCoordinatorShard) -> str:
    """Returns the differences between the state in memory and a rebuilt state machine as text."""
    rebuilt_state = rebuilt.hard_state()
    lines = [name]
    for part in live:
        old, new = live[part], rebuilt_state[part]
        if old == new:
            continue
        if isinstance(old, dict) and isinstance(new, dict):
            keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
            lines += [f"  {part} {key}:\n    in memory {old.get(key)}\n    rebuilt   {new.get(key)}" for key in keys]
        else:
            lines.append(f"  {part}: in memory {old}, rebuilt {new}")
    return "\n".join(lines)


# Groups of the consumer protocol.


def partitions_of(assignment: Mapping[bytes, Collection[int]]) -> set[TopicPartition]:
    return {(topic_id, partition) for topic_id, partitions in assignment.items() for partition in partitions}


def check_consumer_group(group: ConsumerGroup, image: MetadataImage, most_members: int) -> None:
    """Checks I-1 in the view of the coordinator, I-2, I-3, I-5 to I-8, I-24 and I-26."""
    if group.assignment_epoch > group.group_epoch:
        raise ViolationError("I-5 epochs are ordered", _text(group))
    if len(group.members) > most_members:
        raise ViolationError("I-26 limits hold", f"{len(group.members)} members, {most_members} are allowed")
    if not group.members and (group.target_assignment or group.resolved_regexes or group.static_members):
        raise ViolationError("I-6 an empty group has nothing left", _text(group))
    owners: dict[TopicPartition, str] = {}
    for member in group.members.values():
        _check_member(group, member)
        for partition in partitions_of(member.assigned) | partitions_of(member.pending_revocation):
            if owners.setdefault(partition, member.member_id) != member.member_id:
                raise ViolationError("I-1 one owner", f"{partition} has two owners in {_text(group)}")
    _check_target(group, image)
    _check_computation(group)


def _check_member(group: ConsumerGroup, member: ConsumerGroupMember) -> None:
    assigned, pending = partitions_of(member.assigned), partitions_of(member.pending_revocation)
    if assigned & pending:
        raise ViolationError("I-3 assigned and pending are disjoint", f"{member} of {_text(group)}")
    if member.member_epoch > group.assignment_epoch:
        raise ViolationError("I-5 epochs are ordered", f"{member} of {_text(group)}")
    if bool(pending) != (member.state is MemberState.UNREVOKED_PARTITIONS):
        raise ViolationError("I-7 stable means settled", f"{member} of {_text(group)}")
    target = partitions_of(group.target_assignment_of(member.member_id))
    is_there = member.member_epoch == group.assignment_epoch and member.state is not MemberState.UNREVOKED_PARTITIONS
    if is_there and not assigned <= target:
        raise ViolationError("I-8 a settled member owns only its target", f"{member} of {_text(group)}")
    if group.state.value == "Stable" and (not is_there or group.group_epoch != group.assignment_epoch):
        raise ViolationError("I-7 stable means settled", f"{member} of {_text(group)}")


def _check_target(group: ConsumerGroup, image: MetadataImage) -> None:
    """I-2: the target has every subscribed partition once.

    Completeness is checked only if the target is of the current group epoch and of the current topics.
    """
    target: dict[TopicPartition, str] = {}
    for member_id, assignment in group.target_assignment.items():
        if member_id not in group.members:
            raise ViolationError("I-2 the target is for members", f"{member_id} in {_text(group)}")
        for partition in partitions_of(assignment):
            if target.setdefault(partition, member_id) != member_id:
                raise ViolationError("I-2 a partition has one target member", f"{partition} in {_text(group)}")
    names = group.subscribed_topic_names()
    # The first target of a converted group is the assignment of its classic leader, which may be anything.
    is_computed = group.assignment_timestamp_ms > 0
    # A client-side assignor may install an error instead of an assignment. Then members keep what they had.
    is_computed = is_computed and not has_error_target(group)
    is_current = group.members and is_computed and group.group_epoch == group.assignment_epoch
    if not is_current or group.metadata_hash != metadata_hash(image, names):
        return
    topics = [image.topics[name] for name in names if name in image.topics]
    subscribed = {(topic.id, partition.partition_id) for topic in topics for partition in topic.partitions}
    if target.keys() != subscribed:
        text = f"target and subscribed partitions differ in {len(target.keys() ^ subscribed)}: {_text(group)}"
        raise ViolationError("I-2 every subscribed partition is in the target", text)


def has_error_target(group: ConsumerGroup) -> bool:
    """True if the target is the error above 0 of a client-side assignor."""
    return any(metadata.error > 0 for metadata in group.target_metadata.values())


def _check_computation(group: ConsumerGroup) -> None:
    """I-24: the member that is asked to compute is there, and members see the metadata of the target they reached."""
    asked = group.client_computation.asked if group.client_computation is not None else None
    if asked is not None:
        member = group.members.get(asked.member_id)
        if member is None or member.classic is not None or member.member_epoch < 0 or not member.client_assignors:
            raise ViolationError("I-24 a member that can compute is asked", f"{asked.member_id} in {_text(group)}")
    for member in group.members.values():
        is_there = member.member_epoch == group.assignment_epoch
        if not is_there or member.state is MemberState.UNREVOKED_PARTITIONS or member.classic is not None:
            continue
        expected = group.target_metadata_of(member.member_id)
        if member.metadata != expected:
            text = f"{member.member_id} has {member.metadata}, its target {expected} in {_text(group)}"
            raise ViolationError("I-24 a member has the metadata of its target", text)


def _text(group: ConsumerGroup) -> str:
    members = "\n".join(
        f"    {member}\n      target {group.target_assignment_of(member.member_id)}"
        for member in group.members.values()
    )
    return f"{group.group_id} {group.state.value} {group.group_epoch}/{group.assignment_epoch}\n{members}"


# Groups of the classic protocol.


def check_classic_group(group: ClassicGroup, most_members: int) -> None:
    """Checks I-26, I-29 (the counters that end the phases of a rebalance) and I-7 (the leader)."""
    parked = sum(member.is_awaiting_join for member in group.members.values())
    if parked != group.awaiting_join:
        text = f"{group.group_id}: {parked} members await JoinGroup, the counter is {group.awaiting_join}"
        raise ViolationError("I-29 counts add up", text)
    if not group.pending_sync <= group.members.keys() or not set(group.static_members.values()) <= group.members.keys():
        raise ViolationError("I-29 counts add up", f"{group.group_id}: {group.pending_sync} {group.static_members}")
    # As in Kafka, static members stay in a generation that they have not joined, even above the limit.
    dynamic = sum(not member.is_static for member in group.members.values())
    if group.state.value in ("Stable", "CompletingRebalance") and dynamic > most_members:
        raise ViolationError("I-26 limits hold", f"{dynamic} members, {most_members} are allowed")
    # A downgraded group has no leader until it rebalances (`BrokerChecks._check_downgrade`).
    leaders = {None, *group.members} if group.state.value == "Stable" else group.members.keys()
    if group.members and group.state.value in ("Stable", "CompletingRebalance") and group.leader not in leaders:
        raise ViolationError("I-7 a generation has a leader", f"{group.group_id} has leader {group.leader}")
