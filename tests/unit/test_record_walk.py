# SPDX-License-Identifier: Apache-2.0
"""Compares the walker of batches and records with a simple reader, and all other readers with the walker.

All of them read one corpus of sound and broken bytes.
"""

from __future__ import annotations

import struct
from itertools import cycle, product
from struct import unpack_from

import pytest

from kcoord.config import BrokerConfig
from kcoord.coordinator.group.shard import GroupCoordinatorShard
from kcoord.metadata.image import MetadataImage
from kcoord.runtime.serde import CoordinatorSerde
from kcoord.storage.errors import CorruptLogError, InvalidAppendError
from kcoord.storage.file_system import write_all
from kcoord.storage.index import MAX_RELATIVE_OFFSET
from kcoord.storage.log import Log
from kcoord.storage.memory_file_system import MemoryFileSystem
from kcoord.storage.record_filter import iter_raw, read_runs
from kcoord.storage.scan import Damage, DamageKind, find_batch, walk
from kcoord.storage.segment import LogConfig
from kcoord.topics.record_scan import ScanRules, scan_records
from kcoord_protocol.batch_header import BATCH_OVERHEAD_BYTES, crc32c, decode_header, verify_crc
from kcoord_protocol.errors import CorruptBatchError, DecodeError
from kcoord_protocol.record_batch import (
    Record,
    decode_entries,
    decode_records,
    encode_batch,
    iter_headers,
    possible_batches,
    walk_batches,
)
from kcoord_protocol.record_walk import RecordPlace, walk_records
from tests.storage.cleaning import raw_records
from tests.support.batch_corpus import (
    NOW_MS,
    batch_around,
    bodies,
    broken_batches,
    message_sets,
    segments,
    sound_batches,
    with_crc,
)
from tests.support.plain_records import Refused, plain_records, unzigzag

RULES = ScanRules(needs_key=False, checks_timestamps=False, earliest_ms=0, latest_ms=0)


def walked(data: bytes, places: list[RecordPlace]) -> list[tuple[object, ...]]:
    """Returns the places in the form of `plain_records`."""
    return [
        (
            end,
            unzigzag(later),
            unzigzag(delta),
            data[key_at:key_end] if key_at >= 0 else None,
            (value_at, headers_at if value_at >= 0 else -1),
            headers_at,
        )
        for end, later, delta, key_at, key_end, value_at, headers_at in places
    ]


def places_of(data: bytes, count: int, **options: object) -> list[RecordPlace] | CorruptBatchError:
    try:
        return [*walk_records(data, count, **options)]  # type: ignore[arg-type]
    except CorruptBatchError as error:
        return error


@pytest.mark.parametrize("check_headers", [True, False])
@pytest.mark.parametrize("check_deltas", [True, False])
@pytest.mark.parametrize("lenient", [True, False])
@pytest.mark.parametrize("last", [None, 299, 2**31 - 1])
def test_the_walker_reads_records_as_the_simple_reader_does(
    check_headers: bool, check_deltas: bool, lenient: bool, last: int | None
) -> None:
    sound = 0
    for data, count in bodies():
        options = {"check_headers": check_headers, "check_deltas": check_deltas, "lenient": lenient}
        places = places_of(data, count, last_offset_delta=last, **options)
        try:
            expected = plain_records(data, count, last=last, **options)
        except Refused:
            assert isinstance(places, CorruptBatchError), data
            assert 0 <= places.position <= len(data)
        else:
            assert isinstance(places, list), data
            assert walked(data, places) == expected
            sound += 1
    assert len(sound_batches()) // 2 < sound < len(bodies())


def plain_batches(data: bytes) -> tuple[list[int], int, bool]:
    """Returns the positions of whole batches, the position after them, and whether an impossible header is there."""
    positions: list[int] = []
    at = 0
    while len(data) - at >= BATCH_OVERHEAD_BYTES:
        base_offset, length = unpack_from(">qi", data, at)
        (last_delta,) = unpack_from(">i", data, at + 23)
        if data[at + 16] != 2 or length < 49 or base_offset < 0 or last_delta < 0:
            return positions, at, True
        if at + 12 + length > len(data):
            break
        positions.append(at)
        at += 12 + length
    return positions, at, False


def walked_batches(data: bytes, *, verify: bool = False) -> tuple[list[int], CorruptBatchError | None]:
    positions = []
    try:
        for position, _ in walk_batches(data, verify=verify):
            positions.append(position)
    except CorruptBatchError as error:
        return positions, error
    return positions, None


ALL = [*sound_batches(), *broken_batches(), *segments()]


def test_the_walker_reads_batches_as_the_simple_reader_does() -> None:
    for data in ALL:
        expected, stop, is_impossible = plain_batches(data)
        positions, error = walked_batches(data)
        assert positions == expected
        assert (error is not None) == is_impossible
        if error is not None:
            assert error.position == stop
            assert error.base_offset == unpack_from(">q", data, stop)[0] or "record format" in str(error)


