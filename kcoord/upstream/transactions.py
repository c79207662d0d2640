# SPDX-License-Identifier: Apache-2.0
"""Offsets in transactions whose coordinator is in the upstream: AddOffsetsToTxn and TxnOffsetCommit.

Theory of operation. The upstream's transaction coordinator knows nothing of kcoord's groups. A transaction with offsets
of a group has the group's partition of the log as one of its partitions:

1. AddOffsetsToTxn, on any port, becomes AddPartitionsToTxn with that partition. It is sent to the coordinator of the
   transactional id, with the producer id and the epoch of the client, and as kcoord's own user.
2. TxnOffsetCommit, on kcoord's own port, writes the offsets to that partition as a batch of the client's producer
   (`kcoord.runtime.upstream_log`). The leader of the partition verifies that the partition is part of the transaction.
3. The client ends the transaction at its coordinator, which writes a marker to the partition. The shard reads it there.

Clients leave out step 1 if `transaction.version` is 2, so ApiVersions lists 1 at most. For the same reason it lists
TxnOffsetCommit up to version 4.
"""

from __future__ import annotations

import logging
from typing import Final

from kcoord.client.cluster import CoordinatorType
from kcoord.client.results import error_of
from kcoord.coordinator.group.shard import GroupCoordinatorShard
from kcoord.server.api.api_table import RequestContext
from kcoord.server.api.handlers import txn_offset_commit
from kcoord.server.broker import Broker
from kcoord.server.replies import Reply, map_reply
from kcoord.upstream.cluster import UpstreamCluster
from kcoord.upstream.own_topics import OFFSETS_TOPIC
from kcoord.upstream.rights import naming_right
from kcoord_protocol.acls import AclOperation, ResourceType
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import (
    AddOffsetsToTxnRequest,
    AddOffsetsToTxnResponse,
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnResponse,
    TxnOffsetCommitRequest,
    TxnOffsetCommitResponse,
)

TXN_OFFSET_COMMIT_VERSIONS: Final = range(5)
ADD_PARTITIONS_VERSION: Final = 3
"""Later versions are for brokers."""
_ABORTABLE_SINCE_VERSION: Final = 4
_MISSING_RIGHTS: Final = frozenset({Errors.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, Errors.TOPIC_AUTHORIZATION_FAILED})
_UNSENT: Final = frozenset({Errors.NETWORK_EXCEPTION, Errors.REQUEST_TIMED_OUT, Errors.BROKER_NOT_AVAILABLE})

_logger = logging.getLogger(__name__)


class TransactionalOffsets:
    """The handlers of both APIs; the module describes them."""

    def __init__(self, upstream: UpstreamCluster) -> None:
        self._upstream = upstream

    def add_offsets(
        self, broker: Broker, context: RequestContext, request: AddOffsetsToTxnRequest
    ) -> Reply[AddOffsetsToTxnResponse]:
        """Handles AddOffsetsToTxn."""
        if context.rights is not None:
            context.rights.require(AclOperation.WRITE, ResourceType.TRANSACTIONAL_ID, request.transactional_id)
            context.rights.require(AclOperation.READ, ResourceType.GROUP, request.group_id)
        return broker.spawn(self._add_partition(request, broker.groups.shard_of(request.group_id)))

    async def _add_partition(self, request: AddOffsetsToTxnRequest, shard_id: int) -> AddOffsetsToTxnResponse:
        added = AddPartitionsToTxnRequest(
            v3_and_below_transactional_id=request.transactional_id,
            v3_and_below_producer_id=request.producer_id,
            v3_and_below_producer_epoch=request.producer_epoch,
            v3_and_below_topics=[
                AddPartitionsToTxnRequest.AddPartitionsToTxnTopic(name=OFFSETS_TOPIC, partitions=[shard_id])
            ],
        )
        try:
            answer = await self._upstream.connections.call_coordinator(
                CoordinatorType.TRANSACTION,
                request.transactional_id,
                added,
                AddPartitionsToTxnResponse,
                _codes,
                highest=ADD_PARTITIONS_VERSION,
            )
        except KafkaError as error:
            if error.error in _UNSENT:
                raise KafkaError(Errors.COORDINATOR_NOT_AVAILABLE, error.message) from error
            raise _refusal(error, request.transactional_id) from None
        for code in _codes(answer):
            if code == Errors.UNKNOWN_TOPIC_OR_PARTITION:
                # The coordinator has not heard of the topic yet.
                raise KafkaError(Errors.COORDINATOR_LOAD_IN_PROGRESS)
            if code:
                raise _refusal(KafkaError(error_of(code)), request.transactional_id)
        return AddOffsetsToTxnResponse()


def _refusal(error: KafkaError, transactional_id: str) -> KafkaError:
    """Returns the error for the client. If kcoord's user lacks a right, the error names it, and so does the log."""
    if error.error not in _MISSING_RIGHTS:
        return error
    is_about_id = error.error is Errors.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
    refusal = naming_right(
        error, "Write", f"transactional id {transactional_id}" if is_about_id else f"topic {OFFSETS_TOPIC}"
    )
    _logger.warning("A group cannot be added to a transaction: %s", refusal)
    return refusal


def _codes(answer: AddPartitionsToTxnResponse) -> list[int]:
    return [
        partition.partition_error_code
        for topic in answer.results_by_topic_v3_and_below
        for partition in topic.results_by_partition
    ]


def commit_offsets(
    broker: Broker, context: RequestContext, request: TxnOffsetCommitRequest
) -> Reply[TxnOffsetCommitResponse]:
    """Handles TxnOffsetCommit."""
    return txn_offset_commit.handle_with(broker, context, request, _commit)


def _commit(broker: Broker, context: RequestContext, request: TxnOffsetCommitRequest) -> Reply[TxnOffsetCommitResponse]:
    if request.producer_id < 0:
        # The upstream would take the records without verification, since they would be in no transaction.
        raise KafkaError(Errors.INVALID_PRODUCER_ID_MAPPING, f"No producer has the id {request.producer_id}.")
    reply = broker.groups.call(
        request.group_id, GroupCoordinatorShard.commit_provisionally, request, context.operation_context()
    )

    def fail(error: KafkaError) -> TxnOffsetCommitResponse:
        if error.error in _MISSING_RIGHTS:
            _logger.warning("Offsets of group %s are not committed: %s", request.group_id, error)
        raise KafkaError(client_error(error.error, context.api_version), error.message)

    return map_reply(reply, lambda response: response, fail)


def client_error(error: Errors, version: int) -> Errors:
    """Returns the error that a client gets for an error of the log: one after which it retries, aborts, or ends."""
    match error:
        case Errors.PRODUCER_FENCED:
            return Errors.INVALID_PRODUCER_EPOCH
        case Errors.INVALID_TXN_STATE | Errors.TRANSACTION_ABORTABLE:
            # As the group coordinator of Apache Kafka does.
            is_abortable = version >= _ABORTABLE_SINCE_VERSION
            return Errors.TRANSACTION_ABORTABLE if is_abortable else Errors.INVALID_TXN_STATE
        case Errors.OUT_OF_ORDER_SEQUENCE_NUMBER | Errors.DUPLICATE_SEQUENCE_NUMBER:
            # Older clients abort the transaction after an error of the group.
            is_abortable = version >= _ABORTABLE_SINCE_VERSION
            return Errors.TRANSACTION_ABORTABLE if is_abortable else Errors.ILLEGAL_GENERATION
    return error
