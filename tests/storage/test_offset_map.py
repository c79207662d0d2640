# SPDX-License-Identifier: Apache-2.0
"""The cleaner's map against a dict with a sum of sizes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kcoord.storage.offset_map import ENTRY_BYTES, OffsetMap

KEYS = st.integers(0, 9).map(lambda number: b"%d" % number)
STEPS = st.lists(st.lists(KEYS, min_size=1, max_size=4, unique=True), max_size=12)


@given(STEPS, st.integers(0, 5), st.sampled_from([-1, 0, 1]))
def test_keys_are_accepted_as_long_as_they_fit(steps: list[list[bytes]], most: int, spare: int) -> None:
    """Single keys, and many keys of one length: these are accepted only if all of them would fit as new keys."""
    limit = most * (ENTRY_BYTES + 1) + spare
    offsets = OffsetMap(limit)
    expected: dict[bytes, int] = {}
    next_offset, latest = 7, -1
    for keys in steps:
        at = range(next_offset, next_offset + 2 * len(keys), 2)
        if len(keys) == 1:
            fits = keys[0] in expected or not expected or (len(expected) + 1) * (ENTRY_BYTES + 1) <= limit
            assert offsets.put(keys[0], next_offset) == fits
        else:
            fits = (len(expected) + len(keys)) * (ENTRY_BYTES + 1) <= limit
            assert offsets.put_all(keys, at) == fits
        if fits:
            expected.update(zip(keys, at, strict=True))
            latest = at[-1]
        assert (len(offsets), offsets.latest_offset) == (len(expected), latest)
        assert offsets.size_bytes == len(expected) * (ENTRY_BYTES + 1)
        next_offset += 10
    asked = [b"%d" % number for number in range(11)]
    assert offsets.last_offsets(asked) == [expected.get(key, -1) for key in asked]
    assert [offsets.get(key) for key in asked] == offsets.last_offsets(asked)


def test_long_keys_need_more_space_than_short_keys() -> None:
    offsets = OffsetMap(2 * ENTRY_BYTES + 30)
    assert not offsets.put_all([b"a" * 20, b"b" * 20], [0, 1])
    assert offsets.put_all([b"a" * 15, b"b" * 15], [0, 1])
    assert offsets.size_bytes == 2 * ENTRY_BYTES + 30
    assert not offsets.put(b"", 2)
    assert offsets.put(b"a" * 15, 2), "the map has the key already"
