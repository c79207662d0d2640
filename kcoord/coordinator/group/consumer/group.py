# SPDX-License-Identifier: Apache-2.0
"""A consumer group and its members as their records describe them, and the settings that its configs give it.

**Three epochs.** They explain every step of the protocol. Neither of the first two falls during the life of a group:

* The *group epoch* grows if the subscribed topics, their metadata, the members or (Kafka 4.4) the preferred assignor
  change. A member that joins with a subscription, leaves or is fenced therefore raises it.
* The *assignment epoch* is the group epoch for which the target assignment was computed. It is never above the group
  epoch. While it is lower, the group is Assigning, and a heartbeat computes the next target.
* The *member epoch* is the assignment epoch that a member has reached. While it is lower, the member is reconciling:
  it still has to revoke partitions. A static member that has left but will return has -2, and starts from 0 again.

The state of the group follows from the epochs (`ConsumerGroup.state`) and is never stored.

**States of a member** (`MemberState`; `assignment.CurrentAssignmentBuilder` makes the transitions):

* STABLE: the member owns what its epoch gives it. A newer target moves it to one of the three states.
* UNREVOKED_PARTITIONS: the member owns partitions that the target does not give it. They are in `pending_revocation`,
  and the member keeps its epoch until a heartbeat no longer lists them as owned. A rebalance timer removes a member
  that takes too long.
* UNRELEASED_PARTITIONS: the member has the epoch of the target, but other members still own a part of its target.
  Each of its heartbeats takes what has become free meanwhile.

A partition in `assigned` or `pending_revocation` is owned. It becomes free only if its owner revokes it, leaves or is
removed. `owners_of` is asked before a partition is given to a member, so no partition has two owners.

**What changes a group.** Only `replay` changes it, record by record, both live and while the shard loads; fields marked
as soft are the exception. Members are values: an update is a changed copy. The runtime runs one operation of a shard
at a time and replays its records before the next operation starts. It sends the response after the log has the records.
After a crash, the log holds all records of an operation or none, so a group is never between two steps.

**Derived from the members**, so that a heartbeat never walks the group: the owner of each partition, the holder of each
instance id, and how many members have a topic name, a regular expression, an assignor, or an offer to compute.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, KeysView, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final, NamedTuple, TypeAlias, TypeVar

from kcoord.config import BrokerConfig
from kcoord.coordinator.group.consumer.client_assignors import (
    CLASSIC_VERSION,
    ClientAssignor,
    ClientComputation,
    Offer,
    OfferKind,
)
from kcoord.coordinator.group.group import GroupState, GroupType
from kcoord.metadata.delta import MetadataChange
from kcoord.metadata.image import GROUP_RESOURCE, MetadataImage

JOIN_GROUP_EPOCH = 0
"""The member epoch of a heartbeat that joins (KIP-848 ConsumerGroupHeartbeat API)."""
LEAVE_GROUP_MEMBER_EPOCH = -1
"""The member epoch of a heartbeat that leaves for good."""
LEAVE_GROUP_STATIC_MEMBER_EPOCH = -2
"""The member epoch of a static member that leaves and will return; also the epoch it keeps meanwhile."""

Assignment: TypeAlias = Mapping[bytes, frozenset[int]]
"""Topic id -> partitions. Topics of one size may share a set, and what is made for one of them is then for all.

A member that gets all of 100,000 partitions in one turn of the event loop would be too slow otherwise.
"""
EpochAssignment: TypeAlias = Mapping[bytes, Mapping[int, int]]
"""Topic id -> partition -> the group epoch at which the partition was assigned to the member. Topics may share this."""


class TargetMetadata(NamedTuple):
    """What a client-side assignor adds to the partitions of a member: an error above 0, and bytes with their version.

    Version -1 means that there are no bytes, or that they are the user data of a classic member.
    """

    error: int = 0
    version: int = CLASSIC_VERSION
    data: bytes = b""

    @property
    def user_data(self) -> bytes:
        """What a classic member gets. Its predecessor may have been of the consumer protocol, with another version."""
        return self.data if self.version == CLASSIC_VERSION else b""


NO_METADATA: Final = TargetMetadata()
"""The metadata of every assignment that a server-side assignor makes."""


class MemberState(IntEnum):
    """A member's progress towards its target assignment; the numbers are those of the current assignment record."""

    STABLE = 0
    UNREVOKED_PARTITIONS = 1
    UNRELEASED_PARTITIONS = 2
    UNKNOWN = 127


