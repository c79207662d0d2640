# SPDX-License-Identifier: Apache-2.0
"""Recovery of a log after a crash: interrupted file operations are finished, and a torn end is removed.

Theory of operation
-------------------
Opening a log has these steps (`LogLoader` calls them):

1. `sweep` finishes or undoes the file operations of an interrupted cleaning or deletion. Files named .deleted or
   .cleaned are removed. A file named .log.swap is complete and durable; it replaces all segments in its range.
2. After an orderly stop, `adopt_clean_end` reads only the batches after the last index entry.
3. Otherwise `recover_segment` checks every batch from the recovery point: the CRC, and that the offsets rise. It
   rebuilds the index entries on the way.

If a check fails, the rest of the file is removed only if a crash during the last append can explain the damage:

* the damage is not below the recovery point, because those bytes were durable;
* it is in the last segment, or the next segment has a mark, because a segment without that is durable before the next
  one begins (`rolled`);
* it is an incomplete batch, zeros or a wrong CRC, and not a sound batch with wrong offsets or of an old format;
* no sound batch with later offsets follows it in the file.

Any other damage raises CorruptLogError and changes nothing. So recovery keeps a prefix of the log, at a batch boundary,
with everything that was durable.

If the log failed in this process, the bytes after the recovery point may be in the page cache but not on disk, and a
sync would not write them. `Recovery.rewrite` writes them again first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

from kcoord.storage.file_system import File, FileSystem, join
from kcoord.storage.index import MAX_RELATIVE_OFFSET
from kcoord.storage.rolled import UNSYNCED_SUFFIX
from kcoord.storage.scan import Damage, DamageKind, corrupt, find_batch, walk
from kcoord.storage.segment import DELETED_SUFFIX, LOG_SUFFIX, Segment
from kcoord.storage.segment_indexes import INDEX_SUFFIX, TIME_INDEX_SUFFIX

CLEANED_SUFFIX = ".cleaned"
SWAP_SUFFIX = ".swap"
_BASE_OFFSET_DIGITS = 20


Check: TypeAlias = Callable[[int], None]
"""Called with the number of bytes of each batch that an opening reads, and before long work that is not a batch.

An error that it raises ends the opening.
"""


def go_on(size_bytes: int) -> None:
    """Does not end an opening."""


@dataclass(slots=True)
class Recovery:
    """What is known about a log before it is opened."""

    recovery_point: int = 0
    """All batches below this offset were made durable. They are not scanned, and must exist."""
    clean: bool = False
    """The log was closed orderly. Only its last batches are read."""
    start_offset: int = 0
    """All records below this offset are deleted."""
    rewrite: bool = False
    """The log failed in this process. Everything after the recovery point is written again before it is read."""
    check: Check = go_on


@dataclass(slots=True)
class Cut:
    """Bytes that recovery removed from the end of a file."""

    file: str
    position: int
    lost_bytes: int
    offset: int
    reason: str


@dataclass(slots=True)
class RecoveryReport:
    """The changes that the opening of a log made to its files."""

    cuts: list[Cut] = field(default_factory=list)
    scanned_bytes: int = 0
    removed_files: list[str] = field(default_factory=list)


def base_offset_of(name: str, suffix: str = LOG_SUFFIX) -> int | None:
    """Returns the base offset in a segment's file name, or None for any other name."""
    digits = name[:_BASE_OFFSET_DIGITS]
    return int(digits) if name[_BASE_OFFSET_DIGITS:] == suffix and digits.isascii() and digits.isdigit() else None


def sweep(file_system: FileSystem, directory: str, names: list[str], report: RecoveryReport) -> list[int]:
    """Finishes or undoes interrupted file operations. Returns the base offsets of the segments, ascending."""
    present = set(names)
    cleaned = [name for name in names if name.endswith(CLEANED_SUFFIX)]
    for name in names:
        # Kafka splits an overflowing segment into several. If one of them is unfinished, the later ones are dropped.
        is_undone = cleaned and name.endswith(SWAP_SUFFIX) and name >= min(cleaned)
        if is_undone or name.endswith((DELETED_SUFFIX, CLEANED_SUFFIX)):
            _remove(file_system, directory, name, present, report)
    _finish_swaps(file_system, directory, present, report)
    for name in sorted(present):
        for suffix in (INDEX_SUFFIX, TIME_INDEX_SUFFIX):
            if name.endswith(suffix + SWAP_SUFFIX):
                _remove(file_system, directory, name, present, report)
            base_offset = base_offset_of(name, suffix)
            if base_offset is not None and name.removesuffix(suffix) + LOG_SUFFIX not in present:
                _remove(file_system, directory, name, present, report)
    return _bases(present, LOG_SUFFIX)


def marks_in(names: Iterable[str]) -> set[int]:
    """Returns the offsets of the marks in a folder: the segment before such an offset may be torn."""
    return set(_bases(names, UNSYNCED_SUFFIX))


def _bases(names: Iterable[str], suffix: str) -> list[int]:
    bases = [base_offset_of(name, suffix) for name in names]
    return sorted(base for base in bases if base is not None)


