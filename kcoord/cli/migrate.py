# SPDX-License-Identifier: Apache-2.0
"""`kcoord migrate --check --group GROUP`: checks whether a classic group can be converted to the consumer protocol.

The conversion happens when the first consumer of the new protocol joins (KIP-848). If it is impossible, the command
prints all reasons. The rules are those of the coordinator. Nothing is changed.

With `--assignor` the first consumer is one with a client-side assignor. It can also convert groups with custom
assignors and user data, if it has the assignor of the group. If the group is converted already, the command says
whether such a consumer could join.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from kcoord.cli.old_forms import add_old_positional, require_group
from kcoord.cli.output import print_json
from kcoord.cli.session import EXIT_FAILED, add_connection_options, add_json_option, run_with_admin
from kcoord.client.admin.client import AdminClient
from kcoord.client.admin.groups import CONSUMER_PROTOCOL_TYPE
from kcoord.client.admin.model import ConfigResource, ConfigResourceType, ConsumerGroupDescription
from kcoord.client.cluster import Cluster, CoordinatorType
from kcoord.client.results import error_of
from kcoord.coordinator.group.classic.consumer_protocol import read_assignment, read_subscription
from kcoord.coordinator.group.migration import user_data_obstacle
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import DescribeGroupsRequest, DescribeGroupsResponse

POLICY = "group.consumer.migration.policy"
MAX_SIZE = "group.consumer.max.size"
CLIENT_ASSIGNORS = "kcoord.client.assignors.enable"
_UPGRADING_POLICIES = ("bidirectional", "upgrade")
_DESCRIBE_GROUPS_VERSION = 5
"""The last version in which a missing group is not an error."""
_UNKNOWN_OR_CONVERTED = "Dead"


_ASSIGNOR: Final = re.compile(r"(?P<name>.+):(?P<lowest>-?\d+)-(?P<highest>\d+)")


class NewAssignor(NamedTuple):
    """A client-side assignor of a consumer that would join, with the versions of metadata that it reads."""

    name: str
    lowest: int
    highest: int

    @classmethod
    def parse(cls, text: str) -> NewAssignor:
        """Reads NAME:MIN-MAX. Raises ArgumentTypeError."""
        match = _ASSIGNOR.fullmatch(text)
        if match is None or not -1 <= int(match["lowest"]) <= int(match["highest"]):
            raise argparse.ArgumentTypeError(f"{text!r} is not NAME:MIN-MAX with versions from -1 on")
        return cls(match["name"], int(match["lowest"]), int(match["highest"]))


class Answer(NamedTuple):
    """Whether the group can be converted, or joined if it is converted already, with the reasons or notes."""

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
    parser.add_argument(
        "--assignor",
        metavar="NAME:MIN-MAX",
        type=NewAssignor.parse,
        help="a client-side assignor of the consumer that would join, with the versions that it reads",
    )
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
    description: ConsumerGroupDescription | None = None
    if group_id in states:
        description = (await admin.describe_consumer_groups([group_id]))[group_id]
        broker = ConfigResource(ConfigResourceType.BROKER, str(description.coordinator.node_id))
        entries = (await admin.describe_configs([broker]))[broker]
        settings = {name: entry.value for name, entry in entries.items() if entry.value is not None}
    if description is not None and options.assignor is not None and group.group_state == _UNKNOWN_OR_CONVERTED:
        return judge_converted(description, settings, options.assignor)
    return judge(group, states.get(group_id), settings, options.assignor)


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
    group: DescribeGroupsResponse.DescribedGroup,
    listed_state: str | None,
    settings: Mapping[str, str],
    assignor: NewAssignor | None = None,
) -> Answer:
    """Applies the coordinator's rules. A group without members is always converted."""
    if group.group_state == _UNKNOWN_OR_CONVERTED:
        if listed_state is not None:
            return Answer(True, ["it already uses the consumer protocol"])
        return Answer(False, [f"{Errors.GROUP_ID_NOT_FOUND.name}: the group does not exist"])
    if not group.members:
        return Answer(True, ["it has no members, so the first consumer of the new protocol converts it"])
    obstacles = list(_obstacles(group, settings, assignor))
    notes = [f"members of the classic protocol that would keep their assignments: {len(group.members)}"]
    return Answer(not obstacles, obstacles or notes)


