# SPDX-License-Identifier: Apache-2.0
"""The errors of storage. An error about damage has the file, the position, the offset, and advice for the operator."""

from __future__ import annotations

import errno


def is_disk_full(error: BaseException) -> bool:
    """True if the disk or the user's quota is full. Such a failure ends without a change of the log."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


class StorageError(Exception):
    """Base class of the errors of storage. An OSError of the file system is raised as it is."""


class CorruptLogError(StorageError):
    """A log file has damage that no crash can cause. The log is not opened, instead of being truncated silently."""

    def __init__(self, file: str, position: int, offset: int, reason: str, advice: str) -> None:
        super().__init__(f"{file}: position {position}, offset {offset}: {reason}; {advice}")
        self.file = file
        self.position = position
        self.offset = offset
        self.reason = reason
        self.advice = advice


class LogFailedError(StorageError, OSError):
    """An earlier write or sync of this log failed. The content of the disk is unknown until the log is opened again."""


class OffsetOutOfRangeError(StorageError):
    """A read before `start_offset` or after `end_offset`."""

    def __init__(self, offset: int, start_offset: int, end_offset: int) -> None:
        super().__init__(f"offset {offset} is outside the log, which has the offsets {start_offset} to {end_offset}")
        self.offset = offset
        self.start_offset = start_offset
        self.end_offset = end_offset


class LongSearchError(StorageError):
    """More records have to be searched than the caller wants."""


class InvalidAppendError(StorageError):
    """The data of an append is not a sequence of whole batches that continues the log. Nothing was written."""


class DamagedIndexError(StorageError):
    """An index file does not fit its log file. It is rebuilt from the log."""


class DirectoryLockedError(StorageError):
    """Another process holds the lock of a data folder."""


class PartitionHeldError(StorageError):
    """Another worker, which led the partition before, still has its log open."""


class OpeningCanceledError(StorageError):
    """The owner of a log does not need it any more, or opens it in another thread, and ended its opening."""


class MetaPropertiesError(StorageError):
    """meta.properties is malformed, or belongs to another node or cluster."""


class MalformedCheckpointError(StorageError):
    """A checkpoint file is not in Kafka's format."""


class TruncateFailedError(StorageError):
    """A failed write could not be undone. The file may end inside a batch."""
