# SPDX-License-Identifier: Apache-2.0
"""Splits requests about offsets into what the broker knows, for the coordinator, and the answers for the rest."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from copy import copy
from typing import TypeVar

from kcoord.coordinator.group.offsets.known_partitions import find_topic, unknown_error, unknown_partitions
from kcoord.metadata.image import MetadataImage, TopicImage
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
) -> tuple[list[TopicWithId], list[ResponseTopic]]:
    """Returns the topics for the coordinator, which have their names then, and the answers of `refuse` for unknown
    topics and partitions.
    """
    if by_id:
        for topic in topics:
            image_topic = find_topic(image, "", topic.topic_id, by_id=True)
            topic.name = image_topic.name if image_topic is not None else ""

    def find(topic: TopicWithId) -> TopicImage | None:
        return find_topic(image, topic.name, topic.topic_id, by_id=by_id)

    return split(topics, find, refuse, by_id=by_id)


def split(
    topics: Iterable[RequestTopic],
    find: Callable[[RequestTopic], TopicImage | None],
    refuse: Callable[[RequestTopic, list[int], Errors], ResponseTopic],
    *,
    by_id: bool = False,
) -> tuple[list[RequestTopic], list[ResponseTopic]]:
    """Splits topics that `find` looks up. Topics of the request stay as they are: a partly known one is copied."""
    known: list[RequestTopic] = []
    refused: list[ResponseTopic] = []
    for topic in topics:
        image_topic = find(topic)
        unknown = unknown_partitions(image_topic, [partition.partition_index for partition in topic.partitions])
        if unknown or image_topic is None:
            refused.append(refuse(topic, unknown, unknown_error(image_topic, by_id=by_id)))
            left_out = set(unknown)
            partitions = [partition for partition in topic.partitions if partition.partition_index not in left_out]
            topic = copy(topic)
            topic.partitions = partitions
        if topic.partitions:
            known.append(topic)
    return known, refused


def merge(
    refused: list[ResponseTopic], answered: list[ResponseTopic], key: Callable[[ResponseTopic], Hashable]
) -> list[ResponseTopic]:
    """Joins the answers for one topic: first what was refused, then what the coordinator says."""
    merged = {key(topic): topic for topic in refused}
    for topic in answered:
        present = merged.setdefault(key(topic), topic)
        if present is not topic:
            present.partitions.extend(topic.partitions)
    return list(merged.values())
