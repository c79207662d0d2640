# SPDX-License-Identifier: Apache-2.0
"""Reads a coordinator's log, such as a partition of `__consumer_offsets`, for the client APIs.

The coordinator owns the log; nothing here changes it. A log to which nothing was written yet is None, and reads like
an empty log.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from kcoord.storage.errors import StorageError
from kcoord.storage.log import Log
from kcoord.storage.recovery import Check
from kcoord.topics.fetch_manager import ReadResult
from kcoord.topics.leader_epochs import EpochEntry, LeaderEpochs
from kcoord.topics.log_opening import LogBeingOpenedError, Opening, Openings
from kcoord.topics.offset_queries import EARLIEST, LATEST, NOT_FOUND, FoundOffset, find_offset
from kcoord.topics.open_log import replay
from kcoord.topics.producer_state import ProducerState
from kcoord_protocol.errors import Errors, KafkaError


class Enough(NamedTuple):
    """What a fetch from `offset` needs: the producers up to `end_offset`, and a stable offset after `offset`."""

    offset: int
    end_offset: int


def enough_for(log: Log | None, fetch_offset: int, max_bytes: int, *, whole_first_batch: bool) -> Enough:
    """Returns what a fetch needs that returns up to `max_bytes`. A fetch that fails needs nothing."""
    if log is None or not log.start_offset <= fetch_offset <= log.end_offset:
        return Enough(-1, 0)
    try:
        batches = log.find(fetch_offset, max_bytes, min_one=whole_first_batch)
        return Enough(fetch_offset, fetch_offset if batches is None else batches.next_offset())
    except (OSError, StorageError) as error:
        raise KafkaError(Errors.KAFKA_STORAGE_ERROR, str(error)) from error


@dataclass(slots=True)
class _ReadLog:
    """A coordinator's log and its producers, which belong to another thread until `opening` has ended."""

    log: Log
    producers: ProducerState
    opening: Opening[ProducerState] | None = None

    def covers(self, end_offset: int, enough: Enough | None) -> bool:
        if self.producers.end_offset >= end_offset:
            return True
        if enough is None:
            return False
        # Behind an open transaction there may be its marker, and more to return.
        return self.producers.end_offset >= enough.end_offset and _stable_offset(self.producers) > enough.offset

    def catch_up(self, end_offset: int, enough: Enough | None, check: Check) -> ProducerState:
        for header, data in self.log.batches(self.producers.end_offset):
            check(len(data))
            replay(self.producers, header, data)
            if self.covers(end_offset, enough):
                return self.producers
        # The last batches may be cleaned away.
        self.producers.end_offset = max(self.producers.end_offset, end_offset)
        return self.producers

    def end_opening(self) -> None:
        """Raises LogBeingOpenedError, or the error of an opening that has ended."""
        opening = self.opening
        if opening is None:
            return
        if not opening.has_ended:
            raise LogBeingOpenedError(opening)
        self.opening = None
        opening.result()


class InternalProducers:
    """The producer states of coordinators' logs. The partitions of `__consumer_offsets` have transactional producers.

    Only read_committed requests and DescribeProducers need these states, so they are read from the logs on demand: by
    another thread if there is much to read (`log_opening`).
    """

    __slots__ = ("_logs", "_openings")

    def __init__(self, openings: Openings) -> None:
        self._openings = openings
        self._logs: dict[tuple[str, int], _ReadLog] = {}

    def of(
        self, topic: str, partition: int, log: Log | None, now_ms: int, enough: Enough | None = None
    ) -> ProducerState:
        """Returns the producer state as of the end of the log, or one that is `enough`.

        Raises LogBeingOpenedError while another thread reads the log.
        """
        if log is None:
            return ProducerState()
        read = self._logs.get((topic, partition))
        if read is not None and read.log is not log:
            self.forget(topic, partition)
            read = None
        try:
            if read is not None:
                read.end_opening()
            if read is None or read.producers.end_offset < log.start_offset:
                read = self._logs[topic, partition] = _ReadLog(log, ProducerState(log.start_offset))
            end_offset = log.end_offset
            if not read.covers(end_offset, enough):
                catch_up = partial(read.catch_up, end_offset, enough)
                read.opening = self._openings.begin(topic, partition, catch_up, now_ms)
                read.end_opening()
        except (OSError, StorageError) as error:
            raise KafkaError(Errors.KAFKA_STORAGE_ERROR, str(error)) from error
        return read.producers

    def forget(self, topic: str, partition: int) -> None:
        """Drops the state of a log. The next request reads it from the log again."""
        read = self._logs.pop((topic, partition), None)
        if read is not None and read.opening is not None:
            read.opening.cancel()

    def forget_all(self) -> None:
        for key in list(self._logs):
            self.forget(*key)


def _stable_offset(producers: ProducerState) -> int:
    unstable = producers.first_unstable_offset
    return producers.end_offset if unstable is None else unstable


def read(
    log: Log | None, producers: ProducerState | None, fetch_offset: int, *, max_bytes: int, whole_first_batch: bool
) -> ReadResult:
    """Returns whole batches from `fetch_offset` on.

    `producers` is the producer state for a read_committed fetch, which ends at the last stable offset, else None.
    """
    start_offset, end_offset = (log.start_offset, log.end_offset) if log is not None else (0, 0)
    stable_offset = end_offset if producers is None or log is None else _stable_offset(producers)
    result = ReadResult(b"", end_offset, stable_offset, start_offset, None if producers is None else [])
    if not start_offset <= fetch_offset <= end_offset:
        raise KafkaError(Errors.OFFSET_OUT_OF_RANGE)
    if log is not None and fetch_offset < stable_offset and (max_bytes > 0 or whole_first_batch):
        try:
            batches = log.find(fetch_offset, max_bytes, max_offset=stable_offset, min_one=whole_first_batch)
            if batches is not None:
                result.records = batches.read()
                if producers is not None:
                    result.aborted_transactions = producers.aborted_between(fetch_offset, batches.next_offset())
        except (OSError, StorageError) as error:
            raise KafkaError(Errors.KAFKA_STORAGE_ERROR, str(error)) from error
    return result


def find_offset_in(log: Log | None, producers: ProducerState | None, timestamp: int, leader_epoch: int) -> FoundOffset:
    """Returns the answer of ListOffsets; `producers` is the producer state for a read_committed request, else None."""
    if log is None:
        return FoundOffset(-1, 0, leader_epoch) if timestamp in (EARLIEST, LATEST) else NOT_FOUND
    end_offset = log.end_offset if producers is None else _stable_offset(producers)
    return find_offset(log, epochs_of(log, leader_epoch), timestamp, end_offset=end_offset, leader_epoch=leader_epoch)


def epochs_of(log: Log | None, leader_epoch: int) -> LeaderEpochs:
    """Returns a cache with a single epoch: its coordinator counts as the writer of the whole log."""
    return LeaderEpochs([EpochEntry(leader_epoch, log.start_offset if log is not None else 0)])
