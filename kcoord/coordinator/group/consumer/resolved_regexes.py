# SPDX-License-Identifier: Apache-2.0
"""Installs the topics that a group's regular expressions match (KIP-848 Topic Subscription)."""

from __future__ import annotations

from kcoord.coordinator.group import records
from kcoord.coordinator.group.consumer.assignment import metadata_hash
from kcoord.coordinator.group.consumer.group import ConsumerGroup
from kcoord.coordinator.group.regex import ResolvedRegexes
from kcoord.metadata.image import MetadataImage
from kcoord.runtime.result import CoordinatorResult


def update_resolved_regexes(
    image: MetadataImage, group: ConsumerGroup, value: ResolvedRegexes, now_ms: int
) -> CoordinatorResult[None]:
    """Returns a record per changed resolution, and a new group epoch if the subscribed topics change."""
    result = CoordinatorResult(None)
    changed = False
    reason = records.EpochReason.METADATA
    for regex in sorted(group.regexes & value.topics.keys()):
        topics = value.topics[regex]
        old = group.resolved_regexes.get(regex)
        if old is None or old.topics != topics:
            changed = changed or topics != (old.topics if old is not None else frozenset())
            if old is None:
                reason = records.EpochReason.SUBSCRIPTION
            result.records.append(
                records.new_regular_expression_record(group.group_id, regex, topics, value.version, now_ms)
            )
    if changed:
        new_hash = metadata_hash(image, group.subscribed_topic_names(resolved=value.topics))
        result.records.append(records.next_group_epoch_record(group, group.group_epoch + 1, new_hash, reason))
    return result
