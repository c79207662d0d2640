# SPDX-License-Identifier: Apache-2.0
"""The rebalance of a classic group: when it starts, when its two phases end, and which members it removes.

**Join phase.** `prepare` moves the group to PreparingRebalance. JoinGroup requests then wait as tokens in their
members. The phase ends when all members have joined and no pending member is left, or when the join timer fires. The
timer runs for the longest rebalance timeout of the members. A group that was Empty waits for the initial rebalance
delay instead, which each new member extends, but no longer than the rebalance timeout in total. `complete_join` then
removes dynamic members that did not join, elects the leader, raises the generation, and answers all waiting requests.

**Sync phase.** The group is in CompletingRebalance. SyncGroup requests wait until the leader's request brings the
assignments. `complete_generation` writes the group metadata record, whose replay makes the group Stable. The waiting
requests are answered after the record is in the log. The sync timer removes members that never send SyncGroup.

**Interruptions.** A member that joins, leaves or is removed in the sync phase starts the next join phase. Waiting
SyncGroup requests fail with REBALANCE_IN_PROGRESS. The interrupted generation gets no record.

**Sessions.** Each member has a heartbeat timer for its session timeout. A waiting request keeps a member alive. The
exception is a new member, whose timer runs for five minutes: its first JoinGroup may wait no longer.

An operation creates one `Rebalance` and changes the group through it. It collects records, timers, and completions of
waiting requests in one result. The responses to all members are bulk completions: the runtime makes them in several
turns of the event loop, from copies of what they show. Timers and waiting requests are soft: after a crash the members'
heartbeat timers start again, and clients resend their requests.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias, TypeVar, cast

from kcoord.config import BrokerConfig
from kcoord.coordinator.group.classic.group import NO_GENERATION, ClassicGroup
from kcoord.coordinator.group.classic.member import ClassicMember, metadata_of
from kcoord.coordinator.group.group import GroupState, GroupTimer, heartbeat_timer
from kcoord.runtime.result import (
    MAX_BATCH_BYTES,
    Cancel,
    Completion,
    CoordinatorRecord,
    CoordinatorResult,
    MemberTimers,
    Schedule,
    TimerKey,
)
from kcoord_protocol.errors import Errors
from kcoord_protocol.messages import GroupMetadataKey, JoinGroupResponse, SyncGroupResponse

if TYPE_CHECKING:
    from kcoord_protocol.messages import GroupMetadataValue

T = TypeVar("T")

NEW_MEMBER_JOIN_TIMEOUT_MS: Final = 5 * 60 * 1000
"""The limit for a new member's first join phase. It does not have its id yet and cannot send heartbeats."""

_BOUND_BYTES: Final = 1024
"""An upper bound for the bytes of a batch and a record beside the group id and the value."""
_VALUE_BYTES: Final = 22
_MEMBER_BYTES: Final = 24
"""The bytes of numbers and lengths in the value of a group metadata record, and of each member in it."""

GROUP_METADATA_VALUE_VERSION: Final = 3
"""The newest version without tagged fields, which Kafka 4.3.1 writes."""


def refused_join(error: Errors, member_id: str) -> JoinGroupResponse:
    """Returns a JoinGroup response with an error and without a generation."""
    return JoinGroupResponse(error_code=error, generation_id=NO_GENERATION, protocol_name=None, member_id=member_id)


def sync_response(protocol_type: str, protocol: str | None, assignment: bytes) -> SyncGroupResponse:
    return SyncGroupResponse(protocol_type=protocol_type, protocol_name=protocol, assignment=assignment)


def size_bytes(value: GroupMetadataValue) -> int:
    """Returns the size of the encoded value. Encoding the value of a large group once more would take milliseconds."""
    members = value.members
    names = [value.protocol_type, value.protocol or "", value.leader or ""]
    names += [f"{m.member_id}{m.group_instance_id or ''}{m.client_id}{m.client_host}" for m in members]
    data_bytes = sum([len(member.subscription) + len(member.assignment) for member in members])
    return _VALUE_BYTES + _MEMBER_BYTES * len(members) + len("".join(names).encode()) + data_bytes


