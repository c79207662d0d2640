# SPDX-License-Identifier: Apache-2.0
"""What the client raises. `KafkaError` has an error code of the protocol: a broker sent it, or the network has one that
fits. `ClientException` is what the client decides by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kcoord.client.types import TopicPartition
from kcoord_protocol.errors import Errors, KafkaError


class DisconnectException(KafkaError):
    """The connection could not be made, or broke before the answer came; the request may or may not have had effect."""

    message: str

    def __init__(self, message: str) -> None:
        super().__init__(Errors.NETWORK_EXCEPTION, message)


class TimeoutException(KafkaError, TimeoutError):
    """The time allowed ran out; the last failure, if there was one, is the cause."""

    message: str

    def __init__(self, message: str) -> None:
        super().__init__(Errors.REQUEST_TIMED_OUT, message)


class StaleMemberEpochException(KafkaError):
    """The coordinator has moved the member on; its next heartbeat brings the new epoch, then it can be tried again."""

    def __init__(self, message: str) -> None:
        super().__init__(Errors.STALE_MEMBER_EPOCH, message)


class UnknownTopicException(KafkaError):
    """A topic or partition that is named does not exist. Elsewhere that may pass; here it is the answer."""

    def __init__(self, message: str) -> None:
        super().__init__(Errors.UNKNOWN_TOPIC_OR_PARTITION, message)


def is_retriable(error: KafkaError) -> bool:
    """Whether the same may succeed later."""
    if isinstance(error, UnknownTopicException):
        return False
    return error.error.retriable or isinstance(error, StaleMemberEpochException)


class UnsupportedVersionException(KafkaError):
    """The broker does not offer the API, or not in a version that has what is needed."""

    def __init__(self, message: str) -> None:
        super().__init__(Errors.UNSUPPORTED_VERSION, message)


class ClientException(Exception):
    """The client refuses, or cannot go on."""


class ConfigException(ClientException, ValueError):
    """A setting is unknown, out of range, or does not go with another one."""


class IllegalStateException(ClientException):
    """The call does not fit what was called before: a closed client, a partition that is not assigned."""


class NoOffsetForPartitionException(ClientException):
    """Partitions have no committed offset, and `auto_offset_reset` is none."""

    def __init__(self, partitions: Iterable[TopicPartition]) -> None:
        self.partitions = sorted(partitions)
        super().__init__(f"no committed offset and no reset policy for {', '.join(map(str, self.partitions))}")


class OffsetOutOfRangeException(ClientException):
    """The log has no record at the position, and `auto_offset_reset` is none."""

    def __init__(self, positions: Mapping[TopicPartition, int]) -> None:
        self.positions = dict(positions)
        texts = (f"{partition} at {offset}" for partition, offset in sorted(self.positions.items()))
        super().__init__(f"position out of range and no reset policy: {', '.join(texts)}")


class CommitFailedException(ClientException):
    """The commit was refused because the member is no longer in the group: its partitions may have new owners."""


class RecordTooLargeException(ClientException):
    """A record is larger than `max_request_size`, or than the whole buffer."""


class TransactionAbortedException(ClientException):
    """The record was not sent, because its transaction was aborted first."""
