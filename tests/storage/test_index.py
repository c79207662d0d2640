# SPDX-License-Identifier: Apache-2.0
"""The index files have Kafka's bytes, agree with a plain search, and are rejected if they do not fit the log."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcoord.storage.errors import DamagedIndexError
from kcoord.storage.index import OffsetIndex, TimeIndex


def offset_index(base_offset: int, entries: list[tuple[int, int]]) -> OffsetIndex:
    index = OffsetIndex(base_offset)
    for offset, position in entries:
        index.append(offset, position)
    return index


def test_offset_index_bytes() -> None:
    index = offset_index(100, [(109, 4270), (120, 9000)])
    assert index.encode() == bytes.fromhex("00000009 000010ae 00000014 00002328")
    assert index.encode(1) == bytes.fromhex("00000014 00002328")


def test_time_index_bytes() -> None:
    index = TimeIndex(4386)
    index.maybe_append(0x1A1FBDF19D6, 4386 + 0x6D)
    index.maybe_append(0x1A1FBDF1C89, 4386 + 0x80)
    assert index.encode() == bytes.fromhex("000001a1fbdf19d60000006d 000001a1fbdf1c8900000080")


def test_the_time_index_accepts_only_later_timestamps() -> None:
    index = TimeIndex(0)
    for timestamp, offset in ((-1, 0), (10, 1), (10, 2), (9, 3), (11, 4)):
        index.maybe_append(timestamp, offset)
    assert [tuple(entry) for entry in (index.lookup(10), index.last()) if entry] == [(10, 1), (11, 4)]
    assert index.lookup(9) is None


entry_lists = st.lists(st.tuples(st.integers(1, 1000), st.integers(1, 1000)), max_size=30).map(
    lambda steps: [(sum(a for a, _ in steps[: n + 1]), sum(b for _, b in steps[: n + 1])) for n in range(len(steps))]
)


@given(entry_lists, st.integers(0, 40_000), st.integers(0, 40_000))
def test_offset_lookups_agree_with_a_plain_search(entries: list[tuple[int, int]], offset: int, position: int) -> None:
    base = 5000
    index = offset_index(base, [(base + o, p) for o, p in entries])
    below = [(base + o, p) for o, p in entries if base + o <= offset]
    assert index.lookup(offset) == (below[-1] if below else None)
    assert index.floor_position(position) == max([p for _, p in entries if p <= position], default=0)
    again = OffsetIndex.decode(base, index.encode(), 1 << 20)
    assert again.encode() == index.encode()
    again.truncate_to_position(position)
    assert len(again) == sum(p < position for _, p in entries)


@given(entry_lists, st.integers(0, 40_000))
def test_time_lookups_agree_with_a_plain_search(entries: list[tuple[int, int]], timestamp: int) -> None:
    base = 5000
    index = TimeIndex(base)
    for at, offset in entries:
        index.maybe_append(at, base + offset)
    below = [(at, base + offset) for at, offset in entries if at <= timestamp]
    assert index.lookup(timestamp) == (below[-1] if below else None)
    again = TimeIndex.decode(base, index.encode())
    assert again.encode() == index.encode()
    again.truncate_to_offset(base + timestamp)
    assert len(again) == sum(offset < timestamp for _, offset in entries)


@pytest.mark.parametrize(
    "data",
    [
        "00",
        "00000009 000010ae 00000009 000020ae",
        "00000009 000010ae 0000000a 000010ae",
        "00000009 00100000",
        "80000000 00000000",
        "00000000 00000000 00000000 00000000",
        "ffffffff 00000000",
        "00000000 ffffffff",
        "00000005 ffffffff 00000006 00000009",
        "00000000 000186a0",
    ],
)
def test_an_offset_index_that_does_not_fit_its_log_is_rejected(data: str) -> None:
    with pytest.raises(DamagedIndexError):
        OffsetIndex.decode(0, bytes.fromhex(data), 100_000)


@pytest.mark.parametrize(
    "data",
    ["", "00000000 00000000", "00000001 00000000", "00000000 00000001", "7fffffff 0001869f", "00000002 00000001"],
)
def test_an_offset_index_may_begin_at_zero_and_reach_the_end_of_the_log(data: str) -> None:
    assert OffsetIndex.decode(0, bytes.fromhex(data), 100_000).encode() == bytes.fromhex(data)


@pytest.mark.parametrize(
    "data",
    [
        b"\0",
        bytes(24),
        bytes.fromhex("0000000000000005000000090000000000000006 00000008"),
        bytes.fromhex("0000000000000005ffffffff0000000000000006 00000008"),
        bytes.fromhex("000000000000000500000001000000000000000500000002"),
    ],
)
def test_a_time_index_out_of_order_is_rejected(data: bytes) -> None:
    with pytest.raises(DamagedIndexError):
        TimeIndex.decode(0, data)


def test_a_time_index_may_begin_at_zero() -> None:
    data = bytes.fromhex("0000000000000000 00000000 0000000000000006 00000000")
    assert TimeIndex.decode(0, data).encode() == data


def test_offsets_far_above_the_base_can_be_looked_up() -> None:
    index = offset_index(0, [(7, 10)])
    assert index.lookup(2**40) == (7, 10)