@dataclass(slots=True)
class ClassicMemberMetadata:
    """Additional fields of a member that speaks the classic protocol; `protocols` are (name, metadata)."""

    session_timeout_ms: int
    protocols: tuple[tuple[str, bytes], ...]


@dataclass(slots=True)
class ConsumerGroupMember:
    """Subscription (member metadata record) and progress (current assignment record) of a member.

    `subscribed_topic_names` is sorted and free of duplicates. `subscribed_topic_regex` is None or "" if the
    member subscribes to no regular expression. A partition in `assigned` or `pending_revocation` is owned.
    """

    member_id: str
    instance_id: str | None = None
    rack_id: str | None = None
    client_id: str = ""
    client_host: str = ""
    subscribed_topic_names: tuple[str, ...] = ()
    subscribed_topic_regex: str | None = None
    server_assignor: str | None = None
    client_assignors: tuple[ClientAssignor, ...] = ()
    """The client-side assignors that the member has, the best first. A member with any has no server assignor."""
    rebalance_timeout_ms: int = -1
    classic: ClassicMemberMetadata | None = None
    """Set for a member that speaks the classic protocol (KIP-848 Online Migration)."""
    member_epoch: int = 0
    previous_member_epoch: int = 0
    state: MemberState = MemberState.STABLE
    assigned: EpochAssignment = field(default_factory=dict)
    pending_revocation: EpochAssignment = field(default_factory=dict)
    metadata: TargetMetadata = NO_METADATA
    """The metadata of the target that the member has reached."""

    def is_reconciled_to(self, assignment_epoch: int) -> bool:
        return self.state is MemberState.STABLE and self.member_epoch == assignment_epoch

    def with_progress(
        self,
        state: MemberState,
        member_epoch: int,
        assigned: EpochAssignment,
        pending_revocation: EpochAssignment,
        metadata: TargetMetadata,
    ) -> ConsumerGroupMember:
        """Returns a copy with new progress. The present member epoch becomes its previous epoch."""
        return self.with_assignment(state, member_epoch, self.member_epoch, assigned, pending_revocation, metadata)

    def with_assignment(
        self,
        state: MemberState,
        member_epoch: int,
        previous_member_epoch: int,
        assigned: EpochAssignment,
        pending_revocation: EpochAssignment,
        metadata: TargetMetadata,
    ) -> ConsumerGroupMember:
        """Returns a copy with another current assignment and the same subscription.

        Each record of a current assignment needs one. `replace` would take several times as long.
        """
        return ConsumerGroupMember(
            self.member_id,
            self.instance_id,
            self.rack_id,
            self.client_id,
            self.client_host,
            self.subscribed_topic_names,
            self.subscribed_topic_regex,
            self.server_assignor,
            self.client_assignors,
            self.rebalance_timeout_ms,
            self.classic,
            member_epoch,
            previous_member_epoch,
            state,
            assigned,
            pending_revocation,
            metadata,
        )

    def with_subscription(
        self,
        *,
        instance_id: str | None,
        rack_id: str | None,
        client_id: str,
        client_host: str,
        subscribed_topic_names: tuple[str, ...],
        subscribed_topic_regex: str | None,
        server_assignor: str | None,
        client_assignors: tuple[ClientAssignor, ...],
        rebalance_timeout_ms: int,
        classic: ClassicMemberMetadata | None,
    ) -> ConsumerGroupMember:
        """Returns a copy with another subscription and the same current assignment, like `with_assignment`."""
        return ConsumerGroupMember(
            self.member_id,
            instance_id,
            rack_id,
            client_id,
            client_host,
            subscribed_topic_names,
            subscribed_topic_regex,
            server_assignor,
            client_assignors,
            rebalance_timeout_ms,
            classic,
            self.member_epoch,
            self.previous_member_epoch,
            self.state,
            self.assigned,
            self.pending_revocation,
            self.metadata,
        )

    def has_subscription_of(self, other: ConsumerGroupMember) -> bool:
        """True if both members share all that the group counts: topics, assignors and what they offer to compute.

        False only means that they may differ.
        """
        return (
            self.subscribed_topic_names is other.subscribed_topic_names
            and self.subscribed_topic_regex is other.subscribed_topic_regex
            and self.server_assignor is other.server_assignor
            and self.client_assignors is other.client_assignors
            and self.classic is other.classic
            and (not self.client_assignors or self.member_epoch == other.member_epoch)
        )

    def assignment_epoch_of(self, topic_id: bytes, partition: int) -> int | None:
        """Returns the epoch since which the member owns the partition; None if it does not own it."""
        for owned in (self.assigned, self.pending_revocation):
            epoch = owned.get(topic_id, {}).get(partition)
            if epoch is not None:
                return epoch
        return None


