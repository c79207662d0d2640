# SPDX-License-Identifier: Apache-2.0
"""Finds out where to begin to read each assigned partition.

Theory of operation. Each partition goes through the phases of `Phase`:

- COMMITTED: fetch the group's committed offset. If there is one, it is the position.
- CLASSIFICATION: `classification` chooses a policy. If it needs metadata that is missing, the partition waits for it.
- LOOK_UP: ask the leader for the offset of the policy. That offset is the position.
- FETCH: the partition has a position. OFFSET_OUT_OF_RANGE leads back to CLASSIFICATION.

One task does this in the background, for all partitions of a phase together. A result counts only if the partition is
still assigned and has the same `generation`: a seek ends the search for a position. Partitions that are fenced off wait
until the listener has seen them.

Retriable errors are retried after a backoff. All other errors stop the task until `poll` or `position` has raised them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Final

from kcoord.client.cluster import Cluster
from kcoord.client.config import ConsumerConfig
from kcoord.client.consumer.classification import RefreshMetadata, UseCommitted, decide
from kcoord.client.consumer.membership import Membership
from kcoord.client.consumer.metadata_updater import MetadataUpdater
from kcoord.client.consumer.offsets import GroupOffsetsClient
from kcoord.client.consumer.subscription import PartitionState, Phase, SubscriptionState
from kcoord.client.creation_time import UNKNOWN_TIME_MS
from kcoord.client.errors import (
    ClientException,
    NoOffsetForPartitionException,
    OffsetOutOfRangeException,
    UnsupportedVersionException,
    is_retriable,
)
from kcoord.client.leaders import list_offsets
from kcoord.client.reset_policy import LATEST_TIMESTAMP, NONE, TO_START_TIME
from kcoord.client.signal import Signal
from kcoord.client.tasks import spawn, stop
from kcoord.client.types import ListOffsetsResult, OffsetAndMetadata, TopicIdPartition, TopicPartition
from kcoord_protocol.errors import KafkaError

_log = logging.getLogger(__name__)

_NOT_FOUND: Final = -1
_READ_COMMITTED: Final = "read_committed"

_States = dict[TopicPartition, tuple[PartitionState, object]]
"""States with their generations at that time."""


class Positions:
    """The task that finds the positions of one consumer's partitions."""

    def __init__(
        self,
        cluster: Cluster,
        config: ConsumerConfig,
        subscription: SubscriptionState,
        membership: Membership | None,
        offsets: GroupOffsetsClient | None,
        updater: MetadataUpdater,
        changed: Signal,
    ) -> None:
        self._cluster = cluster
        self._config = config
        self._subscription = subscription
        self._membership = membership
        self._offsets = offsets
        self._updater = updater
        self._changed = changed
        self._wake = Signal()
        self._failure: KafkaError | ClientException | None = None
        self._refused: _States = {}
        """The partitions that the failure names, if it says that they have no usable policy."""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = spawn(self._run(), "kcoord consumer positions")

    async def stop(self) -> None:
        await stop([self._task])

    def wake(self) -> None:
        """Makes the task look for partitions that need a position."""
        self._wake.notify()

    def take_failure(self) -> KafkaError | ClientException | None:
        """Returns the error that stopped the task, and starts the task again.

        Drops an error about partitions without a usable policy if the application has meanwhile sought or dropped one
        of them. The task raises it again for the others.
        """
        failure, self._failure = self._failure, None
        refused, self._refused = self._refused, {}
        if failure is not None:
            self.wake()
        return failure if self._still_current(refused) == refused else None

    async def _run(self) -> None:
        failures = 0
        while True:
            ticket, changed = self._wake.ticket(), self._changed.ticket()
            try:
                is_waiting = await self._resolve() if self._failure is None else False
                failures = 0
            except KafkaError as error:
                failures += 1
                if not is_retriable(error):
                    self._fail(error)
                await self._cluster.sleep_backoff(failures)
                continue
            except ClientException as error:
                self._fail(error)
                is_waiting = False
            await _either(ticket, changed if is_waiting else None)

    def _fail(self, error: KafkaError | ClientException) -> None:
        self._failure = error
        self._changed.notify()

    async def _resolve(self) -> bool:
        """Makes one pass through the phases. Returns whether a partition waits for metadata."""
        await self._fetch_committed()
        is_waiting, refused = self._classify()
        await self._look_up()
        self._refuse(refused)
        return is_waiting

    async def _fetch_committed(self) -> None:
        states = self._in_phase(Phase.COMMITTED)
        if not states:
            return
        committed_offsets: Mapping[TopicPartition, OffsetAndMetadata | None] = dict.fromkeys(states)
        if self._offsets is not None:
            committed_offsets = await self._offsets.fetch(states, self._cluster.deadline())
        for partition, (state, generation) in states.items():
            if self._is_current(partition, state, generation):
                committed = committed_offsets.get(partition)
                self._apply_committed(partition, state, committed)

    def _apply_committed(
        self, partition: TopicPartition, state: PartitionState, committed: OffsetAndMetadata | None
    ) -> None:
        if committed is None:
            state.phase = Phase.CLASSIFICATION
        else:
            state.decided = "committed offset"
            state.jump(committed.offset, committed.leader_epoch)
            self._changed.notify()

    def _classify(self) -> tuple[bool, _States]:
        """Chooses a policy for each partition (KIP-1327), and requests metadata that is missing.

        Returns whether a partition waits for metadata, and the partitions that have no usable policy.
        """
        is_waiting = False
        refused: _States = {}
        for partition, (state, generation) in self._in_phase(Phase.CLASSIFICATION).items():
            decision = decide(
                committed_offset=None,
                is_out_of_range=state.is_out_of_range,
                base_policy=self._config.reset_policy,
                new_partitions_policy=self._config.new_partitions_policy,
                group_creation_time_ms=self._group_creation_time_ms(),
                partition_creation_time_ms=self._creation_time_ms(partition, state),
                is_listed_as_new=self._is_listed_as_new(partition, state),
            )
            assert not isinstance(decision, UseCommitted)
            if isinstance(decision, RefreshMetadata):
                self._updater.request(topic_ids=[state.topic_id])
                is_waiting = True
                continue
            state.decided = f"{decision.policy}: {decision.reason.value}"
            _log.debug("%s begins at %s", partition, state.decided)
            group_creation_time_ms = self._group_creation_time_ms()
            if decision.policy is NONE or (
                decision.policy is TO_START_TIME and group_creation_time_ms == UNKNOWN_TIME_MS
            ):
                refused[partition] = state, generation
            else:
                state.look_up(decision.policy, self._cluster.wall_clock_ms(), group_creation_time_ms)
        return is_waiting, refused

    def _refuse(self, refused: _States) -> None:
        """Raises an error if partitions have no usable policy. Each `poll` raises it until the application seeks."""
        refused = self._refused = self._still_current(refused)
        if refused and self._config.reset_policy is TO_START_TIME:
            raise UnsupportedVersionException(
                "auto_offset_reset=to_start_time needs the time at which the group was created (KIP-1282): the group "
                f"must assign {', '.join(map(str, sorted(refused)))}, and its coordinator must know the time"
            )
        without = [partition for partition, (state, _) in refused.items() if not state.is_out_of_range]
        if without:
            raise NoOffsetForPartitionException(without)
        if refused:
            raise OffsetOutOfRangeException({partition: state.position for partition, (state, _) in refused.items()})

    def _group_creation_time_ms(self) -> int:
        """Returns the group's creation time in the last heartbeat, -1 for partitions that the application assigned."""
        if self._membership is None or not self._subscription.uses_group:
            return UNKNOWN_TIME_MS
        return self._membership.group_creation_time_ms

    def _is_listed_as_new(self, partition: TopicPartition, state: PartitionState) -> bool | None:
        """Returns whether the coordinator lists the partition as new, None if it does not list new partitions."""
        if self._membership is None or self._membership.new_partitions is None or not self._subscription.uses_group:
            return None
        return TopicIdPartition(state.topic_id, partition.partition) in self._membership.new_partitions

    def _creation_time_ms(self, partition: TopicPartition, state: PartitionState) -> int | None:
        return self._cluster.metadata.creation_time_ms(TopicIdPartition(state.topic_id, partition.partition))

    async def _look_up(self) -> None:
        states = self._in_phase(Phase.LOOK_UP)
        if not states:
            return
        timestamps = {partition: state.look_up_timestamp for partition, (state, _) in states.items()}
        attempt = list_offsets(
            self._cluster,
            self._cluster.deadline(),
            timestamps,
            read_committed=self._config.isolation_level == _READ_COMMITTED,
        )
        failure: KafkaError | None = None
        for partition, outcome in (await attempt(list(states))).items():
            state, generation = states[partition]
            if isinstance(outcome, KafkaError):
                failure = outcome
            elif self._is_current(partition, state, generation):
                self._apply_look_up(state, outcome)
        if failure is not None:
            raise failure
        if self._in_phase(Phase.LOOK_UP):
            self.wake()

    def _apply_look_up(self, state: PartitionState, result: ListOffsetsResult) -> None:
        """Sets the position to the offset that the leader returned.

        If no record is as new as the time of by_duration or to_start_time, the position is the end of the log
        (KIP-1106). Then the look-up is repeated for the end.
        """
        if result.offset == _NOT_FOUND and state.look_up_timestamp >= 0:
            state.look_up_timestamp = LATEST_TIMESTAMP
            return
        state.jump(max(result.offset, 0), result.leader_epoch)
        self._changed.notify()

    def _in_phase(self, phase: Phase) -> _States:
        return {
            partition: (state, state.generation)
            for partition, state in self._subscription.items()
            if state.phase is phase and not state.is_fenced_off
        }

    def _still_current(self, states: _States) -> _States:
        return {partition: state for partition, state in states.items() if self._is_current(partition, *state)}

    def _is_current(self, partition: TopicPartition, state: PartitionState, generation: object) -> bool:
        """Whether the partition is still assigned and its position was not set since the request."""
        return self._subscription.get(partition) is state and state.generation == generation


async def _either(first: asyncio.Event, second: asyncio.Event | None) -> None:
    """Waits until one of two events is set."""
    if second is None:
        await first.wait()
        return
    waits = [asyncio.create_task(first.wait()), asyncio.create_task(second.wait())]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
