# SPDX-License-Identifier: Apache-2.0
"""kcoord's own view of the upstream: a topic is gone only if every broker that answers says so."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from kcoord.config import BrokerConfig
from kcoord.server.errors import StartError
from kcoord.upstream import cluster
from kcoord.upstream.cluster import UpstreamCluster
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import MetadataResponse
from kcoord_protocol.uuid import ZERO_UUID
from tests.unit.client.fake_broker import FakeBroker

FIRST, SECOND = bytes(15) + b"\1", bytes(15) + b"\2"


def topic(name: str, topic_id: bytes, error: Errors = Errors.NONE) -> MetadataResponse.MetadataResponseTopic:
    partitions = [
        MetadataResponse.MetadataResponsePartition(
            partition_index=index, leader_id=1, leader_epoch=4, replica_nodes=[1], isr_nodes=[1]
        )
        for index in (1, 0)
    ]
    return MetadataResponse.MetadataResponseTopic(
        error_code=error, name=name, topic_id=topic_id, partitions=[] if error else partitions
    )


def config(address: str, **settings: str) -> BrokerConfig:
    own = {f"kcoord.upstream.{key.replace('_', '.')}": value for key, value in settings.items()}
    return BrokerConfig.from_properties({"kcoord.upstream.bootstrap.servers": address, **own})


@pytest.fixture
async def brokers() -> AsyncIterator[tuple[FakeBroker, FakeBroker]]:
    async with FakeBroker(metadata=(10, 13)) as first, FakeBroker(metadata=(10, 13)) as second:
        second.node_id = 2
        first.peers, second.peers = [second], [first]
        yield first, second


@pytest.fixture
async def upstream(brokers: tuple[FakeBroker, FakeBroker]) -> AsyncIterator[UpstreamCluster]:
    upstream = UpstreamCluster(config(brokers[0].address))
    await upstream.connect()
    yield upstream
    await upstream.close()


async def test_the_cluster_is_what_its_brokers_say(
    upstream: UpstreamCluster, brokers: tuple[FakeBroker, FakeBroker]
) -> None:
    for broker in brokers:
        broker.topics = [topic("t", FIRST), topic("__consumer_offsets", SECOND), topic("old", ZERO_UUID)]
        broker.features = {"transaction.version": 2}
    snapshot = await upstream.look({})
    assert [(topic.name, topic.id, len(topic.partitions)) for topic in snapshot.topics] == [("t", FIRST, 2)]
    assert {broker.broker_id: broker.port for broker in snapshot.brokers} == {1: brokers[0].port, 2: brokers[1].port}
    assert upstream.connections.metadata.topics == {}, "the image has them"
    assert upstream.nameless == {"old"}
    assert upstream.versions[2].finalized_features == {"transaction.version": 2}
    assert upstream.versions[1].ranges[ApiKey.METADATA] == range(10, 14)
    assert snapshot.gone == set()


@pytest.mark.parametrize(
    ("topics_of_second", "gone"),
    [
        ([topic("t", ZERO_UUID, Errors.UNKNOWN_TOPIC_OR_PARTITION)], {"t"}),
        ([topic("t", SECOND)], {"t"}),
        ([topic("t", FIRST)], set()),
        ([topic("t", ZERO_UUID, Errors.TOPIC_AUTHORIZATION_FAILED)], set()),
        ([topic("t", ZERO_UUID, Errors.LEADER_NOT_AVAILABLE)], set()),
    ],
    ids=["unknown", "another id", "still there", "not allowed", "no leader"],
)
async def test_a_topic_is_gone_if_all_brokers_say_so(
    upstream: UpstreamCluster,
    brokers: tuple[FakeBroker, FakeBroker],
    topics_of_second: list[MetadataResponse.MetadataResponseTopic],
    gone: set[str],
) -> None:
    first, second = brokers
    first.topics = [topic("t", ZERO_UUID, Errors.UNKNOWN_TOPIC_OR_PARTITION)]
    second.topics = topics_of_second
    assert (await upstream.look({"t": FIRST})).gone == gone


async def test_a_broker_that_is_away_does_not_decide(
    upstream: UpstreamCluster, brokers: tuple[FakeBroker, FakeBroker]
) -> None:
    first, second = brokers
    first.topics = [topic("t", ZERO_UUID, Errors.UNKNOWN_TOPIC_OR_PARTITION)]
    await second.__aexit__()
    assert (await upstream.look({"t": FIRST})).gone == {"t"}
    await second.open()


async def test_a_broker_that_hangs_is_asked_at_its_next_address(
    upstream: UpstreamCluster, brokers: tuple[FakeBroker, FakeBroker]
) -> None:
    first, second = brokers
    await upstream.look({})
    second.handlers[ApiKey.API_VERSIONS] = lambda *_: None
    await upstream.look({})
    async with FakeBroker(metadata=(10, 12)) as moved:
        moved.node_id = 2
        first.peers = [moved]
        await upstream.look({})
        assert upstream.versions[2].ranges[ApiKey.METADATA] == range(10, 13)


async def test_another_cluster_at_the_same_address_is_noticed(
    upstream: UpstreamCluster, brokers: tuple[FakeBroker, FakeBroker]
) -> None:
    upstream.cluster_id = "another"
    with pytest.raises(KafkaError) as error:
        await upstream.look({})
    assert error.value.error is Errors.INCONSISTENT_CLUSTER_ID


async def test_an_upstream_that_cannot_be_reached_fails_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "CONNECT_SECONDS", 0.2)
    async with FakeBroker() as broker:
        address = broker.address
    upstream = UpstreamCluster(config(address))
    with pytest.raises(StartError, match=f"kcoord.upstream.bootstrap.servers={address}: the cluster cannot be reached"):
        await upstream.connect()
    await upstream.close()


async def test_an_upstream_whose_brokers_advertise_addresses_that_cannot_be_reached_fails_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cluster, "CONNECT_SECONDS", 0.5)
    async with FakeBroker(metadata=(10, 13)) as broker, FakeBroker(metadata=(10, 13)) as other:
        address = broker.address
        async with FakeBroker() as closed:
            unreachable = closed.port
        broker.port, broker.peers, other.node_id = unreachable, [other], 2
        upstream = UpstreamCluster(config(address))
        await upstream.connect()
        await upstream.close()
        broker.peers = []
        upstream = UpstreamCluster(config(address))
        with pytest.raises(StartError) as caught:
            await upstream.connect()
        await upstream.close()
    assert f"the cluster cannot be reached: NETWORK_EXCEPTION: broker 1 advertises 127.0.0.1:{unreachable}: " in str(
        caught.value
    )


async def test_an_upstream_without_topic_ids_fails_the_start() -> None:
    async with FakeBroker(metadata=(0, 9)) as broker:
        upstream = UpstreamCluster(config(broker.address))
        with pytest.raises(StartError, match="needs version 10 to 13, the broker has 0 to 9"):
            await upstream.connect()
        await upstream.close()


def test_settings_of_the_connection_are_checked_at_the_start() -> None:
    with pytest.raises(StartError, match=r"kcoord\.upstream\.sasl\.mechanism: 'X' is not one of"):
        UpstreamCluster(config("a:1", security_protocol="SASL_PLAINTEXT", sasl_mechanism="X"))
