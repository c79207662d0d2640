# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import ipaddress
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kcoord.security import authorizer as authorizer_module
from kcoord.security.authorizer import Authorizer, canonical_host
from kcoord_protocol.acls import Acl, AclOperation, PatternType, PermissionType, ResourceType

ALICE = "User:alice"
HOST = "192.0.2.7"
READ_FOO = Acl(ResourceType.TOPIC, "foo", PatternType.LITERAL, ALICE, "*", AclOperation.READ, PermissionType.ALLOW)


def authorizer(*acls: Acl, **options: object) -> Authorizer:
    return Authorizer(by_id(*acls), **options)  # type: ignore[arg-type]


def by_id(*acls: Acl) -> dict[bytes, Acl]:
    return {number.to_bytes(16, "big"): acl for number, acl in enumerate(acls)}


def may(
    rules: Authorizer,
    operation: AclOperation = AclOperation.READ,
    name: str = "foo",
    who: str = ALICE,
    host: str = HOST,
) -> bool:
    return rules.is_allowed(who, host, operation, ResourceType.TOPIC, name)


def test_nobody_may_do_anything_without_acls() -> None:
    assert not may(authorizer())


def test_an_acl_holds_for_its_operation_type_and_name_only() -> None:
    rules = authorizer(READ_FOO)
    assert may(rules)
    assert not may(rules, AclOperation.WRITE)
    assert not may(rules, name="fo")
    assert not may(rules, name="foobar")
    assert not may(rules, who="User:bob")
    assert not rules.is_allowed(ALICE, HOST, AclOperation.READ, ResourceType.GROUP, "foo")


def test_the_type_of_a_principal_counts() -> None:
    assert not may(authorizer(READ_FOO), who="Group:alice")


def test_acls_of_all_principals() -> None:
    assert may(authorizer(replace(READ_FOO, principal="User:*")), who="User:bob")
    assert may(authorizer(replace(READ_FOO, principal="User:*")), who="User:ANONYMOUS")
    # In Kafka, too, User:* stands for principals of all types.
    assert may(authorizer(replace(READ_FOO, principal="User:*")), who="Group:alice")


def test_all_operations() -> None:
    rules = authorizer(replace(READ_FOO, operation=AclOperation.ALL))
    assert all(may(rules, operation) for operation in AclOperation if operation > AclOperation.ALL)


@pytest.mark.parametrize(
    ("operation", "implied"),
    [
        (AclOperation.READ, AclOperation.DESCRIBE),
        (AclOperation.WRITE, AclOperation.DESCRIBE),
        (AclOperation.DELETE, AclOperation.DESCRIBE),
        (AclOperation.ALTER, AclOperation.DESCRIBE),
        (AclOperation.ALTER_CONFIGS, AclOperation.DESCRIBE_CONFIGS),
    ],
)
def test_implied_operations_are_allowed_but_not_denied(operation: AclOperation, implied: AclOperation) -> None:
    assert may(authorizer(replace(READ_FOO, operation=operation)), implied)
    everything = replace(READ_FOO, operation=AclOperation.ALL)
    denied = authorizer(replace(READ_FOO, operation=operation, permission_type=PermissionType.DENY), everything)
    assert not may(denied, operation)
    assert may(denied, implied)


def test_create_implies_nothing() -> None:
    assert not may(authorizer(replace(READ_FOO, operation=AclOperation.CREATE)), AclOperation.DESCRIBE)
    assert not may(authorizer(replace(READ_FOO, operation=AclOperation.DESCRIBE)), AclOperation.DESCRIBE_CONFIGS)


def test_prefixed_and_wildcard_patterns() -> None:
    prefixed = authorizer(replace(READ_FOO, resource_name="fo", pattern_type=PatternType.PREFIXED))
    assert may(prefixed)
    assert may(prefixed, name="fo")
    assert not may(prefixed, name="f")
    wildcard = authorizer(replace(READ_FOO, resource_name="*"))
    assert may(wildcard, name="anything")
    assert may(wildcard, name="*")
    prefixed_star = authorizer(replace(READ_FOO, resource_name="*", pattern_type=PatternType.PREFIXED))
    assert not may(prefixed_star, name="anything")
    assert may(prefixed_star, name="*anything")


@pytest.mark.parametrize(
    "denying",
    [
        replace(READ_FOO, permission_type=PermissionType.DENY),
        replace(READ_FOO, permission_type=PermissionType.DENY, principal="User:*"),
        replace(READ_FOO, permission_type=PermissionType.DENY, operation=AclOperation.ALL),
        replace(READ_FOO, permission_type=PermissionType.DENY, resource_name="*"),
        replace(READ_FOO, permission_type=PermissionType.DENY, resource_name="f", pattern_type=PatternType.PREFIXED),
        replace(READ_FOO, permission_type=PermissionType.DENY, host=HOST),
    ],
)
def test_an_acl_that_denies_precedes_all_that_allow(denying: Acl) -> None:
    assert not may(authorizer(READ_FOO, denying, replace(READ_FOO, resource_name="*")))


