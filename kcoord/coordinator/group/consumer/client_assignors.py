# SPDX-License-Identifier: Apache-2.0
"""Client-side assignors of KIP-848: what members offer, and which assignor and members the coordinator chooses.

A member offers assignors, the best first. Each reads metadata of a range of versions and gives metadata of one version.
The group uses a client-side assignor only if every member has it. The rules to choose one are in `select`; they look
only at the names and versions of the offers, so members with equal offers are counted together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, NamedTuple, TypeAlias

from kcoord_protocol.errors import Errors, KafkaError

CLASSIC_VERSION: Final = -1
"""The version of the user data that assignors of the classic protocol exchange."""
MAX_VERSION: Final = 0x7FFF
MOST_ASSIGNORS: Final = 16
"""Most client-side assignors of one member."""


@dataclass(slots=True, frozen=True)
class ClientAssignor:
    """One client-side assignor of a member, with the metadata that the member gives to it.

    A `reason` other than 0 asks for a new assignment; the assignor defines the numbers.
    """

    name: str
    minimum_version: int
    maximum_version: int
    reason: int
    metadata_version: int
    metadata: bytes


class OfferKind(Enum):
    """Whether a member that offers assignors can be asked to compute."""

    PRESENT = "present"
    AWAY = "away"
    """A static member that has left and will return."""
    CLASSIC = "classic"


OfferedAssignor: TypeAlias = tuple[str, int, int, int]
"""Name, minimum version, maximum version, and version of the metadata."""


class Offer(NamedTuple):
    """The names and versions of a member's assignors, the best first."""

    kind: OfferKind
    assignors: tuple[OfferedAssignor, ...]

    def find(self, name: str) -> OfferedAssignor | None:
        return next((assignor for assignor in self.assignors if assignor[0] == name), None)


class SelectedAssignor(NamedTuple):
    """The client-side assignor of a group, and who can compute with it.

    `lowest` and `highest` limit the versions of the metadata that members have sent. `able` is the number of members
    that can compute.
    """

    name: str
    lowest: int
    highest: int
    able: int

    def can_compute(self, offer: Offer | None) -> bool:
        """True if the member is of the consumer protocol, present, and reads the metadata of all members (KIP-268)."""
        if offer is None or offer.kind is not OfferKind.PRESENT:
            return False
        assignor = offer.find(self.name)
        return assignor is not None and assignor[1] <= self.lowest and self.highest <= assignor[2]


def select(offers: Counter[Offer | None]) -> SelectedAssignor | None:
    """Returns the client-side assignor that the group uses; None if a server-side assignor computes.

    `offers` counts the members by their offers. A usable assignor is one that every member has and at least one member
    can compute with. The version ranges of the members of the consumer protocol overlap. Each member votes for the
    first usable assignor that it has. The name decides ties.
    """
    present = [offer for offer in offers if offer is not None]
    if not present or None in offers:
        return None
    ranges = _ranges(present)
    common = {name: v for name, v in ranges.items() if v.offers == len(present) and v.overlap}
    able: Counter[str] = Counter()
    for offer in present:
        if offer.kind is OfferKind.PRESENT:
            for name, minimum, maximum, _ in offer.assignors:
                versions = common.get(name)
                if versions is not None and minimum <= versions.lowest and versions.highest <= maximum:
                    able[name] += offers[offer]
    usable = able.keys()
    if not usable:
        return None
    votes: Counter[str] = Counter()
    for offer in present:
        votes[next(assignor[0] for assignor in offer.assignors if assignor[0] in usable)] += offers[offer]
    name = min(usable, key=lambda name: (-votes[name], name))
    return SelectedAssignor(name, ranges[name].lowest, ranges[name].highest, able[name])


@dataclass(slots=True)
class _Versions:
    """The versions of one assignor in several offers: those of the metadata, and the common part of the ranges.

    Classic members read only version -1 and have no range.
    """

    offers: int = 0
    lowest: int = MAX_VERSION
    highest: int = CLASSIC_VERSION
    largest_minimum: int = CLASSIC_VERSION
    smallest_maximum: int = MAX_VERSION

    @property
    def overlap(self) -> bool:
        return self.largest_minimum <= self.smallest_maximum


