# SPDX-License-Identifier: Apache-2.0
"""Two instances in front of another kcoord: what they share, and how one replaces the other."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from kcoord.client import AdminClient
from kcoord.client.admin.model import AlterConfigOp, ConfigResource, ConfigResourceType, NewTopic
from kcoord.client.types import OffsetAndMetadata, TopicPartition
from kcoord.testing import KcoordBroker, start_broker
from kcoord.upstream.own_topics import SHARED_TOPIC
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.messages import FetchRequest, FetchResponse, MetadataRequest, MetadataResponse
from tests.integration.wire import ConnectionClosed, WireClient
from tests.support.kcoord_process import FAST, KcoordProcess
from tests.support.waiting import wait_until

FIRST_ID = 1_000_000
TIMEOUT = "consumer.session.timeout.ms"
METADATA_VERSION = 14
LOOK_MS = 60_000
"""An instance looks at the upstream by itself only once a minute, so that tests see what other causes there are."""


@pytest.fixture(scope="module")
def upstream() -> Iterator[KcoordBroker]:
    with start_broker({"group.initial.rebalance.delay.ms": "0"}) as broker:
        yield broker


def instance(folder: Path, upstream: KcoordBroker, number: int, group_id: str = "kcoord") -> KcoordProcess:
    folder.mkdir()
    return KcoordProcess(
        folder,
        {
            **FAST,
            "node.id": str(FIRST_ID + number),
            "kcoord.upstream.bootstrap.servers": upstream.bootstrap_servers,
            "kcoord.upstream.group.id": group_id,
            "kcoord.upstream.ports": "0",
            "kcoord.upstream.metadata.max.age.ms": str(LOOK_MS),
            "kcoord.upstream.heartbeat.interval.ms": "3000",
            "kcoord.metrics.port": "0",
        },
    )


@pytest.fixture(scope="module")
def instances(upstream: KcoordBroker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[KcoordProcess]]:
    folder = tmp_path_factory.mktemp("instances")
    made = [instance(folder / str(number), upstream, number).start() for number in range(2)]
    yield made
    for process in made:
        process.kill()


def creation_times(process: KcoordProcess, topic: str) -> list[int]:
    with WireClient(process.port) as client:
        request = MetadataRequest(topics=[MetadataRequest.MetadataRequestTopic(name=topic)])
        answer = client.call(request, METADATA_VERSION, MetadataResponse)
    partitions = sorted(answer.topics[0].partitions, key=lambda partition: partition.partition_index)
    return [partition.creation_time_ms for partition in partitions]


async def group_config(process: KcoordProcess, group: str) -> str | None:
    resource = ConfigResource(ConfigResourceType.GROUP, group)
    async with AdminClient(bootstrap_servers=process.address) as admin:
        return (await admin.describe_configs([resource]))[resource][TIMEOUT].value


async def set_group_config(process: KcoordProcess, group: str, value: str) -> None:
    resource = ConfigResource(ConfigResourceType.GROUP, group)
    async with AdminClient(bootstrap_servers=process.address) as admin:
        (await admin.incremental_alter_configs({resource: [AlterConfigOp(TIMEOUT, value)]})).all()


async def test_creation_times_are_the_same_at_every_instance_and_after_the_loss_of_a_folder(
    upstream: KcoordBroker, instances: list[KcoordProcess], tmp_path: Path
) -> None:
    first, second = instances
    async with AdminClient(bootstrap_servers=first.address) as admin:
        (await admin.create_topics([NewTopic("times", 2)])).all()
        await asyncio.sleep(0.05)
        (await admin.create_partitions({"times": 3})).all()
    times = creation_times(first, "times")
    assert -1 not in times and times[0] == times[1] < times[2]
    wait_until(lambda: creation_times(second, "times") == times, "the other instance has the same times")
    third = instance(tmp_path / "third", upstream, 2).start()
    try:
        assert creation_times(third, "times") == times
    finally:
        third.stop()


async def test_instances_that_see_a_topic_at_the_same_time_agree(
    upstream: KcoordBroker, instances: list[KcoordProcess]
) -> None:
    for number in range(5):
        upstream.create_topic(f"race{number}", 3)
        shown = await asyncio.gather(
            *(asyncio.to_thread(creation_times, process, f"race{number}") for process in instances)
        )
        assert -1 not in shown[0]
        assert shown[0] == shown[1]


async def test_a_topic_that_was_deleted_is_forgotten(upstream: KcoordBroker, instances: list[KcoordProcess]) -> None:
    async with AdminClient(bootstrap_servers=instances[0].address) as admin:
        (await admin.create_topics([NewTopic("gone", 1)])).all()
        topic_id = (await admin.describe_topics(["gone"]))["gone"].topic_id
        (await admin.delete_topics(["gone"])).all()

    def has_tombstone() -> bool:
        records = upstream.records(SHARED_TOPIC)
        return any(record.value is None and record.key is not None and topic_id in record.key for record in records)

    wait_until(has_tombstone, "the creation times have a tombstone")


async def test_offsets_count_for_the_topic_that_the_client_has_seen(tmp_path: Path) -> None:
    """Another client creates the topic again, or adds partitions, directly at the upstream."""

    async def commit(admin: AdminClient, topic_id: bytes, partition: int, offset: int) -> None:
        """Waits until a client sees the partition, and commits an offset of it."""
        shown = (await admin.describe_topics(["changed"]))["changed"]
        while shown.topic_id != topic_id or len(shown.partitions) <= partition:
            shown = (await admin.describe_topics(["changed"]))["changed"]
        offsets = {TopicPartition("changed", partition): OffsetAndMetadata(offset)}
        (await admin.alter_consumer_group_offsets("g", offsets)).all()

    with start_broker({"group.initial.rebalance.delay.ms": "0"}) as upstream:
        upstream.create_topic("changed", 1)
        process = instance(tmp_path / "alone", upstream, 0).start()
        try:
            async with (
                AdminClient(bootstrap_servers=process.address) as admin,
                AdminClient(bootstrap_servers=upstream.bootstrap_servers) as direct,
            ):
                first_id = (await direct.describe_topics(["changed"]))["changed"].topic_id
                await commit(admin, first_id, 0, 42)
                (await direct.delete_topics(["changed"])).all()
                upstream.create_topic("changed", 1)
                topic_id = (await direct.describe_topics(["changed"]))["changed"].topic_id
                assert topic_id != first_id
                await commit(admin, topic_id, 0, 7)
                (await direct.create_partitions({"changed": 2})).all()
                await commit(admin, topic_id, 1, 8)
                # A look at the upstream, which would delete the offset of the earlier topic.
                (await admin.create_topics([NewTopic("other", 1)])).all()
                offsets = (await admin.list_consumer_group_offsets({"g": None}))["g"]
                assert {place.partition: at and at.offset for place, at in offsets.items()} == {0: 7, 1: 8}
        finally:
            process.kill()


async def test_offsets_of_a_topic_that_is_created_again_while_no_instance_runs_are_deleted(tmp_path: Path) -> None:
    partition = TopicPartition("renewed", 0)
    with start_broker({"group.initial.rebalance.delay.ms": "0"}) as upstream:
        upstream.create_topic("renewed", 1)
        process = instance(tmp_path / "alone", upstream, 0).start()
        try:
            async with AdminClient(bootstrap_servers=process.address) as admin:
                (await admin.alter_consumer_group_offsets("g", {partition: OffsetAndMetadata(42)})).all()
            process.stop()
            async with AdminClient(bootstrap_servers=upstream.bootstrap_servers) as admin:
                (await admin.delete_topics(["renewed"])).all()
            upstream.create_topic("renewed", 1)
            process.start()
            async with AdminClient(bootstrap_servers=process.address) as admin:
                assert not (await admin.list_consumer_group_offsets({"g": None}))["g"]
        finally:
            process.kill()


def test_clients_of_an_instance_that_was_alone_learn_of_the_next_one(upstream: KcoordBroker, tmp_path: Path) -> None:
    """The instance closes quiet connections once. Kafka's clients ask for metadata then."""
    alone, joining = (instance(tmp_path / str(number), upstream, number, "pair") for number in range(2))
    topic = MetadataRequest(topics=[MetadataRequest.MetadataRequestTopic(name="waited-for")])
    upstream.create_topic("waited-for", 1)
    alone.start()
    try:
        with WireClient(alone.port) as client:
            shown = client.call(topic, METADATA_VERSION, MetadataResponse)
            (broker,) = (broker for broker in shown.brokers if broker.node_id < FIRST_ID)
            with WireClient(broker.port) as producer, WireClient(broker.port) as reader:
                producer.call(topic, METADATA_VERSION, MetadataResponse)
                fetch = FetchRequest.FetchTopic(
                    topic_id=shown.topics[0].topic_id, partitions=[FetchRequest.FetchPartition(partition_max_bytes=1)]
                )
                request = FetchRequest(max_wait_ms=5_000, min_bytes=1, max_bytes=1, topics=[fetch])
                correlation_id = reader.send(request, 13)
                joining.start()
                for idle in (client, producer):
                    with pytest.raises(ConnectionClosed):
                        idle.receive_frame()
                assert not reader.receive(correlation_id, ApiKey.FETCH, 13, FetchResponse).error_code
        with WireClient(alone.port) as client:
            brokers = client.call(topic, METADATA_VERSION, MetadataResponse).brokers
        assert {broker.node_id for broker in brokers} >= {FIRST_ID, FIRST_ID + 1}
    finally:
        for process in (alone, joining):
            process.kill()


