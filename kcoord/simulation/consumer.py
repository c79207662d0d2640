# SPDX-License-Identifier: Apache-2.0
"""A model member that obeys KIP-848: it sends heartbeats, reconciles, and gives up its partitions if it is fenced.

Theory of operation
-------------------
Heartbeats. At most one is under way. `_beat` sends a full one after a join, an error, a timeout and a change of the
subscription (`_is_full`), and names the owned partitions whenever they have changed (`_owned_is_news`).

Reconciliation. A target that lacks owned partitions is first revoked, after a drawn time (`_reconcile`, `_revoked`).
Only then does the member take new partitions (`_take`). It takes nothing while a heartbeat that does not name those
partitions is unanswered (`_claimed`): the coordinator may believe that heartbeat and give them to another member.

Deadlines. The member never owns a partition that the coordinator may have given to another member. It therefore gives
up everything (`_give_up`) once its session or its time for a revocation may have expired at the coordinator, even if no
response says so. The session counts from when the last answered heartbeat was sent, a revocation from when the oldest
unanswered one was sent.

End. `_stop` ends the incarnation. Callbacks of an earlier incarnation compare `_incarnation` or `_beat_number` and do
nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Final

from kcoord.simulation.checkers import TopicPartition
from kcoord.simulation.client import RETRIABLE, RETRY_MS, Scene, SimulatedClient
from kcoord.simulation.promises import PromisedSubscription, Promises
from kcoord.simulation.trace import ViolationError
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors
from kcoord_protocol.messages import (
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
    OffsetCommitRequest,
    OffsetCommitResponse,
)

HEARTBEAT_VERSION: Final = 1
OFFSET_COMMIT_VERSION: Final = 9
_LONGEST_REVOCATION_MS: Final = 800
_COMMIT_PROBABILITY: Final = 0.3
_LATE_COMMIT_PROBABILITY: Final = 0.7
_REJOIN: Final = frozenset({Errors.FENCED_MEMBER_EPOCH, Errors.UNKNOWN_MEMBER_ID, Errors.GROUP_ID_NOT_FOUND})


class ModelConsumer(SimulatedClient):
    """One incarnation of a member of a consumer group, from join to stop."""

    def __init__(
        self,
        member_id: str,
        group_id: str,
        instance_id: str | None,
        subscription: PromisedSubscription,
        assignor: str | None,
        scene: Scene,
        random: Random,
        promises: Promises,
    ) -> None:
        super().__init__(member_id, scene, random)
        self.member_id = member_id
        self.group_id = group_id
        self.instance_id = instance_id
        self.subscription = subscription
        self.assignor = assignor
        self.epoch = 0
        self.owned: frozenset[TopicPartition] = frozenset()
        self.is_stopped = False
        self.is_fenced = False
        self._promises = promises
        self._target: frozenset[TopicPartition] = frozenset()
        self._interval_ms = self.options.heartbeat_interval_ms
        self._is_full = True
        self._owned_is_news = False
        self._is_revoking = False
        self._claimed: frozenset[TopicPartition] | None = None
        self._incarnation = 0
        self._beat_number = 0
        self._is_beat_due = False
        self._last_good_ms = 0
        self._unanswered_since_ms = -1
        self._revocation_deadline_ms = -1
        self._is_watching = False

    def start(self) -> None:
        self._beat_after(0)

    def subscribe(self, subscription: PromisedSubscription) -> None:
        """Changes the subscription and sends it with the next heartbeat."""
        self.subscription = subscription
        self._is_full = True
        self._beat_after(0)

    def crash(self) -> None:
        """Ends the process without a leave. A request that is under way may still arrive."""
        self._stop()
        self.forget()

    def leave(self, *, stay_static: bool) -> None:
        """Gives up everything, then sends the leave (KIP-848: epoch -1, or -2 if static); ignores its response."""
        self._stop()
        self.forget()
        if self.epoch > 0:
            epoch = -2 if stay_static and self.instance_id is not None else -1
            self._send_heartbeat(ConsumerGroupHeartbeatRequest(member_epoch=epoch), lambda body: None)

    def freeze(self, pause_ms: int) -> None:
        """Lets the process stand still, so that it owns nothing, and then continue as if nothing had happened.

        Afterwards it may send a late commit at its old epoch.
        """
        late, epoch = self.owned, self.epoch
        self._give_up("freeze")
        self._beat_number += 1
        number = self._beat_number

        def go_on() -> None:
            if number == self._beat_number and not self.is_stopped:
                if late and self.random.random() < _LATE_COMMIT_PROBABILITY:
                    self._commit(late, epoch)
                self._beat_after(0)

        self.clock.after(pause_ms, go_on)

    def on_timeout(self) -> None:
        if not self.is_stopped:
            self._is_full = True
            self._beat_after(0)

    def _stop(self) -> None:
        self.is_stopped = True
        self._beat_number += 1
        self._drop_everything()

    def _drop_everything(self) -> None:
        self._promises.ownership.release(self.group_id, self.member_id, self.owned)
        self.owned = self._target = frozenset()
        self._claimed = None
        self._is_revoking = False
        self._incarnation += 1
        self._revocation_deadline_ms = -1
        self._is_watching = False

    def _give_up(self, reason: str) -> None:
        """Drops all partitions and sends a full heartbeat; for the coordinator the member may still be their owner."""
        self._promises.trace.add(reason, self.member_id)
        if reason == "freeze":
            self.forget()
        else:
            self.reconnect()
        self._drop_everything()
        self._is_full = True
        self._unanswered_since_ms = -1
        self._beat_after(1)

    def _rejoin(self, reason: str) -> None:
        """Drops all partitions and joins again under the same member id."""
        self._promises.trace.add(reason, self.member_id)
        self._drop_everything()
        self.epoch = 0
        self._is_full = True
        self._unanswered_since_ms = -1
        self._beat_after(1)

    # Heartbeats.

    def _beat_after(self, delay_ms: int) -> None:
        self._beat_number += 1
        number = self._beat_number

        def beat() -> None:
            if number == self._beat_number and not self.is_stopped:
                self._beat()

        self.clock.after(delay_ms, beat)

    def _beat(self) -> None:
        if self.is_waiting:
            self._is_beat_due = True
            return
        request = ConsumerGroupHeartbeatRequest(member_epoch=self.epoch)
        if self._is_full:
            request.instance_id = self.instance_id
            request.rebalance_timeout_ms = self.options.rebalance_timeout_ms
            request.subscribed_topic_names = list(self.subscription.names)
            request.subscribed_topic_regex = self.subscription.regex
            request.server_assignor = self.assignor
        tells_owned = self._is_full or self._owned_is_news
        if tells_owned:
            self._claimed = self.owned
            request.topic_partitions = _topic_partitions(self.owned)
        if self._unanswered_since_ms < 0:
            # The response may ask for a revocation. Its time counts from when the coordinator has sent the response.
            self._unanswered_since_ms = self.clock.now_ms
            self._watch_until(self._unanswered_since_ms + self.options.rebalance_timeout_ms)
        sent_ms = self.clock.now_ms
        settled = self.owned if tells_owned and not self._is_revoking else None
        self._is_full = self._owned_is_news = self._is_beat_due = False
        self._send_heartbeat(request, lambda body: self._on_answer(body, request.member_epoch, sent_ms, settled))

    def _send_heartbeat(self, request: ConsumerGroupHeartbeatRequest, on_answer: Callable[[bytes], None]) -> None:
        request.group_id = self.group_id
        request.member_id = self.member_id
        if self.instance_id is not None:
            request.instance_id = self.instance_id
        api_key = ApiKey.CONSUMER_GROUP_HEARTBEAT
        self.request(api_key, HEARTBEAT_VERSION, self.group_id, request, on_answer, hears_both=True)

    def _on_answer(
        self, body: bytes, asked_epoch: int, sent_ms: int, settled: frozenset[TopicPartition] | None
    ) -> None:
        response = ConsumerGroupHeartbeatResponse.decode(body, HEARTBEAT_VERSION)
        error = response.error_code
        if error == Errors.NONE:
            self._on_good_answer(response, sent_ms, settled)
        elif error in _REJOIN:
            if asked_epoch == 0 and error != Errors.GROUP_ID_NOT_FOUND:
                raise ViolationError("I-10 a fenced member gets back in", f"{self.member_id}: {Errors(error).name}")
            self._rejoin("fenced")
        elif error in RETRIABLE:
            self._is_full = True
            self._beat_after(RETRY_MS)
        elif error == Errors.GROUP_MAX_SIZE_REACHED:
            self._promises.trace.add("group-full", self.member_id)
            self._is_full = True
            self._beat_after(self._interval_ms)
        elif error == Errors.FENCED_INSTANCE_ID:
            self._promises.trace.add("instance-fenced", self.member_id)
            self._stop()
            self.is_fenced = True
        elif error == Errors.UNRELEASED_INSTANCE_ID:
            self._promises.trace.add("unreleased", self.member_id)
            # If a join is duplicated, the first copy makes the coordinator reject the second; Kafka does the same.
            if self.epoch == 0:
                self._is_full = True
                self._beat_after(self._interval_ms)
        else:
            raise self.unexpected(error, response.error_message)

    def _on_good_answer(
        self, response: ConsumerGroupHeartbeatResponse, sent_ms: int, settled: frozenset[TopicPartition] | None
    ) -> None:
        self._promises.epochs.told(self.group_id, self.member_id, response.member_epoch)
        self.epoch = response.member_epoch
        if not self.answers_to_come:
            self._claimed = None
        self._interval_ms = response.heartbeat_interval_ms
        unanswered_since_ms, self._unanswered_since_ms = self._unanswered_since_ms, -1
        self._last_good_ms = sent_ms
        if settled is not None and settled == self.owned and not self._is_revoking:
            self._revocation_deadline_ms = -1
        if not self._is_watching:
            self._is_watching = True
            self._watch()
        self._beat_after(0 if self._is_beat_due else self._interval_ms)
        if response.assignment is not None:
            self._target = frozenset(
                (topic.topic_id, partition)
                for topic in response.assignment.topic_partitions
                for partition in topic.partitions
            )
            self._reconcile(unanswered_since_ms if unanswered_since_ms >= 0 else sent_ms)
        elif not self._is_revoking:
            self._take()
        if not self.is_waiting and self.random.random() < _COMMIT_PROBABILITY:
            self._commit(self.owned, self.epoch)

    # Reconciliation.

    def _reconcile(self, unanswered_since_ms: int) -> None:
        if self._is_revoking:
            return
        if self.owned <= self._target:
            self._take()
            return
        self._is_revoking = True
        self._promises.trace.add("revoke", self.member_id)
        if self._revocation_deadline_ms < 0:
            self._revocation_deadline_ms = unanswered_since_ms + self.options.rebalance_timeout_ms
            self._watch_until(self._revocation_deadline_ms)
        incarnation = self._incarnation
        delay_ms = self.random.randint(0, _LONGEST_REVOCATION_MS)
        self.clock.after(delay_ms, lambda: self._revoked() if incarnation == self._incarnation else None)

    def _revoked(self) -> None:
        self._is_revoking = False
        self._promises.ownership.release(self.group_id, self.member_id, self.owned - self._target)
        self.owned &= self._target
        self._owned_is_news = True
        self._take()
        self._beat_after(0)

    def _take(self) -> None:
        new = self._target - self.owned
        if self._claimed is not None and not new <= self._claimed:
            # The coordinator may believe the unanswered heartbeat and give them to others; its response will show that.
            return
        if new:
            self._promises.ownership.grant(self.group_id, self.member_id, new)
            self.owned = self._target
            self._owned_is_news = True
            self._beat_after(0)

    # Deadlines.

    def _watch(self) -> None:
        self._watch_until(self._last_good_ms + self.options.session_timeout_ms)

    def _watch_until(self, deadline_ms: int) -> None:
        incarnation = self._incarnation
        self.clock.at(deadline_ms, lambda: self._check_deadlines() if incarnation == self._incarnation else None)

    def _check_deadlines(self) -> None:
        if self.is_stopped or self.epoch == 0:
            return
        session_deadline_ms = self._last_good_ms + self.options.session_timeout_ms
        deadlines_ms = [session_deadline_ms, self._revocation_deadline_ms]
        if self._unanswered_since_ms >= 0:
            deadlines_ms.append(self._unanswered_since_ms + self.options.rebalance_timeout_ms)
        if any(0 <= deadline_ms <= self.clock.now_ms for deadline_ms in deadlines_ms):
            self._give_up("give-up")
        elif self._revocation_deadline_ms < 0:
            self._watch()

    # Commits.

    def _commit(self, partitions: frozenset[TopicPartition], epoch: int) -> None:
        offset = self._promises.commits.next_offset()
        topics: dict[str, list[OffsetCommitRequest.OffsetCommitRequestPartition]] = {}
        for topic_id, partition in sorted(partitions):
            topics.setdefault(self._promises.topic_name(topic_id), []).append(
                OffsetCommitRequest.OffsetCommitRequestPartition(partition_index=partition, committed_offset=offset)
            )
        if not topics:
            return
        request = OffsetCommitRequest(
            group_id=self.group_id,
            member_id=self.member_id,
            generation_id_or_member_epoch=epoch,
            topics=[
                OffsetCommitRequest.OffsetCommitRequestTopic(name=name, partitions=commits)
                for name, commits in topics.items()
            ],
        )

        def on_answer(body: bytes) -> None:
            response = OffsetCommitResponse.decode(body, OFFSET_COMMIT_VERSION)
            self._promises.on_committed(self, self.group_id, response, offset)
            if self._is_beat_due:
                self._beat_after(0)

        self.request(ApiKey.OFFSET_COMMIT, OFFSET_COMMIT_VERSION, self.group_id, request, on_answer)


def _topic_partitions(owned: frozenset[TopicPartition]) -> list[ConsumerGroupHeartbeatRequest.TopicPartitions]:
    topics: dict[bytes, list[int]] = {}
    for topic_id, partition in sorted(owned):
        topics.setdefault(topic_id, []).append(partition)
    return [
        ConsumerGroupHeartbeatRequest.TopicPartitions(topic_id=topic_id, partitions=partitions)
        for topic_id, partitions in topics.items()
    ]
