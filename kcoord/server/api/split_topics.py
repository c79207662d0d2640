# SPDX-License-Identifier: Apache-2.0
"""Splits requests about offsets: existing partitions go to the coordinator, the rest is answered here."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from copy import copy
from typing import TypeVar

from kcoord.coordinator.group.offsets.known_partitions import unknown_error, unknown_partitions
from kcoord.metadata.image import MetadataImage
from kcoord.server.api.authorization import Rights
from kcoord_protocol.acls import AclOperation, ResourceType
from kcoord_protocol.errors import Errors
from kcoord_protocol.messages import (
    OffsetCommitRequest,
    OffsetCommitResponse,
    OffsetDeleteRequest,
    OffsetDeleteResponse,
    TxnOffsetCommitRequest,
    TxnOffsetCommitResponse,
)

RequestTopic = TypeVar(
    "RequestTopic",
    OffsetCommitRequest.OffsetCommitRequestTopic,
    OffsetDeleteRequest.OffsetDeleteRequestTopic,
    TxnOffsetCommitRequest.TxnOffsetCommitRequestTopic,
)
ResponseTopic = TypeVar(
    "ResponseTopic",
    OffsetCommitResponse.OffsetCommitResponseTopic,
    OffsetDeleteResponse.OffsetDeleteResponseTopic,
    TxnOffsetCommitResponse.TxnOffsetCommitResponseTopic,
)
TopicWithId = TypeVar(
    "TopicWithId",
    OffsetCommitRequest.OffsetCommitRequestTopic,
    TxnOffsetCommitRequest.TxnOffsetCommitRequestTopic,
)


def name_topics(image: MetadataImage, topics: Iterable[TopicWithId]) -> None:
    """Sets the names of topics that a request names by id. A topic that does not exist has no name."""
    for topic in topics:
        image_topic = image.topics_by_id.get(topic.topic_id)
        topic.name = image_topic.name if image_topic is not None else ""


def split_topics(
    image: MetadataImage,
    topics: Sequence[RequestTopic],
    refuse: Callable[[RequestTopic, list[int], Errors], ResponseTopic],
    *,
    by_id: bool = False,
    rights: Rights | None,
) -> tuple[list[RequestTopic], list[ResponseTopic]]:
    """Returns the topics for the coordinator, and the results of `refuse` for the others.

    The others are topics that the client may not read, and unknown topics and partitions. Topics of the request do not
    change: a topic with unknown partitions is copied. If `by_id`, `name_topics` has set the names.
    """
    accepted: list[RequestTopic] = []
    refused: list[ResponseTopic] = []
    readable: set[str] | None = None
    if rights is not None:
        names = [topic.name for topic in topics if topic.name]
        readable = rights.allowed(AclOperation.READ, ResourceType.TOPIC, names)
    for topic in topics:
        image_topic = image.topics.get(topic.name)
        if readable is not None and topic.name not in readable and (image_topic is not None or not by_id):
            partitions = [partition.partition_index for partition in topic.partitions]
            refused.append(refuse(topic, partitions, Errors.TOPIC_AUTHORIZATION_FAILED))
            continue
        unknown = unknown_partitions(image_topic, [partition.partition_index for partition in topic.partitions])
        if unknown or image_topic is None:
            refused.append(refuse(topic, unknown, unknown_error(image_topic, by_id=by_id)))
            left_out = set(unknown)
            rest = [partition for partition in topic.partitions if partition.partition_index not in left_out]
            topic = copy(topic)
            topic.partitions = rest
        if topic.partitions:
            accepted.append(topic)
    return accepted, refused


def merge(
    refused: list[ResponseTopic], answered: list[ResponseTopic], key: Callable[[ResponseTopic], Hashable]
) -> list[ResponseTopic]:
    """Merges the results of each topic: first the refused partitions, then those that the coordinator answered."""
    merged = {key(topic): topic for topic in refused}
    for topic in answered:
        present = merged.setdefault(key(topic), topic)
        if present is not topic:
            present.partitions.extend(topic.partitions)
    return list(merged.values())
