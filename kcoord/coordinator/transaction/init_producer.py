# SPDX-License-Identifier: Apache-2.0
"""InitProducerId with a transactional id: which producer id and epoch the caller gets, and who is fenced by that.

Every success bumps the epoch, so that an older producer with the same transactional id is fenced (KIP-98). A producer
that names its present id and epoch (KIP-360) keeps the id and is not taken for a rival of itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kcoord.coordinator.transaction.metadata import (
    EXHAUSTED_EPOCH,
    NO_PRODUCER_EPOCH,
    NO_PRODUCER_ID,
    NO_TIMESTAMP,
    TransactionMetadata,
    TransactionState,
    is_epoch_exhausted,
)
from kcoord.runtime.result import Producer
from kcoord_protocol.errors import Errors, KafkaError


@dataclass(slots=True)
class Initialized:
    """The next metadata, and the epoch before it where a repetition of the same request may name that."""

    metadata: TransactionMetadata
    last_epoch: int = NO_PRODUCER_EPOCH


def needs_producer_id(metadata: TransactionMetadata | None) -> bool:
    """Whether a fresh producer id may be used: for a new transactional id, or for one whose epochs are used up."""
    return metadata is None or metadata.is_epoch_exhausted


def first_metadata(transactional_id: str, producer_id: int, timeout_ms: int, now_ms: int) -> TransactionMetadata:
    """Of a transactional id that was not known; whatever producer the caller names, nobody else can be meant."""
    return TransactionMetadata(
        transactional_id,
        producer_id,
        0,
        timeout_ms,
        TransactionState.EMPTY,
        now_ms,
        previous_producer_id=producer_id,
    )


def check_expected(metadata: TransactionMetadata, expected: Producer | None) -> None:
    """Fences a caller that names another producer. The previous id is good where the change of id was an overflow of
    the epoch whose answer was lost.
    """
    if expected is None or expected.producer_id == metadata.producer_id:
        return
    if expected.producer_id == metadata.previous_producer_id and is_epoch_exhausted(expected.producer_epoch):
        return
    raise fenced(metadata, expected.producer_epoch)


def initialize(
    metadata: TransactionMetadata,
    expected: Producer | None,
    last_epoch: int,
    candidate_producer_id: int | None,
    timeout_ms: int,
    now_ms: int,
) -> Initialized:
    """The next metadata of a transactional id that is between transactions; `last_epoch` is the epoch before the
    present one where that may be named.
    """
    if metadata.is_epoch_exhausted and _may_change_id(metadata, expected, last_epoch):
        assert candidate_producer_id is not None, "the caller brings an id where one may be needed"
        epoch_before = NO_PRODUCER_EPOCH if expected is None else metadata.producer_epoch
        return Initialized(_emptied(metadata, Producer(candidate_producer_id, 0), timeout_ms, now_ms), epoch_before)
    epoch, epoch_before = _next_epoch(metadata, expected, last_epoch)
    producer = Producer(metadata.producer_id, epoch)
    return Initialized(_emptied(metadata, producer, timeout_ms, now_ms), epoch_before)


def _may_change_id(metadata: TransactionMetadata, expected: Producer | None, last_epoch: int) -> bool:
    """The caller names no producer, or the present one. An epoch beyond the last one was given to nobody, so its
    predecessor stands for it.
    """
    if expected is None or expected.producer_epoch == metadata.producer_epoch:
        return True
    return metadata.producer_epoch > EXHAUSTED_EPOCH and expected.producer_epoch == last_epoch


def _next_epoch(metadata: TransactionMetadata, expected: Producer | None, last_epoch: int) -> tuple[int, int]:
    """The epoch, and the one before it where it may be named by a repetition."""
    present = metadata.producer_epoch
    if expected is None:
        return present + 1, NO_PRODUCER_EPOCH
    if expected.producer_epoch == present:
        return present + 1, present
    if expected.producer_epoch == last_epoch:
        # The same request again: its first answer was lost, and nobody else has asked since.
        return present, last_epoch
    raise fenced(metadata, expected.producer_epoch)


def _emptied(metadata: TransactionMetadata, producer: Producer, timeout_ms: int, now_ms: int) -> TransactionMetadata:
    return replace(
        metadata,
        producer_id=producer.producer_id,
        producer_epoch=producer.producer_epoch,
        previous_producer_id=metadata.producer_id,
        next_producer_id=NO_PRODUCER_ID,
        timeout_ms=timeout_ms,
        state=TransactionState.EMPTY,
        partitions={},
        start_ms=NO_TIMESTAMP,
        last_update_ms=now_ms,
    )


def fenced(metadata: TransactionMetadata, epoch: int) -> KafkaError:
    return KafkaError(
        Errors.PRODUCER_FENCED,
        f"The producer of {metadata.transactional_id} is at epoch {metadata.producer_epoch}, the request says {epoch}.",
    )
