# SPDX-License-Identifier: Apache-2.0
"""ConsumerGroupHeartbeat of a member that joins or stays (KIP-848 ConsumerGroupHeartbeat API).

Check order and epochs are as observed in Kafka 4.3.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from kcoord.config import BrokerConfig
from kcoord.coordinator.group import regex
from kcoord.coordinator.group.consumer.current_assignment import OwnedPartitions
from kcoord.coordinator.group.consumer.group import ConsumerGroup
from kcoord.coordinator.group.consumer.member import (
    JOIN_GROUP_EPOCH,
    LEAVE_GROUP_STATIC_MEMBER_EPOCH,
    ConsumerGroupMember,
    EpochAssignment,
    MemberState,
)
from kcoord.coordinator.group.consumer.removal import find_member
from kcoord.coordinator.group.consumer.transition import MemberTransition
from kcoord.coordinator.group.timers import GroupTimer, cancel_member_timers, rebalance_timer, session_timer
from kcoord.metadata.image import MetadataImage
from kcoord.runtime.result import (
    Cancel,
    CoordinatorResult,
    OperationContext,
    Schedule,
    Task,
    TimerKey,
)
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import ConsumerGroupHeartbeatResponse

if TYPE_CHECKING:
    from kcoord_protocol.messages import ConsumerGroupHeartbeatRequest

_NOTHING_SAID: Final = (None, None, None)
_BLANK: Final = "".join(map(chr, range(33)))
"""What Kafka takes off both ends of a text before it asks whether it is empty."""


def validate_request(request: ConsumerGroupHeartbeatRequest, api_version: int, assignors: Sequence[str]) -> None:
    """Check the fields that need no state, in Kafka's order; raises INVALID_REQUEST or UNSUPPORTED_ASSIGNOR.

    Version 0 lets a joining member leave its id to the coordinator; from version 1 the member makes it (KIP-1082).
    """
    epoch = request.member_epoch
    if (api_version >= 1 or epoch != JOIN_GROUP_EPOCH) and not request.member_id.strip(_BLANK):
        raise _invalid("MemberId can't be empty.")
    if not request.group_id.strip(_BLANK):
        raise _invalid("GroupId can't be empty.")
    if request.instance_id is not None and not request.instance_id.strip(_BLANK):
        raise _invalid("InstanceId can't be empty.")
    if request.rack_id is not None and not request.rack_id.strip(_BLANK):
        raise _invalid("RackId can't be empty.")
    if epoch == JOIN_GROUP_EPOCH:
        if request.rebalance_timeout_ms <= 0:
            given = request.rebalance_timeout_ms
            raise _invalid(f"RebalanceTimeoutMs must be provided in first request, above zero and not {given}.")
        if request.topic_partitions is None or request.topic_partitions:
            raise _invalid("TopicPartitions must be empty when (re-)joining.")
        if request.subscribed_topic_names is None and request.subscribed_topic_regex is None:
            raise _invalid("Either SubscribedTopicNames or SubscribedTopicRegex must be non-null when (re-)joining.")
    elif epoch == LEAVE_GROUP_STATIC_MEMBER_EPOCH and request.instance_id is None:
        raise _invalid("InstanceId can't be null.")
    elif epoch < LEAVE_GROUP_STATIC_MEMBER_EPOCH:
        raise _invalid("MemberEpoch is invalid.")
    if request.server_assignor is not None and request.server_assignor not in assignors:
        raise KafkaError(
            Errors.UNSUPPORTED_ASSIGNOR,
            f"ServerAssignor {request.server_assignor} is not supported. Supported assignors: {', '.join(assignors)}.",
        )


def _invalid(text: str) -> KafkaError:
    return KafkaError(Errors.INVALID_REQUEST, text)


@dataclass(slots=True)
class ConsumerHeartbeat:
    """One heartbeat of one member, from request to result. `conversion` is what made room for the group, if
    anything.
    """

    config: BrokerConfig
    image: MetadataImage
    group: ConsumerGroup
    context: OperationContext
    request: ConsumerGroupHeartbeatRequest
    conversion: CoordinatorResult[object]
    _transition: MemberTransition = field(init=False)

    def run(self) -> CoordinatorResult[ConsumerGroupHeartbeatResponse]:
        """Find the member, say what is new about it, and let the group and the member advance."""
        self._transition = MemberTransition(self.config, self.image, self.group, self.context.now_ms)
        member = self._find_member()
        updated = self._update_member(member)
        owned = _owned_partitions(self.request)
        return self._result(member, self._transition.advance(member, updated, owned), owned)

    def _find_member(self) -> ConsumerGroupMember:
        request = self.request
        member_id = request.member_id or self.context.candidate_id
        if request.member_epoch == JOIN_GROUP_EPOCH:
            return self._transition.find_joining(member_id, request.instance_id, classic=False)
        member = find_member(self.group, member_id, request.instance_id)
        self._check_epoch(member)
        return member

    def _check_epoch(self, member: ConsumerGroupMember) -> None:
        """The member's epoch, or the previous one where its owned partitions show that it has only missed the
        answer.
        """
        received, known = self.request.member_epoch, member.member_epoch
        if received == known:
            return
        owned = _owned_partitions(self.request)
        if received == member.previous_member_epoch and owned is not None and _is_subset(owned, member.assigned):
            return
        relation = "greater" if received > known else "smaller"
        raise KafkaError(
            Errors.FENCED_MEMBER_EPOCH,
            f"The consumer group member has a {relation} member epoch ({received}) than the one known by the group "
            f"coordinator ({known}). The member must abandon all its partitions and rejoin.",
        )

    def _update_member(self, member: ConsumerGroupMember) -> ConsumerGroupMember:
        """The member with what the request says; the same object where it says nothing new."""
        request, context = self.request, self.context
        if (
            (request.subscribed_topic_names, request.subscribed_topic_regex, request.server_assignor) == _NOTHING_SAID
            and request.rebalance_timeout_ms == -1
            and request.instance_id in (None, member.instance_id)
            and request.rack_id in (None, member.rack_id)
            and (context.client_id, context.client_host) == (member.client_id, member.client_host)
            and member.classic is None
        ):
            return member  # most heartbeats: a copy to compare with would be a tenth of their cost
        names = request.subscribed_topic_names
        updated = replace(
            member,
            instance_id=member.instance_id if request.instance_id is None else request.instance_id,
            rack_id=member.rack_id if request.rack_id is None else request.rack_id,
            client_id=context.client_id,
            client_host=context.client_host,
            subscribed_topic_names=member.subscribed_topic_names if names is None else tuple(sorted(set(names))),
            subscribed_topic_regex=(
                member.subscribed_topic_regex
                if request.subscribed_topic_regex is None
                else request.subscribed_topic_regex
            ),
            server_assignor=member.server_assignor if request.server_assignor is None else request.server_assignor,
            rebalance_timeout_ms=(
                member.rebalance_timeout_ms if request.rebalance_timeout_ms == -1 else request.rebalance_timeout_ms
            ),
            classic=None,
        )
        return member if updated == member else updated

    def _result(
        self, member: ConsumerGroupMember, reconciled: ConsumerGroupMember, owned: OwnedPartitions | None
    ) -> CoordinatorResult[ConsumerGroupHeartbeatResponse]:
        group, now_ms = self.group, self.context.now_ms
        settings, predecessor = self._transition.settings, self._transition.predecessor
        response = ConsumerGroupHeartbeatResponse(
            member_id=reconciled.member_id,
            member_epoch=reconciled.member_epoch,
            heartbeat_interval_ms=settings.heartbeat_interval_ms,
            group_creation_time_ms=group.creation_time_ms,
        )
        if self._is_full(owned) or reconciled.assigned != member.assigned or self._has_missed(member, owned):
            response.assignment = _assignment(reconciled.assigned)
        result = CoordinatorResult(
            response,
            self.conversion.records + self._transition.records,
            list(self.conversion.timers),
            completions=self.conversion.completions,
            is_refusable=not self.conversion.records,
        )
        if self._transition.displaced is not None:
            result.timers += cancel_member_timers(group.group_id, reconciled.member_id)
        session = session_timer(group.group_id, reconciled.member_id)
        result.timers.append(Schedule(session, now_ms + settings.session_timeout_ms))
        if predecessor is not None and predecessor.member_id != reconciled.member_id:
            result.timers += cancel_member_timers(group.group_id, predecessor.member_id)
        if reconciled.state is MemberState.UNREVOKED_PARTITIONS:
            if member.state is not reconciled.state or member.pending_revocation != reconciled.pending_revocation:
                rebalance = rebalance_timer(group.group_id, reconciled.member_id)
                result.timers.append(Schedule(rebalance, now_ms + reconciled.rebalance_timeout_ms))
        elif member.state is MemberState.UNREVOKED_PARTITIONS:
            result.timers.append(Cancel(rebalance_timer(group.group_id, reconciled.member_id)))
        result.tasks += self._transition.tasks
        result.tasks += self._regex_tasks(reconciled)
        return result

    def _is_full(self, owned: OwnedPartitions | None) -> bool:
        """A member that joins, or repeats everything after an error, is told its assignment even if it is unchanged."""
        request = self.request
        return request.member_epoch == JOIN_GROUP_EPOCH or (
            owned is not None
            and request.rebalance_timeout_ms != -1
            and (request.subscribed_topic_names is not None or request.subscribed_topic_regex is not None)
        )

    def _has_missed(self, member: ConsumerGroupMember, owned: OwnedPartitions | None) -> bool:
        """Whether the member is behind and has never been told of partitions it was given: the answer went astray, and
        it does not know so (a join that was sent twice, of which the second arrived first). Kafka leaves it without
        them until the next rebalance.
        """
        if owned is None or self.request.member_epoch == member.member_epoch:
            return False
        return any(
            not partitions.keys() <= owned.get(topic_id, frozenset())
            for topic_id, partitions in member.assigned.items()
        )

    def _regex_tasks(self, updated: ConsumerGroupMember) -> list[Task]:
        group = self.group
        wanted = set(group.regexes)
        if updated.subscribed_topic_regex:
            wanted.add(updated.subscribed_topic_regex)
        if not wanted:
            return []
        due_ms = group.regex_refreshed_at_ms + self.config.group_consumer_regex_refresh_interval_ms
        if not (group.regex_stale or self.context.now_ms >= due_ms or not wanted <= group.resolved_regexes.keys()):
            return []
        work = regex.ResolveRegex(group.group_id, tuple(sorted(wanted)), self.image.epoch)
        return [Task(TimerKey(GroupTimer.RESOLVE_REGEX, group.group_id), work)]


def _owned_partitions(request: ConsumerGroupHeartbeatRequest) -> OwnedPartitions | None:
    if request.topic_partitions is None:
        return None
    return {topic.topic_id: frozenset(topic.partitions) for topic in request.topic_partitions}


def _is_subset(owned: OwnedPartitions, assigned: EpochAssignment) -> bool:
    return all(partitions <= assigned.get(topic_id, {}).keys() for topic_id, partitions in owned.items())


def _assignment(assigned: EpochAssignment) -> ConsumerGroupHeartbeatResponse.Assignment:
    topics = [
        ConsumerGroupHeartbeatResponse.TopicPartitions(topic_id=topic_id, partitions=sorted(partitions))
        for topic_id, partitions in sorted(assigned.items())
    ]
    return ConsumerGroupHeartbeatResponse.Assignment(topic_partitions=topics)