def test_the_error_of_a_wrong_checksum_names_the_batch() -> None:
    wrong = 0
    for data in ALL:
        positions, stop, is_impossible = plain_batches(data)
        ends = [*positions[1:], stop]
        bad = [at for at, end in zip(positions, ends, strict=False) if not is_sound(data[at:end])]
        seen, error = walked_batches(data, verify=True)
        if bad:
            assert error is not None
            assert (error.position, error.base_offset) == (bad[0], unpack_from(">q", data, bad[0])[0])
            assert "CRC" in str(error)
            assert seen == positions[: positions.index(bad[0])]
            wrong += 1
        else:
            assert seen == positions
            assert (error is not None) == is_impossible
    assert wrong > 100


def is_sound(batch: bytes) -> bool:
    return crc32c(batch[21:]) == int.from_bytes(batch[17:21], "big")


def test_a_batch_can_be_walked_by_its_header_alone() -> None:
    batch = max(sound_batches(), key=len)
    ((position, fields),) = walk_batches(batch[:61], 0, len(batch))
    assert (position, fields[1] + 12) == (0, len(batch))
    assert [*walk_batches(batch[:61], 0, len(batch) - 1)] == []


def test_iter_headers_returns_the_headers_that_the_walker_finds() -> None:
    for data in ALL:
        positions, error = walked_batches(data)
        seen = []
        try:
            for position, header in iter_headers(data):
                seen.append(position)
                assert header == decode_header(data, position)
        except CorruptBatchError as refusal:
            is_cut_message = len(data) > 16 and error is None
            assert is_cut_message or str(refusal) == str(error)
        else:
            assert error is None
        assert seen == positions


def test_the_error_of_a_message_set_names_its_format() -> None:
    for data in message_sets():
        with pytest.raises(CorruptBatchError, match=r"record format [01] is not supported"):
            list(iter_headers(data))


def test_possible_batches_are_found_at_every_byte() -> None:
    whole = encode_batch([Record(b"k", b"v" * 70)], base_offset=5)
    # The last offset delta of an empty batch is -1.
    empty = encode_batch([], base_offset=5)
    small = [whole, whole[:61], whole[:60], empty, b"\2" + whole, bytes(40) + whole + whole]
    limits = [*product((-1, 0, 10_000), (0, 5, 6))]
    # Each large one has one pair of limits, since a walk in Python takes long.
    cases = [*product(small, limits), *zip(segments()[:60], cycle(limits), strict=False)]
    seen = 0
    for data, (more, offset) in cases:
        end = len(data) + more
        expected = [at for at in range(len(data) - 60) if may_begin(data, at, end, offset)]
        places = [*possible_batches(data, 0, end, offset)]
        assert [at for at, _, _ in places] == expected
        assert [(data[at : at + 8], size) for at, size, _ in places] == [
            (struct.pack(">q", base_offset), 12 + unpack_from(">i", data, at + 8)[0]) for at, _, base_offset in places
        ]
        assert [at for at, _, _ in possible_batches(data, 1, end, offset)] == [at for at in expected if at > 0]
        seen += len(expected)
    assert seen > 100


def may_begin(data: bytes, at: int, end: int, offset: int) -> bool:
    base_offset, length = unpack_from(">qi", data, at)
    (last_delta,) = unpack_from(">i", data, at + 23)
    is_possible = data[at + 16] == 2 and length >= 49 and last_delta >= 0
    return bool(is_possible and base_offset >= offset and at + 12 + length <= end)


# -- the readers that call the walker ----------------------------------------------------------------------------------


def test_storage_stops_at_the_position_where_the_walker_stops() -> None:
    kinds = set()
    for data in segments():
        fs = MemoryFileSystem()
        fs.make_dirs("/d")
        write_all(fs.open_append("/d/x"), data)
        file = fs.open_read("/d/x")
        positions, error = walked_batches(data, verify=True)
        seen, offset = [], 0
        try:
            for frame in walk(file, 0, len(data), 0):
                assert frame.batch == data[frame.position : frame.position + frame.size_bytes]
                assert frame.base_offset >= offset
                offset = frame.last_offset + 1
                seen.append(frame.position)
        except Damage as damage:
            kinds.add(damage.kind)
            assert seen == positions[: len(seen)]
            assert damage.offset == offset
            if damage.kind is DamageKind.MISPLACED:
                assert damage.position == positions[len(seen)]
            else:
                stop = error.position if error is not None else plain_batches(data)[1]
                assert damage.position == stop
            sound = [at for at in range(damage.position + 1, len(data) - 60) if follows(data, at, damage.offset)]
            assert find_batch(file, damage.position + 1, len(data), damage.offset) == (
                (sound[0], unpack_from(">q", data, sound[0])[0]) if sound else None
            )
        else:
            assert error is None
            assert seen == positions
    assert kinds == set(DamageKind)


def follows(data: bytes, at: int, offset: int) -> bool:
    """Returns whether a sound batch begins at `at` whose base offset is at least `offset`."""
    if data[at + 16] != 2 or unpack_from(">q", data, at)[0] < offset or unpack_from(">i", data, at + 23)[0] < 0:
        return False
    return unpack_from(">i", data, at + 8)[0] >= 49 and verify_crc(data, at)


