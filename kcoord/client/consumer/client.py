# SPDX-License-Identifier: Apache-2.0
"""The class Consumer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable, Mapping
from types import TracebackType
from typing import Final, Self, Unpack
from uuid import uuid4

from kcoord.client.assignors.loading import load_assignors
from kcoord.client.cluster import Cluster, Deadline
from kcoord.client.config import ConsumerConfig, ConsumerOptions, make_config
from kcoord.client.consumer.assignment_messages import HIGHEST_CODE
from kcoord.client.consumer.assignor_offer import AssignorOffer
from kcoord.client.consumer.commits import CommitManager
from kcoord.client.consumer.fetcher import Fetcher
from kcoord.client.consumer.listener import ConsumerRebalanceListener
from kcoord.client.consumer.local_assignors import LocalAssignors
from kcoord.client.consumer.membership import Membership
from kcoord.client.consumer.metadata_updater import MetadataUpdater
from kcoord.client.consumer.offsets import GroupOffsetsClient
from kcoord.client.consumer.positions import Positions
from kcoord.client.consumer.rebalance import ConsumerRebalance
from kcoord.client.consumer.session import GroupSession
from kcoord.client.consumer.subscription import SubscriptionState
from kcoord.client.errors import IllegalStateException, TimeoutException
from kcoord.client.leaders import list_offsets
from kcoord.client.offset_messages import GroupOffsets, offsets_to_commit
from kcoord.client.repeat import repeat
from kcoord.client.reset_policy import EARLIEST, EARLIEST_TIMESTAMP, LATEST, LATEST_TIMESTAMP, ResetPolicy
from kcoord.client.results import Results
from kcoord.client.signal import Signal, wait_for
from kcoord.client.tasks import to_the_end
from kcoord.client.types import (
    HIGHEST_OFFSET,
    ConsumerGroupMetadata,
    ConsumerRecord,
    ListOffsetsResult,
    OffsetAndMetadata,
    OffsetAndTimestamp,
    TopicPartition,
)
from kcoord_protocol.errors import KafkaError

_log = logging.getLogger(__name__)

CLOSE_TIMEOUT_MS: Final = 30_000
_LONGEST_TURN_S: Final = 0.005


class Consumer:
    """Reads records as a member of a group (KIP-848), or from partitions that the application chooses.

    Use it with `async with`, or call `start` and `close`. Call `subscribe` or `assign`, then `poll`, or iterate with
    `async for`. Call all methods from one task.

    Rebalances happen within `poll`, `unsubscribe` and `close`, as in Java's consumer. A call of `poll` means that the
    application has processed the records of the previous call.
    """

    def __init__(self, config: ConsumerConfig | None = None, **options: Unpack[ConsumerOptions]) -> None:
        self._config = config = make_config(ConsumerConfig, config, options)
        self._cluster = Cluster(config)
        self._changed = Signal()
        self._subscription = SubscriptionState()
        self._updater = MetadataUpdater(
            self._cluster, self._changed, allow_auto_create_topics=config.allow_auto_create_topics
        )
        assignors = load_assignors(config.group_local_assignors)
        for assignor in assignors:
            assignor.configure(config.settings())
        offer = AssignorOffer() if assignors else None
        membership = self._make_membership(offer)
        offsets = None
        if membership is not None:
            offsets = GroupOffsetsClient(self._cluster, membership.group_id, membership)
        self._commits = CommitManager(self._cluster, config, self._subscription, membership, offsets)
        self._positions = Positions(
            self._cluster, config, self._subscription, membership, offsets, self._updater, self._changed
        )
        self._fetcher = Fetcher(
            self._cluster, config, self._subscription, self._positions, self._updater, self._changed
        )
        self._rebalance: ConsumerRebalance | None = None
        if membership is not None:
            local_assignors = None
            if offer is not None:
                local_assignors = LocalAssignors(self._cluster, membership, offer, assignors, self._changed)
            self._rebalance = self._make_rebalance(membership, local_assignors)
        self._is_open = False
        self._is_polling = False
        self._turn_ends = 0.0

    def _make_membership(self, offer: AssignorOffer | None) -> Membership | None:
        config = self._config
        if config.group_id is None:
            return None
        return Membership(
            config.group_id,
            str(uuid4()),
            instance_id=config.group_instance_id,
            rack_id=config.client_rack or None,
            server_assignor=config.group_remote_assignor,
            offer=offer,
            rebalance_timeout_ms=config.max_poll_interval_ms,
        )

    def _make_rebalance(self, membership: Membership, assignors: LocalAssignors | None) -> ConsumerRebalance:
        session = GroupSession(self._cluster, self._config, membership, assignors, self._updater, self._changed)
        return ConsumerRebalance(
            self._cluster,
            membership,
            session,
            assignors,
            self._subscription,
            self._commits,
            self._positions,
            self._updater,
            self._changed,
        )

    # Start and end.

    async def start(self) -> None:
        """Connects to the cluster and starts the background tasks. Raises TimeoutException if no broker responds."""
        if self._is_open:
            raise IllegalStateException("the consumer is started already")
        await self._cluster.start(self._cluster.deadline())
        self._cluster.keep_metadata_fresh()
        self._updater.start()
        self._positions.start()
        self._fetcher.start()
        self._commits.restart_interval()
        self._is_open = True

    async def close(self, *, timeout_ms: int = CLOSE_TIMEOUT_MS, leave_group: bool | None = None) -> None:
        """Commits if commits are automatic, revokes all partitions, leaves the group and closes the connections.

        By default a dynamic member leaves the group, and a static member keeps its assignment until its session
        expires. `leave_group` overrides this for both.
        """
        try:
            if self._is_open:
                await self._leave(self._cluster.deadline(timeout_ms), leave_group)
        finally:
            await to_the_end(self._stop())

    async def _stop(self) -> None:
        self._is_open = False
        self._changed.notify()
        await self._commits.stop()
        if self._rebalance is not None:
            await self._rebalance.session.stop()
            if self._rebalance.assignors is not None:
                await self._rebalance.assignors.stop()
        await self._fetcher.stop()
        await self._positions.stop()
        await self._updater.stop()
        await self._cluster.close()

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _check_open(self) -> None:
        if not self._is_open:
            raise IllegalStateException("the consumer is not started, or closed")

    # Subscription and assignment.

    def subscribe(
        self,
        topics: Collection[str] = (),
        *,
        pattern: str | None = None,
        listener: ConsumerRebalanceListener | None = None,
    ) -> None:
        """Subscribes to topics as a member of the group, and replaces an earlier subscription with its listener.

        A `pattern` is a regular expression (RE2) that the coordinator matches with whole topic names. The coordinator
        assigns partitions during the next calls of `poll`. Raises IllegalStateException without a `group_id`. With
        `group_local_assignors` raises UnsupportedVersionException if the broker does not support such assignors, and
        AssignorException if the metadata of one of them cannot be had.
        """
        self._check_open()
        if isinstance(topics, str):
            raise TypeError(f"topics: must be a collection of names, not the text {topics!r}")
        if bool(topics) == (pattern is not None):
            raise ValueError("subscribe takes either topics or a pattern")
        rebalance = self._rebalance
        if rebalance is None:
            raise IllegalStateException("a group_id is needed to subscribe")
        if rebalance.assignors is not None:
            rebalance.assignors.start()
        self._subscription.subscribe(topics)
        rebalance.listener = listener or ConsumerRebalanceListener()
        self._updater.request(names=topics, may_create=True)
        rebalance.membership.subscribe(topics, pattern)
        rebalance.session.start()
        rebalance.session.wake()

    def assign(self, partitions: Iterable[TopicPartition]) -> None:
        """Reads these partitions without group membership, even if other consumers read them, too.

        Replaces an earlier assignment. With a `group_id` the consumer can still commit offsets.
        """
        self._check_open()
        metadata = self._cluster.metadata
        chosen = [TopicPartition(*partition) for partition in partitions]
        self._subscription.assign_from_user({partition: metadata.topic_id(partition.topic) for partition in chosen})
        self._updater.request(names={partition.topic for partition in chosen}, may_create=True)
        self._positions.wake()

    async def unsubscribe(self, *, timeout_ms: int = CLOSE_TIMEOUT_MS) -> None:
        """Leaves the group, or drops the partitions that the application assigned."""
        self._check_open()
        try:
            await self._leave(self._cluster.deadline(timeout_ms), None)
        finally:
            self._subscription.unsubscribe()

    async def _leave(self, deadline: Deadline, leave_group: bool | None) -> None:
        await self._commits.finish(deadline)
        if self._rebalance is None or not self._subscription.uses_group:
            await self._commits.before_revocation(deadline)
        else:
            is_silent = leave_group is False and self._config.group_instance_id is None
            await self._rebalance.leave(deadline, static_stays=not leave_group, is_silent=is_silent)

    # Local assignors.

    def update_assignor_metadata(self) -> None:
        """Asks the assignors of `group_local_assignors` for their metadata, and sends it if it changed.

        A change makes the coordinator request a new assignment.
        """
        self._subscribed_assignors().update_metadata()

    def request_reassignment(self, reason: int = 1) -> None:
        """Requests a new assignment of the group. `reason` (1 to 127) is passed to the assignor that computes it."""
        if not 1 <= reason <= HIGHEST_CODE:
            raise ValueError(f"reason: {reason} must be 1 to {HIGHEST_CODE}")
        self._subscribed_assignors().request_reassignment(reason)

    def _subscribed_assignors(self) -> LocalAssignors:
        self._check_open()
        if self._rebalance is None or self._rebalance.assignors is None:
            raise IllegalStateException("group_local_assignors is needed")
        if not self._rebalance.membership.is_in_group:
            raise IllegalStateException("the consumer is not a member of its group")
        self._rebalance.session.wake()
        return self._rebalance.assignors

    def enforce_rebalance(self, reason: str | None = None) -> None:
        """Does nothing but log a warning, as in Java's consumer with the consumer protocol (KIP-848).

        With local assignors `request_reassignment` and `update_assignor_metadata` request a new assignment.
        """
        _log.warning("enforce_rebalance has no effect with the consumer protocol (KIP-848); its reason was %r", reason)

    @property
    def subscription(self) -> frozenset[str]:
        """The topics of the subscription. Empty if the subscription is a pattern."""
        return self._subscription.topics

    @property
    def assignment(self) -> frozenset[TopicPartition]:
        """The partitions that are assigned to this consumer."""
        return self._subscription.assignment

    @property
    def group_metadata(self) -> ConsumerGroupMetadata:
        """The group, member id and epoch of the consumer, for `Producer.send_offsets_to_transaction`.

        A member that was fenced, or that left after `max_poll_interval_ms`, has its last epoch, which the coordinator
        rejects.
        """
        return self._commits.client.metadata_for_transaction(as_member=self._subscription.uses_group)

    @property
    def group_creation_time_ms(self) -> int | None:
        """The creation time of the group in the last heartbeat response (KIP-1327), None if it had none."""
        time_ms = self._rebalance.membership.group_creation_time_ms if self._rebalance is not None else -1
        return time_ms if time_ms >= 0 else None

    # Records.

    async def poll(self, timeout_ms: float | None = None, *, max_records: int | None = None) -> list[ConsumerRecord]:
        """Returns at most `max_records` (default: `max_poll_records`) records. Waits for records, at most `timeout_ms`.

        Also carries out rebalances and, if commits are automatic, commits the records of earlier calls. Raises errors
        of the background tasks that the application has to resolve.
        """
        self._check_open()
        if self._is_polling:
            raise IllegalStateException("the consumer is being polled already")
        self._is_polling = True
        try:
            return await self._poll(timeout_ms, max_records or self._config.max_poll_records)
        finally:
            self._is_polling = False
            if self._rebalance is not None:
                self._rebalance.session.end_poll()

    async def _poll(self, timeout_ms: float | None, count: int) -> list[ConsumerRecord]:
        deadline = None if timeout_ms is None else self._cluster.deadline(timeout_ms)
        await self._yield_to_tasks()
        while True:
            ticket = self._changed.ticket()
            if self._rebalance is not None:
                self._rebalance.session.begin_poll()
                await self._rebalance.run()
            self._raise_failures()
            self._commits.commit_if_due()
            records = self._fetcher.take(count)
            if records:
                return records
            if deadline is not None and deadline.is_over:
                self._turn_ends = 0.0
                return []
            await wait_for(ticket, self._wait_ms(deadline))
            self._check_open()

    async def _yield_to_tasks(self) -> None:
        """Gives the other tasks a turn after a `poll` without records, and after `_LONGEST_TURN_S` otherwise.

        A `poll` that finds buffered records, or that has no time to wait, does not suspend. Without this, a loop of
        such calls would stop the heartbeats and the fetches.
        """
        loop = asyncio.get_running_loop()
        if loop.time() >= self._turn_ends:
            await asyncio.sleep(0)
            self._turn_ends = loop.time() + _LONGEST_TURN_S

    def _wait_ms(self, deadline: Deadline | None) -> float | None:
        waits_ms = [self._commits.wait_ms(), None if deadline is None else max(deadline.left_ms(), 0)]
        return min((wait_ms for wait_ms in waits_ms if wait_ms is not None), default=None)

    def _raise_failures(self) -> None:
        if self._rebalance is not None:
            membership = self._rebalance.membership
            error: Exception | None = membership.fatal_error or membership.take_reported()
            if error is None and self._rebalance.assignors is not None:
                error = self._rebalance.assignors.take_failure()
            if error is not None:
                raise error
        failure = self._updater.take_failure() or self._fetcher.take_failure() or self._positions.take_failure()
        if failure is not None:
            raise failure

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ConsumerRecord:
        """Returns the next record. The position moves by one record, so a commit covers only records returned."""
        while True:
            for record in await self.poll(max_records=1):
                return record

    # Offsets of the group.

    async def commit(
        self, offsets: Mapping[TopicPartition, OffsetAndMetadata | int] | None = None, *, timeout_ms: int | None = None
    ) -> None:
        """Commits offsets, and returns when the coordinator has stored them.

        Commits the given offsets (of the next record to read), or by default the positions after all records that
        `poll` has returned. Raises CommitFailedException if the member is no longer in the group; its partitions may
        have other owners.
        """
        self._check_open()
        await self._commits.commit(self._to_commit(offsets), self._cluster.deadline(timeout_ms))

    def commit_async(
        self, offsets: Mapping[TopicPartition, OffsetAndMetadata | int] | None = None
    ) -> asyncio.Task[None]:
        """Starts to commit the given offsets, or the positions at this moment. Commits keep the order of the calls.

        The application may await the task; `unsubscribe` and `close` wait for it. A failure is also logged.
        """
        self._check_open()
        return self._commits.begin(self._to_commit(offsets))

    def _to_commit(
        self, offsets: Mapping[TopicPartition, OffsetAndMetadata | int] | None
    ) -> dict[TopicPartition, OffsetAndMetadata]:
        return self._subscription.consumed() if offsets is None else offsets_to_commit(offsets)

    async def committed(self, partitions: Iterable[TopicPartition], *, timeout_ms: int | None = None) -> GroupOffsets:
        """Returns the group's committed offsets, None for a partition without one."""
        self._check_open()
        chosen = [TopicPartition(*partition) for partition in partitions]
        return await self._commits.client.fetch(chosen, self._cluster.deadline(timeout_ms))

    # Positions.

    async def position(self, partition: TopicPartition, *, timeout_ms: int | None = None) -> int:
        """Returns the offset of the next record that `poll` will return from a partition. Waits until it is known."""
        self._check_open()
        deadline = self._cluster.deadline(timeout_ms)
        while True:
            ticket = self._changed.ticket()
            state = self._subscription[partition]
            if state.has_position:
                return state.position
            failure = self._positions.take_failure()
            if failure is not None:
                raise failure
            if deadline.is_over:
                raise TimeoutException(f"no position of {partition} within {deadline.timeout_ms:g} ms")
            await wait_for(ticket, deadline.left_ms())

    def seek(self, partition: TopicPartition, offset: int | OffsetAndMetadata) -> None:
        """Sets the position of a partition: the next `poll` reads from this offset."""
        self._check_open()
        target = OffsetAndMetadata(offset) if isinstance(offset, int) else offset
        if not 0 <= target.offset <= HIGHEST_OFFSET:
            raise ValueError(f"offset: {target.offset} is not from 0 to {HIGHEST_OFFSET}")
        self._subscription[partition].jump(target.offset, target.leader_epoch)
        self._changed.notify()

    def seek_to_beginning(self, partitions: Iterable[TopicPartition] = ()) -> None:
        """Sets the position to the first record, of these partitions or by default of all assigned ones."""
        self._seek_to(partitions, EARLIEST)

    def seek_to_end(self, partitions: Iterable[TopicPartition] = ()) -> None:
        """Sets the position to the end of the log, of these partitions or by default of all assigned ones."""
        self._seek_to(partitions, LATEST)

    def _seek_to(self, partitions: Iterable[TopicPartition], policy: ResetPolicy) -> None:
        self._check_open()
        for partition in list(partitions) or self.assignment:
            self._subscription[partition].look_up(policy, self._cluster.wall_clock_ms())
        self._positions.wake()

    def pause(self, partitions: Iterable[TopicPartition]) -> None:
        """Makes `poll` return no records of these partitions until `resume`. They stay assigned."""
        self._set_paused(partitions, True)

    def resume(self, partitions: Iterable[TopicPartition]) -> None:
        """Makes `poll` return records of paused partitions again."""
        self._set_paused(partitions, False)

    def _set_paused(self, partitions: Iterable[TopicPartition], is_paused: bool) -> None:
        self._check_open()
        for partition in partitions:
            self._subscription[partition].is_paused = is_paused
        self._changed.notify()

    @property
    def paused(self) -> frozenset[TopicPartition]:
        """The assigned partitions that are paused."""
        return self._subscription.paused()

    # Offsets of partitions.

    async def offsets_for_times(
        self, timestamps: Mapping[TopicPartition, int], *, timeout_ms: int | None = None
    ) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        """Returns the first record at or after a time in each partition, None if there is no such record."""
        if any(timestamp < 0 for timestamp in timestamps.values()):
            raise ValueError(f"timestamps: {min(timestamps.values())} must not be negative")
        results = await self._list_offsets(timestamps, timeout_ms)
        return {
            partition: OffsetAndTimestamp(result.offset, result.timestamp_ms, result.leader_epoch)
            if result.offset >= 0
            else None
            for partition, result in results.items()
        }

    async def beginning_offsets(
        self, partitions: Iterable[TopicPartition], *, timeout_ms: int | None = None
    ) -> dict[TopicPartition, int]:
        """Returns the offset of the first record of each partition."""
        results = await self._list_offsets(dict.fromkeys(partitions, EARLIEST_TIMESTAMP), timeout_ms)
        return {partition: result.offset for partition, result in results.items()}

    async def end_offsets(
        self, partitions: Iterable[TopicPartition], *, timeout_ms: int | None = None
    ) -> dict[TopicPartition, int]:
        """Returns the end offset of each partition: the offset after its last record.

        With `read_committed`, the end is the last stable offset.
        """
        results = await self._list_offsets(dict.fromkeys(partitions, LATEST_TIMESTAMP), timeout_ms)
        return {partition: result.offset for partition, result in results.items()}

    async def _list_offsets(
        self, timestamps: Mapping[TopicPartition, int], timeout_ms: int | None
    ) -> dict[TopicPartition, ListOffsetsResult]:
        self._check_open()
        deadline = self._cluster.deadline(timeout_ms)
        read_committed = self._config.isolation_level == "read_committed"
        attempt = list_offsets(self._cluster, deadline, timestamps, read_committed=read_committed)
        return Results(await repeat(self._cluster, deadline, timestamps, attempt)).all()

    async def partitions_for(self, topic: str, *, timeout_ms: int | None = None) -> list[int]:
        """Returns the partitions of a topic. Raises UNKNOWN_TOPIC_OR_PARTITION if the topic does not exist."""
        self._check_open()
        deadline = self._cluster.deadline(timeout_ms)
        await self._cluster.retry(f"metadata of {topic}", deadline, lambda: self._cluster.refresh_metadata([topic]))
        error = self._cluster.metadata.topic_error(topic)
        if error:
            raise KafkaError(error, topic)
        return sorted(self._cluster.metadata.topics[topic].partitions)
