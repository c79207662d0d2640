# SPDX-License-Identifier: Apache-2.0
"""Splits requests about offsets: existing partitions go to the coordinator, the rest is answered here."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from copy import copy
from typing import TypeVar

from kcoord.coordinator.group.offsets.known_partitions import find_topic, unknown_error, unknown_partitions
from kcoord.metadata.image import MetadataImage, TopicImage
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


def split_topics(
    image: MetadataImage,
    topics: list[TopicWithId],
    refuse: Callable[[TopicWithId, list[int], Errors], ResponseTopic],
    *,
    by_id: bool,
    rights: Rights | None,
) -> tuple[list[TopicWithId], list[ResponseTopic]]:
    """Returns the topics for the coordinator, and the results of `refuse` for the others.

    The others are topics that the client may not read, and unknown topics and partitions.

    If `by_id`, sets the names of all topics by their ids.
    """
    if by_id:
        for topic in topics:
            image_topic = find_topic(image, "", topic.topic_id, by_id=True)
            topic.name = image_topic.name if image_topic is not None else ""

    def find(topic: TopicWithId) -> TopicImage | None:
        return find_topic(image, topic.name, topic.topic_id, by_id=by_id)

    return split(topics, find, refuse, by_id=by_id, rights=rights)


def split(
    topics: Sequence[RequestTopic],
    find: Callable[[RequestTopic], TopicImage | None],
    refuse: Callable[[RequestTopic, list[int], Errors], ResponseTopic],
    *,
    by_id: bool = False,
    rights: Rights | None,
) -> tuple[list[RequestTopic], list[ResponseTopic]]:
    """Splits topics that `find` looks up, as `split_topics`.

    Does not change topics of the request: a topic with unknown partitions is copied.
    """
    accepted: list[RequestTopic] = []
    refused: list[ResponseTopic] = []
    readable: set[str] | None = None
    if rights is not None:
        names = [topic.name for topic in topics if topic.name]
        readable = rights.allowed(AclOperation.READ, ResourceType.TOPIC, names)
    for topic in topics:
        image_topic = find(topic)
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
