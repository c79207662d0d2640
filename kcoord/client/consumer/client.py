# SPDX-License-Identifier: Apache-2.0
"""Consumer: reads records as a member of a group (KIP-848), or from partitions that the application chose.

Rebalances happen within `poll`, as with Java's consumer: to call it says that the records handed out before are done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping
from types import TracebackType
from typing import Final, Self, Unpack
from uuid import uuid4

from kcoord.client.cluster import Cluster, Deadline
from kcoord.client.config import ConsumerConfig, ConsumerOptions, make_config
from kcoord.client.consumer.commits import CommitManager
from kcoord.client.consumer.fetcher import Fetcher
from kcoord.client.consumer.listener import ConsumerRebalanceListener
from kcoord.client.consumer.membership import Membership
from kcoord.client.consumer.metadata_updater import MetadataUpdater
from kcoord.client.consumer.offsets import GroupOffsetsClient
from kcoord.client.consumer.positions import Positions
from kcoord.client.consumer.rebalance import ConsumerRebalance
from kcoord.client.consumer.session import GroupSession
from kcoord.client.consumer.subscription import SubscriptionState
from kcoord.client.errors import IllegalStateException, TimeoutException
from kcoord.client.leaders import list_offsets
from kcoord.client.offset_messages import GroupOffsets
from kcoord.client.repeat import repeat
from kcoord.client.reset_policy import EARLIEST, EARLIEST_TIMESTAMP, LATEST, LATEST_TIMESTAMP, ResetPolicy
from kcoord.client.results import Results
from kcoord.client.signal import Signal, wait_for
from kcoord.client.types import (
    ConsumerGroupMetadata,
    ConsumerRecord,
    ListOffsetsResult,
    OffsetAndMetadata,
    OffsetAndTimestamp,
    TopicPartition,
)
from kcoord_protocol.errors import Errors, KafkaError

CLOSE_TIMEOUT_MS: Final = 30_000


class Consumer:
    """Reads records.

    Use it with `async with`, or call `start` and `close`. Then `subscribe` or `assign`, and `poll`, or iterate with
    `async for`. All of it in one task: only the background work runs beside it.
    """

    def __init__(self, config: ConsumerConfig | None = None, **options: Unpack[ConsumerOptions]) -> None:
        self._config = config = make_config(ConsumerConfig, config, options)
        self._cluster = Cluster(config)
        self._changed = Signal()
        self._subscription = SubscriptionState()
        self._updater = MetadataUpdater(
            self._cluster, self._changed, allow_auto_create_topics=config.allow_auto_create_topics
        )
        membership = self._make_membership()
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
            self._rebalance = self._make_rebalance(membership)
        self._is_open = False
        self._is_polling = False

    def _make_membership(self) -> Membership | None:
        config = self._config
        if config.group_id is None:
            return None
        return Membership(
            config.group_id,
            str(uuid4()),
            instance_id=config.group_instance_id,
            rack_id=config.client_rack or None,
            server_assignor=config.group_remote_assignor,
            rebalance_timeout_ms=config.max_poll_interval_ms,
        )

    def _make_rebalance(self, membership: Membership) -> ConsumerRebalance:
        session = GroupSession(self._cluster, self._config, membership, self._updater, self._changed)
        return ConsumerRebalance(
            self._cluster,
            membership,
            session,
            self._subscription,
            self._commits,
            self._positions,
            self._updater,
            self._changed,
        )

    # Life.

    async def start(self) -> None:
        """Finds the cluster."""
        await self._cluster.start(self._cluster.deadline())
        self._cluster.keep_metadata_fresh()
        self._updater.start()
        self._positions.start()
        self._fetcher.start()
        self._commits.restart_interval()
        self._is_open = True

    async def close(self, *, timeout_ms: int = CLOSE_TIMEOUT_MS, leave_group: bool | None = None) -> None:
        """Commits if that is automatic, gives the partitions back and leaves the group.

        A static member keeps its place until its session ends, unless `leave_group` is true; false lets a dynamic one
        stay until then, too.
        """
        if self._is_open:
            deadline = self._cluster.deadline(timeout_ms)
            try:
                await self._leave(deadline, leave_group)
            finally:
                self._is_open = False
                self._changed.notify()
                await self._stop()
        await self._cluster.close()

    async def _stop(self) -> None:
        await self._commits.stop()
        if self._rebalance is not None:
            await self._rebalance.session.stop()
        await self._fetcher.stop()
        await self._positions.stop()
        await self._updater.stop()

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

    # What to read.

    def subscribe(
        self,
        topics: Collection[str] = (),
        *,
        pattern: str | None = None,
        listener: ConsumerRebalanceListener | None = None,
    ) -> None:
        """Reads topics as a member of the group, by name or by a pattern (RE2, of whole names) that the coordinator
        applies. Replaces an earlier subscription; partitions come with the next calls of `poll`.
        """
        self._check_open()
        if isinstance(topics, str):
            raise TypeError("topics is a collection of names, not one name")
        if bool(topics) == (pattern is not None):
            raise ValueError("subscribe takes either topics or a pattern")
        rebalance = self._rebalance
        if rebalance is None:
            raise IllegalStateException("a group_id is needed to subscribe")
        self._subscription.subscribe(topics)
        if listener is not None:
            rebalance.listener = listener
        self._updater.request(names=topics, may_create=True)
        rebalance.membership.subscribe(topics, pattern)
        rebalance.session.start()
        rebalance.session.wake()

    def assign(self, partitions: Iterable[TopicPartition]) -> None:
        """Reads these partitions, whoever else does; offsets can be committed if there is a group id."""
        self._check_open()
        metadata = self._cluster.metadata
        wanted = [TopicPartition(*each) for each in partitions]
        self._subscription.assign_from_user({each: metadata.topic_id(each.topic) for each in wanted})
        self._updater.request(names={each.topic for each in wanted}, may_create=True)
        self._positions.wake()

    async def unsubscribe(self, *, timeout_ms: int = CLOSE_TIMEOUT_MS) -> None:
        """Leaves the group, or gives up what was assigned."""
        self._check_open()
        await self._leave(self._cluster.deadline(timeout_ms), None)
        self._subscription.unsubscribe()

    async def _leave(self, deadline: Deadline, leave_group: bool | None) -> None:
        is_dynamic = self._config.group_instance_id is None
        if self._rebalance is None or not self._subscription.uses_group or (leave_group is False and is_dynamic):
            await self._commits.before_revocation(deadline)
        else:
            await self._rebalance.leave(deadline, static_stays=not leave_group)

    @property
    def subscription(self) -> frozenset[str]:
        """The names subscribed to; empty with a pattern."""
        return self._subscription.topics

    @property
    def assignment(self) -> frozenset[TopicPartition]:
        return self._subscription.assignment

    @property
    def group_metadata(self) -> ConsumerGroupMetadata:
        """Who the consumer is in its group, for `Producer.send_offsets_to_transaction`."""
        return self._commits.client.group_metadata()

    @property
    def group_creation_time_ms(self) -> int | None:
        """When the group was made, by the last heartbeat (KIP-1327); None if the coordinator does not know."""
        time_ms = self._rebalance.membership.group_creation_time_ms if self._rebalance is not None else -1
        return time_ms if time_ms >= 0 else None

    # Records.

    async def poll(self, timeout_ms: float | None = None, *, max_records: int | None = None) -> list[ConsumerRecord]:
        """Records, at most `max_poll_records`; waits for some, at most `timeout_ms`.

        Also takes part in rebalances and commits, if that is automatic, what earlier calls returned.
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
        while True:
            ticket = self._changed.ticket()
            if self._rebalance is not None:
                self._rebalance.session.begin_poll()
                await self._rebalance.run()
            self._raise_failures()
            self._commits.commit_if_due()
            records = self._fetcher.take(count)
            if records or (deadline is not None and deadline.is_over):
                return records
            await wait_for(ticket, self._wait_ms(deadline))
            self._check_open()

    def _wait_ms(self, deadline: Deadline | None) -> float | None:
        waits = [self._commits.wait_ms(), None if deadline is None else max(deadline.left_ms(), 0)]
        return min((each for each in waits if each is not None), default=None)

    def _raise_failures(self) -> None:
        if self._rebalance is not None:
            membership = self._rebalance.membership
            error = membership.fatal_error or membership.take_reported()
            if error is not None:
                raise error
        failure = self._fetcher.take_failure() or self._positions.take_failure()
        if failure is not None:
            raise failure

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ConsumerRecord:
        """One record at a time: the position moves with each."""
        while True:
            for record in await self.poll(max_records=1):
                return record

    # Offsets of the group.

    async def commit(
        self, offsets: Mapping[TopicPartition, OffsetAndMetadata | int] | None = None, *, timeout_ms: int | None = None
    ) -> None:
        """Commits, and returns when the coordinator has stored it: what was returned by `poll` so far, or these offsets
        (of the next record to read). CommitFailedException says that the partitions may have other owners now.
        """
        self._check_open()
        await self._commits.commit(self._to_commit(offsets), self._cluster.deadline(timeout_ms))

    def commit_async(
        self, offsets: Mapping[TopicPartition, OffsetAndMetadata | int] | None = None
    ) -> asyncio.Task[None]:
        """Begins a commit of what is consumed at this moment; commits keep the order of the calls. The task can be
        awaited; a failure is also logged.
        """
        self._check_open()
        return self._commits.begin(self._to_commit(offsets))

    def _to_commit(
        self, offsets: Mapping[TopicPartition, OffsetAndMetadata | int] | None
    ) -> dict[TopicPartition, OffsetAndMetadata]:
        if offsets is None:
            return self._subscription.consumed()
        return {
            TopicPartition(*partition): OffsetAndMetadata(offset) if isinstance(offset, int) else offset
            for partition, offset in offsets.items()
        }

    async def committed(self, partitions: Iterable[TopicPartition], *, timeout_ms: int | None = None) -> GroupOffsets:
        """The group's committed offsets, None for a partition without one."""
        self._check_open()
        wanted = [TopicPartition(*each) for each in partitions]
        return await self._commits.client.fetch(wanted, self._cluster.deadline(timeout_ms))

    # Positions.

    async def position(self, partition: TopicPartition, *, timeout_ms: int | None = None) -> int:
        """The offset of the next record that `poll` returns of an assigned partition; waits until it is known."""
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
        """Reads on at this offset."""
        self._check_open()
        target = OffsetAndMetadata(offset) if isinstance(offset, int) else offset
        if target.offset < 0:
            raise ValueError("an offset is not negative")
        self._subscription[partition].jump(target.offset, target.leader_epoch)
        self._changed.notify()

    def seek_to_beginning(self, partitions: Iterable[TopicPartition] = ()) -> None:
        """Reads on at the first record there is; of all assigned partitions, if none are given."""
        self._seek_to(partitions, EARLIEST)

    def seek_to_end(self, partitions: Iterable[TopicPartition] = ()) -> None:
        """Reads on behind the last record there is; of all assigned partitions, if none are given."""
        self._seek_to(partitions, LATEST)

    def _seek_to(self, partitions: Iterable[TopicPartition], policy: ResetPolicy) -> None:
        self._check_open()
        for partition in list(partitions) or self.assignment:
            self._subscription[partition].look_up(policy, self._cluster.wall_clock_ms())
        self._positions.wake()

    def pause(self, partitions: Iterable[TopicPartition]) -> None:
        """Returns nothing of these partitions until they are resumed; they stay assigned."""
        self._set_paused(partitions, True)

    def resume(self, partitions: Iterable[TopicPartition]) -> None:
        self._set_paused(partitions, False)

    def _set_paused(self, partitions: Iterable[TopicPartition], is_paused: bool) -> None:
        self._check_open()
        for partition in partitions:
            self._subscription[partition].is_paused = is_paused
        self._changed.notify()

    @property
    def paused(self) -> frozenset[TopicPartition]:
        return self._subscription.paused()

    # Offsets of partitions.

    async def offsets_for_times(
        self, timestamps: Mapping[TopicPartition, int], *, timeout_ms: int | None = None
    ) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        """The first record at or after a time, None where no record is that new."""
        if any(timestamp < 0 for timestamp in timestamps.values()):
            raise ValueError("a timestamp is not negative")
        found = await self._list_offsets(timestamps, timeout_ms)
        return {
            partition: OffsetAndTimestamp(each.offset, each.timestamp_ms, each.leader_epoch)
            if each.offset >= 0
            else None
            for partition, each in found.items()
        }

    async def beginning_offsets(
        self, partitions: Iterable[TopicPartition], *, timeout_ms: int | None = None
    ) -> dict[TopicPartition, int]:
        """The offsets of the first records."""
        found = await self._list_offsets(dict.fromkeys(partitions, EARLIEST_TIMESTAMP), timeout_ms)
        return {partition: each.offset for partition, each in found.items()}

    async def end_offsets(
        self, partitions: Iterable[TopicPartition], *, timeout_ms: int | None = None
    ) -> dict[TopicPartition, int]:
        """The offsets behind the last records; with `read_committed`, behind the last ones that can be read."""
        found = await self._list_offsets(dict.fromkeys(partitions, LATEST_TIMESTAMP), timeout_ms)
        return {partition: each.offset for partition, each in found.items()}

    async def _list_offsets(
        self, timestamps: Mapping[TopicPartition, int], timeout_ms: int | None
    ) -> dict[TopicPartition, ListOffsetsResult]:
        self._check_open()
        deadline = self._cluster.deadline(timeout_ms)
        read_committed = self._config.isolation_level == "read_committed"
        attempt = list_offsets(self._cluster, deadline, timestamps, read_committed=read_committed)
        return Results(await repeat(self._cluster, deadline, timestamps, attempt)).all()

    async def partitions_for(self, topic: str, *, timeout_ms: int | None = None) -> list[int]:
        """The partitions of a topic; UNKNOWN_TOPIC_OR_PARTITION if there is no such topic."""
        self._check_open()
        deadline = self._cluster.deadline(timeout_ms)
        await self._cluster.retry(f"metadata of {topic}", deadline, lambda: self._cluster.refresh_metadata([topic]))
        metadata = self._cluster.metadata.topics.get(topic)
        if metadata is None or metadata.error:
            raise KafkaError(metadata.error if metadata is not None else Errors.UNKNOWN_TOPIC_OR_PARTITION, topic)
        return sorted(metadata.partitions)
