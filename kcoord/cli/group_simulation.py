# SPDX-License-Identifier: Apache-2.0
"""`kcoord groups simulate`: the target assignment that another assignor would compute for a group.

Theory of operation. The assignor gets what the coordinator would give it: the members with their present target
assignment, from the group's description, and the subscribed topics with the racks of their replicas, from the metadata.
A built-in assignor runs here. An assignor of one's own runs in a process of its own, under the time limit of the
group's broker, and its result has to pass the broker's check. Nothing changes at the broker.

The result differs from what the broker would compute in two cases: a member's regular expression matches the topics
that the user of the command may describe, and the racks of brokers that are down are unknown.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Final

from kcoord.cli.old_forms import add_old_positional, require_group
from kcoord.cli.output import OutputColumn, Row, assignment_text, by_topic, print_json, print_rows
from kcoord.cli.session import CommandError, add_connection_options, add_json_option, run_with_admin
from kcoord.client.admin.client import AdminClient
from kcoord.client.admin.model import ConfigResource, ConfigResourceType, ConsumerGroupDescription
from kcoord.client.types import TopicPartition
from kcoord.config import BROKER_KEYS
from kcoord.config.broker_settings import KNOWN_CONSUMER_ASSIGNORS
from kcoord.config.checks import check_assignor_name
from kcoord.coordinator.group.assignor import ASSIGNORS, Assignment, MemberSpec
from kcoord.coordinator.group.regex import compile_pattern
from kcoord_protocol.errors import Errors

_TIMEOUT: Final = "kcoord.assignor.timeout.ms"

MEMBERS: Final = (
    OutputColumn("CONSUMER-ID", "consumer_id"),
    OutputColumn("GROUP-INSTANCE-ID", "group_instance_id"),
    OutputColumn("RACK", "rack"),
    OutputColumn("TARGET-ASSIGNMENT", "target_assignment", assignment_text),
    OutputColumn("NEW-TARGET-ASSIGNMENT", "new_target_assignment", assignment_text),
)
TARGETS: Final = (
    OutputColumn("TARGET", "target"),
    OutputColumn("ASSIGNOR", "assignor"),
    OutputColumn("#PARTITIONS", "partitions"),
    OutputColumn("MIN-LOAD", "min_load"),
    OutputColumn("MAX-LOAD", "max_load"),
    OutputColumn("SPREAD", "spread"),
    OutputColumn("RACK-MATCHES", "rack_matches"),
)


@dataclass(slots=True)
class AssignorInput:
    """What an assignor gets: the members, and by topic id the names, partition counts and racks of the topics."""

    members: dict[str, MemberSpec] = field(default_factory=dict)
    names: dict[bytes, str] = field(default_factory=dict)
    partition_counts: dict[bytes, int] = field(default_factory=dict)
    racks: dict[bytes, list[frozenset[str]]] = field(default_factory=dict)
    """The racks of the replicas, by partition."""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "simulate",
        help="show the target assignment that another assignor would compute",
        description="Computes the target assignment of a consumer group by another assignor, and compares it with the "
        "present one. Changes nothing.",
    )
    parser.add_argument("--group", metavar="GROUP", help="the group, of the consumer protocol")
    add_old_positional(parser, "--group", "GROUP")
    parser.add_argument(
        "--assignor",
        required=True,
        metavar="NAME",
        help="uniform, range, uniform-rack, package.module:Class, or an entry point of the group kcoord.assignors",
    )
    add_connection_options(parser)
    add_json_option(parser)

    def run(options: argparse.Namespace) -> int:
        require_group(parser, options)
        return run_with_admin(parser.prog, options, _simulate)

    parser.set_defaults(run=run)


async def _simulate(admin: AdminClient, options: argparse.Namespace) -> int:
    check_assignor_name(options.assignor)
    group = (await admin.describe_consumer_groups([options.group]))[options.group]
    if group.group_epoch is None:
        raise CommandError(
            f"group {options.group} uses the classic protocol: its members compute the assignment, not the broker"
        )
    if not group.members:
        raise CommandError(f"group {options.group} has no members")
    work = await _assignor_input(admin, group)
    name = KNOWN_CONSUMER_ASSIGNORS.get(options.assignor)
    if name is None:
        name, assignment = _assign_in_process(options.assignor, await _timeout_ms(admin, group), work)
    else:
        assignment = ASSIGNORS[name].assign(work.members, work.partition_counts, work.racks.__getitem__)
    _print(group, name, work, assignment, as_json=options.json)
    return 0


async def _assignor_input(admin: AdminClient, group: ConsumerGroupDescription) -> AssignorInput:
    subscriptions = await _subscriptions(admin, group)
    results = await admin.describe_topics(frozenset().union(*subscriptions.values()))
    for error in results.errors.values():
        if error.error is not Errors.UNKNOWN_TOPIC_OR_PARTITION:
            raise error
    rack_of = {node.node_id: node.rack for node in (await admin.describe_cluster()).nodes}
    work = AssignorInput()
    for topic in results.values.values():
        work.names[topic.topic_id] = topic.name
        work.partition_counts[topic.topic_id] = len(topic.partitions)
        work.racks[topic.topic_id] = [
            frozenset(rack for replica in partition.replicas if (rack := rack_of.get(replica)))
            for partition in topic.partitions
        ]
    topic_ids = {name: topic_id for topic_id, name in work.names.items()}
    for member in group.members:
        assigned: dict[bytes, set[int]] = {}
        for name, partition in member.target_assignment or ():
            if name in topic_ids:
                assigned.setdefault(topic_ids[name], set()).add(partition)
        work.members[member.member_id] = MemberSpec(
            member.group_instance_id,
            member.rack_id,
            frozenset(topic_ids[name] for name in subscriptions[member.member_id] if name in topic_ids),
            {topic_id: frozenset(partitions) for topic_id, partitions in assigned.items()},
            {offered.name: offered.metadata.data for offered in member.client_assignors if offered.metadata.data},
        )
    return work


async def _subscriptions(admin: AdminClient, group: ConsumerGroupDescription) -> dict[str, frozenset[str]]:
    """Returns the names of the subscribed topics by member id. The topics may not exist."""
    matches: dict[str, frozenset[str]] = {}
    regexes = {member.subscribed_topic_regex for member in group.members if member.subscribed_topic_regex}
    if regexes:
        topics = await admin.list_topics(include_internal=True)
        for regex in regexes:
            is_match = compile_pattern(regex)
            matches[regex] = frozenset(topic.name for topic in topics if is_match(topic.name))
    return {
        member.member_id: matches.get(member.subscribed_topic_regex or "", frozenset()).union(
            member.subscribed_topic_names
        )
        for member in group.members
    }


async def _timeout_ms(admin: AdminClient, group: ConsumerGroupDescription) -> int:
    """Returns the limit of the group's broker; the default if the broker does not show it."""
    broker = ConfigResource(ConfigResourceType.BROKER, str(group.coordinator.node_id))
    entry = (await admin.describe_configs([broker])).values.get(broker, {}).get(_TIMEOUT)
    if entry is not None and entry.value is not None:
        return int(entry.value)
    default = BROKER_KEYS[_TIMEOUT].default
    assert isinstance(default, int)
    return default


