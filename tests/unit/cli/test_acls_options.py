# SPDX-License-Identifier: Apache-2.0
"""The option combinations of `kcoord acls`, and the ACLs that they stand for."""

from __future__ import annotations

import pytest

from kcoord.cli import acls
from kcoord_protocol.acls import PatternType, ResourceType

ADD = "--add --allow-principal User:a"
NO_ACTION = "Command must include exactly one action"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ("", NO_ACTION),
        ("--add --list", NO_ACTION),
        ("--list", None),
        ("--list --principal User:a --topic t --resource-pattern-type match --json", None),
        ("--list --principal a", "expected a string in format principalType:principalName but got a"),
        ("--list --producer", "--list can't be used with --producer"),
        ("--list --allow-host h", "--list can't be used with --allow-host"),
        (f"{ADD} --topic t", None),
        (f"{ADD} --topic t --json", "--json goes with --list"),
        (f"{ADD} --topic t --principal User:a", "only available if --list is set"),
        (f"{ADD} --topic t --resource-pattern-type MATCH", "value of 'MATCH' is not valid when adding acls"),
        (f"{ADD} --topic t --resource-pattern-type any", "value of 'ANY' is not valid when adding acls"),
        ("--add --topic t", "You must specify one of: --allow-principal, --deny-principal when trying to add ACLs."),
        ("--add --deny-principal User:a --topic t", None),
        (ADD, "You must provide at least one resource"),
        ("--add --allow-principal a --topic t", "but got a"),
        ("--add --allow-principal :a --topic t", "but got :a"),
        (f"{ADD} --topic t --deny-host h", "--deny-host goes with --deny-principal"),
        (f"{ADD} --topic t --operation Bogus", "there is no operation Bogus"),
        (f"{ADD} --topic t --operation Any", "there is no operation Any"),
        (f"{ADD} --topic t --operation describe_configs", None),
        (
            f"{ADD} --topic t --operation Read --group g --operation Write",
            "ResourceType GROUP only supports operations",
        ),
        (f"{ADD} --cluster --operation ClusterAction", None),
        (f"{ADD} --transactional-id t --operation TwoPhaseCommit", None),
        (f"{ADD} --delegation-token t --operation Read", "ResourceType DELEGATION_TOKEN only supports operations"),
        (f"{ADD} --user-principal User:b --operation CreateTokens", None),
        (f"{ADD} --topic t --idempotent", "The --idempotent option is only available if --producer is set"),
        (f"{ADD} --producer", "With --producer you must specify a --topic"),
        (f"{ADD} --producer --topic t --operation Read", "--producer can't be used with --operation"),
        (f"{ADD} --producer --topic t --deny-principal User:b", "--producer can't be used with --deny-principal"),
        (f"{ADD} --producer --topic t --idempotent --transactional-id x", None),
        (f"{ADD} --consumer --topic t", "With --consumer you must specify a --topic and a --group"),
        (f"{ADD} --consumer --topic t --group g --cluster", "With --consumer you must specify"),
        (f"{ADD} --consumer --topic t --group g", None),
        (f"{ADD} --consumer --producer --topic t --group g --transactional-id x", None),
        ("--remove --topic t", None),
        ("--remove", "You must provide at least one resource"),
        ("--remove --topic t --operation Read", "name a principal"),
        ("--remove --topic t --producer", "name a principal"),
        ("--remove --topic t --allow-principal User:a --operation Read --resource-pattern-type any", None),
    ],
)
def test_combinations_of_options(arguments: str, problem: str | None) -> None:
    actual = acls.find_problem(acls.make_parser().parse_args(arguments.split()))
    assert (actual is None) if problem is None else (actual is not None and problem in actual), actual


def entries(arguments: str) -> set[tuple[str, str, str, str, str, str, str]]:
    options = acls.make_parser().parse_args(arguments.split())
    assert acls.find_problem(options) is None
    return {
        (
            acl.resource_type.name,
            acl.resource_name,
            acl.pattern_type.name,
            acl.principal,
            acl.host,
            acl.operation.title,
            acl.permission_type.name,
        )
        for of_resource in acls.acls_of(options).values()
        for acl in of_resource
    }


def test_principals_are_combined_with_their_hosts_and_all_operations() -> None:
    assert entries(
        f"{ADD} --allow-host h1 --allow-host h2 --deny-principal User:b --topic t --topic t --resource-pattern-type "
        "prefixed --operation Read --operation READ"
    ) == {
        ("TOPIC", "t", "PREFIXED", "User:a", "h1", "Read", "ALLOW"),
        ("TOPIC", "t", "PREFIXED", "User:a", "h2", "Read", "ALLOW"),
        ("TOPIC", "t", "PREFIXED", "User:b", "*", "Read", "DENY"),
    }
    assert entries(f"{ADD} --cluster --resource-pattern-type prefixed") == {
        ("CLUSTER", "kafka-cluster", "LITERAL", "User:a", "*", "All", "ALLOW")
    }


def test_roles() -> None:
    producer = {
        ("TOPIC", "t", "LITERAL", "User:a", "*", "Write", "ALLOW"),
        ("TOPIC", "t", "LITERAL", "User:a", "*", "Describe", "ALLOW"),
        ("TOPIC", "t", "LITERAL", "User:a", "*", "Create", "ALLOW"),
    }
    assert entries(f"{ADD} --producer --topic t") == producer
    assert entries(f"{ADD} --producer --topic t --idempotent --transactional-id x") == producer | {
        ("CLUSTER", "kafka-cluster", "LITERAL", "User:a", "*", "IdempotentWrite", "ALLOW"),
        ("TRANSACTIONAL_ID", "x", "LITERAL", "User:a", "*", "Write", "ALLOW"),
        ("TRANSACTIONAL_ID", "x", "LITERAL", "User:a", "*", "Describe", "ALLOW"),
    }
    consumer = {
        ("TOPIC", "t", "LITERAL", "User:a", "*", "Read", "ALLOW"),
        ("TOPIC", "t", "LITERAL", "User:a", "*", "Describe", "ALLOW"),
        ("GROUP", "g", "LITERAL", "User:a", "*", "Read", "ALLOW"),
    }
    assert entries(f"{ADD} --consumer --topic t --group g") == consumer
    assert entries(f"{ADD} --consumer --producer --topic t --group g") == consumer | producer


def test_a_role_removes_nothing_from_a_resource_that_it_is_not_about() -> None:
    options = acls.make_parser().parse_args(
        ["--remove", "--producer", "--allow-principal", "User:a", "--topic", "t", "--group", "g"]
    )
    assert acls.find_problem(options) is None
    assert list(acls.acls_of(options)) == [(ResourceType.TOPIC, "t", PatternType.LITERAL)]


def test_a_resource_alone_stands_for_all_its_acls() -> None:
    options = acls.make_parser().parse_args(["--remove", "--topic", "t", "--resource-pattern-type", "any"])
    assert acls.acls_of(options) == {(ResourceType.TOPIC, "t", PatternType.ANY): []}
