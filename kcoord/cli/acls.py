# SPDX-License-Identifier: Apache-2.0
"""`kcoord acls --add|--remove|--list`: add, remove and list ACLs.

Options and output are those of kafka-acls.sh, in the order of operations. `--json` prints the list as JSON.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from typing import Final

from kcoord.cli.options import option_name, parse_options
from kcoord.cli.output import print_json
from kcoord.cli.session import add_connection_options, add_json_option, run_with_admin
from kcoord.client.admin.client import AdminClient
from kcoord_protocol.acls import (
    CLUSTER_NAME,
    OPERATIONS,
    WILDCARD,
    Acl,
    AclFilter,
    AclOperation,
    PatternType,
    PermissionType,
    ResourceType,
)

ALLOW, DENY = PermissionType.ALLOW, PermissionType.DENY
_PATTERN_TYPES: Final = ("any", "match", "literal", "prefixed")
_ALL = AclOperation.ALL
_RESOURCE_OPTIONS: Final = {
    "topic": ResourceType.TOPIC,
    "group": ResourceType.GROUP,
    "transactional_id": ResourceType.TRANSACTIONAL_ID,
    "delegation_token": ResourceType.DELEGATION_TOKEN,
    "user_principal": ResourceType.USER,
}

Resource = tuple[ResourceType, str, PatternType]


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kcoord acls", description=__doc__, allow_abbrev=False)
    parser.add_argument("--add", action="store_true", help="add ACLs")
    parser.add_argument("--remove", action="store_true", help="remove ACLs")
    parser.add_argument("--list", action="store_true", help="list ACLs, of all resources or of those that are named")
    _add_resources(parser)
    for name, text in (
        ("--allow-principal", "a principal that is allowed the operations, as Type:name"),
        ("--deny-principal", "a principal that is denied the operations, as Type:name"),
        ("--principal", "with --list: only ACLs of this principal"),
        ("--allow-host", "host of the --allow-principal (default *)"),
        ("--deny-host", "host of the --deny-principal (default *)"),
    ):
        parser.add_argument(name, action="append", default=[], metavar="NAME", help=f"{text}; may be repeated")
    parser.add_argument(
        "--operation",
        action="append",
        default=[],
        metavar="OPERATION",
        help="an operation that is allowed or denied (default All); may be repeated: "
        + ", ".join(operation.title for operation in AclOperation if operation >= _ALL),
    )
    parser.add_argument("--producer", action="store_true", help="ACLs of a producer: Write, Describe, Create on topics")
    parser.add_argument(
        "--consumer", action="store_true", help="ACLs of a consumer: Read, Describe on topics and Read on groups"
    )
    parser.add_argument("--idempotent", action="store_true", help="with --producer: IdempotentWrite on the cluster too")
    parser.add_argument("--force", action="store_true", help="do not ask before ACLs are removed")
    add_connection_options(parser)
    add_json_option(parser)
    return parser


def _add_resources(parser: argparse.ArgumentParser) -> None:
    for name, text in (
        ("--topic", "a topic; * stands for all topics"),
        ("--group", "a consumer group; * stands for all groups"),
        ("--transactional-id", "a transactional id; * stands for all"),
        ("--delegation-token", "a delegation token; * stands for all"),
        ("--user-principal", "a user as resource of CreateTokens and DescribeTokens"),
    ):
        parser.add_argument(name, action="append", default=[], metavar="NAME", help=f"{text}; may be repeated")
    parser.add_argument("--cluster", action="store_true", help="the cluster")
    parser.add_argument(
        "--resource-pattern-type",
        type=str.lower,
        choices=_PATTERN_TYPES,
        default="literal",
        help="how the names are meant: literal or prefixed. With --list and --remove also any (both types) and match "
        "(all patterns that the names match)",
    )


def main(arguments: Sequence[str]) -> int:
    parser = make_parser()
    options = parse_options(parser, arguments, find_problem)
    return run_with_admin(parser.prog, options, _add if options.add else _remove if options.remove else _list)


def find_problem(options: argparse.Namespace) -> str | None:
    """Returns why the options cannot be combined, or None if they can. The texts are those of kafka-acls.sh."""
    if options.add + options.remove + options.list != 1:
        return "Command must include exactly one action: --list, --add, --remove."
    return _problem_of_list(options) if options.list else _problem_of_change(options)


def _problem_of_list(options: argparse.Namespace) -> str | None:
    for name in (
        "producer",
        "consumer",
        "idempotent",
        "allow_host",
        "deny_host",
        "allow_principal",
        "deny_principal",
        "operation",
        "force",
    ):
        if getattr(options, name):
            return f"--list can't be used with {option_name(name)}"
    return _problem_of_principals(options.principal)


def _problem_of_change(options: argparse.Namespace) -> str | None:
    if options.json:
        return "--json goes with --list"
    if options.principal:
        return "The --principal option is only available if --list is set"
    if options.add and options.resource_pattern_type in ("any", "match"):
        shown = options.resource_pattern_type.upper()
        return f"A '--resource-pattern-type' value of '{shown}' is not valid when adding acls."
    has_principal = options.allow_principal or options.deny_principal
    if options.add and not has_principal:
        return "You must specify one of: --allow-principal, --deny-principal when trying to add ACLs."
    for name in ("allow", "deny"):
        if getattr(options, f"{name}_host") and not getattr(options, f"{name}_principal"):
            return f"--{name}-host goes with --{name}-principal"
    if not has_principal and (options.operation or options.producer or options.consumer):
        return "without --allow-principal and --deny-principal all ACLs of the resources are removed; name a principal"
    problem = _problem_of_roles(options) or _problem_of_principals(options.allow_principal + options.deny_principal)
    if problem is None and not resources_of(options):
        problem = (
            "You must provide at least one resource: --topic <topic> or --cluster or --group <group> or "
            "--delegation-token <Delegation Token ID>"
        )
    return problem or _problem_of_operations(options)


def _problem_of_roles(options: argparse.Namespace) -> str | None:
    if options.idempotent and not options.producer:
        return "The --idempotent option is only available if --producer is set"
    if not options.producer and not options.consumer:
        return None
    for name in ("operation", "deny_principal", "deny_host"):
        if getattr(options, name):
            return f"--{'producer' if options.producer else 'consumer'} can't be used with {option_name(name)}"
    if options.producer and not options.topic:
        return "With --producer you must specify a --topic"
    is_incomplete = not options.topic or not options.group
    if options.consumer and (is_incomplete or (not options.producer and (options.cluster or options.transactional_id))):
        return (
            "With --consumer you must specify a --topic and a --group and no --cluster or --transactional-id option "
            "should be specified."
        )
    return None


def _problem_of_principals(principals: Iterable[str]) -> str | None:
    for principal in principals:
        type_, _, name = principal.strip().partition(":")
        if not type_ or not name:
            return f"expected a string in format principalType:principalName but got {principal}"
    return None


def _problem_of_operations(options: argparse.Namespace) -> str | None:
    for text in options.operation:
        if _operation_of(text) is None:
            return f"there is no operation {text}"
    for resource_type, _, _ in resources_of(options):
        possible = {_ALL, *OPERATIONS[resource_type]}
        if any(_operation_of(text) not in possible for text in options.operation):
            names = ", ".join(operation.name for operation in sorted(possible))
            return f"ResourceType {resource_type.name} only supports operations [{names}]"
    return None


def _operation_of(text: str) -> AclOperation | None:
    """Returns the operation of a name such as DescribeConfigs, in any case. ANY is none."""
    name = text.strip().lower().replace("_", "")
    return next(
        (operation for operation in AclOperation if operation >= _ALL and operation.title.lower() == name), None
    )


def resources_of(options: argparse.Namespace) -> list[Resource]:
    """Returns the resources that the options name."""
    pattern_type = PatternType[options.resource_pattern_type.upper()]
    resources: list[Resource] = [
        (resource_type, name.strip(), pattern_type)
        for attribute, resource_type in _RESOURCE_OPTIONS.items()
        for name in dict.fromkeys(getattr(options, attribute))
    ]
    if options.cluster or options.idempotent:
        # There is one cluster, so its pattern type is never a prefix.
        resources.append((ResourceType.CLUSTER, CLUSTER_NAME, PatternType.LITERAL))
    return resources


def acls_of(options: argparse.Namespace) -> dict[Resource, list[Acl]]:
    """Returns the ACLs that the options describe, by resource. The pattern type may be one for filters."""
    acls: dict[Resource, list[Acl]] = {}
    for resource in resources_of(options):
        entries = [
            Acl(*resource, principal.strip(), host.strip(), operation, permission)
            for principals, hosts, permission in (
                (options.allow_principal, options.allow_host, ALLOW),
                (options.deny_principal, options.deny_host, DENY),
            )
            for principal in dict.fromkeys(principals)
            for host in dict.fromkeys(hosts or [WILDCARD])
            for operation in _operations_on(options, resource[0])
        ]
        if entries or not (options.producer or options.consumer):
            acls[resource] = entries
    return acls


def _operations_on(options: argparse.Namespace, resource_type: ResourceType) -> list[AclOperation]:
    """Returns the operations for the resources of a type, in the order of their codes."""
    if not options.producer and not options.consumer:
        return sorted({operation for text in options.operation if (operation := _operation_of(text))} or {_ALL})
    operations: set[AclOperation] = set()
    if options.producer:
        operations |= {
            ResourceType.TOPIC: {AclOperation.WRITE, AclOperation.DESCRIBE, AclOperation.CREATE},
            ResourceType.TRANSACTIONAL_ID: {AclOperation.WRITE, AclOperation.DESCRIBE},
            ResourceType.CLUSTER: {AclOperation.IDEMPOTENT_WRITE} if options.idempotent else set(),
        }.get(resource_type, set())
    if options.consumer:
        operations |= {
            ResourceType.TOPIC: {AclOperation.READ, AclOperation.DESCRIBE},
            ResourceType.GROUP: {AclOperation.READ},
        }.get(resource_type, set())
    return sorted(operations)


async def _add(admin: AdminClient, options: argparse.Namespace) -> int:
    for resource, acls in acls_of(options).items():
        existing = set(await admin.describe_acls(AclFilter(*resource)))
        for acl in acls:
            if acl in existing:
                print(f"Acl (pattern={_pattern(resource)}, entry={_entry(acl)}) already exists.")
        new_acls = [acl for acl in acls if acl not in existing]
        if new_acls:
            print(f"Adding ACLs for resource `{_pattern(resource)}`: \n {_entries(new_acls)}\n")
            (await admin.create_acls(new_acls)).all()
    return 0


async def _remove(admin: AdminClient, options: argparse.Namespace) -> int:
    for resource, acls in acls_of(options).items():
        shown = f"resource filter `{_pattern(resource)}`? (y/n)"
        if acls:
            question = f"Are you sure you want to remove ACLs: \n {_entries(acls)}\n from {shown}"
            filters = [
                AclFilter(*resource, acl.principal, acl.host, acl.operation, acl.permission_type) for acl in acls
            ]
        else:
            question = f"Are you sure you want to delete all ACLs for {shown}"
            filters = [AclFilter(*resource)]
        if options.force or _is_confirmed(question):
            (await admin.delete_acls(filters)).all()
    return 0


def _is_confirmed(question: str) -> bool:
    print(question, flush=True)
    return sys.stdin.readline().strip().lower() == "y"


async def _list(admin: AdminClient, options: argparse.Namespace) -> int:
    filters = [AclFilter(*resource) for resource in resources_of(options)] or [AclFilter()]
    described: dict[Acl, None] = {}
    for acl_filter in filters:
        described |= dict.fromkeys(await admin.describe_acls(acl_filter))
    acls = sorted(described, key=_order)
    principals = [principal.strip() for principal in dict.fromkeys(options.principal)]
    if options.json:
        print_json([_as_json(acl) for acl in acls if not principals or acl.principal in principals])
        return 0
    if not principals:
        _print_acls(acls)
    for principal in principals:
        print(f"ACLs for principal `{principal}`")
        _print_acls([acl for acl in acls if acl.principal == principal])
    return 0


def _order(acl: Acl) -> tuple[int, str, int, str, str, int, int]:
    return (
        acl.resource_type,
        acl.resource_name,
        acl.pattern_type,
        acl.principal,
        acl.host,
        acl.operation,
        acl.permission_type,
    )


def _print_acls(acls: Iterable[Acl]) -> None:
    by_resource: dict[Resource, list[Acl]] = {}
    for acl in acls:
        by_resource.setdefault((acl.resource_type, acl.resource_name, acl.pattern_type), []).append(acl)
    for resource, entries in by_resource.items():
        print(f"Current ACLs for resource `{_pattern(resource)}`:\n{_entries(entries)}\n")


def _pattern(resource: Resource) -> str:
    resource_type, name, pattern_type = resource
    return f"ResourcePattern(resourceType={resource_type.name}, name={name}, patternType={pattern_type.name})"


def _entries(acls: Iterable[Acl]) -> str:
    return "\n".join(f"\t{_entry(acl)}" for acl in acls)


def _entry(acl: Acl) -> str:
    return (
        f"(principal={acl.principal}, host={acl.host}, operation={acl.operation.name}, "
        f"permissionType={acl.permission_type.name})"
    )


def _as_json(acl: Acl) -> dict[str, object]:
    return {
        "resource_type": acl.resource_type.name,
        "resource_name": acl.resource_name,
        "pattern_type": acl.pattern_type.name,
        "principal": acl.principal,
        "host": acl.host,
        "operation": acl.operation.name,
        "permission_type": acl.permission_type.name,
    }
