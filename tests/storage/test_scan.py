# SPDX-License-Identifier: Apache-2.0
"""The walk over a log file against a walk with the whole file in memory, for any size of reads."""

from __future__ import annotations

import os
import zlib
from struct import pack, unpack_from

import pytest

from kcoord.storage import scan
from kcoord.storage.file_system import File, RealFile
from kcoord.storage.scan import Damage, DamageKind, find_batch, walk
from kcoord_protocol.batch_header import verify_crc
from kcoord_protocol.record_batch import encode_batch
from tests.storage.support import batch
from tests.support.batch_corpus import message_sets, segments, with_crc

HEADER_BYTES = 61
Frame = tuple[int, int, int, int, int, int]
NOTHING = b"\0" + b"\xff" * 8
"""Attributes, and no key and no value. With magic and CRC it has 14 bytes, Kafka's RECORD_OVERHEAD_V0."""


class WatchedFile(RealFile):
    """A file that may not be read after `end`, because another thread may be writing there."""

    def __init__(self, data: bytes, end: int | None = None) -> None:
        super().__init__(os.memfd_create("log"), "rb+")
        self.write(data)
        self.end = len(data) if end is None else end
        self.most_bytes = 0
        """The size of the largest read."""

    def read_at(self, position: int, size: int) -> bytes:
        assert position + size <= self.end
        self.most_bytes = max(self.most_bytes, size)
        return super().read_at(position, size)


def walked(file: File, end: int, offset: int, *, verify: bool) -> tuple[list[Frame], Damage | None]:
    frames: list[Frame] = []
    try:
        for frame in walk(file, 0, end, offset, verify=verify):
            assert frame.batch == file.read_at(frame.position, frame.size_bytes)
            frames.append(frame[:6])
    except Damage as damage:
        return frames, damage
    return frames, None


def plainly_walked(data: bytes, offset: int, *, verify: bool) -> tuple[list[Frame], tuple[DamageKind, int, int] | None]:
    """Walks like `walk`, with the whole file in memory. Returns also kind, position and offset of the damage."""
    frames: list[Frame] = []
    at = 0
    while at < len(data):
        rest = data[at:]
        if not any(rest[:HEADER_BYTES]):
            return frames, (DamageKind.GARBAGE, at, offset)
        if len(rest) < HEADER_BYTES:
            return frames, (DamageKind.INCOMPLETE, at, offset)
        base, length, epoch, magic = unpack_from(">qiib", rest)
        last_delta, _, max_timestamp = unpack_from(">iqq", rest, 23)
        if magic in (0, 1) and is_message(rest, length):
            return frames, (DamageKind.FOREIGN, at, offset)
        if magic != 2 or length < 49 or base < 0 or last_delta < 0:
            return frames, (DamageKind.GARBAGE, at, offset)
        if 12 + length > len(rest):
            return frames, (DamageKind.INCOMPLETE, at, offset)
        if not verify_crc(rest) and (verify or base < offset):
            return frames, (DamageKind.GARBAGE, at, offset)
        if base < offset:
            return frames, (DamageKind.MISPLACED, at, offset)
        frames.append((at, 12 + length, base, base + last_delta, max_timestamp, epoch))
        offset = base + last_delta + 1
        at += 12 + length
    return frames, None


def is_message(data: bytes, length: int) -> bool:
    """Returns whether `data` begins with a whole message of a format before record batches."""
    return 14 <= length <= len(data) - 12 and zlib.crc32(data[16 : 12 + length]) == int.from_bytes(data[12:16], "big")


