# SPDX-License-Identifier: Apache-2.0
"""Compares both forms of the check of produced records with a reader in plain arithmetic."""

from __future__ import annotations

import hashlib
import itertools
import random
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kcoord_protocol
from kcoord_protocol import compiled, record_check
from kcoord_protocol.batch_header import BATCH_OVERHEAD_BYTES, decode_header
from kcoord_protocol.primitives import encode_uvarint
from kcoord_protocol.record_batch import Record, encode_batch
from kcoord_protocol.record_check import DOUBTFUL
from tests.support.batch_corpus import NOW_MS, bodies, sound_batches
from tests.support.plain_records import Refused, plain_records
from tests.support.shared import missing

CheckRecords: TypeAlias = Callable[[bytes, int, int, bool, int, int, int], int]

EARLIEST, LATEST = -(2**63), 2**63 - 1
LARGEST_DELTA = 2**55
"""The check leaves larger deltas of timestamps to the caller."""


@pytest.fixture(scope="module", params=["pure", "compiled"])
def check(request: pytest.FixtureRequest) -> CheckRecords:
    if request.param == "pure":
        return record_check.check_records
    if not compiled.IS_COMPILED:
        missing("the module compiled_record_check does not exist: make env compiles it if there is a C compiler")
    return compiled.check_records


def expected_of(data: bytes, start: int, count: int, needs_key: bool, base: int, earliest: int, latest: int) -> int:
    """Returns what the check has to return, by a reader that reads every number in plain arithmetic."""
    try:
        records = plain_records(data[start:], count, last=None, check_headers=True, check_deltas=False, lenient=True)
    except Refused:
        return DOUBTFUL
    largest = -1
    for index, (_, later, delta, key, _, _) in enumerate(records):
        assert isinstance(later, int)
        if delta != index or (needs_key and key is None) or not earliest <= base + later <= latest:
            return DOUBTFUL
        largest = max(largest, base + later)
    return largest


def has_long_numbers(data: bytes, start: int, count: int, base: int) -> bool:
    """Returns whether the check may leave a batch to its caller although there is no fault in it."""
    if abs(base) > 2**62:
        return True
    records = plain_records(data[start:], count, last=None, check_headers=True, check_deltas=False, lenient=True)
    return any(isinstance(later, int) and abs(later) >= LARGEST_DELTA for _, later, *_ in records)


def compare(check: CheckRecords, data: bytes, start: int, count: int, base: int, *rules: int) -> tuple[int, int]:
    """Returns the result and the expected one. They may differ only if a batch without fault has long numbers."""
    needs_key, earliest, latest = bool(rules[0]), rules[1], rules[2]
    result = check(data, start, count, needs_key, base, earliest, latest)
    expected = expected_of(data, start, count, needs_key, base, earliest, latest)
    assert result in (expected, DOUBTFUL)
    return result, expected


def test_the_compiled_form_is_of_this_source() -> None:
    assert not compiled.IS_OUTDATED, "run protocol/hatch_build.py"
    if not compiled.IS_COMPILED:
        missing("the module compiled_record_check does not exist: make env compiles it if there is a C compiler")
    from kcoord_protocol import compiled_record_check

    assert compiled_record_check.__file__ != record_check.__file__


def test_the_corpus(check: CheckRecords) -> None:
    accepted = 0
    for data, count in bodies():
        result, expected = compare(check, b"before" + data, 6, count, NOW_MS, 0, EARLIEST, LATEST)
        assert result == expected or has_long_numbers(data, 0, count, NOW_MS)
        compare(check, data, 0, count, -1, 1, NOW_MS - 1000, NOW_MS + 1000)
        accepted += result != DOUBTFUL
    assert len(sound_batches()) // 2 < accepted < len(bodies())


records = st.builds(
    Record,
    st.none() | st.binary(max_size=3) | st.integers(60, 70).map(bytes) | st.integers(8_180, 8_200).map(bytes),
    st.none() | st.binary(max_size=3) | st.integers(50, 140).map(bytes) | st.just(bytes(8_200)),
    st.lists(st.tuples(st.sampled_from(("", "a", "n" * 64)), st.none() | st.binary(max_size=70)), max_size=3),
    st.integers(-2, 70).map(lambda ms: NOW_MS + ms)
    | st.sampled_from((-1, 0, NOW_MS + 9_000, NOW_MS - 2_000_000, 2**54, 2**62)),
)


@settings(max_examples=300, deadline=None)
@given(
    batch=st.lists(records, min_size=1, max_size=70),
    needs_key=st.booleans(),
    bounds=st.sampled_from(((EARLIEST, LATEST), (0, LATEST), (NOW_MS - 1, NOW_MS + 60), (NOW_MS - 2**63, 2**64))),
    damage=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255), st.booleans()), max_size=2),
    base=st.sampled_from((None, None, 0, 2**62 + 1, -(2**63), 2**63 - 1)),
)
def test_any_records(
    check: CheckRecords,
    batch: list[Record],
    needs_key: bool,
    bounds: tuple[int, int],
    damage: list[tuple[float, int, bool]],
    base: int | None,
) -> None:
    data = bytearray(encode_batch(batch))
    header = decode_header(data)
    for share, byte, is_added in damage:
        at = BATCH_OVERHEAD_BYTES + int(share * (len(data) - BATCH_OVERHEAD_BYTES))
        data[at : at + (not is_added)] = bytes((byte,))
    start_ms = header.base_timestamp if base is None else base
    body = bytes(data)[BATCH_OVERHEAD_BYTES:]
    result, expected = compare(check, body, 0, len(batch), start_ms, needs_key, *bounds)
    assert result == expected or has_long_numbers(body, 0, len(batch), start_ms)


