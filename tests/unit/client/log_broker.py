# SPDX-License-Identifier: Apache-2.0
"""A broker that stores produced records by the rules of KIP-98, and that has faults on demand."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from kcoord.client.types import TopicPartition
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors
from kcoord_protocol.message import Message
from kcoord_protocol.messages import (
    InitProducerIdRequest,
    InitProducerIdResponse,
    ProduceRequest,
    ProduceResponse,
)
from kcoord_protocol.record_batch import BatchHeader, Record, decode_header, decode_records
from tests.unit.client.fake_broker import Answer, FakeBroker

TOPIC, TOPIC_ID = "t", b"T" * 16
LOST_REQUEST, LOST_ANSWER = "lost request", "lost answer"
STORED = "stored, then "
_SEQUENCES = 1 << 31


@dataclass
class Partition:
    """The log of a partition.

    `producers` maps producer ids to their epoch and their batches (first sequence, size, offset).
    """

    values: list[bytes | None] = field(default_factory=list)
    batches: list[tuple[BatchHeader, list[Record]]] = field(default_factory=list)
    producers: dict[int, tuple[int, list[tuple[int, int, int]]]] = field(default_factory=dict)


class LogBroker(FakeBroker):
    """A broker whose Produce requests have faults.

    Each request takes the next of the `fates`. The request or its response is lost, or its first partition gets the
    error of that name. With `STORED` before the name the batch is stored all the same. Without a fate there is no
    fault.
    """

    def __init__(self, partitions: int = 2, fates: Iterable[str] = (), /, **versions: tuple[int, int]) -> None:
        super().__init__({ApiKey.PRODUCE: self._produce, ApiKey.INIT_PRODUCER_ID: self._init_producer_id}, **versions)
        self.add_topic(TOPIC, TOPIC_ID, [-1] * partitions)
        self.logs = {TopicPartition(TOPIC, index): Partition() for index in range(partitions)}
        self.fates = deque(fates)
        self.log_append_time_ms = -1
        self._last_producer_id = 100

    def values(self, index: int) -> list[str]:
        return [(value or b"").decode() for value in self.logs[TopicPartition(TOPIC, index)].values]

    def produced(self) -> list[ProduceRequest]:
        return [request for request in self.requests_of(ApiKey.PRODUCE) if isinstance(request, ProduceRequest)]

    def _init_producer_id(self, request: Message, version: int) -> Answer:
        assert isinstance(request, InitProducerIdRequest)
        self._last_producer_id += 1
        return InitProducerIdResponse(producer_id=self._last_producer_id, producer_epoch=0)

    def _produce(self, request: Message, version: int) -> Answer:
        assert isinstance(request, ProduceRequest)
        fate = self.fates.popleft() if self.fates else ""
        if fate == LOST_REQUEST:
            self.hang_up()
            return None
        topics = []
        for topic in request.topic_data:
            assert topic.name == TOPIC or topic.topic_id == TOPIC_ID
            answers = []
            for data in topic.partition_data:
                partition = TopicPartition(TOPIC, data.index)
                answers.append(self._append(partition, bytes(data.records or b""), fate.removeprefix(LOST_ANSWER)))
                fate = fate if fate == LOST_ANSWER else ""
            topics.append(
                ProduceResponse.TopicProduceResponse(
                    name=topic.name, topic_id=topic.topic_id, partition_responses=answers
                )
            )
        if fate == LOST_ANSWER:
            self.hang_up()
            return None
        return ProduceResponse(responses=topics) if request.acks else None

    def _append(self, partition: TopicPartition, data: bytes, fate: str) -> ProduceResponse.PartitionProduceResponse:
        answer = ProduceResponse.PartitionProduceResponse(index=partition.partition, base_offset=-1)
        header, records = decode_header(data), decode_records(data)
        log = self.logs[partition]
        offset = self._stored_before(log, header, len(records))
        if offset is None:
            error = self._refusal(log, header, len(records), fate)
            if error:
                answer.error_code = error
                return answer
            offset = self._store(log, header, records)
        if fate.startswith(STORED):
            answer.error_code = Errors[fate.removeprefix(STORED)]
        else:
            answer.base_offset, answer.log_append_time_ms = offset, self.log_append_time_ms
        return answer

    def _stored_before(self, log: Partition, header: BatchHeader, count: int) -> int | None:
        epoch, batches = log.producers.get(header.producer_id, (-1, []))
        if header.producer_id < 0 or epoch != header.producer_epoch:
            return None
        return next((offset for first, size, offset in batches if (first, size) == (header.base_sequence, count)), None)

    def _refusal(self, log: Partition, header: BatchHeader, count: int, fate: str) -> Errors:
        if fate and not fate.startswith(STORED):
            if fate == Errors.UNKNOWN_PRODUCER_ID.name:
                log.producers.pop(header.producer_id, None)
            # A batch of one record cannot become smaller.
            return Errors.NONE if fate == Errors.MESSAGE_TOO_LARGE.name and count == 1 else Errors[fate]
        if header.producer_id < 0:
            return Errors.NONE
        epoch, batches = log.producers.get(header.producer_id, (header.producer_epoch, []))
        if header.producer_epoch < epoch:
            return Errors.INVALID_PRODUCER_EPOCH
        expected = 0
        if batches and header.producer_epoch == epoch:
            first, size, _ = batches[-1]
            expected = (first + size) % _SEQUENCES
        return Errors.NONE if header.base_sequence == expected else Errors.OUT_OF_ORDER_SEQUENCE_NUMBER

    def _store(self, log: Partition, header: BatchHeader, records: list[Record]) -> int:
        offset = len(log.values)
        log.values += [record.value for record in records]
        log.batches.append((header, records))
        if header.producer_id >= 0:
            epoch, batches = log.producers.get(header.producer_id, (header.producer_epoch, []))
            batches = batches if epoch == header.producer_epoch else []
            batches.append((header.base_sequence, len(records), offset))
            log.producers[header.producer_id] = header.producer_epoch, batches
        return offset
