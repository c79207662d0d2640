# SPDX-License-Identifier: Apache-2.0
"""The bytes of the journal file, the frames that end it, and its renewal."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import dataclass
from struct import pack

import pytest

from kcoord.storage.file_system import make_durable_dirs, read_file
from kcoord.storage.journal import (
    JOURNAL_FILE,
    Appended,
    DurableAppends,
    Extent,
    Journal,
    make_named_logs_durable,
    restore,
)
from kcoord.storage.log import AppendInfo
from kcoord.storage.memory_file_system import MemoryFileSystem, ShortWrite, keep_everything, no_fault
from kcoord_protocol.batch_header import crc32c
from tests.storage.support import LOG_FILE

JOURNAL = f"data/{JOURNAL_FILE}"
FIRST = Extent("topic-0", 0, 0, b"first")
SECOND = Extent("topic-0", 0, 5, b"second")
THIRD = Extent("topic-0", 0, 11, b"third")


@pytest.fixture
def fs() -> MemoryFileSystem:
    made = MemoryFileSystem()
    make_durable_dirs(made, "data/topic-0")
    made.open_append(LOG_FILE)
    made.sync_dir("data/topic-0")
    return made


def frame(*extents: Extent) -> bytes:
    """Returns a frame: CRC-32C and length of the body; per extent two lengths, base offset, position, name and data."""
    body = b"".join(
        pack(">Hqqi", len(extent.folder), extent.segment_base_offset, extent.position, len(extent.data))
        + extent.folder.encode()
        + extent.data
        for extent in extents
    )
    return pack(">II", crc32c(body), len(body)) + body


def restored(fs: MemoryFileSystem, journal: bytes) -> bytes:
    """Returns the content of an empty log after a start has restored it from such a journal."""
    fs.open_append(JOURNAL).write(journal)
    restore(fs, "data", JOURNAL)
    fs.crash()
    assert not fs.exists(JOURNAL)
    return read_file(fs, LOG_FILE)


def test_a_journal_is_a_sequence_of_frames(fs: MemoryFileSystem) -> None:
    journal = Journal(fs, JOURNAL)
    journal.write([FIRST, SECOND])
    journal.write([THIRD])
    assert read_file(fs, JOURNAL) == frame(FIRST, SECOND) + frame(THIRD)
    assert journal.size_bytes == fs.size(JOURNAL)


def test_a_journal_continues_after_short_writes(fs: MemoryFileSystem) -> None:
    journal = Journal(fs, JOURNAL)
    fs.fault = lambda operation: ShortWrite(7) if operation.kind == "write" else None
    journal.write([FIRST])
    journal.write([SECOND])
    assert read_file(fs, JOURNAL) == frame(FIRST) + frame(SECOND)


@pytest.mark.parametrize(
    ("tail", "expected"),
    [
        (b"", b"first"),
        (frame(SECOND), b"firstsecond"),
        (frame(SECOND)[:-1], b"first"),
        (frame(SECOND)[:8], b"first"),
        (frame(SECOND)[:7], b"first"),
        (bytes(8) + frame(SECOND), b"first"),
        (bytes(3), b"first"),
        (b"\7" + frame(SECOND)[1:], b"first"),
        # The CRC is right for the bytes of the file, but the length is one byte too large, or very large.
        (frame(SECOND)[:4] + pack(">I", len(frame(SECOND)) - 7) + frame(SECOND)[8:], b"first"),
        (frame(SECOND)[:4] + b"\xff\xff\xff\xff" + frame(SECOND)[8:], b"first"),
    ],
)
def test_the_first_damaged_frame_ends_the_journal(fs: MemoryFileSystem, tail: bytes, expected: bytes) -> None:
    """Bytes after zeros may come from an earlier use of the same blocks of the disk."""
    assert restored(fs, frame(FIRST) + tail) == expected


def test_a_new_journal_is_durably_empty(fs: MemoryFileSystem) -> None:
    file = fs.open_append(JOURNAL)
    file.write(frame(FIRST))
    file.datasync()
    fs.sync_dir("data")
    journal = Journal(fs, JOURNAL)
    assert (journal.size_bytes, fs.size(JOURNAL)) == (0, 0)
    fs.crash()
    assert fs.size(JOURNAL) == 0


def test_a_renewed_journal_is_durably_empty_and_has_no_folders(fs: MemoryFileSystem) -> None:
    journal = Journal(fs, JOURNAL)
    journal.write([FIRST])
    journal.sync()
    journal.begin_anew()
    journal.forget("topic-0")
    assert fs.size(JOURNAL) == 0
    fs.crash()
    assert fs.size(JOURNAL) == 0


def test_voided_extents_are_not_restored_after_a_crash(fs: MemoryFileSystem) -> None:
    journal = Journal(fs, JOURNAL)
    journal.write([FIRST])
    journal.sync()
    journal.forget("topic-0")
    fs.crash()
    assert restore(fs, "data", JOURNAL) == 0


def test_logs_with_extents_in_a_journal_are_synced_without_a_change(fs: MemoryFileSystem) -> None:
    """The machine has not stopped, so the files have the extents, and perhaps more."""
    fs.open_append(LOG_FILE).write(b"firstsecondthird")
    Journal(fs, JOURNAL).write([FIRST, Extent("gone-0", 0, 0, b"x")])
    make_named_logs_durable(fs, "data", JOURNAL)
    fs.crash()
    assert read_file(fs, LOG_FILE) == b"firstsecondthird"
    assert not fs.exists(JOURNAL)


# -- renewal -----------------------------------------------------------------------------------------------------------


@dataclass
class Partition:
    """A log that counts its syncs, which may fail."""

    folder: str = "topic-0"
    flushes: int = 0
    is_failed: bool = False

    def sync_names(self) -> None:
        """Does nothing: the names are durable."""

    def flush(self) -> None:
        self.flushes += 1
        if self.is_failed:
            raise OSError(errno.EIO, "planted")


def appended(log: Partition, position: int = 0, data: bytes = b"x" * 10) -> list[Appended]:
    return [Appended(log, AppendInfo(0, position, False), data)]


def size_of(*items: Sequence[Appended]) -> int:
    return sum(len(frame(Extent("topic-0", 0, 0, item.data))) for group in items for item in group)


def test_a_journal_is_renewed_when_it_has_reached_its_size(fs: MemoryFileSystem) -> None:
    log = Partition()
    append_bytes = size_of(appended(log))
    appends = DurableAppends(Journal(fs, JOURNAL), renewal_bytes=2 * append_bytes)
    for number, is_due in ((1, False), (2, True)):
        assert appends.settle(appended(log, 10 * number)) == [None]
        assert (appends.is_renewal_due, appends.is_renewal_useful, fs.size(JOURNAL)) == (
            is_due,
            True,
            number * append_bytes,
        )
    assert log.flushes == 0, "the journal made the appends durable"
    assert appends.renew()
    assert (appends.is_renewal_due, appends.is_renewal_useful, log.flushes, fs.size(JOURNAL)) == (False, False, 1, 0)


def test_a_journal_that_a_log_still_needs_grows_by_its_size_before_the_next_renewal(fs: MemoryFileSystem) -> None:
    log = Partition(is_failed=True)
    append_bytes = size_of(appended(log))
    appends = DurableAppends(Journal(fs, JOURNAL), renewal_bytes=2 * append_bytes)
    dues = []
    for number in range(6):
        appends.settle(appended(log, 10 * number))
        dues.append(appends.is_renewal_due)
        if dues[-1]:
            assert not appends.renew()
    assert dues == [False, True, False, True, False, True]
    assert fs.size(JOURNAL) == 6 * append_bytes


def test_a_torn_journal_is_renewed_with_the_next_append(fs: MemoryFileSystem) -> None:
    log = Partition()
    journal = Journal(fs, JOURNAL)
    appends = DurableAppends(journal)
    journal.tear()
    assert appends.is_renewal_due
    assert appends.settle(appended(log)) == [None]
    assert (log.flushes, fs.size(JOURNAL), appends.is_renewal_due) == (0, size_of(appended(log)), False)


def test_the_logs_are_synced_if_a_torn_journal_cannot_be_renewed(fs: MemoryFileSystem) -> None:
    log, other = Partition(is_failed=True), Partition("topic-1")
    journal = Journal(fs, JOURNAL)
    appends = DurableAppends(journal)
    appends.settle(appended(log))
    journal.tear()
    assert appends.settle(appended(other)) == [None]
    assert (other.flushes, fs.size(JOURNAL)) == (1, size_of(appended(log)))


def test_a_caller_that_syncs_the_journal_itself_may_write_until_a_renewal_is_due(fs: MemoryFileSystem) -> None:
    log = Partition()
    append_bytes = size_of(appended(log))
    appends = DurableAppends(Journal(fs, JOURNAL), renewal_bytes=2 * append_bytes)
    for size in (1, 2):
        assert appends.write(appended(log, 10 * size))
        assert fs.size(JOURNAL) == size * append_bytes
    before = appends.is_renewal_useful
    appends.note(appended(log))
    assert (before, appends.is_renewal_useful) == (False, True)
    assert not appends.write(appended(log)), "the journal has to be renewed first"
    assert fs.size(JOURNAL) == 2 * append_bytes
    assert appends.renew()
    fs.fault = lambda operation: OSError(errno.ENOSPC, "planted") if operation.kind == "write" else None
    assert not appends.write(appended(log))
    fs.fault = no_fault
    fs.crash(keep_everything)