def least_size_bytes(group: ClassicGroup, assignments: dict[str, bytes]) -> int:
    """Returns a lower bound of `size_bytes` for the group with these assignments. It counts neither names nor clients.

    Making the value of a group of 10,000 members takes 10 ms, in vain if it is too large.
    """
    members, protocol = group.members, group.protocol
    data_bytes = sum(
        [len(member.metadata(protocol)) + len(assignments.get(member_id, b"")) for member_id, member in members.items()]
    )
    return _VALUE_BYTES + _MEMBER_BYTES * len(members) + sum(map(len, members)) + data_bytes


def is_too_large(group_id: str, value: GroupMetadataValue) -> bool:
    """True if the record does not fit into a batch."""
    return len(group_id.encode()) + size_bytes(value) + _BOUND_BYTES > MAX_BATCH_BYTES


def group_metadata_record(group_id: str, value: GroupMetadataValue) -> CoordinatorRecord:
    return CoordinatorRecord(GroupMetadataKey(group=group_id), value, GROUP_METADATA_VALUE_VERSION)


_Joined: TypeAlias = tuple[str, str | None, list[tuple[str, bytes]]]
"""A member of a generation: id, instance id and protocols."""


class _Generation(NamedTuple):
    """The fields that all JoinGroup responses of a generation share. `leader` is the leader's id in the responses."""

    generation: int
    protocol_type: str
    protocol: str | None
    leader: str

    def join_response(
        self, member_id: str, members: Iterable[_Joined], *, skip_assignment: bool = False
    ) -> JoinGroupResponse:
        """Returns the response for a member; the leader's has `members`, which are all members."""
        response = JoinGroupResponse(
            generation_id=self.generation,
            protocol_type=self.protocol_type,
            protocol_name=self.protocol,
            leader=self.leader,
            skip_assignment=skip_assignment,
            member_id=member_id,
        )
        if member_id == self.leader:
            response.members = [
                JoinGroupResponse.JoinGroupResponseMember(
                    member_id=other_id,
                    group_instance_id=instance_id,
                    metadata=metadata_of(protocols, self.protocol),
                )
                for other_id, instance_id, protocols in members
            ]
        return response


