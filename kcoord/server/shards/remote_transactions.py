# SPDX-License-Identifier: Apache-2.0
"""Transactions across workers, with the requests of Kafka's brokers.

AddPartitionsToTxn and ListTransactions ask a coordinator on another worker; WriteTxnMarkers writes markers to
partitions that another worker leads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, cast

from kcoord.coordinator.transaction.metadata import STATES_BY_NAME, Partitions
from kcoord.runtime.result import Producer
from kcoord.server.replies import map_reply
from kcoord.server.shards.peer_calls import PeerCalls
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import (
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnResponse,
    ListTransactionsRequest,
    ListTransactionsResponse,
    Message,
    WriteTxnMarkersRequest,
    WriteTxnMarkersResponse,
)

if TYPE_CHECKING:
    from kcoord.coordinator.transaction.work import WriteMarkers

ADD_PARTITIONS_VERSION: Final = 5
WRITE_MARKERS_VERSION: Final = 2
LIST_TRANSACTIONS_VERSION: Final = 1

PartitionErrors = Mapping[tuple[str, int], Errors]


def ask_coordinator(
    peers: PeerCalls, broker_id: int, transactional_id: str, producer: Producer, partitions: Partitions, *, adds: bool
) -> asyncio.Future[PartitionErrors]:
    """Asks the coordinator whether the producer may write to the partitions, and adds them if `adds`.

    Returns the errors by partition. With `adds` the first error is raised as KafkaError instead, and the result is
    empty. An unreachable coordinator raises COORDINATOR_NOT_AVAILABLE.
    """
    transaction = AddPartitionsToTxnRequest.AddPartitionsToTxnTransaction(
        transactional_id=transactional_id,
        producer_id=producer.producer_id,
        producer_epoch=producer.producer_epoch,
        verify_only=not adds,
        topics=[
            AddPartitionsToTxnRequest.AddPartitionsToTxnTopic(name=topic, partitions=sorted(numbers))
            for topic, numbers in sorted(partitions.items())
        ],
    )
    reply = peers.ask(broker_id, AddPartitionsToTxnRequest(transactions=[transaction]), ADD_PARTITIONS_VERSION)

    def errors(response: Message) -> PartitionErrors:
        errors_by_partition = _coordinator_errors(cast("AddPartitionsToTxnResponse", response))
        refusals = [error for error in errors_by_partition.values() if error is not Errors.NONE]
        if adds and refusals:
            raise KafkaError(refusals[0])
        return {} if adds else errors_by_partition

    return map_reply(reply, errors, _unavailable)


def _unavailable(error: KafkaError) -> PartitionErrors:
    raise KafkaError(Errors.COORDINATOR_NOT_AVAILABLE, error.message)


def _coordinator_errors(response: AddPartitionsToTxnResponse) -> PartitionErrors:
    if response.error_code:
        raise KafkaError(Errors(response.error_code))
    return {
        (topic.name, partition.partition_index): Errors(partition.partition_error_code)
        for result in response.results_by_transaction
        for topic in result.topic_results
        for partition in topic.results_by_partition
    }


def in_transaction(peers: PeerCalls, broker_id: int, producer_ids: frozenset[int]) -> asyncio.Future[set[int]]:
    """Returns those of the producers that have a transaction at a coordinator which is open or ending.

    Raises KafkaError if the coordinator does not answer.
    """
    states = [name for name, state in STATES_BY_NAME.items() if not state.is_between_transactions]
    request = ListTransactionsRequest(state_filters=states, producer_id_filters=sorted(producer_ids))

    def producers(message: Message) -> set[int]:
        response = cast("ListTransactionsResponse", message)
        if response.error_code:
            raise KafkaError(Errors(response.error_code))
        return {transaction.producer_id for transaction in response.transaction_states}

    return map_reply(peers.ask(broker_id, request, LIST_TRANSACTIONS_VERSION), producers)


def tell_leader(
    peers: PeerCalls, broker_id: int, work: WriteMarkers, partitions: Partitions
) -> asyncio.Future[PartitionErrors]:
    """Has the worker that leads the partitions write markers. Returns the errors by partition.

    If the worker does not answer, every partition has COORDINATOR_NOT_AVAILABLE.
    """
    marker = WriteTxnMarkersRequest.WritableTxnMarker(
        producer_id=work.producer.producer_id,
        producer_epoch=work.producer.producer_epoch,
        transaction_result=work.committed,
        coordinator_epoch=work.coordinator_epoch,
        transaction_version=work.transaction_version,
        topics=[
            WriteTxnMarkersRequest.WritableTxnMarkerTopic(name=topic, partition_indexes=sorted(numbers))
            for topic, numbers in sorted(partitions.items())
        ],
    )
    reply = peers.ask(broker_id, WriteTxnMarkersRequest(markers=[marker]), WRITE_MARKERS_VERSION)
    unavailable = {
        (topic, number): Errors.COORDINATOR_NOT_AVAILABLE for topic in partitions for number in partitions[topic]
    }
    return map_reply(
        reply, lambda response: _marker_errors(cast("WriteTxnMarkersResponse", response)), lambda _: unavailable
    )


def _marker_errors(response: WriteTxnMarkersResponse) -> PartitionErrors:
    return {
        (topic.name, partition.partition_index): Errors(partition.error_code)
        for marker in response.markers
        for topic in marker.topics
        for partition in topic.partitions
    }
