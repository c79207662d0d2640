# SPDX-License-Identifier: Apache-2.0
"""A classic group: its members, its generation and where it stands between two generations.

Hard is only `persisted`, the last group metadata record: written when a generation's assignment is complete, when the
group becomes empty, and when a static member is replaced. Everything else is soft, as in Kafka: after a restart the
group is as its last complete generation left it, and members that were further on rejoin.
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
    """`protocol_type` is "" for a group that exists by its offsets alone (a simple consumer)."""

    __slots__ = (
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
        """Another object after every change of members, generation or state (see `steady`)."""
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
        """Member ids that were handed out (MEMBER_ID_REQUIRED) and have not joined yet."""
        self.pending_sync: set[str] = set()
        """Members of the present generation that have not sent SyncGroup."""
        self.awaiting_join = 0
        self.member_added = False
        """Whether a member joined during the initial rebalance delay, which then is extended."""
        self.initial_remaining_ms = 0
        self.subscribed_topics: frozenset[str] | None = None
        """What the members of a consumer group subscribe to; None where their metadata cannot be read."""
        self._supported: Counter[str] = Counter()

    # State.

    @property
    def state(self) -> GroupState:
        return self._state

    def transition_to(self, state: GroupState, now_ms: int) -> None:
        assert state in _NEXT_STATES[self._state], f"{self.group_id}: {self._state} -> {state}"
        self.version = object()
        self.previous_state, self._state = self._state, state
        self.state_timestamp_ms = now_ms

    def is_empty(self) -> bool:
        return self._state is GroupState.EMPTY

    def is_simple(self) -> bool:
        """Whether the group has never had members: it exists by its offsets, or it is being made. A record of it
        says so by having no protocol type.
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
        """The first member decides the protocol type and leads until the first leader is elected among those that
        joined.
        """
        self.version = object()
        if self.leader is None:
            self.leader = member.member_id
        self.pending_members.discard(member.member_id)
        self.members[member.member_id] = member
        if member.instance_id is not None:
            self.static_members[member.instance_id] = member.member_id
        self._supported.update({name for name, _ in member.protocols})
        self.awaiting_join += member.is_awaiting_join

    def remove(self, member_id: str) -> ClassicMember | None:
        self.version = object()
        self.pending_members.discard(member_id)
        self.pending_sync.discard(member_id)
        member = self.members.pop(member_id, None)
        if member is None:
            return None
        # A dynamic member may have come in between with the same instance id (`ClassicJoin.run`).
        if member.instance_id is not None and self.static_members.get(member.instance_id) == member_id:
            del self.static_members[member.instance_id]
        self._supported.subtract({name for name, _ in member.protocols})
        self.awaiting_join -= member.is_awaiting_join
        if self.leader == member_id:
            self.leader = next(iter(self.members), None)
        return member

    def set_protocols(self, member: ClassicMember, protocols: list[tuple[str, bytes]]) -> None:
        self._supported.subtract({name for name, _ in member.protocols})
        member.protocols = protocols
        self._supported.update({name for name, _ in protocols})

    def park_join(self, member: ClassicMember, token: object) -> None:
        self.awaiting_join += not member.is_awaiting_join
        member.join_token = token

    def unpark_join(self, member: ClassicMember) -> object:
        """The token of the parked JoinGroup, which is parked no longer."""
        token, member.join_token = member.join_token, None
        self.awaiting_join -= token is not None
        return token

    def replace_static(self, instance_id: str, new_member_id: str) -> ClassicMember:
        """The holder of the instance id under a new member id, in its place (KIP-345)."""
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
        """Why the request of that member is refused: another member has its instance id, or it is none."""
        if instance_id is not None:
            holder = self.static_members.get(instance_id)
            if holder is None:
                return Errors.UNKNOWN_MEMBER_ID
            if holder != member_id:
                return Errors.FENCED_INSTANCE_ID
        return Errors.NONE if member_id in self.members else Errors.UNKNOWN_MEMBER_ID

    # Protocols.

    def candidate_protocols(self) -> set[str]:
        """The protocols that every member supports."""
        return {name for name, count in self._supported.items() if count == len(self.members)}

    def supports_protocols(self, protocol_type: str, names: set[str]) -> bool:
        if not self.members:
            return bool(protocol_type) and bool(names)
        return protocol_type == self.protocol_type and not names.isdisjoint(self.candidate_protocols())

    def select_protocol(self) -> str:
        """Every member votes for the candidate it prefers; the member order decides ties."""
        candidates = self.candidate_protocols()
        votes = Counter(member.vote(candidates) for member in self.members.values())
        return max(votes, key=lambda name: votes[name])

    # Phases.

    def has_all_members_joined(self) -> bool:
        return self.awaiting_join == len(self.members) and not self.pending_members

    def not_yet_rejoined(self) -> Iterator[ClassicMember]:
        return (member for member in list(self.members.values()) if not member.is_awaiting_join)

    def elect_joined_leader(self) -> bool:
        """Keep the leader if it joined, else take the first member that did; false where none did."""
        leader = self.members.get(self.leader or "")
        if leader is not None and leader.is_awaiting_join:
            return True
        joined = next((member.member_id for member in self.members.values() if member.is_awaiting_join), None)
        if joined is not None:
            self.leader = joined
        return joined is not None

    def begin_next_generation(self, now_ms: int) -> None:
        """The join phase ended with these members."""
        self.generation += 1
        if self.members:
            self.protocol = self.select_protocol()
            self.subscribed_topics = self._read_subscriptions()
            self.transition_to(GroupState.COMPLETING_REBALANCE, now_ms)
        else:
            self.protocol = None
            self.subscribed_topics = frozenset()
            self.transition_to(GroupState.EMPTY, now_ms)

    def _read_subscriptions(self) -> frozenset[str] | None:
        """KIP-496: the union of the members' topics, None where one of them cannot be read."""
        if not self.uses_consumer_protocol():
            return frozenset()
        topics: set[str] = set()
        for member in self.members.values():
            subscribed = consumer_protocol.read_topics(member.metadata(self.protocol))
            if subscribed is None:
                return None
            topics.update(subscribed)
        return frozenset(topics)

    # Hard state.

    def to_value(self, now_ms: int, assignments: dict[str, bytes]) -> GroupMetadataValue:
        """The group metadata record of the group as it is, with these assignments by member id."""
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
        """Replay: the generation is complete (Stable), or the group has become Empty.

        A member that is here already keeps what the record does not hold: its other protocols and its parked requests.
        """
        self.version = object()
        self.persisted = value
        self.protocol_type = value.protocol_type
        self.generation = value.generation
        self.protocol = value.protocol
        self.leader = value.leader
        self.state_timestamp_ms = value.current_state_timestamp
        known, self.members = self.members, {}
        self.static_members = {}
        self.awaiting_join = 0
        self._supported.clear()
        for stored in value.members:
            member = known.get(stored.member_id) or ClassicMember(
                stored.member_id,
                stored.group_instance_id,
                stored.client_id,
                stored.client_host,
                stored.rebalance_timeout if stored.rebalance_timeout >= 0 else stored.session_timeout,
                stored.session_timeout,
                [(value.protocol or "", stored.subscription)],
            )
            member.assignment = stored.assignment
            member.is_assignment_withdrawn = False
            self.add(member)
        self.leader = value.leader
        self._state = GroupState.STABLE if self.members else GroupState.EMPTY
        self.subscribed_topics = self._read_subscriptions()
