# SPDX-License-Identifier: Apache-2.0
"""What happens to a log between a stop and its next use: half-done file operations are finished, torn tails are cut.

Only bytes that were never promised to be on disk may be cut, and only at the end of the last segment. Everything else
that is wrong is a CorruptLogError, unless `Recovery.repair` was asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kcoord.storage.file_system import File, FileSystem, join
from kcoord.storage.index import MAX_RELATIVE_OFFSET
from kcoord.storage.scan import Damage, DamageKind, corrupt, find_batch, walk
from kcoord.storage.segment import DELETED_SUFFIX, LOG_SUFFIX, Segment
from kcoord.storage.segment_indexes import INDEX_SUFFIX, TIME_INDEX_SUFFIX

CLEANED_SUFFIX = ".cleaned"
SWAP_SUFFIX = ".swap"
_BASE_OFFSET_DIGITS = 20


@dataclass(slots=True)
class Recovery:
    """What is known about a log before it is opened."""

    recovery_point: int = 0
    """Everything below this offset was made durable: it is not scanned again, and must be there."""
    clean: bool = False
    """The log was closed in an orderly way: only its last batches are looked at."""
    start_offset: int = 0
    rewrite: bool = False
    """The log failed in this process: what lies above the recovery point is written again before it is trusted."""
    repair: bool = False
    """Cut the log at the first damage, whatever follows. Only ever by an explicit request of the operator."""


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
    """What opening a log did to it."""

    cuts: list[Cut] = field(default_factory=list)
    scanned_bytes: int = 0
    removed_files: list[str] = field(default_factory=list)


def base_offset_of(name: str, suffix: str = LOG_SUFFIX) -> int | None:
    """The base offset in a segment's file name, or None for any other name."""
    digits = name[:_BASE_OFFSET_DIGITS]
    return int(digits) if name[_BASE_OFFSET_DIGITS:] == suffix and digits.isascii() and digits.isdigit() else None


def sweep(file_system: FileSystem, directory: str, names: list[str], report: RecoveryReport) -> list[int]:
    """Finish or undo what a crash interrupted, and return the base offsets of the segments, ascending."""
    present = set(names)
    cleaned = [name for name in names if name.endswith(CLEANED_SUFFIX)]
    for name in names:
        # Kafka splits an overflowing segment into several: with one still unfinished, the later ones do not count.
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
    bases = [base_offset_of(name) for name in present]
    return sorted(base for base in bases if base is not None)


def _finish_swaps(file_system: FileSystem, directory: str, present: set[str], report: RecoveryReport) -> None:
    """A `.log.swap` file is whole and durable: it replaces all segments whose batches it holds (as in Kafka)."""
    for name in sorted(present):
        base_offset = base_offset_of(name, LOG_SUFFIX + SWAP_SUFFIX)
        if base_offset is None:
            continue
        next_offset = _next_offset(file_system, join(directory, name), base_offset)
        for other in sorted(present):
            other_base = base_offset_of(other)
            if other_base is not None and base_offset < other_base < next_offset:
                _remove(file_system, directory, other, present, report)
        for suffix in (INDEX_SUFFIX, TIME_INDEX_SUFFIX):
            # Built again from the log: the old index of the same name does not fit it.
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


def adopt_clean_end(segment: Segment, report: RecoveryReport) -> bool:
    """Find the end of a segment that was closed in an orderly way; False where it does not look like one."""
    size = segment.size_bytes
    position = segment.stored_index_tail()
    next_offset = segment.base_offset
    report.scanned_bytes += size - position
    if size:
        try:
            for frame in walk(segment.file(), position, size, segment.base_offset):
                next_offset = frame.last_offset + 1
        except Damage:
            return False
    segment.adopt_end(size, next_offset)
    return True


def recover_segment(segment: Segment, recovery: Recovery, is_last: bool, report: RecoveryReport) -> Cut | None:
    """Check all batches from the recovery point on, bring the indexes up to date, and cut a torn tail.

    The indexes are trusted as far as the recovery point reaches.
    """
    position = segment.rewind(recovery.recovery_point)
    file = segment.file()
    if recovery.rewrite:
        segment.rewrite(position)
    size = file.size()
    damage = _note_batches(segment, file, position, size)
    if damage is not None and damage.position == position:
        # The index entry may be what is wrong.
        segment.discard_indexes()
        position = 0
        damage = _note_batches(segment, file, 0, size)
    report.scanned_bytes += size - position
    if damage is None:
        return None
    refusal = _refusal(file, damage, size, recovery.recovery_point, is_last)
    if refusal is not None and not recovery.repair:
        raise corrupt(segment.log_path, damage, refusal)
    segment.cut(damage.position)
    segment.sync()
    cut = Cut(segment.log_path, damage.position, size - damage.position, damage.offset, refusal or damage.reason)
    report.cuts.append(cut)
    return cut


def _note_batches(segment: Segment, file: File, position: int, size: int) -> Damage | None:
    try:
        for frame in walk(file, position, size, segment.base_offset):
            if frame.last_offset - segment.base_offset > MAX_RELATIVE_OFFSET:
                reason = f"offset {frame.last_offset} is too far from the base offset of the file"
                return Damage(DamageKind.MISPLACED, frame.position, segment.next_offset, reason)
            segment.note(frame.position, frame.size_bytes, frame.last_offset, frame.max_timestamp)
    except Damage as damage:
        return damage
    return None


def _refusal(file: File, damage: Damage, size: int, recovery_point: int, is_last: bool) -> str | None:
    """Why the damage cannot be the torn end of the last write before a crash; None where it can."""
    if damage.kind in (DamageKind.MISPLACED, DamageKind.FOREIGN):
        return damage.reason
    if damage.offset < recovery_point:
        return f"{damage.reason}, although everything below offset {recovery_point} had reached the disk"
    if not is_last:
        return f"{damage.reason}, although later segments exist"
    following = find_batch(file, damage.position, size, damage.offset)
    if following is not None:
        return f"{damage.reason}, but a sound batch with offset {following[1]} follows at position {following[0]}"
    return None
