# SPDX-License-Identifier: Apache-2.0
"""The real state machine of a shard, made from the compacted log of a state for each step.

Every explored state is therefore also a state after a compaction and a restart. If the group uses client-side
assignors, the state has the soft state of the computation, and the state machine gets a copy of it before each
operation. The loss of soft state is then a step of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from functools import cache
from typing import Final, TypeAlias, TypeVar

from kcoord.config import BrokerConfig
from kcoord.coordinator.group.consumer.assignment import metadata_hash
from kcoord.coordinator.group.consumer.client_computation import InstallAssignment, PrepareAssignment
from kcoord.coordinator.group.consumer.group import ConsumerGroup
from kcoord.coordinator.group.group import GroupTimer
from kcoord.coordinator.group.shard import GroupCoordinatorShard
from kcoord.metadata.image import ImageBuilder, MetadataImage
from kcoord.runtime.result import (
    CoordinatorRecord,
    CoordinatorResult,
    MemberTimers,
    OperationContext,
    Schedule,
    Task,
    TimerKey,
)
from kcoord.simulation.model_check.model import (
    GROUP_ID,
    NOTHING,
    TOPIC,
    TOPIC_ID,
    AcceptedInstall,
    Entry,
    Install,
    Log,
    ModelAssignor,
    ModelComputation,
    ModelRequest,
    Partitions,
    Prepared,
    Response,
    State,
    member_id,
)
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import (
    ConsumerGroupCurrentMemberAssignmentValue,
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
    ConsumerGroupInstallAssignmentRequest,
    ConsumerGroupInstallAssignmentResponse,
    ConsumerGroupMetadataValue,
    ConsumerGroupPrepareAssignmentRequest,
    ConsumerGroupTargetAssignmentMemberValue,
    ConsumerGroupTargetAssignmentMetadataValue,
    Message,
    PartitionRecord,
    TopicRecord,
)

T = TypeVar("T")

Changes: TypeAlias = dict[str, object]
"""The fields of a state that an operation changes: its log, and the soft state of a computation by members."""

_NOW_MS: Final = 1_000
_CONTEXT: Final = OperationContext(_NOW_MS, 1, "client", "/127.0.0.1")
_ASSIGNOR: Final = "a"
_REBALANCE_TIMEOUT_MS: Final = 5_000


@cache
def _config(with_assignors: bool) -> BrokerConfig:
    return BrokerConfig.from_properties(
        {
            "group.consumer.assignment.interval.ms": "0",
            "kcoord.client.assignors.enable": str(with_assignors).lower(),
        }
    )


@cache
def _image(partitions: int) -> MetadataImage:
    builder = ImageBuilder(MetadataImage.empty())
    builder.replay(CoordinatorRecord(None, TopicRecord(name=TOPIC, topic_id=TOPIC_ID)))
    for partition in range(partitions):
        value = PartitionRecord(partition_id=partition, topic_id=TOPIC_ID, replicas=[1], isr=[1], leader=1)
        builder.replay(CoordinatorRecord(None, value))
    return builder.build()


@cache
def metadata_hash_of(partitions: int) -> int:
    """Returns the metadata hash in the group's record once the group has seen that many partitions."""
    return metadata_hash(_image(partitions), [TOPIC])


def restore(state: State) -> GroupCoordinatorShard:
    """Returns the state machine that the log replays to, with the soft state of a computation by members."""
    shard = GroupCoordinatorShard(_config(bool(state.assignors)), _image(state.partitions))
    for entry in state.log.values():
        shard.replay(entry.record)
    live, group = state.computation.live, shard.group(GROUP_ID)
    if live is not None and isinstance(group, ConsumerGroup):
        group.client_computation = replace(live, failed=copy(live.failed))
    return shard


