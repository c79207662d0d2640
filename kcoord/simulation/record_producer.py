# SPDX-License-Identifier: Apache-2.0
"""A model of a producer of records, and helpers for Produce requests."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

from kcoord.simulation.client import RETRY_MS, Scene, SimulatedClient
from kcoord.simulation.ledger import FLUSHED_TOPIC, RECORD_PARTITIONS, RECORD_TOPICS, Attempt, Ledger, Place
from kcoord.simulation.promises import Promises
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors
from kcoord_protocol.messages import InitProducerIdRequest, InitProducerIdResponse, ProduceRequest, ProduceResponse
from kcoord_protocol.record_batch import Record, encode_batch

_INIT_VERSION: Final = 4
_VERSIONS: Final = (7, 11, 13)
_FIRST_VERSION_WITH_IDS: Final = 13
_LONGEST_REST_MS: Final = 1_500
_LAST_REST_MS: Final = 10_000
"""Longest rest once the producer has settled."""
_MOST_AT_A_TIME: Final = 3
_MOST_RECORDS: Final = 3
REFUSED: Final = frozenset(
    {
        Errors.UNKNOWN_TOPIC_OR_PARTITION,
        Errors.UNKNOWN_TOPIC_ID,
        Errors.NOT_LEADER_OR_FOLLOWER,
        Errors.KAFKA_STORAGE_ERROR,
    }
)
"""Errors after which a producer or a reader retries."""


def produce_request(
    place: Place, topic_id: bytes, batch: bytes, acks: int = -1, transactional_id: str | None = None
) -> ProduceRequest:
    data = ProduceRequest.PartitionProduceData(index=place.partition, records=batch)
    topic = ProduceRequest.TopicProduceData(name=place.topic, topic_id=topic_id, partition_data=[data])
    return ProduceRequest(transactional_id=transactional_id, acks=acks, timeout_ms=10_000, topic_data=[topic])


def produced(body: bytes, version: int) -> ProduceResponse.PartitionProduceResponse:
    return ProduceResponse.decode(body, version).responses[0].partition_responses[0]


@dataclass(slots=True)
class _Batch:
    place: Place
    values: list[bytes]
    sequence: int
    times_sent: int = 0


class RecordProducer(SimulatedClient):
    """An idempotent producer, or one that sends each value once.

    An idempotent producer writes to one partition, sends several batches without waiting, and sends batches that were
    not acknowledged again, in the same order. The other kind writes to random partitions and never retries.
    """

    def __init__(
        self,
        name: str,
        scene: Scene,
        promises: Promises,
        ledger: Ledger,
        *,
        is_idempotent: bool,
    ) -> None:
        super().__init__(name, scene)
        self._promises = promises
        self._ledger = ledger
        self._is_idempotent = is_idempotent
        self._version = self.random.choice(_VERSIONS)
        self._place = Place(FLUSHED_TOPIC, self.random.randrange(RECORD_PARTITIONS))
        """The partition of an idempotent producer."""
        self._producer = -1, -1
        self._sequence = 0
        self._lives = 0
        """Number of producer ids that it has had."""
        self._values = 0
        self._unanswered: deque[_Batch] = deque()
        self._bursts = 0
        self._goal = 0
        self._rest_number = 0

    def start(self) -> None:
        self._rest(0)

    def settle(self) -> None:
        self._goal = self._bursts + 2
        self._rest(0)

    def is_settled(self) -> bool:
        return self._bursts >= self._goal > 0

    def on_timeout(self) -> None:
        """Continues after a pause; an idempotent producer then sends its unacknowledged batches again, in order."""
        self._rest(RETRY_MS)

    def _rest(self, delay_ms: int) -> None:
        self._rest_number += 1
        number = self._rest_number
        self.clock.after(delay_ms, lambda: self._go_on() if number == self._rest_number else None)

    def _go_on(self) -> None:
        if self.is_waiting:
            return
        if self._is_idempotent and self._producer[0] < 0:
            self._init()
            return
        if not self._unanswered:
            for _ in range(self.random.randint(1, _MOST_AT_A_TIME)):
                self._make()
        for batch in list(self._unanswered):
            self._send(batch)
        if not self._is_idempotent:
            self._unanswered.clear()

    def _init(self) -> None:
        def on_answer(body: bytes) -> None:
            response = InitProducerIdResponse.decode(body, _INIT_VERSION)
            if response.error_code:
                self._rest(RETRY_MS)
                return
            self._producer, self._sequence = (response.producer_id, response.producer_epoch), 0
            self._lives += 1
            self._rest(1)

        request = InitProducerIdRequest(transactional_id=None, transaction_timeout_ms=0)
        self.request(ApiKey.INIT_PRODUCER_ID, _INIT_VERSION, "", request, on_answer)

    def _make(self) -> None:
        place = self._place
        if not self._is_idempotent:
            place = Place(self.random.choice(RECORD_TOPICS), self.random.randrange(RECORD_PARTITIONS))
        batch = _Batch(place, [], self._sequence if self._is_idempotent else -1)
        for _ in range(self.random.randint(1, _MOST_RECORDS)):
            value = f"{self.name}/{self._values}".encode()
            attempt = Attempt(place, copies=1)
            if self._is_idempotent:
                attempt.producer, attempt.sequence = f"{self.name}/{self._lives}", self._sequence
                self._sequence += 1
            self._ledger.attempt(value, attempt)
            batch.values.append(value)
            self._values += 1
        self._unanswered.append(batch)

    def _send(self, batch: _Batch) -> None:
        records = [Record(None, value, timestamp_ms=self.clock.now_ms) for value in batch.values]
        data = encode_batch(
            records, producer_id=self._producer[0], producer_epoch=self._producer[1], base_sequence=batch.sequence
        )
        topic_id = self._promises.topic_id(batch.place.topic) or bytes(16)
        version, power_losses = self._version, self._ledger.glance().power_losses

        def on_answer(body: bytes) -> None:
            answer = produced(body, version)
            self._answered(batch, answer.error_code, answer.base_offset, power_losses)

        batch.times_sent += 1
        request = produce_request(batch.place, topic_id, data, self.random.choice((1, -1)))
        copies = self.request(ApiKey.PRODUCE, version, "", request, on_answer, hears_both=True)
        if not self._is_idempotent:
            for value in batch.values:
                self._ledger.attempt(value, Attempt(batch.place, copies))

    def _answered(self, batch: _Batch, error: int, base_offset: int, power_losses: int) -> None:
        if not error:
            for offset, value in enumerate(batch.values, base_offset):
                self._ledger.acknowledge(batch.place, offset, value, power_losses)
            if batch in self._unanswered:
                self._unanswered.remove(batch)
        elif error == Errors.OUT_OF_ORDER_SEQUENCE_NUMBER and batch.sequence >= 0:
            self._out_of_order(batch)
        elif error not in REFUSED:
            raise self.unexpected(error, "of a record producer")
        if not self.is_waiting:
            self._bursts += not error
            longest_ms = _LONGEST_REST_MS if not self.is_settled() else _LAST_REST_MS
            self._rest(self.random.randint(1, longest_ms) if not error else RETRY_MS)

    def _out_of_order(self, batch: _Batch) -> None:
        """Handles OUT_OF_ORDER_SEQUENCE_NUMBER.

        A batch behind a failed one is rejected until the failed one is in the log; the producer just retries. The first
        unacknowledged batch is rejected if it is in the log already, later ones are behind it, and the broker has
        restarted: like Kafka, it then remembers only the last batch. The producer starts with another producer id.
        """
        if self._unanswered and batch is self._unanswered[0]:
            if batch.times_sent == 1:
                raise self.unexpected(Errors.OUT_OF_ORDER_SEQUENCE_NUMBER, "a batch that was never sent before")
            self._unanswered.clear()
            self._producer = -1, -1
