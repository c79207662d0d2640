# SPDX-License-Identifier: Apache-2.0
"""Commits the consumer's positions: on demand, at an interval, and before partitions are revoked."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from kcoord.client.cluster import Cluster, Deadline
from kcoord.client.config import ConsumerConfig
from kcoord.client.consumer.membership import Membership
from kcoord.client.consumer.offsets import GroupOffsetsClient
from kcoord.client.consumer.subscription import SubscriptionState
from kcoord.client.errors import ClientException, IllegalStateException
from kcoord.client.tasks import Tasks
from kcoord.client.types import Offsets
from kcoord_protocol.errors import KafkaError

_log = logging.getLogger(__name__)

_SHORTEST_INTERVAL_MS: Final = 1


class CommitManager:
    """The commits of one consumer. Without a group id there are none.

    Commits reach the coordinator in the order of the calls, because `GroupOffsetsClient` sends one at a time. At most
    one automatic commit is in flight, so that a slow coordinator does not get a queue of them.
    """

    def __init__(
        self,
        cluster: Cluster,
        config: ConsumerConfig,
        subscription: SubscriptionState,
        membership: Membership | None,
        offsets: GroupOffsetsClient | None,
    ) -> None:
        self._cluster = cluster
        self._config = config
        self._subscription = subscription
        self._membership = membership
        self._offsets = offsets
        self._is_automatic = config.enable_auto_commit and offsets is not None
        self._due_ms = 0.0
        self._tasks = Tasks()

    @staticmethod
    def _now_ms() -> float:
        return asyncio.get_running_loop().time() * 1000

    @property
    def client(self) -> GroupOffsetsClient:
        """The client for committed offsets. Raises IllegalStateException without a group id."""
        if self._offsets is None:
            raise IllegalStateException("a group_id is needed for committed offsets")
        return self._offsets

    async def stop(self) -> None:
        await self._tasks.stop()

    async def finish(self, deadline: Deadline) -> None:
        """Waits for the commits in flight, at most until the deadline. A member that leaves cannot commit later."""
        await self._tasks.wait(deadline.left_ms() / 1000)

    async def commit(self, offsets: Offsets, deadline: Deadline) -> None:
        """Commits offsets. Returns when the coordinator has stored them."""
        # Tasks that `begin` has created must run first: they take the lock of `GroupOffsetsClient` in the order of the
        # calls.
        await asyncio.sleep(0)
        await self.client.commit(offsets, deadline, as_member=self._subscription.uses_group)

    def begin(self, offsets: Offsets) -> asyncio.Task[None]:
        """Starts a commit and returns its task."""
        work = self._commit_logged(self.client, offsets, self._subscription.uses_group)
        task = asyncio.create_task(work, name="kcoord commit")
        self._tasks.add(task)
        task.add_done_callback(_retrieve)
        return task

    async def _commit_logged(self, client: GroupOffsetsClient, offsets: Offsets, as_member: bool) -> None:
        try:
            await client.commit(offsets, self._cluster.deadline(), as_member=as_member)
        except (KafkaError, ClientException) as error:
            _log.warning("group %s: the commit failed: %s", self._config.group_id, error)
            raise

    # Automatic commits.

    def restart_interval(self) -> None:
        """Sets the time of the next automatic commit, one interval from now."""
        self._due_ms = self._now_ms() + (self._config.auto_commit_interval_ms or _SHORTEST_INTERVAL_MS)

    def wait_ms(self) -> float | None:
        """Returns the time until the next automatic commit, None if commits are not automatic."""
        return self._due_ms - self._now_ms() if self._is_automatic else None

    def commit_if_due(self) -> None:
        """Starts an automatic commit if the interval has passed and no commit is in flight."""
        if not self._is_automatic or self._now_ms() < self._due_ms:
            return
        self.restart_interval()
        consumed = self._subscription.consumed()
        if consumed and not self._tasks and self._can_commit():
            self.begin(consumed)

    def _can_commit(self) -> bool:
        """Whether a commit can succeed: the consumer has no member, or its member has an epoch of the coordinator."""
        return not self._subscription.uses_group or (self._membership is not None and self._membership.may_commit)

    async def before_revocation(self, deadline: Deadline | None = None) -> None:
        """Commits the positions, if commits are automatic, so that the next owners begin after them.

        A failure is logged only: it must not stop the revocation. The next owners then read some records again.
        """
        consumed = self._subscription.consumed()
        if not self._is_automatic or not consumed or not self._can_commit():
            return
        try:
            await self.commit(consumed, deadline or self._cluster.deadline())
        except (KafkaError, ClientException) as error:
            _log.warning("group %s: the commit before a revocation failed: %s", self._config.group_id, error)


def _retrieve(task: asyncio.Task[None]) -> None:
    """Marks the task's exception as retrieved. The failure is logged already, and asyncio must not log it again."""
    if not task.cancelled():
        task.exception()
