# SPDX-License-Identifier: Apache-2.0
"""The logs of shards in a topic of three brokers of Apache Kafka: fencing, faults of brokers, settings of the topic."""

from __future__ import annotations

import asyncio
import random
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from itertools import count
from pathlib import Path

import pytest

from kcoord.client import AdminClient, Producer
from kcoord.client.admin.model import AlterConfigOp, ConfigResource, ConfigResourceType, NewTopic
from kcoord.runtime.serde import CoordinatorSerde
from kcoord.runtime.waiting import ShardState
from kcoord.server.errors import StartError
from kcoord.upstream.own_topics import OFFSETS_TOPIC, prepare_topic
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import MetadataRequest, MetadataResponse
from tests.integration.upstream.owner import FOREIGN_ID_WAIT_MS, Owner
from tests.integration.wire import WireClient
from tests.support.followed_log import FollowedLog
from tests.support.kafka_cluster import KafkaCluster
from tests.support.kafka_jars import KafkaJars
from tests.support.shared import ROOT
from tests.support.waiting import wait_until
from tests.unit.runtime.ledger import entry

pytestmark = pytest.mark.java

BROKERS = 3
EXPIRATION_MS = 6_000
NUMBERS = count()
KILLS = 4
SETTINGS = {"cleanup.policy": "compact", "message.timestamp.type": "LogAppendTime"}


@pytest.fixture(scope="module")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaCluster]:
    cluster = KafkaCluster(
        KafkaJars(),
        tmp_path_factory.mktemp("kafka"),
        BROKERS,
        transactional_id_expiration_ms=str(EXPIRATION_MS),
        transaction_remove_expired_transaction_cleanup_interval_ms="500",
        producer_id_expiration_check_interval_ms="200",
    )
    yield cluster
    cluster.stop()


@pytest.fixture
async def admin(kafka: KafkaCluster) -> AsyncIterator[AdminClient]:
    async with AdminClient(bootstrap_servers=kafka.address) as admin:
        yield admin


@pytest.fixture
async def topic(admin: AdminClient) -> str:
    name = f"log{next(NUMBERS)}"
    await create(admin, name)
    return name


async def create(admin: AdminClient, name: str, **configs: str) -> None:
    settings = {**SETTINGS, "min.insync.replicas": "2"}
    settings |= {key.replace("_", "."): value for key, value in configs.items()}
    (await admin.create_topics([NewTopic(name, 2, configs=settings)])).all()


async def leader_of(admin: AdminClient, topic: str) -> int:
    """Returns the broker that leads partition 0."""
    leader = (await admin.describe_topics([topic]))[topic].partitions[0].leader
    assert leader is not None
    return leader.node_id


async def alter(admin: AdminClient, resource: ConfigResource, name: str, value: str) -> None:
    (await admin.incremental_alter_configs({resource: [AlterConfigOp(name, value)]})).all()


async def test_the_older_of_two_owners_is_fenced_and_acknowledges_nothing(kafka: KafkaCluster, topic: str) -> None:
    async with Owner(kafka.address, topic) as older:
        await older.served()
        await older.put("a", 1)
        async with Owner(kafka.address, topic) as newer:
            await newer.served()
            assert newer.balance() == {"a": 1}
            with pytest.raises(KafkaError, match="NOT_COORDINATOR"):
                await older.put("a", 2)
            assert older.state() is ShardState.CLOSED
            assert await newer.put("b", 3) == "b=3"
            await older.lost()
            older.claim()
            await older.served()
            assert older.balance() == {"a": 1, "b": 3}


async def test_nothing_acknowledged_is_lost_when_a_leader_is_killed(
    kafka: KafkaCluster, admin: AdminClient, topic: str
) -> None:
    """A stream of the pipeline follows the topic meanwhile, and has each record once."""
    acknowledged = 0

    async def put_until(owner: Owner, least: int) -> None:
        nonlocal acknowledged
        value = acknowledged
        while acknowledged < least:
            value += 1
            try:
                await owner.put("a", value)
                acknowledged = value
            except KafkaError:
                await owner.served()

    async with Owner(kafka.address, topic, write_timeout_ms=20_000) as owner:
        await owner.served()
        await put_until(owner, 50)
        number = await leader_of(admin, topic)
        with FollowedLog(kafka.address, topic) as followed:
            putting = asyncio.create_task(put_until(owner, 1_000_000))
            await asyncio.sleep(0.2)
            kafka.kill(number)
            before = acknowledged
            async with asyncio.timeout(30):
                while acknowledged <= before + 100:
                    await asyncio.sleep(0.02)
            putting.cancel()
            await asyncio.gather(putting, return_exceptions=True)
    assert followed.batches >= 2
    assert all(offsets == [*range(len(offsets))] for offsets in followed.offsets().values())
    assert len(followed.rows) > acknowledged
    kafka.start(number)
    wait_until(lambda: len(kafka.brokers()) == BROKERS, "the killed broker is back", 60)
    async with Owner(kafka.address, topic) as successor:
        await successor.served()
        assert acknowledged <= successor.balance()["a"] <= acknowledged + 1