def _run(
    shard: GroupCoordinatorShard, state: State, operation: Callable[[GroupCoordinatorShard], CoordinatorResult[T]]
) -> tuple[CoordinatorResult[T] | KafkaError, Changes]:
    """Runs an operation. Returns its result or error, and what changes.

    `shard` has the log of the state. An operation changes soft state, so one that may need a computation by members
    gets a state machine of its own.
    """
    result: CoordinatorResult[T] | KafkaError
    if not state.assignors:
        try:
            result = operation(shard)
        except KafkaError as error:
            return error, {}
        return result, {"log": appended(state.log, result.records)}
    shard, has_deadline = restore(state), state.computation.has_deadline
    changes: Changes = {}
    try:
        result = operation(shard)
        for record in result.records:
            shard.replay(record)
        for timer in result.timers:
            if not isinstance(timer, MemberTimers) and timer.key.kind is GroupTimer.CLIENT_ASSIGNOR:
                has_deadline = isinstance(timer, Schedule)
        changes["log"] = appended(state.log, result.records)
    except KafkaError as error:
        result = error
    group = shard.group(GROUP_ID)
    live = group.client_computation if isinstance(group, ConsumerGroup) else None
    changes["computation"] = ModelComputation(live, has_deadline)
    return result, changes


def heartbeat(
    shard: GroupCoordinatorShard, client: int, request: ModelRequest, state: State
) -> tuple[Response, Changes]:
    """Sends a heartbeat. Returns the response, and what changes."""
    message = ConsumerGroupHeartbeatRequest(group_id=GROUP_ID, member_id=member_id(client), member_epoch=request.epoch)
    if request.full:
        message.rebalance_timeout_ms = _REBALANCE_TIMEOUT_MS
        message.subscribed_topic_names = [TOPIC]
        if state.assignors and state.assignors[client] is not ModelAssignor.NONE:
            message.client_assignors = [ConsumerGroupHeartbeatRequest.ClientAssignor(name=_ASSIGNOR)]
    if request.owned is not None:
        message.topic_partitions = _topic_partitions(request.owned)
    result, changes = _run(shard, state, lambda shard: shard.consumer_group_heartbeat(_CONTEXT, message))
    if isinstance(result, KafkaError):
        return Response(result.error, 0, None), changes
    return _response(result.response), changes


def fire_timer(shard: GroupCoordinatorShard, key: TimerKey, state: State, now_ms: int = _NOW_MS) -> Changes:
    """Fires a timer. Returns what changes."""
    context = OperationContext(now_ms, 1, "client", "/127.0.0.1")
    return _run(shard, state, lambda shard: shard.fire_timer(context, key))[1]


# A computation by members.


def prepare(shard: GroupCoordinatorShard, client: int, state: State) -> tuple[Prepared | None, State]:
    """Sends PrepareAssignment. Returns the response, None if it is an error, and the state after it."""
    request = ConsumerGroupPrepareAssignmentRequest(
        group_id=GROUP_ID, member_id=member_id(client), member_epoch=state.clients[client].epoch
    )
    state = _with_own_asked(state)
    result, changes = _run(shard, state, lambda shard: shard.prepare_assignment(_CONTEXT, request))
    state = state._replace(**changes)  # type: ignore[arg-type]
    if isinstance(result, KafkaError):
        return None, state
    work = result.tasks[0].work
    assert isinstance(work, PrepareAssignment)
    response = work.run()
    ids = {member.member_id for member in response.members}
    members = tuple(member_id(number) in ids for number in range(len(state.clients)))
    return Prepared(response.group_epoch, sum(topic.num_partitions for topic in response.topics), members), state


def _with_own_asked(state: State) -> State:
    """Returns the state with a copy of what its member is asked, which PrepareAssignment changes."""
    live = state.computation.live
    if live is None or live.asked is None:
        return state
    before, own = live.asked, replace(live.asked)
    duties = tuple(
        duty._replace(check=duty.check._replace(work=replace(duty.check.work, asked=own)))
        if duty.check is not None and duty.check.work.asked is before
        else duty
        for duty in state.duties
    )
    return state._replace(duties=duties, computation=state.computation._replace(live=replace(live, asked=own)))


