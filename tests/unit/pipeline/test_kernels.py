# SPDX-License-Identifier: Apache-2.0
"""Compares the decoder's inner loops with the broker's decoder, on sound and damaged bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcoord.pipeline.buffers import Bytes, Gather, content_bytes, padded_copy, unzigzag, uvarints
from kcoord.pipeline.kernels import DecoderName, Kernels, kernels
from kcoord.pipeline.keys import read_any_key, read_key
from kcoord.pipeline.offset_values import OffsetValues
from kcoord.pipeline.record_split import Split
from kcoord_protocol.batch_header import BATCH_OVERHEAD_BYTES
from kcoord_protocol.errors import CorruptBatchError, DecodeError
from kcoord_protocol.messages import OffsetCommitValue
from kcoord_protocol.primitives import encode_uvarint, encode_varlong
from kcoord_protocol.record_batch import Record, decode_records, encode_batch
from kcoord_protocol.uuid import ZERO_UUID

BYTES = st.one_of(st.none(), st.binary(max_size=90), st.binary(min_size=120, max_size=300))
HEADERS = st.lists(st.tuples(st.text(max_size=4), st.one_of(st.none(), st.binary(max_size=5))), max_size=2)
RECORDS = st.lists(
    st.builds(Record, BYTES, BYTES, HEADERS, timestamp_ms=st.integers(0, 2**45)), min_size=1, max_size=140
)


@pytest.fixture(scope="module", params=["numpy", "numba"])
def loops(request: pytest.FixtureRequest) -> Kernels:
    name: DecoderName = request.param
    return kernels(name)


def split_columns(loops: Kernels, data: Bytes, batches: list[bytes]) -> Split:
    sizes = np.array([len(batch) for batch in batches])
    at = np.cumsum(sizes) - sizes
    count = Gather(data).int32(at + 57)
    return loops.split_records(data, at + BATCH_OVERHEAD_BYTES, at + sizes, count)


def split(loops: Kernels, batches: list[bytes]) -> tuple[list[tuple[object, ...]], list[bool]]:
    """Returns (offset delta, timestamp delta, key, value) of each record, and which batches are sound."""
    data = padded_copy(*batches)
    columns = split_columns(loops, data, batches)

    def piece(start: int, size: int) -> bytes | None:
        return None if size < 0 else data[start : start + size].tobytes()

    rows = zip(
        columns.offset_delta.tolist(),
        columns.timestamp_delta.tolist(),
        map(piece, columns.key_at.tolist(), columns.key_size.tolist()),
        map(piece, columns.value_at.tolist(), columns.value_size.tolist()),
        strict=True,
    )
    return list(rows), columns.ok.tolist()


@given(batches=st.lists(RECORDS, min_size=1, max_size=4), copies=st.sampled_from([1, 30]))
def test_records_are_cut_as_the_broker_cuts_them(loops: Kernels, batches: list[list[Record]], copies: int) -> None:
    encoded = [encode_batch(records) for records in batches] * copies
    rows, ok = split(loops, encoded)
    expected = [
        (number, record.timestamp_ms - records[0].timestamp_ms, record.key, record.value)
        for records in batches
        for number, record in enumerate(records)
    ]
    assert all(ok)
    assert rows == expected * copies


@given(records=RECORDS, at=st.integers(0, 10**6), byte=st.integers(0, 255), copies=st.sampled_from([1, 30]))
def test_a_batch_that_the_broker_rejects_is_bad(
    loops: Kernels, records: list[Record], at: int, byte: int, copies: int
) -> None:
    sound = encode_batch(records)
    damaged = bytearray(sound)
    damaged[BATCH_OVERHEAD_BYTES + at % (len(sound) - BATCH_OVERHEAD_BYTES)] = byte
    batches = [sound, bytes(damaged), *[sound] * copies]
    columns = split_columns(loops, padded_copy(*batches), batches)
    ok = columns.ok.tolist()
    assert ok[:1] + ok[2:] == [True] * (copies + 1)
    try:
        decode_records(bytes(damaged))
    except CorruptBatchError as error:
        # The decoder checks falling offsets and headers later. The rest of a value that was cut short looks like
        # headers.
        has_headers = columns.end - columns.value_at - np.maximum(columns.value_size, 0) > 1
        of_damaged = slice(len(records), 2 * len(records))
        assert not ok[1] or "offset delta" in str(error) or has_headers[of_damaged].any()
    else:
        assert ok[1]


@given(junk=st.binary(max_size=400), counts=st.lists(st.integers(-5, 300), min_size=1, max_size=40))
def test_split_never_reads_beyond_the_end_of_junk(loops: Kernels, junk: bytes, counts: list[int]) -> None:
    data = padded_copy(junk)
    at = np.zeros(len(counts), np.int64)
    end = np.full(len(counts), len(junk))
    columns = loops.split_records(data, at, end, np.array(counts))
    assert len(columns.ok) == len(counts)
    assert not any(columns.ok[np.array(counts) < 0])


@given(values=st.lists(st.integers(0, 2**55 - 1), min_size=1, max_size=20))
def test_varints_of_a_column_are_decoded(values: list[int]) -> None:
    encoded = [encode_varlong(value) for value in values]
    words = np.array([int.from_bytes(varint.ljust(8, b"\x80")[:8], "little") for varint in encoded], np.uint64)
    raw, used = uvarints(words)
    assert unzigzag(raw).tolist() == values
    assert used.tolist() == [len(varint) for varint in encoded]


def read_values(loops: Kernels, values: list[bytes]) -> OffsetValues:
    data = padded_copy(*values)
    sizes = np.array([len(value) for value in values])
    return loops.read_offset_values(Gather(data), np.cumsum(sizes) - sizes, sizes)


VALUES = st.builds(
    OffsetCommitValue,
    offset=st.integers(0, 2**62),
    leader_epoch=st.integers(-1, 2**31 - 1),
    metadata=st.text(max_size=40),
    commit_timestamp=st.integers(-1, 2**50),
    expire_timestamp=st.just(-1),
    topic_id=st.one_of(st.just(ZERO_UUID), st.binary(min_size=16, max_size=16)),
)


@given(given_values=st.lists(st.tuples(VALUES, st.integers(0, 4), st.booleans()), min_size=1, max_size=12))
def test_offset_values_are_read_as_the_broker_reads_them(
    loops: Kernels, given_values: list[tuple[OffsetCommitValue, int, bool]]
) -> None:
    encoded = []
    for value, version, has_unknown_tag in given_values:
        value.unknown_tagged_fields = ((7, b"new"),) if has_unknown_tag and version >= 4 else ()
        if version < 4:
            value.topic_id = ZERO_UUID
        encoded.append(version.to_bytes(2, "big") + value.encode(version))
    columns = read_values(loops, encoded)
    data = padded_copy(*encoded)
    assert columns.readable.all() and not columns.errors
    assert columns.version.tolist() == [version for _, version, _ in given_values]
    for row, (data_row, version) in enumerate(
        (value, version) for value, (_, version, _) in zip(encoded, given_values, strict=True)
    ):
        expected = OffsetCommitValue.decode(data_row[2:], version)
        numbers = {name: int(column[row]) for name, column in columns.numbers.items()}
        assert numbers == {name: getattr(expected, name) for name in numbers}
        at, size = int(columns.metadata_at[row]), int(columns.metadata_size[row])
        assert data[at : at + size].tobytes().decode() == expected.metadata
        topic_id = columns.topic_id[row].tobytes() if columns.has_topic_id[row] else ZERO_UUID
        assert topic_id == expected.topic_id


@given(value=VALUES, version=st.integers(0, 6), cut=st.integers(0, 60), junk=st.binary(max_size=5))
def test_malformed_offset_values_have_an_error(
    loops: Kernels, value: OffsetCommitValue, version: int, cut: int, junk: bytes
) -> None:
    encoded = version.to_bytes(2, "big") + value.encode(min(version, 4))
    if version < 4:
        value.topic_id = ZERO_UUID
        encoded = version.to_bytes(2, "big") + value.encode(version)
    encoded = encoded[: max(len(encoded) - cut, 0)] + junk
    columns = read_values(loops, [encoded])
    number = int.from_bytes(encoded[:2], "big", signed=True)
    if len(encoded) >= 2 and number not in OffsetCommitValue.valid_versions:
        assert not columns.readable[0] and not columns.errors
        return
    try:
        if len(encoded) < 2:
            raise DecodeError("too short")
        OffsetCommitValue.decode(encoded[2:], number)
    except DecodeError:
        # A text that is not UTF-8 is no error here: the column shows replacement characters instead.
        assert bool(columns.errors) != bool(columns.readable[0])
    else:
        assert columns.readable[0]


@given(records=st.lists(RECORDS, min_size=1, max_size=5), tail=st.binary(max_size=70))
def test_walk_stops_before_bytes_that_are_not_a_batch(loops: Kernels, records: list[list[Record]], tail: bytes) -> None:
    batches = [encode_batch(batch) for batch in records]
    data = padded_copy(*batches, tail)
    whole = sum(map(len, batches))
    positions, end = loops.walk(data, 0, content_bytes(data))
    if len(tail) < BATCH_OVERHEAD_BYTES:
        assert end == whole
    assert positions[: len(batches)].tolist() == [sum(map(len, batches[:number])) for number in range(len(batches))]
    cut = padded_copy(*batches[:-1], batches[-1][:-1])
    assert loops.walk(cut, 0, content_bytes(cut))[1] == whole - len(batches[-1])


def test_sizes_of_large_records_are_read(loops: Kernels) -> None:
    assert encode_uvarint(2**32 - 1) == b"\xff\xff\xff\xff\x0f"
    rows, ok = split(loops, [encode_batch([Record(b"k" * 70_000, b"v" * 3_000_000)])] * 2)
    assert ok == [True, True]
    assert [len(row[2]) for row in rows] == [70_000, 70_000]  # type: ignore[arg-type]


@given(pieces=st.lists(st.lists(st.one_of(st.none(), st.binary(max_size=60)), max_size=30), max_size=4))
def test_an_index_numbers_keys_in_the_order_of_their_first_occurrence(
    loops: Kernels, pieces: list[list[bytes | None]]
) -> None:
    index = loops.key_index()
    seen: dict[bytes, int] = {}
    for keys in pieces:
        data = padded_copy(*(key for key in keys if key is not None))
        size = np.array([-1 if key is None else len(key) for key in keys], np.int64)
        at = np.cumsum(np.maximum(size, 0)) - np.maximum(size, 0)
        first = len(seen)
        expected = [-1 if key is None else seen.setdefault(key, len(seen)) for key in keys]
        numbers, new = index.find(data, at, size)
        assert numbers.tolist() == expected
        assert new == [*seen][first:]


def test_an_index_grows_beyond_its_first_size(loops: Kernels) -> None:
    keys = [b"%d" % number * (1 + number % 40) for number in range(30_000)]
    data = padded_copy(*keys)
    size = np.array([len(key) for key in keys])
    at = np.cumsum(size) - size
    index = loops.key_index()
    distinct = dict.fromkeys(keys)
    numbers, new = index.find(data, at, size)
    assert new == [*distinct]
    assert [new[number] for number in numbers.tolist()] == keys
    again, none_new = index.find(data, at, size)
    assert again.tolist() == numbers.tolist() and none_new == []


@given(
    group=st.binary(max_size=8),
    topic=st.binary(max_size=8),
    partition=st.integers(-(2**31), 2**31 - 1),
    change=st.tuples(st.integers(0, 30), st.integers(0, 255)) | st.none(),
    tail=st.binary(max_size=2),
)
def test_the_fast_path_reads_offset_keys_as_the_schemas_do(
    group: bytes, topic: bytes, partition: int, change: tuple[int, int] | None, tail: bytes
) -> None:
    texts = b"".join(len(text).to_bytes(2, "big") + text for text in (group, topic))
    key = bytearray(b"\0\1" + texts + partition.to_bytes(4, "big", signed=True) + tail)
    if change is not None:
        key[change[0] % len(key)] = change[1]
    assert read_key(bytes(key)) == read_any_key(bytes(key))


def test_keys_with_texts_that_are_too_long_are_errors() -> None:
    size = 0x8000
    key = b"\0\1" + size.to_bytes(2, "big") + b"g" * size + b"\0\1t" + bytes(4)
    assert read_key(key) == read_any_key(key)
    assert read_key(key).error is not None


@given(keys=st.lists(st.none() | st.binary(max_size=40), max_size=40))
def test_pieces_of_a_buffer_become_a_binary_column(loops: Kernels, keys: list[bytes | None]) -> None:
    data = padded_copy(*(key for key in keys if key is not None))
    size = np.array([-1 if key is None else len(key) for key in keys], np.int64)
    at = np.cumsum(np.maximum(size, 0)) - np.maximum(size, 0)
    column = loops.pieces(data, at, size)
    column.validate(full=True)
    assert column.to_pylist() == keys
