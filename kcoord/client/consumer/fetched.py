# SPDX-License-Identifier: Apache-2.0
"""The records of one partition in one Fetch response. Records are decoded when the application takes them. Pure.

A batch may begin before the requested offset, and offsets may have gaps. With `read_committed`, batches of aborted
transactions are skipped: the broker sends a list of these transactions (KIP-98).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from kcoord.client.types import ConsumerRecord, TopicPartition
from kcoord_protocol.errors import CorruptBatchError
from kcoord_protocol.record_batch import BatchHeader, iter_headers, iter_records, verify_crc


class AbortedProducer(NamedTuple):
    """An aborted transaction: the producer's records from `first_offset` up to its abort marker are skipped."""

    first_offset: int
    producer_id: int


class FetchedRecords:
    """The records of a partition in a response, with a cursor.

    `next_offset` is the offset after the records taken so far. `end_offset` is the offset after all of them, where the
    next fetch begins.
    """

    def __init__(
        self,
        partition: TopicPartition,
        fetch_offset: int,
        data: bytes,
        *,
        generation: object,
        check_crcs: bool = True,
        aborted: Sequence[AbortedProducer] | None = None,
    ) -> None:
        self.partition = partition
        self.generation = generation
        self.size_bytes = len(data)
        self.next_offset = fetch_offset
        self.leader_epoch = -1
        self.is_drained = False
        self._data = data
        self._check_crcs = check_crcs
        self._aborted = sorted(aborted, reverse=True) if aborted is not None else []
        self._aborting: set[int] = set()
        self._records = self._read()
        self._damage: CorruptBatchError | None = None
        self.end_offset = self._find_end(fetch_offset)

    def _find_end(self, fetch_offset: int) -> int:
        """Returns the offset after the last batch that can be read. Reads batch headers only."""
        end = fetch_offset
        # `take` raises the error when it reaches the damage, so that the batches before it can be read.
        with suppress(CorruptBatchError):
            for _, header in iter_headers(self._data):
                end = header.next_offset
        return max(end, fetch_offset)

    def take(self, count: int) -> list[ConsumerRecord]:
        """Returns up to `count` records. Fewer records mean that there are no more, or that a corrupt batch follows.

        Raises CorruptBatchError if the next batch is corrupt. The records before it have been returned then.
        """
        taken: list[ConsumerRecord] = []
        while len(taken) < count and self._damage is None:
            try:
                record = next(self._records, None)
            except CorruptBatchError as error:
                self._damage = error
                break
            if record is None:
                self.is_drained = True
                break
            taken.append(record)
        if self._damage is not None and not taken:
            raise self._damage
        return taken

    def _read(self) -> Iterator[ConsumerRecord]:
        topic, index = self.partition
        for position, header in iter_headers(self._data):
            if self._check_crcs and not verify_crc(self._data, position):
                raise CorruptBatchError(f"{self.partition}: wrong checksum of the batch at {header.base_offset}")
            if not self._skip(header):
                for record in iter_records(self._data, position):
                    if record.offset < self.next_offset:
                        continue
                    self.next_offset = record.offset + 1
                    self.leader_epoch = header.partition_leader_epoch
                    yield ConsumerRecord(
                        topic,
                        index,
                        record.offset,
                        record.timestamp_ms,
                        header.timestamp_type,
                        record.key,
                        record.value,
                        record.headers,
                        header.partition_leader_epoch,
                    )
            self.next_offset = max(self.next_offset, header.next_offset)
            self.leader_epoch = header.partition_leader_epoch

    def _skip(self, header: BatchHeader) -> bool:
        """Whether the application must not see the batch: a control batch, or one of an aborted transaction."""
        while self._aborted and self._aborted[-1].first_offset <= header.last_offset:
            self._aborting.add(self._aborted.pop().producer_id)
        if header.is_control:
            # The producer's first marker after the aborted records is the one that aborts them.
            self._aborting.discard(header.producer_id)
            return True
        return header.is_transactional and header.producer_id in self._aborting
