# SPDX-License-Identifier: Apache-2.0
"""A shard under test: runs operations, replays their records, keeps timers on a virtual clock and tasks in a list.

After every operation it rebuilds a second shard from the whole log, restores a third one from a snapshot, and compares
them. Each test is therefore also a test of recovery and of snapshots.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar, cast

from kcoord.config import BrokerConfig
from kcoord.coordinator.group.consumer.assignment import ComputedTarget, ComputeTarget, compute, encode
from kcoord.coordinator.group.consumer.client_assignors import ClientAssignor
from kcoord.coordinator.group.consumer.client_computation import InstallAssignment, PrepareAssignment
from kcoord.coordinator.group.regex import ResolveRegex, resolve
from kcoord.coordinator.group.shard import GroupCoordinatorShard
from kcoord.metadata.image import MetadataImage
from kcoord.runtime.result import (
    NO_CREATION_LIMIT,
    PENDING,
    Cancel,
    CoordinatorRecord,
    CoordinatorResult,
    EncodedRecords,
    OperationContext,
    Schedule,
    Task,
    TimerKey,
)
from kcoord.runtime.serde import CoordinatorSerde, PackedBatch
from kcoord.runtime.shard_set import ShardSet
from kcoord.runtime.snapshot import make_chunks
from kcoord_protocol.messages import (
    ConsumerGroupDescribeResponse,
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
    OffsetCommitRequest,
    OffsetCommitResponse,
    OffsetFetchRequest,
    OffsetFetchResponse,
)
from kcoord_protocol.record_batch import decode_records, encode_records
from tests.unit.group.images import image_of

T = TypeVar("T")
Assigned = dict[str, list[int]]

SERDE = CoordinatorSerde()
DEFAULTS = {"group.consumer.assignment.interval.ms": "0"}


@dataclass(slots=True)
class Waiting:
    """A request that waits at a barrier."""

    context: GroupContext
    token: int

    @property
    def answer(self) -> object:
        """The response, or None while the request waits."""
        return self.context.answers.get(self.token)


class GroupContext:
    def __init__(
        self,
        topics: dict[str, int] | None = None,
        configs: dict[str, str] | None = None,
        *,
        config: BrokerConfig | None = None,
    ) -> None:
        self.config = config or BrokerConfig.from_properties(DEFAULTS | (configs or {}))
        self.topics = dict(topics or {})
        self.group_configs: dict[str, dict[str, str]] = {}
        self.image: MetadataImage = image_of(self.topics, epoch=1)
        self.shard = GroupCoordinatorShard(self.config, self.image)
        self.log: list[CoordinatorRecord] = []
        self.timers: dict[TimerKey, int] = {}
        self.tasks: list[Task] = []
        self.now_ms = 1_000_000
        self.creation_limit_ms = NO_CREATION_LIMIT
        self.records: list[CoordinatorRecord] = []
        self.answers: dict[int, object] = {}
        """Token -> the response to a request that had to wait."""
        self._tokens = itertools.count(1)

    def run(
        self, operation: Callable[[OperationContext], CoordinatorResult[T]], api_version: int = 1, client: str = "c"
    ) -> T:
        context = OperationContext(
            self.now_ms,
            api_version,
            client_id=client,
            client_host="/127.0.0.1",
            candidate_id=uuid.uuid4().hex[:22],
            creation_limit_ms=self.creation_limit_ms,
        )
        return self.run_in(context, operation)

    def run_in(self, context: OperationContext, operation: Callable[[OperationContext], CoordinatorResult[T]]) -> T:
        token = context.token = next(self._tokens)
        result = operation(context)
        self.records = result.records
        if result.encoded is not None:
            self.records = self._replay_encoded(result.encoded, result.records)
        else:
            for record in result.records:
                self.shard.replay(record)
        self.log += self.records
        for timer in result.timers:
            if isinstance(timer, Schedule):
                self.timers[timer.key] = timer.deadline_ms
            elif isinstance(timer, Cancel):
                self.timers.pop(timer.key, None)
            else:
                for member_id, deadline_ms in timer.deadlines_ms.items():
                    self.timers[TimerKey(timer.kind, timer.group_id, member_id)] = deadline_ms
        for completion in itertools.chain(result.completions, *result.bulk_completions):
            assert isinstance(completion.token, int)
            self.answers[completion.token] = completion.response
        running = {task.key for task in self.tasks}
        self.tasks += [task for task in result.tasks if task.key not in running]
        assert self.rebuilt().hard_state() == self.shard.hard_state()
        restored = self.restored()
        assert restored is None or restored.hard_state() == self.shard.hard_state()
        if result.response is PENDING:
            return cast(T, Waiting(self, token))
        return result.response

    def _replay_encoded(self, encoded: EncodedRecords, behind: list[CoordinatorRecord]) -> list[CoordinatorRecord]:
        """Replays encoded records as the runtime does; returns the records that a reader of the log sees."""
        packed = PackedBatch(5, self.now_ms)
        packed.add(encoded.body, encoded.count)
        packed.add(encode_records([SERDE.serialize(record) for record in behind], packed.count), len(behind))
        batch = packed.encode()
        encoded.replay()
        for record in behind:
            self.shard.replay(record)
        records = [SERDE.deserialize(record.key, record.value) for record in decode_records(batch)]
        return [record for record in records if record is not None]

    def rebuilt(self) -> GroupCoordinatorShard:
        shard = GroupCoordinatorShard(self.config, self.image)
        for record in self.log:
            shard.replay(record)
        return shard

    def restored(self) -> GroupCoordinatorShard | None:
        """Returns a shard restored from a snapshot; None if there can be no snapshot now."""
        parts = self.shard.snapshot()
        if parts is None:
            return None
        runtime = ShardSet(lambda _: GroupCoordinatorShard(self.config, self.image), SERDE)
        chunks = [chunk for slice_ in make_chunks(parts, SERDE) for chunk in slice_]
        runtime.load(0, (), self.now_ms, 0, chunks)
        return runtime.machine(0)

    def restart(self) -> None:
        """Crashes and starts again: only the log remains."""
        self.shard = self.rebuilt()
        self.timers, self.tasks = {}, []
        self.run(self.shard.on_loaded)

    def sleep(self, milliseconds: int) -> list[TimerKey]:
        """Advances the clock; returns the timers that fired, in order."""
        end_ms = self.now_ms + milliseconds
        fired = []
        while self.timers:
            key, deadline_ms = min(self.timers.items(), key=lambda item: (item[1], item[0]))
            if deadline_ms > end_ms:
                break
            del self.timers[key]
            self.now_ms = max(self.now_ms, deadline_ms)
            fired.append(key)
            self.run(partial(self._fire, key=key))
        self.now_ms = end_ms
        return fired

    def _fire(self, context: OperationContext, key: TimerKey) -> CoordinatorResult[None]:
        return self.shard.fire_timer(context, key)

    def update_metadata(self, topics: dict[str, int]) -> None:
        self.topics = dict(topics)
        self.image = image_of(
            self.topics, epoch=self.image.epoch + 1, group_configs=self.group_configs, previous=self.image
        )
        image = self.image
        self.run(lambda context: self.shard.on_metadata_update(context, image))

    def run_tasks(self) -> None:
        """Runs the background tasks with the present image, as the shell does."""
        tasks, self.tasks = self.tasks, []
        for task in tasks:
            value: object = None
            if isinstance(task.work, ComputeTarget):
                target = self.shard.target_input(task.work)
                value = compute(target) if target is not None else None
            elif isinstance(task.work, PrepareAssignment | InstallAssignment):
                value = task.work.run()
                if isinstance(value, ComputedTarget):
                    encode(value, SERDE.serialize)
            else:
                assert isinstance(task.work, ResolveRegex)
                value = resolve(task.work, list(self.image.topics))
            self.run(partial(self.shard.complete_task, task=task, value=value))

    def heartbeat(
        self,
        group: str,
        member: str,
        epoch: int,
        *,
        names: Iterable[str] | None = None,
        regex: str | None = None,
        owned: Assigned | None = None,
        instance: str | None = None,
        rack: str | None = None,
        assignor: str | None = None,
        client_assignors: Sequence[ClientAssignor] | None = None,
        rebalance_timeout_ms: int = -1,
        api_version: int = 1,
    ) -> ConsumerGroupHeartbeatResponse:
        request = ConsumerGroupHeartbeatRequest(
            group_id=group,
            member_id=member,
            member_epoch=epoch,
            instance_id=instance,
            rack_id=rack,
            rebalance_timeout_ms=rebalance_timeout_ms,
            subscribed_topic_names=None if names is None else list(names),
            subscribed_topic_regex=regex,
            server_assignor=assignor,
            client_assignors=None
            if client_assignors is None
            else [
                ConsumerGroupHeartbeatRequest.ClientAssignor(
                    name=offered.name,
                    minimum_version=offered.minimum_version,
                    maximum_version=offered.maximum_version,
                    reason=offered.reason,
                    metadata_version=offered.metadata_version,
                    metadata_bytes=offered.metadata,
                )
                for offered in client_assignors
            ],
            topic_partitions=None
            if owned is None
            else [
                ConsumerGroupHeartbeatRequest.TopicPartitions(topic_id=self.topic_id(name), partitions=partitions)
                for name, partitions in owned.items()
            ],
        )
        return self.run(
            lambda context: self.shard.consumer_group_heartbeat(context, request), api_version, client=f"c-{member}"
        )

    def join(
        self, group: str, member: str, names: Iterable[str] | None = None, **more: object
    ) -> ConsumerGroupHeartbeatResponse:
        arguments: dict[str, object] = {"rebalance_timeout_ms": 300_000, "owned": {}, "assignor": "range"} | more
        return self.heartbeat(group, member, 0, names=names, **arguments)  # type: ignore[arg-type]

    def topic_id(self, name: str) -> bytes:
        topic = self.image.topics.get(name)
        return topic.id if topic is not None else b"?" * 16

    def assigned(self, response: ConsumerGroupHeartbeatResponse) -> Assigned | None:
        if response.assignment is None:
            return None
        return {
            self.image.topics_by_id[topic.topic_id].name: topic.partitions
            for topic in response.assignment.topic_partitions
        }

    def describe(self, group: str) -> ConsumerGroupDescribeResponse.DescribedGroup:
        return self.run(lambda context: self.shard.consumer_group_describe(context, [group]))[0].complete()

    def commit(
        self, group: str, offsets: dict[str, dict[int, int]], *, member: str = "", epoch: int = -1,
        metadata: str | None = None, api_version: int = 9, retention_time_ms: int = -1, topic_ids: bool = False,
        commit_timestamp: int = -1,
    ) -> dict[tuple[str, int], int]:  # fmt: skip
        request = OffsetCommitRequest(
            group_id=group,
            member_id=member,
            generation_id_or_member_epoch=epoch,
            retention_time_ms=retention_time_ms,
            topics=[
                OffsetCommitRequest.OffsetCommitRequestTopic(
                    name=name,
                    topic_id=self.topic_id(name) if topic_ids else bytes(16),
                    partitions=[
                        OffsetCommitRequest.OffsetCommitRequestPartition(
                            partition_index=partition,
                            committed_offset=offset,
                            committed_metadata=metadata,
                            commit_timestamp=commit_timestamp,
                        )
                        for partition, offset in partitions.items()
                    ],
                )
                for name, partitions in offsets.items()
            ],
        )
        response: OffsetCommitResponse = self.run(
            lambda context: self.shard.commit_offset(context, request), api_version
        )
        return {(t.name, p.partition_index): p.error_code for t in response.topics for p in t.partitions}

    def fetch(
        self, group: str, topics: dict[str, list[int]] | None = None, *, member: str | None = None, epoch: int = -1
    ) -> dict[tuple[str, int], tuple[int, str | None]]:
        request = OffsetFetchRequest.OffsetFetchRequestGroup(
            group_id=group,
            member_id=member,
            member_epoch=epoch,
            topics=None
            if topics is None
            else [
                OffsetFetchRequest.OffsetFetchRequestTopics(name=name, partition_indexes=partitions)
                for name, partitions in topics.items()
            ],
        )
        response: OffsetFetchResponse.OffsetFetchResponseGroup = self.run(
            lambda context: self.shard.fetch_offsets(context, request, require_stable=False), 9
        )
        return {
            (t.name, p.partition_index): (p.committed_offset, p.metadata) for t in response.topics for p in t.partitions
        }
