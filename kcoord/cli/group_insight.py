# SPDX-License-Identifier: Apache-2.0
"""Interprets the description of a group: which members delay a rebalance, what they have to revoke, what changed. Pure.

The description of a KIP-848 group has everything that is needed: a member delays convergence while its assignment has
partitions outside of its target assignment, and while partitions of its target belong to another member.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from kcoord.cli.output import assignment_text, by_topic, time_text
from kcoord.client.admin.model import ConsumerGroupDescription, MemberDescription
from kcoord.client.types import TopicPartition

LEFT_FOR_A_WHILE: Final = -2
"""The epoch of a static member that has left and may come back (KIP-848 Static Membership)."""

_FALLBACK_ERROR: Final = -2
"""The error of an assignment that the broker computed because of kcoord.client.assignor.fallback=server."""
_CONSUMER: Final = "Consumer"
_CLASSIC_WAITS: Final = {
    "PreparingRebalance": "members that have not joined again yet; the rebalance timeout bounds that",
    "CompletingRebalance": "the assignment, which the group's leader computes",
}


class GroupInsight(NamedTuple):
    """A statement and its subject."""

    subject: str
    text: str


class InsightSettings(NamedTuple):
    """Settings of the broker; None if they could not be read."""

    assignors: list[str] | None
    session_timeout_ms: int | None


def explain(group: ConsumerGroupDescription, settings: InsightSettings) -> Iterator[GroupInsight]:
    """Yields statements that explain the state of the group."""
    yield from _introduction(group)
    if group.assignor:
        yield GroupInsight("assignor", _assignor(group, settings))
    yield from _unused_assignors(group)
    convergence = list(_convergence(group))
    yield from convergence or [GroupInsight("convergence", "complete: no member is waited for")]
    for member in sorted(group.members, key=lambda member: member.group_instance_id or ""):
        if member.group_instance_id is not None:
            yield GroupInsight("static member", _static_member(group, member, settings))
    for member in group.members:
        if member.assignment_metadata.error:
            error = member.assignment_metadata.error
            cause = ": the broker computed it, because all members failed to" if error == _FALLBACK_ERROR else ""
            yield GroupInsight("assignment error", f"{name_of(member)} got error {error} with its assignment{cause}")
        if group.group_type == _CONSUMER and member.upgraded is False:
            yield GroupInsight("protocol", f"{name_of(member)} still uses the classic protocol")


def name_of(member: MemberDescription) -> str:
    """Returns the member's ids, client and host for people."""
    instance = [f"instance {member.group_instance_id}"] if member.group_instance_id is not None else []
    return f"{member.member_id} ({', '.join([*instance, f'{member.client_id} on {member.host}'])})"


def summary_of(group: ConsumerGroupDescription) -> str:
    """Returns type, state, size and epochs of the group."""
    count = len(group.members)
    text = f"{group.group_type} group, {group.state}, {count} member{'' if count == 1 else 's'}"
    if group.group_epoch is None:
        return text
    return f"{text}, epoch {group.group_epoch}, target assignment of epoch {group.target_assignment_epoch}"


def _introduction(group: ConsumerGroupDescription) -> Iterator[GroupInsight]:
    """Yields the summary of the group, and its creation time if the broker knows it (KIP-1327).

    The time has its own line. After the epochs it would read as the time of the target assignment.
    """
    yield GroupInsight("group", summary_of(group))
    if group.group_creation_time_ms is not None:
        yield GroupInsight("created", time_text(group.group_creation_time_ms))


def _assignor(group: ConsumerGroupDescription, settings: InsightSettings) -> str:
    if group.group_type != _CONSUMER:
        return f"{group.assignor}: all members support it, and most prefer it (partition.assignment.strategy)"
    if group.is_assigned_by_member:
        return f"{group.assignor}: runs in the members, all of which offer it, and most prefer it"
    names = settings.assignors or [group.assignor]
    if group.assignor in names[1:]:
        return f"{group.assignor}: most members with group.remote.assignor have it"
    if group.assignor != names[0]:
        return f"{group.assignor}: the broker's, one of group.consumer.assignors={','.join(names)}"
    return f"{group.assignor}: the broker's default, the first of group.consumer.assignors"