_FIRST_PAUSE_MS: Final = 2_000
_LONGEST_PAUSE_MS: Final = 60_000
MAX_FAILURES: Final = 1_000
"""The highest number of failures in a row that is counted."""
_NO_CONFIGS: Final[Mapping[str, str]] = {}
_NONE_RESOLVED: Final[Mapping[str, frozenset[str]]] = {}


class GroupSettings:
    """Timing and switches of one group: its own config if it has one, else the broker's.

    Each value is read on demand, so that a changed config takes effect with the next heartbeat.
    """

    __slots__ = ("_broker", "_own")

    def __init__(self, broker: BrokerConfig, image: MetadataImage, group_id: str) -> None:
        self._broker = broker
        # The same as `MetadataImage.group_configs`, without a call: this runs for every heartbeat.
        self._own = image.configs.get((GROUP_RESOURCE, group_id), _NO_CONFIGS)

    @property
    def session_timeout_ms(self) -> int:
        broker = self._broker
        own = self._own.get("consumer.session.timeout.ms")
        if own is None:
            return broker.group_consumer_session_timeout_ms
        return _clamp(own, broker.group_consumer_min_session_timeout_ms, broker.group_consumer_max_session_timeout_ms)

    @property
    def heartbeat_interval_ms(self) -> int:
        broker = self._broker
        own = self._own.get("consumer.heartbeat.interval.ms")
        if own is None:
            return broker.group_consumer_heartbeat_interval_ms
        return _clamp(
            own, broker.group_consumer_min_heartbeat_interval_ms, broker.group_consumer_max_heartbeat_interval_ms
        )

    @property
    def assignment_interval_ms(self) -> int:
        broker = self._broker
        own = self._own.get("consumer.assignment.interval.ms")
        if own is None:
            return broker.group_consumer_assignment_interval_ms
        return _clamp(
            own, broker.group_consumer_min_assignment_interval_ms, broker.group_consumer_max_assignment_interval_ms
        )

    @property
    def assignor_offload_enable(self) -> bool:
        """True if a target assignment that takes long may be computed in the background."""
        own = self._own.get("consumer.assignor.offload.enable")
        return self._broker.group_consumer_assignor_offload_enable if own is None else own.strip().lower() == "true"

    @property
    def client_assignor_falls_back(self) -> bool:
        """True if a server-side assignor computes the target after all able members have failed to."""
        own = self._own.get("kcoord.client.assignor.fallback")
        return (self._broker.kcoord_client_assignor_fallback if own is None else own) == "server"


def _clamp(value: str, lowest: int, highest: int) -> int:
    return max(lowest, min(int(value), highest))


@dataclass(slots=True)
class ResolvedRegularExpression:
    """The topics that a regular expression matched at `version` of the metadata image."""

    topics: frozenset[str]
    version: int
    timestamp_ms: int


