# SPDX-License-Identifier: Apache-2.0
"""Ranges of a log in a cluster whose older part was cleaned: their sizes are estimates from a few small fetches."""

from __future__ import annotations

import pytest

from kcoord.pipeline.wire import planning
from kcoord.pipeline.wire.log import Probe
from kcoord.pipeline.wire.place import BrokerPartition
from kcoord.pipeline.wire.planning import broker_ranges, bytes_between, range_within

CLEANED = 1_000_000_000
"""Offsets of the cleaned part, in which each millionth has a record."""
GAP = 1_000_000
END = CLEANED + 20_000_000
RECORD_BYTES = 100
MB = 1 << 20


def size_of(start: int, end: int) -> int:
    """Returns the true size of a range."""
    cleaned = max(min(end, CLEANED) - start, 0) // GAP
    return (cleaned + max(end - max(start, CLEANED), 0)) * RECORD_BYTES


class Log:
    """The log: each batch has one record."""

    fetches = 0

    def __init__(self, place: BrokerPartition) -> None:
        self._end = place.end_offset

    def probe(self, offset: int) -> Probe | None:
        Log.fetches += 1
        base = offset if offset >= CLEANED else -(-offset // GAP) * GAP
        end = min(base + 160 if base >= CLEANED else base + 160 * GAP, self._end)
        return None if base >= self._end else Probe(base, max(size_of(base, end), RECORD_BYTES) / (end - offset))


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> BrokerPartition:
    monkeypatch.setattr(planning, "BrokerLog", Log)
    Log.fetches = 0
    return BrokerPartition(3, "t", bytes(16), (), 0, END, size_of(0, END))


def test_a_batch_of_the_dense_end_is_as_large_as_the_budget(place: BrokerPartition) -> None:
    end, size = range_within(place, CLEANED, END, 512 * MB)
    assert size == size_of(CLEANED, end) == pytest.approx(512 * MB, rel=0.01)
    end, size = range_within(place, END - 1000, END, 512 * MB)
    assert (end, size) == (END, 100_000)


def test_the_batches_of_a_first_copy_are_few_and_within_the_budget(place: BrokerPartition) -> None:
    begun, sizes = 0, []
    while begun < END:
        following, _ = range_within(place, begun, END, 256 * MB)
        sizes.append(size_of(begun, following))
        begun = following
    assert max(sizes) <= 256 * MB * 1.01
    assert len(sizes) < 40


def test_no_range_is_much_larger_than_a_task(place: BrokerPartition) -> None:
    ranges = [log_range for log_range, _ in broker_ranges(place, 64 * MB, 0, END, END)]
    assert [log_range.start for log_range in ranges] == [0, *(log_range.end for log_range in ranges[:-1])]
    assert ranges[-1].end == END
    assert max(size_of(log_range.start, log_range.end) for log_range in ranges) <= 2.1 * 64 * MB
    assert Log.fetches < 4 * len(ranges) and len(ranges) < 150


def test_what_is_left_to_read_is_in_the_dense_end(place: BrokerPartition) -> None:
    for start in (0, CLEANED // 2, CLEANED, END - 1000):
        assert bytes_between(place, start, END) == pytest.approx(size_of(start, END), rel=0.01)
