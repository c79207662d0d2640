# SPDX-License-Identifier: Apache-2.0
"""ListTransactions (KIP-664): the transactional ids of this broker that pass the filters.

v1 adds a filter by duration (KIP-994), v2 a filter by pattern (KIP-1152).
"""

from __future__ import annotations

from collections.abc import Callable

from kcoord.coordinator.group.regex import compile_pattern
from kcoord.coordinator.transaction.metadata import STATES_BY_NAME, TransactionState
from kcoord.coordinator.transaction.shard import TransactionCoordinatorShard
from kcoord.runtime.result import CoordinatorResult, OperationContext
from kcoord.server.api.api_table import RequestContext
from kcoord.server.api.authorization import Rights
from kcoord.server.broker import Broker
from kcoord.server.replies import Reply, gather_replies, map_reply
from kcoord_protocol.acls import AclOperation, ResourceType
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import KafkaError
from kcoord_protocol.messages import ListTransactionsRequest, ListTransactionsResponse

States = list[ListTransactionsResponse.TransactionState]

API_KEY = ApiKey.LIST_TRANSACTIONS
VERSIONS = range(0, 3)


def handle(
    broker: Broker, context: RequestContext, request: ListTransactionsRequest
) -> Reply[ListTransactionsResponse]:
    states = frozenset(STATES_BY_NAME[name] for name in request.state_filters if name in STATES_BY_NAME)
    unknown = [name for name in request.state_filters if name not in STATES_BY_NAME]
    if request.state_filters and not states:
        return ListTransactionsResponse(unknown_state_filters=unknown)
    matches = compile_pattern(request.transactional_id_pattern) if request.transactional_id_pattern else None
    replies = [_list(broker, context, shard_id, request, states, matches) for shard_id in broker.transactions.shard_ids]
    return map_reply(
        gather_replies(replies),
        lambda parts: ListTransactionsResponse(
            unknown_state_filters=unknown,
            transaction_states=_visible(context.rights, [state for part in parts for state in part]),
        ),
    )


def _visible(rights: Rights | None, states: States) -> States:
    if rights is None:
        return states
    names = [state.transactional_id for state in states]
    visible = rights.allowed(AclOperation.DESCRIBE, ResourceType.TRANSACTIONAL_ID, names, logs_denial=False)
    return [state for state in states if state.transactional_id in visible]


def _list(
    broker: Broker,
    context: RequestContext,
    shard_id: int,
    request: ListTransactionsRequest,
    states: frozenset[TransactionState],
    matches: Callable[[str], bool] | None,
) -> Reply[States]:
    def operation(
        shard: TransactionCoordinatorShard, operation_context: OperationContext, request: ListTransactionsRequest
    ) -> CoordinatorResult[States]:
        return shard.list_transactions(
            operation_context,
            states=states,
            producer_ids=frozenset(request.producer_id_filters),
            duration_ms=request.duration_filter,
            matches=matches,
        )

    return broker.transactions.call_shard(shard_id, operation, request, context.operation_context())


def error_response(request: ListTransactionsRequest, error: KafkaError, version: int) -> ListTransactionsResponse:
    return ListTransactionsResponse(error_code=error.error)
