# SPDX-License-Identifier: Apache-2.0
"""Follows partitions: fetches what is appended to them, with one long poll for each leader.

Theory of operation. `positions` returns the partitions to follow now, with the offsets from which to fetch. `wake`
starts a task for each leader of such a partition that has none. The task polls all its partitions at once, passes
offsets and batches to `deliver`, and ends when the leader has no partition any more. A partition may have another
reader when the response arrives, which must ignore batches behind its position. If a leader is not known, the next
lookup starts the task.

An owner knows the batches that it appended itself. If nothing else is to be expected (`is_in_a_hurry`), a pause follows
each poll. The positions move on meanwhile, so a busy owner does not fetch all its own batches.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Final

from kcoord.client.cluster import Purpose
from kcoord.upstream.requests import Fetched, PartitionRequests
from kcoord_protocol.errors import KafkaError

WAIT_MS: Final = 500
"""The longest time that a leader waits for batches before it answers."""
PAUSE_SECONDS: Final = 0.1
_RETRY_SECONDS: Final = 0.1

_logger = logging.getLogger(__name__)


class Following:
    """Follows partitions; the module describes it."""

    def __init__(
        self,
        requests: PartitionRequests,
        positions: Callable[[], Mapping[int, int]],
        deliver: Callable[[int, int, Fetched | KafkaError], None],
        is_in_a_hurry: Callable[[int], bool],
    ) -> None:
        self._requests = requests
        self._positions = positions
        self._deliver = deliver
        self._is_in_a_hurry = is_in_a_hurry
        self._polls: dict[int, asyncio.Event] = {}
        """The leaders that are polled. The event ends a pause."""
        self._is_looking_up = False
        self._turns = 0

    def wake(self) -> None:
        """Follows partitions that are to be followed from now on."""
        for partition in self._positions():
            leader = self._requests.leader_now(partition)
            if leader is None:
                self._look_up()
            elif leader not in self._polls:
                self._polls[leader] = asyncio.Event()
                self._requests.start(self._poll(leader), f"following broker {leader}")

    def hurry(self, partition: int) -> None:
        """Ends the pause of a partition's leader."""
        leader = self._requests.leader_now(partition)
        if leader is None or leader not in self._polls:
            self.wake()
        else:
            self._polls[leader].set()

    def _look_up(self) -> None:
        if not self._is_looking_up:
            self._is_looking_up = True
            self._requests.start(self._find_leaders(), "leaders to follow")

    async def _find_leaders(self) -> None:
        try:
            await self._requests.look_up_leaders()
        except KafkaError as error:
            _logger.debug("The leaders of the log are not known: %s", error)
        if any(self._requests.leader_now(partition) is None for partition in self._positions()):
            await asyncio.sleep(_RETRY_SECONDS)
        self._is_looking_up = False
        self.wake()

    async def _poll(self, leader: int) -> None:
        """Polls one leader until it leads no partition to follow."""
        hurried = self._polls[leader]
        try:
            while offsets := self._led_by(leader):
                hurried.clear()
                try:
                    answers = await self._requests.fetch_all(leader, offsets, WAIT_MS, Purpose.FOLLOWING)
                except KafkaError as error:
                    _logger.debug("Broker %d of the upstream does not answer a fetch: %s", leader, error)
                    answers = dict.fromkeys(offsets, error)
                has_failed = False
                for partition, answer in answers.items():
                    has_failed |= isinstance(answer, KafkaError)
                    self._deliver(partition, offsets[partition], answer)
                    # Other work comes between two partitions with many batches.
                    await asyncio.sleep(0)
                await self._pause(hurried, offsets, has_failed=has_failed)
        finally:
            del self._polls[leader]
        self.wake()

    def _led_by(self, leader: int) -> dict[int, int]:
        """Returns the partitions of a leader. Each is the first of some request, and gets a batch of any size then."""
        led = [item for item in self._positions().items() if self._requests.leader_now(item[0]) == leader]
        self._turns += 1
        first = self._turns % max(len(led), 1)
        return dict(led[first:] + led[:first])

    async def _pause(self, hurried: asyncio.Event, offsets: Mapping[int, int], *, has_failed: bool) -> None:
        if has_failed:
            await asyncio.sleep(_RETRY_SECONDS)
        elif not any(map(self._is_in_a_hurry, offsets)):
            try:
                async with asyncio.timeout(PAUSE_SECONDS):
                    await hurried.wait()
            except TimeoutError:
                return
