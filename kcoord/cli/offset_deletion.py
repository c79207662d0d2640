# SPDX-License-Identifier: Apache-2.0
"""Predicts the response of OffsetDelete (KIP-496) with read-only requests, for `--delete-offsets --dry-run`.

The rules are those of Kafka's coordinator, in its order:

1. The group exists.
2. The group has the protocol type `consumer`, or it is empty.
3. The partition exists.
4. No member subscribes to the topic.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Final

from kcoord.cli.session import CommandError
from kcoord.client.admin.client import AdminClient
from kcoord.client.admin.groups import CLASSIC_TYPE, CONSUMER_PROTOCOL_TYPE
from kcoord.client.admin.model import ConsumerGroupDescription
from kcoord.client.types import TopicPartition
from kcoord.coordinator.group.regex import compile_pattern
from kcoord_protocol.errors import Errors, KafkaError

_SETTLED_STATES: Final = ("Stable", "Empty")
_LOOK_SECONDS: Final = 0.2

Refusals = dict[TopicPartition, KafkaError | None]


async def refusals_of(
    admin: AdminClient, group_id: str, partitions: Sequence[TopicPartition], timeout_ms: int
) -> Refusals:
    """Returns the error that OffsetDelete would return for each partition; None if it would delete the offset."""
    try:
        group = await _settled_group(admin, group_id, timeout_ms)
    except KafkaError as error:
        return dict.fromkeys(partitions, KafkaError(error.error))
    if group.state != "Empty" and group.protocol_type != CONSUMER_PROTOCOL_TYPE:
        return dict.fromkeys(partitions, KafkaError(Errors.NON_EMPTY_GROUP))
    described = await admin.describe_topics(sorted({partition.topic for partition in partitions}))
    counts = {name: len(topic.partitions) for name, topic in described.values.items()}
    is_subscribed = _subscription_of(group)

    def refusal(partition: TopicPartition) -> KafkaError | None:
        if not 0 <= partition.partition < counts.get(partition.topic, 0):
            return KafkaError(Errors.UNKNOWN_TOPIC_OR_PARTITION)
        return KafkaError(Errors.GROUP_SUBSCRIBED_TO_TOPIC) if is_subscribed(partition.topic) else None

    return {partition: refusal(partition) for partition in partitions}


async def _settled_group(admin: AdminClient, group_id: str, timeout_ms: int) -> ConsumerGroupDescription:
    """Returns the group, once it is not between two generations.

    In between, a broker does not describe the subscriptions of a classic group's members.
    """
    deadline = time.monotonic() + timeout_ms / 1000
    while True:
        group = (await admin.describe_consumer_groups([group_id]))[group_id]
        if group.group_type != CLASSIC_TYPE or group.state in _SETTLED_STATES:
            return group
        if group.protocol_type not in ("", CONSUMER_PROTOCOL_TYPE):
            return group
        if time.monotonic() >= deadline:
            raise CommandError(f"the group '{group_id}' is rebalancing, so its subscribed topics are unknown")
        await asyncio.sleep(_LOOK_SECONDS)


def _subscription_of(group: ConsumerGroupDescription) -> Callable[[str], bool]:
    """Returns a predicate: whether any member subscribes to a topic."""
    names = {name for member in group.members for name in member.subscribed_topic_names}
    regexes = {member.subscribed_topic_regex for member in group.members if member.subscribed_topic_regex}
    patterns = [compile_pattern(regex) for regex in regexes]
    is_unknown = any(member.has_unreadable_subscription for member in group.members)
    return lambda topic: is_unknown or topic in names or any(matches(topic) for matches in patterns)
