# SPDX-License-Identifier: Apache-2.0
"""The cleaner reads records in runs, and writes the same bytes as an encoder of the remaining records."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kcoord.storage.record_filter import empty_batch, filter_batch, iter_raw, read_runs
from kcoord_protocol.primitives import encode_varint, encode_varlong
from kcoord_protocol.record_batch import (
    Compression,
    Record,
    TimestampType,
    decode_header,
    decode_records,
    encode_batch,
    records_of,
)
from tests.storage.cleaning import raw_records
from tests.support.batch_corpus import with_crc

CREATE, APPEND = TimestampType.CREATE_TIME, TimestampType.LOG_APPEND_TIME

Size = Callable[[int], int]

# -- runs --------------------------------------------------------------------------------------------------------------


def record(
    delta: int,
    key: bytes = b"key",
    value: bytes | None = b"value",
    *,
    key_size: Size = int,
    value_size: Size = int,
    later: int = 0,
    tail: bytes = b"\0",
) -> bytes:
    """Returns one record with its length."""
    content = b"\0" + encode_varlong(later) + encode_varint(delta) + encode_varint(key_size(len(key))) + key
    content += encode_varint(-1 if value is None else value_size(len(value))) + (value or b"") + tail
    return encode_varint(len(content)) + content


def runs_of(data: bytes, count: int) -> list[int] | None:
    runs = read_runs(data, count)
    return None if runs is None else [len(run.keys) for run in runs]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([1], [1]),
        ([3], [3]),
        ([4, 4, 4], [4, 4, 4]),
        ([4, 3], [4, 3]),
        ([4, 1], [4, 1]),
        ([3, 4], None),
        ([4, 3, 4], None),
        ([5, 1, 9], None),
        ([1, 9], None),
    ],
)
@pytest.mark.parametrize("field", ["key", "value", "tombstone", "later", "tail"])
def test_a_run_has_at_least_four_records_or_is_the_last(
    sizes: list[int], expected: list[int] | None, field: str
) -> None:
    """A run ends at a change of a size, of the timestamp, or of the presence of a value or headers."""
    data, delta = b"", 0
    for number, size in enumerate(sizes):
        for _ in range(size):
            match field, number % 2:
                case "key", _:
                    data += record(delta, b"k" * (9 - 4 * (number % 3)))
                case "value", _:
                    data += record(delta, value=b"v" * (61 - 30 * (number % 3)))
                case "tombstone", 1:
                    data += record(delta, value=None)
                case "later", 1:
                    data += record(delta, later=1)
                case "tail", 1:
                    data += record(delta, tail=b"\2\2h\2v")
                case _:
                    data += record(delta)
            delta += 1
    assert runs_of(data, sum(sizes)) == expected


@pytest.mark.parametrize(
    ("deltas", "expected"),
    [
        (range(300), [64, 236]),
        (range(10, 110), [54, 46]),
        (range(60, 70), [4, 6]),
        (range(63, 70), None),
        (range(64, 90), [26]),
        (range(100, 8192, 100), [81]),
        (range(8185, 8195), None),
        ([0, 3, 5, 63, 64, 66, 90, 8191], [4, 4]),
    ],
)
def test_a_run_ends_if_offset_deltas_need_another_byte(deltas: Sequence[int], expected: list[int] | None) -> None:
    """Deltas of three bytes are too rare for runs."""
    data = b"".join(map(record, deltas))
    assert runs_of(data, len(deltas)) == expected
    runs = read_runs(data, len(deltas)) or []
    assert [delta for run in runs for delta in run.offset_deltas] == list(deltas if expected else [])


SIZES: tuple[Size, ...] = (int, operator.invert, operator.neg, lambda size: size + 1)
"""Returns the possible size fields of a record: the true size, negative numbers, and one byte too many."""


@pytest.mark.parametrize("tail", [b"\0", b"\2\2h\2v", b"", b"\2"])
@pytest.mark.parametrize("delta", [0, -70, 61])
def test_runs_have_the_records_of_the_walker_and_none_that_it_rejects(delta: int, tail: bytes) -> None:
    """Records whose sizes may be wrong, with a byte too many or too few after them."""
    fields = product((1, 5), (b"", b"k", b"key"), (None, b"", b"v", b"va"), SIZES, SIZES, (-1, 0, 1))
    for count, key, value, key_size, value_size, surplus in fields:
        data = b"".join(
            record(delta + number, key, value, key_size=key_size, value_size=value_size, tail=tail)
            for number in range(count)
        )
        data = data[:-1] if surplus < 0 else data + bytes(surplus)
        runs = read_runs(data, count)
        if runs is not None:
            assert raw_records(runs) == list(iter_raw(data, count))


# -- writing -----------------------------------------------------------------------------------------------------------

TIMES = st.sampled_from([0, 1, 2, 100, 10**6, 1_700_000_000_000])
RECORDS = st.lists(
    st.builds(
        Record,
        key=st.sampled_from([None, b"", b"k", b"key" * 30]),
        value=st.sampled_from([None, b"", b"v", b"value" * 20]),
        headers=st.sampled_from([[], [("h", b"x")]]),
        timestamp_ms=TIMES,
    ),
    min_size=1,
    max_size=6,
)
BATCHES = st.fixed_dictionaries(
    {
        "base_offset": st.sampled_from([0, 7, 2**40]),
        "compression": st.sampled_from(Compression),
        "timestamp_type": st.sampled_from(TimestampType),
        "partition_leader_epoch": st.sampled_from([0, 5]),
        "producer_id": st.sampled_from([-1, 9]),
        "producer_epoch": st.sampled_from([-1, 3]),
        "base_sequence": st.sampled_from([-1, 4]),
        "is_transactional": st.booleans(),
    }
)


@settings(max_examples=150)
@given(RECORDS, BATCHES, st.sets(st.integers(0, 5), min_size=1), st.none() | TIMES)
def test_a_filtered_batch_equals_the_encoded_remaining_records(
    made: list[Record], fields: dict[str, Any], chosen: set[int], horizon_ms: int | None
) -> None:
    """The first record always stays here, because a batch without a delete horizon counts its timestamps from it."""
    base_offset = fields["base_offset"]
    made = [replace(record, offset=base_offset + number) for number, record in enumerate(made)]
    kept = [record for number, record in enumerate(made) if number in chosen or number == 0]
    whole = encode_batch(made, **fields)
    header = decode_header(whole)
    data = records_of(whole, 0, header)
    spans = [
        (raw.start, raw.end)
        for raw in iter_raw(data, len(made))
        if raw.offset_delta in {r.offset - base_offset for r in kept}
    ]
    filtered = filter_batch(header, data, spans, horizon_ms)
    expected = encode_batch(kept, last_offset=made[-1].offset, delete_horizon_ms=horizon_ms, **fields)
    if fields["timestamp_type"] is APPEND:
        # All records have the largest timestamp of the batch, so it stays.
        expected = with_crc(expected[:35] + whole[35:43] + expected[43:])
    assert filtered == expected


@pytest.mark.parametrize(("timestamp_ms", "expected"), [(-(2**63), 1000 - 2**63), (1500 - 2**63, 1500 - 2**63)])
def test_a_delete_horizon_is_possible_for_the_oldest_timestamps(timestamp_ms: int, expected: int) -> None:
    """The delta of such a record has more than 64 bits if it is counted from the horizon."""
    whole = encode_batch([Record(b"k", None, timestamp_ms=timestamp_ms)])
    header = decode_header(whole)
    data = records_of(whole, 0, header)
    filtered = filter_batch(header, data, [(0, len(data))], 1000)
    assert [record.timestamp_ms for record in decode_records(filtered)] == [expected]
    assert decode_header(filtered).max_timestamp == expected


def test_the_base_timestamp_stays_if_the_first_record_goes() -> None:
    made = [Record(b"k", b"v", timestamp_ms=timestamp_ms) for timestamp_ms in (50, 90, 30)]
    whole = encode_batch(made)
    header = decode_header(whole)
    data = records_of(whole, 0, header)
    filtered = filter_batch(header, data, [raw[:2] for raw in iter_raw(data, 3)][2:], None)
    after = decode_header(filtered)
    assert (after.base_timestamp, after.max_timestamp, after.records_count) == (50, 30, 1)
    assert [(record.offset, record.timestamp_ms) for record in decode_records(filtered)] == [(2, 30)]


@pytest.mark.parametrize("timestamp_type", [CREATE, APPEND])
@pytest.mark.parametrize("is_transactional", [False, True])
@pytest.mark.parametrize("is_control", [False, True])
@pytest.mark.parametrize("horizon_ms", [None, 77])
def test_an_emptied_batch_keeps_the_header_of_the_whole_batch(
    timestamp_type: TimestampType, is_transactional: bool, is_control: bool, horizon_ms: int | None
) -> None:
    """As Kafka's writeEmptyHeader: without codec and delete horizon, with the timestamp of the batch."""
    kept: dict[str, Any] = {
        "timestamp_type": timestamp_type,
        "is_transactional": is_transactional,
        "is_control": is_control,
        "partition_leader_epoch": 6,
        "producer_id": 3,
        "producer_epoch": 2,
        "base_sequence": 8,
        "base_offset": 40,
        "last_offset": 44,
    }
    whole = encode_batch(
        [Record(b"k", b"v", timestamp_ms=99)], compression=Compression.ZSTD, delete_horizon_ms=horizon_ms, **kept
    )
    expected = encode_batch([], **kept)
    assert empty_batch(decode_header(whole)) == with_crc(expected[:35] + (99).to_bytes(8, "big") + expected[43:])
