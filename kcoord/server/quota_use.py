# SPDX-License-Identifier: Apache-2.0
"""What Produce and Fetch count against the quotas of their client: the bytes of requests, and those of responses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kcoord.topics.fetch_manager import Throttle, replica_id
from kcoord_protocol.messages import FetchRequest, FetchResponse, ProduceRequest

if TYPE_CHECKING:
    from kcoord.server.api.api_table import RequestContext
    from kcoord.server.broker import Broker
    from kcoord.server.client_quotas import ClientQuotas


def throttle_of_produce(quotas: ClientQuotas, context: RequestContext, request: ProduceRequest) -> int:
    """Counts a request. Returns for how many milliseconds to throttle its client."""
    user = context.user
    if quotas.produce.limit_of(user, context.client_id) is None:
        return 0
    size = len(request.encode(context.api_version))
    return quotas.produce.record(user, context.client_id, size, context.now_ms)


def throttle_of_fetch(
    broker: Broker, quotas: ClientQuotas, context: RequestContext, request: FetchRequest
) -> Throttle | None:
    """Returns a function that counts the response, None if the client has no quota.

    A request gets at most as many bytes as a client without recent requests may fetch at once. A response above that
    would be withheld each time.
    """
    user, client_id = context.user, context.client_id
    burst = quotas.fetch.largest_burst(user, client_id)
    if burst is None or replica_id(request, context.api_version) >= 0:
        return None
    request.max_bytes = min(request.max_bytes, burst)

    def throttle(response: FetchResponse) -> int:
        size = len(response.encode(context.api_version))
        now_ms = broker.now_ms()
        throttle_ms = quotas.fetch.record(user, client_id, size, now_ms)
        if throttle_ms:
            quotas.fetch.take_back(user, client_id, size, now_ms)
            if context.client is not None:
                context.client.throttle(throttle_ms)
        return throttle_ms

    return throttle
