# SPDX-License-Identifier: Apache-2.0
"""Carries out the steps of a rebalance: commits, calls the listener, and adds or removes partitions.

It runs in the application's task, within `poll`, `unsubscribe` and `close`, so no records are handed out meanwhile. The
package's docstring has the order of a step.
"""

from __future__ import annotations

import asyncio
import logging

from kcoord.client.cluster import Cluster, Deadline
from kcoord.client.consumer.commits import CommitManager
from kcoord.client.consumer.listener import ConsumerRebalanceListener
from kcoord.client.consumer.local_assignors import LocalAssignors
from kcoord.client.consumer.member_state import MembershipState, RebalanceStep, StepKind
from kcoord.client.consumer.membership import Membership
from kcoord.client.consumer.metadata_updater import MetadataUpdater
from kcoord.client.consumer.positions import Positions
from kcoord.client.consumer.session import GroupSession
from kcoord.client.consumer.subscription import SubscriptionState
from kcoord.client.signal import Signal
from kcoord.client.types import TopicPartition

_log = logging.getLogger(__name__)


class ConsumerRebalance:
    """The rebalances of a consumer that is a member of a group."""

    def __init__(
        self,
        cluster: Cluster,
        membership: Membership,
        session: GroupSession,
        assignors: LocalAssignors | None,
        subscription: SubscriptionState,
        commits: CommitManager,
        positions: Positions,
        updater: MetadataUpdater,
        changed: Signal,
    ) -> None:
        self.membership = membership
        self.session = session
        self.assignors = assignors
        self.listener = ConsumerRebalanceListener()
        self._cluster = cluster
        self._subscription = subscription
        self._commits = commits
        self._positions = positions
        self._updater = updater
        self._changed = changed
        self._topic_names: dict[bytes, str] = {}

    async def run(self, deadline: Deadline | None = None) -> None:
        """Carries out the steps of `Membership` until there are no more.

        If the listener raises an exception, the step still counts as done, and the exception is raised. The partitions
        are added or removed all the same, since the coordinator has decided.
        """
        while True:
            known_topics = self._topic_names.keys() | self._cluster.metadata.names_by_id.keys()
            # Assignors learn of an assignment before the listener does. Without known topics there is no step ASSIGN.
            is_announced = self._announce()
            step = self.membership.next_step(known_topics if is_announced else ())
            if step is None:
                break
            await self._prepare(step, deadline)
            try:
                await self._carry_out(step)
            finally:
                self._finish(step)
                self.membership.step_done(step)
                self.session.wake()
        missing = self.membership.unresolved_topics(known_topics)
        if self.assignors is not None:
            missing |= self.assignors.unresolved_topics(known_topics)
        self._updater.request(topic_ids=missing)

    def _announce(self) -> bool:
        """Passes a new assignment to the assignors. Returns False if it has to wait for names of topics."""
        if self.assignors is None:
            return True
        return self.assignors.announce({**self._topic_names, **self._cluster.metadata.names_by_id})

    async def leave(self, deadline: Deadline, *, static_stays: bool, is_silent: bool) -> None:
        """Revokes all partitions and leaves the group.

        If the listener raises an exception, the member leaves all the same. A caller that is cancelled does not wait.
        """
        self.membership.leave(static_stays=static_stays, is_silent=is_silent)
        failure: Exception | None = None
        try:
            await self.run(deadline)
        except Exception as error:
            failure = error
        await self.session.left(max(deadline.left_ms(), 0))
        if failure is not None:
            raise failure

    async def _prepare(self, step: RebalanceStep, deadline: Deadline | None) -> None:
        """Stops reading partitions that are given up, and commits before a revocation.

        If the caller is cancelled meanwhile, the step is dropped and planned again, because the listener does not know
        of it yet.
        """
        if step.kind is StepKind.ASSIGN:
            return
        names = self._named(step)
        self._subscription.fence_off(names)
        if step.kind is StepKind.REVOKE:
            try:
                await self._commits.before_revocation(deadline)
            except asyncio.CancelledError:
                self._subscription.fence_off(names, False)
                self.membership.step_dropped(step)
                raise

    async def _carry_out(self, step: RebalanceStep) -> None:
        partitions = self._named(step)
        names = frozenset(partitions)
        _log.info(
            "group %s: %s %s",
            self.membership.group_id,
            step.kind.value,
            ", ".join(str(partition) for partition in sorted(names)),
        )
        match step.kind:
            case StepKind.ASSIGN:
                self._subscription.add(partitions, fenced_off=True)
                awaitable = self.listener.on_partitions_assigned(names)
            case StepKind.REVOKE:
                awaitable = self.listener.on_partitions_revoked(names)
            case StepKind.LOSE:
                awaitable = self.listener.on_partitions_lost(names)
        if awaitable is not None:
            await awaitable
        if self.assignors is not None and self.membership.state in (MembershipState.FENCED, MembershipState.STALE):
            # Metadata often depends on the partitions of the member, which joins again after this step.
            self.assignors.update_metadata()

    def _finish(self, step: RebalanceStep) -> None:
        names = self._named(step)
        if step.kind is StepKind.ASSIGN:
            self._subscription.fence_off(names, False)
            self._positions.wake()
            self._changed.notify()
        else:
            self._subscription.remove(names)

    def _named(self, step: RebalanceStep) -> dict[TopicPartition, bytes]:
        """Returns the step's partitions by name.

        Names are kept here, because the metadata drops deleted topics, whose partitions are revoked later.
        """
        for topic_id in {partition.topic_id for partition in step.partitions} - self._topic_names.keys():
            self._topic_names[topic_id] = self._cluster.metadata.names_by_id[topic_id]
        return {
            TopicPartition(self._topic_names[partition.topic_id], partition.partition): partition.topic_id
            for partition in step.partitions
        }
