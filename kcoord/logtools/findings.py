# SPDX-License-Identifier: Apache-2.0
"""The findings of a check of log folders. A finding names the file, position and offset of the damage."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class FindingKind(Enum):
    """The kind of damage. The value is the text that is printed."""

    TORN = "torn end"
    """An incomplete last write before a crash. A broker truncates it when it starts."""
    DAMAGED = "damaged bytes"
    """Bytes that are not a valid batch, in the middle of a log or at an end that had been durable."""
    MISPLACED = "misplaced batch"
    """A valid batch whose offsets overlap with those of its neighbours."""
    MALFORMED = "malformed record"
    """A batch with a correct CRC whose records cannot be decoded."""
    FOREIGN_GROUP = "foreign group"
    """A record of a group that belongs to another partition."""
    LOST_GROUP = "lost group"
    """A group has committed offsets, but its last group record is a tombstone (see `lost_groups`)."""
    WRONG_EPOCH = "wrong leader epoch"
    GAP = "missing offsets"
    """Offsets, or a whole file, are missing in a log that was never compacted."""
    SHORT = "missing end"
    """The log ends before its recovery point, up to which it had been durable."""
    INDEX = "wrong index"
    SIDE_FILE = "wrong side file"
    """A file that is derived from the segments, such as a producer snapshot."""
    CHECKPOINT = "wrong checkpoint"
    IDENTITY = "wrong identity"
    """A wrong or malformed meta.properties or partition.metadata."""


@dataclass(slots=True)
class Finding:
    """One finding. The damaged bytes end at position `end`; `next_offset` is the base offset of the next valid batch.

    Fields that do not apply are -1 or empty.
    """

    kind: FindingKind
    file: str
    position: int
    offset: int
    reason: str
    end: int = -1
    next_offset: int = -1
    leader_epoch: int = -1
    """The expected epoch of WRONG_EPOCH; the epoch at the log end for LOST_GROUP."""
    group: str = ""
    """The group of LOST_GROUP."""
    partition: str = ""
    """The partition whose line in a checkpoint is wrong, such as orders-0."""

    def __str__(self) -> str:
        return f"{self.file}: position {self.position}, offset {self.offset}: {self.kind.value}: {self.reason}"
