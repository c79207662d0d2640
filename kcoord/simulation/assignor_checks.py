# SPDX-License-Identifier: Apache-2.0
"""I-24: checks every target assignment that a member computes with a client-side assignor.

Theory of operation
-------------------
`watching` wraps the four steps of the coordinator's `client_computation` for the time of a run:

1. `decide`: if the coordinator asks a member, that member must be able to compute, and nobody else may be asked now.
2. `prepare`: only the asked member gets a snapshot. `_Snapshot` is made from the group at that moment, in plain terms,
   and the response has to agree with it.
3. `begin_install`: an assignment of any other member or epoch is rejected. Otherwise it belongs to that snapshot.
4. `end_install`: `judge` decides whether the assignment is valid for the snapshot. If it is not, nothing is written.
   If it is, exactly the targets that it names are written, for the members that are still there.

Nothing here calls the coordinator's own selection or validation. `_Asked` is what a member was asked. It may be over
before the coordinator notices, so `may_be_over` permits another question, and only `is_over` forbids an installation.
Soft state ends with its process, and so does `_Asked` when a shard is loaded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeAlias

from kcoord.coordinator.group.consumer import client_computation
from kcoord.coordinator.group.consumer.client_computation import ComputedBy, InstallAssignment, PrepareAssignment
from kcoord.coordinator.group.consumer.group import ConsumerGroup, ConsumerGroupMember, TargetMetadata
from kcoord.coordinator.group.counters import GroupCounters
from kcoord.metadata.image import MetadataImage
from kcoord.runtime.result import PENDING, CoordinatorResult, OperationContext
from kcoord.simulation.checkers import TopicPartition
from kcoord.simulation.observer import Observer
from kcoord.simulation.options import MOST_ASSIGNOR_BYTES
from kcoord.simulation.trace import ViolationError
from kcoord_protocol.errors import Errors
from kcoord_protocol.messages import (
    ConsumerGroupInstallAssignmentRequest,
    ConsumerGroupInstallAssignmentResponse,
    ConsumerGroupPrepareAssignmentRequest,
    ConsumerGroupTargetAssignmentMemberKey,
    ConsumerGroupTargetAssignmentMemberValue,
    ConsumerGroupTargetAssignmentMetadataValue,
)

_PATIENCE_MS: Final = 1_000
"""How long the coordinator may continue to ask a member after the end of its time: its timer may be late."""

Target: TypeAlias = tuple[frozenset[TopicPartition], TargetMetadata]
"""The partitions of a member's target, and their metadata."""
Versions: TypeAlias = tuple[int, int, int]
"""Lowest and highest version that a member reads, and the version of its metadata."""

_CLASSIC: Final[Versions] = (-1, -1, -1)


def _versions(member: ConsumerGroupMember, name: str) -> Versions | None:
    """Returns the versions of the member's assignor of that name; None if it has none."""
    if member.classic is not None:
        return _CLASSIC if name in dict(member.classic.protocols) else None
    for offer in member.client_assignors:
        if offer.name == name:
            return offer.minimum_version, offer.maximum_version, offer.metadata_version
    return None


def _names(member: ConsumerGroupMember) -> list[str]:
    """Returns the names of the member's assignors, the best first."""
    if member.classic is not None:
        return [name for name, _ in member.classic.protocols]
    return [offer.name for offer in member.client_assignors]


def able_members(members: Sequence[ConsumerGroupMember], name: str) -> set[str]:
    """Returns the members that can compute with this assignor; none if the group cannot use it."""
    versions = {member.member_id: _versions(member, name) for member in members}
    present = {member_id: offered for member_id, offered in versions.items() if offered is not None}
    readers = [
        present[member.member_id] for member in members if member.classic is None and member.member_id in present
    ]
    if len(present) < len(members) or not readers:
        return set()
    if max(lowest for lowest, _, _ in readers) > min(highest for _, highest, _ in readers):
        return set()
    sent = [version for _, _, version in present.values()]
    return {
        member.member_id
        for member in members
        if member.classic is None
        and member.member_epoch != -2
        and all(present[member.member_id][0] <= version <= present[member.member_id][1] for version in sent)
    }


