# SPDX-License-Identifier: Apache-2.0
"""Metadata images for tests of the group core, without a metadata log."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace

from kcoord.metadata.image import GROUP_RESOURCE, MetadataImage, PartitionImage, TopicImage


def image_of(
    topics: Mapping[str, int],
    epoch: int,
    group_configs: Mapping[str, Mapping[str, str]] | None = None,
    previous: MetadataImage | None = None,
) -> MetadataImage:
    """Returns an image with these topics and partition counts; unchanged topics are the objects of `previous`.

    A topic that `previous` lacks gets a new id for this epoch, also if a topic of that name was deleted before.
    """
    images = {}
    for name, count in topics.items():
        old = previous.topics.get(name) if previous is not None else None
        if old is not None and len(old.partitions) == count:
            images[name] = old
            continue
        topic_id = old.id if old is not None else hashlib.md5(f"{name}/{epoch}".encode()).digest()
        partitions = [PartitionImage(p, 1, 0, 0, [1], [1]) for p in range(count)]
        images[name] = TopicImage(name, topic_id, partitions)
    configs = {(GROUP_RESOURCE, group): dict(values) for group, values in (group_configs or {}).items()}
    return replace(
        MetadataImage.empty(),
        epoch=epoch,
        topics=images,
        topics_by_id={topic.id: topic for topic in images.values()},
        configs=configs,
    )
