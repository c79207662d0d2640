# SPDX-License-Identifier: Apache-2.0
"""The metadata of consumers in the classic protocol: subscription and assignment, each after its version (int16).

To the classic protocol they are opaque bytes. The coordinator reads them only to know the subscribed topics (KIP-496)
and to convert groups (KIP-848). A version that is newer than kcoord's newest is read as the newest, as consumers do.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kcoord_protocol.errors import DecodeError
from kcoord_protocol.messages import ConsumerProtocolAssignment, ConsumerProtocolSubscription

PROTOCOL_TYPE: Final = "consumer"


def read_version(data: bytes) -> int | None:
    """Returns the version; None if there are fewer than two bytes or the version is negative."""
    version = int.from_bytes(data[:2], "big", signed=True) if len(data) >= 2 else -1
    return version if version >= 0 else None


def read_topics(data: bytes) -> list[str] | None:
    """Returns the subscribed topics, or None if the bytes are not a subscription.

    Whatever the version is, this reads only the fields of version 0, which all versions share (KIP-496, Kafka 4.3.1).
    A newer field that is missing or malformed therefore does not matter.
    """
    try:
        return ConsumerProtocolSubscription.decode_prefix(data, 2, 0)[0].topics
    except DecodeError:
        return None


def read_all_topics(subscriptions: Iterable[bytes]) -> frozenset[str] | None:
    """Returns the topics of all subscriptions, or None if one of them cannot be read (`read_topics`).

    A subscription whose fields of version 0 have the same bytes as those of the one before is not decoded. Members of
    a large group often differ in later fields only: in the partitions that they own.
    """
    topics: set[str] = set()
    fields: bytes | None = None
    for data in subscriptions:
        if fields is not None and data.startswith(fields, 2):
            continue
        try:
            subscription, end = ConsumerProtocolSubscription.decode_prefix(data, 2, 0)
        except DecodeError:
            return None
        topics.update(subscription.topics)
        fields = data[2:end]
    return frozenset(topics)


def read_subscription(data: bytes) -> ConsumerProtocolSubscription | None:
    """Returns the subscription, or None if the bytes are not a subscription. Ignores bytes after it (KIP-496)."""
    version = read_version(data)
    if version is None:
        return None
    try:
        newest = ConsumerProtocolSubscription.valid_versions[-1]
        return ConsumerProtocolSubscription.decode_prefix(data, 2, min(version, newest))[0]
    except DecodeError:
        return None


def read_assignment(data: bytes) -> ConsumerProtocolAssignment | None:
    """Returns the assignment, or None if the bytes are not an assignment. All versions have the same fields.

    No bytes at all are an empty assignment: the member has never synced.
    """
    if not data:
        return ConsumerProtocolAssignment()
    if read_version(data) is None:
        return None
    try:
        return ConsumerProtocolAssignment.decode_prefix(data, 2, 0)[0]
    except DecodeError:
        return None


def read_user_data(data: bytes) -> bytes:
    """Returns the user data of a subscription; nothing if the bytes are not a subscription."""
    subscription = read_subscription(data)
    return b"" if subscription is None else subscription.user_data or b""


def write_assignment(topics: dict[str, list[int]], version: int, user_data: bytes = b"") -> bytes:
    """Returns the bytes of an assignment. `version` is the version of the member's subscription."""
    version = min(version, ConsumerProtocolAssignment.valid_versions[-1])
    assignment = ConsumerProtocolAssignment(
        assigned_partitions=[
            ConsumerProtocolAssignment.TopicPartition(topic=topic, partitions=partitions)
            for topic, partitions in sorted(topics.items())
        ],
        user_data=user_data or None,
    )
    return version.to_bytes(2, "big") + assignment.encode(version)
