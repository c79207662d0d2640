# SPDX-License-Identifier: Apache-2.0
"""Compares the transactions of the tables with those of a coordinator that loads the same log."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from kcoord.pipeline.log_files import folders_at
from kcoord.pipeline.tail import LogTail
from kcoord_protocol.record_batch import decode_header
from tests.support.coordinator_log import OffsetOf, Step, batches_of, logs, offsets_of, replayed, stable_offset
from tests.support.offsets_sample import Row
from tests.unit.pipeline.support import NOW_MS, LogWriter, range_rows, table_rows


def write(folder: str, batches: Iterable[bytes]) -> None:
    writer = LogWriter(Path(folder), segment_bytes=4096)
    for batch in batches:
        writer.append(batch)
    writer.close()


def state_of(rows: Iterable[Row]) -> dict[OffsetOf, object]:
    """Returns the state that a reader of `commits` has at the end: the newest row of each key, as documented."""
    in_order = sorted(rows, key=lambda row: (row["effective_offset"], row["log_offset"]))
    newest = {_key(row): row for row in in_order}
    return {key: row["committed_offset"] for key, row in newest.items() if not row["is_tombstone"]}


def _key(row: Row) -> OffsetOf:
    return str(row["group"]), str(row["topic"]), int(str(row["partition"]))


def _counts_from(row: Row) -> datetime:
    moment = row["marker_timestamp"] or row["timestamp"]
    assert isinstance(moment, datetime)
    return moment


@settings(max_examples=40)
@given(steps=logs(oddities=True), split_bytes=st.sampled_from(["4096", "1000000"]))
def test_commits_and_current_offsets_are_those_of_the_coordinator(steps: list[Step], split_bytes: str) -> None:
    batches = batches_of(steps)
    offsets = offsets_of(replayed(batches))
    with tempfile.TemporaryDirectory() as folder:
        write(folder, batches)
        assert state_of(table_rows(folder, "commits", splitBytes=split_bytes)) == offsets
        current = table_rows(folder, "current_offsets", splitBytes=split_bytes)
        assert {_key(row): row["committed_offset"] for row in current} == offsets


@settings(max_examples=60)
@given(steps=logs(oddities=True))
def test_commits_up_to_any_offset_or_time_are_what_the_coordinator_had_then(steps: list[Step]) -> None:
    """These logs have one batch per millisecond, so each prefix of a log has a time of its own."""
    batches = batches_of(steps)
    with tempfile.TemporaryDirectory() as folder:
        write(folder, batches)
        rows = table_rows(folder, "commits")
    for count in range(1, len(batches) + 1):
        end = decode_header(batches[count - 1]).next_offset
        offsets = offsets_of(replayed(batches[:count]))
        assert state_of(row for row in rows if int(str(row["effective_offset"])) < end) == offsets
        moment = datetime.fromtimestamp(NOW_MS / 1000, UTC) + timedelta(milliseconds=count - 1)
        assert state_of(row for row in rows if _counts_from(row) <= moment) == offsets


@settings(max_examples=20)
@given(steps=logs(oddities=False))
def test_a_cleaned_log_gives_the_same_current_offsets(steps: list[Step]) -> None:
    """Cleaning removes superseded records and tombstones."""
    batches = batches_of(steps)
    offsets = offsets_of(replayed(batches))
    with tempfile.TemporaryDirectory() as folder:
        writer = LogWriter(Path(folder), segment_bytes=300)
        for batch in batches:
            writer.append(batch)
        writer.clean(stable_offset(batches))
        writer.close()
        current = table_rows(folder, "current_offsets")
        assert {_key(row): row["committed_offset"] for row in current} == offsets


@settings(max_examples=40)
@given(steps=logs(oddities=True), ends=st.lists(st.integers(0, 40), max_size=4))
def test_stable_ranges_of_a_stream_give_the_same_records_as_one_read(steps: list[Step], ends: list[int]) -> None:
    """The stream reads to the stable offset after some of the steps. No row comes twice or needs a correction."""
    batches = batches_of(steps)
    with tempfile.TemporaryDirectory() as folder:
        writer = LogWriter(Path(folder), segment_bytes=4096)
        tail = LogTail(folders_at([folder], "__consumer_offsets")[0], 0, is_read_committed=True, abandoned_ms=10**9)
        stable = [0]
        for number, batch in enumerate(batches):
            writer.append(batch)
            if number in ends or number == len(batches) - 1:
                tail.advance(1 << 20)
                stable.append(tail.stable_offset)
        writer.close()
        assert stable == sorted(stable)
        whole = [row for row in table_rows(folder) if row["log_offset"] < stable[-1]]  # type: ignore[operator]
        pieces = []
        for start, end in pairwise(stable):
            pieces += range_rows(folder, start, end)
        assert pieces == whole
        assert all(row["transaction"] != "open" for row in whole)


def test_a_tombstone_between_a_commit_and_its_marker_wins() -> None:
    steps = [
        Step("commit offsets", producer_id=7),
        Step("delete offsets"),
        Step("commit", producer_id=7),
    ]
    with tempfile.TemporaryDirectory() as folder:
        write(folder, batches_of(steps))
        outcomes = [(row["transaction"], row["effective_offset"]) for row in table_rows(folder)]
        assert outcomes == [("superseded", None), (None, 1), ("committed", 2)]
        assert table_rows(folder, "current_offsets") == []