def _assign_in_process(reference: str, timeout_ms: int, work: AssignorInput) -> tuple[str, Assignment]:
    """Returns the name and the assignment of an assignor of one's own."""
    from kcoord.server.shards.own_assignors import AssignorError, OwnAssignor

    try:
        with closing(OwnAssignor(reference, timeout_ms)) as assignor:
            racks = work.racks.__getitem__
            return assignor.name, assignor.assign(work.members, work.partition_counts, racks, work.names)
    except AssignorError as error:
        raise CommandError(f"{reference}: {error}") from None


def _print(
    group: ConsumerGroupDescription, name: str, work: AssignorInput, assignment: Assignment, *, as_json: bool
) -> None:
    before = {member.member_id: member.target_assignment or frozenset() for member in group.members}
    after = {
        member_id: frozenset(
            TopicPartition(work.names[topic_id], partition)
            for topic_id, partitions in assignment.get(member_id, {}).items()
            for partition in partitions
        )
        for member_id in before
    }
    old_owners = {partition: member_id for member_id, held in before.items() for partition in held}
    moved = {
        partition
        for member_id, held in after.items()
        for partition in held
        if old_owners.get(partition, member_id) != member_id
    }
    rows = [
        {
            "consumer_id": member.member_id,
            "group_instance_id": member.group_instance_id,
            "rack": member.rack_id,
            "target_assignment": by_topic(before[member.member_id]),
            "new_target_assignment": by_topic(after[member.member_id]),
        }
        for member in sorted(group.members, key=lambda member: (member.group_instance_id or "", member.member_id))
    ]
    targets = [_target("present", group.assignor, work, before), _target("new", name, work, after)]
    if as_json:
        print_json({"group": group.group_id, "members": rows, "targets": targets, "moved": by_topic(moved)})
        return
    print_rows(MEMBERS, rows, as_json=False)
    print()
    print_rows(TARGETS, targets, as_json=False)
    print()
    total = targets[1]["partitions"]
    which = f": {assignment_text(by_topic(moved))}" if moved else ""
    print(f"{len(moved)} of {total} partitions would move{which}")


def _target(which: str, assignor: str, work: AssignorInput, claims: Mapping[str, frozenset[TopicPartition]]) -> Row:
    """Returns a row of a target assignment. A partition matches if a replica is in the rack of its member."""
    loads = [len(claim) for claim in claims.values()]
    racks = {work.names[topic_id]: of_partitions for topic_id, of_partitions in work.racks.items()}
    return {
        "target": which,
        "assignor": assignor,
        "partitions": sum(loads),
        "min_load": min(loads),
        "max_load": max(loads),
        "spread": max(loads) - min(loads),
        "rack_matches": sum(
            work.members[member_id].rack_id in _racks_of(racks.get(topic, ()), partition)
            for member_id, claim in claims.items()
            for topic, partition in claim
        ),
    }


def _racks_of(racks: Sequence[frozenset[str]], partition: int) -> frozenset[str]:
    return racks[partition] if partition < len(racks) else frozenset()
