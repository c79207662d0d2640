# SPDX-License-Identifier: Apache-2.0
"""Repeats calls about several things, for those of them whose answer means "elsewhere" or "later"."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Final, TypeVar

from kcoord.client.cluster import Cluster, Deadline
from kcoord_protocol.errors import Errors, KafkaError

K = TypeVar("K")
V = TypeVar("V")

# Answers that mean "elsewhere" or "later". An unknown topic is retriable for a consumer; here it is the answer.
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
    """Asks about all keys, and again about those whose answer means elsewhere or later, until the deadline."""
    wanted = list(dict.fromkeys(keys))
    outcomes: dict[K, V | KafkaError] = {}
    pending = wanted
    failures = 0
    while pending:
        latest = await _attempt(cluster, deadline, pending, attempt)
        outcomes.update(latest)
        pending = [key for key in pending if _is_repeated(outcomes[key])]
        if pending:
            failures += 1
            await cluster.sleep_backoff(failures, deadline)
            if deadline.is_over:
                break
    return {key: outcomes[key] for key in wanted}


async def _attempt(
    cluster: Cluster,
    deadline: Deadline,
    keys: list[K],
    attempt: Callable[[list[K]], Awaitable[Mapping[K, V | KafkaError]]],
) -> Mapping[K, V | KafkaError]:
    """One attempt; a failure of the whole request is one of every key."""
    failed = KafkaError(Errors.UNKNOWN_SERVER_ERROR, "the broker left this out of its answer")
    try:
        return dict.fromkeys(keys, failed) | dict(await cluster.retry("the request", deadline, lambda: attempt(keys)))
    except KafkaError as error:
        return dict.fromkeys(keys, error)


def _is_repeated(outcome: object) -> bool:
    return isinstance(outcome, KafkaError) and outcome.error in _REPEATED
