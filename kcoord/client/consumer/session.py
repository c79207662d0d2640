# SPDX-License-Identifier: Apache-2.0
"""Keeps a member in its group: sends the heartbeats of `Membership`, and checks that the application polls.

One background task sends one heartbeat at a time, so heartbeats go on while the application processes records. If the
application does not call `poll` for `max_poll_interval_ms`, the task makes the member leave.
"""

from __future__ import annotations

import asyncio
import logging

from kcoord.client.backoff import Backoff
from kcoord.client.cluster import Cluster, CoordinatorType
from kcoord.client.config import ConsumerConfig
from kcoord.client.consumer.classification import topics_to_refresh
from kcoord.client.consumer.local_assignors import LocalAssignors
from kcoord.client.consumer.member_state import MembershipState
from kcoord.client.consumer.membership import HeartbeatResponse, Membership
from kcoord.client.consumer.metadata_updater import MetadataUpdater
from kcoord.client.signal import Signal, wait_for
from kcoord.client.tasks import spawn, stop
from kcoord_protocol.errors import KafkaError
from kcoord_protocol.messages import (
    ConsumerGroupHeartbeatNewPartitionsResponse,
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
)

_log = logging.getLogger(__name__)

# From v1 on members generate their ids (KIP-1082) and can subscribe with a regular expression.
_LOWEST_HEARTBEAT_VERSION = 1


class GroupSession:
    """The heartbeat task of one consumer."""

    def __init__(
        self,
        cluster: Cluster,
        config: ConsumerConfig,
        membership: Membership,
        assignors: LocalAssignors | None,
        updater: MetadataUpdater,
        changed: Signal,
    ) -> None:
        self.membership = membership
        self._assignors = assignors
        self._cluster = cluster
        self._config = config
        # The two revisions of KIP-1327 differ in the layout of v2.
        is_later_revision = config.kip_1327_revision == "new-partitions"
        self._response_class: type[HeartbeatResponse] = (
            ConsumerGroupHeartbeatNewPartitionsResponse if is_later_revision else ConsumerGroupHeartbeatResponse
        )
        self._updater = updater
        self._changed = changed
        self._wake = Signal()
        self._backoff = Backoff(config.retry_backoff_ms, config.retry_backoff_max_ms)
        self._failures = 0
        self._polled_ms = 0.0
        self._is_polling = False
        self._task: asyncio.Task[None] | None = None

    @staticmethod
    def now_ms() -> float:
        return asyncio.get_running_loop().time() * 1000

    # Called by the consumer.

    def start(self) -> None:
        """Starts the heartbeats, unless they run already."""
        if self._task is None:
            self._polled_ms = self.now_ms()
            self._task = spawn(self._run(), "kcoord consumer heartbeats")

    async def stop(self) -> None:
        await stop([self._task])

    def wake(self) -> None:
        """Makes the task check for a heartbeat that is due, because the membership has changed."""
        self._wake.notify()

    def begin_poll(self) -> None:
        """Records that `poll` is running. A member that left because of missing polls joins again."""
        self._is_polling = True
        if self.membership.state is MembershipState.STALE:
            self.membership.polled()
            self.wake()

    def end_poll(self) -> None:
        """Starts the interval `max_poll_interval_ms` in which the application must poll again."""
        self._is_polling = False
        self._polled_ms = self.now_ms()

    async def left(self, timeout_ms: float) -> None:
        """Waits until the member has left the group or the timeout has passed. Leaving takes one heartbeat."""
        deadline = self._cluster.deadline(timeout_ms)
        self.wake()
        while not self.membership.is_unsubscribed and not deadline.is_over:
            await wait_for(self._changed.ticket(), deadline.left_ms())

    async def _run(self) -> None:
        while True:
            ticket = self._wake.ticket()
            now_ms = self.now_ms()
            self._check_poll(now_ms)
            due_ms = self.membership.heartbeat_due_ms()
            if due_ms is not None and due_ms <= now_ms:
                await self._heartbeat()
                continue
            await wait_for(ticket, self._wait_ms(now_ms, due_ms))

    def _check_poll(self, now_ms: float) -> None:
        deadline_ms = self._poll_deadline_ms()
        if deadline_ms is not None and now_ms >= deadline_ms:
            _log.warning(
                "no poll for %d ms (max_poll_interval_ms): member %s leaves group %s",
                self._config.max_poll_interval_ms,
                self.membership.member_id,
                self.membership.group_id,
            )
            self.membership.poll_expired(now_ms)

    def _poll_deadline_ms(self) -> float | None:
        """Returns the time of the latest next poll, None while `poll` runs or if the member is not in the group."""
        if self._is_polling or not self.membership.is_in_group:
            return None
        return self._polled_ms + self._config.max_poll_interval_ms

    def _wait_ms(self, now_ms: float, due_ms: float | None) -> float | None:
        moments_ms = [moment_ms for moment_ms in (due_ms, self._poll_deadline_ms()) if moment_ms is not None]
        return max(min(moments_ms) - now_ms, 0.5) if moments_ms else None

    async def _heartbeat(self) -> None:
        membership = self.membership
        state = membership.state
        request = membership.make_heartbeat()
        response: HeartbeatResponse | None = None
        try:
            response = await self._cluster.call_coordinator(
                CoordinatorType.GROUP,
                membership.group_id,
                request,
                self._response_class,
                lambda answer: [answer.error_code],
                lowest=_LOWEST_HEARTBEAT_VERSION,
            )
        except KafkaError as error:
            self._failures += 1
            membership.on_failure(error, self.now_ms(), self._retry_after_ms())
        else:
            self._failures = self._failures + 1 if response.error_code else 0
            membership.on_response(response, self.now_ms(), self._retry_after_ms())
        if self._assignors is not None:
            self._assignors.on_heartbeat(response if response is not None and not response.error_code else None)
        if response is not None and response.assignment is not None:
            self._on_assignment()
        self._log_heartbeat(request, state)
        self._changed.notify()

    def _retry_after_ms(self) -> float:
        return self._backoff.delay_ms(self._failures, 0.5)

    def _on_assignment(self) -> None:
        """Requests the metadata that a new target needs.

        These are missing topic names and, with the option of KIP-1327, missing creation times. A coordinator that lists
        new partitions makes creation times unnecessary.
        """
        metadata = self._cluster.metadata
        target = self.membership.target
        missing = self.membership.unresolved_topics(metadata.names_by_id)
        if self._assignors is not None:
            missing |= self._assignors.unresolved_topics(metadata.names_by_id)
        if self.membership.new_partitions is None:
            missing |= topics_to_refresh(target, metadata.creation_time_ms, self._config.new_partitions_policy)
        self._updater.request(topic_ids=missing)

    def _log_heartbeat(self, request: ConsumerGroupHeartbeatRequest, before: MembershipState) -> None:
        membership = self.membership
        if membership.state is not before:
            _log.debug(
                "member %s of %s: %s -> %s, epoch %d -> %d",
                membership.member_id,
                membership.group_id,
                before.value,
                membership.state.value,
                request.member_epoch,
                membership.member_epoch,
            )
