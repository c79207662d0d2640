# SPDX-License-Identifier: Apache-2.0
"""A member of a consumer group (KIP-848, client side) as a pure state machine.

Theory of operation. Inputs are the time, the application's calls, responses to heartbeats, and finished rebalance
steps. Outputs are heartbeats with the time when they are due, and the next rebalance step. All callers run in one event
loop, and no method waits, so there are no locks:

- `Consumer` calls `subscribe` and, within `unsubscribe` and `close`, `leave`.
- `GroupSession`, a background task, sends the heartbeats and calls `on_response` or `on_failure`. If the application
  does not poll, it calls `poll_expired`; at the next poll it calls `polled`.
- `ConsumerRebalance`, within `poll`, `unsubscribe` and `close`, carries out the steps of `next_step` and calls
  `step_done`, or `step_dropped` if it was cancelled before the listener knew of the step.

States, and where they lead:

- UNSUBSCRIBED: no membership. `subscribe` leads to JOINING.
- JOINING: the next heartbeat has epoch 0 and all fields. A good response leads to RECONCILING or STABLE.
- RECONCILING: the partitions owned differ from the target assignment. The steps are first one REVOKE, then ASSIGN.
- ACKNOWLEDGING: the member owns its target, and the coordinator does not know it yet. A heartbeat is due at once.
- STABLE: the coordinator knows it. Heartbeats follow the interval and carry no news.
- FENCED: the coordinator removed the member or its group. After the step LOSE the member is JOINING again, with the
  same member id.
- STALE: the application did not poll for `max_poll_interval_ms`. The member leaves at once, so that other members get
  the partitions. The next poll carries out the step LOSE and leads to JOINING.
- PREPARE_LEAVING, LEAVING: the application closes or unsubscribes. After the step REVOKE (LOSE if the member is fenced)
  one heartbeat leaves the group, unless the coordinator cannot know the member. Then the member is UNSUBSCRIBED.
  If the application has subscribed again meanwhile, because the leave took longer than its timeout, it is JOINING.
- FATAL: an error that no retry can resolve. After the step LOSE only `leave` is possible.

Rules:

- At most one heartbeat is in flight, and at most one rebalance step is being carried out.
- The member revokes partitions before it takes new ones. It takes no partition while a heartbeat with its owned
  partitions may be unanswered: the coordinator may assign the other partitions elsewhere when it reads that heartbeat.
- After an error the next heartbeat has all fields, because the coordinator may have missed the last one.

Nothing is stored. After a crash the coordinator removes a dynamic member when its session expires. A static member that
comes back with the same instance id joins with all fields, and takes over the place of its predecessor.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final, TypeAlias

from kcoord.client.consumer.assignor_offer import AssignorOffer
from kcoord.client.consumer.member_state import (
    IN_GROUP,
    NO_PARTITIONS,
    TRANSITIONS,
    MembershipState,
    Partitions,
    RebalanceStep,
    StepKind,
)
from kcoord.client.creation_time import UNKNOWN_TIME_MS, group_creation_time_ms
from kcoord.client.errors import is_retriable
from kcoord.client.results import error_of
from kcoord.client.types import TopicIdPartition
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import (
    ConsumerGroupHeartbeatNewPartitionsResponse,
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
)

HeartbeatResponse: TypeAlias = ConsumerGroupHeartbeatResponse | ConsumerGroupHeartbeatNewPartitionsResponse
"""The responses of the two revisions of KIP-1327, which differ in the layout of v2."""

JOIN_EPOCH: Final = 0
LEAVE_EPOCH: Final = -1
LEAVE_STATIC_EPOCH: Final = -2
DEFAULT_HEARTBEAT_INTERVAL_MS: Final = 5_000

_LEAVING: Final = frozenset({MembershipState.PREPARE_LEAVING, MembershipState.LEAVING})
_FENCING: Final = frozenset({Errors.FENCED_MEMBER_EPOCH, Errors.UNKNOWN_MEMBER_ID, Errors.GROUP_ID_NOT_FOUND})


@dataclass(slots=True)
class _SentState:
    """Fields of a heartbeat. Once the coordinator has acknowledged them, later heartbeats omit them."""

    names: frozenset[str]
    regex: str | None
    owned: Partitions


class Membership:
    """One member, from its first subscription to the end of the consumer."""

    def __init__(
        self,
        group_id: str,
        member_id: str,
        *,
        instance_id: str | None = None,
        rack_id: str | None = None,
        server_assignor: str | None = None,
        offer: AssignorOffer | None = None,
        rebalance_timeout_ms: int = 300_000,
    ) -> None:
        self.group_id = group_id
        self.member_id = member_id
        self.instance_id = instance_id
        self.state = MembershipState.UNSUBSCRIBED
        self.member_epoch = JOIN_EPOCH
        self.last_epoch = JOIN_EPOCH
        """The last epoch that the coordinator gave, also if the member has been fenced or has left since."""
        self.group_creation_time_ms = UNKNOWN_TIME_MS
        self.new_partitions: Partitions | None = None
        """The partitions of the target that are newer than the group; None if the coordinator does not list them."""
        self.owned: Partitions = NO_PARTITIONS
        self.target: Partitions = NO_PARTITIONS
        self.fatal_error: KafkaError | None = None
        self._rack_id = rack_id
        self._server_assignor = server_assignor
        self._offer = offer
        self._rebalance_timeout_ms = rebalance_timeout_ms
        self._heartbeat_interval_ms = DEFAULT_HEARTBEAT_INTERVAL_MS
        self._names: frozenset[str] = frozenset()
        self._regex: str | None = None
        self._had_regex = False
        self._acknowledged: _SentState | None = None
        self._sent: _SentState | None = None
        self._ack_is_due = False
        self._is_acking = False
        """Whether the heartbeat in flight contains the owned partitions."""
        self._claimed: Partitions | None = None
        """The partitions of the last heartbeat that listed the owned ones, until a heartbeat has a good response."""
        self._in_flight = False
        self._is_leave_in_flight = False
        self._due_ms: float = 0
        self._not_before_ms: float = 0
        self._step: RebalanceStep | None = None
        self._was_heard = False
        self._leave_is_due = False
        self._joins_again = False
        """Whether the application has subscribed again before the member has left."""
        self._stays_in_group = False
        self._reported: list[KafkaError] = []

    # Called by the consumer.

    def subscribe(self, names: Collection[str], regex: str | None) -> None:
        """Joins the group, or changes the subscription of a member. A member that is leaving joins again after that."""
        self._names, self._regex = frozenset(names), regex
        self._had_regex = self._had_regex or regex is not None
        if self.state is MembershipState.UNSUBSCRIBED:
            self._join()
        else:
            self._joins_again = self.state in _LEAVING

    def leave(self, *, static_stays: bool = True, is_silent: bool = False) -> None:
        """Starts to revoke all partitions and then leave the group.

        With `static_stays` a static member leaves temporarily (epoch -2) and keeps its assignment until its session
        expires. With `is_silent` the coordinator is not told, and the member stays until its session expires.
        """
        self._joins_again = False
        if self.state is MembershipState.UNSUBSCRIBED or self.state in _LEAVING:
            return
        self._stays_in_group = static_stays
        was_in_group = self.state in IN_GROUP or self._leave_is_due
        self._move(MembershipState.PREPARE_LEAVING)
        self._leave_is_due = was_in_group and self._was_heard and not is_silent
        self._not_before_ms = 0
        self._advance()

    def polled(self) -> None:
        """Joins again after `poll_expired`, once the member has lost its partitions and left."""
        if self.state is MembershipState.STALE and not self.owned and self._step is None and not self._leave_is_due:
            self._move(MembershipState.JOINING)
            self._reset_for_join()

    def poll_expired(self, now_ms: float) -> None:
        """Leaves the group because `max_poll_interval_ms` passed without a poll. Other members get the partitions."""
        if self.state in IN_GROUP:
            self._move(MembershipState.STALE)
            self.member_epoch = JOIN_EPOCH
            self._leave_is_due = self._was_heard
            self._not_before_ms = now_ms

    # Heartbeats.

    @property
    def is_in_group(self) -> bool:
        return self.state in IN_GROUP

    @property
    def subscribed_names(self) -> frozenset[str]:
        return self._names

    @property
    def may_commit(self) -> bool:
        """Whether the member has an epoch of the coordinator, and has not been fenced as far as it knows."""
        return self.member_epoch > 0 and (self.state in IN_GROUP or self.state is MembershipState.PREPARE_LEAVING)

    @property
    def is_unsubscribed(self) -> bool:
        return self.state is MembershipState.UNSUBSCRIBED

    def heartbeat_due_ms(self) -> float | None:
        """Returns the time of the next heartbeat, None if there is nothing to send or a heartbeat is in flight."""
        if self._in_flight:
            return None
        if self._leave_is_due and self.state is not MembershipState.PREPARE_LEAVING:
            return self._not_before_ms
        if self.state in IN_GROUP or (self.state is MembershipState.PREPARE_LEAVING and self.member_epoch > 0):
            return self._regular_due_ms()
        return None

    def _regular_due_ms(self) -> float:
        return self._not_before_ms if self._has_news() else max(self._due_ms, self._not_before_ms)

    def _has_news(self) -> bool:
        """Whether there is a change to send before the heartbeat interval has passed."""
        if self.state not in IN_GROUP:
            return False
        acknowledged = self._acknowledged
        if acknowledged is None:
            return True
        if (acknowledged.names, acknowledged.regex) != (self._names, self._regex):
            return True
        if self._offer is not None and self._offer.has_news:
            return True
        return self._step is None and (acknowledged.owned != self.owned or self._must_ack())

    def _must_ack(self) -> bool:
        """Whether the member must acknowledge a target that it now owns, even if its owned partitions did not change.

        The coordinator may have assigned a partition and revoked it before the member took it. It waits for the
        acknowledgement all the same.
        """
        return self._ack_is_due and self.owned == self.target

    def make_heartbeat(self) -> ConsumerGroupHeartbeatRequest:
        """Returns the heartbeat that is due. The caller must report its response or its failure."""
        assert not self._in_flight
        self._in_flight = True
        request = ConsumerGroupHeartbeatRequest(
            group_id=self.group_id,
            member_id=self.member_id,
            member_epoch=self.member_epoch,
            instance_id=self.instance_id,
            rebalance_timeout_ms=-1,
            subscribed_topic_names=None,
            topic_partitions=None,
        )
        if self._leave_is_due and self.state is not MembershipState.PREPARE_LEAVING:
            is_static = self.instance_id is not None and (self.state is MembershipState.STALE or self._stays_in_group)
            request.member_epoch = LEAVE_STATIC_EPOCH if is_static else LEAVE_EPOCH
            self._is_leave_in_flight = True
            return request
        self._fill(request)
        self._was_heard = True
        return request

    def _fill(self, request: ConsumerGroupHeartbeatRequest) -> None:
        """Sets all fields if the member joins or a heartbeat failed, else only the fields that changed."""
        acknowledged = self._acknowledged
        if acknowledged is None:
            request.rebalance_timeout_ms = self._rebalance_timeout_ms
            request.rack_id = self._rack_id
            request.server_assignor = self._server_assignor
        if self._offer is not None:
            request.client_assignors = self._offer.begin_heartbeat(is_full=acknowledged is None)
        if acknowledged is None or acknowledged.names != self._names:
            request.subscribed_topic_names = sorted(self._names)
        if acknowledged is None or acknowledged.regex != self._regex:
            # Null would keep the expression of a predecessor with the same instance id. The empty text removes it.
            keeps = not self._had_regex and self.instance_id is None
            request.subscribed_topic_regex = self._regex or (None if keeps else "")
        if acknowledged is None or acknowledged.owned != self.owned or self._must_ack():
            taking = self._step.partitions if self._step and self._step.kind is StepKind.ASSIGN else NO_PARTITIONS
            self._claimed = self.owned | taking
            request.topic_partitions = _by_topic(self._claimed)
        self._is_acking = request.topic_partitions is not None
        self._sent = _SentState(self._names, self._regex, self.owned)

    def on_response(self, response: HeartbeatResponse, now_ms: float, retry_after_ms: float = 0) -> None:
        """Handles the response to the heartbeat in flight. After an error the next one waits for `retry_after_ms`."""
        self._in_flight = False
        if self._finish_leave():
            return
        if response.error_code:
            error = KafkaError(error_of(response.error_code), response.error_message)
            self._on_error(error, now_ms, retry_after_ms)
            return
        if self.state not in IN_GROUP and self.state is not MembershipState.PREPARE_LEAVING:
            return
        self._acknowledged, self._sent, self._claimed = self._sent, None, None
        if self._offer is not None:
            self._offer.acknowledge()
        if self._is_acking:
            self._ack_is_due = False
        self.member_epoch = self.last_epoch = response.member_epoch
        self._take_creation_time(response)
        self._heartbeat_interval_ms = response.heartbeat_interval_ms
        self._due_ms = now_ms + response.heartbeat_interval_ms
        self._not_before_ms = 0
        if response.assignment is not None:
            self._take_target(response.assignment)
        self._settle()

    def _take_creation_time(self, response: HeartbeatResponse) -> None:
        """Reads the fields of KIP-1327: the group's creation time, or by the later revision the new partitions."""
        if isinstance(response, ConsumerGroupHeartbeatResponse):
            self.group_creation_time_ms = group_creation_time_ms(response)
        elif response.assignment is not None:
            self.new_partitions = frozenset(
                TopicIdPartition(topic.topic_id, partition)
                for topic in response.assignment.topic_partitions
                for partition in topic.new_partitions
            )

    def _take_target(
        self,
        assignment: ConsumerGroupHeartbeatResponse.Assignment | ConsumerGroupHeartbeatNewPartitionsResponse.Assignment,
    ) -> None:
        target = frozenset(
            TopicIdPartition(topic.topic_id, partition)
            for topic in assignment.topic_partitions
            for partition in topic.partitions
        )
        self._ack_is_due = self._ack_is_due or target != self.target
        self.target = target

    def on_failure(self, error: KafkaError, now_ms: float, retry_after_ms: float) -> None:
        """Handles a heartbeat without a usable response. The coordinator may or may not have read it."""
        self._in_flight = False
        if not self._finish_leave():
            self._on_error(error, now_ms, retry_after_ms)

    def _finish_leave(self) -> bool:
        """Ends the leave if its heartbeat was in flight. A failed leave is not retried: the session expires anyway."""
        if not self._is_leave_in_flight:
            return False
        self._is_leave_in_flight = self._leave_is_due = self._was_heard = False
        if self.state is MembershipState.LEAVING:
            self._end_membership()
        return True

    def _on_error(self, error: KafkaError, now_ms: float, retry_after_ms: float) -> None:
        self._acknowledged = self._sent = None
        self._not_before_ms = now_ms + retry_after_ms
        code = error.error
        if code in _FENCING and self.member_epoch != JOIN_EPOCH:
            self._fence()
        elif code is Errors.TOPIC_AUTHORIZATION_FAILED:
            # The member may be authorized for its other topics, or for this one later. So `poll` raises the error once,
            # and the member stays.
            self._reported.append(error)
            self._not_before_ms = now_ms + self._heartbeat_interval_ms
        elif not is_retriable(error) and code not in (Errors.UNKNOWN_MEMBER_ID, Errors.FENCED_MEMBER_EPOCH):
            self._fail(error)

    def _fence(self) -> None:
        """Gives up all partitions as lost, then joins again with the same member id and epoch 0 (KIP-848)."""
        self.member_epoch = JOIN_EPOCH
        if self.state is MembershipState.PREPARE_LEAVING:
            self._leave_is_due = False
        if self.state not in IN_GROUP:
            return
        self._move(MembershipState.FENCED)
        self.target = NO_PARTITIONS
        self._advance()

    def _fail(self, error: KafkaError) -> None:
        if self.state is MembershipState.STALE or self.state in IN_GROUP:
            self._move(MembershipState.FATAL)
            self.fatal_error = error
            self.member_epoch = JOIN_EPOCH
            self._leave_is_due = False
            self.target = NO_PARTITIONS

    def take_reported(self) -> KafkaError | None:
        """Returns an error that `poll` raises once and that does not end the membership."""
        return self._reported.pop(0) if self._reported else None

    # Rebalance steps.

    def next_step(self, known_topics: Collection[bytes]) -> RebalanceStep | None:
        """Returns the next step, None if there is none or one is being carried out.

        Partitions of topics that are not in `known_topics` wait: their names are unknown.
        """
        if self._step is not None:
            return None
        step = self._plan(known_topics)
        if step is not None and step.partitions:
            self._step = step
            return step
        return None

    def _plan(self, known_topics: Collection[bytes]) -> RebalanceStep | None:
        if self.state in (MembershipState.FENCED, MembershipState.STALE, MembershipState.FATAL):
            return RebalanceStep(StepKind.LOSE, self.owned)
        if self.state is MembershipState.PREPARE_LEAVING:
            return RebalanceStep(StepKind.REVOKE if self.member_epoch > 0 else StepKind.LOSE, self.owned)
        if self.state is not MembershipState.RECONCILING:
            return None
        revoked = self.owned - self.target
        if revoked:
            return RebalanceStep(StepKind.REVOKE, revoked)
        if self._claimed is not None:
            # The coordinator may have read from the last heartbeat that the member does not own the other partitions,
            # and may have assigned them to other members. Wait for its response.
            return None
        added = frozenset(partition for partition in self.target - self.owned if partition.topic_id in known_topics)
        return RebalanceStep(StepKind.ASSIGN, added)

    def step_done(self, step: RebalanceStep) -> None:
        """Records that a step was carried out, even if the state has changed since."""
        assert step is self._step
        self._step = None
        if step.kind is StepKind.ASSIGN:
            self.owned |= step.partitions
        else:
            self.owned -= step.partitions
        self._advance()

    def step_dropped(self, step: RebalanceStep) -> None:
        """Forgets a step that was not carried out. `next_step` plans again."""
        assert step is self._step
        self._step = None

    def unresolved_topics(self, known_topics: Collection[bytes]) -> set[bytes]:
        """Returns the topics of the target whose names are unknown."""
        return {partition.topic_id for partition in self.target} - set(known_topics)

    def _advance(self) -> None:
        """Moves on from FENCED and PREPARE_LEAVING once the member owns no partition."""
        if self._step is None and not self.owned:
            if self.state is MembershipState.FENCED:
                self._move(MembershipState.JOINING)
            elif self.state is MembershipState.PREPARE_LEAVING:
                self._move(MembershipState.LEAVING)
                self.member_epoch = JOIN_EPOCH
                if not self._leave_is_due:
                    self._end_membership()
        if self.state in IN_GROUP:
            self._settle()

    def _settle(self) -> None:
        """Sets the state within the group from the owned partitions, the target, and what was acknowledged."""
        if self.state not in IN_GROUP or self.member_epoch == JOIN_EPOCH:
            return
        if self._step is not None or self.owned != self.target:
            next_state = MembershipState.RECONCILING
        elif self._acknowledged is None or self._acknowledged.owned != self.owned or self._ack_is_due:
            next_state = MembershipState.ACKNOWLEDGING
        else:
            next_state = MembershipState.STABLE
        if self.state is not next_state:
            self._move(next_state)

    def _end_membership(self) -> None:
        self._move(MembershipState.UNSUBSCRIBED)
        if self._joins_again:
            self._joins_again = False
            self._join()

    def _join(self) -> None:
        self._move(MembershipState.JOINING)
        self.fatal_error = None
        self._reset_for_join()

    def _reset_for_join(self) -> None:
        assert not self.owned
        self.member_epoch = JOIN_EPOCH
        self.target = NO_PARTITIONS
        self._acknowledged = self._sent = self._claimed = None
        self._ack_is_due = False

    def _move(self, state: MembershipState) -> None:
        assert state in TRANSITIONS[self.state], f"{self.state} -> {state}"
        self.state = state


def _by_topic(partitions: Iterable[TopicIdPartition]) -> list[ConsumerGroupHeartbeatRequest.TopicPartitions]:
    topics: dict[bytes, list[int]] = {}
    for topic_id, partition in sorted(partitions):
        topics.setdefault(topic_id, []).append(partition)
    return [
        ConsumerGroupHeartbeatRequest.TopicPartitions(topic_id=topic_id, partitions=indexes)
        for topic_id, indexes in topics.items()
    ]
