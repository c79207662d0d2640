# SPDX-License-Identifier: Apache-2.0
"""What consumers put into the classic protocol: subscription and assignment, each behind its version (int16).

They are the members' business; the coordinator reads them only to know topics (KIP-496) and to convert groups
(KIP-848). A version newer than the newest known one is read as that one, as consumers do.
"""

from __future__ import annotations

from typing import Final

from kcoord_protocol.errors import DecodeError
from kcoord_protocol.messages import ConsumerProtocolAssignment, ConsumerProtocolSubscription

PROTOCOL_TYPE: Final = "consumer"


def read_version(data: bytes) -> int | None:
    """The version in front, None where the bytes are too few or the version is negative."""
    version = int.from_bytes(data[:2], "big", signed=True) if len(data) >= 2 else -1
    return version if version >= 0 else None


def read_topics(data: bytes) -> list[str] | None:
    """The subscribed topics, or None if the bytes are no subscription.

    Reads the part that all versions share, which is version 0, whatever version is in front (KIP-496, Kafka 4.3.1). So
    a newer part that is missing or malformed does not matter.
    """
    try:
        return ConsumerProtocolSubscription.decode_prefix(data, 2, 0)[0].topics
    except DecodeError:
        return None


def read_subscription(data: bytes) -> ConsumerProtocolSubscription | None:
    """The subscription, or None where the bytes are none. Bytes behind it are left alone (KIP-496)."""
    version = read_version(data)
    if version is None:
        return None
    try:
        newest = ConsumerProtocolSubscription.valid_versions[-1]
        return ConsumerProtocolSubscription.decode_prefix(data, 2, min(version, newest))[0]
    except DecodeError:
        return None


def read_assignment(data: bytes) -> ConsumerProtocolAssignment | None:
    """The assignment; an empty one for no bytes at all (a member that has never synced), None where it cannot be
    read. All versions have the same fields.
    """
    if not data:
        return ConsumerProtocolAssignment()
    if read_version(data) is None:
        return None
    try:
        return ConsumerProtocolAssignment.decode_prefix(data, 2, 0)[0]
    except DecodeError:
        return None


def write_assignment(topics: dict[str, list[int]], version: int) -> bytes:
    """An assignment in the version that the member's subscription has."""
    version = min(version, ConsumerProtocolAssignment.valid_versions[-1])
    assignment = ConsumerProtocolAssignment(
        assigned_partitions=[
            ConsumerProtocolAssignment.TopicPartition(topic=topic, partitions=partitions)
            for topic, partitions in sorted(topics.items())
        ]
    )
    return version.to_bytes(2, "big") + assignment.encode(version)
