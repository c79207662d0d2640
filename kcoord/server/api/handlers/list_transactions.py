# SPDX-License-Identifier: Apache-2.0
"""ListTransactions (KIP-664): the transactional ids of this broker that pass the filters.

v1 adds a filter by duration (KIP-994), v2 a filter by pattern (KIP-1152).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from operator import attrgetter

from kcoord.coordinator.group.regex import compile_pattern
from kcoord.coordinator.transaction.metadata import STATES_BY_NAME
from kcoord.coordinator.transaction.shard import TransactionCoordinatorShard
from kcoord.runtime.result import CoordinatorResult, OperationContext
from kcoord.server.api.api_table import RequestContext
from kcoord.server.api.authorization import Rights
from kcoord.server.api.fan_out import list_in_turns
from kcoord.server.broker import LARGE_RESPONSE_ITEMS, Broker
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
    matches = compile_pattern(request.transactional_id_pattern) if request.transactional_id_pattern else None
    states = frozenset(STATES_BY_NAME[name] for name in request.state_filters if name in STATES_BY_NAME)
    unknown = [name for name in request.state_filters if name not in STATES_BY_NAME]
    if request.state_filters and not states:
        return ListTransactionsResponse(unknown_state_filters=unknown)
    producer_ids = frozenset(request.producer_id_filters)

    def operation(
        shard: TransactionCoordinatorShard, operation_context: OperationContext, ids: list[str] | None
    ) -> CoordinatorResult[States]:
        return shard.list_transactions(
            operation_context,
            ids,
            states=states,
            producer_ids=producer_ids,
            duration_ms=request.duration_filter,
            matches=matches,
        )

    def list_some(shard_id: int, ids: list[str] | None = None) -> Reply[States]:
        reply = broker.transactions.call_shard(shard_id, operation, ids, context.operation_context())
        return map_reply(reply, lambda listed: _visible(context.rights, listed))

    if broker.transactions.id_count > LARGE_RESPONSE_ITEMS:
        return broker.spawn(_list_in_turns(broker, context, list_some, unknown))
    replies = [list_some(shard_id) for shard_id in broker.transactions.shard_ids]
    return map_reply(
        gather_replies(replies),
        lambda parts: ListTransactionsResponse(unknown_state_filters=unknown, transaction_states=list(chain(*parts))),
    )


async def _list_in_turns(
    broker: Broker,
    context: RequestContext,
    list_some: Callable[[int, list[str]], Reply[States]],
    unknown: list[str],
) -> ListTransactionsResponse:
    def ids_of(shard_id: int) -> Reply[list[str]]:
        return broker.transactions.call_shard(shard_id, _ids, None, context.operation_context())

    parts = await list_in_turns(broker.transactions.shard_ids, ids_of, list_some)

    def respond() -> ListTransactionsResponse:
        for part in parts:
            part.sort(key=attrgetter("transactional_id"))
        return ListTransactionsResponse(unknown_state_filters=unknown, transaction_states=list(chain(*parts)))

    return await broker.made_in_thread(respond, context.api_version)


def _ids(shard: TransactionCoordinatorShard, context: OperationContext, nothing: None) -> CoordinatorResult[list[str]]:
    return CoordinatorResult(shard.transactional_ids())


def _visible(rights: Rights | None, states: States) -> States:
    if rights is None:
        return states
    names = [state.transactional_id for state in states]
    visible = rights.allowed(AclOperation.DESCRIBE, ResourceType.TRANSACTIONAL_ID, names, logs_denial=False)
    return [state for state in states if state.transactional_id in visible]


def error_response(request: ListTransactionsRequest, error: KafkaError, version: int) -> ListTransactionsResponse:
    return ListTransactionsResponse(error_code=error.error)
