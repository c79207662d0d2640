# SPDX-License-Identifier: Apache-2.0
"""ListOffsets on one log: special timestamps, or the first record at or after a timestamp. -1 stands for "there is
none".
"""

from __future__ import annotations

from typing import Final, NamedTuple

from kcoord.storage.log import Log
from kcoord.topics.leader_epochs import UNDEFINED_EPOCH, LeaderEpochs
from kcoord_protocol.errors import Errors, KafkaError

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
"""The version of ListOffsets in which each special timestamp came."""


class FoundOffset(NamedTuple):
    """The answer for one partition."""

    timestamp: int
    offset: int
    leader_epoch: int


NOT_FOUND: Final = FoundOffset(-1, -1, -1)


def find_offset(log: Log, epochs: LeaderEpochs, timestamp: int, *, end_offset: int, leader_epoch: int) -> FoundOffset:
    """What `timestamp` stands for; records from `end_offset` on (the high watermark or last stable offset) do not
    count.
    """
    match timestamp:
        case -1:
            return FoundOffset(-1, end_offset, leader_epoch)
        case -2 | -4:
            return FoundOffset(-1, log.start_offset, _start_epoch(log, epochs))
        case -5 | -6:
            # Without tiered storage nothing is tiered and nothing waits for it (observed in Kafka 4.3.1).
            return NOT_FOUND
        case -3:
            found = log.max_timestamp()
        case _ if timestamp < 0:
            raise KafkaError(Errors.UNSUPPORTED_VERSION, f"There is no special timestamp {timestamp}.")
        case _:
            found = log.offset_for_timestamp(timestamp)
    if found is None or found.offset >= end_offset:
        return NOT_FOUND
    return FoundOffset(*found)


def _start_epoch(log: Log, epochs: LeaderEpochs) -> int:
    """The leader epoch at the start of the log, where it is known."""
    return epochs.epoch_for_offset(log.start_offset) if epochs.entries else UNDEFINED_EPOCH
