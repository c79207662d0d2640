# SPDX-License-Identifier: Apache-2.0
"""Repeats a call about several keys (topics, partitions, groups) for those keys whose error may pass."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Final, TypeVar

from kcoord.client.cluster import Cluster, Deadline
from kcoord.client.errors import SslAuthenticationException
from kcoord_protocol.errors import Errors, KafkaError

K = TypeVar("K")
V = TypeVar("V")

# These errors may pass: another broker is responsible, or the broker is not ready. UNKNOWN_TOPIC_OR_PARTITION, which a
# consumer retries, is not among them: here it is the result.
_REPEATED: Final = frozenset(
    {
        Errors.NETWORK_EXCEPTION,
        Errors.REQUEST_TIMED_OUT,
        Errors.NOT_CONTROLLER,
        Errors.NOT_COORDINATOR,
        Errors.COORDINATOR_NOT_AVAILABLE,
        Errors.COORDINATOR_LOAD_IN_PROGRESS,
        Errors.NOT_LEADER_OR_FOLLOWER,
        Errors.LEADER_NOT_AVAILABLE,
        Errors.FENCED_LEADER_EPOCH,
        Errors.UNKNOWN_LEADER_EPOCH,
        Errors.REPLICA_NOT_AVAILABLE,
        Errors.OFFSET_NOT_AVAILABLE,
        Errors.KAFKA_STORAGE_ERROR,
        Errors.UNSTABLE_OFFSET_COMMIT,
        Errors.THROTTLING_QUOTA_EXCEEDED,
    }
)


async def repeat(
    cluster: Cluster,
    deadline: Deadline,
    keys: Iterable[K],
    attempt: Callable[[list[K]], Awaitable[Mapping[K, V | KafkaError]]],
) -> dict[K, V | KafkaError]:
    """Makes an attempt for all keys, then for those keys whose error may pass, until the deadline.

    Returns the last outcome of each key.
    """
    distinct_keys = list(dict.fromkeys(keys))
    outcomes: dict[K, V | KafkaError] = {}
    pending = distinct_keys
    failures = 0
    while pending:
        latest = await _attempt(cluster, deadline, pending, attempt)
        outcomes.update(latest)
        pending = [key for key in pending if _is_repeated(outcomes[key])]
        if Errors.NOT_CONTROLLER in {outcome.error for outcome in latest.values() if isinstance(outcome, KafkaError)}:
            cluster.forget_controller()
        if pending:
            failures += 1
            await cluster.sleep_backoff(failures, deadline)
            if deadline.is_over:
                break
    return {key: outcomes[key] for key in distinct_keys}


async def _attempt(
    cluster: Cluster,
    deadline: Deadline,
    keys: list[K],
    attempt: Callable[[list[K]], Awaitable[Mapping[K, V | KafkaError]]],
) -> Mapping[K, V | KafkaError]:
    """Makes one attempt. A failure of the whole request is the outcome of every key."""
    failed = KafkaError(Errors.UNKNOWN_SERVER_ERROR, "the broker left this out of its response")
    try:
        return dict.fromkeys(keys, failed) | dict(await cluster.retry("the request", deadline, lambda: attempt(keys)))
    except KafkaError as error:
        return dict.fromkeys(keys, error)


def _is_repeated(outcome: object) -> bool:
    if isinstance(outcome, SslAuthenticationException):
        return False
    return isinstance(outcome, KafkaError) and outcome.error in _REPEATED
