# SPDX-License-Identifier: Apache-2.0
"""`kcoord migrate --check --group GROUP`: checks whether a classic group can be converted to the consumer protocol.

The conversion happens when the first consumer of the new protocol joins (KIP-848). If it is impossible, the command
prints all reasons. The rules are those of the coordinator. Nothing is changed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from kcoord.cli.old_forms import add_old_positional, require_group
from kcoord.cli.output import print_json
from kcoord.cli.session import EXIT_FAILED, add_connection_options, add_json_option, run_with_admin
from kcoord.client.admin.client import AdminClient
from kcoord.client.admin.groups import CONSUMER_PROTOCOL_TYPE
from kcoord.client.admin.model import ConfigResource, ConfigResourceType
from kcoord.client.cluster import Cluster, CoordinatorType
from kcoord.client.results import error_of
from kcoord.coordinator.group.classic.consumer_protocol import read_assignment, read_subscription
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import DescribeGroupsRequest, DescribeGroupsResponse

POLICY = "group.consumer.migration.policy"
MAX_SIZE = "group.consumer.max.size"
_UPGRADING_POLICIES = ("bidirectional", "upgrade")
_DESCRIBE_GROUPS_VERSION = 5
"""The last version in which a missing group is not an error."""
_UNKNOWN_OR_CONVERTED = "Dead"


class Answer(NamedTuple):
    """Whether the group can be converted, with the reasons or notes."""

    can_convert: bool
    reasons: list[str]


def main(arguments: Sequence[str]) -> int:
    parser = make_parser()
    options = parser.parse_args(arguments)
    require_group(parser, options)
    return run_with_admin(parser.prog, options, _check)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kcoord migrate", description=__doc__, allow_abbrev=False)
    parser.add_argument("--check", action="store_true", required=True, help="only check, change nothing")
    parser.add_argument("--group", metavar="GROUP", help="a classic group")
    add_old_positional(parser, "--group", "GROUP")
    add_connection_options(parser)
    add_json_option(parser)
    return parser


async def _check(admin: AdminClient, options: argparse.Namespace) -> int:
    answer = await _ask(admin, options)
    if options.json:
        print_json({"group": options.group, "can_convert": answer.can_convert, "reasons": answer.reasons})
    else:
        print(f"{options.group}: {'can be converted' if answer.can_convert else 'cannot be converted'}")
        for reason in answer.reasons:
            print(f"  {reason}")
    return 0 if answer.can_convert else EXIT_FAILED


async def _ask(admin: AdminClient, options: argparse.Namespace) -> Answer:
    group_id = options.group
    states = {group.group_id: group.state for group in await admin.list_groups()}
    group = await _describe(admin, group_id)
    settings: dict[str, str] = {}
    if group_id in states:
        coordinator = (await admin.describe_consumer_groups([group_id]))[group_id].coordinator
        broker = ConfigResource(ConfigResourceType.BROKER, str(coordinator.node_id))
        entries = (await admin.describe_configs([broker]))[broker]
        settings = {name: entry.value for name, entry in entries.items() if entry.value is not None}
    return judge(group, states.get(group_id), settings)


async def _describe(admin: AdminClient, group_id: str) -> DescribeGroupsResponse.DescribedGroup:
    """Returns the group with the raw bytes of its members, which AdminClient's description does not have."""
    cluster = Cluster(admin.config)
    try:
        response = await cluster.retry(
            f"describe {group_id}",
            cluster.deadline(),
            lambda: cluster.call_coordinator(
                CoordinatorType.GROUP,
                group_id,
                DescribeGroupsRequest(groups=[group_id]),
                DescribeGroupsResponse,
                lambda answer: [group.error_code for group in answer.groups],
                highest=_DESCRIBE_GROUPS_VERSION,
            ),
        )
    finally:
        await cluster.close()
    (group,) = response.groups
    if group.error_code:
        raise KafkaError(error_of(group.error_code), group_id)
    return group


def judge(
    group: DescribeGroupsResponse.DescribedGroup, listed_state: str | None, settings: Mapping[str, str]
) -> Answer:
    """Applies the coordinator's rules. A group without members is always converted."""
    if group.group_state == _UNKNOWN_OR_CONVERTED:
        if listed_state is not None:
            return Answer(True, ["it already uses the consumer protocol"])
        return Answer(False, [f"{Errors.GROUP_ID_NOT_FOUND.name}: the group does not exist"])
    if not group.members:
        return Answer(True, ["it has no members, so the first consumer of the new protocol converts it"])
    obstacles = list(_obstacles(group, settings))
    notes = [f"members of the classic protocol that would keep their assignments: {len(group.members)}"]
    return Answer(not obstacles, obstacles or notes)


def _obstacles(group: DescribeGroupsResponse.DescribedGroup, settings: Mapping[str, str]) -> Iterator[str]:
    policy = settings.get(POLICY)
    if policy is not None and policy.lower() not in _UPGRADING_POLICIES:
        yield f"{POLICY}={policy} does not allow the conversion"
    if group.protocol_type != CONSUMER_PROTOCOL_TYPE:
        yield f"its protocol type is {group.protocol_type!r}, not {CONSUMER_PROTOCOL_TYPE!r}"
        return
    largest = settings.get(MAX_SIZE)
    if largest is not None and len(group.members) > int(largest):
        yield f"it has {len(group.members)} members, but {MAX_SIZE}={largest}"
    for member in group.members:
        name = f"member {member.member_id} ({member.client_id} on {member.client_host})"
        assignment = read_assignment(member.member_assignment)
        # The broker returns no subscriptions before the members have agreed on a protocol.
        if group.protocol_data and read_subscription(member.member_metadata) is None:
            yield f"the subscription of {name} cannot be read"
        if assignment is None:
            yield f"the assignment of {name} cannot be read"
        elif assignment.user_data:
            yield f"{name} uses a custom assignor: its assignment has user data that only this assignor can decode"