def test_hosts() -> None:
    assert may(authorizer(replace(READ_FOO, host=HOST)))
    assert not may(authorizer(replace(READ_FOO, host="192.0.2.8")))
    # Java writes IPv6 addresses without abbreviation.
    ipv6 = authorizer(replace(READ_FOO, host="2001:db8:0:0:0:0:0:1"))
    assert may(ipv6, host="2001:db8::1")
    assert not may(ipv6, host="2001:db8::2")
    assert may(authorizer(replace(READ_FOO, host=HOST)), host="::ffff:192.0.2.7")
    assert canonical_host("no address: at all") == "no address: at all"


@pytest.mark.parametrize(
    ("acl_host", "host", "is_matching"),
    [
        ("192.0.2.0/24", "192.0.2.7", True),
        ("192.0.2.99/24", "192.0.2.7", True),
        ("192.0.2.0/24", "192.0.2.0", True),
        ("192.0.2.0/24", "192.0.2.255", True),
        ("192.0.2.0/24", "192.0.3.0", False),
        ("192.0.2.7/32", "192.0.2.7", True),
        ("0.0.0.0/0", "203.0.113.1", True),
        ("0.0.0.0/0", "2001:db8::1", False),
        ("2001:db8::/32", "2001:db8:1::1", True),
        ("2001:db8::/32", "2001:db9::1", False),
        ("2001:db8::/32", "192.0.2.7", False),
        ("192.0.2.0/33", "192.0.2.7", False),
        ("010.009.0.0/16", "10.9.1.1", True),
        ("fe80::1%eth0/064", "fe80::2", True),
        ("fe80::/10", "fe80::2%eth1", True),
        ("192.0.2.0/24", "no address", False),
    ],
)
def test_ranges_of_hosts(acl_host: str, host: str, is_matching: bool) -> None:
    acl = replace(READ_FOO, host=acl_host)
    assert may(authorizer(acl, matches_cidr=True), host=host) is is_matching
    assert not may(authorizer(acl), host=host)


def test_super_users_may_do_everything() -> None:
    denying = replace(READ_FOO, permission_type=PermissionType.DENY)
    rules = authorizer(denying, super_users=frozenset({ALICE, "Group:admins"}))
    assert may(rules)
    assert may(rules, who="Group:admins")
    assert not may(rules, who="User:admins")
    assert rules.is_allowed_by_type(ALICE, HOST, AclOperation.READ, ResourceType.TOPIC)


def test_everyone_may_use_resources_without_acls_if_so_configured() -> None:
    of_bob = replace(READ_FOO, principal="User:bob", resource_name="ba", pattern_type=PatternType.PREFIXED)
    rules = authorizer(READ_FOO, of_bob, allow_everyone=True)
    assert may(rules, name="other")
    assert not may(rules, name="bar")
    assert not may(rules, AclOperation.WRITE)
    assert may(rules)
    # A wildcard pattern matches all names.
    wildcard = replace(READ_FOO, principal="User:bob", resource_name="*")
    assert not may(authorizer(wildcard, allow_everyone=True), name="other")


def test_the_reason_of_a_decision_has_the_text_of_kafka() -> None:
    def rule(rules: Authorizer, name: str = "foo") -> str:
        return str(rules.rule_of(ALICE, HOST, AclOperation.READ, ResourceType.TOPIC, name))

    assert rule(authorizer(READ_FOO)) == (
        "MatchingAcl(acl=StandardAcl[resourceType=TOPIC, resourceName=foo, patternType=LITERAL, "
        "principal=User:alice, host=*, operation=READ, permissionType=ALLOW])"
    )
    assert rule(authorizer(READ_FOO), "bar") == "DefaultDeny"
    assert rule(authorizer(READ_FOO, allow_everyone=True), "bar") == "DefaultAllow"
    assert rule(authorizer(super_users=frozenset({ALICE}))) == "SuperUser"


def test_the_reason_names_the_first_acl_that_denies_and_the_last_that_allows() -> None:
    prefixed = replace(READ_FOO, resource_name="f", pattern_type=PatternType.PREFIXED)
    wildcard = replace(READ_FOO, resource_name="*")
    allowing = (wildcard, READ_FOO, prefixed)
    denying = tuple(replace(acl, permission_type=PermissionType.DENY) for acl in allowing)

    def acl_of(*acls: Acl) -> Acl | None:
        return authorizer(*acls).rule_of(ALICE, HOST, AclOperation.READ, ResourceType.TOPIC, "foo").acl

    assert acl_of(*allowing) == wildcard
    assert acl_of(READ_FOO, prefixed) == prefixed
    assert acl_of(*allowing, *denying) == replace(READ_FOO, permission_type=PermissionType.DENY)
    assert acl_of(*allowing, denying[2], denying[0]) == replace(prefixed, permission_type=PermissionType.DENY)


