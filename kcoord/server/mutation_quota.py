# SPDX-License-Identifier: Apache-2.0
"""The quota on created and deleted partitions of one request (`controller_mutation_rate`, KIP-599).

Theory of operation. The process that writes the metadata log has the token buckets. Each partition that CreateTopics,
CreatePartitions or DeleteTopics creates or deletes takes a token out. A request may take more tokens than there are, so
a large topic can be created with a small quota. As long as the client owes tokens:

* Versions that know THROTTLING_QUOTA_EXCEEDED (*strict*) refuse each further topic with that error.
* Older versions change the topic, and owe more tokens.

Either way the response has a throttle_time_ms: the time after which the client owes nothing. Its connection is muted
during that time. Another worker forwards the request with the principal of the client, and follows the
throttle_time_ms of the response.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from kcoord.runtime.result import OperationContext
from kcoord.server.client_quotas import Throttled, TokenBucket, whole_ms
from kcoord_protocol.errors import Errors, KafkaError

if TYPE_CHECKING:
    from kcoord.server.api.api_table import RequestContext
    from kcoord.server.broker import Broker


T = TypeVar("T", bound=Throttled)


class MutationQuota:
    """The quota of a request. `rate`: tokens per second."""

    def __init__(self, bucket: TokenBucket, rate: float, *, is_strict: bool, now_ms: Callable[[], int]) -> None:
        self._bucket = bucket
        self._rate = rate
        self._is_strict = is_strict
        self._now_ms = now_ms
        self._free_ms = 0

    @classmethod
    def of(cls, broker: Broker, context: RequestContext, strict_since: int) -> MutationQuota | None:
        """Returns the quota of a request, None if its client has none. `strict_since`: the first strict version."""
        # A broker that needs a topic itself has no principal.
        if broker.quotas is None or not context.client.principal:
            return None
        metered = broker.quotas.mutations.meter_of(context.user, context.client_id, broker.now_ms())
        if metered is None:
            return None
        rate, bucket = metered
        return cls(bucket, rate, is_strict=context.api_version >= strict_since, now_ms=broker.now_ms)

    def count_partitions(self, count: int) -> None:
        """Takes tokens out. Raises THROTTLING_QUOTA_EXCEEDED if the quota is strict and the client owes tokens."""
        now_ms = self._now_ms()
        if self._is_strict:
            tokens = self._bucket.tokens(self._rate, now_ms)
            if tokens >= 0:
                self._bucket.spend(count, self._rate, now_ms)
                return
        else:
            tokens = self._bucket.spend(count, self._rate, now_ms)
        if tokens < 0:
            self._free_ms = now_ms + whole_ms(-tokens / self._rate * 1000)
            if self._is_strict:
                raise KafkaError(Errors.THROTTLING_QUOTA_EXCEEDED)

    def throttle_ms(self) -> int:
        """Returns for how long to throttle the client from now on, 0 if it did not exceed its quota."""
        return max(self._free_ms - self._now_ms(), 0)


def operation_context(context: RequestContext, quota: MutationQuota | None) -> OperationContext:
    """Returns the context of an operation that counts partitions against the quota."""
    operation = context.operation_context()
    operation.count_partitions = None if quota is None else quota.count_partitions
    return operation


def throttled(context: RequestContext, quota: MutationQuota | None, response: T) -> T:
    """Notes the throttle time in the response, and mutes the connection of the client.

    If another worker has the quota, the response has the time already.
    """
    if quota is not None:
        response.throttle_time_ms = max(response.throttle_time_ms, quota.throttle_ms())
    if response.throttle_time_ms:
        context.client.throttle(response.throttle_time_ms)
    return response
