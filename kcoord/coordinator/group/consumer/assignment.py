# SPDX-License-Identifier: Apache-2.0
"""The target assignment of a consumer group, the steps of a member towards it, and the metadata hash.

**Target.** A new target is one record per member whose target changed, then the record with the assignment epoch. All
of them are in one atomic batch (KIP-848 Target Assignment), so a reader never sees half a target. There are three
steps:

1. `target_input` copies all that the target depends on. This runs in the event loop and copies dictionaries.
2. `compute` runs the assignor. It is a pure function of its input, so it may run in a thread.
3. `install` makes the records that still fit the group, in the event loop again.

If step 2 is expected to be quick, the heartbeat runs it at once. If it takes long
(`takes_long`), the heartbeat asks for a Task and continues with the old target, as it does within the assignment
interval. The shell starts the task after the records of this turn are replayed, so one computation serves all members
that joined meanwhile. The group may change while the task runs. `install` therefore drops a target that is too old,
leaves out members that left, and never moves the assignment epoch above the group epoch. If the process crashes, the
task is lost; the next heartbeat asks for it again, because the group epoch is still above the assignment epoch.
`encode` makes the records bytes in the thread, so that `install` is cheap for any number of members.

An assignor of one's own (`kcoord.assignors`) always runs in the background, in a process of its own, also for the first
target. Until then the members of a new group have an empty target, one epoch before the group's. If the assignor fails
(`FailedComputation`), the group asks again after a pause.

**Current assignment.** `CurrentAssignmentBuilder` makes one step of one member (KIP-848 "Member Assignment State
Machine"; the states are in `group`). The order is fixed. The member first revokes what the target does not give it.
Only then does it get the epoch of the target, with those new partitions that no other member owns. The rest follows
when their owners have released them. Each partition carries the epoch at which it was assigned, as in Kafka 4.3.

**Metadata hash.** `topic_hash` and `metadata_hash` are Kafka's digest of what an assignment depends on: id, name and
partitions of a topic, with the racks of the replicas. The values are those of Apache Kafka 4.3.1 and 4.4.0 (XXH3 over a
stream of little-endian values). The records of a group that comes from Kafka therefore show whether its topics have
changed since. Each state of a topic is digested once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, compress
from operator import methodcaller
from struct import Struct, pack
from typing import Final, TypeAlias, TypeVar

from xxhash import xxh3_64_intdigest

from kcoord.coordinator.group import records
from kcoord.coordinator.group.assignor import ASSIGNORS, MemberSpec
from kcoord.coordinator.group.consumer.group import (
    NO_METADATA,
    Assignment,
    ConsumerGroup,
    ConsumerGroupMember,
    EpochAssignment,
    MemberState,
    ResolvedRegularExpression,
    TargetMetadata,
    partition_counts,
    subscription_of,
)
from kcoord.metadata.image import MetadataImage, TopicImage
from kcoord.runtime.result import CoordinatorRecord, CoordinatorResult, EncodedRecords
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.record_batch import encode_records

OwnedPartitions = Mapping[bytes, frozenset[int]]


def owned_by_topic(topics: Iterable[tuple[bytes, Iterable[int]]]) -> OwnedPartitions:
    """Returns the partitions that a request lists as owned. A request may list a topic several times."""
    owned: dict[bytes, frozenset[int]] = {}
    for topic_id, partitions in topics:
        owned[topic_id] = owned.get(topic_id, frozenset()).union(partitions)
    return owned


@dataclass(slots=True)
class CurrentAssignmentBuilder:
    """Makes the next step of one member towards its target.

    `owned` are the partitions that the request lists as owned; None if it has no list. `subscribed_topic_ids` are the
    topics of the member's present subscription. It has to revoke all other topics, even if the target is older than
    its subscription and still has them.
    """

    member: ConsumerGroupMember
    target_epoch: int
    target: Assignment
    metadata: TargetMetadata
    owners_of: Callable[[bytes], Mapping[int, str]]
    subscribed_topic_ids: frozenset[bytes]
    subscription_changed: bool
    owned: OwnedPartitions | None

    def build(self) -> ConsumerGroupMember:
        """Returns the member after this heartbeat; the same object if nothing changes."""
        member = self.member
        if member.state is MemberState.STABLE:
            if member.member_epoch != self.target_epoch:
                return self._next(member.member_epoch)
            return self._drop_unsubscribed() if self.subscription_changed else member
        if member.state is MemberState.UNREVOKED_PARTITIONS:
            if self._still_owns(member.pending_revocation):
                return self._drop_unsubscribed() if self.subscription_changed else member
            return self._next(member.member_epoch)
        if member.state is MemberState.UNRELEASED_PARTITIONS:
            return self._next(member.member_epoch)
        # A later version wrote this state. Only a member that owns nothing can safely start from the target.
        if self.owned is None or self.owned:
            raise KafkaError(
                Errors.FENCED_MEMBER_EPOCH, "The member is in a state of a later version. It must rejoin with epoch 0."
            )
        return self._next(self.target_epoch)

    def _still_owns(self, partitions: EpochAssignment) -> bool:
        """True if the member may still own one of the partitions; a request without a list is taken as yes."""
        if self.owned is None:
            return True
        return any(not self.owned.get(topic_id, frozenset()).isdisjoint(ps) for topic_id, ps in partitions.items())

    def _next(self, member_epoch: int) -> ConsumerGroupMember:
        """Keeps what is in the target and revokes the rest; if nothing is to be revoked, takes what is free.

        `member_epoch` is the member's epoch if it has to revoke; otherwise it gets the epoch of the target.
        """
        member = self.member
        kept: dict[bytes, Mapping[int, int]] = {}
        revoked: dict[bytes, Mapping[int, int]] = {}
        taken: dict[bytes, frozenset[int]] = {}
        unreleased = False
        for topic_id in sorted(member.assigned.keys() | self.target.keys()):
            target = self.target.get(topic_id, frozenset()) if topic_id in self.subscribed_topic_ids else frozenset()
            assigned = member.assigned.get(topic_id, {})
            missing = target
            if assigned:
                stay, leave = _split(assigned, target)
                if stay:
                    kept[topic_id] = stay
                if leave:
                    revoked[topic_id] = leave
                missing = target.difference(stay) if len(stay) < len(target) else frozenset()
            if missing and (owners := self.owners_of(topic_id)):
                # The member has just revoked some, but the group still has it as their owner until the replay.
                of_others = (missing & owners.keys()).difference(member.pending_revocation.get(topic_id, ()))
                if of_others:
                    unreleased = True
                    missing -= of_others
            if missing:
                taken[topic_id] = missing
        if revoked and self._still_owns(revoked):
            state = MemberState.UNREVOKED_PARTITIONS
            return member.with_progress(state, member_epoch, kept, revoked, member.metadata)
        shared: dict[int, Mapping[int, int]] = {}
        for topic_id, partitions in taken.items():
            new = shared.get(id(partitions)) or shared.setdefault(
                id(partitions), dict.fromkeys(partitions, self.target_epoch)
            )
            kept[topic_id] = {**kept[topic_id], **new} if topic_id in kept else new
        state = MemberState.UNRELEASED_PARTITIONS if unreleased else MemberState.STABLE
        if (
            state is member.state
            and member.member_epoch == self.target_epoch
            and kept == member.assigned
            and not member.pending_revocation
        ):
            return member
        return member.with_progress(state, self.target_epoch, kept, {}, self.metadata)

    def _drop_unsubscribed(self) -> ConsumerGroupMember:
        """Revokes topics to which the member no longer subscribes, although there is no newer target."""
        member = self.member
        gone = {t: ps for t, ps in member.assigned.items() if t not in self.subscribed_topic_ids}
        if not gone:
            return member
        kept = {t: ps for t, ps in member.assigned.items() if t not in gone}
        if member.state is MemberState.STABLE and not self._still_owns(gone):
            return member.with_progress(MemberState.STABLE, member.member_epoch, kept, {}, member.metadata)
        pending = dict(member.pending_revocation)
        for topic_id, partitions in gone.items():
            pending[topic_id] = {**pending.get(topic_id, {}), **partitions}
        state = MemberState.UNREVOKED_PARTITIONS
        return member.with_progress(state, member.member_epoch, kept, pending, member.metadata)


def _split(assigned: Mapping[int, int], target: frozenset[int]) -> tuple[Mapping[int, int], Mapping[int, int]]:
    """Returns the partitions that are in the target, and those that are not, with their epochs."""
    if assigned.keys() <= target:
        return assigned, {}
    epochs = [*assigned.values()]
    if epochs.count(epochs[0]) == len(epochs):
        # A member that gets many partitions gets most of them at once.
        stay = target.intersection(assigned)
        return dict.fromkeys(stay, epochs[0]), dict.fromkeys(set(assigned).difference(stay), epochs[0])
    return (
        {partition: epoch for partition, epoch in assigned.items() if partition in target},
        {partition: epoch for partition, epoch in assigned.items() if partition not in target},
    )


_US_PER_MEMBER: Final = 4.0
_US_PER_PARTITION: Final = 0.5
_HETEROGENEOUS_FACTOR: Final = 3
_RACK_FACTOR: Final = 5
_SHARE_OF_INTERVAL: Final = 100
_LEAST_INLINE_US: Final = 1000
"""Rough costs, measured with `make bench ARGS=assignors`, and the limit for a computation inside a request.