def by_type(*acls: Acl, operation: AclOperation = AclOperation.READ, **options: bool) -> bool:
    rules = authorizer(*acls, **options)
    return rules.is_allowed_by_type(ALICE, HOST, operation, ResourceType.TOPIC)


def denied(name: str, pattern_type: PatternType = PatternType.LITERAL) -> Acl:
    return replace(READ_FOO, resource_name=name, pattern_type=pattern_type, permission_type=PermissionType.DENY)


def test_decisions_by_type() -> None:
    assert not by_type()
    assert by_type(allow_everyone=True)
    assert by_type(READ_FOO)
    assert by_type(replace(READ_FOO, operation=AclOperation.ALL))
    assert not by_type(READ_FOO, operation=AclOperation.WRITE)
    assert not by_type(READ_FOO, operation=AclOperation.DESCRIBE)
    assert not by_type(replace(READ_FOO, resource_type=ResourceType.GROUP))
    assert not by_type(READ_FOO, denied("foo"))
    assert not by_type(READ_FOO, denied("fo", PatternType.PREFIXED))
    assert not by_type(READ_FOO, denied("*"))
    assert by_type(READ_FOO, denied("bar"))
    prefixed = replace(READ_FOO, pattern_type=PatternType.PREFIXED)
    assert by_type(prefixed, denied("foo"))
    assert by_type(prefixed, denied("foobar", PatternType.PREFIXED))
    assert not by_type(prefixed, denied("foo", PatternType.PREFIXED))
    assert by_type(replace(READ_FOO, resource_name="*"), denied("hardcode"))
    assert by_type(replace(READ_FOO, resource_name="*"), denied("f", PatternType.PREFIXED))


def test_another_authorizer_for_changed_acls_leaves_the_first_unchanged() -> None:
    first = authorizer(READ_FOO, allow_everyone=True)
    assert may(first)
    write = replace(READ_FOO, operation=AclOperation.WRITE)
    prefixed = replace(READ_FOO, resource_name="b", pattern_type=PatternType.PREFIXED)
    second = first.with_acls(by_id(READ_FOO, write, prefixed))
    assert may(second, AclOperation.WRITE)
    assert not may(first, AclOperation.WRITE)
    assert not may(second, AclOperation.WRITE, name="bar")
    third = second.with_acls({})
    assert may(third, AclOperation.WRITE, name="bar")
    assert may(third, AclOperation.DELETE)
    assert not may(second, AclOperation.DELETE)


def test_an_acl_that_is_there_twice_holds_until_both_are_removed() -> None:
    twice = by_id(READ_FOO, READ_FOO)
    once = authorizer(READ_FOO, READ_FOO).with_acls({id_: twice[id_] for id_ in list(twice)[1:]})
    assert may(once)
    assert not may(once.with_acls({}))


def test_the_cache_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authorizer_module, "MAX_CACHED", 3)
    rules = authorizer(READ_FOO)
    for name in ("a", "b", "c", "d", "foo"):
        assert may(rules, name=name, host=name) is (name == "foo")
        assert rules.is_allowed_by_type(ALICE, name, AclOperation.READ, ResourceType.TOPIC)
    assert len(rules._decisions) <= 3
    assert len(rules._by_type) <= 3
    assert len(rules._hosts) <= 3


def test_long_names_are_not_cached() -> None:
    rules = authorizer(READ_FOO)
    for length in (256, 257, 100_000):
        assert not may(rules, name="x" * length)
    assert [len(key[4]) for key in rules._decisions] == [256]


# The oracle is written from the description in Kafka's documentation, without an index.

NAMES = ["a", "ab", "abc", "b", "*", "hardcode"]
HOSTS = ["192.0.2.1", "192.0.2.2", "*", "192.0.2.0/31", "2001:db8::/32"]
PRINCIPALS = ["User:a", "User:b", "User:*", "Group:a"]
OPERATIONS = [
    AclOperation.ALL,
    AclOperation.READ,
    AclOperation.WRITE,
    AclOperation.CREATE,
    AclOperation.DELETE,
    AclOperation.ALTER,
    AclOperation.DESCRIBE,
    AclOperation.ALTER_CONFIGS,
    AclOperation.DESCRIBE_CONFIGS,
]
random_acls = st.lists(
    st.builds(
        Acl,
        st.sampled_from([ResourceType.TOPIC, ResourceType.GROUP]),
        st.sampled_from(NAMES),
        st.sampled_from([PatternType.LITERAL, PatternType.PREFIXED]),
        st.sampled_from(PRINCIPALS),
        st.sampled_from(HOSTS),
        st.sampled_from(OPERATIONS),
        st.sampled_from([PermissionType.ALLOW, PermissionType.ALLOW, PermissionType.DENY]),
    ),
    max_size=12,
)
questions = st.lists(
    st.tuples(
        st.sampled_from(["User:a", "User:b", "Group:a", "User:super"]),
        st.sampled_from(["192.0.2.1", "192.0.2.2", "2001:db8::5"]),
        st.sampled_from([operation for operation in OPERATIONS if operation is not AclOperation.ALL]),
        st.sampled_from([ResourceType.TOPIC, ResourceType.GROUP]),
        st.sampled_from(["a", "ab", "abcd", "b", "c", "*", "*x"]),
    ),
    min_size=1,
    max_size=8,
)


