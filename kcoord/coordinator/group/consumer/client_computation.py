# SPDX-License-Identifier: Apache-2.0
"""Target assignments that a member computes with a client-side assignor (KIP-848 "Client Side Assignor").

Theory of operation. If all members offer the same client-side assignor, the coordinator does not compute the next
target itself. It asks one member:

1. `ask`, in step 3 of each heartbeat. The first able member that sends a heartbeat is asked, so asking and telling are
   the same moment. Its response has ShouldComputeAssignment, and so has every later one until it has installed, because
   responses get lost. It has its rebalance timeout to finish. A member that joins is asked only if no other can be.
2. `prepare` (PrepareAssignment) gives the asked member a snapshot of the group at its present epoch.
3. `install` (InstallAssignment) judges the result by that snapshot, whatever happened since, and installs it.

Meanwhile members keep their old target, and the group epoch may grow; the next heartbeat then asks again. The very
first target is empty and one epoch older than the group, because a member needs an epoch to compute.

A member fails if it lets its time pass, installs something invalid, or says that its assignor failed. It is not
fenced, but another member is asked. When all able members have failed, the round ends. Then the coordinator either
starts another round after a pause, or lets a server-side assignor compute (kcoord.client.assignor.fallback).

Without a failure, the computation is dropped if the member leaves, is fenced, goes away as a static member, moves to
the classic protocol or can no longer compute. So it is if the group turns to a server-side assignor.

All this is soft state (`ClientComputation`). After a failover nobody is asked, InstallAssignment of the former member
fails, and the next heartbeat asks again. What is installed is hard: the targets, their metadata, and by whom.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from kcoord.coordinator.group.assignor.check import InvalidAssignment, checked_assignment
from kcoord.coordinator.group.assignor.spec import MemberSpec
from kcoord.coordinator.group.classic import consumer_protocol
from kcoord.coordinator.group.consumer.assignment import (
    ComputedTarget,
    TargetInput,
    computed_target,
    install,
    member_specs,
    partition_racks,
    target_input,
)
from kcoord.coordinator.group.consumer.client_assignors import (
    CLASSIC_VERSION,
    AskedMember,
    ClientAssignor,
    ClientComputation,
    select,
)
from kcoord.coordinator.group.consumer.group import (
    MAX_FAILURES,
    Assignment,
    ConsumerGroup,
    ConsumerGroupMember,
    FailedComputations,
    TargetMetadata,
    offer_of,
    pause_ms,
)
from kcoord.coordinator.group.counters import GroupCounters
from kcoord.coordinator.group.group import GroupTimer
from kcoord.metadata.image import MetadataImage
from kcoord.runtime.result import (
    PENDING,
    Cancel,
    Completion,
    CoordinatorResult,
    OperationContext,
    Schedule,
    Task,
    TimerKey,
)
from kcoord_protocol.errors import Errors, KafkaError, shortened
from kcoord_protocol.messages import (
    ConsumerGroupInstallAssignmentRequest,
    ConsumerGroupInstallAssignmentResponse,
    ConsumerGroupPrepareAssignmentRequest,
    ConsumerGroupPrepareAssignmentResponse,
)

FALLBACK_ERROR: Final = -2
"""The error of an assignment that a server-side assignor computed because all able members had failed to."""


class ComputedBy(Enum):
    """Who computes the next target."""

    SERVER = "server"
    FALLBACK = "fallback"
    """A server-side assignor, because all able members have failed to."""
    THIS_MEMBER = "this member"
    OTHER_MEMBER = "other member"
    """A member, but not the one that sends this heartbeat. Perhaps none has been asked yet."""


def decide(
    group: ConsumerGroup,
    updated: ConsumerGroupMember,
    group_epoch: int,
    now_ms: int,
    counters: GroupCounters,
    *,
    joins: bool,
    falls_back: bool,
) -> ComputedBy:
    """Returns who computes the target of `group_epoch`. May ask the member `updated`, which sends this heartbeat.

    Called only if the group needs a new target. `updated` is the member with this heartbeat's changes.
    """
    selection = select(group.offers(changed=updated))
    computation = group.client_computation
    if selection is None:
        if computation is not None and computation.asked is not None:
            counters.client_computations["superseded"] += 1
        group.client_computation = None
        return ComputedBy.SERVER
    if computation is None:
        computation = group.client_computation = ClientComputation(group_epoch)
    counters.client_computations["gone"] += computation.gone
    computation.gone = 0
    asked = computation.asked
    if asked is not None:
        is_this = asked.member_id == updated.member_id
        member = updated if is_this else group.members.get(asked.member_id)
        if member is not None and selection.can_compute(offer_of(member)):
            return ComputedBy.THIS_MEMBER if is_this else ComputedBy.OTHER_MEMBER
        computation.asked = None
        counters.client_computations["gone"] += 1
    if falls_back and computation.rounds:
        return ComputedBy.FALLBACK
    if now_ms < computation.not_before_ms:
        return ComputedBy.OTHER_MEMBER
    failed = {
        member_id
        for member_id in computation.failed
        if (member := updated if member_id == updated.member_id else group.members.get(member_id)) is not None
        and selection.can_compute(offer_of(member))
    }
    if len(failed) >= selection.able:
        computation.failed.clear()
        computation.rounds += 1
        if falls_back:
            counters.client_assignor_fallbacks += 1
            return ComputedBy.FALLBACK
        computation.not_before_ms = now_ms + pause_ms(computation.rounds)
        return ComputedBy.OTHER_MEMBER
    can_ask = updated.member_id not in failed and selection.can_compute(offer_of(updated))
    if not can_ask or (joins and selection.able - len(failed) > 1):
        return ComputedBy.OTHER_MEMBER
    computation.asked = AskedMember(updated.member_id, selection.name, now_ms, now_ms + updated.rebalance_timeout_ms)
    return ComputedBy.THIS_MEMBER


def deadline(group: ConsumerGroup) -> Schedule:
    """Returns the timer that limits the time of the member that was asked."""
    assert group.client_computation is not None
    assert group.client_computation.asked is not None
    return Schedule(_timer(group), group.client_computation.asked.deadline_ms)


def _timer(group: ConsumerGroup) -> TimerKey:
    return TimerKey(GroupTimer.CLIENT_ASSIGNOR, group.group_id)


def time_is_over(group: ConsumerGroup, now_ms: int, counters: GroupCounters) -> None:
    """Counts a failure if the asked member has not installed an assignment in time."""
    computation = group.client_computation
    if computation is not None and computation.asked is not None and now_ms >= computation.asked.deadline_ms:
        took_ms = computation.asked.deadline_ms - computation.asked.since_ms
        _fail(group, "timeout", f"it installed nothing within {took_ms} ms", counters)


def _fail(group: ConsumerGroup, outcome: str, reason: str, counters: GroupCounters) -> None:
    """Ends the computation of the asked member, so that another one is asked. The member is not fenced."""
    computation = group.client_computation
    assert computation is not None
    asked, computation.asked = computation.asked, None
    assert asked is not None
    computation.failed.add(asked.member_id)
    counters.client_computations[outcome] += 1
    failed = group.failed_computations
    count = failed.count + 1 if failed is not None and failed.assignor == asked.assignor else 1
    text = shortened(f"member {asked.member_id}: {reason}")
    group.failed_computations = FailedComputations(
        asked.assignor, min(count, MAX_FAILURES), text, computation.not_before_ms
    )


def _find_asked(
    group: ConsumerGroup, request: ConsumerGroupPrepareAssignmentRequest | ConsumerGroupInstallAssignmentRequest
) -> AskedMember | None:
    """Returns what the member of the request was asked; None if it is not asked now.

    Raises UNKNOWN_MEMBER_ID, or STALE_MEMBER_EPOCH if the request does not have the member's epoch.
    """
    member = group.members.get(request.member_id)
    if member is None or member.classic is not None:
        raise KafkaError(
            Errors.UNKNOWN_MEMBER_ID,
            f"Group {group.group_id} has no member {request.member_id} of the consumer protocol.",
        )
    if request.member_epoch != member.member_epoch:
        raise KafkaError(
            Errors.STALE_MEMBER_EPOCH,
            f"The member epoch {request.member_epoch} is not the epoch {member.member_epoch} of member "
            f"{request.member_id}.",
        )
    computation = group.client_computation
    asked = computation.asked if computation is not None else None
    return asked if asked is not None and asked.member_id == request.member_id else None


def _not_asked(group: ConsumerGroup, member_id: str) -> KafkaError:
    return KafkaError(
        Errors.UNKNOWN_MEMBER_ID,
        f"Member {member_id} is not asked to compute the assignment of group {group.group_id}.",
    )


def validate_request(
    request: ConsumerGroupPrepareAssignmentRequest | ConsumerGroupInstallAssignmentRequest,
) -> None:
    """Raises INVALID_REQUEST for ids or an epoch that no member has."""
    if not request.group_id.strip():
        raise KafkaError(Errors.INVALID_REQUEST, "GroupId can't be empty.")
    if not request.member_id.strip():
        raise KafkaError(Errors.INVALID_REQUEST, "MemberId can't be empty.")
    if request.member_epoch < 0:
        raise KafkaError(Errors.INVALID_REQUEST, f"MemberEpoch can't be negative, and is {request.member_epoch}.")


# PrepareAssignment.


@dataclass(slots=True)
class PrepareAssignment:
    """The work of a task: make the response to PrepareAssignment from a snapshot."""

    group_id: str
    token: Hashable
    snapshot: TargetInput

    def run(self) -> ConsumerGroupPrepareAssignmentResponse:
        return prepared(self.snapshot)


def prepare(
    group: ConsumerGroup,
    image: MetadataImage,
    context: OperationContext,
    request: ConsumerGroupPrepareAssignmentRequest,
    counters: GroupCounters,
) -> CoordinatorResult[object]:
    """Serves PrepareAssignment: takes a snapshot of the group, which a task makes the response. The deadline stays.

    Raises KafkaError.
    """
    asked = _find_asked(group, request)
    if asked is None:
        raise _not_asked(group, request.member_id)
    selection = select(group.offers())
    if selection is None:
        group.client_computation = None
        counters.client_computations["superseded"] += 1
        raise _not_asked(group, request.member_id)
    if not selection.can_compute(offer_of(group.members[request.member_id])):
        # A member has left, and so the group uses another assignor.
        assert group.client_computation is not None
        group.client_computation.asked = None
        counters.client_computations["gone"] += 1
        raise _not_asked(group, request.member_id)
    asked.assignor = selection.name
    snapshot = asked.snapshot = target_input(group, group.group_epoch, selection.name, image)
    work = PrepareAssignment(group.group_id, context.token, snapshot)
    return CoordinatorResult(PENDING, tasks=[Task(_task_key(GroupTimer.PREPARE_ASSIGNMENT, work), work)])


def _task_key(kind: GroupTimer, work: PrepareAssignment | InstallAssignment) -> TimerKey:
    """Returns a key of its own for each request, because the runtime drops a task whose key is in use."""
    return TimerKey(kind, work.group_id, str(work.token))


def prepared(snapshot: TargetInput) -> ConsumerGroupPrepareAssignmentResponse:
    """Returns the response to PrepareAssignment."""
    response = ConsumerGroupPrepareAssignmentResponse
    specs = member_specs(snapshot)
    # Members with equal subscriptions have the same object, and share its list, too.
    subscriptions = {id(spec.subscribed_topic_ids): spec.subscribed_topic_ids for spec in specs.values()}
    sorted_ids = {key: sorted(topic_ids) for key, topic_ids in subscriptions.items()}
    members = []
    for member_id, member in snapshot.members.items():
        assignor = _offered(member, snapshot.assignor)
        members.append(
            response.Member(
                member_id=member_id,
                member_epoch=member.member_epoch,
                instance_id=member.instance_id,
                rack_id=member.rack_id,
                subscribed_topic_ids=sorted_ids[id(specs[member_id].subscribed_topic_ids)],
                assignor=response.Assignor(
                    reason=assignor.reason,
                    metadata_version=assignor.metadata_version,
                    metadata_bytes=assignor.metadata,
                ),
                topic_partitions=[
                    response.TopicPartitions(topic_id=topic_id, partitions=sorted(partitions))
                    for topic_id, partitions in sorted(snapshot.target_of(member_id).items())
                ],
            )
        )
    has_racks = bool(snapshot.image.racks)
    topics = [
        response.TopicMetadata(
            topic_id=topic_id,
            topic_name=snapshot.image.topics_by_id[topic_id].name,
            num_partitions=count,
            partitions=[
                response.PartitionMetadata(racks=sorted(racks))
                for racks in (partition_racks(snapshot.image, topic_id) if has_racks else ())
            ],
        )
        for topic_id, count in snapshot.partition_counts.items()
    ]
    return response(group_epoch=snapshot.group_epoch, assignor_name=snapshot.assignor, members=members, topics=topics)


def _offered(member: ConsumerGroupMember, name: str) -> ClientAssignor:
    """Returns the member's assignor of that name, which every member of a snapshot has."""
    return next(assignor for assignor in offered_assignors(member) if assignor.name == name)


