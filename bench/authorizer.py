# SPDX-License-Identifier: Apache-2.0
"""Time of the authorizer's decisions with 10,000 ACLs: a first decision, a repeated one, and a change of the ACLs."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping

from bench.report import Report
from kcoord.security.authorizer import Authorizer
from kcoord_protocol.acls import Acl, AclOperation, PatternType, PermissionType, ResourceType

ACLS = 10_000
NEW_NAMES = 2_000
REPEATED = 200_000
CHANGES = 20
BY_TYPE = 2_000

LITERAL, PREFIXED = PatternType.LITERAL, PatternType.PREFIXED
USER, HOST = "User:user-7", "192.0.2.7"


def main(report: Report) -> None:
    table = report.table("authorizer, 10,000 ACLs", "ACLs", "first us", "repeated us", "by type, first us", "change ms")
    for shape, new_acl in SHAPES.items():
        table.row(shape, *measure(new_acl))


def measure(new_acl: Callable[[int], Acl]) -> tuple[float, ...]:
    acls = {number.to_bytes(16, "big"): new_acl(number) for number in range(ACLS)}
    authorizer = Authorizer(acls, matches_cidr=True, allow_everyone=True)
    names = [f"topic-{number % 100}-{number}" for number in range(NEW_NAMES)]
    ask(authorizer, "warm-up")
    gc.collect()
    gc.freeze()
    first_us = timed(lambda: [ask(authorizer, name) for name in names]) / NEW_NAMES
    repeated = names[:100] * (REPEATED // 100)
    repeated_us = timed(lambda: [ask(authorizer, name) for name in repeated]) / len(repeated)
    changed = {**acls, b"new": new_acl(ACLS)}
    change_us = timed(lambda: [authorizer.with_acls(changed) for _ in range(CHANGES)]) / CHANGES
    return first_us, repeated_us, first_by_type_us(acls), change_us / 1_000


def first_by_type_us(acls: Mapping[bytes, Acl]) -> float:
    """Returns the time of a first decision by type, and of the search for the ranges that contain the host.

    Without `allow_everyone`, since that allows a user who has no ACL for a certain name at once.
    """
    authorizer = Authorizer(acls, matches_cidr=True)

    def decide() -> bool:
        authorizer._by_type.clear()
        authorizer._hosts.clear()
        return authorizer.is_allowed_by_type(USER, HOST, AclOperation.READ, ResourceType.TOPIC)

    decide()
    return timed(lambda: [decide() for _ in range(BY_TYPE)]) / BY_TYPE


def ask(authorizer: Authorizer, name: str) -> bool:
    return authorizer.is_allowed(USER, HOST, AclOperation.READ, ResourceType.TOPIC, name)


def timed(action: Callable[[], object]) -> float:
    """Returns the microseconds of CPU that the action takes."""
    started = time.process_time()
    action()
    return (time.process_time() - started) * 1_000_000


def acl(
    name: str,
    pattern_type: PatternType,
    principal: str = USER,
    host: str = "*",
    permission: PermissionType = PermissionType.ALLOW,
) -> Acl:
    return Acl(ResourceType.TOPIC, name, pattern_type, principal, host, AclOperation.READ, permission)


SHAPES: dict[str, Callable[[int], Acl]] = {
    "1,000 users x 10 topics": lambda number: acl(
        f"topic-{number % 100}-{number}", LITERAL, f"User:user-{number % 1000}"
    ),
    "10,000 topics of one user": lambda number: acl(f"topic-{number % 100}-{number}", LITERAL),
    "10,000 prefixes of one user": lambda number: acl(f"topic-{number}"[:13], PREFIXED),
    "10,000 users of all topics": lambda number: acl("*", LITERAL, f"User:user-{number}"),
    "10,000 hosts of one topic": lambda number: acl("topic-7-7", LITERAL, USER, f"10.0.{number // 256}.{number % 256}"),
    "100 ranges of hosts x 100 users": lambda number: acl(
        f"topic-{number}", LITERAL, f"User:user-{number % 100}", f"192.0.{number // 100}.0/24"
    ),
    "10,000 ranges of hosts": lambda number: acl(
        f"topic-{number}", LITERAL, USER, f"10.{number // 256}.{number % 256}.0/24"
    ),
    "9,999 topics are denied, one is allowed": lambda number: acl(
        f"topic-{number}", LITERAL, permission=PermissionType.DENY if number < ACLS - 1 else PermissionType.ALLOW
    ),
    "5,000 topics are both allowed and denied": lambda number: acl(
        f"topic-{number // 2}", LITERAL, permission=PermissionType.DENY if number % 2 else PermissionType.ALLOW
    ),
}
