# SPDX-License-Identifier: Apache-2.0
"""Members with the same subscription are taken together, and so are topics with the same subscribers.

A group has far fewer kinds of members and of topics than members and topics, and within a kind all are alike.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from kcoord.coordinator.group.assignor.spec import MemberSpec


@dataclass(slots=True)
class Subscription:
    """The members, in the order in which they were given, that subscribe to just these topics; some may not exist."""

    topic_ids: frozenset[bytes]
    member_ids: list[str]


@dataclass(slots=True)
class TopicClass:
    """Existing topics, in id order, and the indexes of the subscriptions that have them, ascending."""

    subscribers: tuple[int, ...]
    topic_ids: list[bytes]


def subscriptions_of(order: Iterable[str], members: Mapping[str, MemberSpec]) -> list[Subscription]:
    """In the order of their first members. Members that share one object cost nothing."""
    found: dict[frozenset[bytes], Subscription] = {}
    of_object: dict[int, list[str]] = {}
    for member_id in order:
        topic_ids = members[member_id].subscribed_topic_ids
        alike = of_object.get(id(topic_ids))
        if alike is None:
            of_object[id(topic_ids)] = alike = _subscription(found, topic_ids).member_ids
        alike.append(member_id)
    return list(found.values())


def _subscription(found: dict[frozenset[bytes], Subscription], topic_ids: Collection[bytes]) -> Subscription:
    distinct = frozenset(topic_ids)
    subscription = found.get(distinct)
    if subscription is None:
        subscription = found[distinct] = Subscription(distinct, [])
    return subscription


def topic_classes(subscriptions: Iterable[Subscription], partition_counts: Mapping[bytes, int]) -> list[TopicClass]:
    """In the order of their first topics."""
    subscribers: dict[bytes, list[int]] = {}
    for index, subscription in enumerate(subscriptions):
        for topic_id in subscription.topic_ids & partition_counts.keys():
            subscribers.setdefault(topic_id, []).append(index)
    found: dict[tuple[int, ...], TopicClass] = {}
    for topic_id in sorted(subscribers):
        signature = tuple(subscribers[topic_id])
        topic_class = found.get(signature)
        if topic_class is None:
            topic_class = found[signature] = TopicClass(signature, [])
        topic_class.topic_ids.append(topic_id)
    return list(found.values())