def offered_assignors(member: ConsumerGroupMember) -> Sequence[ClientAssignor]:
    """Returns the client-side assignors of the member; for a classic member its protocols with their user data."""
    if member.classic is None:
        return member.client_assignors
    version = CLASSIC_VERSION
    return [
        ClientAssignor(name, version, version, 0, version, consumer_protocol.read_user_data(metadata))
        for name, metadata in member.classic.protocols
    ]


# InstallAssignment.


@dataclass(slots=True)
class InstallAssignment:
    """The work of a task: check an assignment that a member has computed for a snapshot."""

    group_id: str
    token: Hashable
    asked: AskedMember
    snapshot: TargetInput
    request: ConsumerGroupInstallAssignmentRequest
    max_bytes: int

    def run(self) -> ComputedTarget | InvalidAssignment:
        """Returns the new targets, or the reason why they cannot be installed."""
        try:
            return checked(self.snapshot, self.request, self.max_bytes)
        except InvalidAssignment as error:
            return error


def begin_install(
    group: ConsumerGroup,
    context: OperationContext,
    request: ConsumerGroupInstallAssignmentRequest,
    counters: GroupCounters,
    max_bytes: int,
) -> CoordinatorResult[object]:
    """Serves InstallAssignment. The response waits for a task, which checks the assignment.

    Raises KafkaError.
    """
    asked = _find_asked(group, request)
    if asked is None:
        if (group.assigned_by, group.assignment_epoch) == (request.member_id, request.group_epoch):
            return CoordinatorResult(ConsumerGroupInstallAssignmentResponse())  # The request was sent twice.
        raise _not_asked(group, request.member_id)
    if request.error < 0:
        _fail(group, "failed", f"its assignor failed with error {request.error}", counters)
        return CoordinatorResult(ConsumerGroupInstallAssignmentResponse(), timers=[Cancel(_timer(group))])
    snapshot = asked.snapshot
    if not isinstance(snapshot, TargetInput) or snapshot.group_epoch != request.group_epoch:
        prepared_epoch = f"epoch {snapshot.group_epoch}" if isinstance(snapshot, TargetInput) else "nothing"
        raise KafkaError(
            Errors.INVALID_ASSIGNMENT,
            f"The assignment is for group epoch {request.group_epoch}, but {prepared_epoch} was prepared.",
        )
    work = InstallAssignment(group.group_id, context.token, asked, snapshot, request, max_bytes)
    return CoordinatorResult(PENDING, tasks=[Task(_task_key(GroupTimer.INSTALL_ASSIGNMENT, work), work)])


