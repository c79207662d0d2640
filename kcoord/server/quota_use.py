# SPDX-License-Identifier: Apache-2.0
"""What Produce and Fetch count against the quotas of their client: the bytes of requests, and those of responses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kcoord.topics.fetch_manager import Throttle, replica_id
from kcoord_protocol.messages import FetchRequest, FetchResponse
from kcoord_protocol.primitives import encode_uvarint

if TYPE_CHECKING:
    from kcoord.server.api.api_table import RequestContext
    from kcoord.server.broker import Broker
    from kcoord.server.client_quotas import ClientQuotas


def throttle_of_produce(quotas: ClientQuotas, context: RequestContext) -> int:
    """Counts a request. Returns for how many milliseconds to throttle its client."""
    return quotas.produce.record(context.user, context.client_id, context.frame_bytes, context.now_ms)


def throttle_of_fetch(
    broker: Broker, quotas: ClientQuotas, context: RequestContext, request: FetchRequest
) -> Throttle | None:
    """Returns a function that counts the response, None if the client has no quota.

    A request gets at most as many bytes as a client without recent requests may fetch at once. A response above that
    would be withheld each time. The response is also withheld if the client is above its quota on time.
    """
    user, client_id, use = context.user, context.client_id, context.use
    if replica_id(request, context.api_version) >= 0:
        if use is not None:
            use.is_exempt = True
        return None
    burst = quotas.fetch.largest_burst(user, client_id)
    if burst is not None:
        request.max_bytes = min(request.max_bytes, burst)
    elif use is None:
        return None

    def throttle(response: FetchResponse) -> int:
        now_ms = broker.now_ms()
        throttle_ms = use.throttle_ms(now_ms) if use is not None else 0
        if burst is not None:
            size = response_bytes(response, context.api_version)
            throttle_ms = max(throttle_ms, quotas.fetch.record(user, client_id, size, now_ms))
            if throttle_ms:
                quotas.fetch.take_back(user, client_id, size, now_ms)
        if throttle_ms:
            context.client.throttle(throttle_ms)
        return throttle_ms

    return throttle


def response_bytes(response: FetchResponse, version: int) -> int:
    """Returns the size of the encoded response, without its header. Its records are not copied for that."""
    partitions = [partition for topic in response.responses for partition in topic.partitions]
    records = [partition.records for partition in partitions]
    for partition in partitions:
        partition.records = b""
    size = len(response.encode(version))
    for partition, data in zip(partitions, records, strict=True):
        partition.records = data
        if data:
            size += len(data)
            if FetchResponse.is_flexible(version):
                size += len(encode_uvarint(len(data) + 1)) - 1
    return size
