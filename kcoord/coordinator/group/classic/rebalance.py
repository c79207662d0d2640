# SPDX-License-Identifier: Apache-2.0
"""The join and sync barriers of a classic group: when a rebalance starts, when each phase ends, who is left behind.

Requests that wait for other members are tokens; a barrier that opens answers them as completions of the result.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeVar, cast

from kcoord.config import BrokerConfig
from kcoord.coordinator.group.classic.group import NO_GENERATION, ClassicGroup
from kcoord.coordinator.group.classic.member import ClassicMember
from kcoord.coordinator.group.group import GroupState, GroupTimer, heartbeat_timer
from kcoord.runtime.result import (
    MAX_BATCH_BYTES,
    Cancel,
    Completion,
    CoordinatorRecord,
    CoordinatorResult,
    Schedule,
    TimerKey,
)
from kcoord_protocol.errors import Errors
from kcoord_protocol.messages import GroupMetadataKey, JoinGroupResponse, SyncGroupResponse

if TYPE_CHECKING:
    from kcoord_protocol.messages import GroupMetadataValue

T = TypeVar("T")

NEW_MEMBER_JOIN_TIMEOUT_MS: Final = 5 * 60 * 1000
"""How long a member that has not been told its id may wait in a join phase; it is expected to ask again."""

_BOUND_BYTES: Final = 1024
"""More than a record or a member takes beside its names, subscription and assignment."""

GROUP_METADATA_VALUE_VERSION: Final = 3
"""The newest version without tagged fields, which Kafka 4.3.1 writes."""


def refused_join(error: Errors, member_id: str) -> JoinGroupResponse:
    """The answer to a JoinGroup that brings the member into no generation."""
    return JoinGroupResponse(error_code=error, generation_id=NO_GENERATION, protocol_name=None, member_id=member_id)


def sync_response(group: ClassicGroup, assignment: bytes) -> SyncGroupResponse:
    return SyncGroupResponse(protocol_type=group.protocol_type, protocol_name=group.protocol, assignment=assignment)


def is_too_large(value: GroupMetadataValue) -> bool:
    """Whether the record does not fit into a batch. Few groups are so large that it has to be made to know."""
    bound_bytes = _BOUND_BYTES
    for member in value.members:
        names = member.member_id, member.group_instance_id or "", member.client_id, member.client_host
        bound_bytes += len(member.subscription) + len(member.assignment) + _BOUND_BYTES + 4 * sum(map(len, names))
    if bound_bytes <= MAX_BATCH_BYTES:
        return False
    return len(value.encode(GROUP_METADATA_VALUE_VERSION)) + _BOUND_BYTES > MAX_BATCH_BYTES


def group_metadata_record(group_id: str, value: GroupMetadataValue) -> CoordinatorRecord:
    return CoordinatorRecord(GroupMetadataKey(group=group_id), value, GROUP_METADATA_VALUE_VERSION)


@dataclass(slots=True)
class Rebalance:
    """One operation on one classic group; what it brings about gathers in `result`."""

    config: BrokerConfig
    group: ClassicGroup
    now_ms: int
    result: CoordinatorResult[object] = field(default_factory=lambda: CoordinatorResult[object](None))

    def answer(self, response: T) -> CoordinatorResult[T]:
        """The result, with the response of the operation."""
        self.result.response = response
        return cast("CoordinatorResult[T]", self.result)

    # Join phase.

    def prepare_or_complete_join(self) -> None:
        """Start a rebalance; where one is under way, see whether its join phase can end."""
        if self.group.can_rebalance():
            self.prepare()
        else:
            self.complete_join_if_all_joined()

    def prepare(self) -> None:
        """A new rebalance: members that wait for an assignment must rejoin. A group that was empty waits for more
        members.
        """
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
        """The join phase ends early when nobody is missing, but not the initial delay of a group that was empty."""
        group = self.group
        if (
            group.state is GroupState.PREPARING_REBALANCE
            and group.previous_state is not GroupState.EMPTY
            and group.has_all_members_joined()
        ):
            self.complete_join()

    def join_timer_fired(self) -> None:
        """The join phase is over, unless the group was empty and members keep coming: then the delay is extended."""
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
        """The next generation begins with those who joined; static members stay even if they have not (KIP-345)."""
        group = self.group
        self.cancel(TimerKey(GroupTimer.CLASSIC_JOIN, group.group_id))
        for member in group.not_yet_rejoined():
            if not member.is_static:
                group.remove(member.member_id)
                self.cancel(heartbeat_timer(group.group_id, member.member_id))
        if group.members and not group.elect_joined_leader():
            # Only absent static members are left: wait until a session timeout removes them, or one comes back.
            self.schedule(TimerKey(GroupTimer.CLASSIC_JOIN, group.group_id), group.rebalance_timeout_ms)
            return
        group.begin_next_generation(self.now_ms)
        if not group.members:
            self.result.records.append(group_metadata_record(group.group_id, group.to_value(self.now_ms, {})))
            return
        for member in group.members.values():
            self.complete(group.unpark_join(member), self.join_response(member))
            self.reset_heartbeat(member)
            member.is_new = False
            group.pending_sync.add(member.member_id)
        self.schedule(TimerKey(GroupTimer.CLASSIC_SYNC, group.group_id), group.rebalance_timeout_ms)

    def join_response(
        self, member: ClassicMember, *, leader: str | None = None, skip_assignment: bool = False
    ) -> JoinGroupResponse:
        """The member's view of the present generation; the leader also sees the members, to assign or to know them."""
        group = self.group
        shown_leader = leader if leader is not None else group.leader or ""
        response = JoinGroupResponse(
            generation_id=group.generation,
            protocol_type=group.protocol_type,
            protocol_name=group.protocol,
            leader=shown_leader,
            skip_assignment=skip_assignment,
            member_id=member.member_id,
        )
        if member.member_id == shown_leader:
            response.members = [
                JoinGroupResponse.JoinGroupResponseMember(
                    member_id=other.member_id,
                    group_instance_id=other.instance_id,
                    metadata=other.metadata(group.protocol),
                )
                for other in group.members.values()
            ]
        return response

    # Sync phase.

    def abort_syncs(self, error: Errors) -> None:
        """The assignment that these members wait for will not come. The last one stays: cooperative members go on with
        it, which counts where the group is converted to the consumer protocol (Kafka forgets it).
        """
        for member in self.group.members.values():
            member.is_assignment_withdrawn = True
            token, member.sync_token = member.sync_token, None
            self.complete(token, SyncGroupResponse(error_code=error))

    def complete_generation(self, assignments: dict[str, bytes]) -> None:
        """The record makes the group Stable when it is replayed; all waiting members are answered once it is on disk.

        Where it is larger than a record may be, they are told so, and the group begins anew, as in Kafka.
        """
        group = self.group
        value = group.to_value(self.now_ms, assignments)
        if is_too_large(value):
            self.abort_syncs(Errors.UNKNOWN_SERVER_ERROR)
            self.prepare_or_complete_join()
            return
        self.result.records.append(group_metadata_record(group.group_id, value))
        if not group.pending_sync:
            self.cancel(TimerKey(GroupTimer.CLASSIC_SYNC, group.group_id))
        for member in group.members.values():
            token, member.sync_token = member.sync_token, None
            if token is not None:
                self.complete(token, sync_response(group, assignments.get(member.member_id, b"")))
                self.reset_heartbeat(member)

    def sync_timer_fired(self) -> None:
        """Members that joined this generation and never asked for their assignment are removed."""
        group = self.group
        if group.state not in (GroupState.COMPLETING_REBALANCE, GroupState.STABLE) or not group.pending_sync:
            return
        for member_id in sorted(group.pending_sync):
            group.remove(member_id)
            self.cancel(heartbeat_timer(group.group_id, member_id))
        self.prepare()

    # Members that go.

    def heartbeat_timer_fired(self, member_id: str) -> None:
        """Silent for its session timeout. A pending member never joined; one with a parked request lives on."""
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
        """The member goes; a JoinGroup of its that is still parked is told so, and may try again."""
        group = self.group
        self.complete(
            group.unpark_join(member),
            refused_join(Errors.UNKNOWN_MEMBER_ID, ""),
        )
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

    def schedule(self, key: TimerKey, delay_ms: int) -> None:
        self.result.timers.append(Schedule(key, self.now_ms + delay_ms))

    def cancel(self, key: TimerKey) -> None:
        self.result.timers.append(Cancel(key))

    def complete(self, token: Hashable, response: object) -> None:
        if token is not None:
            self.result.completions.append(Completion(token, response))
