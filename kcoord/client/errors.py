# SPDX-License-Identifier: Apache-2.0
"""The errors that the client raises.

A `KafkaError` has an error code of the protocol. A broker returned the code, or it stands for an error of the network.
A `ClientException` is an error of the client itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kcoord.client.types import TopicPartition
from kcoord_protocol.errors import Errors, KafkaError


class DisconnectException(KafkaError):
    """The connection failed before the response arrived. The broker may or may not have executed the request."""

    message: str

    def __init__(self, message: str) -> None:
        super().__init__(Errors.NETWORK_EXCEPTION, message)


class SslAuthenticationException(DisconnectException):
    """The TLS handshake failed: one side does not accept the other's certificate, or they have no version in common.

    Unlike its error code, this is not retriable.
    """


class TimeoutException(KafkaError, TimeoutError):
    """The timeout of a call passed. If there was a failure before, the last one is the cause."""

    message: str

    def __init__(self, message: str) -> None:
        super().__init__(Errors.REQUEST_TIMED_OUT, message)


class ThrottledException(KafkaError):
    """A quota throttles the client for `throttle_ms`. The broker reads nothing more from the connection until then."""

    def __init__(self, throttle_ms: int, message: str) -> None:
        super().__init__(Errors.THROTTLING_QUOTA_EXCEEDED, message)
        self.throttle_ms = throttle_ms


class StaleMemberEpochException(KafkaError):
    """The coordinator has a newer epoch for the member. A retry after the next heartbeat uses that epoch."""

    def __init__(self, message: str) -> None:
        super().__init__(Errors.STALE_MEMBER_EPOCH, message)


class UnknownTopicException(KafkaError):
    """A topic or partition of the request does not exist. Unlike its error code, this is not retriable."""

    def __init__(self, message: str) -> None:
        super().__init__(Errors.UNKNOWN_TOPIC_OR_PARTITION, message)


def is_retriable(error: KafkaError) -> bool:
    """Whether the same request may succeed later."""
    if isinstance(error, UnknownTopicException | SslAuthenticationException):
        return False
    return error.error.retriable or isinstance(error, StaleMemberEpochException)


class UnsupportedVersionException(KafkaError):
    """The broker does not have the API, or not in a version with the required fields."""

    def __init__(self, message: str) -> None:
        super().__init__(Errors.UNSUPPORTED_VERSION, message)


class ClientException(Exception):
    """The client rejects a call, or it cannot continue."""


class ConfigException(ClientException, ValueError):
    """A setting is unknown or out of range, or it contradicts another one."""


class IllegalStateException(ClientException):
    """The client is not in a state for this call: it is closed, or the partition is not assigned."""


class NoOffsetForPartitionException(ClientException):
    """Partitions have no committed offset, and `auto_offset_reset` is none."""

    def __init__(self, partitions: Iterable[TopicPartition]) -> None:
        self.partitions = sorted(partitions)
        super().__init__(f"no committed offset and no reset policy for {', '.join(map(str, self.partitions))}")


class OffsetOutOfRangeException(ClientException):
    """The position is outside of the log, and `auto_offset_reset` is none."""

    def __init__(self, positions: Mapping[TopicPartition, int]) -> None:
        self.positions = dict(positions)
        texts = (f"{partition} at {offset}" for partition, offset in sorted(self.positions.items()))
        super().__init__(f"position out of range and no reset policy: {', '.join(texts)}")


class CommitFailedException(ClientException):
    """The coordinator rejected the commit of a member that is no longer in the group.

    The partitions may have new owners.
    """


class RecordTooLargeException(ClientException):
    """A record is larger than `max_request_size` or `buffer_memory`."""


class AssignorException(ClientException):
    """A local assignor raised an exception, which is the cause, or it returned something unusable."""


class TransactionAbortedException(ClientException):
    """The record was not sent, because its transaction was aborted first."""