def _unused_assignors(group: ConsumerGroupDescription) -> Iterator[GroupInsight]:
    """Yields why the broker computes, although members offer client-side assignors (KIP-848 "Assignor Selection")."""
    names = [{assignor.name for assignor in member.client_assignors} for member in group.members]
    if group.is_assigned_by_member or not any(names):
        return
    without = [member.member_id for member, offered in zip(group.members, names, strict=True) if not offered]
    if without:
        text = f"{', '.join(without)} offer{'s' if len(without) == 1 else ''} none"
    elif common := set.intersection(*names):
        text = f"no present member reads the versions of all members of {', '.join(sorted(common))}"
    else:
        text = "there is none that all members offer"
    yield GroupInsight("client-side assignors", f"not used: {text}")


def _convergence(group: ConsumerGroupDescription) -> Iterator[GroupInsight]:
    if group.group_type != _CONSUMER:
        if group.state in _CLASSIC_WAITS:
            yield GroupInsight("convergence", f"waits for {_CLASSIC_WAITS[group.state]}")
        return
    target_epoch = group.target_assignment_epoch or 0
    if group.members and (group.group_epoch or 0) > target_epoch:
        yield GroupInsight("convergence", f"the target assignment is out of date: {_next_target(group)}")
    owners = {partition: member for member in group.members for partition in member.assignment}
    for member in group.members:
        text = ", ".join(_member_convergence(member, owners, target_epoch))
        if text:
            yield GroupInsight("convergence", f"{name_of(member)} {text}")


def _next_target(group: ConsumerGroupDescription) -> str:
    times = "once" if group.failed_computations == 1 else f"{group.failed_computations} times"
    failures = f"the assignor {group.assignor} failed {times}"
    if group.computing_member_id is not None:
        members = {member.member_id: name_of(member) for member in group.members}
        computing = members.get(group.computing_member_id, group.computing_member_id)
        text = f"{computing} has until {time_text(group.computing_until_ms)} to compute it"
        return f"{text}; {failures}: {group.assignor_error}" if group.failed_computations else text
    if group.failed_computations:
        return f"{failures}, and is asked again within a minute: {group.assignor_error}"
    if group.is_assigned_by_member:
        return "after the assignment interval, the first able member that sends a heartbeat is asked to compute it"
    return "the first heartbeat after the assignment interval computes it"


def _member_convergence(
    member: MemberDescription, owners: dict[TopicPartition, MemberDescription], target_epoch: int
) -> Iterator[str]:
    if member.member_epoch == LEFT_FOR_A_WHILE or member.target_assignment is None:
        return
    to_revoke = member.assignment - member.target_assignment
    missing = member.target_assignment - member.assignment
    held = {partition for partition in missing if partition in owners}
    if to_revoke:
        yield f"has to give up {partitions_text(to_revoke)}"
    if held:
        holders = ", ".join(sorted({owners[partition].member_id for partition in held}))
        yield f"waits for {partitions_text(held)} from {holders}"
    if missing - held:
        yield f"gets {partitions_text(missing - held)} with its next heartbeat"
    if not to_revoke and not missing and (member.member_epoch or 0) < target_epoch:
        yield f"gets epoch {target_epoch} with its next heartbeat"


def _static_member(group: ConsumerGroupDescription, member: MemberDescription, settings: InsightSettings) -> str:
    timeout = "the session timeout"
    if group.group_type != _CONSUMER or member.upgraded is False:
        timeout = "its own session.timeout.ms"  # responses of brokers do not contain it
    elif settings.session_timeout_ms is not None:
        timeout = f"consumer.session.timeout.ms={settings.session_timeout_ms}"
    if member.member_epoch == LEFT_FOR_A_WHILE:
        kept = partitions_text(member.assignment)
        return f"{member.group_instance_id} left and may return: it keeps {kept} until {timeout} has passed"
    return f"{member.group_instance_id} belongs to {member.member_id} until it sends no heartbeat for {timeout}"