def judge_converted(
    description: ConsumerGroupDescription, settings: Mapping[str, str], assignor: NewAssignor
) -> Answer:
    """Applies the coordinator's rules to a consumer that joins a group of the consumer protocol."""
    obstacles = list(_disabled(settings))
    notes = ["it already uses the consumer protocol"]
    is_in_use = description.is_assigned_by_member and description.assignor == assignor.name
    for member in description.members:
        name = f"member {member.member_id} ({member.client_id} on {member.host})"
        present = next((offered for offered in member.client_assignors if offered.name == assignor.name), None)
        if present is None:
            # Members of the classic protocol have no client-side assignors of their own.
            if member.upgraded is not False:
                notes.append(f"{name} does not offer {assignor.name}, so the group would not use it")
        elif is_in_use and (present.minimum_version > assignor.highest or present.maximum_version < assignor.lowest):
            versions = f"{present.minimum_version} to {present.maximum_version}"
            obstacles.append(f"{name} reads only versions {versions} of {assignor.name}")
    return Answer(not obstacles, obstacles or notes)


def _disabled(settings: Mapping[str, str]) -> Iterator[str]:
    if settings.get(CLIENT_ASSIGNORS) != "true":
        yield f"the broker ignores client-side assignors: {CLIENT_ASSIGNORS} is not true"


def _obstacles(
    group: DescribeGroupsResponse.DescribedGroup, settings: Mapping[str, str], assignor: NewAssignor | None
) -> Iterator[str]:
    policy = settings.get(POLICY)
    if policy is not None and policy.lower() not in _UPGRADING_POLICIES:
        yield f"{POLICY}={policy} does not allow the conversion"
    if group.protocol_type != CONSUMER_PROTOCOL_TYPE:
        yield f"its protocol type is {group.protocol_type!r}, not {CONSUMER_PROTOCOL_TYPE!r}"
        return
    largest = settings.get(MAX_SIZE)
    if largest is not None and len(group.members) > int(largest):
        yield f"it has {len(group.members)} members, but {MAX_SIZE}={largest}"
    if assignor is not None:
        yield from _disabled(settings)
        if not group.protocol_data:
            yield f"it is in the state {group.group_state}, in which the broker does not tell its assignor; try again"
            return
    for member in group.members:
        yield from _obstacles_of(member, group.protocol_data, assignor)


def _obstacles_of(
    member: DescribeGroupsResponse.DescribedGroupMember, protocol: str, assignor: NewAssignor | None
) -> Iterator[str]:
    name = f"member {member.member_id} ({member.client_id} on {member.client_host})"
    assignment = read_assignment(member.member_assignment)
    # The broker returns no subscriptions before the members have agreed on a protocol.
    subscription = read_subscription(member.member_metadata) if protocol else None
    if protocol and subscription is None:
        yield f"the subscription of {name} cannot be read"
    if assignment is None:
        yield f"the assignment of {name} cannot be read"
    if assignor is None:
        if assignment is not None and assignment.user_data:
            yield f"{name} uses a custom assignor: its assignment has user data that only this assignor can decode"
        return
    parts = {"subscription": subscription, "assignment": assignment}
    part = next((part for part, message in parts.items() if message is not None and message.user_data), None)
    obstacle = user_data_obstacle(protocol, {assignor.name: assignor.lowest})
    if part is not None and obstacle is not None:
        yield f"the {part} of {name} has user data of the assignor {protocol}, and {obstacle}"