def _finish_swaps(file_system: FileSystem, directory: str, present: set[str], report: RecoveryReport) -> None:
    """Makes every `.log.swap` file a segment, in the place of all segments in its range of offsets (as Kafka does).

    Such a file is complete and durable.
    """
    for name in sorted(present):
        base_offset = base_offset_of(name, LOG_SUFFIX + SWAP_SUFFIX)
        if base_offset is None:
            continue
        next_offset = _next_offset(file_system, join(directory, name), base_offset)
        for segment_file in sorted(present):
            segment_base = base_offset_of(segment_file)
            if segment_base is not None and base_offset < segment_base < next_offset:
                _remove(file_system, directory, segment_file, present, report)
        for suffix in (INDEX_SUFFIX, TIME_INDEX_SUFFIX):
            # The old index of this name does not fit the new file. It is built again from the log.
            stale = name[:_BASE_OFFSET_DIGITS] + suffix
            if stale in present:
                _remove(file_system, directory, stale, present, report)
        file_system.rename(join(directory, name), join(directory, name.removesuffix(SWAP_SUFFIX)))
        present.add(name.removesuffix(SWAP_SUFFIX))
        file_system.sync_dir(directory)


def _next_offset(file_system: FileSystem, path: str, base_offset: int) -> int:
    file = file_system.open_read(path)
    try:
        for frame in walk(file, 0, file.size(), base_offset):
            base_offset = frame.last_offset + 1
    except Damage as damage:
        raise corrupt(path, damage) from None
    finally:
        file.close()
    return base_offset


def _remove(file_system: FileSystem, directory: str, name: str, present: set[str], report: RecoveryReport) -> None:
    file_system.remove(join(directory, name))
    present.discard(name)
    report.removed_files.append(join(directory, name))


def adopt_clean_end(segment: Segment, report: RecoveryReport, check: Check) -> bool:
    """Finds the end of a segment that was closed orderly. Returns False if its last batches are damaged."""
    size = segment.size_bytes
    position = segment.stored_index_tail()
    next_offset = segment.base_offset
    report.scanned_bytes += size - position
    if size:
        try:
            for frame in walk(segment.file(), position, size, segment.base_offset):
                check(frame.size_bytes)
                next_offset = frame.last_offset + 1
        except Damage:
            return False
    segment.adopt_end(size, next_offset)
    return True


def recover_segment(segment: Segment, recovery: Recovery, may_be_torn: bool, report: RecoveryReport) -> None:
    """Checks all batches from the recovery point, updates the indexes, and removes a torn end if there may be one.

    Index entries below the recovery point are trusted. Raises CorruptLogError for damage that no crash can cause.
    """
    position = segment.rewind(recovery.recovery_point)
    file = segment.file()
    if recovery.rewrite:
        recovery.check(segment.size_bytes - position)
        segment.rewrite(position)
    size = file.size()
    damage = _note_batches(segment, file, position, size, recovery.check)
    if damage is not None and damage.position == position:
        # The index entry may be wrong, not the log.
        segment.discard_indexes()
        position = 0
        damage = _note_batches(segment, file, 0, size, recovery.check)
    report.scanned_bytes += size - position
    if damage is None:
        return
    # The rest of the file is searched for a sound batch.
    recovery.check(size - damage.position)
    refusal = _refusal(file, damage, size, recovery.recovery_point, may_be_torn)
    if refusal is not None:
        raise corrupt(segment.log_path, damage, refusal)
    assert damage.offset >= recovery.recovery_point, (
        f"S-9: recovery would truncate {segment.log_path} at offset {damage.offset}, "
        f"but all batches below offset {recovery.recovery_point} were durable"
    )
    segment.cut(damage.position)
    segment.sync()
    report.cuts.append(Cut(segment.log_path, damage.position, size - damage.position, damage.offset, damage.reason))


def _note_batches(segment: Segment, file: File, position: int, size: int, check: Check) -> Damage | None:
    try:
        for frame in walk(file, position, size, segment.base_offset):
            if frame.last_offset - segment.base_offset > MAX_RELATIVE_OFFSET:
                reason = f"offset {frame.last_offset} is too far from the base offset of the file"
                return Damage(DamageKind.MISPLACED, frame.position, segment.next_offset, reason)
            check(frame.size_bytes)
            segment.note(frame.position, frame.size_bytes, frame.last_offset, frame.max_timestamp)
    except Damage as damage:
        return damage
    return None


def _refusal(file: File, damage: Damage, size: int, recovery_point: int, may_be_torn: bool) -> str | None:
    """Returns why the damage cannot be the torn end of the last append before a crash, or None if it can be."""
    if damage.kind in (DamageKind.MISPLACED, DamageKind.FOREIGN):
        return damage.reason
    if damage.offset < recovery_point:
        return f"{damage.reason}, although all batches below offset {recovery_point} were durable"
    if not may_be_torn:
        return f"{damage.reason}, although later segments exist"
    following = find_batch(file, damage.position, size, damage.offset)
    if following is not None:
        return f"{damage.reason}, but a sound batch with offset {following[1]} follows at position {following[0]}"
    return None
