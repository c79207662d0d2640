# SPDX-License-Identifier: Apache-2.0
"""A deterministic corpus of valid and broken record batches, for every reader of batches.

Valid: each codec, control batches, transactions, gaps, extreme timestamps, 0 to 300 records in a batch.
Broken: truncated at all positions that matter, single bits changed, wrong lengths and counts, message sets of format 0
and 1, and the inputs that coverage-guided fuzzing kept.
"""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

from kcoord_protocol.batch_header import ATTRIBUTES_POSITION, BATCH_OVERHEAD_BYTES, crc32c
from kcoord_protocol.compression import Compression
from kcoord_protocol.control_records import ControlRecordType, end_txn_marker
from kcoord_protocol.primitives import encode_uvarint, encode_varint
from kcoord_protocol.record_batch import (
    Record,
    TimestampType,
    encode_batch,
    encode_batch_from_parts,
    encode_control_batch,
    iter_headers,
    records_of,
)
from kcoord_protocol.record_walk import walk_records

NOW_MS: Final = 1_700_000_000_000
_FUZZED: Final = Path(__file__).parent.parent / "fuzz" / "inputs" / "guided" / "batches.txt"
_CRC_POSITION: Final = 17
_BIT_FLIPS: Final = 24
_HOSTILE_INT32: Final = (-(2**31), -1, 0, 1, 13, 48, 49, 2**24, 2**31 - 1)
_HOSTILE_VARINTS: Final = (
    encode_varint(-1),
    encode_varint(-2),
    encode_varint(2**31 - 1),
    encode_varint(-(2**31)),
    encode_uvarint(2**35 - 1),
    encode_uvarint(2**34),
    encode_uvarint(2**69),
    b"\xff" * 5,
    b"\xff" * 11,
    b"\x80",
    b"\x80\x00",
    b"",
)


def commit_pairs(count: int, group: bytes = b"group-1") -> list[tuple[bytes | None, bytes | None]]:
    """Returns offset commits as a group coordinator writes them, in the newest version."""
    prefix = struct.pack(">hh", 1, len(group)) + group + struct.pack(">h", 6) + b"topic1"
    value = struct.pack(">hqiBq", 4, 1_000_000, 3, 1, NOW_MS) + b"\x01\x00\x10" + bytes(range(16))
    return [(prefix + struct.pack(">i", partition), value) for partition in range(count)]


def _records(count: int, rng: random.Random) -> list[Record]:
    made = []
    for number in range(count):
        key = None if rng.random() < 0.2 else rng.randbytes(rng.choice((0, 1, 9, 63, 64, 130)))
        value = None if rng.random() < 0.2 else rng.randbytes(rng.choice((0, 1, 60, 64, 200, 9000)))
        names: list[tuple[str, bytes | None]] = [("a", b"1"), ("", None), ("n" * 70, b"v" * 130), ("ü", b"")]
        headers = rng.sample(names, rng.choice((0, 0, 0, 1, 3)))
        timestamp_ms = NOW_MS + number * rng.choice((0, 1, 100, -100_000))
        made.append(Record(key, value, headers, timestamp_ms))
    return made


@cache
def sound_batches() -> list[bytes]:
    """Returns valid batches, each with its own base offset."""
    rng = random.Random(17)
    made = [encode_batch([], base_offset=4, last_offset=9, producer_id=3)]
    for codec in Compression:
        made += [encode_batch(_records(count, rng), base_offset=count, compression=codec) for count in (1, 3, 70)]
    made.append(encode_batch(_records(300, rng)))
    gaps = [Record(b"k", b"v", timestamp_ms=NOW_MS, offset=offset) for offset in (5, 6, 90, 9000, 2_000_000)]
    made.append(encode_batch(gaps, base_offset=5, last_offset=2**31))
    times = [Record(b"k", b"v", timestamp_ms=ms) for ms in (0, 2**62, -1, 1, 2**40)]
    made.append(encode_batch(times, timestamp_type=TimestampType.LOG_APPEND_TIME))
    made.append(encode_batch(times, delete_horizon_ms=NOW_MS))
    made.append(encode_batch(_records(3, rng), producer_id=7, producer_epoch=1, base_sequence=5, is_transactional=True))
    for kind in (ControlRecordType.ABORT, ControlRecordType.COMMIT):
        made.append(encode_control_batch(kind, end_txn_marker(3), timestamp_ms=NOW_MS, producer_id=7, base_offset=8))
    made.append(encode_control_batch(ControlRecordType.LEADER_CHANGE, b"\0\0", timestamp_ms=NOW_MS))
    for count in (1, 10, 100, 300):
        made.append(encode_batch_from_parts(commit_pairs(count), timestamp_ms=NOW_MS, base_offset=count))
    different = [pair for number in range(9) for pair in commit_pairs(3, b"g" * (1 + number * 20))]
    made.append(encode_batch_from_parts([*different, (b"\0\1", None)], timestamp_ms=NOW_MS))
    made.append(encode_batch(_coordinator_like(rng)))
    many: list[tuple[str, bytes | None]] = [(f"name-{number}", b"v" * number) for number in range(130)]
    made.append(encode_batch([Record(b"k", b"v", many[:64]), Record(b"k", b"v" * 8192, many)]))
    return made


def _coordinator_like(rng: random.Random) -> list[Record]:
    """Returns runs of records of equal size, for the fast paths of the cleaner and the loader."""
    made = []
    for size in (9, 9, 64, 200):
        made += [Record(rng.randbytes(size), rng.randbytes(40), timestamp_ms=NOW_MS) for _ in range(20)]
    return made