def complete_task(
    group: ConsumerGroup | None,
    work: PrepareAssignment | InstallAssignment,
    outcome: object,
    now_ms: int,
    counters: GroupCounters,
) -> CoordinatorResult[None]:
    """Responds to the request of a task. `outcome` is the value of the task, or the exception with which it failed."""
    if isinstance(work, InstallAssignment) and isinstance(outcome, ComputedTarget | InvalidAssignment):
        return end_install(group, work, outcome, now_ms, counters)
    if isinstance(outcome, Exception):
        is_prepare = isinstance(work, PrepareAssignment)
        response = ConsumerGroupPrepareAssignmentResponse if is_prepare else ConsumerGroupInstallAssignmentResponse
        outcome = response(error_code=Errors.UNKNOWN_SERVER_ERROR)
    return CoordinatorResult(None, completions=[Completion(work.token, outcome)])


def end_install(
    group: ConsumerGroup | None,
    work: InstallAssignment,
    outcome: ComputedTarget | InvalidAssignment,
    now_ms: int,
    counters: GroupCounters,
) -> CoordinatorResult[None]:
    """Installs the targets that a task has checked, and responds to the request."""
    try:
        if group is None:
            raise KafkaError(Errors.GROUP_ID_NOT_FOUND, f"Consumer group {work.group_id} not found.")
        result = _installed(group, work, outcome, now_ms, counters)
        response = ConsumerGroupInstallAssignmentResponse()
    except KafkaError as error:
        result = CoordinatorResult(None)
        response = ConsumerGroupInstallAssignmentResponse(error_code=error.error, error_message=error.message)
    result.completions.append(Completion(work.token, response))
    return result