async def test_configs_of_groups_hold_at_every_instance(instances: list[KcoordProcess]) -> None:
    first, second = instances
    await set_group_config(first, "g", "5000")
    assert await group_config(first, "g") == "5000"
    async with asyncio.timeout(5):
        while await group_config(second, "g") != "5000":
            await asyncio.sleep(0.01)
    await set_group_config(second, "g", "6000")
    first.restart()
    assert await group_config(first, "g") == "6000"


def is_ready(page: str) -> bool:
    try:
        with urlopen(f"{page}/ready") as ready:
            return bool(ready.read() == b"ready\n")
    except HTTPError:
        return False


def figures_of(page: str) -> dict[str, float]:
    with urlopen(f"{page}/metrics") as metrics:
        lines = metrics.read().decode().splitlines()
    return {
        name: float(value)
        for name, _, value in (line.rpartition(" ") for line in lines if line.startswith("kcoord_instance_"))
    }


def test_metrics_and_readiness(instances: list[KcoordProcess]) -> None:
    for process in instances:
        page = re.findall(r"Metrics are at (http://.*)/metrics", process.log)[-1]
        wait_until(partial(is_ready, page), "the instance is ready")
        wait_until(lambda page=page: not figures_of(page)["kcoord_instance_standby_behind_shards"], "it has caught up")  # type: ignore[misc]
        figures = figures_of(page)
        assert figures["kcoord_instance_owned_shards"] == 4
        assert figures["kcoord_instance_instances"] == 2
        assert figures["kcoord_instance_generation"] >= 2
        assert 0 < figures["kcoord_instance_lease_ms"] <= 10_000
        assert figures["kcoord_instance_takeover_time_ms_count"] >= 1
        assert figures["kcoord_instance_produce_time_ms_count"] >= figures["kcoord_instance_owned_shards"], (
            "claims at least"
        )
        assert figures["kcoord_instance_lost_leases_total"] == 0
        assert figures["kcoord_instance_standby_shards"] == 4
        assert figures["kcoord_instance_standby_lag_ms"] <= 10_000


def test_a_stop_is_noticed_before_the_next_heartbeat(instances: list[KcoordProcess]) -> None:
    first, second = instances
    begin = len(second.log)
    stopped = time.monotonic()
    first.stop()
    wait_until(lambda: "this one owns 8 of 8 shards" in second.log[begin:], "the other instance owns all shards")
    assert time.monotonic() - stopped < 2.5
    first.start()
