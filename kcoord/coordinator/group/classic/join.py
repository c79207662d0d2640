# SPDX-License-Identifier: Apache-2.0
"""JoinGroup of a classic group: which members may join, and whether their request starts a rebalance.

* A new dynamic member of version 4 or later first gets MEMBER_ID_REQUIRED with its id, and joins again (KIP-394).
* A new static member replaces the holder of its instance id (KIP-345).
* A present member that joins again with the same protocols after the join phase gets the present generation at once.
  This covers a lost response. The leader of a Stable group starts a rebalance instead.
* All other joins start a rebalance, or take part in the present one. Their response is PENDING here; `rebalance`
  completes it when the join phase ends.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kcoord.config import BrokerConfig
from kcoord.coordinator.group.classic import consumer_protocol
from kcoord.coordinator.group.classic.group import ClassicGroup
from kcoord.coordinator.group.classic.member import ClassicMember
from kcoord.coordinator.group.classic.rebalance import (
    NEW_MEMBER_JOIN_TIMEOUT_MS,
    Rebalance,
    group_metadata_record,
    is_too_large,
    refused_join,
)
from kcoord.coordinator.group.group import GroupState, heartbeat_timer
from kcoord.runtime.result import PENDING, CoordinatorResult, OperationContext
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import SyncGroupResponse
from kcoord_protocol.uuid import UUID_BYTES, hyphenated_uuid

if TYPE_CHECKING:
    from kcoord_protocol.messages import GroupMetadataValue, JoinGroupRequest, JoinGroupResponse

KNOWN_MEMBER_ID_VERSION = 4
"""The first version in which a new dynamic member has to join again with the id from the response (KIP-394)."""
SKIP_ASSIGNMENT_VERSION = 9
"""The first version whose response can ask the leader to skip the assignment (KIP-814)."""


def validate_request(config: BrokerConfig, request: JoinGroupRequest) -> None:
    """Checks the fields that need no state; raises INVALID_GROUP_ID, then INVALID_SESSION_TIMEOUT."""
    if not request.group_id:
        raise KafkaError(Errors.INVALID_GROUP_ID, "The group id must not be empty.")
    if not config.group_min_session_timeout_ms <= request.session_timeout_ms <= config.group_max_session_timeout_ms:
        raise KafkaError(
            Errors.INVALID_SESSION_TIMEOUT,
            f"Session timeout {request.session_timeout_ms} ms is not in the range from group.min.session.timeout.ms ("
            f"{config.group_min_session_timeout_ms}) to group.max.session.timeout.ms "
            f"({config.group_max_session_timeout_ms}).",
        )


def protocols_of(request: JoinGroupRequest) -> list[tuple[str, bytes]]:
    return [(protocol.name, protocol.metadata) for protocol in request.protocols]


def rebalance_timeout_of(request: JoinGroupRequest) -> int:
    """Returns the rebalance timeout; version 0 has none and uses the session timeout."""
    return request.rebalance_timeout_ms if request.rebalance_timeout_ms >= 0 else request.session_timeout_ms


def new_member_id(context: OperationContext, instance_id: str | None) -> str:
    """Returns the client id, or the instance id of a static member, and a UUID. Tools expect this form."""
    try:
        unique = hyphenated_uuid(base64.urlsafe_b64decode(context.candidate_id + "==")[:UUID_BYTES])
    except (ValueError, binascii.Error):
        unique = context.candidate_id
    return f"{context.client_id if instance_id is None else instance_id}-{unique}"


@dataclass(slots=True)
class ClassicJoin:
    """One JoinGroup request to one classic group."""

    config: BrokerConfig
    group: ClassicGroup
    context: OperationContext
    request: JoinGroupRequest
    rebalance: Rebalance

    def run(self) -> CoordinatorResult[object]:
        """Returns the result. Its response is PENDING if the request waits for the join phase."""
        group, request = self.group, self.request
        if self._is_full():
            group.remove(request.member_id)
            self.rebalance.result.response = refused_join(Errors.GROUP_MAX_SIZE_REACHED, "")
            return self.rebalance.result
        protocols = protocols_of(request)
        if not group.supports_protocols(request.protocol_type, {name for name, _ in protocols}):
            raise KafkaError(
                Errors.INCONSISTENT_GROUP_PROTOCOL,
                f"Group {group.group_id} shares no protocol of type {request.protocol_type!r} with this member.",
            )
        if not request.member_id:
            self._join_new()
        elif request.member_id in group.pending_members:
            self._add(request.member_id)
        else:
            self._join_existing(protocols)
        return self.rebalance.result

    def _is_full(self) -> bool:
        """True if the group has no room for the member.

        Present members keep their room. During a join phase only members whose JoinGroup waits count.
        """
        group, limit = self.group, self.config.group_max_size
        if group.state is GroupState.EMPTY:
            return False
        member = group.members.get(self.request.member_id)
        if group.state is GroupState.PREPARING_REBALANCE:
            return not (member is not None and member.is_awaiting_join) and group.awaiting_join >= limit
        return member is None and len(group.members) >= limit

    # New members.

    def _join_new(self) -> None:
        group, request = self.group, self.request
        member_id = new_member_id(self.context, request.group_instance_id)
        if request.group_instance_id is not None:
            if request.group_instance_id in group.static_members:
                self._replace_static(request.group_instance_id, member_id)
            else:
                self._add(member_id)
        elif self.context.api_version >= KNOWN_MEMBER_ID_VERSION:
            group.pending_members.add(member_id)
            self.rebalance.schedule(heartbeat_timer(group.group_id, member_id), request.session_timeout_ms)
            self.rebalance.result.response = refused_join(Errors.MEMBER_ID_REQUIRED, member_id)
        else:
            self._add(member_id)

    def _add(self, member_id: str) -> None:
        group, request, context = self.group, self.request, self.context
        if not group.members:
            group.protocol_type = request.protocol_type
        if group.state is GroupState.PREPARING_REBALANCE and group.previous_state is GroupState.EMPTY:
            group.member_added = True
        group.add(
            ClassicMember(
                member_id,
                request.group_instance_id,
                context.client_id,
                context.client_host,
                rebalance_timeout_of(request),
                request.session_timeout_ms,
                protocols_of(request),
                join_token=context.token,
                is_new=True,
            )
        )
        self.rebalance.result.response = PENDING
        self.rebalance.schedule(heartbeat_timer(group.group_id, member_id), NEW_MEMBER_JOIN_TIMEOUT_MS)
        self.rebalance.prepare_or_complete_join()

    # Members that join again.

    def _join_existing(self, protocols: list[tuple[str, bytes]]) -> None:
        group, request = self.group, self.request
        error = group.error_of_member(request.member_id, request.group_instance_id)
        if error is not Errors.NONE:
            raise KafkaError(error, f"Member {request.member_id} cannot join group {group.group_id} again.")
        member = group.members[request.member_id]
        same = member.protocols == protocols
        leads = group.leader == member.member_id
        if group.state is GroupState.COMPLETING_REBALANCE and same:
            # The response to its first JoinGroup may have been lost.
            self.rebalance.result.response = self.rebalance.join_response(member)
        elif group.state is GroupState.STABLE and same and not leads:
            self.rebalance.result.response = self.rebalance.join_response(member)
        else:
            self._update(member, protocols)
            self.rebalance.prepare_or_complete_join()

    def _update(self, member: ClassicMember, protocols: list[tuple[str, bytes]]) -> None:
        """Updates the member and parks this request. An older parked JoinGroup of it fails with a retriable error."""
        request = self.request
        self.group.set_protocols(member, protocols)
        member.rebalance_timeout_ms = rebalance_timeout_of(request)
        member.session_timeout_ms = request.session_timeout_ms
        superseded = self.group.unpark_join(member)
        if superseded != self.context.token:
            self.rebalance.complete(superseded, refused_join(Errors.REBALANCE_IN_PROGRESS, member.member_id))
        self.group.park_join(member, self.context.token)
        self.rebalance.result.response = PENDING

    # Static members that return under a new id.

    def _replace_static(self, instance_id: str, member_id: str) -> None:
        """Replaces the holder of the instance id (KIP-345).

        A Stable group rebalances only if the selected protocol or the subscribed topics change.
        """
        group, context, rebalance = self.group, self.context, self.rebalance
        old_id = group.static_members[instance_id]
        old_leader = group.leader
        stable_value = self._value_with_successor(old_id, member_id) if group.state is GroupState.STABLE else None
        member = group.replace_static(instance_id, member_id)
        rebalance.cancel(heartbeat_timer(group.group_id, old_id))
        rebalance.complete(group.unpark_join(member), refused_join(Errors.FENCED_INSTANCE_ID, old_id))
        token, member.sync_token = member.sync_token, None
        rebalance.complete(token, SyncGroupResponse(error_code=Errors.FENCED_INSTANCE_ID))
        rebalance.reset_heartbeat(member)
        member.client_id, member.client_host = context.client_id, context.client_host
        before = member.metadata(group.protocol)
        self._update(member, protocols_of(self.request))
        if stable_value is None:
            rebalance.prepare_or_complete_join()
            return
        if group.select_protocol() != group.protocol or self._topics_changed(before, member):
            rebalance.prepare()
            return
        group.unpark_join(member)
        rebalance.result.response = self._static_response(member, old_leader)
        rebalance.result.records.append(group_metadata_record(group.group_id, stable_value))

    def _value_with_successor(self, old_id: str, member_id: str) -> GroupMetadataValue:
        """Returns the group's record in which the new member replaces the old one. Changes nothing.

        Raises UNKNOWN_SERVER_ERROR, as Kafka does, if the new member's metadata makes the record too large.
        """
        group, context = self.group, self.context
        assignments = {member.member_id: member.assignment for member in group.members.values()}
        value = group.to_value(context.now_ms, assignments)
        if group.leader == old_id:
            value.leader = member_id
        member = next(member for member in value.members if member.member_id == old_id)
        member.member_id = member_id
        member.client_id, member.client_host = context.client_id, context.client_host
        member.rebalance_timeout = rebalance_timeout_of(self.request)
        member.session_timeout = self.request.session_timeout_ms
        protocols = protocols_of(self.request)
        member.subscription = next((metadata for name, metadata in protocols if name == group.protocol), b"")
        if is_too_large(group.group_id, value):
            raise KafkaError(
                Errors.UNKNOWN_SERVER_ERROR,
                f"The metadata of a static member makes the record of group {group.group_id} larger than a batch.",
            )
        return value

    def _topics_changed(self, before: bytes, member: ClassicMember) -> bool:
        """True if a consumer subscribes to other topics than before.

        Other metadata, such as owned partitions, may differ.
        """
        if not self.group.uses_consumer_protocol():
            return False
        old = consumer_protocol.read_subscription(before)
        new = consumer_protocol.read_subscription(member.metadata(self.group.protocol))
        return (old and set(old.topics)) != (new and set(new.topics))

    def _static_response(self, member: ClassicMember, old_leader: str | None) -> JoinGroupResponse:
        """Returns the response to a static member that replaced another one without a rebalance.

        A leader must not assign again. Version 9 and later has a flag for this. In older versions the leader in the
        response is the former member id, so that the member does not take itself for the leader.
        """
        if self.context.api_version >= SKIP_ASSIGNMENT_VERSION:
            return self.rebalance.join_response(member, skip_assignment=self.group.leader == member.member_id)
        return self.rebalance.join_response(member, leader=old_leader or "")
