# SPDX-License-Identifier: Apache-2.0
"""Sends batches to the leaders of their partitions, retries them, and sets the result of each record.

Theory of operation. `_run` takes the batches that are ready, groups them by leader into requests, and starts a task per
request. It waits for the next batch to be ready, for a `wake`, or for an outcome.

A batch in flight has one of these outcomes:

- stored: the response has no error or DUPLICATE_SEQUENCE_NUMBER. The futures get their offsets.
- split: MESSAGE_TOO_LARGE. Two halves are sent instead.
- retried: a retriable error. The batch goes back to the head of its queue after a backoff, until `delivery_timeout_ms`.
- failed: any other error, or `delivery_timeout_ms` passed. The futures get the error.

Sequence numbers (without transactions): if a batch fails and may have been stored all the same, its sequence numbers
may be used. The sender then drops the producer id and gets a new one, since the broker would reject or misread the next
sequence. An error such as UNKNOWN_PRODUCER_ID means that the broker has lost the producer's state. Then the batch gets
a new producer id and is sent again. OUT_OF_ORDER_SEQUENCE_NUMBER fails the batch: it may have been stored already.

With transactions a failed batch makes the transaction abortable, and only the coordinator gives new epochs.
"""

from __future__ import annotations

import asyncio
import random
from typing import Final

from kcoord.client.api_versions import ApiVersions
from kcoord.client.backoff import Backoff
from kcoord.client.cluster import Cluster
from kcoord.client.config import ProducerConfig
from kcoord.client.errors import DisconnectException, TimeoutException, is_retriable
from kcoord.client.producer.batches import Accumulator, ProducerBatch, Sequences
from kcoord.client.producer.transactions import LAST_V1_PRODUCE, Transactions
from kcoord.client.results import error_of
from kcoord.client.tasks import Tasks, spawn, stop
from kcoord.client.types import RecordMetadata, TopicPartition
from kcoord_protocol.errors import EncodeError, Errors, KafkaError
from kcoord_protocol.messages import InitProducerIdRequest, InitProducerIdResponse, ProduceRequest, ProduceResponse
from kcoord_protocol.record_batch import Compression
from kcoord_protocol.uuid import ZERO_UUID

Batch = ProducerBatch[asyncio.Future[RecordMetadata]]

_FIRST_VERSION_WITH_TOPIC_IDS: Final = 13
_NO_OFFSET: Final = -1
# The broker has lost the producer's state, or has another state. Only a new producer id helps (KIP-360).
_SEQUENCE_LOST: Final = frozenset(
    {Errors.OUT_OF_ORDER_SEQUENCE_NUMBER, Errors.UNKNOWN_PRODUCER_ID, Errors.INVALID_PRODUCER_EPOCH}
)


