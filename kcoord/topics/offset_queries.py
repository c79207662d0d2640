# SPDX-License-Identifier: Apache-2.0
"""ListOffsets on one log: special timestamps, or the first record at or after a timestamp.

In a result, -1 means that there is no such timestamp, offset or epoch.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from kcoord.storage.errors import StorageError
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


def find_offset(log: Log, epochs: LeaderEpochs, timestamp: int, *, end_offset: int, leader_epoch: int) -> FoundOffset:
    """Returns the offset that `timestamp` stands for.

    Records from `end_offset` on (the high watermark or the last stable offset) do not count. Raises KAFKA_STORAGE_ERROR
    if the log cannot be read.
    """
    try:
        return _find(log, epochs, timestamp, end_offset, leader_epoch)
    except (OSError, StorageError, DecodeError) as error:
        raise KafkaError(Errors.KAFKA_STORAGE_ERROR, str(error)) from error


def _find(log: Log, epochs: LeaderEpochs, timestamp: int, end_offset: int, leader_epoch: int) -> FoundOffset:
    match timestamp:
        case -1:
            return FoundOffset(-1, end_offset, leader_epoch)
        case -2 | -4:
            return FoundOffset(-1, log.start_offset, _start_epoch(log, epochs))
        case -5 | -6:
            # Without tiered storage no offset is tiered or waits for its upload (observed in Kafka 4.3.1).
            return NOT_FOUND
        case -3:
            record = log.max_timestamp()
        case _ if timestamp < 0:
            raise KafkaError(Errors.UNSUPPORTED_VERSION, f"The special timestamp {timestamp} does not exist.")
        case _:
            record = log.offset_for_timestamp(timestamp)
    if record is None or record.offset >= end_offset:
        return NOT_FOUND
    return FoundOffset(*record)


def _start_epoch(log: Log, epochs: LeaderEpochs) -> int:
    """Returns the leader epoch at the start of the log, -1 if it is unknown."""
    return epochs.epoch_for_offset(log.start_offset) if epochs.entries else UNDEFINED_EPOCH
