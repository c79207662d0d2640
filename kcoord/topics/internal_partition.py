# SPDX-License-Identifier: Apache-2.0
"""Reads a coordinator's log, such as a partition of `__consumer_offsets`, for the client APIs.

The coordinator owns the log; nothing here changes it. A log to which nothing was written yet is None, and reads like
an empty log.
"""

from __future__ import annotations

from kcoord.storage.errors import MalformedCheckpointError, StorageError
from kcoord.storage.log import Log
from kcoord.storage.log_dir import LogDir
from kcoord.topics.fetch_manager import ReadResult
from kcoord.topics.leader_epochs import EpochEntry, LeaderEpochs
from kcoord.topics.offset_queries import EARLIEST, LATEST, NOT_FOUND, FoundOffset, find_offset
from kcoord.topics.open_log import replay
from kcoord.topics.producer_state import ProducerState
from kcoord_protocol.errors import Errors, KafkaError


class InternalProducers:
    """The producer states of coordinators' logs. The partitions of `__consumer_offsets` have transactional producers.

    Only read_committed requests and DescribeProducers need these states, so they are read from the logs on demand.
    """

    __slots__ = ("_states",)

    def __init__(self) -> None:
        self._states: dict[tuple[str, int], tuple[Log | None, ProducerState]] = {}

    def of(self, topic: str, partition: int, log: Log | None, enough: tuple[int, int] | None = None) -> ProducerState:
        """Returns the producer state as of the end of the log.

        With `enough` = (offset, bytes), the state may end as soon as it covers that many bytes from that offset.
        """
        seen_log, state = self._states.get((topic, partition), (None, ProducerState()))
        if log is None:
            return state
        if seen_log is not log or state.end_offset < log.start_offset:
            state = ProducerState()
            state.end_offset = log.start_offset
            self._states[topic, partition] = log, state
        try:
            _catch_up(state, log, enough)
        except (OSError, StorageError) as error:
            raise KafkaError(Errors.KAFKA_STORAGE_ERROR, str(error)) from error
        return state

    def forget(self, topic: str, partition: int) -> None:
        """Drops the state of a log. The next request reads it from the log again."""
        self._states.pop((topic, partition), None)


def _catch_up(state: ProducerState, log: Log, enough: tuple[int, int] | None) -> None:
    if state.end_offset >= log.end_offset:
        return
    seen_bytes = 0
    for header, data in log.batches(state.end_offset):
        replay(state, header, data)
        if enough is not None and header.base_offset >= enough[0]:
            seen_bytes += len(data)
            if seen_bytes > enough[1]:
                return
    state.end_offset = max(state.end_offset, log.end_offset)


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
            result.records = log.read(fetch_offset, max_bytes, max_offset=stable_offset, min_one=whole_first_batch)
        except (OSError, StorageError) as error:
            raise KafkaError(Errors.KAFKA_STORAGE_ERROR, str(error)) from error
        if producers is not None:
            result.aborted_transactions = producers.aborted_between(fetch_offset, stable_offset)
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


def topic_id_of(log_dir: LogDir, topic: str, partition: int) -> bytes | None:
    """Returns the id of the topic that a folder belongs to, None if partition.metadata is missing or malformed."""
    try:
        return log_dir.topic_id(topic, partition)
    except MalformedCheckpointError:
        return None
