# SPDX-License-Identifier: Apache-2.0
"""A model member that obeys the classic protocol, eager or cooperative (KIP-429).

Theory of operation
-------------------
Cycle. `_join` (JoinGroup), `_sync` (SyncGroup, with the assignment if the member is the leader), then `_beat`
(Heartbeat) and commits until an error, a change of its topics or a revocation leads to `_rejoin`. `_after` schedules
the next action; a later call replaces it.

Ownership. An eager member gives up all partitions before it joins. A cooperative member keeps them, gives up the
revoked ones when it gets its assignment, and then joins again.

Deadline. The member gives up its partitions and rejoins once the shorter of session timeout and rebalance timeout has
passed since it sent the last request that succeeded: the coordinator may have removed it, even if no response says so.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Final

from kcoord.coordinator.group.classic import consumer_protocol
from kcoord.simulation.checkers import TopicPartition
from kcoord.simulation.client import RETRIABLE, RETRY_MS, Scene, SimulatedClient
from kcoord.simulation.promises import PromisedSubscription, Promises
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors
from kcoord_protocol.messages import (
    ConsumerProtocolSubscription,
    HeartbeatRequest,
    HeartbeatResponse,
    JoinGroupRequest,
    JoinGroupResponse,
    LeaveGroupRequest,
    OffsetCommitRequest,
    OffsetCommitResponse,
    SyncGroupRequest,
    SyncGroupResponse,
)

SYNC_VERSION: Final = 5
_STATIC_SINCE: Final = 5
_HEARTBEAT_VERSION: Final = 4
_LEAVE_VERSION: Final = 4
_COMMIT_VERSION: Final = 8
_SUBSCRIPTION_VERSION: Final = 3
_COMMIT_PROBABILITY: Final = 0.3
_REJOIN: Final = frozenset({Errors.REBALANCE_IN_PROGRESS, Errors.ILLEGAL_GENERATION})
_START_ANEW: Final = frozenset({Errors.UNKNOWN_MEMBER_ID})


class ClassicConsumer(SimulatedClient):
    """One incarnation of a member, from join to stop."""

    def __init__(
        self,
        name: str,
        group_id: str,
        instance_id: str | None,
        subscription: PromisedSubscription,
        is_cooperative: bool,
        scene: Scene,
        random: Random,
        promises: Promises,
    ) -> None:
        super().__init__(name, scene, random)
        self.member_id = ""
        self.group_id = group_id
        self._join_version = random.choice((3, 5, 7, 9))
        self.instance_id = instance_id if self._join_version >= _STATIC_SINCE else None
        self.subscription = subscription
        self.epoch = -1
        self.owned: frozenset[TopicPartition] = frozenset()
        self.is_stopped = False
        self.is_fenced = False
        self._kept: frozenset[TopicPartition] = frozenset()
        self._has_synced = False
        self._is_cooperative = is_cooperative
        self._promises = promises
        self._protocol: str | None = None
        self._number = 0
        self._last_good_ms = -1
        self._owner = f"{name}-owner"
        self._known_topics: dict[str, int] = {}
        self._ids: dict[str, bytes | None] = {}

    def start(self) -> None:
        self._after(0, self._join)

    def subscribe(self, subscription: PromisedSubscription) -> None:
        self.subscription = subscription
        if not self.is_waiting:
            self._after(0, self._rejoin)

    def crash(self) -> None:
        self._stop()

    def leave(self, *, stay_static: bool) -> None:
        """Stops the member, and sends LeaveGroup unless it is static and will return (KIP-345)."""
        member_id = self.member_id
        self._stop()
        if member_id and not (stay_static and self.instance_id is not None):
            identity = LeaveGroupRequest.MemberIdentity(member_id=member_id, group_instance_id=self.instance_id)
            request = LeaveGroupRequest(group_id=self.group_id, members=[identity])
            self.request(ApiKey.LEAVE_GROUP, _LEAVE_VERSION, self.group_id, request, lambda body: None)

    def freeze(self, pause_ms: int) -> None:
        """Lets the process stand still, so that it owns nothing, and then continue as if nothing had happened.

        Afterwards it may send a late commit. It owns its partitions again if a heartbeat of its generation succeeds.
        """
        self._promises.trace.add("freeze", self.name)
        late = self._kept = self._kept | self.owned
        self._release(self.owned)
        self.forget()

        def go_on() -> None:
            if not self._has_synced:
                self._rejoin()
            elif late and self.random.random() < 0.7:
                self._commit(late, self._beat)
            else:
                self._beat()

        self._after(pause_ms, go_on)

    def on_timeout(self) -> None:
        if not self.is_stopped:
            self._after(0, self._rejoin)

    def _stop(self) -> None:
        self.is_stopped = True
        self._number += 1
        self._release(self.owned)
        self.forget()

    def _after(self, delay_ms: int, action: Callable[[], None]) -> None:
        """Schedules the member's next action, which replaces any earlier one."""
        self._number += 1
        number = self._number
        self.clock.after(delay_ms, lambda: action() if number == self._number and not self.is_stopped else None)

    def _release(self, partitions: frozenset[TopicPartition]) -> None:
        self._promises.ownership.release(self.group_id, self._owner, partitions)
        self.owned -= partitions

    # Joining.

    def _rejoin(self) -> None:
        """Joins again. An eager member gives up its partitions first; a cooperative one keeps them meanwhile."""
        if self.is_waiting:
            self.reconnect()
        if not self._is_cooperative:
            self._release(self.owned)
        self._join()

    def _protocols(self) -> list[JoinGroupRequest.JoinGroupRequestProtocol]:
        subscription = ConsumerProtocolSubscription(
            topics=sorted(self._known_topics), owned_partitions=self._owned_by_topic(), generation_id=self.epoch
        )
        data = _SUBSCRIPTION_VERSION.to_bytes(2, "big") + subscription.encode(_SUBSCRIPTION_VERSION)
        # A member that also offers an eager protocol has to be eager itself.
        names = ["cooperative-sticky"] if self._is_cooperative else ["range", "roundrobin"]
        return [JoinGroupRequest.JoinGroupRequestProtocol(name=name, metadata=data) for name in names]

    def _owned_by_topic(self) -> list[ConsumerProtocolSubscription.TopicPartition]:
        topics: dict[str, list[int]] = {}
        for topic_id, partition in sorted(self.owned):
            topics.setdefault(self._promises.topic_name(topic_id), []).append(partition)
        return [
            ConsumerProtocolSubscription.TopicPartition(topic=name, partitions=partitions)
            for name, partitions in topics.items()
        ]

    def _join(self) -> None:
        self._kept, self._has_synced = frozenset(), False
        self._known_topics = self._promises.topics_of(self.subscription)
        request = JoinGroupRequest(
            group_id=self.group_id,
            member_id=self.member_id,
            session_timeout_ms=self.options.session_timeout_ms,
            rebalance_timeout_ms=self.options.rebalance_timeout_ms,
            protocol_type="consumer",
            protocols=self._protocols(),
        )
        if self._join_version >= _STATIC_SINCE:
            request.group_instance_id = self.instance_id
        sent_ms = self.clock.now_ms
        patience_ms = self.options.rebalance_timeout_ms + self.options.request_timeout_ms
        self._watch()
        self.request(
            ApiKey.JOIN_GROUP,
            self._join_version,
            self.group_id,
            request,
            lambda body: self._on_joined(JoinGroupResponse.decode(body, self._join_version), sent_ms),
            timeout_ms=patience_ms,
        )

    def _on_joined(self, response: JoinGroupResponse, sent_ms: int) -> None:
        error = response.error_code
        if error == Errors.NONE:
            self.member_id, self.epoch = response.member_id, response.generation_id
            self._protocol = response.protocol_name
            self._last_good_ms = sent_ms
            self._sync(self._assign(response))
        elif error == Errors.MEMBER_ID_REQUIRED:
            self.member_id = response.member_id
            self._after(0, self._join)
        else:
            self._on_error(error)

    def _on_error(self, error: int) -> None:
        """Reacts to an error as the classic protocol demands."""
        if error in _REJOIN:
            self._after(0, self._rejoin)
        elif error in _START_ANEW:
            self._promises.trace.add("classic-unknown", self.name)
            self.member_id, self.epoch = "", -1
            self._release(self.owned)
            self._after(1, self._join)
        elif error == Errors.FENCED_INSTANCE_ID:
            self._promises.trace.add("classic-fenced", self.name)
            self._stop()
            self.is_fenced = True
        elif error in RETRIABLE:
            self._after(RETRY_MS, self._rejoin)
        elif error in (Errors.GROUP_MAX_SIZE_REACHED, Errors.INCONSISTENT_GROUP_PROTOCOL, Errors.GROUP_ID_NOT_FOUND):
            self._promises.trace.add("classic-refused", f"{self.name} {error}")
            self._release(self.owned)
            self.member_id, self.epoch = "", -1
            self._after(self.options.heartbeat_interval_ms, self._join)
        else:
            raise self.unexpected(error, "a classic member")

    # The leader's part.

    def _assign(self, response: JoinGroupResponse) -> list[SyncGroupRequest.SyncGroupRequestAssignment]:
        if response.leader != self.member_id or getattr(response, "skip_assignment", False) or not response.members:
            return []
        subscribers: dict[str, list[str]] = {}
        owners: dict[tuple[str, int], str] = {}
        for member in response.members:
            subscription = consumer_protocol.read_subscription(member.metadata)
            for topic in subscription.topics if subscription is not None else ():
                subscribers.setdefault(topic, []).append(member.member_id)
            for owned in subscription.owned_partitions if subscription is not None else ():
                owners.update(((owned.topic, partition), member.member_id) for partition in owned.partitions)
        shares: dict[str, dict[str, list[int]]] = {member.member_id: {} for member in response.members}
        for topic, members in sorted(subscribers.items()):
            for partition in range(self._promises.partitions_of(topic)):
                member_id = sorted(members)[partition % len(members)]
                if self._protocol == "cooperative-sticky" and owners.get((topic, partition), member_id) != member_id:
                    continue
                shares[member_id].setdefault(topic, []).append(partition)
        return [
            SyncGroupRequest.SyncGroupRequestAssignment(
                member_id=member_id, assignment=consumer_protocol.write_assignment(share, _SUBSCRIPTION_VERSION)
            )
            for member_id, share in shares.items()
        ]

    # Syncing.

    def _sync(self, assignments: list[SyncGroupRequest.SyncGroupRequestAssignment]) -> None:
        request = SyncGroupRequest(
            group_id=self.group_id,
            generation_id=self.epoch,
            member_id=self.member_id,
            group_instance_id=self.instance_id,
            protocol_type="consumer",
            protocol_name=self._protocol,
            assignments=assignments,
        )
        sent_ms = self.clock.now_ms
        self._ids = self._topic_ids()
        patience_ms = self.options.rebalance_timeout_ms + self.options.request_timeout_ms
        self.request(
            ApiKey.SYNC_GROUP,
            SYNC_VERSION,
            self.group_id,
            request,
            lambda body: self._on_synced(SyncGroupResponse.decode(body, SYNC_VERSION), sent_ms),
            timeout_ms=patience_ms,
        )

    def _topic_ids(self) -> dict[str, bytes | None]:
        return {name: self._promises.topic_id(name) for name in ("topic-0", "topic-1")}

    def _on_synced(self, response: SyncGroupResponse, sent_ms: int) -> None:
        if response.error_code != Errors.NONE:
            self._on_error(response.error_code)
            return
        self._last_good_ms = max(self._last_good_ms, sent_ms)
        # The classic protocol has names only: if a topic was recreated meanwhile, the assignment may be of the old one.
        if self._is_late() or self._ids != self._topic_ids():
            self._after(0, self._rejoin)
            return
        assignment = consumer_protocol.read_assignment(response.assignment)
        assert assignment is not None
        target = frozenset(
            (topic_id, partition)
            for topic in assignment.assigned_partitions
            if (topic_id := self._promises.topic_id(topic.topic)) is not None
            for partition in topic.partitions
        )
        revoked, new = self.owned - target, target - self.owned
        self._release(revoked)
        self._promises.ownership.grant(self.group_id, self._owner, new)
        self.owned, self._has_synced = target, True
        self._watch()
        if revoked and self._is_cooperative:
            self._after(0, self._rejoin)
        else:
            self._after(self.options.heartbeat_interval_ms, self._beat)

    # Heartbeats.

    def _beat(self) -> None:
        request = HeartbeatRequest(
            group_id=self.group_id,
            generation_id=self.epoch,
            member_id=self.member_id,
            group_instance_id=self.instance_id,
        )
        sent_ms = self.clock.now_ms

        def on_answer(body: bytes) -> None:
            error = HeartbeatResponse.decode(body, _HEARTBEAT_VERSION).error_code
            if error == Errors.NONE:
                self._last_good_ms = sent_ms
                if self._kept and self._is_late():
                    self._after(0, self._rejoin)
                    return
                self._take_back()
                self._go_on()
            elif error in RETRIABLE:
                self._after(RETRY_MS, self._beat)
            else:
                self._on_error(error)

        self.request(ApiKey.HEARTBEAT, _HEARTBEAT_VERSION, self.group_id, request, on_answer)

    def _take_back(self) -> None:
        """Owns the partitions from before the standstill again.

        The generation is the same, so no other member has been assigned them.
        """
        kept, self._kept = self._kept, frozenset()
        if kept:
            self._promises.ownership.grant(self.group_id, self._owner, kept)
            self.owned = kept
            self._watch()

    def _go_on(self) -> None:
        if self._topics_changed():
            self._after(0, self._rejoin)
        elif self.owned and self.random.random() < _COMMIT_PROBABILITY:
            self._commit(self.owned, lambda: self._after(self.options.heartbeat_interval_ms, self._beat))
        else:
            self._after(self.options.heartbeat_interval_ms, self._beat)

    def _topics_changed(self) -> bool:
        """True if a subscribed topic was created, deleted, recreated or grown since the member joined.

        Every member watches its topics; a rejoin of the leader starts a rebalance.
        """
        promises = self._promises
        return promises.topics_of(self.subscription) != self._known_topics or any(
            self._ids.get(name) != promises.topic_id(name) for name in self._known_topics
        )

    def _watch(self) -> None:
        """Schedules the check of the member's deadline, at which it gives up its partitions."""
        if not self.owned or self._last_good_ms < 0:
            return
        self.clock.at(self._deadline_ms(), self._check_deadline)

    def _deadline_ms(self) -> int:
        return self._last_good_ms + min(self.options.session_timeout_ms, self.options.rebalance_timeout_ms)

    def _is_late(self) -> bool:
        return self.clock.now_ms >= self._deadline_ms()

    def _check_deadline(self) -> None:
        if self.is_stopped or not self.owned:
            return
        if not self._is_late():
            self._watch()
            return
        self._promises.trace.add("give-up", self.name)
        self._release(self.owned)
        self._after(0, self._rejoin)

    # Commits.

    def _commit(self, partitions: frozenset[TopicPartition], then: Callable[[], None]) -> None:
        offset = self._promises.commits.next_offset()
        topics: dict[str, list[OffsetCommitRequest.OffsetCommitRequestPartition]] = {}
        for topic_id, partition in sorted(partitions):
            topics.setdefault(self._promises.topic_name(topic_id), []).append(
                OffsetCommitRequest.OffsetCommitRequestPartition(partition_index=partition, committed_offset=offset)
            )
        request = OffsetCommitRequest(
            group_id=self.group_id,
            generation_id_or_member_epoch=self.epoch,
            member_id=self.member_id,
            group_instance_id=self.instance_id,
            topics=[
                OffsetCommitRequest.OffsetCommitRequestTopic(name=name, partitions=commits)
                for name, commits in topics.items()
            ],
        )

        def on_answer(body: bytes) -> None:
            self._promises.on_committed(self, self.group_id, OffsetCommitResponse.decode(body, _COMMIT_VERSION), offset)
            then()

        self.request(ApiKey.OFFSET_COMMIT, _COMMIT_VERSION, self.group_id, request, on_answer)