def partitions_text(partitions: Iterable[TopicPartition]) -> str:
    """Formats partitions by topic, such as `t:0,1;u:2`."""
    return assignment_text(by_topic(partitions))


# --- changes ----------------------------------------------------------------------------------------------------------


def changes(before: ConsumerGroupDescription | None, after: ConsumerGroupDescription | None) -> Iterator[GroupInsight]:
    """Yields what changed between two descriptions. None means that the group did not exist."""
    if after is None:
        if before is not None:
            yield GroupInsight("group", "no longer exists")
        return
    if before is None:
        yield from _introduction(after)
        before = _nobody(after)
    elif _epochs(before) != _epochs(after):
        yield GroupInsight("group", "; ".join([summary_of(after), *cause_of(before, after)]))
    old = {member.member_id: member for member in before.members}
    new = {member.member_id: member for member in after.members}
    yield from (GroupInsight("left", name_of(old[member_id])) for member_id in sorted(old.keys() - new.keys()))
    yield from (GroupInsight("joined", name_of(new[member_id])) for member_id in sorted(new.keys() - old.keys()))
    for member_id in sorted(new):
        for text in _member_changes(old.get(member_id), new[member_id]):
            yield GroupInsight("member", f"{member_id} {text}")


def _nobody(group: ConsumerGroupDescription) -> ConsumerGroupDescription:
    return ConsumerGroupDescription(
        group.group_id, group.group_type, group.state, group.protocol_type, group.assignor, [], group.coordinator
    )


def _epochs(group: ConsumerGroupDescription) -> tuple[object, ...]:
    return (group.group_type, group.state, group.group_epoch, group.target_assignment_epoch)


def cause_of(before: ConsumerGroupDescription, after: ConsumerGroupDescription) -> list[str]:
    """Returns why the epochs changed, as far as the descriptions show it."""
    if before.group_type != after.group_type:
        return [f"converted from {before.group_type}"]
    if before.group_epoch == after.group_epoch:
        is_computed = before.target_assignment_epoch != after.target_assignment_epoch
        return ["the target assignment was computed"] if is_computed else []
    old = {member.member_id: member for member in before.members}
    new = {member.member_id: member for member in after.members}
    causes = []
    if new.keys() - old.keys():
        causes.append("members joined")
    if old.keys() - new.keys():
        causes.append("members left")
    stayed = old.keys() & new.keys()
    if any(_subscription(old[member_id]) != _subscription(new[member_id]) for member_id in stayed):
        causes.append("subscriptions changed")
    if any(old[member_id].client_assignors != new[member_id].client_assignors for member_id in stayed):
        causes.append("client-side assignors or their metadata changed")
    return [f"because {' and '.join(causes)}" if causes else "because subscribed topics or settings changed"]


def _subscription(member: MemberDescription) -> tuple[object, ...]:
    return (sorted(member.subscribed_topic_names), member.subscribed_topic_regex, member.rack_id)


def _member_changes(before: MemberDescription | None, after: MemberDescription) -> Iterator[str]:
    owned = frozenset[TopicPartition]() if before is None else before.assignment
    if owned - after.assignment:
        yield f"gave up {partitions_text(owned - after.assignment)}"
    if after.assignment - owned:
        yield f"took {partitions_text(after.assignment - owned)}"
    if after.target_assignment is not None:
        asked = after.assignment - after.target_assignment
        asked_before = frozenset[TopicPartition]()
        if before is not None and before.target_assignment is not None:
            asked_before = before.assignment - before.target_assignment
        if asked - asked_before:
            yield f"is asked to give up {partitions_text(asked - asked_before)}"
    if after.member_epoch == LEFT_FOR_A_WHILE and (before is None or before.member_epoch != LEFT_FOR_A_WHILE):
        yield "left and may return"
