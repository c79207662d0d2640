# SPDX-License-Identifier: Apache-2.0
"""The class Producer."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Final, Self, Unpack

from kcoord.client.cluster import Cluster, Deadline
from kcoord.client.config import ProducerConfig, ProducerOptions, make_config
from kcoord.client.errors import (
    IllegalStateException,
    RecordTooLargeException,
    TimeoutException,
    TransactionAbortedException,
)
from kcoord.client.offset_messages import offsets_to_commit
from kcoord.client.producer.batches import Accumulator, Sequences, record_size
from kcoord.client.producer.partitioner import StickyPartitions, partition_for_key
from kcoord.client.producer.sender import Sender
from kcoord.client.producer.transactions import ProducerTransactionState, Transactions
from kcoord.client.tasks import to_the_end
from kcoord.client.types import ConsumerGroupMetadata, OffsetAndMetadata, RecordMetadata, TopicPartition
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.record_batch import BATCH_OVERHEAD_BYTES, Record

Headers = Sequence[tuple[str, bytes | str | None]]

_LOWEST_TIME_MS: Final = -(1 << 63)
_HIGHEST_TIME_MS: Final = (1 << 63) - 1


class Producer:
    """Sends records in batches, in order per partition.

    With `enable_idempotence` each record is stored once, even after retries. With a `transactional_id` records and
    offsets are committed together. Use the producer with `async with`, or call `start` and `close`.
    """

    def __init__(self, config: ProducerConfig | None = None, **options: Unpack[ProducerOptions]) -> None:
        self._config = make_config(ProducerConfig, config, options)
        self._cluster = Cluster(self._config)
        self._accumulator: Accumulator[asyncio.Future[RecordMetadata]] = Accumulator(
            self._config.batch_size, self._config.linger_ms
        )
        self._sequences = Sequences()
        self._sticky = StickyPartitions(random.random)
        self._transactions: Transactions | None = None
        if self._config.transactional_id is not None:
            self._transactions = Transactions(
                self._cluster, self._sequences, self._config.transactional_id, self._config.transaction_timeout_ms
            )
        self._sender = Sender(self._cluster, self._config, self._accumulator, self._sequences, self._transactions)
        self._is_open = False

    async def start(self) -> None:
        """Connects to the cluster and starts to send. Raises TimeoutException if no broker responds."""
        if self._is_open:
            raise IllegalStateException("the producer is started already")
        await self._cluster.start(self._cluster.deadline())
        self._cluster.keep_metadata_fresh()
        self._sender.start()
        self._is_open = True

    async def close(self, *, timeout_ms: int | None = None) -> None:
        """Sends the buffered records and closes. Aborts an open transaction. Records not sent in time fail."""
        try:
            if self._is_open:
                self._is_open = False
                await self._close_gracefully(self._cluster.deadline(timeout_ms))
        finally:
            await to_the_end(self._stop())

    async def _stop(self) -> None:
        await self._sender.stop()
        await self._cluster.close()

    async def _close_gracefully(self, deadline: Deadline) -> None:
        transactions = self._transactions
        open_states = (ProducerTransactionState.IN_TRANSACTION, ProducerTransactionState.ABORTABLE_ERROR)
        try:
            if transactions is not None and transactions.state in open_states:
                await self._abort(deadline)
            await self._flush(deadline)
        except KafkaError:
            # The future of each record has its own error.
            return

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # Records.

    async def send(
        self,
        topic: str,
        value: bytes | str | None = None,
        key: bytes | str | None = None,
        *,
        partition: int | None = None,
        timestamp_ms: int | None = None,
        headers: Headers = (),
    ) -> asyncio.Future[RecordMetadata]:
        """Appends a record to the buffer. The future has the record's partition and offset, or its error.

        Waits up to `max_block_ms` for the topic's metadata and for room in the buffer. Text is encoded as UTF-8. Raises
        RecordTooLargeException, or IllegalStateException if the producer is not in a state to send.
        """
        self._check_may_send()
        deadline = self._cluster.deadline(self._config.max_block_ms)
        if partition is not None and not isinstance(partition, int):
            raise TypeError(f"partition: {partition!r} is not a whole number")
        if partition is not None and partition < 0:
            raise ValueError(f"partition: {partition} must not be negative")
        # Without the check a number such as time.time() * 1000 would fail later, when the batch is sent.
        if timestamp_ms is not None and not isinstance(timestamp_ms, int):
            raise TypeError(f"timestamp_ms: {timestamp_ms!r} is not a whole number")
        if timestamp_ms is not None and not _LOWEST_TIME_MS <= timestamp_ms <= _HIGHEST_TIME_MS:
            raise ValueError(f"timestamp_ms: {timestamp_ms} does not fit in a record")
        key_bytes, value_bytes = _to_bytes("key", key), _to_bytes("value", value)
        now_ms = self._cluster.wall_clock_ms() if timestamp_ms is None else timestamp_ms
        header_bytes = [(name, _to_bytes(f"header {name}", data)) for name, data in headers]
        record = Record(key_bytes, value_bytes, header_bytes, now_ms)
        size = record_size(record)
        self._check_size(size)
        counts = await self._partitions_of(topic, partition, deadline)
        await self._wait_for_room(size, deadline)
        self._check_may_send()
        chosen = partition if partition is not None else self._choose(topic, key_bytes, counts)
        future: asyncio.Future[RecordMetadata] = asyncio.get_running_loop().create_future()
        if self._accumulator.append(TopicPartition(topic, chosen), record, future, self._sender.now_ms()):
            self._sticky.batch_closed(topic, chosen, self._available(topic))
        self._sender.wake()
        return future

    async def send_and_wait(
        self,
        topic: str,
        value: bytes | str | None = None,
        key: bytes | str | None = None,
        *,
        partition: int | None = None,
        timestamp_ms: int | None = None,
        headers: Headers = (),
    ) -> RecordMetadata:
        """Sends a record and waits until it is stored."""
        return await (
            await self.send(topic, value, key, partition=partition, timestamp_ms=timestamp_ms, headers=headers)
        )

    async def flush(self, *, timeout_ms: int | None = None) -> None:
        """Sends buffered records at once. Returns when each of them is stored or has failed."""
        self._check_open()
        await self._flush(self._cluster.deadline(timeout_ms))

    async def partitions_for(self, topic: str) -> list[int]:
        """Returns the partitions of a topic. May create the topic, if the broker allows it."""
        self._check_open()
        return sorted(await self._partitions_of(topic, None, self._cluster.deadline(self._config.max_block_ms)))

    async def _flush(self, deadline: Deadline) -> None:
        """Waits for the batches, not for the futures: the application may have cancelled those."""
        last_number = self._accumulator.last_number
        self._accumulator.flushing += 1
        self._sender.wake()
        try:
            async with asyncio.timeout(max(deadline.left_ms(), 0) / 1000):
                while self._accumulator.pending(last_number):
                    await self._sender.progressed()
        except TimeoutError:
            count = sum(len(batch.records) for batch in self._accumulator.pending(last_number))
            raise TimeoutException(f"flush: {count} records not sent within {deadline.timeout_ms:g} ms") from None
        finally:
            self._accumulator.flushing -= 1

    def _check_open(self) -> None:
        if not self._is_open:
            raise IllegalStateException("the producer is not started, or closed")

    def _check_may_send(self) -> None:
        self._check_open()
        if self._transactions is not None:
            self._transactions.check(ProducerTransactionState.IN_TRANSACTION)

    def _check_size(self, size: int) -> None:
        if size + BATCH_OVERHEAD_BYTES > self._config.max_request_size:
            limit = self._config.max_request_size
            raise RecordTooLargeException(f"a record of {size} bytes exceeds max_request_size ({limit} bytes)")
        if size > self._config.buffer_memory:
            limit = self._config.buffer_memory
            raise RecordTooLargeException(f"a record of {size} bytes exceeds buffer_memory ({limit} bytes)")

    async def _partitions_of(self, topic: str, partition: int | None, deadline: Deadline) -> Sequence[int]:
        """Returns all partitions of the topic. Fetches metadata, which may create the topic, until it has them."""
        partitions = self._known_partitions(topic)
        if partitions and (partition is None or partition in partitions):
            return partitions

        async def attempt() -> Sequence[int]:
            await self._cluster.refresh_metadata([topic], allow_auto_topic_creation=True)
            partitions = self._known_partitions(topic)
            error = self._cluster.metadata.topic_error(topic)
            if error:
                raise KafkaError(error, topic)
            if not partitions or (partition is not None and partition not in partitions):
                what = topic if partition is None else f"{topic}-{partition}"
                raise KafkaError(Errors.UNKNOWN_TOPIC_OR_PARTITION, what)
            return partitions

        return await self._cluster.retry(f"metadata of {topic}", deadline, attempt)

    def _known_partitions(self, topic: str) -> Sequence[int]:
        metadata = self._cluster.metadata.topics.get(topic)
        return sorted(metadata.partitions) if metadata is not None else ()

    def _available(self, topic: str) -> list[int]:
        partitions = self._known_partitions(topic)
        return [
            partition
            for partition in partitions
            if self._cluster.metadata.leader(TopicPartition(topic, partition)) is not None
        ]

    def _choose(self, topic: str, key: bytes | None, partitions: Sequence[int]) -> int:
        if key is not None and not self._config.partitioner_ignore_keys:
            return partition_for_key(key, len(partitions))
        return self._sticky.partition(topic, self._available(topic) or partitions)

    async def _wait_for_room(self, size: int, deadline: Deadline) -> None:
        while self._accumulator.buffered_bytes + size > self._config.buffer_memory:
            try:
                async with asyncio.timeout(max(deadline.left_ms(), 0) / 1000):
                    await self._sender.progressed()
            except TimeoutError:
                raise TimeoutException(f"no room in the buffer within {deadline.timeout_ms:g} ms") from None
            self._check_open()

    # Transactions.

    def _transaction(self) -> Transactions:
        self._check_open()
        if self._transactions is None:
            raise IllegalStateException("the producer has no transactional_id")
        return self._transactions

    async def init_transactions(self, *, timeout_ms: int | None = None) -> None:
        """Takes over the transactional id: fences its earlier producers and ends their open transaction.

        Call it once, before the first transaction.
        """
        deadline = self._cluster.deadline(self._config.max_block_ms if timeout_ms is None else timeout_ms)
        await self._transaction().initialize(deadline)

    async def begin_transaction(self) -> None:
        """Begins a transaction. Sends no request."""
        self._transaction().begin()

    async def send_offsets_to_transaction(
        self, offsets: Mapping[TopicPartition, OffsetAndMetadata], group: ConsumerGroupMetadata
    ) -> None:
        """Adds offsets of a consumer (`Consumer.group_metadata`) to the transaction, which commits them."""
        checked = offsets_to_commit(offsets)
        await self._transaction().send_offsets(self._cluster.deadline(self._config.max_block_ms), checked, group)

    async def commit_transaction(self, *, timeout_ms: int | None = None) -> None:
        """Sends the buffered records and commits the transaction.

        Raises the error of a record that failed; then call `abort_transaction`. After a TimeoutException the
        transaction may or may not be committed, and the application may call this again.
        """
        transaction = self._transaction()
        transaction.check(ProducerTransactionState.IN_TRANSACTION, ProducerTransactionState.ENDING)
        deadline = self._cluster.deadline(self._config.max_block_ms if timeout_ms is None else timeout_ms)
        await self._drain(deadline)
        transaction.check(ProducerTransactionState.IN_TRANSACTION, ProducerTransactionState.ENDING)
        transaction.state = ProducerTransactionState.ENDING
        try:
            await transaction.end(deadline, committed=True)
        except TimeoutException:
            raise
        except KafkaError as error:
            transaction.fail(error)
            raise

    async def abort_transaction(self, *, timeout_ms: int | None = None) -> None:
        """Aborts the transaction. Drops records that were not sent. Readers of committed records skip the others.

        After a TimeoutException the transaction may or may not be aborted. The application can only call this again.
        """
        deadline = self._cluster.deadline(self._config.max_block_ms if timeout_ms is None else timeout_ms)
        self._transaction().check(ProducerTransactionState.IN_TRANSACTION, ProducerTransactionState.ABORTABLE_ERROR)
        await self._abort(deadline)

    async def _drain(self, deadline: Deadline) -> None:
        """Waits until no batch and no added partition is left, since they would be part of the next transaction.

        So records count that another task sends meanwhile, and those whose future was cancelled.
        """
        self._accumulator.flushing += 1
        self._sender.wake()
        try:
            async with asyncio.timeout(max(deadline.left_ms(), 0) / 1000):
                while not self._sender.is_idle:
                    await self._sender.progressed()
        except TimeoutError:
            raise TimeoutException(f"records of the transaction not sent within {deadline.timeout_ms:g} ms") from None
        finally:
            self._accumulator.flushing -= 1

    async def _abort(self, deadline: Deadline) -> None:
        assert self._transactions is not None
        self._transactions.begin_abort()
        self._sender.fail_unsent(TransactionAbortedException("the transaction was aborted"))
        await self._drain(deadline)
        await self._transactions.end(deadline, committed=False)


def _to_bytes(name: str, data: object) -> bytes | None:
    """Returns the bytes of a part of a record. Raises TypeError for an object that has to be serialized first."""
    if data is None or isinstance(data, bytes):
        return data
    if isinstance(data, str):
        return data.encode()
    if isinstance(data, bytearray | memoryview):
        return bytes(data)
    raise TypeError(f"{name}: must be bytes, text or None, not {type(data).__name__}")
