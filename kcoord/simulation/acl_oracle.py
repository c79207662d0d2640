# SPDX-License-Identifier: Apache-2.0
"""A plain list of ACLs, and what each principal may do by it: the oracle of the server's authorizer.

Theory of operation
-------------------
`states` are the sets of ACLs of one run, in the order of their changes. A change begins when the broker under test gets
its request (`begin`), and is acknowledged when the broker sends a response without an error (`acknowledge`). Between
the two, old and new state are both possible. The operator sends one change at a time, and repeats it until it is
acknowledged (`acl_admin`), so no change is ever undone by a late copy of an earlier one.

A response is right if it agrees with at least one state from the last one that was acknowledged before the request
arrived to the last one that has begun when the response leaves. So after an acknowledgement every new request has to
follow the new ACLs.

Each decision walks over all ACLs of a state. Nothing of the server's authorizer is used.
"""

from __future__ import annotations

from ipaddress import ip_address, ip_network
from typing import Final

from kcoord.simulation.options import SUPER_USER
from kcoord_protocol.acls import (
    CLUSTER_NAME,
    OPERATIONS,
    WILDCARD,
    WILDCARD_PRINCIPAL,
    Acl,
    AclOperation,
    PatternType,
    PermissionType,
    ResourceType,
)
from kcoord_protocol.messages import CreateAclsRequest, DeleteAclsRequest

_CHANGES_STATE: Final = (AclOperation.READ, AclOperation.WRITE, AclOperation.DELETE, AclOperation.ALTER)
_ANY_NAME: Final = "\uffff"
"""A suffix that no name and no longer prefix of an ACL has."""


class AclState:
    """The decisions by one set of ACLs."""

    def __init__(self, acls: frozenset[Acl]) -> None:
        self.acls = acls
        self._decisions: dict[tuple[str, str, int, int, str], bool] = {}

    def allows(
        self, principal: str, host: str, operation: AclOperation, resource_type: ResourceType, name: str
    ) -> bool:
        key = (principal, host, operation, resource_type, name)
        if key not in self._decisions:
            self._decisions[key] = self._decide(principal, host, operation, resource_type, name)
        return self._decisions[key]

    def _decide(
        self, principal: str, host: str, operation: AclOperation, resource_type: ResourceType, name: str
    ) -> bool:
        if principal == SUPER_USER:
            return True
        allowed = False
        for acl in self.acls:
            if acl.resource_type is not resource_type or not _has_pattern_of(acl, name):
                continue
            if acl.principal not in (principal, WILDCARD_PRINCIPAL) or not _has_host(acl, host):
                continue
            is_meant = acl.operation in (operation, AclOperation.ALL)
            if acl.permission_type is PermissionType.DENY:
                if is_meant:
                    return False
            else:
                # A permission to read or to change something is also one to describe it.
                is_implied = operation is AclOperation.DESCRIBE and acl.operation in _CHANGES_STATE
                is_implied_config = (
                    operation is AclOperation.DESCRIBE_CONFIGS and acl.operation is AclOperation.ALTER_CONFIGS
                )
                allowed = allowed or is_meant or is_implied or is_implied_config
        return allowed

    def allows_any(self, principal: str, host: str, operation: AclOperation, resource_type: ResourceType) -> bool:
        """Returns whether the operation is allowed on at least one name. Not for operations that others imply."""
        names = {_ANY_NAME}
        for acl in self.acls:
            if acl.resource_type is resource_type and acl.resource_name != WILDCARD:
                is_prefix = acl.pattern_type is PatternType.PREFIXED
                names.add(acl.resource_name + _ANY_NAME if is_prefix else acl.resource_name)
        return any(self.allows(principal, host, operation, resource_type, name) for name in names)


def _has_pattern_of(acl: Acl, name: str) -> bool:
    if acl.pattern_type is PatternType.PREFIXED:
        return name.startswith(acl.resource_name)
    return acl.resource_name in (name, WILDCARD)


def _has_host(acl: Acl, host: str) -> bool:
    if "/" in acl.host:
        return ip_address(host) in ip_network(acl.host)
    return acl.host in (host, WILDCARD)


class AclOracle:
    """The sets of ACLs of one run; the text of the module says which of them a response may agree with."""

    def __init__(self, first: frozenset[Acl]) -> None:
        self.states = [AclState(first)]
        self.acknowledged = 0
        """The number of the last state that was acknowledged."""

    def begin(self, change: CreateAclsRequest | DeleteAclsRequest) -> int:
        """Notes that the broker has got a change. Returns the number of the state that it leads to."""
        acls = self.states[-1].acls
        if isinstance(change, CreateAclsRequest):
            changed = acls | {_acl_of(creation) for creation in change.creations}
        else:
            changed = frozenset(acl for acl in acls if not any(_is_meant(acl, entry) for entry in change.filters))
        if changed != acls:
            self.states.append(AclState(changed))
        return len(self.states) - 1

    def acknowledge(self, number: int) -> None:
        self.acknowledged = max(self.acknowledged, number)


def _acl_of(creation: CreateAclsRequest.AclCreation) -> Acl:
    return Acl(
        ResourceType(creation.resource_type),
        creation.resource_name,
        PatternType(creation.resource_pattern_type),
        creation.principal,
        creation.host,
        AclOperation(creation.operation),
        PermissionType(creation.permission_type),
    )


def _is_meant(acl: Acl, entry: DeleteAclsRequest.DeleteAclsFilter) -> bool:
    """Returns whether a filter selects the ACL. The operator uses no filters of type MATCH."""
    return (
        entry.resource_type_filter in (acl.resource_type, ResourceType.ANY)
        and entry.resource_name_filter in (acl.resource_name, None)
        and entry.pattern_type_filter in (acl.pattern_type, PatternType.ANY)
        and entry.principal_filter in (acl.principal, None)
        and entry.host_filter in (acl.host, None)
        and entry.operation in (acl.operation, AclOperation.ANY)
        and entry.permission_type in (acl.permission_type, PermissionType.ANY)
    )


class ClientRights:
    """What one client may do by one state."""

    def __init__(self, state: AclState, principal: str, host: str) -> None:
        self._state = state
        self._principal = principal
        self._host = host

    def may(self, operation: AclOperation, resource_type: ResourceType, name: str) -> bool:
        return self._state.allows(self._principal, self._host, operation, resource_type, name)

    def may_topic(self, operation: AclOperation, name: str) -> bool:
        return self.may(operation, ResourceType.TOPIC, name)

    def may_group(self, operation: AclOperation, name: str) -> bool:
        return self.may(operation, ResourceType.GROUP, name)

    def may_cluster(self, operation: AclOperation) -> bool:
        return self.may(operation, ResourceType.CLUSTER, CLUSTER_NAME)

    def may_any(self, operation: AclOperation, resource_type: ResourceType) -> bool:
        return self._state.allows_any(self._principal, self._host, operation, resource_type)

    def operations(self, resource_type: ResourceType, name: str) -> int:
        """Returns the bit field of the operations that the client may perform on a resource."""
        return sum(2**operation for operation in OPERATIONS[resource_type] if self.may(operation, resource_type, name))
