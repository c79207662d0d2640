# SPDX-License-Identifier: Apache-2.0
"""Tests of the oracle of ACLs: which states a response may agree with, and decisions by hand."""

from __future__ import annotations

from random import Random

import pytest

from kcoord.simulation.acl_oracle import AclState
from kcoord.simulation.clock import VirtualClock
from kcoord.simulation.options import GUEST_GROUPS, Options
from kcoord.simulation.principals import acl, principal_of
from kcoord.simulation.rights_watch import RightsWatch
from kcoord.simulation.trace import Trace, ViolationError
from kcoord_protocol.acls import AclOperation, PatternType, PermissionType, ResourceType
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors
from kcoord_protocol.messages import (
    DeleteAclsRequest,
    DeleteAclsResponse,
    HeartbeatRequest,
    HeartbeatResponse,
)

GUEST = "guest-0/caller"
TOPIC = ResourceType.TOPIC


def new_watch() -> RightsWatch:
    clock = VirtualClock()
    return RightsWatch(Options.draw(Random(0)), clock, Trace(clock), {})


def heartbeat(watch: RightsWatch, error: Errors) -> None:
    """Sends a request and gets its response at once."""
    asked = watch.ask(GUEST, ApiKey.HEARTBEAT, HeartbeatRequest(group_id=GUEST_GROUPS[0]))
    assert asked is not None
    watch.answered(asked, HeartbeatResponse(error_code=error))


def revoked() -> DeleteAclsRequest:
    """Returns a change after which the guest has no rights to groups."""
    selected = DeleteAclsRequest.DeleteAclsFilter(
        resource_type_filter=ResourceType.GROUP,
        resource_name_filter=None,
        pattern_type_filter=PatternType.ANY,
        principal_filter=principal_of(GUEST),
        host_filter=None,
        operation=AclOperation.ANY,
        permission_type=PermissionType.ANY,
    )
    return DeleteAclsRequest(filters=[selected])


def test_a_response_agrees_with_the_acls_before_or_after_a_change_until_it_is_acknowledged() -> None:
    watch = new_watch()
    heartbeat(watch, Errors.NONE)
    with pytest.raises(ViolationError, match="S-4"):
        heartbeat(watch, Errors.GROUP_AUTHORIZATION_FAILED)
    early = watch.ask(GUEST, ApiKey.HEARTBEAT, HeartbeatRequest(group_id=GUEST_GROUPS[0]))
    change = watch.ask("acl-admin", ApiKey.DELETE_ACLS, revoked())
    assert early is not None and change is not None
    heartbeat(watch, Errors.NONE)
    heartbeat(watch, Errors.GROUP_AUTHORIZATION_FAILED)
    watch.answered(change, DeleteAclsResponse(filter_results=[DeleteAclsResponse.DeleteAclsFilterResult()]))
    heartbeat(watch, Errors.GROUP_AUTHORIZATION_FAILED)
    with pytest.raises(ViolationError, match="S-3"):
        heartbeat(watch, Errors.NONE)
    # A request that arrived before the acknowledgement may still get the response of the former ACLs.
    watch.answered(early, HeartbeatResponse(error_code=Errors.NONE))


def test_a_failed_change_acknowledges_nothing() -> None:
    watch = new_watch()
    change = watch.ask("acl-admin", ApiKey.DELETE_ACLS, revoked())
    assert change is not None
    failed = DeleteAclsResponse.DeleteAclsFilterResult(error_code=Errors.NOT_CONTROLLER)
    watch.answered(change, DeleteAclsResponse(filter_results=[failed]))
    heartbeat(watch, Errors.NONE)
    heartbeat(watch, Errors.GROUP_AUTHORIZATION_FAILED)


@pytest.mark.parametrize(
    ("principal", "host", "operation", "name", "expected"),
    [
        ("User:a", "10.0.0.1", AclOperation.READ, "topic-0", True),
        ("User:a", "10.0.0.1", AclOperation.DESCRIBE, "topic-0", True),
        ("User:a", "10.0.0.1", AclOperation.WRITE, "topic-0", False),
        ("User:a", "10.0.0.1", AclOperation.READ, "topic", False),
        ("User:a", "10.0.0.1", AclOperation.READ, "topic-9", False),
        ("User:a", "10.9.0.1", AclOperation.READ, "topic-0", False),
        ("User:b", "10.0.0.1", AclOperation.READ, "topic-0", False),
        ("User:b", "10.0.0.1", AclOperation.DESCRIBE_CONFIGS, "topic-9", False),
        ("User:b", "10.0.0.2", AclOperation.DESCRIBE_CONFIGS, "topic-9", True),
        ("User:root", "10.9.0.1", AclOperation.DELETE, "topic-9", True),
    ],
)
def test_decisions(principal: str, host: str, operation: AclOperation, name: str, expected: bool) -> None:
    state = AclState(
        frozenset(
            {
                acl("User:a", AclOperation.READ, TOPIC, "topic-", is_prefix=True, host="10.0.0.0/24"),
                acl("User:*", AclOperation.ALL, TOPIC, "topic-9", allows=False, host="10.0.0.1"),
                acl("User:b", AclOperation.ALTER_CONFIGS, TOPIC, "*"),
            }
        )
    )
    assert state.allows(principal, host, operation, TOPIC, name) is expected