def _installed(
    group: ConsumerGroup,
    work: InstallAssignment,
    outcome: ComputedTarget | InvalidAssignment,
    now_ms: int,
    counters: GroupCounters,
) -> CoordinatorResult[None]:
    """Returns the records of the new targets. Raises INVALID_ASSIGNMENT, and UNKNOWN_MEMBER_ID if it is too late."""
    computation, asked = group.client_computation, work.asked
    if computation is None or computation.asked is not asked:
        if (group.assigned_by, group.assignment_epoch) == (asked.member_id, work.snapshot.group_epoch):
            return CoordinatorResult(None)
        raise _not_asked(group, asked.member_id)
    if isinstance(outcome, InvalidAssignment):
        _fail(group, "invalid", f"its assignment is invalid: {outcome}", counters)
        raise KafkaError(Errors.INVALID_ASSIGNMENT, f"The assignment is invalid: {outcome}.")
    counters.client_computations["error" if work.request.error else "installed"] += 1
    counters.client_computation_ms += now_ms - asked.since_ms
    result = install(group, outcome, now_ms)
    result.timers.append(Cancel(_timer(group)))
    return result


def checked(snapshot: TargetInput, request: ConsumerGroupInstallAssignmentRequest, max_bytes: int) -> ComputedTarget:
    """Returns the new targets. Raises InvalidAssignment with the first reason."""
    specs = member_specs(snapshot)
    assigned, metadata = validated(snapshot, specs, request, max_bytes)
    return computed_target(snapshot, specs, assigned, metadata, request.member_id)