async def test_too_few_in_sync_replicas_delay_an_append_and_lose_nothing(
    kafka: KafkaCluster, admin: AdminClient
) -> None:
    name = f"log{next(NUMBERS)}"
    await create(admin, name, min_insync_replicas="3")
    async with Owner(kafka.address, name, write_timeout_ms=60_000) as owner:
        await owner.served()
        leader = await leader_of(admin, name)
        follower = leader % BROKERS + 1
        kafka.kill(follower)
        put = asyncio.create_task(owner.put("a", 1))
        async with asyncio.timeout(30):
            while len((await admin.describe_topics([name]))[name].partitions[0].isr) == BROKERS:
                await asyncio.sleep(0.1)
        await asyncio.sleep(0.5)
        assert not put.done()
        assert owner.state() is ShardState.ACTIVE
        await alter(admin, ConfigResource(ConfigResourceType.TOPIC, name), "min.insync.replicas", "2")
        assert await put == "a=1"
        assert await owner.put("b", 2) == "b=2"
    kafka.start(follower)
    wait_until(lambda: len(kafka.brokers()) == BROKERS, "the killed broker is back", 60)
    async with Owner(kafka.address, name) as successor:
        await successor.served()
        assert successor.balance() == {"a": 1, "b": 2}


async def test_an_idle_owner_reads_the_claim_of_another_one(kafka: KafkaCluster, topic: str) -> None:
    async with Owner(kafka.address, topic) as older:
        await older.served()
        async with Owner(kafka.address, topic) as newer:
            await newer.served()
            async with asyncio.timeout(20):
                while older.state() is not ShardState.CLOSED or older.state(1) is not ShardState.CLOSED:
                    await asyncio.sleep(0.02)
            assert await newer.put("a", 1) == "a=1"


async def test_a_zombie_is_not_acknowledged_although_the_partition_has_forgotten_the_producers(
    kafka: KafkaCluster, admin: AdminClient
) -> None:
    name = f"log{next(NUMBERS)}"
    # The clock of an Owner begins in 1970, and Kafka drops the state of producers whose last batch is that old.
    await create(admin, name, message_timestamp_type="CreateTime")
    async with Owner(kafka.address, name) as zombie:
        following = zombie.log._following
        deliver, following._deliver = following._deliver, lambda *_: None
        await zombie.served()
        async with Owner(kafka.address, name) as newer:
            await newer.served()
            await asyncio.sleep(1)
            assert zombie.state() is ShardState.ACTIVE, "it does not know of the other owner yet"
            following._deliver = deliver
            with pytest.raises(KafkaError, match="NOT_COORDINATOR"):
                await zombie.put("a", 1)


async def test_a_takeover_after_the_transactional_id_expired_gets_a_new_producer_id_and_waits(
    kafka: KafkaCluster, topic: str
) -> None:
    async with Owner(kafka.address, topic, partitions=1) as owner:
        await owner.served()
        await owner.put("a", 1)
        before = owner.log.claimed_ids()[0]
    await asyncio.sleep(EXPIRATION_MS / 1000 + 1.5)
    async with Owner(kafka.address, topic, partitions=1) as successor:
        started = successor.now_ms()
        await successor.served()
        assert successor.log.claimed_ids()[0] != before
        assert successor.now_ms() - started >= FOREIGN_ID_WAIT_MS
        assert successor.balance() == {"a": 1}
        await successor.put("a", 2)
    async with Owner(kafka.address, topic, partitions=1) as third:
        await third.served()
        assert third.balance() == {"a": 2}


async def test_transactional_batches_of_others_are_void(kafka: KafkaCluster, topic: str) -> None:
    async with Owner(kafka.address, topic) as owner:
        await owner.served()
        await owner.put("a", 1)
        async with Producer(bootstrap_servers=kafka.address, transactional_id=f"{topic}-zombie") as zombie:
            await zombie.init_transactions()
            await zombie.begin_transaction()
            key, value = CoordinatorSerde().serialize(entry("a", 99))
            await zombie.send(topic, value, key=key, partition=0)
            await zombie.commit_transaction()
        assert await owner.put("b", 2) == "b=2"
        assert owner.balance() == {"a": 1, "b": 2}
    async with Owner(kafka.address, topic) as successor:
        await successor.served()
        assert successor.balance() == {"a": 1, "b": 2}