@pytest.mark.parametrize("verify", [True, False])
def test_a_walk_has_the_same_result_for_any_size_of_reads(monkeypatch: pytest.MonkeyPatch, verify: bool) -> None:
    kinds = set()
    files = [*message_sets(), *(data for data in segments() if len(data) < 20_000)]
    for number, data in enumerate(files):
        # Another thread appends after the end meanwhile. The walk does not read it.
        end = len(data) - (0, 1, 70, len(data) // 2)[number % 4]
        offset = (0, 0, 5)[number % 3]
        expected, damage = plainly_walked(data[:end], offset, verify=verify)
        for chunk_bytes in (HEADER_BYTES, 100 + number % 90, 1 << 20):
            monkeypatch.setattr(scan, "CHUNK_BYTES", chunk_bytes)
            frames, raised = walked(WatchedFile(data + batch(2**40), end), end, offset, verify=verify)
            assert frames == expected
            assert (raised and (raised.kind, raised.position, raised.offset)) == damage
        kinds.add(damage and damage[0])
    assert kinds == {None, *DamageKind}


def test_a_batch_after_damage_is_found_wherever_a_read_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the smallest batch, which is only a header, but not a batch that continues after the end."""
    smallest = with_crc(encode_batch([], base_offset=9, last_offset=9))
    assert len(smallest) == HEADER_BYTES
    garbage = bytes(range(1, 98))
    for sound in (smallest, batch(9, value_size=40)):
        # Bytes that look like a batch, a batch below the offset, and the batch to find.
        data = garbage + smallest[:-1] + b"\7" + batch(3) + garbage[:50] + sound
        at = len(data) - len(sound)
        file = WatchedFile(data + batch(10), len(data))
        for chunk_bytes in range(HEADER_BYTES, 260):
            monkeypatch.setattr(scan, "CHUNK_BYTES", chunk_bytes)
            assert find_batch(file, 1, len(data), 5) == (at, 9)
            assert find_batch(file, at, len(data), 9) == (at, 9)
            assert find_batch(file, 1, len(data), 10) is None
            assert find_batch(file, 1, len(data) - 1, 5) is None
            assert find_batch(file, at + 1, len(data), 5) is None
            assert file.most_bytes <= max(chunk_bytes, 120)


def header(base_offset: int = 0, length: int = 100, magic: int = 2, last_delta: int = 0, crc: int = 0) -> bytes:
    return pack(">qiibIhiqqqhii", base_offset, length, 0, magic, crc, 0, last_delta, 0, 0, 0, 0, 0, 0)


def message(content: bytes) -> bytes:
    """Returns a message of format 0: offset 0, length, CRC-32, and the bytes that it covers."""
    covered = b"\0" + content
    return pack(">qiI", 0, 4 + len(covered), zlib.crc32(covered)) + covered


@pytest.mark.parametrize(
    ("tail", "kind", "reason"),
    [
        (bytes(60), DamageKind.GARBAGE, "the file continues with zeros"),
        (bytes(200), DamageKind.GARBAGE, "the file continues with zeros"),
        (batch(1)[:60], DamageKind.INCOMPLETE, "the file ends 60 bytes into a batch header"),
        (batch(1)[:61], DamageKind.INCOMPLETE, "the batch has a length of 81 bytes, but the file has only 61 more"),
        (batch(1)[:-1], DamageKind.INCOMPLETE, "the batch has a length of 81 bytes, but the file has only 80 more"),
        (batch(1)[:-1] + b"\7", DamageKind.GARBAGE, "the CRC of the batch does not match its content"),
        (header(magic=3), DamageKind.GARBAGE, "not a record batch: magic is 3 instead of 2"),
        (header(length=48), DamageKind.GARBAGE, "impossible batch header: base offset 0, length 48"),
        (header(-1), DamageKind.GARBAGE, "impossible batch header: base offset -1, length 100"),
        (header(last_delta=-1), DamageKind.GARBAGE, "impossible batch header: base offset 0, length 100"),
        (header(0, 49), DamageKind.GARBAGE, "the CRC of the batch does not match its content"),
        (
            batch(0),
            DamageKind.MISPLACED,
            "the batch begins with offset 0, but the log is already at 1: offsets overlap or fall",
        ),
        (message_sets()[0], DamageKind.FOREIGN, "a message in the old format (magic 0), which is not supported"),
        (message_sets()[1], DamageKind.FOREIGN, "a message in the old format (magic 1), which is not supported"),
        (
            message(NOTHING) + bytes(80),
            DamageKind.FOREIGN,
            "a message in the old format (magic 0), which is not supported",
        ),
        (
            message(NOTHING[:-1]) + bytes(80),
            DamageKind.GARBAGE,
            "not a record batch: magic is 0 instead of 2",
        ),
        (header(magic=1, length=-20), DamageKind.GARBAGE, "not a record batch: magic is 1 instead of 2"),
    ],
)
def test_the_text_of_damage_is_for_operators(tail: bytes, kind: DamageKind, reason: str) -> None:
    first = batch(0)
    frames, damage = walked(WatchedFile(first + tail), len(first + tail), 0, verify=True)
    assert [frame[0] for frame in frames] == [0]
    assert damage is not None
    assert (damage.kind, damage.position, damage.offset) == (kind, len(first), 1)
    assert damage.reason == str(damage) == reason


def test_a_message_with_a_wrong_length_is_not_read_beyond_the_end() -> None:
    """The CRC is right for the bytes of the file, but the length is one byte too large, or two gigabytes."""
    first, old = batch(0), message_sets()[0]
    for length in (len(old) - 11, 2**31 - 1):
        data = first + old[:8] + length.to_bytes(4, "big") + old[12:]
        _, damage = walked(WatchedFile(data), len(data), 0, verify=True)
        assert damage is not None
        assert damage.kind is DamageKind.GARBAGE


def test_a_file_that_becomes_shorter_ends_the_walk() -> None:
    """Another program truncates the file while it is read. The walk must end, and it must report damage."""
    first, second = batch(0), batch(1)
    for size in (len(first), len(first) + 10, len(first) + 70):
        file = WatchedFile((first + second)[:size], len(first + second))
        frames, damage = walked(file, len(first + second), 0, verify=False)
        assert [frame[0] for frame in frames] == [0]
        assert damage is not None
        assert damage.position == len(first)