The limit is a hundredth of the assignment interval, but at least `_LEAST_INLINE_US`.
"""

_NOTHING: Final[Assignment] = {}
_claimed: Final = methodcaller("values")

_FREED_AT_ONCE: Final = 500

T = TypeVar("T")
SerializedRecord: TypeAlias = tuple[bytes | None, bytes | None]


@dataclass(slots=True)
class ComputeTarget:
    """The work of a task: compute the target assignment of a group from its state when the task starts.

    All new targets get `metadata`.
    """

    group_id: str
    metadata: TargetMetadata = NO_METADATA


@dataclass(slots=True)
class TargetInput:
    """A copy of all that a target assignment depends on. Nothing changes it, so any thread may read it."""

    group_id: str
    group_epoch: int
    creation_time_ms: int
    assignor: str
    members: Mapping[str, ConsumerGroupMember]
    targets: Mapping[str, Assignment]
    inherited: Mapping[str, Assignment]
    """Present targets that replace those in `targets`: a new static member has its predecessor's target."""
    resolved_regexes: Mapping[str, ResolvedRegularExpression]
    image: MetadataImage
    partition_counts: Mapping[bytes, int]
    cost_us: float
    """The estimated duration of `compute`."""
    target_metadata: Mapping[str, TargetMetadata]
    """The metadata of the present targets that have any."""
    metadata: TargetMetadata = NO_METADATA
    """The metadata of all new targets, if a server-side assignor computes them."""

    def target_of(self, member_id: str) -> Assignment:
        """Returns the member's present target."""
        inherited = self.inherited.get(member_id)
        return self.targets.get(member_id, _NOTHING) if inherited is None else inherited


