# SPDX-License-Identifier: Apache-2.0
"""A model of an operator who creates and deletes the ACLs of guests.

It sends one change at a time, and repeats it until it is acknowledged. Once it has sent a change twice, it rests for
`_STRAY_MS` after the acknowledgement: a copy of the request may still be on its way between two processes of the
cluster. So the ACLs have changed in the order of the oracle's states (`acl_oracle`).
"""

from __future__ import annotations

from random import Random
from typing import Final

from kcoord.simulation.client import RETRY_MS, Scene, SimulatedClient
from kcoord.simulation.options import GUEST_GROUPS, GUEST_MEMBER_GROUPS
from kcoord.simulation.principals import GUEST_TOPIC, GUESTS, acl, first_acls
from kcoord.simulation.topics import FIRST_TOPIC, LATER_TOPIC
from kcoord.simulation.trace import ViolationError
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
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors
from kcoord_protocol.messages import (
    CreateAclsRequest,
    CreateAclsResponse,
    DeleteAclsRequest,
    DeleteAclsResponse,
    DescribeAclsRequest,
    DescribeAclsResponse,
)

_VERSION: Final = 3
_STRAY_MS: Final = 2_000
_LOOK_PROBABILITY: Final = 0.4
_REPEATABLE: Final = frozenset({Errors.NOT_CONTROLLER, Errors.REQUEST_TIMED_OUT})
_TOPIC, _GROUP = ResourceType.TOPIC, ResourceType.GROUP
_TRANSACTION, _CLUSTER = ResourceType.TRANSACTIONAL_ID, ResourceType.CLUSTER
_HOSTS: Final = (WILDCARD, WILDCARD, WILDCARD, "10.0.0.1", "10.0.0.0/24", "10.0.0.0/16", "10.9.0.0/16")


def _catalogue(random: Random) -> list[Acl]:
    """Returns the ACLs that come and go in one run. Those of the first list do so most often."""
    acls: list[Acl] = []
    for guest, group_id, members in zip(GUESTS, GUEST_GROUPS, GUEST_MEMBER_GROUPS, strict=True):
        principal = f"User:{guest}"
        hot = [
            acl(principal, AclOperation.READ, _TOPIC, FIRST_TOPIC),
            acl(principal, AclOperation.READ, _GROUP, group_id),
            acl(principal, AclOperation.READ, _GROUP, members),
        ]
        acls += hot * 4
        acls += (
            acl(principal, AclOperation.DESCRIBE, _TOPIC, "topic-", is_prefix=True),
            acl(principal, AclOperation.READ, _TOPIC, LATER_TOPIC),
            acl(principal, AclOperation.READ, _TOPIC, FIRST_TOPIC, allows=False),
            acl(principal, AclOperation.DESCRIBE, _TOPIC, "t", is_prefix=True, allows=False),
            acl(principal, AclOperation.ALL, _GROUP, "guest", is_prefix=True),
            acl(principal, AclOperation.DELETE, _GROUP, group_id),
            acl(principal, AclOperation.DESCRIBE, _GROUP, WILDCARD),
            acl(principal, AclOperation.READ, _GROUP, members, allows=False),
            acl(principal, AclOperation.WRITE, _TOPIC, GUEST_TOPIC),
            acl(principal, AclOperation.WRITE, _TRANSACTION, "guest-tx", is_prefix=True),
            acl(principal, AclOperation.WRITE, _TRANSACTION, WILDCARD, allows=False),
        )
        acls += (
            acl(principal, operation, _CLUSTER, CLUSTER_NAME)
            for operation in (AclOperation.DESCRIBE, AclOperation.IDEMPOTENT_WRITE, AclOperation.ALTER_CONFIGS)
        )
        for _ in range(12):
            acls.append(_draw(random, principal))
    acls.append(acl(WILDCARD_PRINCIPAL, AclOperation.READ, _TOPIC, WILDCARD))
    acls.append(acl(WILDCARD_PRINCIPAL, AclOperation.DESCRIBE, _GROUP, WILDCARD))
    return acls


def _draw(random: Random, principal: str) -> Acl:
    resource_type = random.choice((_TOPIC, _TOPIC, _GROUP, _TRANSACTION))
    operations = (AclOperation.READ, AclOperation.WRITE, AclOperation.DESCRIBE, AclOperation.DELETE, AclOperation.ALL)
    names = {
        _TOPIC: (FIRST_TOPIC, LATER_TOPIC, GUEST_TOPIC, "topic", WILDCARD),
        _GROUP: (*GUEST_GROUPS, *GUEST_MEMBER_GROUPS, "committers", WILDCARD),
        _TRANSACTION: ("guest-tx-0", "guest-tx-1", WILDCARD),
    }
    name = random.choice(names[resource_type])
    return acl(
        principal,
        random.choice(operations),
        resource_type,
        name,
        is_prefix=name != WILDCARD and random.random() < 0.3,
        allows=random.random() < 0.6,
        host=random.choice(_HOSTS),
    )


