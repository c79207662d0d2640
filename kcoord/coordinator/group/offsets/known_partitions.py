# SPDX-License-Identifier: Apache-2.0
"""Decides which partitions of a request about offsets exist in a metadata image. Pure.

The handlers of OffsetCommit, TxnOffsetCommit and OffsetDelete use this, and so does the fast path of OffsetCommit.
"""

from __future__ import annotations

from collections.abc import Iterable

from kcoord.metadata.image import MetadataImage, TopicImage
from kcoord_protocol.errors import Errors


def find_topic(image: MetadataImage, name: str, topic_id: bytes, *, by_id: bool) -> TopicImage | None:
    """Returns the topic that a request names, by id in versions with topic ids."""
    return image.topics_by_id.get(topic_id) if by_id else image.topics.get(name)


def unknown_partitions(topic: TopicImage | None, partitions: Iterable[int]) -> list[int]:
    """Returns the partitions that `topic` does not have: all of them if there is no such topic."""
    count = len(topic.partitions) if topic is not None else 0
    return [partition for partition in partitions if not 0 <= partition < count]


def unknown_error(topic: TopicImage | None, *, by_id: bool) -> Errors:
    """Returns the error of an unknown partition."""
    return Errors.UNKNOWN_TOPIC_ID if topic is None and by_id else Errors.UNKNOWN_TOPIC_OR_PARTITION
