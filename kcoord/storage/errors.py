# SPDX-License-Identifier: Apache-2.0
"""What storage raises. Damage always names the file, the position, the offset and what can be done about it."""

from __future__ import annotations

import errno


def is_disk_full(error: BaseException) -> bool:
    """Whether there is no space, or none for this user: a failure that passes without anybody touching the log."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


class StorageError(Exception):
    """Base of every error that storage raises itself (a plain OSError of the file system passes through)."""


class CorruptLogError(StorageError):
    """A log file holds something that no crash can explain; the log is refused instead of being cut silently."""

    def __init__(self, file: str, position: int, offset: int, reason: str, advice: str) -> None:
        super().__init__(f"{file}: position {position}, offset {offset}: {reason}; {advice}")
        self.file = file
        self.position = position
        self.offset = offset
        self.reason = reason
        self.advice = advice


class LogFailedError(StorageError, OSError):
    """An earlier write or sync of this log failed: what is on disk is unknown until the log is opened again."""


class OffsetOutOfRangeError(StorageError):
    """A read outside [start_offset, end_offset]."""

    def __init__(self, offset: int, start_offset: int, end_offset: int) -> None:
        super().__init__(f"offset {offset} is outside the log, which holds {start_offset} to {end_offset}")
        self.offset = offset
        self.start_offset = start_offset
        self.end_offset = end_offset


class InvalidAppendError(StorageError):
    """What was to be appended is not a run of whole batches that continues the log; nothing was written."""


class DamagedIndexError(StorageError):
    """An index file cannot belong to its log file. It is rebuilt from the log."""


class DirectoryLockedError(StorageError):
    """Another process holds the lock of a data folder."""


class PartitionHeldError(StorageError):
    """The worker that led a partition before still has its log open."""


class MetaPropertiesError(StorageError):
    """meta.properties is unreadable, or belongs to another node or cluster."""


class MalformedCheckpointError(StorageError):
    """A checkpoint file is not in Kafka's format."""


class TruncateFailedError(StorageError):
    """A failed write could not be undone: the file may end in part of a batch."""
