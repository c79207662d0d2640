# SPDX-License-Identifier: Apache-2.0
"""A classic group: its members, its generation, and its state within a rebalance.

**States** (`_NEXT_STATES` has the legal transitions; `rebalance` makes them):

* Empty: there are no members, perhaps only committed offsets. The first JoinGroup begins PreparingRebalance.
* PreparingRebalance: the join phase. JoinGroup requests wait until all members have joined or the join timer fires.
* CompletingRebalance: the sync phase. The generation has grown by one, and the members wait for the assignments that
  the leader sends in SyncGroup.
* Stable: the generation has its assignments. Only the replay of the group metadata record leads here.

Every state with members goes back to PreparingRebalance if a member joins, leaves or is removed. A join phase that
ends without members makes the group Empty.

**Hard and soft state.** Only `persisted`, the last group metadata record, is hard state. Four events write it: the
leader has sent the assignments of a generation, the group becomes empty, a static member is replaced, or a consumer
group is downgraded. Everything else is soft, as in Kafka, and operations change it directly. After a crash the group is
in its last complete generation: Stable, or Empty without members. A rebalance that was under way is forgotten; its
members get errors and rejoin. The generation of such a rebalance was not written and is therefore used again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from kcoord.coordinator.group.classic import consumer_protocol
from kcoord.coordinator.group.classic.member import ClassicMember
from kcoord.coordinator.group.group import GroupState, GroupType
from kcoord_protocol.errors import Errors
from kcoord_protocol.messages import GroupMetadataValue

NO_GENERATION = -1

_NEXT_STATES = {
    GroupState.EMPTY: {GroupState.PREPARING_REBALANCE},
    GroupState.PREPARING_REBALANCE: {GroupState.COMPLETING_REBALANCE, GroupState.EMPTY},
    GroupState.COMPLETING_REBALANCE: {GroupState.STABLE, GroupState.PREPARING_REBALANCE},
    GroupState.STABLE: {GroupState.PREPARING_REBALANCE},
}


class ClassicGroup:
    """One group of the classic protocol, or a group that only holds committed offsets.

    `protocol_type` is "" for a group that only holds offsets (of a simple consumer).
    """

    __slots__ = (
        "_newest_protocols",
        "_state",
        "_supported",
        "awaiting_join",
        "generation",
        "group_id",
        "initial_remaining_ms",
        "leader",
        "member_added",
        "members",
        "pending_members",
        "pending_sync",
        "persisted",
        "previous_state",
        "protocol",
        "protocol_type",
        "state_timestamp_ms",
        "static_members",
        "subscribed_topics",
        "version",
    )

    type = GroupType.CLASSIC

    def __init__(self, group_id: str) -> None:
        self.group_id = group_id
        self.version: object = object()
        """Becomes another object whenever members, generation or state change (see `steady`)."""
        self.persisted: GroupMetadataValue | None = None
        self._state = self.previous_state = GroupState.EMPTY
        self.state_timestamp_ms = -1
        self.protocol_type = ""
        self.protocol: str | None = None
        self.leader: str | None = None
        self.generation = 0
        self.members: dict[str, ClassicMember] = {}
        self.static_members: dict[str, str] = {}
        self.pending_members: set[str] = set()
        """Member ids that were sent to clients with MEMBER_ID_REQUIRED and have not joined yet."""
        self.pending_sync: set[str] = set()
        """Members of the present generation that have not sent SyncGroup."""
        self.awaiting_join = 0
        """The number of members whose JoinGroup waits."""
        self.member_added = False
        """True if a member joined during the initial rebalance delay, which is then extended."""
        self.initial_remaining_ms = 0
        """By how much the initial rebalance delay may still be extended."""
        self.subscribed_topics: frozenset[str] | None = None
        """The topics to which the consumers of the group subscribe; None if their metadata cannot be read."""
        self._newest_protocols: list[tuple[str, bytes]] = []
        self._supported: Counter[str] = Counter()
        """Protocol name -> number of members that support it."""

    # State.

    @property
    def state(self) -> GroupState:
        return self._state

    def transition_to(self, state: GroupState, now_ms: int) -> None:
        assert state in _NEXT_STATES[self._state], (
            f"G-7: group {self.group_id} cannot go from {self._state.value} to {state.value}"
        )
        self.version = object()
        self.previous_state, self._state = self._state, state
        self.state_timestamp_ms = now_ms

    def is_empty(self) -> bool:
        return self._state is GroupState.EMPTY

    def is_simple(self) -> bool:
        """True if the group has never had members: it only holds offsets, or this request creates it.

        The group metadata record of such a group has no protocol type.
        """
        had_members = self.persisted is not None and bool(self.persisted.protocol_type)
        return not had_members and not self.members and not self.pending_members

    def can_rebalance(self) -> bool:
        return self._state is not GroupState.PREPARING_REBALANCE

    def uses_consumer_protocol(self) -> bool:
        return self.protocol_type == consumer_protocol.PROTOCOL_TYPE

    def is_subscribed_to(self, topic: str) -> bool:
        """A live consumer group whose subscriptions cannot be read counts as subscribed to everything."""
        if self.is_empty() or not self.uses_consumer_protocol():
            return False
        return self.subscribed_topics is None or topic in self.subscribed_topics

    @property
    def rebalance_timeout_ms(self) -> int:
        return max((member.rebalance_timeout_ms for member in self.members.values()), default=0)

    # Members.

    def add(self, member: ClassicMember) -> None:
        """Adds the member. The first member is the leader until the join phase elects one of the joined members."""
        self.version = object()
        if self.leader is None:
            self.leader = member.member_id
        self.pending_members.discard(member.member_id)
        self.members[member.member_id] = member
        if member.instance_id is not None:
            self.static_members[member.instance_id] = member.member_id
        member.protocols = self._shared(member.protocols)
        self._supported.update({name for name, _ in member.protocols})
        self.awaiting_join += member.is_awaiting_join

    def remove(self, member_id: str) -> ClassicMember | None:
        self.version = object()
        self.pending_members.discard(member_id)
        self.pending_sync.discard(member_id)
        member = self.members.pop(member_id, None)
        if member is None:
            return None
        # A pending dynamic member may have joined with the same instance id meanwhile (`ClassicJoin.run`).
        if member.instance_id is not None and self.static_members.get(member.instance_id) == member_id:
            del self.static_members[member.instance_id]
        self._supported.subtract({name for name, _ in member.protocols})
        self.awaiting_join -= member.is_awaiting_join
        if self.leader == member_id:
            self.leader = next(iter(self.members), None)
        if not self.members:
            self._newest_protocols = []
        return member

    def set_protocols(self, member: ClassicMember, protocols: list[tuple[str, bytes]]) -> None:
        self._supported.subtract({name for name, _ in member.protocols})
        member.protocols = self._shared(protocols)
        self._supported.update({name for name, _ in protocols})

    def _shared(self, protocols: list[tuple[str, bytes]]) -> list[tuple[str, bytes]]:
        """Returns the newest member's protocols if they are equal. So most members of a large group share one list.

        This saves memory, and makes reading the protocols of all members much faster.
        """
        if protocols != self._newest_protocols:
            self._newest_protocols = protocols
        return self._newest_protocols

    def park_join(self, member: ClassicMember, token: object) -> None:
        self.awaiting_join += not member.is_awaiting_join
        member.join_token = token

    def unpark_join(self, member: ClassicMember) -> object:
        """Unparks the member's JoinGroup and returns its token; None if none was parked."""
        token, member.join_token = member.join_token, None
        self.awaiting_join -= token is not None
        return token

    def unpark_joins(self) -> None:
        """Unparks the JoinGroup requests of all members."""
        for member in self.members.values():
            member.join_token = None
        self.awaiting_join = 0

    def replace_static(self, instance_id: str, new_member_id: str) -> ClassicMember:
        """Gives the holder of the instance id a new member id and returns it; the member order stays (KIP-345)."""
        self.version = object()
        old_member_id = self.static_members[instance_id]
        members = {}
        for member_id, member in self.members.items():
            members[new_member_id if member_id == old_member_id else member_id] = member
        self.members = members
        member = members[new_member_id]
        member.member_id = new_member_id
        self.static_members[instance_id] = new_member_id
        if self.leader == old_member_id:
            self.leader = new_member_id
        if old_member_id in self.pending_sync:
            self.pending_sync.remove(old_member_id)
            self.pending_sync.add(new_member_id)
        return member

    def error_of_member(self, member_id: str, instance_id: str | None) -> Errors:
        """Returns the error for a request of that member: FENCED_INSTANCE_ID, UNKNOWN_MEMBER_ID or NONE."""
        if instance_id is not None:
            holder = self.static_members.get(instance_id)
            if holder is None:
                return Errors.UNKNOWN_MEMBER_ID
            if holder != member_id:
                return Errors.FENCED_INSTANCE_ID
        return Errors.NONE if member_id in self.members else Errors.UNKNOWN_MEMBER_ID

    # Protocols.

    def candidate_protocols(self) -> set[str]:
        """Returns the protocols that every member supports."""
        return {name for name, count in self._supported.items() if count == len(self.members)}

    def supports_protocols(self, protocol_type: str, names: set[str]) -> bool:
        if not self.members:
            return bool(protocol_type) and bool(names)
        return protocol_type == self.protocol_type and not names.isdisjoint(self.candidate_protocols())

    def select_protocol(self) -> str:
        """Returns the candidate with the most votes. Each member votes once; the member order decides ties."""
        candidates = self.candidate_protocols()
        if len(candidates) == 1:
            return candidates.pop()
        votes = Counter(member.vote(candidates) for member in self.members.values())
        return max(votes, key=lambda name: votes[name])

    # Phases.

    def has_all_members_joined(self) -> bool:
        return self.awaiting_join == len(self.members) and not self.pending_members

    def not_yet_rejoined(self) -> Iterator[ClassicMember]:
        return (member for member in list(self.members.values()) if not member.is_awaiting_join)

    def elect_joined_leader(self) -> bool:
        """Keeps the leader if it joined, else elects the first member that did. Returns False if none joined."""
        leader = self.members.get(self.leader or "")
        if leader is not None and leader.is_awaiting_join:
            return True
        joined = next((member.member_id for member in self.members.values() if member.is_awaiting_join), None)
        if joined is not None:
            self.leader = joined
        return joined is not None

    def begin_next_generation(self, now_ms: int) -> None:
        """Ends the join phase: raises the generation, and selects the protocol of the present members."""
        self.generation += 1
        # Without this, the names that clients have ever chosen would stay.
        self._supported = +self._supported
        if self.members:
            self.protocol = self.select_protocol()
            self.subscribed_topics = self._read_subscriptions()
            self.transition_to(GroupState.COMPLETING_REBALANCE, now_ms)
        else:
            self.protocol = None
            self.subscribed_topics = frozenset()
            self.transition_to(GroupState.EMPTY, now_ms)

    def _read_subscriptions(self) -> frozenset[str] | None:
        """Returns the topics of all members (KIP-496); None if the metadata of a member cannot be read."""
        if not self.uses_consumer_protocol():
            return frozenset()
        # Most members have the same subscription.
        return consumer_protocol.read_all_topics({member.metadata(self.protocol) for member in self.members.values()})

    # Hard state.

    def to_value(self, now_ms: int, assignments: dict[str, bytes]) -> GroupMetadataValue:
        """Returns the value of the present group's metadata record, with these assignments by member id."""
        return GroupMetadataValue(
            protocol_type=self.protocol_type,
            generation=self.generation,
            protocol=self.protocol,
            leader=self.leader,
            current_state_timestamp=self.state_timestamp_ms if self.state_timestamp_ms >= 0 else now_ms,
            members=[
                GroupMetadataValue.MemberMetadata(
                    member_id=member.member_id,
                    group_instance_id=member.instance_id,
                    client_id=member.client_id,
                    client_host=member.client_host,
                    rebalance_timeout=member.rebalance_timeout_ms,
                    session_timeout=member.session_timeout_ms,
                    subscription=member.metadata(self.protocol),
                    assignment=assignments.get(member.member_id, b""),
                )
                for member in self.members.values()
            ],
        )

    def apply(self, value: GroupMetadataValue) -> None:
        """Replays a group metadata record: the group becomes Stable, or Empty if the record has no members.

        A present member that the record shows as it is keeps what the record does not contain: its other protocols and
        its parked requests. If it differs, the record is one of a log that is loaded, and the member is from an earlier
        record.
        """
        self.version = object()
        self.persisted = value
        self.protocol_type = value.protocol_type
        self.generation = value.generation
        self.protocol = value.protocol
        self.leader = value.leader
        self.state_timestamp_ms = value.current_state_timestamp
        # A new generation has the present members. Adding 10,000 members again would take 10 ms.
        is_new_generation = self._state is GroupState.COMPLETING_REBALANCE
        if not is_new_generation or [stored.member_id for stored in value.members] != list(self.members):
            self._replace_members(value)
        for stored in value.members:
            member = self.members[stored.member_id]
            member.assignment = stored.assignment
            member.is_assignment_withdrawn = False
        self.static_members = {
            member.instance_id: member.member_id for member in self.members.values() if member.instance_id is not None
        }
        self.leader = value.leader
        self._state = GroupState.STABLE if self.members else GroupState.EMPTY
        self.subscribed_topics = self._read_subscriptions()

    def _replace_members(self, value: GroupMetadataValue) -> None:
        present, self.members = self.members, {}
        self.awaiting_join = 0
        self._supported.clear()
        for record in value.members:
            stored = ClassicMember(
                record.member_id,
                record.group_instance_id,
                record.client_id,
                record.client_host,
                record.rebalance_timeout if record.rebalance_timeout >= 0 else record.session_timeout,
                record.session_timeout,
                [(value.protocol or "", record.subscription)],
            )
            member = present.get(record.member_id)
            self.add(member if member is not None and member.is_shown_by(stored) else stored)
