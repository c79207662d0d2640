# SPDX-License-Identifier: Apache-2.0
"""The log of what all instances share: one partition of a compacted topic in the upstream.

Theory of operation. `kcoord.metadata.shared` has the records, and the rules by which all instances agree. `connect`
reads the whole log before the instance serves. Then `follow` reads it for ever, with long polls, so that a record
reaches all instances within milliseconds. `append` returns when this instance has read its own records, and so all
records before them.

An append is repeated until the upstream has it. Then the log may have it twice, which changes nothing. The log needs no
lease and no owner. If the topic is deleted or loses records, the state in memory stays, and `follow` begins again at
the first record.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from kcoord.client.admin.client import AdminClient
from kcoord.client.cluster import Cluster
from kcoord.client.config import AdminConfig
from kcoord.client.leaders import list_offsets
from kcoord.client.tasks import Tasks, spawn
from kcoord.client.types import TopicPartition
from kcoord.config import BrokerConfig
from kcoord.metadata.shared import SHARED_RECORDS, SharedMetadata, new_instance_record
from kcoord.runtime.result import CoordinatorRecord
from kcoord.runtime.serde import CoordinatorSerde
from kcoord.server.errors import StartError
from kcoord.upstream.own_topics import SHARED_TOPIC, prepare_topic
from kcoord.upstream.requests import PartitionRequests, PendingBatch
from kcoord_protocol.errors import DecodeError, Errors, KafkaError
from kcoord_protocol.record_batch import BatchHeader, decode_entries, encode_batch_from_parts, walk_batches

CONNECT_SECONDS: Final = 20.0
ANNOUNCE_SECONDS: Final = 0.3
"""The longest time that an orderly stop spends on its hint to the others."""
RECORDS_OF_A_BATCH: Final = 500
_FETCH_WAIT_MS: Final = 500
_RETRY_SECONDS: Final = 0.1
_LATEST: Final = -1

_logger = logging.getLogger(__name__)


class SharedLog:
    """The log and the state that follows from it; the module describes it. The callbacks are set before `follow`."""

    on_change: Callable[[], None]
    """Called when records were replayed."""
    on_instance: Callable[[int], None]
    """Called with the node id of an instance that joins or has left the group of the instances."""

    def __init__(self, config: BrokerConfig, settings: AdminConfig) -> None:
        self._settings = settings
        self._segment_bytes = config.offsets_topic_segment_bytes
        self._timeout_ms = config.kcoord_upstream_write_timeout_ms
        self._cluster = Cluster(settings)
        self._requests = PartitionRequests(
            self._cluster, SHARED_TOPIC, attempt_timeout_ms=self._timeout_ms, fetch_wait_ms=_FETCH_WAIT_MS
        )
        self._serde = CoordinatorSerde(SHARED_RECORDS)
        self._tasks = Tasks()
        self.state = SharedMetadata()
        self._position = 0
        """The offset of the next record to read."""
        self._moved = asyncio.Event()
        self._reported: Errors | None = None

    async def connect(self) -> None:
        """Creates or checks the topic, and reads all of it. Raises StartError.

        Another release may have written records about groups that this one cannot read.
        """
        try:
            async with AdminClient(self._settings) as admin:
                await prepare_topic(admin, SHARED_TOPIC, 1, self._segment_bytes)
            await self._cluster.retry("read it", self._cluster.deadline(CONNECT_SECONDS * 1000), self._read_all)
        except KafkaError as error:
            raise StartError(f"the topic {SHARED_TOPIC} of the upstream cannot be read: {error}") from None
        if (reason := self.state.why_unreadable()) is not None:
            raise StartError(f"{reason}. Start a release that reads them")

    async def _read_all(self) -> None:
        """Reads up to the end of the log. Brokers may not know a new topic yet."""
        await self._cluster.refresh_metadata([SHARED_TOPIC])
        end = await self._end_offset()
        while self._position < end:
            await self._read()

    async def _end_offset(self) -> int:
        partition = TopicPartition(SHARED_TOPIC, 0)
        deadline = self._cluster.deadline(self._timeout_ms)
        outcome = (await list_offsets(self._cluster, deadline, {partition: _LATEST})([partition]))[partition]
        if isinstance(outcome, KafkaError):
            raise outcome
        return outcome.offset

    async def follow(self) -> None:
        """Reads the log for ever. A failure is logged once."""
        while True:
            try:
                announced = await self._read()
                self._reported = None
            except KafkaError as error:
                if error.error is Errors.OFFSET_OUT_OF_RANGE:
                    self._position = 0
                if self._reported is not error.error:
                    self._reported = error.error
                    _logger.warning("The topic %s of the upstream cannot be read: %s", SHARED_TOPIC, error)
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            if announced is None:
                continue
            self.on_change()
            for node_id in announced:
                self.on_instance(node_id)
            corrections = self.state.corrections()
            if corrections:
                self._tasks.add(spawn(self._correct(corrections), "kcoord shared log"))

    async def _correct(self, records: Sequence[CoordinatorRecord]) -> None:
        try:
            await self.append(records)
        except KafkaError as error:
            _logger.warning("Creation times in %s are not corrected yet: %s", SHARED_TOPIC, error)

    async def _read(self) -> list[int] | None:
        """Reads the next records. Returns the instances that are announced in them; None if there was no record."""
        data = await self._requests.fetch(0, self._position)
        before = self._position
        announced: list[int] = []
        try:
            for position, batch in walk_batches(data, verify=True):
                header = BatchHeader(*batch)
                if header.next_offset <= self._position:
                    continue
                if not header.is_control and not header.is_transactional:
                    announced += self._replay(data, position)
                self._position = header.next_offset
        except DecodeError as error:
            raise KafkaError(Errors.CORRUPT_MESSAGE, str(error)) from error
        if self._position == before:
            return None
        self._moved.set()
        self._moved = asyncio.Event()
        return announced

    def _replay(self, data: bytes, position: int) -> list[int]:
        announced = []
        for _, key, value in decode_entries(data, position):
            record = self._serde.deserialize(key, value)
            if record is not None:
                node_id = self.state.replay(record)
                if node_id is not None:
                    announced.append(node_id)
        return announced

    async def append(self, records: Sequence[CoordinatorRecord]) -> None:
        """Appends records, and returns when they and all records before them are replayed here. Raises KafkaError."""
        try:
            async with asyncio.timeout(self._timeout_ms / 1000):
                for begin in range(0, len(records), RECORDS_OF_A_BATCH):
                    end = await self._append_batch(records[begin : begin + RECORDS_OF_A_BATCH])
                while self._position < end:
                    await self._moved.wait()
        except TimeoutError:
            raise KafkaError(Errors.REQUEST_TIMED_OUT, f"{SHARED_TOPIC} was not written") from None

    async def _append_batch(self, records: Sequence[CoordinatorRecord]) -> int:
        """Appends a batch. Returns the offset after it."""
        data = encode_batch_from_parts([self._serde.serialize(record) for record in records], Cluster.wall_clock_ms())
        while True:
            answer: asyncio.Future[int | KafkaError] = asyncio.get_running_loop().create_future()
            self._requests.produce(PendingBatch(0, data, partial(_is_awaited, answer), partial(_answer, answer)))
            outcome = await answer
            if not isinstance(outcome, KafkaError):
                return outcome + len(records)
            if not outcome.error.retriable:
                raise outcome
            await asyncio.sleep(_RETRY_SECONDS)

    async def announce(self, node_id: int) -> None:
        """Makes the other instances look at their group now. They would notice later anyway, with a heartbeat."""
        try:
            async with asyncio.timeout(ANNOUNCE_SECONDS):
                await self._append_batch([new_instance_record(node_id)])
        except (KafkaError, TimeoutError) as error:
            reason = (
                error if isinstance(error, KafkaError) else f"the upstream has not answered for {ANNOUNCE_SECONDS} s"
            )
            _logger.info("The other instances do not get a hint to look at their group: %s", reason)

    async def close(self) -> None:
        """Ends all requests and closes the connections."""
        await self._tasks.stop()
        await self._requests.stop()
        await self._cluster.close()


def _is_awaited(answer: asyncio.Future[int | KafkaError]) -> bool:
    return not answer.done()


def _answer(answer: asyncio.Future[int | KafkaError], outcome: int | KafkaError) -> None:
    """Passes an outcome on, unless the caller has stopped waiting."""
    if not answer.done():
        answer.set_result(outcome)
