# SPDX-License-Identifier: Apache-2.0
"""The timeout of requests that change the cluster's metadata."""

from __future__ import annotations

from kcoord_protocol.errors import Errors, KafkaError


def check_timeout(timeout_ms: int) -> None:
    """Raises REQUEST_TIMED_OUT if the request has no time left when it arrives, as Kafka's controller does.

    Kafka 4.3.1 answers a request without valid items (none at all, or a topic twice) before it checks the deadline, so
    callers skip the check then.
    """
    if timeout_ms <= 0:
        raise KafkaError(Errors.REQUEST_TIMED_OUT)
