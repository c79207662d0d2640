# SPDX-License-Identifier: Apache-2.0
"""Authorizer: decides what a principal may do, as Kafka's StandardAuthorizer does.

Theory of operation
-------------------
A principal of `super.users` may do everything. For all others, an ACL matches a decision if

* its pattern matches the name of the resource: a literal pattern with this name, a prefixed pattern with a prefix of
  it, or the literal pattern `*`;
* its principal is the principal or `User:*`, which stands for principals of all types;
* its host is the host, `*` or, if `matches_cidr`, a range that contains the host;
* its operation is the operation or ALL. If it allows, it also matches an operation that its own operation implies.

The decision is the first of these that applies:

1. Deny, if a matching ACL denies.
2. Allow, if a matching ACL allows.
3. `allow_everyone`, if no ACL has a pattern that matches the name, whatever its principal.
4. Deny.

An Authorizer never changes. `with_acls` returns another one for other ACLs, so the decisions that an authorizer has
cached are right for its whole life.

ACLs are indexed by resource type, principal and host first and by name then. The time of a first decision depends on
the ACLs of one principal with this name or a prefix of it, and not on the number of all ACLs.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from socket import AF_INET, AF_INET6, inet_pton
from typing import Final, Generic, Self, TypeAlias, TypeVar

from kcoord.metadata.host_ranges import Network, parse_range
from kcoord_protocol.acls import (
    WILDCARD,
    WILDCARD_PRINCIPAL,
    Acl,
    AclOperation,
    PatternType,
    PermissionType,
    ResourceType,
)

MAX_CACHED: Final = 65_536
"""The number of cached decisions. At this number the cache is emptied, since clients choose the names in it."""
LONGEST_CACHED: Final = 256
"""The longest name in a cached decision. Names of topics are shorter, but those of groups have no limit."""
K = TypeVar("K")
T = TypeVar("T")

_Ranges: TypeAlias = dict[tuple[int, int], dict[int, tuple[str, ...]]]
"""(bits of an address, prefix length) -> prefix -> the ranges with that prefix, as the ACLs write them."""

_ALL_RESOURCES: Final = (PatternType.LITERAL, WILDCARD)
_IMPLIED_BY: Final[Mapping[AclOperation, frozenset[AclOperation]]] = {
    AclOperation.DESCRIBE: frozenset({AclOperation.READ, AclOperation.WRITE, AclOperation.DELETE, AclOperation.ALTER}),
    AclOperation.DESCRIBE_CONFIGS: frozenset({AclOperation.ALTER_CONFIGS}),
}
_NONE: Final[frozenset[AclOperation]] = frozenset()


@dataclass(slots=True, frozen=True)
class Rule:
    """The reason of a decision: an ACL, or the rule with this name. Its text is that of Kafka's audit log."""

    is_allowed: bool
    name: str
    acl: Acl | None = None

    def __str__(self) -> str:
        return self.name if self.acl is None else f"{self.name}(acl={self.acl})"


SUPER_USER: Final = Rule(True, "SuperUser")
DEFAULT_ALLOW: Final = Rule(True, "DefaultAllow")
DEFAULT_DENY: Final = Rule(False, "DefaultDeny")


class _Patterns(Generic[T]):
    """A value for each pattern of one resource type. `_lengths` counts the prefixes by their length."""

    __slots__ = ("_lengths", "literals", "prefixes")

    def __init__(self) -> None:
        self.literals: dict[str, T] = {}
        self.prefixes: dict[str, T] = {}
        self._lengths: dict[int, int] = {}

    def copy(self) -> Self:
        copy = type(self)()
        copy.literals = dict(self.literals)
        copy.prefixes = dict(self.prefixes)
        copy._lengths = dict(self._lengths)
        return copy

    def get(self, acl: Acl, default: T) -> T:
        """Returns the value for the pattern of the ACL."""
        patterns = self.prefixes if acl.pattern_type is PatternType.PREFIXED else self.literals
        return patterns.get(acl.resource_name, default)

    def put(self, acl: Acl, value: T) -> None:
        """Sets the value for the pattern of the ACL. A false value removes the pattern."""
        if acl.pattern_type is not PatternType.PREFIXED:
            _put(self.literals, acl.resource_name, value)
            return
        before = len(self.prefixes)
        _put(self.prefixes, acl.resource_name, value)
        length = len(acl.resource_name)
        _put(self._lengths, length, self._lengths.get(length, 0) + len(self.prefixes) - before)

    def matching(self, name: str) -> Iterator[T]:
        """Yields the values of the patterns that match the name."""
        if (value := self.literals.get(name)) is not None:
            yield value
        if name != WILDCARD and (value := self.literals.get(WILDCARD)) is not None:
            yield value
        size = len(name)
        for length in self._lengths:
            if length <= size and (value := self.prefixes.get(name[:length])) is not None:
                yield value