def begin_install(
    shard: GroupCoordinatorShard, client: int, install: Install, assigned: Sequence[Partitions], state: State
) -> tuple[AcceptedInstall | Errors, Changes]:
    """Sends InstallAssignment. Returns the check that its response waits for or its error, and what changes.

    `assigned` are the partitions of each client; without any, the request says that the assignor has failed.
    """
    request = ConsumerGroupInstallAssignmentRequest
    members = [
        request.Member(
            member_id=member_id(number),
            partitions=[request.TopicPartitions(topic_id=TOPIC_ID, partitions=sorted(partitions))],
            metadata_version=0,
        )
        for number, partitions in enumerate(assigned)
        if install.prepared.members[number]
    ]
    message = request(
        group_id=GROUP_ID,
        member_id=member_id(client),
        member_epoch=install.epoch,
        group_epoch=install.prepared.group_epoch,
        error=0 if assigned else -1,
        members=members,
    )
    result, changes = _run(shard, state, lambda shard: shard.install_assignment(_CONTEXT, message))
    if isinstance(result, KafkaError):
        return result.error, changes
    if not result.tasks:
        return Errors.NONE, changes
    work = result.tasks[0].work
    assert isinstance(work, InstallAssignment)
    return AcceptedInstall(install, work), changes


def end_install(shard: GroupCoordinatorShard, check: AcceptedInstall, state: State) -> tuple[Errors, Changes]:
    """Completes the check of an InstallAssignment. Returns the error of its response, and what changes."""
    work = check.work
    task = Task(TimerKey(GroupTimer.INSTALL_ASSIGNMENT, GROUP_ID), work)
    result, changes = _run(shard, state, lambda shard: shard.complete_task(_CONTEXT, task, work.run()))
    assert isinstance(result, CoordinatorResult)
    response = result.completions[0].response
    assert isinstance(response, ConsumerGroupInstallAssignmentResponse)
    return Errors(response.error_code), changes


def _topic_partitions(owned: Partitions) -> list[ConsumerGroupHeartbeatRequest.TopicPartitions]:
    if not owned:
        return []
    return [ConsumerGroupHeartbeatRequest.TopicPartitions(topic_id=TOPIC_ID, partitions=sorted(owned))]


def _response(response: ConsumerGroupHeartbeatResponse) -> Response:
    assignment = response.assignment
    if assignment is None:
        return Response(Errors.NONE, response.member_epoch, None, response.should_compute_assignment)
    partitions = [partition for topic in assignment.topic_partitions for partition in topic.partitions]
    owned = frozenset(partitions) if partitions else NOTHING
    return Response(Errors.NONE, response.member_epoch, owned, response.should_compute_assignment)


def appended(log: Log, records: list[CoordinatorRecord]) -> Log:
    """Returns the log with these records appended and compacted."""
    if not records:
        return log
    after = dict(log)
    for record in records:
        assert record.key is not None
        key = type(record.key).__name__, getattr(record.key, "member_id", "")
        after.pop(key, None)
        if record.value is not None:
            after[key] = Entry(record, _canon(record.value))
    return after


def _canon(value: Message) -> tuple[object, ...]:
    """Returns the fields of a record that can matter.

    Epochs and versions are shifted, because -1 and -2 have the same hash in Python.
    """
    match value:
        case ConsumerGroupCurrentMemberAssignmentValue():
            return (
                value.member_epoch + 3,
                value.previous_member_epoch + 3,
                value.state,
                with_epochs(value.assigned_partitions),
                with_epochs(value.partitions_pending_revocation),
                value.metadata_version + 3,
            )
        case ConsumerGroupTargetAssignmentMemberValue():
            partitions = tuple(partition for topic in value.topic_partitions for partition in topic.partitions)
            return partitions, value.metadata_version + 3
        case ConsumerGroupMetadataValue():
            return value.epoch, value.metadata_hash
        case ConsumerGroupTargetAssignmentMetadataValue():
            return (value.assignment_epoch,)
        case _:
            return (True,)


def with_epochs(
    topics: list[ConsumerGroupCurrentMemberAssignmentValue.TopicPartitions],
) -> tuple[tuple[int, int], ...]:
    """Returns pairs of a partition and the epoch at which it was assigned to the member."""
    return tuple(
        pair
        for topic in topics
        for pair in zip(topic.partitions, topic.assignment_epochs or [0] * len(topic.partitions), strict=True)
    )
