# SPDX-License-Identifier: Apache-2.0
"""What lies between two metadata images, as far as groups care: found once, then told to every shard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kcoord.metadata.image import MetadataImage
from kcoord.runtime.result import CoordinatorResult, OperationContext, StateMachine


@dataclass(slots=True, frozen=True)
class TopicDelta:
    """The topics that differ between `old` and `new`."""

    old: MetadataImage
    new: MetadataImage
    changed: frozenset[str]
    """Made, changed, made again or deleted."""
    gone: Sequence[str]
    """Deleted, or made again under another id: what was known of them is void. Sorted."""
    come_or_gone: bool
    """Whether there are other topic names than before."""
    racks_changed: bool
    """Whether brokers have other racks than before."""

    @classmethod
    def between(cls, old: MetadataImage, new: MetadataImage) -> TopicDelta:
        """Compares all topics; an image shares what did not change with the one before."""
        before = old.topics
        changed = {name for name, topic in new.topics.items() if before.get(name) is not topic}
        deleted = before.keys() - new.topics.keys()
        made_again = {name for name in changed if name in before and before[name].id != new.topics[name].id}
        come_or_gone = bool(deleted) or not changed <= before.keys()
        racks_changed = old.racks != new.racks
        return cls(old, new, frozenset(changed | deleted), sorted(deleted | made_again), come_or_gone, racks_changed)


class CoordinatorMachine(StateMachine, Protocol):
    """A state machine whose operations depend on the metadata image."""

    def on_metadata_update(
        self, context: OperationContext, image: MetadataImage, delta: TopicDelta | None = None
    ) -> CoordinatorResult[None]:
        """From now on `image` is what counts. `delta` is None if it is not known what has changed."""
