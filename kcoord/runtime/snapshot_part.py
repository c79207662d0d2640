# SPDX-License-Identifier: Apache-2.0
"""What a state machine hands out as its snapshot: records that bring the state about again, and packed bytes for what
there is too much of.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

from kcoord.runtime.result import CoordinatorRecord


@dataclass(slots=True)
class PackedState:
    """Bytes that only the state machine understands. `kind` is 1 or more, and another one for each format."""

    kind: int
    data: bytes


SnapshotPart: TypeAlias = CoordinatorRecord | PackedState


@runtime_checkable
class HasSnapshot(Protocol):
    """A state machine whose loading need not begin with the first record of its log."""

    def snapshot(self) -> Iterator[SnapshotPart] | None:
        """The parts, made one by one from the state as it is then; None while there is state that they cannot hold.

        The state may change between two parts. All parts together, and then every record from the first part on, give
        the state: each record says all there is to say about its key.
        """

    def restore(self, part: PackedState) -> bool:
        """Takes back what `snapshot` gave out; False where the kind is unknown. ValueError where it is malformed."""
