# SPDX-License-Identifier: Apache-2.0
"""Transactions are resolved as the coordinator does it: against the resolver that `kcoord log import` uses."""

from __future__ import annotations

import tempfile
from itertools import pairwise
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from kcoord.logtools.transactions import TransactionResolver
from kcoord.pipeline.log_files import folders_at
from kcoord.pipeline.tail import LogTail
from protocol.control_records import ControlRecordType, end_txn_marker
from protocol.record_batch import Record, encode_batch, encode_control_batch
from tests.unit.logtools.support import commit_record, commit_tombstone
from tests.unit.pipeline.support import NOW_MS, LogWriter, range_rows, table_rows

PRODUCERS = (7, 8, 9)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(0, 3), st.sampled_from((-1, *PRODUCERS)), st.integers(1, 3)),
        st.tuples(st.just("delete"), st.integers(0, 3), st.just(-1), st.just(1)),
        st.tuples(st.sampled_from(["commit", "abort"]), st.just(0), st.sampled_from(PRODUCERS), st.just(1)),
    ),
    min_size=1,
    max_size=30,
)


def batch_of(step: str, partition: int, producer: int, count: int, number: int) -> bytes:
    if step in ("commit", "abort"):
        kind = ControlRecordType.COMMIT if step == "commit" else ControlRecordType.ABORT
        return encode_control_batch(kind, end_txn_marker(0), timestamp_ms=NOW_MS + number, producer_id=producer)
    if step == "delete":
        return encode_batch([commit_tombstone("g", "t", partition)])
    records = [commit_record("g", "t", (partition + each) % 4, 100 * number + each, NOW_MS) for each in range(count)]
    in_transaction = {"producer_id": producer, "producer_epoch": 0, "is_transactional": True} if producer >= 0 else {}
    return encode_batch(records, **in_transaction)  # type: ignore[arg-type]


def applied_in_order(batches: list[bytes]) -> list[Record]:
    """What the coordinator applies, in the order in which it does; the records of one transaction in any order."""
    resolver = TransactionResolver()
    return [record for batch in batches for record in resolver.feed(batch)]


@settings(max_examples=40)
@given(steps=STEPS, split_bytes=st.sampled_from(["4096", "1000000"]))
def test_commits_are_those_that_the_coordinator_applies(
    steps: list[tuple[str, int, int, int]], split_bytes: str
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        writer = LogWriter(Path(folder), segment_bytes=4096)
        batches = []
        for number, step in enumerate(steps):
            batch = batch_of(*step, number)
            offset = writer.append(batch)
            batches.append(offset.to_bytes(8, "big") + batch[8:])
        writer.close()
        rows = table_rows(folder, "commits", splitBytes=split_bytes)
        current = table_rows(folder, "current_offsets")
        expected = applied_in_order(batches)
        assert [row["log_offset"] for row in rows] == sorted(record.offset for record in expected)
        in_order = sorted(rows, key=lambda row: (row["effective_offset"], row["log_offset"]))
        newest = {row["partition"]: row for row in in_order}
        state = {record.key: record for record in expected}
        kept = {record.offset for record in state.values() if record.value is not None}
        assert {row["log_offset"] for row in newest.values() if not row["is_tombstone"]} == kept
        assert {row["log_offset"] for row in current} == kept


@settings(max_examples=40)
@given(steps=STEPS, ends=st.lists(st.integers(0, 30), max_size=4))
def test_stable_ranges_of_a_stream_give_the_same_commits(
    steps: list[tuple[str, int, int, int]], ends: list[int]
) -> None:
    """Read to the stable offset after every few steps: nothing twice, nothing that a later range would correct."""
    with tempfile.TemporaryDirectory() as folder:
        writer = LogWriter(Path(folder), segment_bytes=4096)
        tail = LogTail(folders_at([folder], "__consumer_offsets")[0], 0, is_read_committed=True, abandoned_ms=10**9)
        stable = [0]
        for number, step in enumerate(steps):
            writer.append(batch_of(*step, number))
            if number in ends or number == len(steps) - 1:
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
