# SPDX-License-Identifier: Apache-2.0
"""A log behaves as a plain list of batches does, through appends, rolls, truncations, retention and restarts."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kcoord.storage.file_system import make_durable_dirs
from kcoord.storage.log import Log
from kcoord.storage.memory_file_system import MemoryFileSystem, keep_everything
from kcoord.storage.recovery import Recovery
from kcoord_protocol.record_batch import iter_headers
from tests.storage.support import DIRECTORY, NOW_MS, Later, batch, content, new_config

small = st.integers(0, 5)


class LogAndList(RuleBasedStateMachine):
    """`model` has (first offset, next offset, timestamp, bytes) of every batch. The log has those above `start`."""

    def __init__(self) -> None:
        super().__init__()
        self.fs = MemoryFileSystem()
        self.model: list[tuple[int, int, int, bytes]] = []
        self.start = 0
        self.end = 0
        self.durable_end = 0
        self.recovery_point = 0

    @initialize(
        segment_bytes=st.sampled_from([1, 200, 400, 5000]),
        interval=st.sampled_from([0, 150, 4096]),
        syncs_later=st.booleans(),
    )
    def begin(self, segment_bytes: int, interval: int, syncs_later: bool) -> None:
        self.config = new_config(segment_bytes=segment_bytes, index_interval_bytes=interval)
        self.later = Later() if syncs_later else None
        make_durable_dirs(self.fs, "data")
        self.reopen(Recovery())

    @rule(sizes=st.lists(st.tuples(st.integers(1, 4), small, st.integers(0, 1000), small), min_size=1, max_size=4))
    def append(self, sizes: list[tuple[int, int, int, int]]) -> None:
        data = b""
        for records, gap, timestamp, value_size in sizes:
            first = self.end + (gap if gap > 3 else 0)
            made = batch(first, records, value_size * 20, timestamp)
            self.model.append((first, first + records, timestamp + records - 1, made))
            self.end = first + records
            data += made
        self.log.append(data, now_ms=NOW_MS)
        assert self.log.end_offset == self.end

    @rule()
    def flush(self) -> None:
        self.log.flush()
        self.durable_end = self.end

    @rule()
    def roll(self) -> None:
        if self.log.roll(NOW_MS) and self.later is None:
            self.durable_end = self.end

    @rule()
    def sync_later(self) -> None:
        if self.later is not None:
            self.later.run()

    @rule()
    def note_durable(self) -> None:
        self.recovery_point = self.log.flushed_offset

    @rule()
    def checkpoint(self) -> None:
        self.recovery_point = self.durable_end = self.log.checkpoint()

    @rule(part=st.floats(0, 1))
    def move_start(self, part: float) -> None:
        offset = self.start + int((self.end - self.start) * part)
        self.start = self.log.advance_start_offset(offset)

    @rule(keep=st.integers(0, 6))
    def retain(self, keep: int) -> None:
        before = len(self.log.segments)
        self.log.delete_old_segments(lambda segment: segment.base_offset < self.end - keep, NOW_MS)
        if len(self.log.segments) != before or self.log.start_offset != self.start:
            self.log.flush()
            self.durable_end = self.end
        self.start = self.log.start_offset

    @rule(clean=st.booleans())
    def restart(self, clean: bool) -> None:
        self.log.close()
        self.durable_end = self.end
        self.reopen(Recovery(self.end if clean else self.recovery_point, clean, self.start))

    @rule(everything=st.booleans())
    @precondition(lambda self: self.durable_end >= self.start)
    def crash(self, everything: bool) -> None:
        self.fs.crash(keep_everything if everything else lambda kind, path, pending: pending // 3)
        self.reopen(Recovery(self.recovery_point, False, self.start))
        assert self.log.end_offset >= self.durable_end
        self.model = [entry for entry in self.model if entry[1] <= self.log.end_offset]
        self.end = self.durable_end = self.log.end_offset

    def reopen(self, recovery: Recovery) -> None:
        self.log = Log.open(self.fs, DIRECTORY, self.config, NOW_MS, recovery=recovery)
        self.log.later_syncs = self.later.syncs if self.later is not None else None

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "log"):
            return
        assert (self.log.start_offset, self.log.end_offset) == (self.start, self.end)
        self.durable_end = max(self.durable_end, min(self.log.flushed_offset, self.end))
        alive = [entry for entry in self.model if entry[1] > self.start]
        assert content(self.log) == [data for _, _, _, data in alive]
        for offset in {self.start, (self.start + self.end) // 2, self.end}:
            data = self.log.read(offset, 300)
            expected = next((entry[3] for entry in alive if entry[1] > offset), b"")
            assert data[: len(expected)] == expected
            assert sum(header.size_bytes for _, header in iter_headers(data)) == len(data) <= max(300, len(expected))
        stamps = [timestamp for _, _, timestamp, _ in alive]
        position = self.log.offset_for_timestamp(max(stamps, default=0))
        assert (position is not None) == bool(stamps)


LogAndList.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
test_log_and_list = LogAndList.TestCase


def test_a_kill_after_a_roll_keeps_the_largest_timestamp() -> None:
    """Everything was durable before the roll, so the restart trusts the segment, whose last index entry was lost."""
    state = LogAndList()
    state.begin(segment_bytes=5000, interval=4096, syncs_later=True)
    state.append([(2, 0, 7, 0), (1, 0, 9, 0)])
    state.checkpoint()
    state.roll()
    state.crash(everything=True)
    state.agrees()
