# SPDX-License-Identifier: Apache-2.0
"""ListOffsets on one log: special timestamps, or the first record at or after a timestamp.

In a result, -1 means that there is no such timestamp, offset or epoch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

from kcoord.storage.errors import LongSearchError, StorageError
from kcoord.storage.log import Log
from kcoord.topics.leader_epochs import UNDEFINED_EPOCH, LeaderEpochs
from kcoord_protocol.errors import DecodeError, Errors, KafkaError

LATEST: Final = -1
EARLIEST: Final = -2
MAX_TIMESTAMP: Final = -3
EARLIEST_LOCAL: Final = -4
LATEST_TIERED: Final = -5
EARLIEST_PENDING_UPLOAD: Final = -6

SPECIAL_TIMESTAMP_VERSIONS: Final = {
    LATEST: 1,
    EARLIEST: 1,
    MAX_TIMESTAMP: 7,
    EARLIEST_LOCAL: 8,
    LATEST_TIERED: 9,
    EARLIEST_PENDING_UPLOAD: 11,
}
"""The version of ListOffsets that introduced each special timestamp."""


class FoundOffset(NamedTuple):
    """The result for one partition."""

    timestamp: int
    offset: int
    leader_epoch: int


NOT_FOUND: Final = FoundOffset(-1, -1, -1)


SEARCHED_AT_ONCE: Final = 10_000
"""The largest number of records in a batch that is searched in the event loop. That takes about 10 ms."""


class OffsetSearchError(Exception):
    """The offset is in a batch of many records. The caller may call `find` in another thread, where it takes longer.

    `find` returns the result, or raises KAFKA_STORAGE_ERROR.
    """

    def __init__(self, find: Callable[[], FoundOffset]) -> None:
        super().__init__()
        self.find = find


def find_offset(log: Log, epochs: LeaderEpochs, timestamp: int, *, end_offset: int, leader_epoch: int) -> FoundOffset:
    """Returns the offset that `timestamp` stands for.

    Records from `end_offset` on (the high watermark or the last stable offset) do not count. Raises KAFKA_STORAGE_ERROR
    if the log cannot be read, and OffsetSearchError if the search takes long.
    """
    find = partial(_find, log, epochs, timestamp, end_offset, leader_epoch)
    try:
        return find(SEARCHED_AT_ONCE)
    except LongSearchError:
        raise OffsetSearchError(partial(find, math.inf)) from None


def _find(
    log: Log, epochs: LeaderEpochs, timestamp: int, end_offset: int, leader_epoch: int, most_records: float
) -> FoundOffset:
    try:
        return _look_up(log, epochs, timestamp, end_offset, leader_epoch, most_records)
    except LongSearchError:
        raise
    except (OSError, StorageError, DecodeError) as error:
        raise KafkaError(Errors.KAFKA_STORAGE_ERROR, str(error)) from error


def _look_up(
    log: Log, epochs: LeaderEpochs, timestamp: int, end_offset: int, leader_epoch: int, most_records: float
) -> FoundOffset:
    match timestamp:
        case -1:
            return FoundOffset(-1, end_offset, leader_epoch)
        case -2 | -4:
            return FoundOffset(-1, log.start_offset, _start_epoch(log, epochs))
        case -5 | -6:
            # Without tiered storage no offset is tiered or waits for its upload (observed in Kafka 4.3.1).
            return NOT_FOUND
        case -3:
            record = log.max_timestamp(most_records)
        case _ if timestamp < 0:
            raise KafkaError(Errors.UNSUPPORTED_VERSION, f"The special timestamp {timestamp} does not exist.")
        case _:
            record = log.offset_for_timestamp(timestamp, most_records)
    if record is None or record.offset >= end_offset:
        return NOT_FOUND
    return FoundOffset(*record)


def _start_epoch(log: Log, epochs: LeaderEpochs) -> int:
    """Returns the leader epoch at the start of the log, -1 if it is unknown."""
    return epochs.epoch_for_offset(log.start_offset) if epochs.entries else UNDEFINED_EPOCH
