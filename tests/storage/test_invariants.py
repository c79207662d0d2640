# SPDX-License-Identifier: Apache-2.0
"""Breaks each named invariant of the storage, and sees its assertion (docs/contributing/invariants.md).

A test also checks what is left: a log that failed is opened again with everything that was durable, and a broken pass
of the cleaner leaves the old segments.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from kcoord.runtime.snapshot import Snapshot
from kcoord.storage.cleaning_pass import Pass
from kcoord.storage.errors import LogFailedError
from kcoord.storage.file_system import Bytes, make_durable_dirs, read_file
from kcoord.storage.index import OffsetIndex
from kcoord.storage.journal import Appended, DurableAppends, Extent, Journal
from kcoord.storage.log import AppendInfo, Log
from kcoord.storage.log_dir import Identity, LogDir
from kcoord.storage.memory_file_system import MemoryFileSystem
from kcoord.storage.offset_map import OffsetMap
from kcoord.storage.recovery import Recovery
from kcoord.storage.replacement import NewSegment, Replacement
from kcoord.storage.segment import BatchPlace
from kcoord.storage.snapshot import read_snapshot, write_snapshot
from kcoord_protocol.batch_header import BatchHeader
from tests.storage.cleaning import Writer, clean, on_this_thread, records, state
from tests.storage.support import DIRECTORY, LOG_FILE, NOW_MS, batch, batches, content, filled_log, new_config


@pytest.fixture
def fs() -> MemoryFileSystem:
    return MemoryFileSystem()


def open_again(fs: MemoryFileSystem, log: Log) -> Log:
    """Opens a log that has failed, as its owner does."""
    assert isinstance(log.failure, AssertionError)
    with pytest.raises(LogFailedError):
        log.append(batch(log.end_offset), now_ms=NOW_MS)
    log.abandon()
    return Log.open(fs, DIRECTORY, new_config(), NOW_MS, recovery=log.reopening())


# -- log and segments --------------------------------------------------------------------------------------------------


def test_a_batch_continues_its_segment(fs: MemoryFileSystem) -> None:
    data = batches(3)
    log = filled_log(fs, data[:2])
    segment = log.segments[-1]
    with pytest.raises(AssertionError, match="S-1: a batch at position 163 with last offset 2 does not continue"):
        segment.note(segment.size_bytes + 1, len(data[2]), 2, 102)
    segment.next_offset = 9
    with pytest.raises(AssertionError, match="S-1: a batch at position 162 with last offset 2 does not continue"):
        log.append(data[2], now_ms=NOW_MS)
    assert log.end_offset == 2
    assert content(open_again(fs, log)) == data, "the bytes are in the file, so recovery finds the batch"


def test_a_flush_makes_only_the_batches_of_the_log_durable(fs: MemoryFileSystem) -> None:
    data = batches(2)
    log = filled_log(fs, data[:1])
    log.append(data[1], now_ms=NOW_MS)
    fs.open_append(LOG_FILE).write(b"bytes of another program")
    with pytest.raises(AssertionError, match=r"S-2: .* has 186 bytes, but its batches have 162"):
        log.flush()
    assert content(open_again(fs, log)) == data
    assert read_file(fs, LOG_FILE) == b"".join(data)


def test_the_durable_offset_is_within_the_log(fs: MemoryFileSystem) -> None:
    log = filled_log(fs, batches(2))
    log._flushed_offset = 9
    with pytest.raises(AssertionError, match="S-3: data/topic-0 is durable up to offset 9, but ends at 2"):
        log.flush()
    assert isinstance(log.failure, AssertionError)


class EarlyRoll(Log):
    """A log that begins a new segment below its end."""

    def _parse(self, data: Bytes) -> tuple[int, list[BatchPlace]]:
        base_offset, entries = super()._parse(data)
        return base_offset - 1, entries


def test_a_segment_begins_at_or_after_the_end_of_the_log(fs: MemoryFileSystem) -> None:
    make_durable_dirs(fs, "data")
    log = EarlyRoll.open(fs, DIRECTORY, new_config(segment_bytes=100), NOW_MS)
    log.append(batch(5), now_ms=NOW_MS)
    with pytest.raises(AssertionError, match=r"S-4: a segment of data/topic-0 begins at offset 5, but .* ends at 6"):
        log.append(batch(6), now_ms=NOW_MS)
    assert [len(log.segments), log.end_offset] == [1, 6]


class NeverRolls(Log):
    """A log that cannot begin a new segment."""

    def _roll(self, base_offset: int, now_ms: int) -> None:
        """Does nothing."""


def test_a_log_always_has_a_segment(fs: MemoryFileSystem) -> None:
    make_durable_dirs(fs, "data")
    log = NeverRolls.open(fs, DIRECTORY, new_config(), NOW_MS)
    log.append(batch(0), now_ms=NOW_MS)
    with pytest.raises(AssertionError, match="S-5: data/topic-0 has no segment left after 1 were deleted"):
        log.delete_old_segments(lambda segment: True, NOW_MS)
    assert content(log) == [batch(0)]


def test_index_entries_rise() -> None:
    index = OffsetIndex(100)
    index.append(105, 300)
    for offset, position in ((105, 400), (106, 300), (104, 200)):
        with pytest.raises(AssertionError, match=f"S-10: the index entry {offset} at {position} does not follow 105"):
            index.append(offset, position)
    assert len(index) == 1


def test_recovery_keeps_what_was_durable(fs: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    filled_log(fs, batches(3)).abandon()
    fs.damage(LOG_FILE, lambda data: data[:100])
    monkeypatch.setattr("kcoord.storage.recovery._refusal", lambda *arguments: None)
    with pytest.raises(AssertionError, match=r"S-9: recovery would truncate .* at offset 1"):
        Log.open(fs, DIRECTORY, new_config(), NOW_MS, recovery=Recovery(recovery_point=2))
    assert fs.size(LOG_FILE) == 100


def test_a_log_is_opened_once(fs: MemoryFileSystem) -> None:
    log_dir = LogDir.open(fs, "data", Identity("cluster", 1, "directory"))
    log = log_dir.open_log("topic", 0, new_config(), NOW_MS)
    with pytest.raises(AssertionError, match="S-11: data/topic-0 is opened for writing twice"):
        log_dir.open_log("topic", 0, new_config(), NOW_MS)
    log.close()
    assert log_dir.open_log("topic", 0, new_config(), NOW_MS) is not log


# -- cleaning ----------------------------------------------------------------------------------------------------------


ALIKE = ["key 1", "key 2", "key 3", "key 4", "key 5"]
"""The keys of a batch that is filtered as a run."""
UNLIKE = ["key", "another key"]
"""The keys of a batch that is filtered record by record."""


def dirty_log(fs: MemoryFileSystem, keys: Sequence[str] = UNLIKE) -> Log:
    """Returns a log with three closed segments, in which every key occurs in each of them."""
    writer = Writer(fs)
    for value in "abc":
        writer.put(*((key, value) for key in keys))
        writer.roll()
    return writer.log


def test_a_replacement_ends_before_the_next_segment(fs: MemoryFileSystem) -> None:
    log = dirty_log(fs)
    before = content(log)
    old = log.segments[:1]
    new = NewSegment(fs, log.new_segment_for(old[0]), on_this_thread)
    new.add(before[0], 1, 1)
    new.finish(NOW_MS)
    fs.sync_dir(DIRECTORY)
    new.segment.next_offset = 3
    names = [name for name in fs.list_dir(DIRECTORY) if not name.endswith(".cleaned")]
    with pytest.raises(AssertionError, match=r"S-6: .* ends before offset 3 and cannot replace .* to before 2"):
        Replacement(fs, log, old, new.segment).run(on_this_thread)
    assert fs.list_dir(DIRECTORY) == names, "the replacement was undone"
    assert log.begin_replacement(old), "a later pass may replace the segments"
    assert content(log) == before


def test_cleaning_keeps_the_offsets_of_a_batch(fs: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    log = dirty_log(fs)
    before, names = content(log), fs.list_dir(DIRECTORY)

    def moved(self: Pass, header: BatchHeader, data: bytes) -> bytes:
        return batch(header.base_offset + 1)

    monkeypatch.setattr(Pass, "filtered", moved)
    with pytest.raises(AssertionError, match=r"S-7: cleaning changes .* with the offsets \(0, 1\) to \(1, 1\)"):
        clean(log, fs)
    assert (content(log), fs.list_dir(DIRECTORY)) == (before, names)


@pytest.mark.parametrize("keys", [ALIKE, UNLIKE])
def test_cleaning_keeps_the_last_record_of_every_key(
    fs: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch, keys: list[str]
) -> None:
    """In the broken map, the offset of every key is too large by 1."""
    log = dirty_log(fs, keys)
    before, names = content(log), fs.list_dir(DIRECTORY)
    last_records = state(records(log))
    with monkeypatch.context() as patch:
        patch.setattr(OffsetMap, "get", lambda self, key: self._offsets[key] + 1)
        patch.setattr(OffsetMap, "last_offsets", lambda self, keys: [self._offsets[key] + 1 for key in keys])
        with pytest.raises(AssertionError, match=f"S-8: the last records of {len(keys)} keys .* 0 were kept"):
            clean(log, fs)
    assert (content(log), fs.list_dir(DIRECTORY)) == (before, names)
    clean(log, fs)
    assert state(records(log)) == last_records


@pytest.mark.parametrize("keys", [ALIKE, UNLIKE])
def test_the_last_record_of_a_key_may_be_an_expired_tombstone(fs: MemoryFileSystem, keys: list[str]) -> None:
    """S-8 does not demand that an expired tombstone stays."""
    writer = Writer(fs)
    for value in ("a", None):
        writer.put(*((key, value) for key in keys))
    writer.roll()
    clean(writer.log, fs)
    assert [record.value for record in records(writer.log)] == [None] * len(keys)
    writer.put(("the next key", "a"))
    writer.roll()
    clean(writer.log, fs, now_ms=NOW_MS + 10_000)
    assert [record.key for record in records(writer.log)] == [b"the next key"]


# -- journal and snapshots ---------------------------------------------------------------------------------------------


@dataclass
class Partition:
    """A log that counts its syncs."""

    folder: str = "topic-0"
    flushes: int = 0

    def sync_names(self) -> None:
        """Does nothing: the names are durable."""

    def flush(self) -> None:
        self.flushes += 1


def test_the_bytes_of_a_log_in_the_journal_only_move_forward(fs: MemoryFileSystem) -> None:
    journal = Journal(fs, "journal")
    journal.write([Extent("topic-0", 0, 0, b"first"), Extent("topic-0", 0, 5, b"second")])
    size_bytes = journal.size_bytes
    with pytest.raises(AssertionError, match="S-12: the journal gets bytes of topic-0 for segment 0 at 10"):
        journal.write([Extent("topic-0", 0, 10, b"third")])
    assert journal.size_bytes == size_bytes
    journal.write([Extent("topic-0", 7, 0, b"of the next segment"), Extent("topic-1", 0, 0, b"of another log")])
    journal.forget("topic-0")
    journal.write([Extent("topic-0", 0, 0, b"of a new log")])


def test_the_logs_are_synced_instead_of_a_broken_journal(
    fs: MemoryFileSystem, caplog: pytest.LogCaptureFixture
) -> None:
    log = Partition()
    journal = Journal(fs, "journal")
    appends = DurableAppends(journal)
    append = [Appended(log, AppendInfo(0, 0, False), b"bytes")]
    assert appends.settle(append) == [None]
    assert log.flushes == 0
    with caplog.at_level(logging.ERROR):
        assert not appends.write(append)
    assert "AssertionError: S-12: " in caplog.text
    assert (journal.is_torn, appends.is_renewal_due) == (True, True)
    assert appends.settle(append) == [None]
    assert (log.flushes, journal.is_torn) == (1, False), "the journal was renewed"
    caplog.clear()
    assert appends.settle(append) == [None]
    assert "AssertionError: S-12: " in caplog.text
    assert log.flushes == 2


@pytest.mark.parametrize("offsets", [(5, 4), (-1, 4)])
def test_a_snapshot_begins_before_it_ends(fs: MemoryFileSystem, offsets: tuple[int, int]) -> None:
    make_durable_dirs(fs, DIRECTORY)
    earlier = Snapshot(1, 2, 0, [])
    write_snapshot(fs, DIRECTORY, earlier)
    with pytest.raises(AssertionError, match="S-13: the log would be replayed from offset"):
        write_snapshot(fs, DIRECTORY, Snapshot(*offsets, 0, []))
    assert read_snapshot(fs, DIRECTORY) == earlier
