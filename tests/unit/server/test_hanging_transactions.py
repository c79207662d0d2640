# SPDX-License-Identifier: Apache-2.0
"""Transactions whose markers a power loss has taken are aborted, and no others."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from kcoord.runtime.result import Producer
from kcoord.server.shards.hanging_transactions import CHECK_MS
from kcoord.storage.memory_file_system import MemoryFileSystem, keep_everything
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.internal_topics import TRANSACTION_STATE_TOPIC
from kcoord_protocol.messages import (
    EndTxnRequest,
    InitProducerIdRequest,
    ListTransactionsRequest,
    ListTransactionsResponse,
    ProduceRequest,
)
from tests.unit.server import harness as harness_module
from tests.unit.server.harness import Harness, image_of, topic_id
from tests.unit.topics.helpers import batch_of

TOPIC = "t1"
TIMEOUT_MS = 60_000
TOPICS = {TOPIC: 1, TRANSACTION_STATE_TOPIC: 1}


@pytest.fixture(autouse=True)
def with_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    """The partition of the transaction coordinator exists from the start."""
    monkeypatch.setattr(harness_module, "TOPICS", TOPICS)


def lose_records(kind: str, path: str, pending: int) -> int:
    """Loses what is not durable of the topics' logs. The coordinator's log is durable by the journal."""
    return 0 if kind == "bytes" and path.endswith(".log") and "/t" in path else keep_everything(kind, path, pending)


async def started(file_system: MemoryFileSystem | None = None) -> Harness:
    harness = Harness(file_system=file_system)
    harness.broker.begin()
    await harness.broker.transactions.loaded()
    harness.broker.topics.producer_ids.add_block(0, 1_000)
    return harness


async def with_lost_marker() -> tuple[Harness, Producer]:
    """Returns a broker after a power loss that has taken the marker of a transaction, and its producer."""
    first = await started()
    producer = await initialized(first)
    await produce(first, producer)
    first.broker.topics.partition(TOPIC, 0).open(first.now).log.flush()
    await end(first, producer)
    assert offsets(first) == (2, 2)
    first.file_system.crash(lose_records)
    harness = await started(first.file_system)
    assert offsets(harness) == (0, 1), "the transaction is open again"
    return harness, producer


async def initialized(harness: Harness) -> Producer:
    init = InitProducerIdRequest(transactional_id="id", transaction_timeout_ms=TIMEOUT_MS)
    answer = await harness.call(init, 5)
    assert answer.error_code == 0
    return Producer(answer.producer_id, answer.producer_epoch)


async def produce(harness: Harness, producer: Producer) -> None:
    records = batch_of("value", producer=(*producer, 0), is_transactional=True)
    data = ProduceRequest.TopicProduceData(
        name=TOPIC,
        topic_id=topic_id(TOPIC),
        partition_data=[ProduceRequest.PartitionProduceData(index=0, records=records)],
    )
    request = ProduceRequest(transactional_id="id", acks=-1, timeout_ms=1_000, topic_data=[data])
    answer = await harness.call(request, 12)
    assert answer.responses[0].partition_responses[0].error_code == 0


async def end(harness: Harness, producer: Producer) -> None:
    request = EndTxnRequest(transactional_id="id", producer_id=producer[0], producer_epoch=producer[1], committed=True)
    assert (await harness.call(request, 5)).error_code == 0
    await asyncio.sleep(0.01)


def offsets(harness: Harness) -> tuple[int, int]:
    """Returns the last stable offset and the end of the log."""
    opened = harness.broker.topics.partition(TOPIC, 0).open(harness.now)
    return opened.last_stable_offset, opened.log.end_offset


async def pass_checks(harness: Harness, checks: int) -> None:
    """Lets the time of this number of checks pass."""
    for _ in range(checks):
        harness.now += CHECK_MS
        harness.broker.tick()
        await asyncio.sleep(0.01)


async def test_d15_a_transaction_without_its_marker_is_aborted() -> None:
    harness, _ = await with_lost_marker()
    await pass_checks(harness, 1)
    assert offsets(harness) == (0, 1), "one check is not enough"
    await pass_checks(harness, 1)
    assert offsets(harness) == (2, 2)
    opened = harness.broker.topics.partition(TOPIC, 0).open(harness.now)
    assert [transaction.first_offset for transaction in opened.producers.aborted] == [0]
    assert harness.broker.topics.unchanged_transactions() == []
    harness.folder.close(harness.now, clean=True)


async def test_a_transaction_that_its_coordinator_has_is_left_alone() -> None:
    first = await started()
    producer = await initialized(first)
    await produce(first, producer)
    first.file_system.crash(keep_everything)
    harness = await started(first.file_system)
    assert offsets(harness) == (0, 1)
    await pass_checks(harness, 4)
    assert offsets(harness) == (0, 1)
    await end(harness, producer)
    assert offsets(harness) == (2, 2)
    harness.folder.close(harness.now, clean=True)


async def test_a_producer_that_goes_on_ends_its_transaction_itself() -> None:
    harness, _ = await with_lost_marker()
    await pass_checks(harness, 1)
    producer = await initialized(harness)
    await produce(harness, producer)
    await pass_checks(harness, 4)
    assert offsets(harness) == (0, 2)
    await end(harness, producer)
    assert offsets(harness) == (3, 3)
    harness.folder.close(harness.now, clean=True)


@pytest.mark.parametrize("error", [Errors.NONE, Errors.COORDINATOR_LOAD_IN_PROGRESS])
async def test_the_coordinators_of_other_workers_are_asked(monkeypatch: pytest.MonkeyPatch, error: Errors) -> None:
    harness, producer = await with_lost_marker()
    asked: list[ListTransactionsRequest] = []
    state = ListTransactionsResponse.TransactionState(transactional_id="id", producer_id=producer.producer_id)
    answers = [
        ListTransactionsResponse(error_code=error),
        ListTransactionsResponse(transaction_states=[state]),
        ListTransactionsResponse(),
        ListTransactionsResponse(),
    ]

    class Peers:
        def ask(self, broker_id: int, request: object, version: int) -> asyncio.Future[ListTransactionsResponse]:
            assert (broker_id, version) == (2, 1)
            asked.append(cast("ListTransactionsRequest", request))
            future: asyncio.Future[ListTransactionsResponse] = asyncio.get_running_loop().create_future()
            future.set_result(answers[len(asked) - 1])
            return future

    elsewhere = image_of(TOPICS)
    elsewhere.topics[TRANSACTION_STATE_TOPIC].partitions[0].leader = 2
    monkeypatch.setattr(harness.broker.transactions, "_image", lambda: elsewhere)
    monkeypatch.setattr(harness.broker.transactions, "_peers", Peers())
    await pass_checks(harness, 3)
    assert offsets(harness) == (0, 1), "the last check was the first without the transaction"
    await pass_checks(harness, 1)
    assert offsets(harness) == (2, 2)
    assert asked[0].producer_id_filters == [producer.producer_id]
    assert asked[0].state_filters == ["Ongoing", "PrepareCommit", "PrepareAbort", "Dead", "PrepareEpochFence"]
    harness.folder.close(harness.now, clean=True)


async def test_nothing_is_aborted_while_a_coordinator_is_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    harness, _ = await with_lost_marker()

    def refuse(*arguments: object) -> None:
        raise KafkaError(Errors.COORDINATOR_LOAD_IN_PROGRESS)

    monkeypatch.setattr(harness.broker.transactions, "call_shard", refuse)
    await pass_checks(harness, 5)
    assert offsets(harness) == (0, 1)
    harness.folder.close(harness.now, clean=True)