@dataclass(slots=True)
class Rebalance:
    """One operation on one classic group; its records, timers and completions are collected in `result`."""

    config: BrokerConfig
    group: ClassicGroup
    now_ms: int
    result: CoordinatorResult[object] = field(default_factory=lambda: CoordinatorResult[object](None))

    def respond(self, response: T) -> CoordinatorResult[T]:
        """Returns the result with the response of the operation."""
        self.result.response = response
        return cast("CoordinatorResult[T]", self.result)

    # Join phase.

    def prepare_or_complete_join(self) -> None:
        """Starts a rebalance; if the group is in a join phase already, ends it if all members have joined."""
        if self.group.can_rebalance():
            self.prepare()
        else:
            self.complete_join_if_all_joined()

    def prepare(self) -> None:
        """Starts a join phase. Members that wait for an assignment must rejoin."""
        group = self.group
        if group.state is GroupState.COMPLETING_REBALANCE:
            self.abort_syncs(Errors.REBALANCE_IN_PROGRESS)
        self.cancel(TimerKey(GroupTimer.CLASSIC_SYNC, group.group_id))
        initial = group.state is GroupState.EMPTY
        group.transition_to(GroupState.PREPARING_REBALANCE, self.now_ms)
        if initial:
            delay_ms = self.config.group_initial_rebalance_delay_ms
            group.initial_remaining_ms = max(group.rebalance_timeout_ms - delay_ms, 0)
            group.member_added = False
            self.schedule(TimerKey(GroupTimer.CLASSIC_JOIN, group.group_id), delay_ms)
        elif group.has_all_members_joined():
            self.complete_join()
        else:
            self.schedule(TimerKey(GroupTimer.CLASSIC_JOIN, group.group_id), group.rebalance_timeout_ms)

    def complete_join_if_all_joined(self) -> None:
        """Ends the join phase before its timer if no member is missing; never ends the initial rebalance delay."""
        group = self.group
        if (
            group.state is GroupState.PREPARING_REBALANCE
            and group.previous_state is not GroupState.EMPTY
            and group.has_all_members_joined()
        ):
            self.complete_join()

    def join_timer_fired(self) -> None:
        """Ends the join phase, or extends the initial rebalance delay if a member joined during it."""
        group = self.group
        if group.state is not GroupState.PREPARING_REBALANCE:
            return
        if group.previous_state is GroupState.EMPTY and group.member_added and group.initial_remaining_ms > 0:
            delay_ms = min(self.config.group_initial_rebalance_delay_ms, group.initial_remaining_ms)
            group.member_added = False
            group.initial_remaining_ms -= delay_ms
            self.schedule(TimerKey(GroupTimer.CLASSIC_JOIN, group.group_id), delay_ms)
        else:
            self.complete_join()

    def complete_join(self) -> None:
        """Begins the next generation with the members that joined, and static members even if not (KIP-345)."""
        group = self.group
        self.cancel(TimerKey(GroupTimer.CLASSIC_JOIN, group.group_id))
        for member in group.not_yet_rejoined():
            if not member.is_static:
                group.remove(member.member_id)
                self.cancel(heartbeat_timer(group.group_id, member.member_id))
        if group.members and not group.elect_joined_leader():
            # Only absent static members are left: wait until a session timeout removes them, or until one joins.
            self.schedule(TimerKey(GroupTimer.CLASSIC_JOIN, group.group_id), group.rebalance_timeout_ms)
            return
        group.begin_next_generation(self.now_ms)
        if not group.members:
            self.result.records.append(group_metadata_record(group.group_id, group.to_value(self.now_ms, {})))
            return
        self.result.bulk_completions.append(self._join_completions())
        group.unpark_joins()
        for member in group.members.values():
            member.is_new = False
        group.pending_sync.update(group.members)
        self.reset_heartbeats(group.members.values())
        self.schedule(TimerKey(GroupTimer.CLASSIC_SYNC, group.group_id), group.rebalance_timeout_ms)

    def join_response(
        self, member: ClassicMember, *, leader: str | None = None, skip_assignment: bool = False
    ) -> JoinGroupResponse:
        """Returns the member's response for the present generation; the leader's has all members with metadata.

        `leader` replaces the leader's id in the response.
        """
        generation = self._generation(leader)
        return generation.join_response(member.member_id, self._joined(), skip_assignment=skip_assignment)

    def _join_completions(self) -> Iterator[Completion]:
        """Returns the responses of all waiting JoinGroup requests. They show the present generation and members."""
        generation, members = self._generation(), list(self._joined())
        tokens = [member.join_token for member in self.group.members.values()]
        return (
            Completion(token, generation.join_response(member[0], members))
            for token, member in zip(tokens, members, strict=True)
            if token is not None
        )

    def _generation(self, leader: str | None = None) -> _Generation:
        group = self.group
        shown_leader = leader if leader is not None else group.leader or ""
        return _Generation(group.generation, group.protocol_type, group.protocol, shown_leader)

    def _joined(self) -> Iterator[_Joined]:
        return ((member.member_id, member.instance_id, member.protocols) for member in self.group.members.values())

    # Sync phase.

    def abort_syncs(self, error: Errors) -> None:
        """Fails all waiting SyncGroup requests, since the leader's assignments are no longer expected.

        The session timer of a member may have fired without effect while its request waited, so it starts again.
        Members keep their last assignment. Cooperative members continue with it, and a conversion to the consumer
        protocol needs it. Kafka drops it.
        """
        for member in self.group.members.values():
            member.is_assignment_withdrawn = True
        parked = self._unpark_syncs()
        completions = (Completion(token, SyncGroupResponse(error_code=error)) for token, _ in parked)
        self.result.bulk_completions.append(completions)

    def _unpark_syncs(self) -> list[tuple[Hashable, str]]:
        """Unparks all SyncGroup requests and restarts the session timers of their members.

        Returns the tokens, each with the member id.
        """
        waiting = [member for member in self.group.members.values() if member.sync_token is not None]
        self.reset_heartbeats(waiting)
        parked = [(member.sync_token, member.member_id) for member in waiting]
        for member in waiting:
            member.sync_token = None
        return parked

    def complete_generation(self, assignments: dict[str, bytes]) -> None:
        """Writes the leader's assignments and answers the waiting SyncGroup requests.

        The replay of the record makes the group Stable. If the record is too large for a batch, the requests fail with
        UNKNOWN_SERVER_ERROR and the group rebalances again, as in Kafka.
        """
        group = self.group
        assert group.state is GroupState.COMPLETING_REBALANCE, (
            f"G-8: generation {group.generation} of group {group.group_id} gets assignments in {group.state.value}"
        )
        surely_too_large = least_size_bytes(group, assignments) > MAX_BATCH_BYTES
        value = None if surely_too_large else group.to_value(self.now_ms, assignments)
        if value is None or is_too_large(group.group_id, value):
            self.abort_syncs(Errors.UNKNOWN_SERVER_ERROR)
            self.prepare_or_complete_join()
            return
        self.result.records.append(group_metadata_record(group.group_id, value))
        if not group.pending_sync:
            self.cancel(TimerKey(GroupTimer.CLASSIC_SYNC, group.group_id))
        protocol_type, protocol, parked = group.protocol_type, group.protocol, self._unpark_syncs()
        completions = (
            Completion(token, sync_response(protocol_type, protocol, assignments.get(member_id, b"")))
            for token, member_id in parked
        )
        self.result.bulk_completions.append(completions)

    def sync_timer_fired(self) -> None:
        """Removes members that joined this generation and have not sent SyncGroup."""
        group = self.group
        if group.state not in (GroupState.COMPLETING_REBALANCE, GroupState.STABLE) or not group.pending_sync:
            return
        for member_id in sorted(group.pending_sync):
            group.remove(member_id)
            self.cancel(heartbeat_timer(group.group_id, member_id))
        self.prepare()

    # Removing members.

    def heartbeat_timer_fired(self, member_id: str) -> None:
        """Removes the member after its session timeout, or forgets the pending member that never joined.

        A member with a parked request stays, except a new member.
        """
        group = self.group
        if member_id in group.pending_members:
            group.pending_members.remove(member_id)
            self.complete_join_if_all_joined()
            return
        member = group.members.get(member_id)
        if member is not None and not member.is_alive_without_heartbeat:
            self.remove(member)
            self.rebalance_after_removal()

    def remove(self, member: ClassicMember) -> None:
        """Removes the member. Its parked JoinGroup or SyncGroup, if any, fails with UNKNOWN_MEMBER_ID."""
        group = self.group
        self.complete(group.unpark_join(member), refused_join(Errors.UNKNOWN_MEMBER_ID, ""))
        token, member.sync_token = member.sync_token, None
        self.complete(token, SyncGroupResponse(error_code=Errors.UNKNOWN_MEMBER_ID))
        group.remove(member.member_id)
        self.cancel(heartbeat_timer(group.group_id, member.member_id))

    def rebalance_after_removal(self) -> None:
        if self.group.state is not GroupState.EMPTY:
            self.prepare_or_complete_join()

    def timer_fired(self, key: TimerKey) -> None:
        match key.kind:
            case GroupTimer.CLASSIC_HEARTBEAT:
                self.heartbeat_timer_fired(key.member_id)
            case GroupTimer.CLASSIC_JOIN:
                self.join_timer_fired()
            case GroupTimer.CLASSIC_SYNC:
                self.sync_timer_fired()
            case GroupTimer.CLASSIC_REBALANCE if not self.group.is_empty() and self.group.can_rebalance():
                self.prepare()

    # Effects.

    def reset_heartbeat(self, member: ClassicMember) -> None:
        self.schedule(heartbeat_timer(self.group.group_id, member.member_id), member.session_timeout_ms)

    def reset_heartbeats(self, members: Iterable[ClassicMember]) -> None:
        deadlines_ms = {member.member_id: self.now_ms + member.session_timeout_ms for member in members}
        if deadlines_ms:
            timers = MemberTimers(GroupTimer.CLASSIC_HEARTBEAT, self.group.group_id, deadlines_ms)
            self.result.timers.append(timers)

    def schedule(self, key: TimerKey, delay_ms: int) -> None:
        self.result.timers.append(Schedule(key, self.now_ms + delay_ms))

    def cancel(self, key: TimerKey) -> None:
        self.result.timers.append(Cancel(key))

    def complete(self, token: Hashable, response: object) -> None:
        if token is not None:
            self.result.completions.append(Completion(token, response))