def numbers(number: int) -> Iterator[bytes]:
    """Yields a zigzag-encoded number in its shortest form, with redundant bytes, and above 32 and 64 bits."""
    least = encode_uvarint(number)
    yield least
    for length in range(len(least) + 1, 12):
        yield least[:-1] + bytes((least[-1] | 0x80,)) + b"\x80" * (length - len(least) - 1) + b"\x00"
    yield encode_uvarint(number + (1 << 32))
    yield encode_uvarint(number + (1 << 64))


def test_every_form_of_every_number_in_a_record(check: CheckRecords) -> None:
    fields = [(0, b""), (6, b""), (0, b""), (2, b"k"), (4, b"vv"), (2, b""), (2, b"n"), (4, b"11")]
    results = set()
    for place in range(1, len(fields)):
        value, piece = fields[place]
        changes = itertools.product((value, value + 1, value + 2, 1, 3), {piece, b""}, (0, 1, 2, -2))
        for changed, kept, longer in changes:
            for number in numbers(changed):
                content = [encode_uvarint(value) + piece for value, piece in fields]
                content[place] = number + kept
                body = b"".join(content)
                data = encode_uvarint(2 * len(body) + longer) + body
                result, expected = compare(check, data, 0, 1, NOW_MS, 0, EARLIEST, LATEST)
                assert result == expected or (place == 1 and len(number) > 8)
                results.add(result)
                # A fault must not be read over into the next record.
                compare(check, data + data, 0, 2, NOW_MS, 0, EARLIEST, LATEST)
    assert {DOUBTFUL, NOW_MS + 3} <= results


def test_sound_batches_of_many_records_are_accepted(check: CheckRecords) -> None:
    rng = random.Random(5)
    made = [Record(None, rng.randbytes(rng.choice((5, 100))), timestamp_ms=NOW_MS + n // 7) for n in range(17_000)]
    data = encode_batch(made)
    assert check(data, BATCH_OVERHEAD_BYTES, len(made), False, NOW_MS, 0, LATEST) == made[-1].timestamp_ms


def test_null_keys_matter_on_compacted_topics_only(check: CheckRecords) -> None:
    data = encode_batch([Record(b"k", b"v", timestamp_ms=5), Record(None, b"v", timestamp_ms=3)])
    assert check(data, BATCH_OVERHEAD_BYTES, 2, False, 5, 0, LATEST) == 5
    assert check(data, BATCH_OVERHEAD_BYTES, 2, True, 5, 0, LATEST) == DOUBTFUL


def test_timestamps_must_be_within_both_bounds(check: CheckRecords) -> None:
    data = encode_batch([Record(b"k", b"v", timestamp_ms=ms) for ms in (5, 8)])
    bounds = ((5, 8), (6, 8), (5, 7), (EARLIEST, LATEST))
    results = [check(data, BATCH_OVERHEAD_BYTES, 2, False, 5, earliest, latest) for earliest, latest in bounds]
    assert results == [8, DOUBTFUL, DOUBTFUL, 8]


def test_a_wrong_count_is_doubtful(check: CheckRecords) -> None:
    data = encode_batch([Record(b"k", b"v", timestamp_ms=5)] * 3)
    results = [check(data, BATCH_OVERHEAD_BYTES, count, False, 5, 0, LATEST) for count in (2, 3, 4, 2**31 - 1)]
    assert results == [DOUBTFUL, 5, DOUBTFUL, DOUBTFUL]


@pytest.mark.parametrize("source", [b"an earlier source", Path(record_check.__file__).read_bytes()])
def test_a_compiled_module_of_another_source_is_not_used(source: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("kcoord_protocol.compiled_record_check")
    module.check_records, module.stamp_sound_batch = object(), object()  # type: ignore[attr-defined]
    module.SOURCE_SHA256 = hashlib.sha256(source).hexdigest()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(kcoord_protocol, "compiled_record_check", module, raising=False)
    selected = runpy.run_path(str(compiled.__file__))
    is_current = source != b"an earlier source"
    assert (selected["IS_COMPILED"], selected["IS_OUTDATED"]) == (is_current, not is_current)
    used = module if is_current else record_check
    assert (selected["check_records"], selected["stamp_sound_batch"]) == (used.check_records, used.stamp_sound_batch)


def test_an_installation_without_sources_uses_its_compiled_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("kcoord_protocol.compiled_record_check")
    module.check_records, module.stamp_sound_batch, module.SOURCE_SHA256 = object(), object(), ""  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(kcoord_protocol, "compiled_record_check", module, raising=False)
    for missing_source in (tmp_path / "record_check.py", Path(f"{record_check.__file__}c")):
        monkeypatch.setattr(record_check, "__file__", str(missing_source))
        assert runpy.run_path(str(compiled.__file__))["IS_COMPILED"]
