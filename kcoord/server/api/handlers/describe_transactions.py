# SPDX-License-Identifier: Apache-2.0
"""DescribeTransactions (KIP-664): the state of transactional ids; each id has its own error."""

from __future__ import annotations

from kcoord.coordinator.transaction.shard import TransactionCoordinatorShard
from kcoord.runtime.result import CoordinatorResult, OperationContext
from kcoord.server.api.api_table import RequestContext
from kcoord.server.api.authorization import Rights, denied
from kcoord.server.api.fan_out import ask_each_shard
from kcoord.server.broker import LARGE_RESPONSE_ITEMS, Broker
from kcoord.server.replies import Reply, chain_reply
from kcoord_protocol.acls import AclOperation, ResourceType
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import DescribeTransactionsRequest, DescribeTransactionsResponse

State = DescribeTransactionsResponse.TransactionState

API_KEY = ApiKey.DESCRIBE_TRANSACTIONS
VERSIONS = range(0, 1)


def handle(
    broker: Broker, context: RequestContext, request: DescribeTransactionsRequest
) -> Reply[DescribeTransactionsResponse]:
    rights, ids = context.rights, request.transactional_ids
    refused = {"": KafkaError(Errors.INVALID_REQUEST)}
    if rights is not None:
        allowed = rights.allowed(AclOperation.DESCRIBE, ResourceType.TRANSACTIONAL_ID, ids)
        refused |= dict.fromkeys(set(ids) - allowed, denied(ResourceType.TRANSACTIONAL_ID))

    def describe(
        shard: TransactionCoordinatorShard, operation_context: OperationContext, some: list[str]
    ) -> CoordinatorResult[list[State]]:
        result = shard.describe_transactions(operation_context, some)
        if rights is not None:
            _hide_topics(rights, result.response)
        return result

    def respond(states: list[State]) -> Reply[DescribeTransactionsResponse]:
        def complete() -> DescribeTransactionsResponse:
            described = iter(states)
            return DescribeTransactionsResponse(
                transaction_states=[_failed(key, refused[key]) if key in refused else next(described) for key in ids]
            )

        if len(ids) <= LARGE_RESPONSE_ITEMS:
            return complete()
        return broker.spawn(broker.made_in_thread(complete, context.api_version))

    named = [key for key in ids if key not in refused]
    states = ask_each_shard(
        broker, broker.transactions, context, named, describe, lambda state: state.transactional_id, _failed
    )
    return chain_reply(states, respond)


def _hide_topics(rights: Rights, states: list[State]) -> None:
    """Removes the topics that the client may not describe."""
    for state in states:
        names = [topic.topic for topic in state.topics]
        visible = rights.allowed(AclOperation.DESCRIBE, ResourceType.TOPIC, names, logs_denial=False)
        state.topics = [topic for topic in state.topics if topic.topic in visible]


def _failed(transactional_id: str, error: KafkaError) -> State:
    return DescribeTransactionsResponse.TransactionState(error_code=error.error, transactional_id=transactional_id)


def error_response(
    request: DescribeTransactionsRequest, error: KafkaError, version: int
) -> DescribeTransactionsResponse:
    return DescribeTransactionsResponse(
        transaction_states=[_failed(transactional_id, error) for transactional_id in request.transactional_ids]
    )