def validated(
    snapshot: TargetInput,
    specs: Mapping[str, MemberSpec],
    request: ConsumerGroupInstallAssignmentRequest,
    max_bytes: int,
) -> tuple[Mapping[str, Assignment], Mapping[str, TargetMetadata]]:
    """Returns partitions and metadata of all members of the snapshot. Raises InvalidAssignment with the first reason.

    An error without members keeps every target, without the topics that are gone.
    """
    metadata = dict.fromkeys(specs, TargetMetadata(request.error))
    if request.error and not request.members:
        kept = {
            member_id: _still_subscribed(spec.assigned, spec.subscribed_topic_ids) for member_id, spec in specs.items()
        }
        return kept, metadata
    proposed: dict[str, dict[bytes, list[int]]] = {}
    for member in request.members:
        member_id = member.member_id
        if member_id in proposed:
            raise InvalidAssignment(f"member {member_id} has two assignments")
        topics = proposed[member_id] = {}
        for topic in member.partitions:
            # In place, because new lists would make the work quadratic in the number of repetitions of a topic.
            topics.setdefault(topic.topic_id, []).extend(topic.partitions)
        if member_id in specs:
            _check_metadata(snapshot, member, max_bytes)
            metadata[member_id] = TargetMetadata(request.error, member.metadata_version, member.metadata_bytes)
    names = {topic_id: snapshot.image.topics_by_id[topic_id].name for topic_id in snapshot.partition_counts}
    return checked_assignment(proposed, specs, snapshot.partition_counts, names), metadata


def _still_subscribed(target: Assignment, topic_ids: Collection[bytes]) -> Assignment:
    return {topic_id: partitions for topic_id, partitions in target.items() if topic_id in topic_ids}


def _check_metadata(
    snapshot: TargetInput, member: ConsumerGroupInstallAssignmentRequest.Member, max_bytes: int
) -> None:
    """Raises InvalidAssignment if the member does not read the version of the metadata, or gets too much."""
    lowest = highest = CLASSIC_VERSION
    for assignor in snapshot.members[member.member_id].client_assignors:
        if assignor.name == snapshot.assignor:
            lowest, highest = assignor.minimum_version, assignor.maximum_version
    if not lowest <= member.metadata_version <= highest:
        raise InvalidAssignment(
            f"member {member.member_id} reads metadata of versions {lowest} to {highest}, not {member.metadata_version}"
        )
    if len(member.metadata_bytes) > max_bytes:
        raise InvalidAssignment(
            f"the metadata of member {member.member_id} has {len(member.metadata_bytes)} bytes, more than "
            f"kcoord.client.assignor.metadata.max.bytes={max_bytes}"
        )