@dataclass(slots=True, frozen=True)
class FailedComputations:
    """How often an assignor failed in a row for a group, why, and when it is asked again.

    It is an assignor of one's own on the broker, or a client-side assignor.
    """

    assignor: str
    count: int
    reason: str
    retry_at_ms: int

    @classmethod
    def after(cls, earlier: FailedComputations | None, assignor: str, reason: str, now_ms: int) -> FailedComputations:
        """Counts one more failure. The pause doubles with each failure of the same assignor."""
        count = 1
        if earlier is not None and earlier.assignor == assignor:
            count = min(earlier.count + 1, MAX_FAILURES)
        return cls(assignor, count, reason, now_ms + pause_ms(count))


def pause_ms(failures: int) -> int:
    """Returns the pause after the n-th failure in a row: 2 s, then twice as long each time, at most a minute."""
    return min(_FIRST_PAUSE_MS << min(failures - 1, MAX_FAILURES), _LONGEST_PAUSE_MS)


class ConsumerGroup:
    """Hard state of one group of the consumer protocol, with the counts derived from its members."""

    __slots__ = (
        "_assignor_counts",
        "_name_counts",
        "_offers",
        "_owners",
        "_regex_counts",
        "_sole_owners",
        "_stable_members",
        "asked_to_rejoin",
        "assigned_by",
        "assignment_epoch",
        "assignment_timestamp_ms",
        "client_assignor_bytes",
        "client_computation",
        "completed_epoch",
        "creation_time_ms",
        "empty_since_ms",
        "failed_computations",
        "group_epoch",
        "group_id",
        "members",
        "metadata_hash",
        "metadata_stale",
        "noted_changes",
        "regex_refreshed_at_ms",
        "regex_stale",
        "resolved_regexes",
        "static_members",
        "target_assignment",
        "target_assignor",
        "target_metadata",
        "version",
    )

    type = GroupType.CONSUMER
    protocol_type = "consumer"

    def __init__(self, group_id: str) -> None:
        self.group_id = group_id
        self.version: object = object()
        """Becomes another object whenever a record is replayed into the group (see `steady`)."""
        self.group_epoch = 0
        self.metadata_hash = 0
        self.creation_time_ms = -1
        self.empty_since_ms = -1
        """When the last member left; -1 while there are members, and if the log does not say."""
        self.members: dict[str, ConsumerGroupMember] = {}
        self.static_members: dict[str, str] = {}
        self.target_assignment: dict[str, Assignment] = {}
        self.assignment_epoch = 0
        self.assignment_timestamp_ms = 0
        self.target_metadata: dict[str, TargetMetadata] = {}
        """Member id -> metadata of its target; only metadata that differs from NO_METADATA."""
        self.target_assignor = ""
        """The client-side assignor that computed the target assignment; empty if the broker did."""
        self.assigned_by = ""
        """The id of the member that computed the target assignment; empty if the broker did."""
        self.resolved_regexes: dict[str, ResolvedRegularExpression] = {}
        self._owners: dict[bytes, dict[int, str]] = {}
        self._sole_owners: dict[bytes, str] = {}
        """Topic id -> the id of its only owner. The topic moves to `_owners` when somebody asks for the owners of its
        partitions, so a first join costs nothing for each partition.
        """
        self._name_counts: Counter[str] = Counter()
        self._regex_counts: Counter[str] = Counter()
        self._stable_members: Counter[int] = Counter()
        """Member epoch -> number of members in state STABLE."""
        self.completed_epoch = 0
        """Soft: the last group epoch that all members have reached at the same time, for metrics."""
        self._assignor_counts: Counter[str] = Counter()
        self._offers: Counter[Offer | None] = Counter()
        """What members offer to compute -> number of members; None stands for members without client-side assignors."""
        self.client_assignor_bytes = 0
        """The sum of the metadata that members give to client-side assignors."""
        self.client_computation: ClientComputation | None = None
        """Soft: which member computes the target now, and which members failed to."""
        self.failed_computations: FailedComputations | None = None
        """Soft: the computations of the target that failed since the last one that did not."""
        # Soft state: True makes the next heartbeat look again, which is always safe.
        self.metadata_stale = True
        self.regex_stale = True
        self.noted_changes = 0
        """The number of changes of the metadata, as the shard counts them, that the group knows."""
        self.regex_refreshed_at_ms = -1
        self.asked_to_rejoin: set[str] = set()
        """Soft: ids of classic members whose join timer is running."""

    @property
    def state(self) -> GroupState:
        """The group state of KIP-848, derived from the epochs."""
        if not self.members:
            return GroupState.EMPTY
        if self.group_epoch > self.assignment_epoch:
            return GroupState.ASSIGNING
        return GroupState.STABLE if self.is_converged else GroupState.RECONCILING

    @property
    def is_converged(self) -> bool:
        """True if there are members and all have reached the target assignment of the group epoch."""
        return (
            self.group_epoch == self.assignment_epoch
            and self._stable_members[self.assignment_epoch] == len(self.members) > 0
        )

    def is_empty(self) -> bool:
        return not self.members

    @property
    def is_homogeneous(self) -> bool:
        """True if all members subscribe to the same topics, all by name."""
        size = len(self.members)
        return not self._regex_counts and all(count == size for count in self._name_counts.values())

    def is_steady_for(self, member: ConsumerGroupMember) -> bool:
        """True if a heartbeat of the member changes nothing: all epochs are equal, and nothing is to be looked up."""
        return (
            self.group_epoch == self.assignment_epoch
            and member.classic is None
            and member.is_reconciled_to(self.assignment_epoch)
            and not self.metadata_stale
            and not self._regex_counts
        )

    def is_subscribed_to(self, topic: str) -> bool:
        return self._name_counts[topic] > 0 or any(
            topic in self.resolved_regexes[regex].topics
            for regex in self._regex_counts
            if regex in self.resolved_regexes
        )

    def are_regexes_resolved(self) -> bool:
        """True if every regular expression of a member has been resolved to topics."""
        return self._regex_counts.keys() <= self.resolved_regexes.keys()

    def owners_of(self, topic_id: bytes) -> Mapping[int, str]:
        """Returns partition -> id of the member that owns it; a member owns a partition until it has revoked it."""
        return self._owners_by_partition(topic_id)

    def note_metadata(self, change: MetadataChange) -> None:
        """Makes the next heartbeat look again if the group depends on what has changed."""
        if change.come_or_gone:
            self.regex_stale = True
        has_changed = change.racks_changed or not change.changed.isdisjoint(self._name_counts)
        if not has_changed and self._regex_counts:
            has_changed = not change.changed.isdisjoint(self.subscribed_topic_names())
        if has_changed:
            self.metadata_stale = True

    def static_member(self, instance_id: str) -> ConsumerGroupMember | None:
        member_id = self.static_members.get(instance_id)
        return None if member_id is None else self.members.get(member_id)

    def target_assignment_of(self, member_id: str) -> Assignment:
        return self.target_assignment.get(member_id, {})

    def waits_for_release(self, member: ConsumerGroupMember) -> bool:
        """True if another member still owns a partition of the member's target."""
        return any(
            not self.owners_of(topic_id).keys().isdisjoint(partitions.difference(member.assigned.get(topic_id, {})))
            for topic_id, partitions in self.target_assignment_of(member.member_id).items()
        )

    def supports_classic_protocols(self, protocol_type: str, names: set[str]) -> bool:
        """True if a classic member with these protocols shares one of them with all classic members of the group."""
        if protocol_type != self.protocol_type or not names:
            return False
        for member in self.members.values():
            if member.classic is not None:
                names = names & {name for name, _ in member.classic.protocols}
        return bool(names)

    def regex_subscribers(self, regex: str) -> int:
        return self._regex_counts[regex]

    @property
    def regexes(self) -> KeysView[str]:
        """The regular expressions that at least one member subscribes to."""
        return self._regex_counts.keys()

    # The only changes of members; called from the shard's replay.

    def put_member(self, member: ConsumerGroupMember) -> None:
        """Adds the member, or replaces its older description."""
        old = self.members.get(member.member_id)
        self.members[member.member_id] = member
        self._count_subscriptions(old, member)
        self._count_stable(old, member)
        self._move_ownership(old, member)
        if old is not None and old.instance_id is not None and old.instance_id != member.instance_id:
            self._forget_instance(old)
        if member.instance_id is not None:
            self.static_members[member.instance_id] = member.member_id
        if self.client_computation is not None:
            offer = offer_of(member)
            if offer is None or offer.kind is not OfferKind.PRESENT:
                self.client_computation.forget(member.member_id)

    def remove_member(self, member_id: str) -> None:
        """Removes the member and frees its partitions; does nothing if there is no such member."""
        self.asked_to_rejoin.discard(member_id)
        member = self.members.pop(member_id, None)
        if member is None:
            return
        if self.client_computation is not None:
            self.client_computation.forget(member_id)
            if not self.members:
                # The pause was for the members that failed.
                self.client_computation.rounds = self.client_computation.not_before_ms = 0
        self._count_subscriptions(member, None)
        self._count_stable(member, None)
        self._move_ownership(member, None)
        if member.instance_id is not None:
            self._forget_instance(member)

    def _forget_instance(self, member: ConsumerGroupMember) -> None:
        if self.static_members.get(member.instance_id or "") == member.member_id:
            del self.static_members[member.instance_id or ""]

    def _count_subscriptions(self, old: ConsumerGroupMember | None, new: ConsumerGroupMember | None) -> None:
        if old is not None and new is not None and new.has_subscription_of(old):
            return
        old_names = old.subscribed_topic_names if old else ()
        new_names = new.subscribed_topic_names if new else ()
        if old_names != new_names:
            _recount(self._name_counts, old_names, new_names)
        if _regexes_of(old) != _regexes_of(new):
            _recount(self._regex_counts, _regexes_of(old), _regexes_of(new))
        if _assignors_of(old) != _assignors_of(new):
            _recount(self._assignor_counts, _assignors_of(old), _assignors_of(new))
        old_offers, new_offers = _offers_of(old), _offers_of(new)
        if old_offers != new_offers:
            _recount(self._offers, old_offers, new_offers)
        self.client_assignor_bytes += metadata_bytes(new) - metadata_bytes(old)

    def _count_stable(self, old: ConsumerGroupMember | None, new: ConsumerGroupMember | None) -> None:
        for member, change in ((old, -1), (new, 1)):
            if member is not None and member.state is MemberState.STABLE:
                self._stable_members[member.member_epoch] += change
                if not self._stable_members[member.member_epoch]:
                    del self._stable_members[member.member_epoch]

    def _move_ownership(self, old: ConsumerGroupMember | None, new: ConsumerGroupMember | None) -> None:
        if old is not None and new is not None and _owned(old) == _owned(new):
            return
        for member_id, topic_id, partitions in _owned_partitions(old):
            if topic_id in self._sole_owners:
                if self._sole_owners[topic_id] == member_id:
                    del self._sole_owners[topic_id]
                continue
            owners = self._owners.get(topic_id, {})
            for partition in partitions:
                # In a compacted log the record of the new owner may precede the record in which this member revokes.
                if owners.get(partition) == member_id:
                    del owners[partition]
            if not owners:
                self._owners.pop(topic_id, None)
        for member_id, topic_id, partitions in _owned_partitions(new):
            if topic_id not in self._owners and self._sole_owners.get(topic_id, member_id) == member_id:
                self._sole_owners[topic_id] = member_id
            else:
                self._owners_by_partition(topic_id).update(dict.fromkeys(partitions, member_id))

    def _owners_by_partition(self, topic_id: bytes) -> dict[int, str]:
        """Returns the owners of a topic's partitions by partition, from now on also if there is only one owner."""
        member_id = self._sole_owners.pop(topic_id, None)
        if member_id is not None:
            owners = self._owners[topic_id] = {}
            for owned in _owned(self.members[member_id]):
                owners.update(dict.fromkeys(owned.get(topic_id, ()), member_id))
        return self._owners.get(topic_id, {})

    # Questions of a heartbeat about the group with `changed`, a member whose records are not replayed yet.

    def replaced_by(self, changed: ConsumerGroupMember) -> ConsumerGroupMember | None:
        """Returns the present member that `changed` replaces: the holder of its instance id, or its older self."""
        holder = self.static_member(changed.instance_id) if changed.instance_id is not None else None
        return self.members.get(changed.member_id) if holder is None else holder

    def _making_room_for(self, changed: ConsumerGroupMember | None) -> Iterator[ConsumerGroupMember]:
        """Yields the member that `changed` replaces, and the member with the same id if that is a different one."""
        if changed is None:
            return
        replaced, own = self.replaced_by(changed), self.members.get(changed.member_id)
        if replaced is not None:
            yield replaced
        if own is not None and own is not replaced:
            yield own

    def members_with(self, changed: ConsumerGroupMember) -> dict[str, ConsumerGroupMember]:
        """Returns all members by id, with `changed` in its place."""
        present = self.replaced_by(changed)
        members = dict(self.members)
        if present is not None and present.member_id != changed.member_id:
            del members[present.member_id]
        members[changed.member_id] = changed
        return members

    def subscribed_topic_names(
        self,
        changed: ConsumerGroupMember | None = None,
        removed: Sequence[ConsumerGroupMember] = (),
        resolved: Mapping[str, frozenset[str]] = _NONE_RESOLVED,
    ) -> set[str]:
        """Returns every topic name that the group subscribes to, by name or resolved regular expression.

        `changed` is a member as it will be; `removed` are members that are about to be removed. `resolved` has topics
        of regular expressions that replace the present ones.
        """
        counts, regexes = self._name_counts, self._regex_counts
        if changed is not None or removed:
            counts, regexes = counts.copy(), regexes.copy()
            for gone in (*removed, *self._making_room_for(changed)):
                _recount(counts, gone.subscribed_topic_names, ())
                _recount(regexes, _regexes_of(gone), ())
            _recount(counts, (), changed.subscribed_topic_names if changed else ())
            _recount(regexes, (), _regexes_of(changed))
        names = set(counts)
        for regex in regexes:
            if regex in resolved:
                names |= resolved[regex]
            elif regex in self.resolved_regexes:
                names |= self.resolved_regexes[regex].topics
        return names

    def preferred_server_assignor(self, supported: Sequence[str], changed: ConsumerGroupMember | None = None) -> str:
        """Returns the assignor that most members ask for; the broker's order decides ties (KIP-848)."""
        votes = self._assignor_counts
        if changed is not None:
            votes = votes.copy()
            for gone in self._making_room_for(changed):
                _recount(votes, _assignors_of(gone), ())
            _recount(votes, (), _assignors_of(changed))
        return max(supported, key=lambda name: votes[name])

    # Client-side assignors.

    @property
    def has_client_assignors(self) -> bool:
        """True if at least one member of the consumer protocol has client-side assignors."""
        return any(offer is not None and offer.kind is not OfferKind.CLASSIC for offer in self._offers)

    @property
    def may_members_compute(self) -> bool:
        """True if a member with client-side assignors is present. Its heartbeats lead to the next target."""
        return any(offer is not None and offer.kind is OfferKind.PRESENT for offer in self._offers)

    def offers(self, changed: ConsumerGroupMember | None = None) -> Counter[Offer | None]:
        """Returns what members offer to compute -> number of members, with `changed` in its place."""
        if changed is None:
            return self._offers
        offers = self._offers.copy()
        for gone in self._making_room_for(changed):
            _recount(offers, _offers_of(gone), ())
        _recount(offers, (), _offers_of(changed))
        return offers

    def put_target(self, member_id: str, target: Assignment, metadata: TargetMetadata) -> None:
        self.target_assignment[member_id] = target
        if metadata is not NO_METADATA:
            self.target_metadata[member_id] = metadata
        elif self.target_metadata:
            self.target_metadata.pop(member_id, None)

    def put_targets(self, targets: Mapping[str, Assignment], metadata: Mapping[str, TargetMetadata]) -> None:
        """Replaces the targets of some members. `metadata` has the metadata of those that have any."""
        self.target_assignment.update(targets)
        if metadata or self.target_metadata:
            for member_id in targets:
                self.target_metadata.pop(member_id, None)
            self.target_metadata.update(metadata)

    def end_computation(self, assignment_epoch: int) -> int:
        """Ends a computation by members that began at or before the epoch of a new target, and forgets failures.

        Returns how many asked members have left during the computation and are not counted yet.
        """
        self.failed_computations = None
        computation = self.client_computation
        if computation is None or computation.group_epoch > assignment_epoch:
            return 0
        self.client_computation = None
        return computation.gone

    def target_metadata_of(self, member_id: str) -> TargetMetadata:
        return self.target_metadata.get(member_id, NO_METADATA)


