# SPDX-License-Identifier: Apache-2.0
"""EndTxn: decides whether a producer may end its transaction, and computes the next metadata.

Up to EndTxn v4 the epoch stays the same. From v5 on (KIP-890) every end bumps it. A repeated EndTxn then differs in its
epoch from the end of the next transaction, and a late request of an ended transaction is fenced everywhere.

A repeated EndTxn whose response was lost succeeds without a change if it asks for the same outcome. Any other outcome
is an error.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kcoord.coordinator.transaction.init_producer import fenced
from kcoord.coordinator.transaction.metadata import (
    EXHAUSTED_EPOCH,
    NO_PRODUCER_EPOCH,
    NO_PRODUCER_ID,
    TransactionMetadata,
    TransactionState,
)
from kcoord.runtime.result import Producer
from kcoord_protocol.errors import Errors, KafkaError

_PREPARED = {True: TransactionState.PREPARE_COMMIT, False: TransactionState.PREPARE_ABORT}
_COMPLETED = {True: TransactionState.COMPLETE_COMMIT, False: TransactionState.COMPLETE_ABORT}


@dataclass(slots=True)
class EndRequest:
    """The request of a producer to end its transaction."""

    producer: Producer
    committed: bool
    bumps_epoch: bool
    client_transaction_version: int
    candidate_producer_id: int | None = None
    """The next producer id, used if the epochs are exhausted and the end bumps the epoch."""


def decide_end(metadata: TransactionMetadata, request: EndRequest, now_ms: int) -> TransactionMetadata | None:
    """Returns the prepared metadata; None if the transaction has ended already and only the response was lost."""
    return _decide_bumping(metadata, request, now_ms) if request.bumps_epoch else _decide(metadata, request, now_ms)


def _decide(metadata: TransactionMetadata, request: EndRequest, now_ms: int) -> TransactionMetadata | None:
    if request.producer.producer_id != metadata.producer_id:
        raise _unknown_producer(metadata, request)
    if request.producer.producer_epoch != metadata.producer_epoch:
        raise fenced(metadata, request.producer.producer_epoch)
    if metadata.state is TransactionState.ONGOING:
        return _prepared(metadata, request, now_ms)
    if metadata.state is _COMPLETED[request.committed]:
        return None
    raise _cannot_end(metadata, request)


def _decide_bumping(metadata: TransactionMetadata, request: EndRequest, now_ms: int) -> TransactionMetadata | None:
    producer, present = request.producer, metadata.producer
    after_overflow = (
        producer == (metadata.previous_producer_id, EXHAUSTED_EPOCH)
        and present.producer_epoch == 0
        and producer.producer_id != present.producer_id
    )
    # The epoch after the last one only fences. Its producer has to ask for a new producer id.
    after_bump = producer.producer_epoch + 1 == present.producer_epoch <= EXHAUSTED_EPOCH
    same_epoch = producer.producer_epoch == present.producer_epoch <= EXHAUSTED_EPOCH
    if producer.producer_id != present.producer_id and not after_overflow:
        raise _unknown_producer(metadata, request)
    match metadata.state:
        case TransactionState.PREPARE_COMMIT | TransactionState.PREPARE_ABORT:
            is_valid = after_bump
        case TransactionState.COMPLETE_COMMIT | TransactionState.COMPLETE_ABORT:
            is_valid = after_bump or after_overflow or same_epoch
        case _:
            is_valid = same_epoch
    if not is_valid:
        raise fenced(metadata, producer.producer_epoch)
    if metadata.state is TransactionState.ONGOING:
        return _prepared(metadata, request, now_ms)
    if same_epoch and not after_overflow and metadata.state.is_between_transactions and not request.committed:
        # An abort without a transaction still bumps the epoch (KIP-890). It has no start time, so it starts now.
        return _prepared(replace(metadata, start_ms=now_ms), request, now_ms)
    if metadata.state is _COMPLETED[request.committed] and (after_bump or after_overflow):
        return None
    raise _cannot_end(metadata, request)


def _prepared(metadata: TransactionMetadata, request: EndRequest, now_ms: int) -> TransactionMetadata:
    next_producer_id = NO_PRODUCER_ID
    epoch = metadata.producer_epoch
    if request.bumps_epoch:
        if metadata.is_epoch_exhausted:
            assert request.candidate_producer_id is not None, "the caller passes a producer id if one may be needed"
            next_producer_id = request.candidate_producer_id
        epoch += 1
    return replace(
        metadata,
        state=_PREPARED[request.committed],
        producer_epoch=epoch,
        previous_producer_id=metadata.producer_id,
        next_producer_id=next_producer_id,
        next_producer_epoch=NO_PRODUCER_EPOCH if next_producer_id == NO_PRODUCER_ID else 0,
        last_update_ms=now_ms,
        client_transaction_version=request.client_transaction_version,
    )


def fence_and_abort(metadata: TransactionMetadata, now_ms: int) -> TransactionMetadata:
    """Returns the prepared metadata of an abort by the coordinator, after a timeout or for a new producer.

    No producer gets the bumped epoch.
    """
    return replace(
        metadata,
        state=TransactionState.PREPARE_ABORT,
        producer_epoch=metadata.producer_epoch + 1,
        previous_producer_id=metadata.producer_id,
        last_update_ms=now_ms,
    )


def completed(metadata: TransactionMetadata, now_ms: int) -> TransactionMetadata:
    """Returns the metadata of a transaction whose markers are written to all partitions."""
    producer = metadata.client_producer
    return replace(
        metadata,
        state=_COMPLETED[metadata.state is TransactionState.PREPARE_COMMIT],
        producer_id=producer.producer_id,
        producer_epoch=producer.producer_epoch,
        previous_producer_id=metadata.producer_id,
        next_producer_id=NO_PRODUCER_ID,
        next_producer_epoch=NO_PRODUCER_EPOCH,
        partitions={},
        last_update_ms=now_ms,
    )


def _unknown_producer(metadata: TransactionMetadata, request: EndRequest) -> KafkaError:
    return KafkaError(
        Errors.INVALID_PRODUCER_ID_MAPPING,
        f"{metadata.transactional_id} belongs to producer {metadata.producer_id}, not {request.producer.producer_id}.",
    )


def _cannot_end(metadata: TransactionMetadata, request: EndRequest) -> KafkaError:
    """Returns the error of an EndTxn: retriable if the same end is in progress, else INVALID_TXN_STATE."""
    if metadata.state is _PREPARED[request.committed]:
        return KafkaError(Errors.CONCURRENT_TRANSACTIONS, f"The transaction of {metadata.transactional_id} is ending.")
    outcome = "commit" if request.committed else "abort"
    return KafkaError(
        Errors.INVALID_TXN_STATE,
        f"{metadata.transactional_id} is {metadata.state.wire_name} and cannot {outcome}.",
    )