class _Section(_Patterns[tuple[Acl, ...]]):
    """The ACLs for one resource type, principal and host.

    `allowing` has the patterns with an ACL that allows, by its operation, unless another ACL for the pattern denies
    that operation. A dict is an ordered set here. So a decision about any resource of a type reads neither the ACLs
    that deny nor those of other operations.
    """

    __slots__ = ("allowing",)

    def __init__(self) -> None:
        super().__init__()
        self.allowing: dict[AclOperation, dict[tuple[PatternType, str], None]] = {}

    def copy(self) -> Self:
        copy = super().copy()
        copy.allowing = {operation: dict(patterns) for operation, patterns in self.allowing.items()}
        return copy

    def put(self, acl: Acl, value: tuple[Acl, ...]) -> None:
        super().put(acl, value)
        pattern = (acl.pattern_type, acl.resource_name)
        for operation in {acl.operation, *(present.operation for present in value)}:
            patterns = self.allowing.setdefault(operation, {})
            if _allows(value, operation) and not _denies(value, operation):
                patterns[pattern] = None
            else:
                patterns.pop(pattern, None)

    def allows(self, operation: AclOperation) -> Iterator[tuple[PatternType, str]]:
        """Yields the patterns with an ACL that allows the operation."""
        yield from self.allowing.get(operation, ())
        yield from self.allowing.get(AclOperation.ALL, ())

    def denies_all_of(self, pattern_type: PatternType, name: str, operation: AclOperation) -> bool:
        """Returns whether an ACL denies the operation on all resources that the pattern matches, by Kafka's rules."""
        if pattern_type is not PatternType.PREFIXED and _denies(self.literals.get(name, ()), operation):
            return True
        size = len(name)
        return any(
            length <= size and _denies(self.prefixes.get(name[:length], ()), operation) for length in self._lengths
        )


P = TypeVar("P", _Patterns[int], _Section)


