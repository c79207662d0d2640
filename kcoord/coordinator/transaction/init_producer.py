# SPDX-License-Identifier: Apache-2.0
"""InitProducerId with a transactional id: computes the producer id and epoch that the caller gets.

Every success bumps the epoch, so that an older producer with the same transactional id is fenced (KIP-98). A producer
that sends its present id and epoch (KIP-360) recovers: it keeps the id and does not fence itself. If the epochs are
exhausted, the caller gets a new producer id with epoch 0.

A repeated request whose response was lost sends the epoch before the present one and gets the same result again. So
does a producer whose transaction the coordinator has aborted, since nobody got the epoch that this bumped.
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
    """The next metadata, and the epoch before it if a repeated request may send that epoch."""

    metadata: TransactionMetadata
    last_epoch: int = NO_PRODUCER_EPOCH


def needs_producer_id(metadata: TransactionMetadata | None) -> bool:
    """True for a new transactional id, and for an id whose epochs are exhausted."""
    return metadata is None or metadata.is_epoch_exhausted


def first_metadata(transactional_id: str, producer_id: int, timeout_ms: int, now_ms: int) -> TransactionMetadata:
    """Returns the metadata of a new transactional id. A producer id in the request is ignored."""
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
    """Raises PRODUCER_FENCED if the caller sends another producer id.

    The previous id is accepted with an exhausted epoch: the response with the new id was lost.
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
    """Returns the next metadata of a transactional id that is between transactions.

    `last_epoch` is the epoch before the present one if a repeated request may send it. Raises PRODUCER_FENCED.
    """
    if metadata.is_epoch_exhausted and _may_change_id(metadata, expected, last_epoch):
        assert candidate_producer_id is not None, "the caller passes a producer id if one may be needed"
        epoch_before = NO_PRODUCER_EPOCH if expected is None else metadata.producer_epoch
        return Initialized(_emptied(metadata, Producer(candidate_producer_id, 0), timeout_ms, now_ms), epoch_before)
    epoch, epoch_before = _next_epoch(metadata, expected, last_epoch)
    producer = Producer(metadata.producer_id, epoch)
    return Initialized(_emptied(metadata, producer, timeout_ms, now_ms), epoch_before)


def _may_change_id(metadata: TransactionMetadata, expected: Producer | None, last_epoch: int) -> bool:
    """True if the caller sends no producer, or the present one.

    No producer has the epoch after the last one, so its predecessor is accepted in its place.
    """
    if expected is None or expected.producer_epoch == metadata.producer_epoch:
        return True
    return metadata.producer_epoch > EXHAUSTED_EPOCH and expected.producer_epoch == last_epoch


def _next_epoch(metadata: TransactionMetadata, expected: Producer | None, last_epoch: int) -> tuple[int, int]:
    """Returns the next epoch, and the epoch before it if a repeated request may send that epoch."""
    present = metadata.producer_epoch
    if expected is None:
        return present + 1, NO_PRODUCER_EPOCH
    if expected.producer_epoch == present:
        return present + 1, present
    if expected.producer_epoch == last_epoch:
        # The same request again: its first response was lost, and no other request has succeeded since.
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
        f"The producer of {metadata.transactional_id} is at epoch {metadata.producer_epoch}, but the request has epoch "
        f"{epoch}.",
    )