def _ranges(present: Iterable[Offer]) -> dict[str, _Versions]:
    ranges: dict[str, _Versions] = {}
    for kind, assignors in present:
        for name, minimum, maximum, version in assignors:
            versions = ranges.get(name)
            if versions is None:
                versions = ranges[name] = _Versions()
            versions.offers += 1
            # Comparisons, because calls of min and max would be most of the cost for members that all differ.
            if version < versions.lowest:
                versions.lowest = version
            if version > versions.highest:
                versions.highest = version
            if kind is not OfferKind.CLASSIC:
                if minimum > versions.largest_minimum:
                    versions.largest_minimum = minimum
                if maximum < versions.smallest_maximum:
                    versions.smallest_maximum = maximum
    return ranges


def check_joining(present: Counter[Offer | None], joining: Offer) -> None:
    """Raises UNSUPPORTED_ASSIGNOR if no version of the assignor in use fits both the new offer and all present ones.

    A member without the assignor in use is accepted: the group then uses another assignor.
    """
    in_use = select(present)
    if in_use is None or joining.find(in_use.name) is None:
        return
    offers = [*(offer for offer in present if offer is not None), joining]
    if not _ranges(offers)[in_use.name].overlap:
        raise KafkaError(
            Errors.UNSUPPORTED_ASSIGNOR,
            f"No version of the assignor {in_use.name} is supported by this member and by all other members.",
        )


def check_client_assignors(assignors: Sequence[ClientAssignor], max_bytes: int) -> None:
    """Raises INVALID_REQUEST for assignors of a member that are invalid whatever the group is."""
    names = [assignor.name for assignor in assignors]
    if len(names) > MOST_ASSIGNORS:
        raise _invalid(f"ClientAssignors has {len(names)} assignors. At most {MOST_ASSIGNORS} are allowed.")
    for assignor in assignors:
        name, lowest, highest = assignor.name, assignor.minimum_version, assignor.maximum_version
        if not name.strip():
            raise _invalid("The Name of a client assignor can't be empty.")
        if names.count(name) > 1:
            raise _invalid(f"ClientAssignors names the assignor {name} twice.")
        if lowest < CLASSIC_VERSION or highest < 0 or highest < lowest:
            raise _invalid(f"The versions {lowest} to {highest} of assignor {name} are no range from -1 on.")
        if not lowest <= assignor.metadata_version <= highest:
            raise _invalid(
                f"The MetadataVersion {assignor.metadata_version} of assignor {name} is not between {lowest} and "
                f"{highest}."
            )
    size = sum(len(assignor.metadata) for assignor in assignors)
    if size > max_bytes:
        raise _invalid(
            f"MetadataBytes has {size} bytes, more than kcoord.client.assignor.metadata.max.bytes={max_bytes}."
        )


def _invalid(text: str) -> KafkaError:
    return KafkaError(Errors.INVALID_REQUEST, text)


def asks_for_an_assignment(old: Sequence[ClientAssignor], new: Sequence[ClientAssignor]) -> bool:
    """True if the change raises the group epoch: anything but a reason that becomes 0.

    The same assignors again change nothing, so a request that is sent twice has no other effect than once.
    """
    if [assignor.name for assignor in old] != [assignor.name for assignor in new]:
        return True
    return any(after != before and _is_more(before, after) for before, after in zip(old, new, strict=True))


def _is_more(before: ClientAssignor, after: ClientAssignor) -> bool:
    """True if more than the reason differs, or if the reason becomes another one than 0."""
    same_but_reason = (
        before.minimum_version == after.minimum_version
        and before.maximum_version == after.maximum_version
        and before.metadata_version == after.metadata_version
        and before.metadata == after.metadata
    )
    return not same_but_reason or after.reason != 0


@dataclass(slots=True)
class AskedMember:
    """The member that was asked to compute a target, with which assignor, and until when it has time.

    `snapshot` is the state of the group that it was given, a TargetInput; None before its first PrepareAssignment.
    """

    member_id: str
    assignor: str
    since_ms: int
    deadline_ms: int
    snapshot: object = None


@dataclass(slots=True)
class ClientComputation:
    """The computation of a group's next target by its members (`client_computation`). All of it is soft state.

    `group_epoch` is the epoch at which it began. `failed` are the members that have failed in this round. After a round
    in which all able members failed, nobody is asked before `not_before_ms`. `gone` counts the members that were asked
    and have left since the last heartbeat that looked.
    """

    group_epoch: int
    asked: AskedMember | None = None
    failed: set[str] = field(default_factory=set)
    rounds: int = 0
    not_before_ms: int = 0
    gone: int = 0

    def forget(self, member_id: str) -> None:
        """Ends what a member that has left computes. If it joins again, it is a new member: it can be asked again."""
        self.failed.discard(member_id)
        if self.asked is not None and self.asked.member_id == member_id:
            self.asked = None
            self.gone += 1