class Authorizer:
    """Decides on operations by a set of ACLs. The text of the module gives the rules."""

    __slots__ = (
        "_acls",
        "_allow_everyone",
        "_by_type",
        "_counts",
        "_decisions",
        "_hosts",
        "_matches_cidr",
        "_ranges",
        "_sections",
        "_super_users",
        "decided",
    )

    def __init__(
        self,
        acls: Mapping[bytes, Acl],
        *,
        super_users: frozenset[str] = frozenset(),
        allow_everyone: bool = False,
        matches_cidr: bool = False,
    ) -> None:
        """`acls` has the ACLs by their id and must not change. `matches_cidr`: hosts of ACLs may be ranges."""
        self._super_users = super_users
        self._allow_everyone = allow_everyone
        self._matches_cidr = matches_cidr
        self.decided = {True: 0, False: 0}
        """Numbers of permissions and denials, for metrics. `with_acls` passes them on."""
        self._set_acls(acls, {}, {}, removed=(), added=acls.values())

    def with_acls(self, acls: Mapping[bytes, Acl]) -> Self:
        """Returns an authorizer with the same configuration and other ACLs. It shares what has not changed."""
        copy = object.__new__(type(self))
        copy._super_users = self._super_users
        copy._allow_everyone = self._allow_everyone
        copy._matches_cidr = self._matches_cidr
        copy.decided = self.decided
        old = self._acls
        removed = [acl for id_, acl in old.items() if acls.get(id_) is not acl]
        added = [acl for id_, acl in acls.items() if old.get(id_) is not acl]
        copy._set_acls(acls, self._sections, self._counts, removed=removed, added=added)
        return copy

    def _set_acls(
        self,
        acls: Mapping[bytes, Acl],
        sections: Mapping[tuple[ResourceType, str, str], _Section],
        counts: Mapping[ResourceType, _Patterns[int]],
        *,
        removed: Iterable[Acl],
        added: Iterable[Acl],
    ) -> None:
        self._acls = acls
        self._sections = dict(sections)
        self._counts = dict(counts)
        own: dict[tuple[ResourceType, str, str], _Section] = {}
        own_counts: dict[ResourceType, _Patterns[int]] = {}
        for is_added, changed in ((False, removed), (True, added)):
            for acl in changed:
                section = _own(
                    self._sections, own, (acl.resource_type, acl.principal, canonical_host(acl.host)), _Section
                )
                present = section.get(acl, ())
                section.put(acl, (*present, acl) if is_added else _without(present, acl))
                # Only `allow_everyone` asks for the patterns of all principals.
                if self._allow_everyone:
                    count = _own(self._counts, own_counts, acl.resource_type, _Patterns[int])
                    count.put(acl, count.get(acl, 0) + (1 if is_added else -1))
        for key, section in own.items():
            if not section.literals and not section.prefixes:
                del self._sections[key]
        self._ranges = _ranges({host for _, _, host in self._sections}) if self._matches_cidr else {}
        self._hosts: dict[str, tuple[str, ...]] = {}
        self._decisions: dict[tuple[str, str, AclOperation, ResourceType, str], bool] = {}
        self._by_type: dict[tuple[str, str, AclOperation, ResourceType], bool] = {}

    def is_allowed(
        self, principal: str, host: str, operation: AclOperation, resource_type: ResourceType, name: str
    ) -> bool:
        """Returns whether a principal that connects from `host` may do the operation on the resource."""
        key = (principal, host, operation, resource_type, name)
        allowed = self._decisions.get(key)
        if allowed is None:
            allowed = self.rule_of(principal, host, operation, resource_type, name).is_allowed
            if len(self._decisions) >= MAX_CACHED:
                self._decisions.clear()
            if len(name) <= LONGEST_CACHED:
                self._decisions[key] = allowed
        self.decided[allowed] += 1
        return allowed

    @property
    def acl_count(self) -> int:
        """The number of ACLs."""
        return len(self._acls)

    def rule_of(
        self, principal: str, host: str, operation: AclOperation, resource_type: ResourceType, name: str
    ) -> Rule:
        """Returns the decision with its reason, for the audit log. If several ACLs match, it is the one Kafka names."""
        if principal in self._super_users:
            return SUPER_USER
        denying: Acl | None = None
        allowing: Acl | None = None
        has_pattern = False
        for section in self._sections_of(principal, host, resource_type):
            for acls in section.matching(name):
                has_pattern = True
                for acl in acls:
                    if not _covers(acl, operation):
                        continue
                    if acl.permission_type is PermissionType.ALLOW:
                        if allowing is None or _position(allowing) < _position(acl):
                            allowing = acl
                    elif denying is None or _position(acl) < _position(denying):
                        denying = acl
        if denying is not None:
            return Rule(False, "MatchingAcl", denying)
        if allowing is not None:
            return Rule(True, "MatchingAcl", allowing)
        if self._allow_everyone and not has_pattern and not self._has_pattern(resource_type, name):
            return DEFAULT_ALLOW
        return DEFAULT_DENY

    def is_allowed_by_type(
        self, principal: str, host: str, operation: AclOperation, resource_type: ResourceType
    ) -> bool:
        """Returns whether the principal may do the operation on at least one resource of the type, existing or not.

        These are the rules of Kafka's authorizeByResourceType. Unlike those of `is_allowed`, they know no implied
        operations.
        """
        key = (principal, host, operation, resource_type)
        allowed = self._by_type.get(key)
        if allowed is None:
            if len(self._by_type) >= MAX_CACHED:
                self._by_type.clear()
            allowed = self._by_type[key] = self._decide_by_type(principal, host, operation, resource_type)
        return allowed

    def _decide_by_type(self, principal: str, host: str, operation: AclOperation, resource_type: ResourceType) -> bool:
        # Kafka asks for a resource of this name, so that super users, and everyone without ACLs, are allowed.
        if self.rule_of(principal, host, operation, resource_type, "hardcode").is_allowed:
            return True
        sections = list(self._sections_of(principal, host, resource_type))
        if any(_denies(section.literals.get(WILDCARD, ()), operation) for section in sections):
            return False
        # Kafka lets no prefix that is denied weaken an ACL that allows all resources.
        return any(
            pattern == _ALL_RESOURCES or not any(denying.denies_all_of(*pattern, operation) for denying in sections)
            for section in sections
            for pattern in section.allows(operation)
        )

    def _sections_of(self, principal: str, host: str, resource_type: ResourceType) -> Iterator[_Section]:
        """Yields the ACLs for the principal and the host."""
        hosts = self._hosts.get(host)
        if hosts is None:
            if len(self._hosts) >= MAX_CACHED:
                self._hosts.clear()
            hosts = self._hosts[host] = self._matching_hosts(host)
        principals = (principal, WILDCARD_PRINCIPAL) if principal != WILDCARD_PRINCIPAL else (principal,)
        for acl_principal in principals:
            for acl_host in hosts:
                section = self._sections.get((resource_type, acl_principal, acl_host))
                if section is not None:
                    yield section

    def _matching_hosts(self, host: str) -> tuple[str, ...]:
        """Returns the hosts of ACLs that match a host."""
        own = canonical_host(host)
        return (own, WILDCARD, *self._ranges_with(own)) if self._ranges else (own, WILDCARD)

    def _ranges_with(self, host: str) -> Iterator[str]:
        """Yields the ranges that contain the host. The number of prefix lengths counts here, not that of ranges."""
        try:
            # The zone of a link-local address does not count.
            packed = inet_pton(AF_INET6, host.partition("%")[0]) if ":" in host else inet_pton(AF_INET, host)
        except OSError:
            # The simulation and tests have hosts that are no addresses.
            return
        number, bits = int.from_bytes(packed, "big"), 8 * len(packed)
        for (range_bits, length), texts in self._ranges.items():
            if range_bits == bits:
                yield from texts.get(number >> (bits - length), ())

    def _has_pattern(self, resource_type: ResourceType, name: str) -> bool:
        counts = self._counts.get(resource_type)
        return counts is not None and next(counts.matching(name), None) is not None


