# SPDX-License-Identifier: Apache-2.0
"""The metadata of a transactional id, the states of a transaction, and the legal transitions.

* EMPTY: the producer has an id and an epoch, but no transaction.
* ONGOING: a transaction with at least one partition. AddPartitionsToTxn and AddOffsetsToTxn start and extend it.
* PREPARE_COMMIT, PREPARE_ABORT: the outcome is decided and in the log; markers are being written.
* COMPLETE_COMMIT, COMPLETE_ABORT: all partitions have their marker. The next transaction may begin.

`LEGAL_PREDECESSORS` has the transitions. InitProducerId leads to EMPTY from every state between transactions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final, TypeAlias

from kcoord.runtime.result import Producer

NO_PRODUCER_ID: Final = -1
NO_PRODUCER_EPOCH: Final = -1
NO_TIMESTAMP: Final = -1

EXHAUSTED_EPOCH: Final = 2**15 - 2
"""The last epoch that a producer gets. The epoch after it only fences that producer."""

EPOCH_BUMPING_VERSION: Final = 2
"""The first client transaction version in which every transaction has its own epoch (KIP-890)."""

Partitions: TypeAlias = Mapping[str, frozenset[int]]
"""Partition numbers by topic."""


class TransactionState(IntEnum):
    """States by their number in the log. PREPARE_EPOCH_FENCE and DEAD are never stored."""

    EMPTY = 0
    ONGOING = 1
    PREPARE_COMMIT = 2
    PREPARE_ABORT = 3
    COMPLETE_COMMIT = 4
    COMPLETE_ABORT = 5
    DEAD = 6
    PREPARE_EPOCH_FENCE = 7

    @property
    def wire_name(self) -> str:
        """The name of the state in DescribeTransactions."""
        return _WIRE_NAMES[self]

    @property
    def is_prepared(self) -> bool:
        """True if the outcome is decided and markers are being written."""
        return self in (TransactionState.PREPARE_COMMIT, TransactionState.PREPARE_ABORT)

    @property
    def is_between_transactions(self) -> bool:
        return self in BETWEEN_TRANSACTIONS


_WIRE_NAMES: Final = {state: state.name.title().replace("_", "") for state in TransactionState}

STATES_BY_NAME: Final = {name: state for state, name in _WIRE_NAMES.items()}

BETWEEN_TRANSACTIONS: Final = frozenset(
    {TransactionState.EMPTY, TransactionState.COMPLETE_COMMIT, TransactionState.COMPLETE_ABORT}
)

LEGAL_PREDECESSORS: Final[Mapping[TransactionState, frozenset[TransactionState]]] = {
    TransactionState.EMPTY: BETWEEN_TRANSACTIONS,
    TransactionState.ONGOING: BETWEEN_TRANSACTIONS | {TransactionState.ONGOING},
    TransactionState.PREPARE_COMMIT: frozenset({TransactionState.ONGOING}),
    # KIP-890: a producer may abort without having added anything, to get a new epoch.
    TransactionState.PREPARE_ABORT: BETWEEN_TRANSACTIONS | {TransactionState.ONGOING},
    TransactionState.COMPLETE_COMMIT: frozenset({TransactionState.PREPARE_COMMIT}),
    TransactionState.COMPLETE_ABORT: frozenset({TransactionState.PREPARE_ABORT}),
}


@dataclass(slots=True)
class TransactionMetadata:
    """The metadata of one transactional id.

    It is never changed: an operation makes the next object, and the replay of its record installs it.
    """

    transactional_id: str
    producer_id: int
    producer_epoch: int
    timeout_ms: int
    state: TransactionState
    last_update_ms: int
    start_ms: int = NO_TIMESTAMP
    partitions: Partitions = field(default_factory=dict)
    previous_producer_id: int = NO_PRODUCER_ID
    """The producer id before the last change, to recognise a repeated request after an epoch overflow."""
    next_producer_id: int = NO_PRODUCER_ID
    """The producer id after this transaction, if the epochs of the present one are exhausted."""
    next_producer_epoch: int = NO_PRODUCER_EPOCH
    client_transaction_version: int = 0

    @property
    def producer(self) -> Producer:
        return Producer(self.producer_id, self.producer_epoch)

    @property
    def is_epoch_exhausted(self) -> bool:
        return is_epoch_exhausted(self.producer_epoch)

    @property
    def bumps_epoch(self) -> bool:
        return self.client_transaction_version >= EPOCH_BUMPING_VERSION

    @property
    def epoch_before_end(self) -> int:
        """The epoch of the last transaction, if its end bumped the epoch (KIP-890) and the producer may not know it."""
        if not self.bumps_epoch or self.state in (TransactionState.EMPTY, TransactionState.ONGOING):
            return NO_PRODUCER_EPOCH
        if self.producer_epoch > 0:
            return self.producer_epoch - 1
        return EXHAUSTED_EPOCH if self.previous_producer_id != self.producer_id else NO_PRODUCER_EPOCH

    @property
    def client_producer(self) -> Producer:
        """The producer id and epoch of the client after this transaction."""
        if self.next_producer_id != NO_PRODUCER_ID:
            return Producer(self.next_producer_id, 0)
        return self.producer

    @property
    def timeout_at_ms(self) -> int:
        return self.start_ms + self.timeout_ms

    def has_partitions(self, partitions: Partitions) -> bool:
        """True if all partitions are part of the transaction already."""
        none: frozenset[int] = frozenset()
        return all(numbers <= self.partitions.get(topic, none) for topic, numbers in partitions.items())

    def with_partitions(self, added: Partitions) -> Partitions:
        """Returns the partitions of the transaction and `added`."""
        none: frozenset[int] = frozenset()
        return {**self.partitions, **{topic: self.partitions.get(topic, none) | added[topic] for topic in added}}


def is_epoch_exhausted(producer_epoch: int) -> bool:
    return producer_epoch >= EXHAUSTED_EPOCH


def partitions_of(pairs: Iterable[tuple[str, Iterable[int]]]) -> Partitions:
    """Returns partition numbers by topic; a topic may occur several times in `pairs`."""
    collected: dict[str, set[int]] = {}
    for topic, numbers in pairs:
        collected.setdefault(topic, set()).update(numbers)
    return {topic: frozenset(numbers) for topic, numbers in collected.items()}
