# SPDX-License-Identifier: Apache-2.0
"""The logs of shards in a topic of another kcoord, which can lose requests and answers on purpose."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

from kcoord.client import AdminClient, Producer
from kcoord.runtime.serde import CoordinatorSerde
from kcoord.runtime.waiting import ShardState
from kcoord.server.errors import StartError
from kcoord.testing import KcoordBroker, start_broker
from kcoord.upstream import own_topics
from kcoord.upstream.own_topics import OFFSETS_TOPIC, prepare_topic
from kcoord_protocol.errors import KafkaError
from tests.integration.upstream.owner import Owner
from tests.unit.runtime.ledger import entry

NUMBERS = count()


@pytest.fixture(scope="module")
def upstream() -> Iterator[KcoordBroker]:
    with start_broker() as broker:
        yield broker


@pytest.fixture
def topic(upstream: KcoordBroker) -> Iterator[str]:
    name = f"log{next(NUMBERS)}"
    upstream.create_topic(name, 2, {"cleanup.policy": "compact"})
    yield name
    upstream.clear_faults()


async def test_another_instance_finds_what_was_acknowledged(upstream: KcoordBroker, topic: str) -> None:
    async with Owner(upstream.bootstrap_servers, topic) as owner:
        await owner.served()
        assert await owner.put("a", 1) == "a=1"
        await owner.put("b", 2, shard_id=1)
    async with Owner(upstream.bootstrap_servers, topic) as successor:
        await successor.served()
        assert (successor.balance(0), successor.balance(1)) == ({"a": 1}, {"b": 2})


async def test_an_upstream_may_allow_short_transactions_only() -> None:
    with start_broker({"transaction.max.timeout.ms": "5000"}) as upstream:
        upstream.create_topic("short", 2, {"cleanup.policy": "compact"})
        async with Owner(upstream.bootstrap_servers, "short") as owner:
            await owner.served()
            assert await owner.put("a", 1) == "a=1"


async def test_the_older_of_two_owners_is_fenced_and_acknowledges_nothing(upstream: KcoordBroker, topic: str) -> None:
    async with Owner(upstream.bootstrap_servers, topic) as older:
        await older.served()
        await older.put("a", 1)
        async with Owner(upstream.bootstrap_servers, topic) as newer:
            await newer.served()
            with pytest.raises(KafkaError, match="NOT_COORDINATOR"):
                await older.put("a", 2)
            assert older.state() is ShardState.CLOSED
            assert await newer.put("b", 3) == "b=3"
            await older.lost()
            older.claim()
            await older.served()
            assert older.balance() == {"a": 1, "b": 3}
            with pytest.raises(KafkaError, match="NOT_COORDINATOR"):
                await newer.put("b", 4)


async def test_an_owner_without_a_lease_claims_and_appends_nothing(upstream: KcoordBroker, topic: str) -> None:
    async with Owner(upstream.bootstrap_servers, topic) as owner:
        await owner.served()
        await owner.put("a", 1)
        owner.has_lease = False
        upstream.clear_requests()
        waiting = asyncio.create_task(owner.put("a", 2))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        assert not upstream.requests("Produce")
        owner.log.revoke("the lease is over")
        with pytest.raises(KafkaError, match="NOT_COORDINATOR"):
            await waiting
        await asyncio.sleep(0.2)
        assert owner.state() is not ShardState.ACTIVE
        assert not upstream.requests("InitProducerId")
        owner.has_lease = True
        await owner.served()
        assert owner.balance() == {"a": 1}


async def test_an_answer_that_arrives_after_the_lease_acknowledges_nothing(upstream: KcoordBroker, topic: str) -> None:
    async with Owner(upstream.bootstrap_servers, topic) as owner:
        await owner.served()
        answered = owner.end_the_lease_at_the_next_answer()
        waiting = asyncio.create_task(owner.put("a", 1))
        await answered.wait()
        await asyncio.sleep(0.1)
        assert not waiting.done()
        owner.log.revoke("the lease is over")
        with pytest.raises(KafkaError, match="NOT_COORDINATOR"):
            await waiting
        owner.has_lease = True
        await owner.served()
        assert owner.balance() == {"a": 1}


async def test_appends_that_arrive_meanwhile_share_the_next_request(upstream: KcoordBroker, topic: str) -> None:
    async with Owner(upstream.bootstrap_servers, topic) as owner:
        await owner.served()
        await asyncio.gather(owner.put("a", 0, 0), owner.put("a", 0, 1))
        delayed = upstream.inject_fault("Produce", delay=0.8)
        before = len(upstream.requests("Produce"))
        first = asyncio.create_task(owner.put("a", 0))
        await asyncio.to_thread(delayed.wait)
        await asyncio.gather(*(owner.put(f"n{number}", number, number % 2) for number in range(100)))
        assert await first == "a=0"
        assert len(upstream.requests("Produce")) - before == 2


@pytest.mark.parametrize(
    "fault",
    [
        {"error": "NOT_LEADER_OR_FOLLOWER"},
        {"error": "NOT_ENOUGH_REPLICAS"},
        {"error": "REQUEST_TIMED_OUT", "after_handling": True},
        {"error": "NOT_ENOUGH_REPLICAS_AFTER_APPEND", "after_handling": True},
        {"close": True},
        {"close": True, "after_handling": True},
        {"drop": True, "after_handling": True},
    ],
    ids=str,
)
async def test_an_unknown_outcome_is_settled_by_repeating_the_request(
    upstream: KcoordBroker, topic: str, fault: dict[str, Any]
) -> None:
    async with Owner(upstream.bootstrap_servers, topic) as owner:
        await owner.served()
        injected = upstream.inject_fault("Produce", **fault)
        assert await owner.put("a", 1) == "a=1"
        assert injected.hits == 1
        assert await owner.put("a", 2) == "a=2", "the sequence numbers continue"
        assert owner.state() is ShardState.ACTIVE
    values = [record.value for record in upstream.records(topic) if record.key and b"a" in record.key[-12:]]
    assert len(values) == 2, "no batch is in the log twice"


async def test_an_append_without_an_answer_is_given_up_and_read_again(upstream: KcoordBroker, topic: str) -> None:
    async with Owner(upstream.bootstrap_servers, topic, write_timeout_ms=2_000) as owner:
        await owner.served()
        upstream.inject_fault("Produce", error="REQUEST_TIMED_OUT", after_handling=True, times=None)
        with pytest.raises(KafkaError, match="NOT_COORDINATOR"):
            await owner.put("a", 1)
        assert owner.state() is not ShardState.ACTIVE
        upstream.clear_faults()
        await owner.served()
        assert owner.balance() == {"a": 1}
        assert await owner.put("a", 2) == "a=2"


@pytest.mark.parametrize("error", ["OUT_OF_ORDER_SEQUENCE_NUMBER", "MESSAGE_TOO_LARGE", "TOPIC_AUTHORIZATION_FAILED"])
async def test_a_refusal_fails_the_shard_until_it_is_claimed_again(
    upstream: KcoordBroker, topic: str, error: str
) -> None:
    async with Owner(upstream.bootstrap_servers, topic) as owner:
        await owner.served()
        upstream.inject_fault("Produce", error=error)
        with pytest.raises(KafkaError, match="NOT_COORDINATOR"):
            await owner.put("a", 1)
        await owner.served()
        assert owner.balance() == {}
        assert await owner.put("a", 2) == "a=2"


async def test_an_expired_producer_is_claimed_again(upstream: KcoordBroker, topic: str) -> None:
    async with Owner(upstream.bootstrap_servers, topic) as owner:
        await owner.served()
        upstream.inject_fault("Produce", error="UNKNOWN_PRODUCER_ID")
        assert await owner.put("a", 1) == "a=1"
        assert len(upstream.requests("InitProducerId")) >= 3


async def test_transactional_batches_of_others_are_void(upstream: KcoordBroker, topic: str) -> None:
    async with Owner(upstream.bootstrap_servers, topic) as owner:
        await owner.served()
        await owner.put("a", 1)
        async with Producer(bootstrap_servers=upstream.bootstrap_servers, transactional_id=f"{topic}-z") as zombie:
            await zombie.init_transactions()
            await zombie.begin_transaction()
            key, value = CoordinatorSerde().serialize(entry("a", 99))
            await zombie.send(topic, value, key=key, partition=0)
            await zombie.commit_transaction()
        assert await owner.put("b", 2) == "b=2"
        assert owner.balance() == {"a": 1, "b": 2}
    async with Owner(upstream.bootstrap_servers, topic) as successor:
        await successor.served()
        assert successor.balance() == {"a": 1, "b": 2}


async def test_batches_of_others_end_the_ownership(upstream: KcoordBroker, topic: str) -> None:
    async with Owner(upstream.bootstrap_servers, topic) as owner:
        await owner.served()
        await owner.put("a", 1)
        async with Producer(bootstrap_servers=upstream.bootstrap_servers) as other:
            key, value = CoordinatorSerde().serialize(entry("a", 99))
            await other.send(topic, value, key=key, partition=0)
        with pytest.raises(KafkaError, match="NOT_COORDINATOR"):
            await owner.put("b", 2)


async def test_a_topic_that_was_deleted_stops_the_shard(upstream: KcoordBroker, topic: str) -> None:
    async with Owner(upstream.bootstrap_servers, topic, write_timeout_ms=2_000) as owner:
        await owner.served()
        await owner.put("a", 1)
        upstream.delete_topic(topic)
        with pytest.raises(KafkaError, match="NOT_COORDINATOR"):
            await owner.put("a", 2)
        with pytest.raises(KafkaError, match="COORDINATOR"):
            await owner.put("a", 3)
        upstream.create_topic(topic, 2, {"cleanup.policy": "compact"})
        await owner.served()
        assert owner.balance() == {}
        assert await owner.put("a", 4) == "a=4"


async def test_a_long_log_is_read_in_several_requests(upstream: KcoordBroker, topic: str) -> None:
    async with Owner(upstream.bootstrap_servers, topic) as owner:
        await owner.served()
        for turn in range(4):
            await asyncio.gather(*(owner.put("x" * 900 + str(number), turn) for number in range(900)))
    upstream.clear_requests()
    async with Owner(upstream.bootstrap_servers, topic) as successor:
        await successor.served()
        assert len(successor.balance()) == 900
        assert set(successor.balance().values()) == {3}
        assert len(upstream.requests("Fetch")) > 3


async def test_a_topic_that_takes_only_small_batches_is_refused_or_gets_a_warning(
    upstream: KcoordBroker, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"cleanup.policy": "compact", "message.timestamp.type": "LogAppendTime"}
    async with AdminClient(bootstrap_servers=upstream.bootstrap_servers) as admin:

        async def prepare(max_message_bytes: int) -> list[str]:
            upstream.create_topic(OFFSETS_TOPIC, 1, {**settings, "max.message.bytes": str(max_message_bytes)})
            caplog.clear()
            try:
                await prepare_topic(admin, OFFSETS_TOPIC, 1, 1 << 20)
            finally:
                (await admin.delete_topics([OFFSETS_TOPIC])).all()
            return [record.getMessage() for record in caplog.records if record.name == own_topics.__name__]

        with pytest.raises(StartError, match=r"has max\.message\.bytes=1000000\. Set it to at least 1048588"):
            await prepare(1_000_000)
        (warning,) = await prepare(1_048_588)
        assert "68157440 is large enough for every group" in warning
        assert not await prepare(68_157_440)
