# SPDX-License-Identifier: Apache-2.0
"""Data of topics in a running broker: retention by time and size, DeleteRecords, and producer state after kill -9."""

from __future__ import annotations

import time

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from kcoord_protocol.errors import Errors
from kcoord_protocol.messages import InitProducerIdRequest, InitProducerIdResponse, ProduceRequest, ProduceResponse
from kcoord_protocol.record_batch import Record, encode_batch
from tests.integration.conftest import MakeServer
from tests.integration.wire import WireClient
from tests.support.kcoord_process import KcoordProcess
from tests.support.waiting import wait_until

TOPIC = "orders"
RECORD_BYTES = 100_000
RECORDS = 45
SEGMENT_BYTES = 1 << 20


def make_topic(server: KcoordProcess, **configs: str) -> None:
    admin = AdminClient({"bootstrap.servers": server.address})
    config = {key.replace("_", "."): value for key, value in configs.items()}
    admin.create_topics([NewTopic(TOPIC, 1, 1, config=config)])[TOPIC].result(20)


def fill(server: KcoordProcess, *, timestamp_ms: int | None = None) -> None:
    """Produces about four and a half segments, with one record per batch."""
    producer = Producer({"bootstrap.servers": server.address, "batch.num.messages": 1, "linger.ms": 0})
    for number in range(RECORDS):
        producer.produce(TOPIC, bytes(RECORD_BYTES), key=str(number), partition=0, timestamp=timestamp_ms or 0)
        producer.poll(0)
    assert producer.flush(30) == 0


def watermarks(server: KcoordProcess) -> tuple[int, int]:
    consumer = Consumer({"bootstrap.servers": server.address, "group.id": "watermarks"})
    try:
        low, high = consumer.get_watermark_offsets(TopicPartition(TOPIC, 0), timeout=10, cached=False)
        return low, high
    finally:
        consumer.close()


def test_retention_by_size(make_server: MakeServer) -> None:
    server = make_server(log_retention_check_interval_ms="200").start()
    make_topic(server, segment_bytes=str(SEGMENT_BYTES), retention_bytes=str(2 * SEGMENT_BYTES))
    fill(server)
    wait_until(lambda: watermarks(server)[0] > 0, "old segments are deleted")
    time.sleep(0.5)
    low, high = watermarks(server)
    assert high == RECORDS
    kept = (high - low) * RECORD_BYTES
    assert SEGMENT_BYTES <= kept < 4 * SEGMENT_BYTES
    server.kill()
    server.start()
    assert watermarks(server) == (low, high)


def test_retention_by_time(make_server: MakeServer) -> None:
    server = make_server(log_retention_check_interval_ms="200").start()
    make_topic(server, segment_bytes=str(SEGMENT_BYTES), retention_ms=str(60 * 60 * 1000))
    hour_ago_ms = time.time_ns() // 1_000_000 - 2 * 60 * 60 * 1000
    fill(server, timestamp_ms=hour_ago_ms)
    wait_until(lambda: watermarks(server) == (RECORDS, RECORDS), "everything is too old")
    fill(server)
    time.sleep(0.5)
    assert watermarks(server) == (RECORDS, 2 * RECORDS)


def test_deleted_records_stay_deleted_after_a_kill(server: KcoordProcess) -> None:
    make_topic(server, segment_bytes=str(SEGMENT_BYTES))
    fill(server)
    admin = AdminClient({"bootstrap.servers": server.address})
    place = TopicPartition(TOPIC, 0, 17)
    (deleted,) = admin.delete_records([place]).values()
    assert deleted.result(20).low_watermark == 17
    server.kill()
    server.start()
    assert watermarks(server) == (17, RECORDS)
    consumer = Consumer({"bootstrap.servers": server.address, "group.id": "g", "auto.offset.reset": "earliest"})
    consumer.assign([TopicPartition(TOPIC, 0, 3)])
    message = consumer.poll(20)
    assert message is not None
    assert (message.error(), message.offset(), message.key()) == (None, 17, b"17")
    consumer.close()


@pytest.mark.parametrize("ends", ["kill", "stop"])
def test_producer_state_survives_a_restart(server: KcoordProcess, ends: str) -> None:
    """A duplicate batch gets the same offset. A gap and an older epoch are rejected."""
    make_topic(server)
    with WireClient(server.port) as client:
        answer = client.call(
            InitProducerIdRequest(transactional_id=None, transaction_timeout_ms=-1), 4, InitProducerIdResponse
        )
        producer_id = answer.producer_id
        assert produce(client, producer_id, 1, 0) == (Errors.NONE, 0)
        assert produce(client, producer_id, 1, 1) == (Errors.NONE, 1)
    server.kill() if ends == "kill" else server.stop()
    server.start()
    with WireClient(server.port) as client:
        assert produce(client, producer_id, 1, 1) == (Errors.NONE, 1)
        assert produce(client, producer_id, 1, 5)[0] is Errors.OUT_OF_ORDER_SEQUENCE_NUMBER
        assert produce(client, producer_id, 0, 2)[0] is Errors.INVALID_PRODUCER_EPOCH
        assert produce(client, producer_id, 1, 2) == (Errors.NONE, 2)
    assert watermarks(server) == (0, 3)


def produce(client: WireClient, producer_id: int, epoch: int, sequence: int) -> tuple[Errors, int]:
    record = Record(b"key", b"value", [], time.time_ns() // 1_000_000, 0)
    data = encode_batch([record], producer_id=producer_id, producer_epoch=epoch, base_sequence=sequence)
    part = ProduceRequest.PartitionProduceData(index=0, records=data)
    topic = ProduceRequest.TopicProduceData(name=TOPIC, partition_data=[part])
    answer = client.call(ProduceRequest(acks=-1, timeout_ms=5000, topic_data=[topic]), 9, ProduceResponse)
    (partition,) = answer.responses[0].partition_responses
    return Errors(partition.error_code), partition.base_offset