def chosen_assignor(members: Sequence[ConsumerGroupMember]) -> str | None:
    """Returns the client-side assignor with the most votes; None if the broker computes."""
    usable = {name for member in members for name in _names(member) if able_members(members, name)}
    favourites = [next(name for name in _names(member) if name in usable) for member in members] if usable else []
    votes = Counter(favourites)
    return min(usable, key=lambda name: (-votes[name], name)) if usable else None


@dataclass(slots=True)
class _Snapshot:
    """A group when it was given to a member, and what a valid assignment has to fit to."""

    epoch: int
    assignor: str | None
    versions: dict[str, Versions | None]
    topics_of: dict[str, set[bytes]]
    counts: dict[bytes, int]
    targets: dict[str, frozenset[TopicPartition]]
    instance_ids: dict[str, str | None]

    @classmethod
    def of(cls, group: ConsumerGroup, image: MetadataImage) -> _Snapshot:
        members = list(group.members.values())
        assignor = chosen_assignor(members)
        topics_of = {member.member_id: _topics_of(group, member, image) for member in members}
        return cls(
            group.group_epoch,
            assignor,
            {member.member_id: _versions(member, assignor or "") for member in members},
            topics_of,
            {topic_id: len(image.topics_by_id[topic_id].partitions) for ids in topics_of.values() for topic_id in ids},
            {member.member_id: _target_of(group, member.member_id)[0] for member in members},
            {member.member_id: member.instance_id for member in members},
        )


def _topics_of(group: ConsumerGroup, member: ConsumerGroupMember, image: MetadataImage) -> set[bytes]:
    names = set(member.subscribed_topic_names)
    regex = group.resolved_regexes.get(member.subscribed_topic_regex or "")
    if regex is not None:
        names |= regex.topics
    return {image.topics[name].id for name in names if name in image.topics}


def _target_of(group: ConsumerGroup, member_id: str) -> Target:
    target = group.target_assignment.get(member_id, {})
    partitions = frozenset((topic_id, partition) for topic_id in target for partition in target[topic_id])
    return partitions, group.target_metadata.get(member_id, TargetMetadata())


def judge(snapshot: _Snapshot, request: ConsumerGroupInstallAssignmentRequest) -> dict[str, Target] | str:
    """Returns the targets that the request demands for the members of the snapshot, or why it is invalid."""
    if request.error > 0 and not request.members:
        return {
            member_id: (
                frozenset(p for p in snapshot.targets[member_id] if p[0] in topic_ids),
                TargetMetadata(request.error),
            )
            for member_id, topic_ids in snapshot.topics_of.items()
        }
    demanded: dict[str, Target] = dict.fromkeys(snapshot.topics_of, (frozenset(), TargetMetadata(request.error)))
    given: Counter[TopicPartition] = Counter()
    for member in request.members:
        name = member.member_id
        claims = [(topic.topic_id, partition) for topic in member.partitions for partition in topic.partitions]
        versions = snapshot.versions.get(name)
        if versions is None:
            return f"{name} is not in the snapshot"
        if any(topic.topic_id not in snapshot.topics_of[name] for topic in member.partitions):
            return f"{name} does not subscribe"
        if not versions[0] <= member.metadata_version <= versions[1]:
            return f"{name} cannot read version {member.metadata_version}"
        if len(member.metadata_bytes) > MOST_ASSIGNOR_BYTES:
            return f"too many bytes for {name}"
        metadata = TargetMetadata(request.error, member.metadata_version, member.metadata_bytes)
        demanded[name] = frozenset(claims), metadata
        given.update(claims)
    if len({member.member_id for member in request.members}) < len(request.members):
        return "a member is named twice"
    every = Counter({(topic_id, number): 1 for topic_id, count in snapshot.counts.items() for number in range(count)})
    return demanded if given == every else f"{given - every} too much, {every - given} missing"


@dataclass(slots=True)
class _Asked:
    """A member that was asked to compute. `token` is the coordinator's own object for the same question."""

    member_id: str
    token: object
    group_epoch: int
    deadline_ms: int
    snapshot: _Snapshot | None = None
    may_be_over: bool = False
    is_over: bool = False
    late_since_ms: int = -1