class Sender:
    """The task that looks for ready batches, and one task per request in flight."""

    def __init__(
        self,
        cluster: Cluster,
        config: ProducerConfig,
        accumulator: Accumulator[asyncio.Future[RecordMetadata]],
        sequences: Sequences,
        transactions: Transactions | None,
    ) -> None:
        self._cluster = cluster
        self._config = config
        self._accumulator = accumulator
        self._sequences = sequences
        self._transactions = transactions
        self._backoff = Backoff(config.retry_backoff_ms, config.retry_backoff_max_ms)
        self._compression = Compression[config.compression_type.upper()]
        self._wake = asyncio.Event()
        self._progress = asyncio.Event()
        self._requests = Tasks()
        self._is_preparing = False
        self._loop_task: asyncio.Task[None] | None = None

    @staticmethod
    def now_ms() -> float:
        return asyncio.get_running_loop().time() * 1000

    def start(self) -> None:
        self._loop_task = spawn(self._run(), "kcoord producer")

    async def stop(self) -> None:
        """Ends the tasks. Records without a result fail."""
        await stop([self._loop_task])
        await self._requests.stop()
        for batch in self._accumulator.drain():
            self._report(batch, DisconnectException("the producer was closed before the record was sent"))
        self._moved_on()

    def wake(self) -> None:
        """Makes the task look for ready batches, after an append or at a flush."""
        self._wake.set()

    @property
    def is_idle(self) -> bool:
        """Whether no batch is left, and no request of the sender to the transaction coordinator is in flight."""
        return not self._is_preparing and not self._accumulator.pending()

    async def progressed(self) -> None:
        """Waits until a batch has an outcome."""
        await self._progress.wait()

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            now_ms = self.now_ms()
            for batch in self._accumulator.expired(now_ms - self._config.delivery_timeout_ms):
                self._expire(batch)
            ready = self._accumulator.ready(now_ms)
            if ready:
                await self._send_ready(ready)
            due_ms = self._accumulator.next_due_ms()
            left = None if due_ms is None else max(due_ms - self.now_ms(), 0.5) / 1000
            try:
                async with asyncio.timeout(left):
                    await self._wake.wait()
            except TimeoutError:
                continue

    async def _send_ready(self, ready: list[TopicPartition]) -> None:
        self._is_preparing = True
        try:
            await self._prepare(ready)
        except KafkaError as error:
            for partition in self._accumulator.waiting(ready):
                self._failed(self._accumulator.take(partition), error)
            return
        finally:
            self._is_preparing = False
            self._moved_on()
        by_leader: dict[int, list[Batch]] = {}
        for partition in self._accumulator.waiting(ready):
            leader = self._cluster.metadata.leader(partition)
            batch = self._accumulator.take(partition)
            if leader is None:
                self._failed(batch, KafkaError(Errors.LEADER_NOT_AVAILABLE, str(partition)))
            else:
                by_leader.setdefault(leader, []).append(batch)
        for leader, batches in by_leader.items():
            for group in self._by_request_size(batches):
                self._requests.add(spawn(self._send(leader, group), "kcoord produce"))

    def _by_request_size(self, batches: list[Batch]) -> list[list[Batch]]:
        """Groups batches into requests of at most `max_request_size`, with at least one batch each."""
        requests: list[list[Batch]] = []
        size = 0
        for batch in batches:
            if not requests or size + batch.size_bytes > self._config.max_request_size:
                requests.append([])
                size = 0
            requests[-1].append(batch)
            size += batch.size_bytes
        return requests

    async def _prepare(self, ready: list[TopicPartition]) -> None:
        """Fetches missing leaders and gets a producer id, or adds the partitions to the transaction."""
        unknown = {partition.topic for partition in ready if self._cluster.metadata.leader(partition) is None}
        if unknown:
            await self._cluster.refresh_metadata(unknown)
        if self._transactions is not None:
            partitions = self._accumulator.waiting(ready)
            await self._transactions.add_partitions(self._cluster.deadline(self._config.max_block_ms), partitions)
        elif self._config.enable_idempotence and not self._sequences.is_ready:
            await self._get_producer_id()

    async def _get_producer_id(self) -> None:
        request = InitProducerIdRequest(
            transactional_id=None, transaction_timeout_ms=self._config.transaction_timeout_ms
        )
        answer = await self._cluster.call_any(request, InitProducerIdResponse)
        if answer.error_code:
            raise KafkaError(error_of(answer.error_code), "InitProducerId")
        self._sequences.reset(answer.producer_id, answer.producer_epoch)

    async def _send(self, leader: int, batches: list[Batch]) -> None:
        try:
            answers = await self._request(leader, batches)
        except KafkaError as error:
            for batch in batches:
                self._failed(batch, error)
            return
        for batch in batches:
            self._answered(batch, answers)

    async def _request(
        self, leader: int, batches: list[Batch]
    ) -> dict[TopicPartition, ProduceResponse.PartitionProduceResponse] | None:
        connection = await self._cluster.connection(leader)
        if self._config.enable_idempotence:
            if not self._sequences.is_ready:
                # Another batch has dropped the producer id since `_prepare`.
                await self._get_producer_id()
            for batch in batches:
                self._sequences.assign(batch)
        version = self._version(connection.versions, batches)
        request = self._produce_request(batches, version)
        if self._config.required_acks == 0:
            await connection.send_unanswered(request, highest=version)
            return None
        # An error in another response may remove the topic from the metadata before this response arrives.
        names = {topic.topic_id: topic.name for topic in request.topic_data}
        answer = await connection.call_version(request, ProduceResponse, version)
        return {
            TopicPartition(topic.name or names.get(topic.topic_id, ""), partition.index): partition
            for topic in answer.responses
            for partition in topic.partition_responses
        }

    def _version(self, versions: ApiVersions, batches: list[Batch]) -> int:
        """Returns the version of a Produce request.

        Versions from 12 on use the second transaction protocol (KIP-890). Versions from 13 on identify topics by id, so
        all ids must be known.
        """
        highest: int | None = None
        if self._transactions is not None and not self._transactions.is_v2:
            highest = LAST_V1_PRODUCE
        elif any(self._cluster.metadata.topic_id(batch.partition.topic) == ZERO_UUID for batch in batches):
            highest = _FIRST_VERSION_WITH_TOPIC_IDS - 1
        return versions.choose(ProduceRequest, 3, highest)

    def _produce_request(self, batches: list[Batch], version: int) -> ProduceRequest:
        topics: dict[str, list[ProduceRequest.PartitionProduceData]] = {}
        is_transactional = self._transactions is not None
        for batch in batches:
            try:
                records = batch.encode(self._compression, is_transactional)
            except (EncodeError, TypeError, ValueError) as error:
                text = f"{batch.partition}: the batch cannot be encoded: {error}"
                raise KafkaError(Errors.INVALID_RECORD, text) from error
            data = ProduceRequest.PartitionProduceData(index=batch.partition.partition, records=records)
            topics.setdefault(batch.partition.topic, []).append(data)
        return ProduceRequest(
            transactional_id=self._transactions.transactional_id if self._transactions is not None else None,
            acks=self._config.required_acks,
            timeout_ms=self._config.request_timeout_ms,
            topic_data=[
                ProduceRequest.TopicProduceData(
                    name=name, topic_id=self._cluster.metadata.topic_id(name), partition_data=data
                )
                for name, data in topics.items()
            ],
        )

    # Outcomes of a batch.

    def _answered(
        self, batch: Batch, answers: dict[TopicPartition, ProduceResponse.PartitionProduceResponse] | None
    ) -> None:
        if answers is None:
            self._stored(batch, _NO_OFFSET, -1)
            return
        answer = answers.get(batch.partition)
        if answer is None:
            self._failed(
                batch, KafkaError(Errors.UNKNOWN_SERVER_ERROR, f"the response does not have {batch.partition}")
            )
        elif answer.error_code in (Errors.NONE, Errors.DUPLICATE_SEQUENCE_NUMBER):
            self._stored(batch, answer.base_offset, answer.log_append_time_ms)
        elif answer.error_code == Errors.MESSAGE_TOO_LARGE and len(batch.records) > 1:
            self._accumulator.split(batch)
            self._moved_on()
        else:
            self._failed(batch, KafkaError(error_of(answer.error_code), self._message(answer)))

    @staticmethod
    def _message(answer: ProduceResponse.PartitionProduceResponse) -> str | None:
        texts = [error.batch_index_error_message for error in answer.record_errors if error.batch_index_error_message]
        return "; ".join([*([answer.error_message] if answer.error_message else []), *texts]) or None

    def _stored(self, batch: Batch, base_offset: int, log_append_time_ms: int) -> None:
        if self._config.enable_idempotence:
            self._sequences.stored(batch)
        for index, (record, future) in enumerate(zip(batch.records, batch.done, strict=True)):
            if not future.done():
                offset = base_offset + index if base_offset >= 0 else None
                time_ms = log_append_time_ms if log_append_time_ms >= 0 else record.timestamp_ms
                future.set_result(RecordMetadata(*batch.partition, offset, time_ms))
        self._finished(batch)

    def _failed(self, batch: Batch, error: KafkaError) -> None:
        """Retries the batch later, or fails its records."""
        if is_retriable(error) or (error.error in _SEQUENCE_LOST and self._transactions is None):
            if error.error is not Errors.REQUEST_TIMED_OUT:
                self._cluster.metadata.topics.pop(batch.partition.topic, None)
            if error.error in _SEQUENCE_LOST and not self._renumber(batch, error):
                self._give_up(batch, error)
                return
            if self.now_ms() - batch.created_ms < self._config.delivery_timeout_ms:
                delay_ms = self._backoff.delay_ms(batch.attempts + 1, random.random())
                self._accumulator.put_back(batch, self.now_ms() + delay_ms)
                self._moved_on()
                return
            error = self._timed_out(batch, str(error))
        self._give_up(batch, error)

    def _renumber(self, batch: Batch, error: KafkaError) -> bool:
        """Drops the producer id of the batch. Returns whether the batch may be sent again under a new one.

        After OUT_OF_ORDER_SEQUENCE_NUMBER it may not: it could have been stored under the old id.
        """
        if (batch.producer_id, batch.producer_epoch) == (self._sequences.producer_id, self._sequences.producer_epoch):
            self._sequences.reset()
        batch.base_sequence = -1
        return error.error is not Errors.OUT_OF_ORDER_SEQUENCE_NUMBER

    def _timed_out(self, batch: Batch, cause: str) -> KafkaError:
        return TimeoutException(
            f"{batch.partition}: {len(batch.records)} records not delivered within "
            f"{self._config.delivery_timeout_ms} ms: {cause}"
        )

    def _expire(self, batch: Batch) -> None:
        """Fails a batch whose `delivery_timeout_ms` passed in the queue.

        If it was sent before, it may be stored, so its sequence numbers cannot be used again.
        """
        if batch.attempts and batch.base_sequence >= 0 and self._transactions is None:
            self._sequences.reset()
        self._report(batch, self._timed_out(batch, "it was not sent again"))

    def _give_up(self, batch: Batch, error: KafkaError) -> None:
        # An earlier attempt may have stored the batch, even if the last one was rejected.
        may_be_stored = error.error.retriable or (batch.attempts and batch.base_sequence >= 0)
        if may_be_stored and self._transactions is None:
            self._sequences.reset()
        self._report(batch, error)
        self._finished(batch)

    def _report(self, batch: Batch, error: KafkaError) -> None:
        if self._transactions is not None:
            self._transactions.fail_batch(error)
        self._fail_futures(batch, error)
        self._moved_on()

    @staticmethod
    def _fail_futures(batch: Batch, error: BaseException) -> None:
        for future in batch.done:
            if not future.done():
                future.set_exception(error)
                # Marks the exception as retrieved. Otherwise asyncio warns of records whose future nobody awaits.
                future.exception()

    def fail_unsent(self, error: BaseException) -> None:
        """Fails all records that were never sent, because their transaction is aborted.

        A batch that waits for a retry stays. The outcome of the retry decides which sequence number is the next.
        """
        for batch in self._accumulator.drain_unsent():
            self._fail_futures(batch, error)
        self._moved_on()

    def _finished(self, batch: Batch) -> None:
        self._accumulator.finished(batch)
        self._moved_on()

    def _moved_on(self) -> None:
        self._wake.set()
        self._progress.set()
        self._progress = asyncio.Event()