def test_a_log_accepts_whole_batches_with_rising_offsets() -> None:
    taken = 0
    for data in ALL:
        log = Log.open(MemoryFileSystem(), "/d", LogConfig(), NOW_MS)
        positions, stop, _ = plain_batches(data)
        headers = [decode_header(data, position) for position in positions]
        if headers and headers[-1].last_offset - headers[0].base_offset > MAX_RELATIVE_OFFSET:
            # A segment cannot hold such a range of offsets, and no caller appends one at once.
            continue
        bounds = zip([0, *(header.next_offset for header in headers)], headers, strict=False)
        is_whole = bool(positions) and stop == len(data) and all(header.base_offset >= due for due, header in bounds)
        try:
            log.append(data, now_ms=NOW_MS)
        except InvalidAppendError:
            assert not is_whole
            assert log.size_bytes == 0
            continue
        assert is_whole
        taken += 1
        last = headers[-1].last_offset
        if all(verify_crc(data, position) for position in positions):
            assert log.read(last, 1)[:8] == data[positions[-1] : positions[-1] + 8]
            assert sum(1 for _ in log.batches()) == len(positions)
        else:
            with pytest.raises(CorruptLogError, match="CRC"):
                list(log.batches())
    assert taken > len(sound_batches())


def test_the_checks_of_produced_records_reject_what_the_walker_rejects() -> None:
    for data, count in bodies():
        places = places_of(data, count, check_deltas=False, lenient=True)
        try:
            scan = scan_records(data, count, 1000, RULES)
        except CorruptBatchError as error:
            assert str(error) == str(places)
        else:
            assert isinstance(places, list)
            assert scan.max_timestamp == max([-1, *(1000 + unzigzag(place[1]) for place in places)])
            gaps = [index for index, place in enumerate(places) if unzigzag(place[2]) != index]
            assert [index for index, _, _ in scan.errors] == gaps


def test_decoders_return_the_records_that_the_walker_finds() -> None:
    for body, count in bodies():
        batch = batch_around(body, count, 2**31 - 1)
        places = places_of(body, count, last_offset_delta=2**31 - 1)
        try:
            entries = decode_entries(batch)
            records = decode_records(batch)
        except DecodeError:
            assert isinstance(places, CorruptBatchError) or count * 7 > len(body)
            continue
        assert isinstance(places, list)
        plain = walked(body, places)
        assert [(offset, key) for offset, key, _ in entries] == [(delta, key) for _, _, delta, key, _, _ in plain]
        assert [(record.offset, record.key, record.value) for record in records] == entries
        assert [record.timestamp_ms + 1 for record in records] == [later for _, later, *_ in plain]
        values = [None if at < 0 else body[at:end] for *_, (at, end), _ in plain]  # type: ignore[misc, has-type]
        assert [value for _, _, value in entries] == values


def test_the_cleaner_reads_the_records_that_the_walker_finds() -> None:
    in_runs = 0
    for data, count in bodies():
        places = places_of(data, count, check_headers=False, lenient=True)
        is_sound = isinstance(places, list)
        try:
            seen = list(iter_raw(data, count))
        except CorruptBatchError:
            assert not is_sound
            continue
        assert is_sound
        assert isinstance(places, list)
        plain = walked(data, places)
        starts = [0, *(place[0] for place in places)]
        assert [record.start for record in seen] == starts[: len(seen)]
        assert [(record.end, record.offset_delta, record.key) for record in seen] == [
            (end, delta, key) for end, _, delta, key, _, _ in plain
        ]
        assert [record.has_value for record in seen] == [place[5] >= 0 for place in places]
        runs = read_runs(data, count)
        if runs is not None and seen:
            in_runs += 1
            assert raw_records(runs) == seen
    assert in_runs > 3


def test_runs_are_read_only_from_sound_records() -> None:
    """`read_runs` reads records of equal shape in a row. It accepts nothing that the walker rejects."""
    for data, count in bodies():
        if read_runs(data, count) is not None and count > 0:
            assert isinstance(places_of(data, count, check_headers=False), list)


def test_packed_commits_are_replayed_only_from_sound_records() -> None:
    """The loader has a fast path for batches of committed offsets. It gives the same state as the general replay."""
    short = 0
    serde = CoordinatorSerde()
    for body, count in bodies():
        batch = with_crc(batch_around(body, count))
        quick = GroupCoordinatorShard(BrokerConfig.from_properties({}), MetadataImage.empty())
        if not quick.batch_replay()(batch, count) or count == 0:
            continue
        short += 1
        slow = GroupCoordinatorShard(BrokerConfig.from_properties({}), MetadataImage.empty())
        for _, key, value in decode_entries(batch):
            record = serde.deserialize(key, value)
            assert record is not None
            slow.replay(record)
        assert quick.hard_state() == slow.hard_state()
    assert short > 3