def pattern_matches(acl: Acl, resource_type: ResourceType, name: str) -> bool:
    if acl.resource_type != resource_type:
        return False
    if acl.pattern_type == PatternType.PREFIXED:
        return name.startswith(acl.resource_name)
    return acl.resource_name in ("*", name)


def is_for(acl: Acl, principal: str, host: str) -> bool:
    if acl.principal not in (principal, "User:*"):
        return False
    if "/" in acl.host:
        return ipaddress.ip_address(host) in ipaddress.ip_network(acl.host)
    return acl.host in ("*", host)


def expected(
    acls: list[Acl],
    allow_everyone: bool,
    principal: str,
    host: str,
    operation: AclOperation,
    resource_type: ResourceType,
    name: str,
) -> bool:
    if principal == "User:super":
        return True
    on_name = [acl for acl in acls if pattern_matches(acl, resource_type, name)]
    if not on_name:
        return allow_everyone
    for acl in on_name:
        denies = is_for(acl, principal, host) and acl.permission_type == PermissionType.DENY
        if denies and acl.operation in (AclOperation.ALL, operation):
            return False
    allowing = {AclOperation.ALL, operation}
    if operation == AclOperation.DESCRIBE:
        allowing |= {AclOperation.READ, AclOperation.WRITE, AclOperation.DELETE, AclOperation.ALTER}
    if operation == AclOperation.DESCRIBE_CONFIGS:
        allowing.add(AclOperation.ALTER_CONFIGS)
    return any(
        is_for(acl, principal, host) and acl.permission_type == PermissionType.ALLOW and acl.operation in allowing
        for acl in on_name
    )


def expected_by_type(
    acls: list[Acl],
    allow_everyone: bool,
    principal: str,
    host: str,
    operation: AclOperation,
    resource_type: ResourceType,
) -> bool:
    if expected(acls, allow_everyone, principal, host, operation, resource_type, "hardcode"):
        return True
    own = [
        acl
        for acl in acls
        if acl.resource_type == resource_type
        and is_for(acl, principal, host)
        and acl.operation in (operation, AclOperation.ALL)
    ]
    denying = [acl for acl in own if acl.permission_type == PermissionType.DENY]
    allowing = [acl for acl in own if acl.permission_type == PermissionType.ALLOW]
    literal = PatternType.LITERAL
    if any(acl.pattern_type == literal and acl.resource_name == "*" for acl in denying):
        return False
    for acl in allowing:
        if acl.pattern_type == literal and acl.resource_name == "*":
            return True
        dominated = any(
            (deny.pattern_type == PatternType.PREFIXED and acl.resource_name.startswith(deny.resource_name))
            or (deny.pattern_type == acl.pattern_type == literal and deny.resource_name == acl.resource_name)
            for deny in denying
        )
        if not dominated:
            return True
    return False


@settings(max_examples=400)
@given(random_acls, random_acls, questions, st.booleans())
def test_random_decisions_are_those_of_the_description(
    acls: list[Acl],
    other_acls: list[Acl],
    asked: list[tuple[str, str, AclOperation, ResourceType, str]],
    allow_everyone: bool,
) -> None:
    first = authorizer(*acls, allow_everyone=allow_everyone, super_users=frozenset({"User:super"}), matches_cidr=True)
    second = first.with_acls({id_ + b"2": acl for id_, acl in by_id(*other_acls, *acls[:3]).items()})
    for rules, present in ((first, acls), (second, [*other_acls, *acls[:3]]), (first, acls)):
        for principal, host, operation, resource_type, name in asked:
            allowed = expected(present, allow_everyone, principal, host, operation, resource_type, name)
            assert rules.is_allowed(principal, host, operation, resource_type, name) is allowed
            assert rules.rule_of(principal, host, operation, resource_type, name).is_allowed is allowed
            assert rules.is_allowed_by_type(principal, host, operation, resource_type) is expected_by_type(
                present, allow_everyone, principal, host, operation, resource_type
            )
