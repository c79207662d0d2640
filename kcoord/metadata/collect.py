# SPDX-License-Identifier: Apache-2.0
"""Duplicates in requests: the keys that occur more than once, and the first entry of each key."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


def duplicates(keys: Iterable[K]) -> set[K]:
    """Returns the keys that occur more than once."""
    seen: set[K] = set()
    repeated: set[K] = set()
    for key in keys:
        (repeated if key in seen else seen).add(key)
    return repeated


def once(keys: Iterable[K]) -> set[K]:
    """Returns the keys that occur exactly once."""
    return {key for key, count in Counter(keys).items() if count == 1}


def first_of_each(items: Iterable[V], key: Callable[[V], Hashable]) -> list[V]:
    """Returns the first item of each key, in the order of `items`."""
    first_items: dict[Hashable, V] = {}
    for item in items:
        first_items.setdefault(key(item), item)
    return list(first_items.values())
