# SPDX-License-Identifier: Apache-2.0
"""DescribeTransactions (KIP-664): the state of transactional ids; each id has its own error."""

from __future__ import annotations

from kcoord.coordinator.transaction.shard import TransactionCoordinatorShard
from kcoord.server.api.api_table import RequestContext
from kcoord.server.api.authorization import Rights
from kcoord.server.broker import Broker
from kcoord.server.replies import Reply, gather_replies, map_reply
from kcoord_protocol.acls import AclOperation, ResourceType
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import KafkaError
from kcoord_protocol.messages import DescribeTransactionsRequest, DescribeTransactionsResponse

State = DescribeTransactionsResponse.TransactionState

API_KEY = ApiKey.DESCRIBE_TRANSACTIONS
VERSIONS = range(0, 1)


def handle(
    broker: Broker, context: RequestContext, request: DescribeTransactionsRequest
) -> Reply[DescribeTransactionsResponse]:
    replies = [_describe(broker, context, transactional_id) for transactional_id in request.transactional_ids]
    return map_reply(
        gather_replies(replies),
        lambda states: DescribeTransactionsResponse(
            transaction_states=_visible(context.rights, [state for part in states for state in part])
        ),
    )


def _visible(rights: Rights | None, states: list[State]) -> list[State]:
    """Removes the topics that the client may not describe."""
    if rights is not None:
        for state in states:
            visible = rights.allowed(
                AclOperation.DESCRIBE, ResourceType.TOPIC, [topic.topic for topic in state.topics], logs_denial=False
            )
            state.topics = [topic for topic in state.topics if topic.topic in visible]
    return states


def _describe(broker: Broker, context: RequestContext, transactional_id: str) -> Reply[list[State]]:
    try:
        if context.rights is not None:
            context.rights.require(AclOperation.DESCRIBE, ResourceType.TRANSACTIONAL_ID, transactional_id)
        reply = broker.transactions.call(
            transactional_id,
            TransactionCoordinatorShard.describe_transactions,
            [transactional_id],
            context.operation_context(),
        )
    except KafkaError as error:
        return [_failed(transactional_id, error)]
    return map_reply(reply, lambda states: states, lambda error: [_failed(transactional_id, error)])


def _failed(transactional_id: str, error: KafkaError) -> State:
    return DescribeTransactionsResponse.TransactionState(error_code=error.error, transactional_id=transactional_id)


def error_response(
    request: DescribeTransactionsRequest, error: KafkaError, version: int
) -> DescribeTransactionsResponse:
    return DescribeTransactionsResponse(
        transaction_states=[_failed(transactional_id, error) for transactional_id in request.transactional_ids]
    )