def with_crc(batch: bytes) -> bytes:
    """Returns the batch with a correct CRC, so that readers check the rest too."""
    if len(batch) < BATCH_OVERHEAD_BYTES:
        return batch
    crc = crc32c(batch[ATTRIBUTES_POSITION:]).to_bytes(4, "big")
    return batch[:_CRC_POSITION] + crc + batch[ATTRIBUTES_POSITION:]


@cache
def broken_batches() -> list[bytes]:
    """Returns broken batches. Some are still valid, since a changed bit of a value leaves a record valid."""
    rng = random.Random(4)
    made = [b"", *message_sets(), *fuzzed_inputs()]
    for batch in sound_batches():
        small = batch if len(batch) < 3000 else batch[:3000]
        cuts = {1, 11, 12, 16, 17, 60, 61, 62, len(batch) - 1, rng.randrange(len(batch))}
        made += [batch[:cut] for cut in cuts if cut < len(batch)]
        for _ in range(_BIT_FLIPS):
            flipped = bytearray(batch)
            flipped[rng.randrange(len(small))] ^= 1 << rng.randrange(8)
            made += [bytes(flipped), with_crc(bytes(flipped))]
        for position in (8, 23, 57):  # length, last offset delta, count
            number = _HOSTILE_INT32[rng.randrange(len(_HOSTILE_INT32))]
            made.append(with_crc(batch[:position] + struct.pack(">i", number) + batch[position + 4 :]))
        made.append(with_crc(struct.pack(">q", -5) + batch[8:]))
    made += [with_crc(batch_around(body, count)) for body, count in bodies()]
    return made


@cache
def segments() -> list[bytes]:
    """Returns files of several batches with damage at the beginning, in the middle and at the end, or without."""
    rng = random.Random(9)
    made = []
    for broken in [b"", bytes(200), *rng.sample(broken_batches(), 150)]:
        before, after = _continued(rng, 0), _continued(rng, 2**32)
        made += [before + broken + after, before + broken]
    return made


def _continued(rng: random.Random, offset: int) -> bytes:
    """Returns a few valid batches with consecutive offsets."""
    made = []
    for batch in rng.sample([batch for batch in sound_batches() if len(batch) < 20_000], 3):
        ((_, header),) = iter_headers(batch)
        made.append(struct.pack(">q", offset) + batch[8:])
        offset += header.last_offset_delta + 1
    return b"".join(made)


def batch_around(body: bytes, count: int, last_delta: int | None = None) -> bytes:
    """Returns a batch whose records section is `body`."""
    batch = bytearray(encode_batch([]) + body)
    struct.pack_into(">i", batch, 8, len(batch) - 12)
    struct.pack_into(">i", batch, 23, max(count - 1, 0) if last_delta is None else last_delta)
    struct.pack_into(">i", batch, 57, count)
    return bytes(batch)


@cache
def bodies() -> list[tuple[bytes, int]]:
    """Returns (uncompressed records, their number) of the valid batches, as they are and with one wrong number."""
    rng = random.Random(23)
    made = []
    for batch in sound_batches():
        ((_, header),) = iter_headers(batch)
        body = records_of(batch, 0, header)
        made.append((body, header.records_count))
        for _ in range(6):
            at = rng.randrange(len(body) + 1) if len(body) < 400 else rng.randrange(400)
            made.append((body[:at] + rng.choice(_HOSTILE_VARINTS) + body[at + 1 :], header.records_count))
        made += [(lie, header.records_count) for lie in _with_longer_deltas(body, header.records_count)]
        made += [(body, header.records_count + 1), (body, max(header.records_count - 1, 0)), (body + b"\0", 1)]
    for content in _contents():
        made.append((encode_varint(len(content)) + content, 1))
    return made


def _with_longer_deltas(body: bytes, count: int) -> Iterator[bytes]:
    """Yields bodies in which the offset delta of one record has another length than those of its neighbours."""
    starts = [0, *(place[0] for place in walk_records(body, count))][:count]
    for start in starts[1 :: max(count // 4, 1)]:
        at = start + (1 if body[start] < 0x80 else 2) + 2  # most records have a timestamp delta of one byte
        yield body[:at] + bytes((body[at] | 0x80,)) + body[at + 1 :]
        yield body[:at] + bytes((body[at] & 0x7F,)) + body[at + 1 :]
        yield body[: at + 1] + bytes((body[at + 1] | 0x80,)) + body[at + 2 :]


def _contents() -> Iterator[bytes]:
    """Yields single records with one hostile number each."""
    fields = [b"\0", b"\0", b"\0", b"\x02k", b"\x02v", b"\x02", b"\x02n", b"\x021"]
    for number in range(1, len(fields)):
        for varint in _HOSTILE_VARINTS:
            for rest in (fields[number][1:], b""):
                yield b"".join([*fields[:number], varint + rest, *fields[number + 1 :]])
    yield b"".join(fields[:5]) + b"\0\0"
    yield b"".join(fields[:5])


def message_sets() -> list[bytes]:
    """Returns a message of format 0, one of format 1, and both together, as producers before Kafka 0.11 sent them."""
    made = []
    for magic, times in ((0, b""), (1, struct.pack(">q", NOW_MS))):
        content = bytes((magic, 0)) + times + struct.pack(">i", 1) + b"k" + struct.pack(">i", 60) + b"v" * 60
        message = struct.pack(">I", zlib.crc32(content)) + content
        made.append(struct.pack(">qi", 3, len(message)) + message)
    return [*made, b"".join(made)]


def fuzzed_inputs() -> list[bytes]:
    """Returns the inputs that guided fuzzing of Produce kept."""
    return [bytes.fromhex(line) for line in _FUZZED.read_text().splitlines()]
