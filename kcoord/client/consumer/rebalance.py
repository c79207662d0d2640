# SPDX-License-Identifier: Apache-2.0
"""Carries out the steps of a rebalance: commit, tell the listener, take the partitions away or put them in place."""

from __future__ import annotations

import logging

from kcoord.client.cluster import Cluster, Deadline
from kcoord.client.consumer.commits import CommitManager
from kcoord.client.consumer.listener import ConsumerRebalanceListener
from kcoord.client.consumer.member_state import RebalanceStep, StepKind
from kcoord.client.consumer.membership import Membership
from kcoord.client.consumer.metadata_updater import MetadataUpdater
from kcoord.client.consumer.positions import Positions
from kcoord.client.consumer.session import GroupSession
from kcoord.client.consumer.subscription import SubscriptionState
from kcoord.client.signal import Signal
from kcoord.client.types import TopicPartition

_log = logging.getLogger(__name__)


class ConsumerRebalance:
    """The part of a consumer that only members of a group have."""

    def __init__(
        self,
        cluster: Cluster,
        membership: Membership,
        session: GroupSession,
        subscription: SubscriptionState,
        commits: CommitManager,
        positions: Positions,
        updater: MetadataUpdater,
        changed: Signal,
    ) -> None:
        self.membership = membership
        self.session = session
        self.listener = ConsumerRebalanceListener()
        self._cluster = cluster
        self._subscription = subscription
        self._commits = commits
        self._positions = positions
        self._updater = updater
        self._changed = changed
        self._topic_names: dict[bytes, str] = {}

    async def run(self, deadline: Deadline | None = None) -> None:
        """Does what the membership wants next, until it wants nothing more; called between two handings out of records.

        A step that a listener fails in counts as done: the partitions are as the group wants them.
        """
        while True:
            known = self._topic_names.keys() | self._cluster.metadata.names_by_id.keys()
            step = self.membership.next_step(known)
            if step is None:
                break
            try:
                await self._carry_out(step, deadline)
            finally:
                self._finish(step)
                self.membership.step_done(step)
                self.session.wake()
        self._updater.request(topic_ids=self.membership.unresolved_topics(known))

    async def leave(self, deadline: Deadline, *, static_stays: bool) -> None:
        """Gives everything back and leaves the group."""
        self.membership.leave(static_stays=static_stays)
        try:
            await self.run(deadline)
        finally:
            await self.session.left(max(deadline.left_ms(), 0))

    async def _carry_out(self, step: RebalanceStep, deadline: Deadline | None) -> None:
        partitions = self._named(step)
        names = frozenset(partitions)
        _log.info(
            "group %s: %s %s", self.membership.group_id, step.kind.value, ", ".join(str(each) for each in sorted(names))
        )
        match step.kind:
            case StepKind.ASSIGN:
                self._subscription.add(partitions, fenced_off=True)
                awaitable = self.listener.on_partitions_assigned(names)
            case StepKind.REVOKE:
                self._subscription.fence_off(names)
                await self._commits.before_revocation(deadline)
                awaitable = self.listener.on_partitions_revoked(names)
            case StepKind.LOSE:
                self._subscription.fence_off(names)
                awaitable = self.listener.on_partitions_lost(names)
        if awaitable is not None:
            await awaitable

    def _finish(self, step: RebalanceStep) -> None:
        names = self._named(step)
        if step.kind is StepKind.ASSIGN:
            self._subscription.fence_off(names, False)
            self._positions.wake()
            self._changed.notify()
        else:
            self._subscription.remove(names)

    def _named(self, step: RebalanceStep) -> dict[TopicPartition, bytes]:
        """The step's partitions by name; a name is kept, since metadata forgets topics that are deleted."""
        for topic_id in {each.topic_id for each in step.partitions} - self._topic_names.keys():
            self._topic_names[topic_id] = self._cluster.metadata.names_by_id[topic_id]
        return {
            TopicPartition(self._topic_names[each.topic_id], each.partition): each.topic_id for each in step.partitions
        }
