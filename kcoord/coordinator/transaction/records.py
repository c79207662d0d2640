# SPDX-License-Identifier: Apache-2.0
"""Converts between transaction metadata and the records of `__transaction_state`; no other module does."""

from __future__ import annotations

from typing import Final

from kcoord.coordinator.transaction.metadata import TransactionMetadata, TransactionState, partitions_of
from kcoord.runtime.result import CoordinatorRecord
from kcoord_protocol.messages import TransactionLogKey, TransactionLogValue

_OLDEST_FLEXIBLE_VERSION: Final = 1


def new_transaction_record(metadata: TransactionMetadata, transaction_version: int) -> CoordinatorRecord:
    """Returns the record of a transactional id.

    Levels 1 and 2 of the feature `transaction.version` write the flexible version. The old version lacks the fields of
    KIP-890, which a reader then sets to their defaults.
    """
    version = min(transaction_version, _OLDEST_FLEXIBLE_VERSION)
    value = TransactionLogValue(
        producer_id=metadata.producer_id,
        producer_epoch=metadata.producer_epoch,
        transaction_timeout_ms=metadata.timeout_ms,
        transaction_status=metadata.state,
        transaction_partitions=None if metadata.state is TransactionState.EMPTY else _encoded_partitions(metadata),
        transaction_last_update_timestamp_ms=metadata.last_update_ms,
        transaction_start_timestamp_ms=metadata.start_ms,
    )
    if version >= _OLDEST_FLEXIBLE_VERSION:
        value.previous_producer_id = metadata.previous_producer_id
        value.next_producer_id = metadata.next_producer_id
        value.next_producer_epoch = metadata.next_producer_epoch
        value.client_transaction_version = metadata.client_transaction_version
    return CoordinatorRecord(TransactionLogKey(transactional_id=metadata.transactional_id), value, version)


def new_transaction_tombstone(transactional_id: str) -> CoordinatorRecord:
    return CoordinatorRecord(TransactionLogKey(transactional_id=transactional_id), None)


def _encoded_partitions(metadata: TransactionMetadata) -> list[TransactionLogValue.PartitionsSchema]:
    return [
        TransactionLogValue.PartitionsSchema(topic=topic, partition_ids=sorted(numbers))
        for topic, numbers in sorted(metadata.partitions.items())
    ]


def metadata_from(key: TransactionLogKey, value: TransactionLogValue) -> TransactionMetadata:
    """Returns the metadata of a record."""
    return TransactionMetadata(
        transactional_id=key.transactional_id,
        producer_id=value.producer_id,
        producer_epoch=value.producer_epoch,
        timeout_ms=value.transaction_timeout_ms,
        state=TransactionState(value.transaction_status),
        last_update_ms=value.transaction_last_update_timestamp_ms,
        start_ms=value.transaction_start_timestamp_ms,
        partitions=partitions_of((topic.topic, topic.partition_ids) for topic in value.transaction_partitions or ()),
        previous_producer_id=value.previous_producer_id,
        next_producer_id=value.next_producer_id,
        next_producer_epoch=value.next_producer_epoch,
        client_transaction_version=value.client_transaction_version,
    )