class AclAdmin(SimulatedClient):
    """Each disturbance makes it create an ACL or delete one that exists, unless a change is under way."""

    def __init__(self, scene: Scene) -> None:
        super().__init__("acl-admin", scene)
        self._trace = scene.trace
        self._catalogue = _catalogue(self.random)
        self._acls = set(first_acls())
        self._change: CreateAclsRequest | DeleteAclsRequest | None = None
        self._after: set[Acl] = set()
        self._times_sent = 0
        self._resting_until_ms = 0

    def on_timeout(self) -> None:
        if self._change is not None:
            self._send()

    def change(self, random: Random) -> None:
        if self._change is not None or self.is_waiting or self.clock.now_ms < self._resting_until_ms:
            return
        acl = random.choice(self._catalogue)
        if acl not in self._acls:
            self._after = self._acls | {acl}
            self._change = CreateAclsRequest(creations=[creation_of(acl)])
        elif random.random() < 0.8:
            self._after = self._acls - {acl}
            self._change = DeleteAclsRequest(filters=[_exact_filter(acl)])
        else:
            self._after = {
                other
                for other in self._acls
                if (other.principal, other.resource_type) != (acl.principal, acl.resource_type)
            }
            self._change = DeleteAclsRequest(filters=[_filter(acl.resource_type, acl.principal)])
        self._times_sent = 0
        self._send()

    def _send(self) -> None:
        change = self._change
        assert change is not None
        self._times_sent += 1
        is_new = isinstance(change, CreateAclsRequest)

        def on_answer(body: bytes) -> None:
            if is_new:
                errors = {result.error_code for result in CreateAclsResponse.decode(body, _VERSION).results}
            else:
                errors = {result.error_code for result in DeleteAclsResponse.decode(body, _VERSION).filter_results}
            self._answered(errors)

        api_key = ApiKey.CREATE_ACLS if is_new else ApiKey.DELETE_ACLS
        self.request(api_key, _VERSION, "", change, on_answer)

    def _answered(self, errors: set[int]) -> None:
        if not any(errors):
            self._trace.add("acls-changed", str(self._change))
            self._acls, self._change = self._after, None
            self._resting_until_ms = self.clock.now_ms + (_STRAY_MS if self._times_sent > 1 else 0)
            if self.random.random() < _LOOK_PROBABILITY:
                self._look()
        elif errors <= _REPEATABLE:
            self.clock.after(RETRY_MS, self.on_timeout)
        else:
            raise self.unexpected(max(errors), str(self._change))

    def _look(self) -> None:
        """Describes all ACLs, and compares them with those that were acknowledged (M-1)."""

        def on_answer(body: bytes) -> None:
            response = DescribeAclsResponse.decode(body, _VERSION)
            shown = {
                Acl(
                    ResourceType(resource.resource_type),
                    resource.resource_name,
                    PatternType(resource.pattern_type),
                    entry.principal,
                    entry.host,
                    AclOperation(entry.operation),
                    PermissionType(entry.permission_type),
                )
                for resource in response.resources
                for entry in resource.acls
            }
            if shown != self._acls:
                text = f"the ACLs differ from the acknowledged ones by {sorted(map(str, shown ^ self._acls))}"
                raise ViolationError("M-1 acknowledged changes of metadata are visible", text)

        self.request(ApiKey.DESCRIBE_ACLS, _VERSION, "", _describe(), on_answer)


def creation_of(acl: Acl) -> CreateAclsRequest.AclCreation:
    return CreateAclsRequest.AclCreation(
        resource_type=acl.resource_type,
        resource_name=acl.resource_name,
        resource_pattern_type=acl.pattern_type,
        principal=acl.principal,
        host=acl.host,
        operation=acl.operation,
        permission_type=acl.permission_type,
    )


def _exact_filter(acl: Acl) -> DeleteAclsRequest.DeleteAclsFilter:
    return DeleteAclsRequest.DeleteAclsFilter(
        resource_type_filter=acl.resource_type,
        resource_name_filter=acl.resource_name,
        pattern_type_filter=acl.pattern_type,
        principal_filter=acl.principal,
        host_filter=acl.host,
        operation=acl.operation,
        permission_type=acl.permission_type,
    )


def _filter(resource_type: ResourceType, principal: str) -> DeleteAclsRequest.DeleteAclsFilter:
    """Returns a filter that selects all ACLs of a principal for a type of resource."""
    return DeleteAclsRequest.DeleteAclsFilter(
        resource_type_filter=resource_type,
        resource_name_filter=None,
        pattern_type_filter=PatternType.ANY,
        principal_filter=principal,
        host_filter=None,
        operation=AclOperation.ANY,
        permission_type=PermissionType.ANY,
    )


def _describe() -> DescribeAclsRequest:
    return DescribeAclsRequest(
        resource_type_filter=ResourceType.ANY,
        resource_name_filter=None,
        pattern_type_filter=PatternType.ANY,
        principal_filter=None,
        host_filter=None,
        operation=AclOperation.ANY,
        permission_type=PermissionType.ANY,
    )
