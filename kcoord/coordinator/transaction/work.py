# SPDX-License-Identifier: Apache-2.0
"""The background task of a transaction shard, and the keys of its timers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kcoord.coordinator.transaction.metadata import Partitions
from kcoord.runtime.result import Producer, TimerKey, TimerKind


class TransactionTimer(TimerKind):
    """Timers and tasks of transaction coordinator shards."""

    TIMEOUT = "transaction-timeout"
    MARKERS = "transaction-markers"
    EXPIRATION = "transactional-id-expiration"


EXPIRATION_KEY: Final = TimerKey(TransactionTimer.EXPIRATION)

FIRST_RETRY_MS: Final = 100
LONGEST_RETRY_MS: Final = 5_000


def timeout_key(transactional_id: str) -> TimerKey:
    """Returns the key of the timer that aborts an open transaction."""
    return TimerKey(TransactionTimer.TIMEOUT, transactional_id)


def markers_key(transactional_id: str) -> TimerKey:
    """Returns the key of the task that writes markers, and of the timer for its next attempt."""
    return TimerKey(TransactionTimer.MARKERS, transactional_id)


@dataclass(slots=True)
class WriteMarkers:
    """The work of a task: write a transaction's marker to every partition.

    Its value is None once all markers are durable, else an exception. The first `attempt` is 0. A later one may find
    partitions that have the marker already. So may the first attempt after a restart, whose number is therefore 1.
    """

    transactional_id: str
    producer: Producer
    committed: bool
    coordinator_epoch: int
    transaction_version: int
    partitions: Partitions
    attempt: int = 0

    @property
    def retry_delay_ms(self) -> int:
        """The delay after this attempt has failed, until the next one."""
        return min(FIRST_RETRY_MS << min(self.attempt, 10), LONGEST_RETRY_MS)
