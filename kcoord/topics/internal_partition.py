# SPDX-License-Identifier: Apache-2.0
"""Reads a coordinator's log through the client APIs, such as `__consumer_offsets`. The coordinator owns the log;
nothing here changes it.

A log is None while nothing was written to it: it reads like an empty one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kcoord.storage.errors import MalformedCheckpointError, StorageError
from kcoord.topics.fetch_manager import ReadResult
from kcoord.topics.leader_epochs import EpochEntry, LeaderEpochs
from kcoord.topics.offset_queries import EARLIEST, LATEST, NOT_FOUND, FoundOffset, find_offset
from protocol.errors import Errors, KafkaError

if TYPE_CHECKING:
    from kcoord.storage.log import Log
    from kcoord.storage.log_dir import LogDir


def read(
    log: Log | None, fetch_offset: int, *, max_bytes: int, whole_first_batch: bool, read_committed: bool
) -> ReadResult:
    """Whole batches from `fetch_offset` on."""
    start_offset, end_offset = (log.start_offset, log.end_offset) if log is not None else (0, 0)
    result = ReadResult(b"", end_offset, end_offset, start_offset, [] if read_committed else None)
    if not start_offset <= fetch_offset <= end_offset:
        raise KafkaError(Errors.OFFSET_OUT_OF_RANGE)
    if log is not None and fetch_offset < end_offset and (max_bytes > 0 or whole_first_batch):
        try:
            result.records = log.read(fetch_offset, max_bytes, max_offset=end_offset, min_one=whole_first_batch)
        except (OSError, StorageError) as error:
            raise KafkaError(Errors.KAFKA_STORAGE_ERROR, str(error)) from error
    return result


def find_offset_in(log: Log | None, timestamp: int, leader_epoch: int) -> FoundOffset:
    """ListOffsets."""
    if log is None:
        return FoundOffset(-1, 0, leader_epoch) if timestamp in (EARLIEST, LATEST) else NOT_FOUND
    return find_offset(
        log, epochs_of(log, leader_epoch), timestamp, end_offset=log.end_offset, leader_epoch=leader_epoch
    )


def epochs_of(log: Log | None, leader_epoch: int) -> LeaderEpochs:
    """One process has written all of it, so there is one epoch."""
    return LeaderEpochs([EpochEntry(leader_epoch, log.start_offset if log is not None else 0)])


def topic_id_of(log_dir: LogDir, topic: str, partition: int) -> bytes | None:
    """Whose folder it is, None where that is not known."""
    try:
        return log_dir.topic_id(topic, partition)
    except MalformedCheckpointError:
        return None
