# SPDX-License-Identifier: Apache-2.0
"""The principals and hosts of model clients, and the ACLs that a run with ACLs begins with.

* Operators are the super user.
* Guests (`guest`) have a principal each. Their ACLs change all the time (`acl_admin`).
* The sender (`throttled`) may use GUEST_TOPIC. Its quotas change.
* All other clients are the crew, which may do everything. Its ACLs never change, so none of its requests may be denied.

Nobody but the super user may use SECRET_TOPIC.
"""

from __future__ import annotations

from typing import Final

from kcoord.simulation.options import GUEST_GROUPS, GUEST_MEMBER_GROUPS, SUPER_USER
from kcoord.simulation.topics import FIRST_TOPIC
from kcoord_protocol.acls import (
    CLUSTER_NAME,
    WILDCARD,
    WILDCARD_PRINCIPAL,
    Acl,
    AclOperation,
    PatternType,
    PermissionType,
    ResourceType,
)

CREW: Final = "User:crew"
GUESTS: Final = ("guest-0", "guest-1")
SENDER: Final = "sender"
"""The user whose quotas change (`throttled`)."""
SECRET_TOPIC: Final = "secret"
GUEST_TOPIC: Final = "guest-records"
OPERATORS: Final = frozenset({"acl-admin", "quota-admin", "topic-admin", "admin"})
_HOSTS: Final = {"guest-0": "10.0.0.1", "guest-1": "10.0.1.2"}


def principal_of(client_id: str) -> str:
    """Returns the principal of a client. The name of a guest's client begins with that of the guest and a slash."""
    name = client_id.partition("/")[0]
    return f"User:{name}" if name in (*GUESTS, SENDER) else SUPER_USER if client_id in OPERATORS else CREW


def host_of(client_id: str) -> str:
    return _HOSTS.get(client_id.partition("/")[0], "10.0.0.1")


def acl(
    principal: str,
    operation: AclOperation,
    resource_type: ResourceType,
    name: str,
    *,
    is_prefix: bool = False,
    allows: bool = True,
    host: str = WILDCARD,
) -> Acl:
    return Acl(
        resource_type,
        name,
        PatternType.PREFIXED if is_prefix else PatternType.LITERAL,
        principal,
        host,
        operation,
        PermissionType.ALLOW if allows else PermissionType.DENY,
    )


def first_acls() -> list[Acl]:
    """Returns the ACLs that exist before the first client starts. Those of guests may change."""
    types = (ResourceType.TOPIC, ResourceType.GROUP, ResourceType.TRANSACTIONAL_ID)
    acls = [acl(CREW, AclOperation.ALL, resource_type, WILDCARD) for resource_type in types]
    acls.append(acl(CREW, AclOperation.ALL, ResourceType.CLUSTER, CLUSTER_NAME))
    acls.append(acl(WILDCARD_PRINCIPAL, AclOperation.ALL, ResourceType.TOPIC, SECRET_TOPIC, allows=False))
    acls.append(acl(f"User:{SENDER}", AclOperation.ALL, ResourceType.TOPIC, GUEST_TOPIC))
    acls.append(acl(f"User:{GUESTS[1]}", AclOperation.DESCRIBE, ResourceType.GROUP, WILDCARD))
    for guest, group_id, members in zip(GUESTS, GUEST_GROUPS, GUEST_MEMBER_GROUPS, strict=True):
        principal = f"User:{guest}"
        acls.append(acl(principal, AclOperation.READ, ResourceType.TOPIC, FIRST_TOPIC))
        acls += (acl(principal, AclOperation.READ, ResourceType.GROUP, name) for name in (group_id, members))
        acls.append(acl(principal, AclOperation.DELETE, ResourceType.GROUP, group_id))
        acls.append(acl(principal, AclOperation.WRITE, ResourceType.TRANSACTIONAL_ID, "guest-tx", is_prefix=True))
    return acls
