# SPDX-License-Identifier: Apache-2.0
"""What a check of log folders finds: each finding names file, position and offset, and what a repair would do."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class FindingKind(Enum):
    """What is wrong. The text is what people read."""

    TORN = "torn end"
    """The end of the last write before a crash. A broker cuts it at its next start."""
    DAMAGED = "damaged bytes"
    """Bytes that are no sound batch, in the middle or at an end that had been durable."""
    MISPLACED = "misplaced batch"
    """A sound batch whose offsets overlap with its neighbours'."""
    MALFORMED = "malformed record"
    """A batch with the right CRC whose records cannot be read."""
    FOREIGN_GROUP = "foreign group"
    """A record of a group whose home is another partition."""
    LOST_GROUP = "lost group"
    """A group has committed offsets, but the last that the log says of it is its tombstone."""
    WRONG_EPOCH = "wrong leader epoch"
    GAP = "missing offsets"
    """Offsets are missing in a log that was never compacted, or a file is."""
    SHORT = "missing end"
    """The log ends below what the checkpoints say had reached the disk."""
    INDEX = "wrong index"
    SIDE_FILE = "wrong side file"
    """A file beside the segments that is derived from them."""
    CHECKPOINT = "wrong checkpoint"
    IDENTITY = "wrong identity"
    """meta.properties or partition.metadata."""


@dataclass(slots=True)
class Finding:
    """One finding. `end` is where the damaged bytes end, `next_offset` what the next sound batch begins with."""

    kind: FindingKind
    file: str
    position: int
    offset: int
    reason: str
    end: int = -1
    next_offset: int = -1
    leader_epoch: int = -1
    """What it should be, where that is what is wrong; that of the log's end for a lost group."""
    group: str = ""
    """Which group is lost."""

    def __str__(self) -> str:
        return f"{self.file}: position {self.position}, offset {self.offset}: {self.kind.value}: {self.reason}"
