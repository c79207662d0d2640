# SPDX-License-Identifier: Apache-2.0
"""A member of a consumer group (KIP-848, client side) as a pure state machine.

In go the time, what the user wants, answers to heartbeats, and that a rebalance step is done. Out come heartbeats and
when they are due, and the next rebalance step: what to revoke, to assign, or to give up as lost.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final, TypeAlias

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
from kcoord.client.types import TopicIdPartition
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import (
    ConsumerGroupHeartbeatNewPartitionsResponse,
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
)

HeartbeatResponse: TypeAlias = ConsumerGroupHeartbeatResponse | ConsumerGroupHeartbeatNewPartitionsResponse
"""The layouts of the two revisions of KIP-1327."""

JOIN_EPOCH: Final = 0
LEAVE_EPOCH: Final = -1
LEAVE_STATIC_EPOCH: Final = -2
DEFAULT_HEARTBEAT_INTERVAL_MS: Final = 5_000

_FENCING: Final = frozenset({Errors.FENCED_MEMBER_EPOCH, Errors.UNKNOWN_MEMBER_ID, Errors.GROUP_ID_NOT_FOUND})


@dataclass(slots=True)
class _Told:
    """What the coordinator is known to have heard; a heartbeat repeats none of it."""

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
        rebalance_timeout_ms: int = 300_000,
    ) -> None:
        self.group_id = group_id
        self.member_id = member_id
        self.instance_id = instance_id
        self.state = MembershipState.UNSUBSCRIBED
        self.member_epoch = JOIN_EPOCH
        self.group_creation_time_ms = UNKNOWN_TIME_MS
        self.new_partitions: Partitions | None = None
        """Those of the target that are newer than the group; None if the coordinator does not list them."""
        self.owned: Partitions = NO_PARTITIONS
        self.target: Partitions = NO_PARTITIONS
        self.fatal_error: KafkaError | None = None
        self._rack_id = rack_id
        self._server_assignor = server_assignor
        self._rebalance_timeout_ms = rebalance_timeout_ms
        self._heartbeat_interval_ms = DEFAULT_HEARTBEAT_INTERVAL_MS
        self._names: frozenset[str] = frozenset()
        self._regex: str | None = None
        self._had_regex = False
        self._told: _Told | None = None
        self._telling: _Told | None = None
        self._ack_is_due = False
        self._is_acking = False
        """Whether the heartbeat under way says what the member owns."""
        self._claimed: Partitions | None = None
        """What the member said it owns, in a heartbeat that may still arrive: one without a good answer."""
        self._in_flight = False
        self._is_leave_in_flight = False
        self._due_ms: float = 0
        self._not_before_ms: float = 0
        self._step: RebalanceStep | None = None
        self._was_heard = False
        self._leave_is_due = False
        self._stays_in_group = False
        self._reported: list[KafkaError] = []

    # What the user does.

    def subscribe(self, names: Collection[str], regex: str | None) -> None:
        """Joins, or tells the group about other topics."""
        self._names, self._regex = frozenset(names), regex
        self._had_regex = self._had_regex or regex is not None
        if self.state is MembershipState.UNSUBSCRIBED:
            self._move(MembershipState.JOINING)
            self.fatal_error = None
            self._reset_for_join()

    def leave(self, *, static_stays: bool = True) -> None:
        """Gives everything back; then leaves, a static member for good only if `static_stays` is false."""
        if self.state in (MembershipState.UNSUBSCRIBED, MembershipState.PREPARE_LEAVING, MembershipState.LEAVING):
            return
        self._stays_in_group = static_stays
        was_in_group = self.state in IN_GROUP or self._leave_is_due
        self._move(MembershipState.PREPARE_LEAVING)
        self._leave_is_due = was_in_group and self._was_heard
        self._not_before_ms = 0
        self._advance()

    def polled(self) -> None:
        """The application is alive: a member that left because it was not comes back."""
        if self.state is MembershipState.STALE and not self.owned and self._step is None and not self._leave_is_due:
            self._move(MembershipState.JOINING)
            self._reset_for_join()

    def poll_expired(self, now_ms: float) -> None:
        """`max_poll_interval_ms` passed without a poll: leave, so that others can go on with the partitions."""
        if self.state in IN_GROUP:
            self._move(MembershipState.STALE)
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
        """Whether the epoch is one that the coordinator gave, and has not taken back as far as is known."""
        return self.member_epoch > 0 and (self.state in IN_GROUP or self.state is MembershipState.PREPARE_LEAVING)

    @property
    def is_unsubscribed(self) -> bool:
        return self.state is MembershipState.UNSUBSCRIBED

    def heartbeat_due_ms(self) -> float | None:
        """When the next heartbeat is to be sent; None while there is nothing to send, or one is on its way."""
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
        """Whether the coordinator should hear something before the interval is over."""
        if self.state not in IN_GROUP:
            return False
        told = self._told
        if told is None:
            return True
        if (told.names, told.regex) != (self._names, self._regex):
            return True
        return self._step is None and (told.owned != self.owned or self._must_ack())

    def _must_ack(self) -> bool:
        """Whether a new assignment is carried out, although that may have changed nothing: the coordinator waits for a
        partition that it gave and took back before the member had got round to it.
        """
        return self._ack_is_due and self.owned == self.target

    def make_heartbeat(self) -> ConsumerGroupHeartbeatRequest:
        """The heartbeat that is due; its answer, or that there is none, has to be reported."""
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
        """Everything when joining or when it is not sure what was heard; else only what is new."""
        told = self._told
        if told is None:
            request.rebalance_timeout_ms = self._rebalance_timeout_ms
            request.rack_id = self._rack_id
            request.server_assignor = self._server_assignor
        if told is None or told.names != self._names:
            request.subscribed_topic_names = sorted(self._names)
        if told is None or told.regex != self._regex:
            # Null keeps what a predecessor with the same instance id had; the empty text takes it away.
            keeps = not self._had_regex and self.instance_id is None
            request.subscribed_topic_regex = self._regex or (None if keeps else "")
        if told is None or told.owned != self.owned or self._must_ack():
            taking = self._step.partitions if self._step and self._step.kind is StepKind.ASSIGN else NO_PARTITIONS
            self._claimed = self.owned | taking
            request.topic_partitions = _by_topic(self._claimed)
        self._is_acking = request.topic_partitions is not None
        self._telling = _Told(self._names, self._regex, self.owned)

    def on_response(self, response: HeartbeatResponse, now_ms: float, retry_after_ms: float = 0) -> None:
        """Takes the answer to the heartbeat under way. After an error the next one waits for `retry_after_ms`."""
        self._in_flight = False
        if self._finish_leave():
            return
        if response.error_code:
            self._on_error(_error(response), now_ms, retry_after_ms)
            return
        if self.state not in IN_GROUP and self.state is not MembershipState.PREPARE_LEAVING:
            return
        self._told, self._telling, self._claimed = self._telling, None, None
        if self._is_acking:
            self._ack_is_due = False
        self.member_epoch = response.member_epoch
        self._take_creation_time(response)
        self._heartbeat_interval_ms = response.heartbeat_interval_ms
        self._due_ms = now_ms + response.heartbeat_interval_ms
        self._not_before_ms = 0
        if response.assignment is not None:
            self._take_target(response.assignment)
        self._settle()

    def _take_creation_time(self, response: HeartbeatResponse) -> None:
        """Both revisions of KIP-1327: the time of the group, or which partitions of a new target are newer."""
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
        """There is no answer, or one that means elsewhere or later: nobody knows what was heard."""
        self._in_flight = False
        if not self._finish_leave():
            self._on_error(error, now_ms, retry_after_ms)

    def _finish_leave(self) -> bool:
        """One attempt to leave is enough: the session ends by itself."""
        if not self._is_leave_in_flight:
            return False
        self._is_leave_in_flight = self._leave_is_due = self._was_heard = False
        if self.state is MembershipState.LEAVING:
            self._move(MembershipState.UNSUBSCRIBED)
        return True

    def _on_error(self, error: KafkaError, now_ms: float, retry_after_ms: float) -> None:
        self._told = self._telling = None
        self._not_before_ms = now_ms + retry_after_ms
        code = error.error
        if code in _FENCING and self.member_epoch != JOIN_EPOCH:
            self._fence()
        elif code is Errors.TOPIC_AUTHORIZATION_FAILED:
            # Others of the topics may be allowed, or this one later: the user is told, the member goes on.
            self._reported.append(error)
            self._not_before_ms = now_ms + self._heartbeat_interval_ms
        elif not code.retriable and code not in (Errors.UNKNOWN_MEMBER_ID, Errors.FENCED_MEMBER_EPOCH):
            self._fail(error)

    def _fence(self) -> None:
        """KIP-848: the member abandons its partitions at once and joins again with the same id and epoch 0."""
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
        """An error that the user should see once, and that does not end the membership."""
        return self._reported.pop(0) if self._reported else None

    # Rebalance steps.

    def next_step(self, known_topics: Collection[bytes]) -> RebalanceStep | None:
        """The next thing to do; topics whose names are not known yet have to wait."""
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
            # The coordinator may believe what it was told, and give them to others; the answer will say so.
            return None
        added = frozenset(each for each in self.target - self.owned if each.topic_id in known_topics)
        return RebalanceStep(StepKind.ASSIGN, added)

    def step_done(self, step: RebalanceStep) -> None:
        """The step was carried out, whatever happened meanwhile."""
        assert step is self._step
        self._step = None
        if step.kind is StepKind.ASSIGN:
            self.owned |= step.partitions
        else:
            self.owned -= step.partitions
        self._advance()

    def unresolved_topics(self, known_topics: Collection[bytes]) -> set[bytes]:
        """Topics of the target whose names have to be asked for."""
        return {each.topic_id for each in self.target} - set(known_topics)

    def _advance(self) -> None:
        """What follows from there being nothing more to give up."""
        if self._step is None and not self.owned:
            if self.state is MembershipState.FENCED:
                self._move(MembershipState.JOINING)
            elif self.state is MembershipState.PREPARE_LEAVING:
                self._move(MembershipState.LEAVING)
                if not self._leave_is_due:
                    self._move(MembershipState.UNSUBSCRIBED)
                self.member_epoch = JOIN_EPOCH
        if self.state in IN_GROUP:
            self._settle()

    def _settle(self) -> None:
        """The state within the group, from what is owned, what shall be, and what the coordinator knows."""
        if self.state not in IN_GROUP or self.member_epoch == JOIN_EPOCH:
            return
        if self._step is not None or self.owned != self.target:
            wanted = MembershipState.RECONCILING
        elif self._told is None or self._told.owned != self.owned or self._ack_is_due:
            wanted = MembershipState.ACKNOWLEDGING
        else:
            wanted = MembershipState.STABLE
        if self.state is not wanted:
            self._move(wanted)

    def _reset_for_join(self) -> None:
        assert not self.owned
        self.member_epoch = JOIN_EPOCH
        self.target = NO_PARTITIONS
        self._told = self._telling = self._claimed = None
        self._ack_is_due = False

    def _move(self, state: MembershipState) -> None:
        assert state in TRANSITIONS[self.state], f"{self.state} -> {state}"
        self.state = state


def _error(response: HeartbeatResponse) -> KafkaError:
    try:
        return KafkaError(Errors(response.error_code), response.error_message)
    except ValueError:
        return KafkaError(Errors.UNKNOWN_SERVER_ERROR, f"error code {response.error_code}")


def _by_topic(partitions: Iterable[TopicIdPartition]) -> list[ConsumerGroupHeartbeatRequest.TopicPartitions]:
    topics: dict[bytes, list[int]] = {}
    for topic_id, partition in sorted(partitions):
        topics.setdefault(topic_id, []).append(partition)
    return [
        ConsumerGroupHeartbeatRequest.TopicPartitions(topic_id=topic_id, partitions=indexes)
        for topic_id, indexes in topics.items()
    ]