async def test_a_topic_that_was_deleted_and_created_again_acknowledges_nothing_of_the_old_one(
    kafka: KafkaCluster, admin: AdminClient, topic: str
) -> None:
    async with Owner(kafka.address, topic) as owner:
        await owner.served()
        await owner.put("a", 1)
        (await admin.delete_topics([topic])).all()
        with pytest.raises(KafkaError, match="NOT_COORDINATOR"):
            await owner.put("a", 2)
        await create(admin, topic)
        await owner.served()
        assert owner.balance() == {}
        assert await owner.put("a", 3) == "a=3"


async def test_an_instance_that_is_killed_has_acknowledged_nothing_that_is_lost(
    kafka: KafkaCluster, admin: AdminClient, tmp_path: Path
) -> None:
    name = f"log{next(NUMBERS)}"
    await create(admin, name)
    acknowledged = 0
    for number in range(KILLS):
        output = tmp_path / f"{number}.txt"
        with output.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.integration.upstream.owner", kafka.address, name, str(acknowledged)],
                cwd=ROOT,
                stdout=file,
            )
        try:
            wait_until(lambda output=output: output.stat().st_size > 0, "the instance acknowledges", 30)  # type: ignore[misc]
            await asyncio.sleep(random.random() / 2)
        finally:
            process.kill()
            process.wait()
        acknowledged = int(output.read_text().rpartition("\n")[0].splitlines()[-1])
        async with Owner(kafka.address, name, partitions=1) as successor:
            await successor.served()
            assert acknowledged <= successor.balance()["a"] <= acknowledged + 1
            acknowledged += 1


# -- the topic ---------------------------------------------------------------------------------------------------------


@pytest.fixture
async def no_topic(admin: AdminClient, kafka: KafkaCluster) -> None:
    """Deletes the topic. Any broker may be asked next, and each replays the controller's log by itself.

    A broker that lags does not have the topic either, and would show it later. So another topic is created after the
    deletion: a broker that has it has replayed all that came before it.
    """
    await admin.delete_topics([OFFSETS_TOPIC])
    later = f"later{next(NUMBERS)}"
    await create(admin, later)
    async with asyncio.timeout(20):
        for address in kafka.address.split(","):
            with WireClient(int(address.rpartition(":")[2])) as broker:
                while not _has_topic(broker, later):
                    await asyncio.sleep(0.05)


def _has_topic(broker: WireClient, name: str) -> bool:
    request = MetadataRequest(topics=[MetadataRequest.MetadataRequestTopic(name=name)], allow_auto_topic_creation=False)
    (topic,) = broker.call(request, 9, MetadataResponse).topics
    return topic.error_code != Errors.UNKNOWN_TOPIC_OR_PARTITION


@pytest.mark.usefixtures("no_topic")
async def test_the_topic_is_created_with_the_defaults_of_the_upstream(admin: AdminClient) -> None:
    await prepare_topic(admin, OFFSETS_TOPIC, 50, 104_857_600)
    await prepare_topic(admin, OFFSETS_TOPIC, 50, 104_857_600)
    description = (await admin.describe_topics([OFFSETS_TOPIC]))[OFFSETS_TOPIC]
    assert [len(partition.replicas) for partition in description.partitions] == [BROKERS] * 50
    resource = ConfigResource(ConfigResourceType.TOPIC, OFFSETS_TOPIC)
    configs = (await admin.describe_configs([resource]))[resource]
    expected = {**SETTINGS, "compression.type": "producer", "min.insync.replicas": "2"}
    assert {name: configs[name].value for name in expected} == expected


@pytest.mark.usefixtures("no_topic")
@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("cleanup.policy", "delete", "cleanup.policy=delete, which deletes committed offsets. Set it to compact"),
        ("cleanup.policy", "compact,delete", "cleanup.policy=compact,delete, which deletes committed offsets"),
        ("message.timestamp.type", "CreateTime", "message.timestamp.type=CreateTime. Set it to LogAppendTime"),
        ("delete.retention.ms", "60000", "delete.retention.ms=60000. Set it to at least 3600000"),
        ("max.message.bytes", "1000000", "max.message.bytes=1000000. Set it to at least 1048588"),
    ],
)
async def test_a_topic_with_unsafe_settings_is_refused(admin: AdminClient, name: str, value: str, text: str) -> None:
    (await admin.create_topics([NewTopic(OFFSETS_TOPIC, 50, configs={**SETTINGS, name: value})])).all()
    with pytest.raises(StartError, match=re.escape(text)):
        await prepare_topic(admin, OFFSETS_TOPIC, 50, 104_857_600)


@pytest.mark.usefixtures("no_topic")
async def test_a_topic_with_another_number_of_partitions_is_refused(admin: AdminClient) -> None:
    (await admin.create_topics([NewTopic(OFFSETS_TOPIC, 7, configs=SETTINGS)])).all()
    with pytest.raises(StartError, match=re.escape("has 7 partitions, but offsets.topic.num.partitions is 50")):
        await prepare_topic(admin, OFFSETS_TOPIC, 50, 104_857_600)
