# SPDX-License-Identifier: Apache-2.0
"""`kcoord migrate --check GROUP`: will the group's members be taken along when the first consumer of the new protocol
joins (KIP-848), and if not, why. The rules are those of the coordinator; nothing is changed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from kcoord.cli.blocking_client import BlockingClient, RequestFailed, check
from kcoord.cli.output import print_json
from kcoord.client.admin.groups import CONSUMER_PROTOCOL_TYPE
from kcoord.coordinator.group.classic.consumer_protocol import read_assignment, read_subscription
from protocol.errors import DecodeError, Errors
from protocol.messages import (
    DescribeConfigsRequest,
    DescribeConfigsResponse,
    DescribeGroupsRequest,
    DescribeGroupsResponse,
)

POLICY = "group.consumer.migration.policy"
MAX_SIZE = "group.consumer.max.size"
_UPGRADING_POLICIES = ("bidirectional", "upgrade")
_DEFAULT_ADDRESS = "127.0.0.1:9092"
_BROKER_RESOURCE = 4
_DESCRIBE_GROUPS_VERSION = 5
_DESCRIBE_CONFIGS_VERSION = 4
_UNKNOWN_OR_CONVERTED = "Dead"


class Answer(NamedTuple):
    """Whether the group can become one of the consumer protocol, and all that can be said about it."""

    can_convert: bool
    reasons: list[str]


def main(arguments: Sequence[str]) -> int:
    parser = make_parser()
    options = parser.parse_args(arguments)
    try:
        answer = _ask(options)
    except (RequestFailed, DecodeError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    if options.json:
        print_json({"group": options.check, "can_convert": answer.can_convert, "reasons": answer.reasons})
    else:
        print(f"{options.check}: {'can be converted' if answer.can_convert else 'cannot be converted'}")
        for reason in answer.reasons:
            print(f"  {reason}")
    return 0 if answer.can_convert else 1


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kcoord migrate", description=__doc__, allow_abbrev=False)
    parser.add_argument("--check", required=True, metavar="GROUP", help="a classic group")
    parser.add_argument("--bootstrap-server", default=_DEFAULT_ADDRESS, metavar="HOST:PORT")
    parser.add_argument("--timeout", type=int, default=30_000, metavar="MS", help="for each answer (default 30000 ms)")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    return parser


def _ask(options: argparse.Namespace) -> Answer:
    seconds = options.timeout / 1000
    with BlockingClient(options.bootstrap_server, seconds) as bootstrap:
        node_id, coordinator = bootstrap.coordinator_node_of(options.check)
    with BlockingClient(coordinator, seconds) as client:
        request = DescribeGroupsRequest(groups=[options.check])
        group = client.call(request, _DESCRIBE_GROUPS_VERSION, DescribeGroupsResponse).groups[0]
        check(group.error_code, options.check)
        state = client.group_state(options.check)
        return judge(group, state, _settings(client, node_id))


def _settings(client: BlockingClient, node_id: int) -> dict[str, str]:
    resource = DescribeConfigsRequest.DescribeConfigsResource(
        resource_type=_BROKER_RESOURCE, resource_name=str(node_id), configuration_keys=[POLICY, MAX_SIZE]
    )
    request = DescribeConfigsRequest(resources=[resource])
    result = client.call(request, _DESCRIBE_CONFIGS_VERSION, DescribeConfigsResponse).results[0]
    check(result.error_code, f"the settings of broker {node_id}")
    return {entry.name: entry.value for entry in result.configs if entry.value is not None}


def judge(
    group: DescribeGroupsResponse.DescribedGroup, listed_state: str | None, settings: Mapping[str, str]
) -> Answer:
    """By the coordinator's rules; an empty group is always converted, since nobody would notice."""
    if group.group_state == _UNKNOWN_OR_CONVERTED:
        if listed_state is not None:
            return Answer(True, ["it is one of the consumer protocol already"])
        return Answer(False, [f"{Errors.GROUP_ID_NOT_FOUND.name}: there is no such group"])
    if not group.members:
        return Answer(True, ["it has no members: the first consumer makes it a group of its protocol"])
    obstacles = list(_obstacles(group, settings))
    notes = [f"members of the classic protocol that would be taken along with their assignments: {len(group.members)}"]
    return Answer(not obstacles, obstacles or notes)


def _obstacles(group: DescribeGroupsResponse.DescribedGroup, settings: Mapping[str, str]) -> Iterator[str]:
    policy = settings.get(POLICY)
    if policy is not None and policy.lower() not in _UPGRADING_POLICIES:
        yield f"{POLICY}={policy} does not allow it"
    if group.protocol_type != CONSUMER_PROTOCOL_TYPE:
        yield f"its protocol type is {group.protocol_type!r}, not {CONSUMER_PROTOCOL_TYPE!r}"
        return
    largest = settings.get(MAX_SIZE)
    if largest is not None and len(group.members) > int(largest):
        yield f"it has {len(group.members)} members, and {MAX_SIZE}={largest}"
    for member in group.members:
        name = f"member {member.member_id} ({member.client_id} on {member.client_host})"
        assignment = read_assignment(member.member_assignment)
        # Until the members have agreed on a protocol, the broker does not tell their subscriptions.
        if group.protocol_data and read_subscription(member.member_metadata) is None:
            yield f"the subscription of {name} cannot be read"
        if assignment is None:
            yield f"the assignment of {name} cannot be read"
        elif assignment.user_data:
            yield f"{name} uses a custom assignor: its assignment has data that only that assignor understands"