@dataclass(slots=True)
class ComputedTarget:
    """The value of a ComputeTarget task. `changed` are the new targets by member id; `records` are in that order."""

    group_id: str
    group_epoch: int
    creation_time_ms: int
    changed: dict[str, Assignment]
    instance_ids: Mapping[str, str]
    """Member id -> instance id of the static members in `changed`."""
    records: list[CoordinatorRecord]
    """Empty once a background thread has encoded them (`encode`)."""
    metadata: Mapping[str, TargetMetadata]
    """The metadata of the targets in `changed` that have any."""
    assignor: str = ""
    """The client-side assignor that computed the target, and the member that did; empty if the broker did."""
    assigned_by: str = ""
    serialized: list[SerializedRecord] = field(default_factory=list)
    encoded: bytes | None = None
    """The records as they are in a batch, if a background thread has encoded them. `serialized` has each of them."""


@dataclass(slots=True, frozen=True)
class FailedComputation:
    """The value of a ComputeTarget task if the assignor failed; the group keeps its target."""

    group_id: str
    assignor: str
    reason: str


def takes_long(
    group: ConsumerGroup,
    assignor: str,
    image: MetadataImage,
    updated: ConsumerGroupMember,
    interval_ms: int,
    inline_ms: int,
) -> bool:
    """True if the target is to be computed in the background.

    A group's first target never is, because its members would have no partitions meanwhile. `inline_ms` limits how
    long a request may compute.
    """
    if group.assignment_epoch == 0:
        return False
    counts = partition_counts(image, group.subscribed_topic_names(changed=updated))
    cost_us = _cost_us(assignor, len(group.members), counts, is_homogeneous=group.is_homogeneous)
    return cost_us > min(inline_ms * 1000, max(interval_ms * 1000 // _SHARE_OF_INTERVAL, _LEAST_INLINE_US))


def needs_racks(name: str) -> bool:
    """Returns whether targets of the assignor depend on racks; those of an assignor of one's own may."""
    assignor = ASSIGNORS.get(name)
    return assignor is None or assignor.needs_racks


def _cost_us(assignor: str, members: int, partition_counts: Mapping[bytes, int], *, is_homogeneous: bool) -> float:
    cost_us = members * _US_PER_MEMBER + sum(partition_counts.values()) * _US_PER_PARTITION
    if needs_racks(assignor):
        cost_us *= _RACK_FACTOR
    return cost_us if is_homogeneous else cost_us * _HETEROGENEOUS_FACTOR


def target_input(
    group: ConsumerGroup,
    group_epoch: int,
    assignor: str,
    image: MetadataImage,
    updated: ConsumerGroupMember | None = None,
    metadata: TargetMetadata = NO_METADATA,
) -> TargetInput:
    """Returns the input for the target of `group_epoch`.

    `updated` is a member whose records are not replayed yet. If it replaces a static member, it starts with the target
    of that member.
    """
    members = dict(group.members)
    inherited: Mapping[str, Assignment] = {}
    if updated is not None:
        replaced = group.replaced_by(updated)
        members = group.members_with(updated)
        inherited = {
            updated.member_id: _NOTHING if replaced is None else group.target_assignment_of(replaced.member_id)
        }
    counts = partition_counts(image, group.subscribed_topic_names(changed=updated))
    return TargetInput(
        group.group_id,
        group_epoch,
        group.creation_time_ms,
        assignor,
        members,
        dict(group.target_assignment),
        inherited,
        dict(group.resolved_regexes),
        image,
        counts,
        _cost_us(assignor, len(members), counts, is_homogeneous=group.is_homogeneous),
        dict(group.target_metadata),
        metadata,
    )


def member_specs(work: TargetInput) -> dict[str, MemberSpec]:
    """Returns the members as an assignor sees them."""
    specs: dict[str, MemberSpec] = {}
    subscriptions: dict[tuple[tuple[str, ...], str | None], frozenset[bytes]] = {}
    for member_id, member in work.members.items():
        key = (member.subscribed_topic_names, member.subscribed_topic_regex)
        topic_ids = subscriptions.get(key)
        if topic_ids is None:
            topic_ids = subscriptions[key] = topic_ids_of(member, work.resolved_regexes, work.image)
        specs[member_id] = MemberSpec(member.instance_id, member.rack_id, topic_ids, work.target_of(member_id))
    return specs


def partition_racks(image: MetadataImage, topic_id: bytes) -> Sequence[frozenset[str]]:
    """Returns the racks of the replicas of each partition of an existing topic."""
    racks = image.racks
    # Most topics have few combinations of replicas; partitions with the same one share a set.
    of_replicas: dict[tuple[int, ...], frozenset[str]] = {}
    racks_of: list[frozenset[str]] = []
    for partition in image.topics_by_id[topic_id].partitions:
        replicas = tuple(partition.replicas)
        if replicas not in of_replicas:
            of_replicas[replicas] = frozenset(racks[replica] for replica in replicas if replica in racks)
        racks_of.append(of_replicas[replicas])
    return racks_of


def compute(work: TargetInput) -> ComputedTarget:
    """Runs a built-in assignor and returns the targets that changed."""
    specs = member_specs(work)
    assigned = ASSIGNORS[work.assignor].assign(specs, work.partition_counts, partial(partition_racks, work.image))
    count = sum(map(len, chain.from_iterable(map(_claimed, assigned.values()))))
    assert count == sum(work.partition_counts.values()), (
        f"G-6: the target of group {work.group_id} assigns {count} partitions; its topics have "
        f"{sum(work.partition_counts.values())}"
    )
    return computed_target(work, specs, assigned)


def computed_target(
    work: TargetInput,
    specs: Mapping[str, MemberSpec],
    assigned: Mapping[str, Assignment],
    metadata: Mapping[str, TargetMetadata] | None = None,
    assigned_by: str = "",
) -> ComputedTarget:
    """Returns the targets that changed, or whose metadata changed.

    `metadata` is that of a client-side assignor, whose member is `assigned_by`. A member without a target record gets
    one even if its target is empty, as in Kafka.
    """
    changed: dict[str, Assignment] = {}
    instance_ids: dict[str, str] = {}
    kept_metadata: dict[str, TargetMetadata] = {}
    has_metadata = bool(metadata or work.target_metadata or work.metadata is not NO_METADATA)
    for member_id, target in assigned.items():
        member = specs[member_id]
        if has_metadata:
            new = work.metadata if metadata is None else metadata[member_id]
            is_same = new == work.target_metadata.get(member_id, NO_METADATA)
        else:
            new, is_same = NO_METADATA, True
        # An assignor that keeps a member's target mostly returns the same object, which is cheap to compare.
        if is_same and member_id in work.targets and (target is member.assigned or target == member.assigned):
            continue
        changed[member_id] = target
        if new != NO_METADATA:
            kept_metadata[member_id] = new
        if member.instance_id is not None:
            instance_ids[member_id] = member.instance_id
    made = [
        records.new_target_assignment_record(
            work.group_id, member_id, target, kept_metadata.get(member_id, NO_METADATA)
        )
        for member_id, target in changed.items()
    ]
    return ComputedTarget(
        work.group_id,
        work.group_epoch,
        work.creation_time_ms,
        changed,
        instance_ids,
        made,
        kept_metadata,
        work.assignor if assigned_by else "",
        assigned_by,
    )


def encode(computed: ComputedTarget, serialize: Callable[[CoordinatorRecord], SerializedRecord]) -> None:
    """Encodes the records to bytes. Runs in a thread, since it would pause the event loop for long."""
    computed.serialized = [serialize(record) for record in computed.records]
    computed.encoded = encode_records(computed.serialized)
    free(computed.records)


def free(items: list[T]) -> None:
    """Empties the list piece by piece, so that other threads run meanwhile. A large one at once takes 10 ms."""
    while items:
        del items[-_FREED_AT_ONCE:]


def install(group: ConsumerGroup, computed: ComputedTarget, now_ms: int) -> CoordinatorResult[None]:
    """Returns the records of a target that was computed in the background; none if the target is too old.

    Members that left meanwhile are omitted. A member that replaced a static member meanwhile gets its target. In both
    cases the group epoch has grown or will grow, so the next heartbeat asks for a newer target.
    """
    is_same = computed.creation_time_ms == group.creation_time_ms and computed.group_epoch <= group.group_epoch
    if not is_same or computed.group_epoch <= group.assignment_epoch:
        return CoordinatorResult(None)
    made, changed, encoded = computed.records, computed.changed, computed.encoded
    gone = [member_id for member_id in changed if member_id not in group.members]
    if gone:
        present = [member_id in group.members for member_id in changed]
        if encoded is None:
            made = [*compress(made, present)]
        else:
            encoded = encode_records([*compress(computed.serialized, present)])
        changed = {member_id: target for member_id, target in changed.items() if member_id in group.members}
    last: list[CoordinatorRecord] = []
    for member_id in gone:
        successor = group.static_member(computed.instance_ids.get(member_id, ""))
        if successor is not None:
            target, metadata = computed.changed[member_id], computed.metadata.get(member_id, NO_METADATA)
            last.append(records.new_target_assignment_record(group.group_id, successor.member_id, target, metadata))
    last.append(
        records.next_assignment_epoch_record(
            group.group_id,
            computed.group_epoch,
            group.group_epoch,
            now_ms,
            computed.assignor,
            computed.assigned_by,
        )
    )
    if not encoded:
        return CoordinatorResult(None, [*made, *last])
    # Replaying the records would do the same to this group. `last` is replayed too and changes the group's version.
    metadata_of = {member_id: m for member_id, m in computed.metadata.items() if member_id in changed}
    replay = partial(group.put_targets, changed, metadata_of)
    return CoordinatorResult(None, last, encoded=EncodedRecords(len(changed), encoded, replay))


def topic_ids_of(
    member: ConsumerGroupMember, resolved_regexes: Mapping[str, ResolvedRegularExpression], image: MetadataImage
) -> frozenset[bytes]:
    """Returns the ids of the existing topics to which the member subscribes."""
    topics = (image.topics.get(name) for name in subscription_of(member, resolved_regexes))
    return frozenset(topic.id for topic in topics if topic is not None)


_INT = Struct("<i")
_LONG = Struct("<q")
_FIRST_NUMBERS: Final = 1_000
_FIRST: Final = pack(f"<{_FIRST_NUMBERS}i", *range(_FIRST_NUMBERS))
"""The numbers of the partitions of a topic that is not large."""
_FORMAT_BYTE = b"\0"
"""The version of the digest's input format, as in Kafka."""


def metadata_hash(image: MetadataImage, topic_names: Iterable[str]) -> int:
    """Returns the digest of several topics, as a signed 64-bit number.

    It skips topics that do not exist, and returns 0 if no topic exists.
    """
    racks = image.racks
    topics = [topic for name in sorted(topic_names) if (topic := image.topics.get(name)) is not None]
    return _signed_digest(b"".join([_LONG.pack(topic_hash(topic, racks)) for topic in topics])) if topics else 0


def topic_hash(topic: TopicImage, racks: Mapping[int, str]) -> int:
    """Returns the digest of one topic, as a signed 64-bit number. `racks` are the brokers' racks by broker id."""
    cached = topic.hashed
    if cached is not None and cached[0] == racks:
        return cached[1]
    value = _signed_digest(_head(topic) + _partitions(topic, racks))
    topic.hashed = racks, value
    return value


def _head(topic: TopicImage) -> bytes:
    halves = topic.id[7::-1] + topic.id[:7:-1]
    return _FORMAT_BYTE + halves + _text(topic.name) + _INT.pack(len(topic.partitions))


def _partitions(topic: TopicImage, racks: Mapping[int, str]) -> bytes:
    if not racks:
        return _numbers(len(topic.partitions))
    # Most topics have few combinations of replicas, so the racks of a combination are looked up once.
    suffixes: dict[tuple[int, ...], bytes] = {}
    parts = []
    for number, partition in enumerate(topic.partitions):
        replicas = tuple(partition.replicas)
        suffix = suffixes.get(replicas)
        if suffix is None:
            suffix = suffixes[replicas] = _racks(replicas, racks)
        parts.append(_INT.pack(number) + suffix)
    return b"".join(parts)


def _numbers(count: int) -> bytes:
    """Returns the numbers below `count` as little-endian int32, without an object for each number."""
    if count <= _FIRST_NUMBERS:
        return _FIRST[: count * _INT.size]
    data = bytearray(count * _INT.size)
    place, repeats = 0, 1
    while repeats < count:
        # The bytes at one place of all numbers: each of up to 256 digits several times in a row, again and again.
        digits = range(min(256, -(-count // repeats)))
        cycle = b"".join([bytes((digit,)) * repeats for digit in digits])
        data[place :: _INT.size] = (cycle * -(-count // len(cycle)))[:count]
        place, repeats = place + 1, repeats * 256
    return bytes(data)


def _racks(replicas: Sequence[int], racks: Mapping[int, str]) -> bytes:
    """Returns the racks sorted by UTF-16 code units, as Java sorts; the length stands before and after each rack."""
    names = sorted((racks[replica] for replica in replicas if replica in racks), key=_utf16_order)
    return b"".join([_INT.pack(len(_utf16(name)) // 2) + _text(name) for name in names])


def _text(text: str) -> bytes:
    encoded = _utf16(text)
    return encoded + _INT.pack(len(encoded) // 2)


def _utf16(text: str) -> bytes:
    return text.encode("utf-16-le", "surrogatepass")


def _utf16_order(text: str) -> bytes:
    return text.encode("utf-16-be", "surrogatepass")


def _signed_digest(data: bytes) -> int:
    return int.from_bytes(xxh3_64_intdigest(data).to_bytes(8, "big"), "big", signed=True)