@dataclass(slots=True)
class AssignorChecks:
    """The checks of one run. A violation goes to the observer, because the server would survive the exception."""

    observer: Observer
    _asked: dict[str, _Asked] = field(default_factory=dict)
    _pending: dict[int, tuple[InstallAssignment, _Asked, _Snapshot, ConsumerGroupInstallAssignmentRequest]] = field(
        default_factory=dict
    )

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Wraps the steps of the coordinator, and restores them afterwards."""
        self.observer.on_member_gone = self._member_gone
        self.observer.on_shard_loaded = self._shard_loaded
        names: Mapping[str, Callable[..., object]] = {
            "decide": self._decide,
            "prepare": self._prepare,
            "begin_install": self._begin_install,
            "end_install": self._end_install,
        }
        before = {name: getattr(client_computation, name) for name in names}
        for name, wrap in names.items():
            setattr(client_computation, name, wrap(before[name]))
        try:
            yield
        finally:
            for name, step in before.items():
                setattr(client_computation, name, step)

    def _member_gone(self, group_id: str, member_id: str) -> None:
        asked = self._asked.get(group_id)
        if asked is not None and asked.member_id == member_id:
            asked.is_over = asked.may_be_over = True

    def _shard_loaded(self, shard_id: int) -> None:
        for group_id in [group_id for group_id in self._asked if self.observer.shard_of(group_id) == shard_id]:
            del self._asked[group_id]

    def _asked_now(self, group: ConsumerGroup, member_id: str) -> _Asked | None:
        asked = self._asked.get(group.group_id)
        return asked if asked is not None and asked.member_id == member_id and not asked.is_over else None

    # 1. Asking.

    def _decide(self, decide: Callable[..., ComputedBy]) -> Callable[..., ComputedBy]:
        def wrapped(
            group: ConsumerGroup,
            updated: ConsumerGroupMember,
            group_epoch: int,
            now_ms: int,
            counters: GroupCounters,
            *,
            joins: bool,
            falls_back: bool,
        ) -> ComputedBy:
            decision = decide(group, updated, group_epoch, now_ms, counters, joins=joins, falls_back=falls_back)
            with self.observer.guard():
                self._decided(group, updated, group_epoch, now_ms, decision)
            return decision

        return wrapped

    def _decided(
        self,
        group: ConsumerGroup,
        updated: ConsumerGroupMember,
        group_epoch: int,
        now_ms: int,
        decision: ComputedBy,
    ) -> None:
        instance_id = updated.instance_id
        other_members = [
            member
            for member in group.members.values()
            if member.member_id != updated.member_id and (instance_id is None or member.instance_id != instance_id)
        ]
        members = [*other_members, updated]
        assignor = chosen_assignor(members)
        able = able_members(members, assignor) if assignor is not None else set()
        asked = self._asked.get(group.group_id)
        if asked is not None and (
            asked.member_id not in able
            or now_ms >= asked.deadline_ms
            or group.assignment_epoch >= asked.group_epoch
            or decision in (ComputedBy.SERVER, ComputedBy.FALLBACK)
        ):
            asked.may_be_over = True
        if (decision is ComputedBy.SERVER) != (assignor is None):
            raise ViolationError("I-24 the chosen assignor computes", f"{assignor}, but {decision}: {members}")
        if decision is not ComputedBy.THIS_MEMBER:
            return
        member_id = updated.member_id
        if member_id not in able:
            raise ViolationError("I-24 a member that can compute is asked", f"{member_id}, able are {able}: {members}")
        computation = group.client_computation
        assert computation is not None
        if asked is None or asked.token is not computation.asked:
            if asked is not None and asked.member_id != member_id and not asked.may_be_over:
                text = f"{member_id} was asked while {asked.member_id} computes for {group.group_id}"
                raise ViolationError("I-24 one member computes", text)
            deadline_ms = now_ms + updated.rebalance_timeout_ms
            self._asked[group.group_id] = _Asked(member_id, computation.asked, group_epoch, deadline_ms)
        elif now_ms >= asked.deadline_ms:
            asked.late_since_ms = now_ms if asked.late_since_ms < 0 else asked.late_since_ms
            if now_ms > asked.late_since_ms + _PATIENCE_MS:
                text = f"{member_id} is asked at {now_ms}, its time was over at {asked.deadline_ms}"
                raise ViolationError("I-24 time to compute ends", text)

    # 2. Snapshots.

    def _prepare(self, prepare: Callable[..., CoordinatorResult[object]]) -> Callable[..., CoordinatorResult[object]]:
        def wrapped(
            group: ConsumerGroup,
            image: MetadataImage,
            context: OperationContext,
            request: ConsumerGroupPrepareAssignmentRequest,
            counters: GroupCounters,
        ) -> CoordinatorResult[object]:
            result = prepare(group, image, context, request, counters)
            with self.observer.guard():
                self._prepared(group, image, request, result)
            return result

        return wrapped

    def _prepared(
        self,
        group: ConsumerGroup,
        image: MetadataImage,
        request: ConsumerGroupPrepareAssignmentRequest,
        result: CoordinatorResult[object],
    ) -> None:
        asked = self._asked_now(group, request.member_id)
        if asked is None:
            raise ViolationError("I-24 only the asked member computes", f"{request.member_id} got a snapshot")
        snapshot = asked.snapshot = _Snapshot.of(group, image)
        work = result.tasks[0].work
        assert isinstance(work, PrepareAssignment)
        response = work.run()
        told: tuple[object, ...] = (
            (response.group_epoch, response.assignor_name),
            {member.member_id: set(member.subscribed_topic_ids) for member in response.members},
            {
                member.member_id: {(t.topic_id, number) for t in member.topic_partitions for number in t.partitions}
                for member in response.members
            },
            {topic.topic_id: topic.num_partitions for topic in response.topics},
        )
        expected: tuple[object, ...] = (
            (snapshot.epoch, snapshot.assignor),
            snapshot.topics_of,
            snapshot.targets,
            snapshot.counts,
        )
        if told != expected or result.records:
            raise ViolationError("I-24 the snapshot is the group", f"{request.member_id} got {told}, not {expected}")

    # 3. and 4. Results.

    def _begin_install(
        self, begin_install: Callable[..., CoordinatorResult[object]]
    ) -> Callable[..., CoordinatorResult[object]]:
        def wrapped(
            group: ConsumerGroup,
            context: OperationContext,
            request: ConsumerGroupInstallAssignmentRequest,
            counters: GroupCounters,
            max_bytes: int,
        ) -> CoordinatorResult[object]:
            result = begin_install(group, context, request, counters, max_bytes)
            with self.observer.guard():
                self._install_begun(group, request, result)
            return result

        return wrapped

    def _install_begun(
        self, group: ConsumerGroup, request: ConsumerGroupInstallAssignmentRequest, result: CoordinatorResult[object]
    ) -> None:
        asked = self._asked_now(group, request.member_id)
        if result.records:
            raise ViolationError("I-24 only valid assignments are installed", f"{request} wrote at once")
        if result.response is not PENDING:
            is_repeated = (group.assigned_by, group.assignment_epoch) == (request.member_id, request.group_epoch)
            if request.error < 0 and asked is not None:
                asked.is_over = asked.may_be_over = True
            elif not is_repeated:
                raise ViolationError("I-24 only the asked member computes", f"{request} was accepted")
            return
        if asked is None:
            raise ViolationError("I-24 only the asked member computes", f"{request.member_id} may install")
        if asked.snapshot is None or asked.snapshot.epoch != request.group_epoch or request.error < 0:
            text = f"{request.member_id} may install epoch {request.group_epoch}, its snapshot is {asked.snapshot}"
            raise ViolationError("I-24 an assignment is for its snapshot", text)
        work = result.tasks[0].work
        assert isinstance(work, InstallAssignment)
        # The thread that checks the request empties it.
        kept = copy(request)
        kept.members = [*request.members]
        self._pending[id(work)] = work, asked, asked.snapshot, kept

    def _end_install(
        self, end_install: Callable[..., CoordinatorResult[None]]
    ) -> Callable[..., CoordinatorResult[None]]:
        def wrapped(
            group: ConsumerGroup | None,
            work: InstallAssignment,
            outcome: object,
            now_ms: int,
            counters: GroupCounters,
        ) -> CoordinatorResult[None]:
            result = end_install(group, work, outcome, now_ms, counters)
            with self.observer.guard():
                if id(work) in self._pending:
                    self._install_ended(group, work, result)
            return result

        return wrapped

    def _install_ended(
        self, group: ConsumerGroup | None, work: InstallAssignment, result: CoordinatorResult[None]
    ) -> None:
        _, asked, snapshot, request = self._pending.pop(id(work))
        verdict = judge(snapshot, request)
        response = result.completions[-1].response
        assert isinstance(response, ConsumerGroupInstallAssignmentResponse)
        written = bool(result.records or result.encoded)
        if response.error_code:
            if written:
                raise ViolationError("I-24 a refused assignment is not written", f"{response}: {result.records}")
            if response.error_code == Errors.INVALID_ASSIGNMENT:
                asked.is_over = asked.may_be_over = True
                if not isinstance(verdict, str):
                    text = f"{request.member_id}: {response.error_message}, but {request} fits {snapshot}"
                    raise ViolationError("I-24 valid assignments are installed", text)
            return
        assert group is not None
        if not written:
            if (group.assigned_by, group.assignment_epoch) != (request.member_id, snapshot.epoch):
                raise ViolationError("I-24 an accepted assignment is written", f"{request}")
            return
        if asked.is_over or self._asked.get(group.group_id) is not asked:
            raise ViolationError("I-24 only the asked member computes", f"{request.member_id} has installed")
        if isinstance(verdict, str):
            raise ViolationError("I-24 only valid assignments are installed", f"{verdict}: {request} of {snapshot}")
        asked.is_over = asked.may_be_over = True
        self._check_written(group, snapshot, request, verdict, _written(result))
        epochs = [r.value for r in result.records if isinstance(r.value, ConsumerGroupTargetAssignmentMetadataValue)]
        installed = [(value.assignment_epoch, value.assignor, value.assigned_by) for value in epochs]
        if installed != [(snapshot.epoch, snapshot.assignor, request.member_id)]:
            raise ViolationError("I-24 an assignment is for its snapshot", f"{installed} of {snapshot}")

    def _check_written(
        self,
        group: ConsumerGroup,
        snapshot: _Snapshot,
        request: ConsumerGroupInstallAssignmentRequest,
        verdict: Mapping[str, Target],
        written: Mapping[str, Target],
    ) -> None:
        """The targets after the installation are those of the assignment, for the members that are there."""
        gone = sorted(written.keys() - group.members.keys())
        if gone:
            raise ViolationError("I-24 only members have targets", f"{request.member_id} wrote targets of {gone}")
        heirs = {instance_id: name for name, instance_id in snapshot.instance_ids.items() if instance_id is not None}
        for member_id, member in group.members.items():
            former = member_id if member_id in verdict else heirs.get(member.instance_id or "")
            after = written.get(member_id, _target_of(group, member_id))
            if former is not None and (former == member_id or member_id in written):
                expected = verdict[former]
            else:
                expected = _target_of(group, member_id)
            if after != expected:
                text = f"{member_id} of {group.group_id} has the target {after}, not {expected}"
                raise ViolationError("I-24 an installed target is the assignment", text)


def _written(result: CoordinatorResult[None]) -> dict[str, Target]:
    """Returns the targets that the result writes, by member id."""
    written: dict[str, Target] = {}
    if result.encoded is not None:
        # A background thread has encoded the records. I-17 compares them with what this replay does.
        replay = result.encoded.replay
        assert isinstance(replay, partial)
        targets, metadata_of = replay.args
        for member_id, target in targets.items():
            numbers = frozenset((topic_id, partition) for topic_id in target for partition in target[topic_id])
            written[member_id] = numbers, metadata_of.get(member_id, TargetMetadata())
    for record in result.records:
        if isinstance(record.key, ConsumerGroupTargetAssignmentMemberKey):
            value = record.value
            assert isinstance(value, ConsumerGroupTargetAssignmentMemberValue)
            partitions = frozenset((t.topic_id, number) for t in value.topic_partitions for number in t.partitions)
            metadata = TargetMetadata(value.error, value.metadata_version, value.metadata_bytes)
            written[record.key.member_id] = partitions, metadata
    return written
