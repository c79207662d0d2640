# SPDX-License-Identifier: Apache-2.0
"""Compares the columnar readers with the walker of the protocol, on the corpus that all readers share."""

from __future__ import annotations

import numpy as np
import pytest

from kcoord.pipeline.batch_table import Batches, find_batch, scan
from kcoord.pipeline.buffers import Gather, padded_copy
from kcoord.pipeline.kernels import DecoderName, Kernels, kernels
from kcoord.pipeline.record_split import Split
from kcoord_protocol.batch_header import BatchHeader, decode_header, verify_crc
from kcoord_protocol.errors import CorruptBatchError
from kcoord_protocol.record_batch import Record, encode_batch, records_of, walk_batches
from kcoord_protocol.record_walk import RecordPlace, walk_records
from tests.support.batch_corpus import bodies, broken_batches, segments, sound_batches


@pytest.fixture(scope="module", params=["numpy", "numba"])
def loops(request: pytest.FixtureRequest) -> Kernels:
    name: DecoderName = request.param
    return kernels(name)


def walked(data: bytes, *, verify: bool) -> tuple[list[int], CorruptBatchError | None]:
    positions = []
    try:
        for position, _ in walk_batches(data, verify=verify):
            positions.append(position)
    except CorruptBatchError as error:
        return positions, error
    return positions, None


@pytest.mark.parametrize("verify", [True, False])
def test_scan_finds_the_batches_that_the_walker_finds(loops: Kernels, verify: bool) -> None:
    for content in [*sound_batches(), *broken_batches(), *segments()]:
        data = padded_copy(content)
        positions, error = walked(content, verify=verify)
        result = scan(data, len(content), loops.walk, verify=verify)
        assert result.positions.tolist() == positions
        assert bool(result.error) == (error is not None)
        if error is not None:
            assert result.end == error.position
        batches = Batches.read(Gather(data), result.positions)
        headers = [decode_header(content, position) for position in positions]
        for name, attribute in FIELDS.items():
            assert getattr(batches, name).tolist() == [getattr(header, attribute) for header in headers]


FIELDS = {
    "size_bytes": "size_bytes",
    "base_offset": "base_offset",
    "leader_epoch": "partition_leader_epoch",
    "attributes": "attributes",
    "last_offset": "last_offset",
    "base_timestamp": "base_timestamp",
    "max_timestamp": "max_timestamp",
    "producer_id": "producer_id",
    "producer_epoch": "producer_epoch",
    "base_sequence": "base_sequence",
    "count": "records_count",
}
"""Column -> field of BatchHeader."""


def test_every_field_of_a_header_has_a_column() -> None:
    names = {*BatchHeader.__dataclass_fields__, "size_bytes", "last_offset"}
    assert {*FIELDS.values()} == names - {"batch_length", "magic", "crc", "last_offset_delta"}


def places_of(data: bytes, count: int) -> list[RecordPlace] | None:
    try:
        return [*walk_records(data, count, check_headers=False)]
    except CorruptBatchError:
        return None


def expected_rows(start: int, place: RecordPlace) -> list[int | None]:
    end, later, delta, key_at, key_end, value_at, headers_at = place
    return [
        delta >> 1,
        later >> 1 ^ -(later & 1),
        None if key_at < 0 else start + key_at,
        -1 if key_at < 0 else key_end - key_at,
        start + (headers_at if value_at < 0 else value_at),
        -1 if value_at < 0 else headers_at - value_at,
        start + end,
    ]


def rows_of(split: Split, rows: range) -> list[list[int | None]]:
    columns = [split.offset_delta, split.timestamp_delta, split.key_at, split.key_size]
    columns += [split.value_at, split.value_size, split.end]
    made: list[list[int | None]] = [[int(column[row]) for column in columns] for row in rows]
    for row in made:
        if row[3] == -1:
            row[2] = None
    return made


@pytest.mark.parametrize("copies", [1, 30])
def test_split_gives_the_records_of_the_walker(loops: Kernels, copies: int) -> None:
    """A single batch is cut record by record, thirty batches are cut in lockstep."""
    sound = 0
    for content, count in bodies():
        places = places_of(content, count)
        is_possible = count * 7 <= len(content)
        data = padded_copy(*[content] * copies)
        at = np.arange(copies) * len(content)
        split = loops.split_records(data, at, at + len(content), np.full(copies, count))
        assert split.ok.tolist() == [places is not None and is_possible] * copies
        if places is not None and is_possible:
            sound += 1
            for copy in (0, copies - 1):
                expected = [expected_rows(copy * len(content), place) for place in places]
                assert rows_of(split, range(copy * count, (copy + 1) * count)) == expected
    assert sound > len(sound_batches()) // 2


def test_a_long_batch_among_short_ones_is_finished_record_by_record(loops: Kernels) -> None:
    """Its first record is cut in lockstep with those of thirty other batches, which have one record each."""
    short = records_of(sound := encode_batch([Record(b"k", b"v")]), 0, decode_header(sound))
    for content, count in bodies():
        places = places_of(content, count)
        data = padded_copy(content, *[short] * 30)
        ends = np.cumsum([len(content), *[len(short)] * 30])
        split = loops.split_records(data, np.array([0, *ends[:-1]]), ends, np.array([count, *[1] * 30]))
        is_sound = places is not None and count * 7 <= len(content)
        assert split.ok.tolist() == [is_sound, *[True] * 30]
        if is_sound and places is not None:
            assert rows_of(split, range(count)) == [expected_rows(0, place) for place in places]


def test_find_batch_returns_the_next_sound_batch_after_damage() -> None:
    for content in segments():
        _, error = walked(content, verify=True)
        if error is None:
            continue
        data = padded_copy(content)
        sound = [at for at in range(error.position + 1, len(content) - 60) if is_sound(content, at)]
        assert find_batch(data, error.position + 1, len(content), 0) == (sound[0] if sound else None)


def is_sound(content: bytes, at: int) -> bool:
    if content[at + 16] != 2 or int.from_bytes(content[at + 8 : at + 12], "big", signed=True) < 49:
        return False
    header = decode_header(content, at)
    return header.base_offset >= 0 and header.last_offset_delta >= 0 and verify_crc(content, at)
