# SPDX-License-Identifier: Apache-2.0
"""The timeout of requests that change the cluster's metadata."""

from __future__ import annotations

from kcoord_protocol.errors import Errors, KafkaError


def check_timeout(timeout_ms: int) -> None:
    """Raise REQUEST_TIMED_OUT if the request has no time left when it arrives, as Kafka's controller does.

    A request that asks for nothing, or for nothing valid (a topic twice), is answered before its deadline is looked at
    (observed in 4.3.1), so callers skip the check then.
    """
    if timeout_ms <= 0:
        raise KafkaError(Errors.REQUEST_TIMED_OUT)
