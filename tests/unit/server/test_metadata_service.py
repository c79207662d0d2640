# SPDX-License-Identifier: Apache-2.0
"""The metadata service publishes an image when it is durable and before the replies, and reads a failed log again."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections import Counter
from collections.abc import Callable

import pytest

from kcoord.config import BrokerConfig
from kcoord.metadata.image import ImageBuilder, MetadataImage
from kcoord.metadata.machine import MetadataMachine
from kcoord.metadata.topics import MAX_NEW_PARTITIONS, auto_create_request
from kcoord.metrics.measures import WriteMeasures
from kcoord.runtime.result import CoordinatorRecord, CoordinatorResult, OperationContext
from kcoord.server.disk.log_writer import WriteJob, write
from kcoord.server.disk.shard_logs import LocalShardLog, ShardLogs
from kcoord.server.environment import RandomUuids
from kcoord.server.replies import internal_operation_context
from kcoord.server.shards import shard_service
from kcoord.server.shards.group_times import GroupTimes
from kcoord.server.shards.metadata_service import (
    LARGE_RECORDS,
    METADATA_SHARD,
    LocalMetadataService,
    new_metadata_shards,
)
from kcoord.server.shards.shard_service import Pump
from kcoord.storage.log import AppendInfo, Log
from kcoord.storage.memory_file_system import MemoryFileSystem, no_fault
from kcoord.storage.segment import LogConfig
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import CreateTopicsResponse, ElectLeadersRequest, ElectLeadersResponse
from tests.unit.metadata.cluster import registration


class Owner:
    def __init__(self) -> None:
        self.later_ms = 0
        self.file_system = MemoryFileSystem()
        self.published: list[MetadataImage] = []
        self.events: list[str] = []
        self.latest_group_ms = -1
        config = BrokerConfig.from_properties({})
        self.runtime = new_metadata_shards(config)
        self.runtime.load(METADATA_SHARD, (), self.now_ms())
        self.pump = Pump(asyncio.get_running_loop(), self.now_ms, None)
        logs = ShardLogs("__cluster_metadata", self._open_log, lambda partition: True, self.file_system)
        log = LocalShardLog(
            self.runtime,
            logs,
            submit=self.pump.submit,
            wake=self.pump.wake,
            now_ms=self.now_ms,
            tombstones_kept_ms=lambda: 0,
        )
        self.service = LocalMetadataService(
            self.runtime,
            log,
            self.pump.wake,
            self.now_ms,
            lambda: self.latest_group_ms,
            GroupTimes(lambda: -1, lambda: False),
        )
        self.service.publishers.append(self.publish)
        self.pump.add(self.service)

    def now_ms(self) -> int:
        return 1_700_000_000_000 + self.later_ms

    def publish(self, image: MetadataImage) -> None:
        self.published.append(image)
        self.events.append("published")

    def _open_log(self, partition: int) -> Log:
        return Log.open(self.file_system, "data/__cluster_metadata-0", LogConfig(), self.now_ms())

    def create(self, name: str, partitions: int = -1, replicas: int = -1) -> asyncio.Future[CreateTopicsResponse]:
        request = auto_create_request(BrokerConfig.from_properties({}), [name])
        request.topics[0].num_partitions, request.topics[0].replication_factor = partitions, replicas
        topic_ids = RandomUuids().take_topic_ids(1)
        future = self.service.call(
            lambda machine, context, request: machine.create_topics(context, request, topic_ids),
            request,
            internal_operation_context(self.now_ms()),
        )
        future.add_done_callback(lambda _: self.events.append("replied"))
        return future


async def test_an_image_is_published_before_the_replies_that_waited_for_it() -> None:
    owner = Owner()
    future = owner.create("__consumer_offsets")
    assert owner.published == []
    await asyncio.wait_for(future, 5)
    await asyncio.sleep(0)
    assert owner.events == ["published", "replied"]
    assert list(owner.published[0].topics) == ["__consumer_offsets"]


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
async def test_after_a_failed_write_the_log_is_read_again(code: int) -> None:
    owner = Owner()
    owner.runtime.first_reload_ms = 0
    await owner.create("__consumer_offsets")
    error = OSError(code, os.strerror(code))
    owner.file_system.fault = lambda operation: error if operation.kind == "write" else None
    with pytest.raises(KafkaError) as failure:
        await owner.create("__transaction_state")
    assert failure.value.error is Errors.NOT_CONTROLLER
    with pytest.raises(KafkaError) as failure:
        await owner.create("__share_group_state")
    assert failure.value.error is Errors.NOT_CONTROLLER
    owner.file_system.fault = no_fault
    await asyncio.sleep(0.05)
    if code == errno.ENOSPC:
        with pytest.raises(KafkaError) as failure:
            await owner.create("__transaction_state")
        assert failure.value.error is Errors.NOT_CONTROLLER
        assert list(owner.service.image.topics) == ["__consumer_offsets"], "the operation is refused, the log works"
        owner.later_ms = 1000
    await owner.create("__transaction_state")
    assert list(owner.published[-1].topics) == ["__consumer_offsets", "__transaction_state"]


async def test_a_new_partition_is_newer_than_every_group() -> None:
    """The clock was set back while the broker was down, so a group has a creation time in the future (KIP-1327)."""
    owner = Owner()
    await owner.create("before")
    owner.latest_group_ms = owner.now_ms() + 60_000
    await owner.create("after")
    before, after = owner.service.image.topics["before"], owner.service.image.topics["after"]
    assert {partition.creation_time_ms for partition in before.partitions} == {owner.now_ms()}
    assert {partition.creation_time_ms for partition in after.partitions} == {owner.latest_group_ms + 1}


async def test_a_thread_makes_the_records_of_many_partitions(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = Owner()
    threads: Counter[int] = Counter()
    replay = ImageBuilder.replay

    def noted(builder: ImageBuilder, record: CoordinatorRecord) -> None:
        threads[threading.get_ident()] += 1
        replay(builder, record)

    monkeypatch.setattr(ImageBuilder, "replay", noted)
    response = await owner.create("large", 3_500)
    assert response.topics[0].num_partitions == 3_500
    assert threads.pop(threading.get_ident()) == 1
    assert threads.total() == 3_500
    image = owner.service.image
    assert len(image.topics["large"].partitions) == 3_500
    log = owner.service.log
    assert isinstance(log, LocalShardLog)
    opened = log.logs.opened(METADATA_SHARD)
    assert opened is not None
    batches = list(opened.batches(0))
    assert len(batches) == 1
    rebuilt = new_metadata_shards(BrokerConfig.from_properties({}))
    rebuilt.load(METADATA_SHARD, batches, owner.now_ms())
    machine = rebuilt.machine(METADATA_SHARD)
    assert machine is not None
    assert machine.image == image


@pytest.mark.parametrize(("count", "is_large"), [(LARGE_RECORDS - 1, False), (LARGE_RECORDS, True), (None, True)])
async def test_a_thread_decides_about_an_election_of_many_partitions(count: int | None, is_large: bool) -> None:
    owner, threads = Owner(), []
    await owner.create("t", 2)
    topics = [ElectLeadersRequest.TopicPartitions(topic="t", partitions=list(range(count or 0)))]
    request = ElectLeadersRequest(topic_partitions=None if count is None else topics)

    def elect(
        machine: MetadataMachine, context: OperationContext, request: ElectLeadersRequest
    ) -> CoordinatorResult[ElectLeadersResponse]:
        threads.append(threading.get_ident())
        return machine.elect_leaders(context, request)

    response = await owner.service.call(elect, request, internal_operation_context(owner.now_ms()))
    assert len(threads) == 1
    assert (threads[0] != threading.get_ident()) is is_large
    results = response.replica_election_results[0].partition_result if count else []
    errors = [Errors.ELECTION_NOT_NEEDED] * 2 + [Errors.UNKNOWN_TOPIC_OR_PARTITION] * ((count or 2) - 2)
    assert [result.error_code for result in results] == (errors if count else [])


async def test_a_large_request_is_decided_again_if_the_image_changes_meanwhile() -> None:
    """The smaller request overtakes. The larger one then finds its topic."""
    owner = Owner()
    large, small = owner.create("t", 3_500), owner.create("t", 1)
    responses = await asyncio.gather(large, small)
    assert [response.topics[0].error_code for response in responses] == [Errors.TOPIC_ALREADY_EXISTS, Errors.NONE]
    assert len(owner.service.image.topics["t"].partitions) == 1


async def test_changes_of_all_partitions_fit_into_the_log() -> None:
    """10,000 partitions with three replicas are the most that Kafka creates at once: 1.3 MB of records."""
    owner = Owner()
    registrations = [registration(broker_id) for broker_id in (1, 2, 3)]

    async def register(count: int) -> None:
        await owner.service.call(
            MetadataMachine.register_brokers, registrations[:count], internal_operation_context(owner.now_ms())
        )

    await register(3)
    response = await owner.create("large", MAX_NEW_PARTITIONS, 3)
    assert response.topics[0].error_code == Errors.NONE
    await register(2)
    partitions = owner.service.image.topics["large"].partitions
    assert {tuple(sorted(partition.replicas)) for partition in partitions} == {(1, 2)}


@pytest.mark.parametrize(
    ("least_bytes", "order"),
    [(1 << 20, ["written", "published", "another callback"]), (100, ["written", "another callback", "published"])],
)
async def test_the_completion_of_a_large_write_has_a_turn_of_its_own(
    monkeypatch: pytest.MonkeyPatch, least_bytes: int, order: list[str]
) -> None:
    owner = Owner()

    def noted(job: WriteJob, append: Callable[..., AppendInfo | None], measures: WriteMeasures | None) -> None:
        assert len(job.data) > 100
        owner.events.append("written")
        asyncio.get_running_loop().call_soon(owner.events.append, "another callback")
        write(job, append, measures)

    monkeypatch.setattr(shard_service, "write", noted)
    monkeypatch.setattr(shard_service, "LARGE_WRITE_BYTES", least_bytes)
    await owner.create("a")
    assert owner.events[:3] == order