def canonical_host(host: str) -> str:
    """Returns one form for all forms of an IPv6 address. An IPv4 address inside an IPv6 address is returned alone."""
    if ":" not in host or "/" in host:
        return host
    try:
        address = ipaddress.IPv6Address(host)
    except ValueError:
        return host
    return str(address.ipv4_mapped or address)


def _ranges(hosts: Iterable[str]) -> _Ranges:
    """Returns the hosts that are ranges. A range that cannot be parsed matches no address, as in Kafka."""
    ranges: _Ranges = {}
    for host in hosts:
        if "/" in host and (network := _network(host)) is not None:
            bits, length = network.max_prefixlen, network.prefixlen
            texts = ranges.setdefault((bits, length), {})
            prefix = int(network.network_address) >> (bits - length)
            texts[prefix] = (*texts.get(prefix, ()), host)
    return ranges


@lru_cache(maxsize=16_384)
def _network(text: str) -> Network | None:
    try:
        return parse_range(text)
    except ValueError:
        return None


def _own(patterns: dict[K, P], own: dict[K, P], key: K, new: Callable[[], P]) -> P:
    """Returns the patterns for a change. They are copied before the first, since another authorizer may have them."""
    value = own.get(key)
    if value is None:
        shared = patterns.get(key)
        value = own[key] = patterns[key] = new() if shared is None else shared.copy()
    return value


def _without(acls: tuple[Acl, ...], acl: Acl) -> tuple[Acl, ...]:
    position = acls.index(acl)
    return acls[:position] + acls[position + 1 :]


def _put(values: dict[K, T], key: K, value: T) -> None:
    if value:
        values[key] = value
    else:
        values.pop(key, None)


def _covers(acl: Acl, operation: AclOperation) -> bool:
    if acl.operation in (operation, AclOperation.ALL):
        return True
    return acl.permission_type is PermissionType.ALLOW and acl.operation in _IMPLIED_BY.get(operation, _NONE)


def _allows(acls: Iterable[Acl], operation: AclOperation) -> bool:
    return any(acl.permission_type is PermissionType.ALLOW and acl.operation is operation for acl in acls)


def _denies(acls: Iterable[Acl], operation: AclOperation) -> bool:
    return any(
        acl.permission_type is PermissionType.DENY and acl.operation in (operation, AclOperation.ALL) for acl in acls
    )


def _position(acl: Acl) -> tuple[bool, int, int, str, str, int]:
    """Orders ACLs that match the same name as Kafka visits them: it names the first that denies, the last that allows.

    All but `*` are prefixes of the same name, so their lengths order them as Kafka's descending order of names does.
    """
    is_wildcard = acl.resource_name == WILDCARD and acl.pattern_type is PatternType.LITERAL
    return is_wildcard, -len(acl.resource_name), acl.pattern_type, acl.principal, acl.host, acl.operation