def subscription_of(
    member: ConsumerGroupMember, resolved_regexes: Mapping[str, ResolvedRegularExpression]
) -> Iterable[str]:
    """Returns the topic names that one member subscribes to, by name or resolved regular expression."""
    resolved = resolved_regexes.get(member.subscribed_topic_regex) if member.subscribed_topic_regex else None
    if resolved is None:
        return member.subscribed_topic_names
    return resolved.topics.union(member.subscribed_topic_names)


def _regexes_of(member: ConsumerGroupMember | None) -> tuple[str, ...]:
    return (member.subscribed_topic_regex,) if member is not None and member.subscribed_topic_regex else ()


def _assignors_of(member: ConsumerGroupMember | None) -> tuple[str, ...]:
    return (member.server_assignor,) if member is not None and member.server_assignor else ()


def offer_of(member: ConsumerGroupMember) -> Offer | None:
    """Returns what the member offers to compute; None if it has no client-side assignors.

    A classic member reads and writes the user data of its protocols, which have version -1. It computes nothing.
    """
    if member.classic is not None:
        return Offer(OfferKind.CLASSIC, tuple((name, -1, -1, -1) for name, _ in member.classic.protocols))
    if not member.client_assignors:
        return None
    away = member.member_epoch == LEAVE_GROUP_STATIC_MEMBER_EPOCH
    return Offer(
        OfferKind.AWAY if away else OfferKind.PRESENT,
        tuple((a.name, a.minimum_version, a.maximum_version, a.metadata_version) for a in member.client_assignors),
    )


