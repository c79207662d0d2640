# SPDX-License-Identifier: Apache-2.0
"""This instance as a member of the instances' group: the requests, the clock and the timer around the decisions.

`kcoord.runtime.upstream_membership` decides everything. All code runs in the event loop. After each call of the member,
`_execute` takes its actions: requests become tasks, and outcomes go to `on_outcome`. One timer stands for the next
`tick`.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Callable
from typing import Final

from kcoord.client.cluster import Cluster
from kcoord.client.tasks import Tasks, spawn
from kcoord.config import BrokerConfig
from kcoord.runtime.shard_map import RECORD_VERSION, Instance, ShardMap
from kcoord.runtime.upstream_membership import (
    Assigned,
    Failed,
    Heartbeat,
    JoinGroup,
    LeaseOver,
    LeaveGroup,
    Outcome,
    Reclaim,
    Request,
    SyncGroup,
    UpstreamMembership,
)
from kcoord.upstream.group_requests import GroupRequests
from kcoord_protocol.errors import Errors, KafkaError

LEAVE_SECONDS: Final = 0.5
_NS_PER_MS: Final = 1_000_000

_logger = logging.getLogger(__name__)

if sys.platform == "linux":

    def lease_clock_ms() -> int:
        """Returns a monotonic time that also counts while the machine is suspended."""
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // _NS_PER_MS

else:

    def lease_clock_ms() -> int:
        """Returns a monotonic time."""
        return time.monotonic_ns() // _NS_PER_MS


def log_clock() -> Callable[[], int]:
    """Returns a clock that begins with the time of the wall clock and continues as `lease_clock_ms`.

    Copies of logs on the disk have its times, so the next process can compare them.
    """
    began_ms = Cluster.wall_clock_ms() - lease_clock_ms()
    return lambda: began_ms + lease_clock_ms()


class InstanceGroup:
    """The member of the group that is this process. `on_outcome` is set before `join`."""

    on_outcome: Callable[[Outcome], None]

    def __init__(self, config: BrokerConfig, requests: GroupRequests) -> None:
        self.id = config.kcoord_upstream_group_id
        self._requests = requests
        self._member = UpstreamMembership(
            config.node_id,
            config.offsets_topic_num_partitions,
            session_timeout_ms=config.kcoord_upstream_session_timeout_ms,
            heartbeat_interval_ms=config.kcoord_upstream_heartbeat_interval_ms,
            record_version=RECORD_VERSION,
        )
        self._tasks = Tasks()
        self._joining: asyncio.Task[None] | None = None
        """The JoinGroup or SyncGroup whose answer counts."""
        self._leaving: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._last_error: KafkaError | None = None

    # Queries.

    @property
    def shard_map(self) -> ShardMap | None:
        """The last map of this instance, also if its lease is over."""
        return self._member.shard_map

    def holds_lease(self) -> bool:
        """Returns whether this instance may claim and append now. If its lease is over, its shards close soon."""
        holds = self._member.holds_lease(lease_clock_ms())
        if not holds and self._timer is not None:
            self._timer.cancel()
            self._timer = asyncio.get_running_loop().call_later(0, self._tick)
        return holds

    def check(self) -> None:
        """Closes the shards if the lease is over. Called before each request of a client: no timer is as early."""
        if not self._member.holds_lease(lease_clock_ms()):
            self._tick()

    def _tick(self) -> None:
        self._member.tick(lease_clock_ms())
        self._execute()

    def lease_left_ms(self) -> int:
        """Returns the time until the lease ends, 0 if there is none."""
        return self._member.lease_left_ms(lease_clock_ms())

    # Membership.

    def join(self, instance: Instance) -> None:
        """Joins, or announces other addresses of this instance."""
        self._member.join(instance, lease_clock_ms())
        self._execute()

    def hurry(self) -> None:
        """Sends a heartbeat now."""
        self._member.hurry(lease_clock_ms())
        self._execute()

    def fenced(self, shard_id: int) -> None:
        """Another instance has claimed the log of a shard."""
        self._member.fenced(shard_id, lease_clock_ms())
        self._execute()

    async def leave(self) -> None:
        """Leaves the group. The shards of this instance are closed."""
        self._member.leave()
        self._execute()
        if self._leaving is not None:
            await asyncio.wait([self._leaving], timeout=LEAVE_SECONDS)

    async def close(self) -> None:
        """Ends all requests and closes the connections."""
        if self._timer is not None:
            self._timer.cancel()
        await self._tasks.stop()
        await self._requests.close()

    def _execute(self) -> None:
        actions, self._member.actions = self._member.actions, []
        for action in actions:
            match action:
                case JoinGroup() | SyncGroup():
                    if self._joining is not None and self._joining is not asyncio.current_task():
                        self._joining.cancel()
                    self._joining = self._start(action)
                case Heartbeat():
                    self._start(action)
                case LeaveGroup():
                    self._leaving = self._start(action)
                case Assigned() | Reclaim() | LeaseOver() | Failed():
                    self.on_outcome(action)
        self._arm()

    def _start(self, request: Request) -> asyncio.Task[None]:
        task = spawn(self._ask(request), f"kcoord instance, {type(request).__name__}")
        self._tasks.add(task)
        return task

    def _arm(self) -> None:
        """Sets the timer for the next tick."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        next_ms = self._member.next_ms
        if next_ms != float("inf"):
            delay_ms = max(next_ms - lease_clock_ms(), 0)
            self._timer = asyncio.get_running_loop().call_later(delay_ms / 1000, self._tick)

    async def _ask(self, request: Request) -> None:
        """Sends a request and passes the answer to the member."""
        member = self._member
        try:
            match request:
                case JoinGroup():
                    member_id, generation, members = await self._requests.join(request)
                    member.joined(request, member_id, generation, members, lease_clock_ms())
                case SyncGroup():
                    assignment = await self._requests.sync(request)
                    member.synced(request, assignment, lease_clock_ms())
                case Heartbeat():
                    rebalances = await self._requests.beat(request)
                    member.beaten(request, lease_clock_ms(), rebalances=rebalances)
                case LeaveGroup():
                    await self._requests.leave(request)
            self._last_error = None
        except KafkaError as error:
            self._log(request, error)
            member.refused(request, error, lease_clock_ms())
        except Exception as error:
            # The member waits for an answer, whatever happens.
            _logger.exception("%s in the group %s of the upstream failed", type(request).__name__, self.id)
            member.refused(request, KafkaError(Errors.UNKNOWN_SERVER_ERROR, str(error)), lease_clock_ms())
        self._execute()

    def _log(self, request: Request, error: KafkaError) -> None:
        """Logs an error, unless it is that of the last request, or belongs to a rebalance."""
        is_expected = error.error in (Errors.ILLEGAL_GENERATION, Errors.REBALANCE_IN_PROGRESS)
        if not is_expected and (self._last_error is None or self._last_error.error is not error.error):
            _logger.warning("%s in the group %s of the upstream failed: %s", type(request).__name__, self.id, error)
        self._last_error = error
