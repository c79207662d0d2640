# SPDX-License-Identifier: Apache-2.0
"""The difference between two metadata images that groups need. It is computed once for all shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kcoord.metadata.image import MetadataImage
from kcoord.runtime.result import CoordinatorResult, OperationContext, StateMachine


class MetadataChange(NamedTuple):
    """What a consumer group needs to know of a new image, without the images."""

    changed: frozenset[str]
    """The topics that were created, changed, re-created or deleted."""
    come_or_gone: bool
    """True if the set of topic names changed."""
    racks_changed: bool
    """True if the racks of the brokers changed."""


@dataclass(slots=True, frozen=True)
class TopicDelta:
    """The topics that differ between `old` and `new`."""

    old: MetadataImage
    new: MetadataImage
    change: MetadataChange
    gone: Sequence[str]
    """The topics that were deleted, or re-created with another id. Their old state is invalid. Sorted."""

    @classmethod
    def between(cls, old: MetadataImage, new: MetadataImage) -> TopicDelta:
        """Compares the topics that may differ. An image shares unchanged topics with the image before it."""
        before, after = old.topics, new.topics
        changed = [name for name in new.topics_to_compare(old) if before.get(name) is not after.get(name)]
        gone = [name for name in changed if name in before and (name not in after or before[name].id != after[name].id)]
        come_or_gone = any(name not in before or name not in after for name in changed)
        return cls(old, new, MetadataChange(frozenset(changed), come_or_gone, old.racks != new.racks), sorted(gone))


class CoordinatorMachine(StateMachine, Protocol):
    """A state machine whose operations depend on the metadata image."""

    def on_metadata_update(
        self, context: OperationContext, image: MetadataImage, delta: TopicDelta | None = None
    ) -> CoordinatorResult[None]:
        """Uses `image` for all later operations. `delta` is None if the changes are unknown."""