_NO_OFFER: Final = (None,)


def _offers_of(member: ConsumerGroupMember | None) -> tuple[Offer | None, ...]:
    if member is None:
        return ()
    return (offer_of(member),) if member.client_assignors or member.classic is not None else _NO_OFFER


def metadata_bytes(member: ConsumerGroupMember | None) -> int:
    """Returns the size of the metadata that a member, if there is one, gives to its client-side assignors."""
    if member is None or not member.client_assignors:
        return 0
    return sum(len(assignor.metadata) for assignor in member.client_assignors)


_T = TypeVar("_T")


def _recount(counts: Counter[_T], gone: Iterable[_T], come: Iterable[_T]) -> None:
    for name in gone:
        if counts[name] <= 1:
            del counts[name]
        else:
            counts[name] -= 1
    for name in come:
        counts[name] += 1


def _owned(member: ConsumerGroupMember) -> tuple[EpochAssignment, EpochAssignment]:
    return member.assigned, member.pending_revocation


def _owned_partitions(member: ConsumerGroupMember | None) -> Iterator[tuple[str, bytes, Iterable[int]]]:
    """Yields the member's id with each topic of which it owns partitions, and these partitions."""
    if member is None:
        return
    for owned in (member.assigned, member.pending_revocation):
        for topic_id, partitions in owned.items():
            if partitions:
                yield member.member_id, topic_id, partitions


def partition_counts(image: MetadataImage, topic_names: Iterable[str]) -> Mapping[bytes, int]:
    """Returns topic id -> number of partitions for the topics that exist, in the order of their names."""
    topics = (image.topics.get(name) for name in sorted(topic_names))
    return {topic.id: len(topic.partitions) for topic in topics if topic is not None}
