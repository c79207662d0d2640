# SPDX-License-Identifier: Apache-2.0
"""Transaction indexes and producer snapshots: failed writes, and what stays when parts of the log are removed."""

from __future__ import annotations

import errno

import pytest

from kcoord.storage.memory_file_system import MemoryFileSystem, Operation
from kcoord.topics.partition_files import PartitionFiles
from kcoord.topics.producer_state import AbortedTransaction, ProducerState
from tests.unit.topics.helpers import Cluster
from tests.unit.topics.test_transactions import P, Q, aborted, after, end, write

END = 1000


def transaction(last_offset: int) -> AbortedTransaction:
    return AbortedTransaction(1, last_offset - 5, last_offset, last_offset + 1)


def files_with(*entries: tuple[int, int]) -> PartitionFiles:
    """Returns the files of a partition. `entries` are pairs of the segment's base offset and the marker's offset."""
    file_system = MemoryFileSystem()
    file_system.make_dirs("t-0")
    files = PartitionFiles(file_system, "t-0")
    for base_offset, last_offset in entries:
        files.store_aborted(base_offset, [transaction(last_offset)])
    return files


def test_a_start_within_a_segment_keeps_the_index_of_the_segment() -> None:
    files = files_with((0, 50), (100, 110), (100, 180), (200, 250))
    files.remove_below(150)
    assert [transaction.last_offset for transaction in files.load_aborted(END)] == [110, 180, 250]
    files.remove_below(200)
    assert [transaction.last_offset for transaction in files.load_aborted(END)] == [250]
    files.remove_below(900)
    assert [transaction.last_offset for transaction in files.load_aborted(END)] == [250]


def test_transactions_whose_markers_the_cleaner_removes_are_dropped() -> None:
    files = files_with((0, 50), (0, 60), (100, 180))
    producers = ProducerState()
    producers.aborted = files.load_aborted(END)
    for forget in (files.forget_aborted, producers.forget_aborted):
        forget({60, 180, 7})
    assert producers.aborted == files.load_aborted(END) == [transaction(50)]


def test_snapshots_outside_of_the_log_are_removed() -> None:
    files = files_with()
    for offset in (4, 5, 6, 14, 15, 16):
        files.store_snapshot(offset, [])
    assert files.load_snapshot(5, 15) == (15, [])
    assert files.load_snapshot(5, 14) == (14, [])
    assert files.load_snapshot(6, 13) is None
    assert files.offsets_with(".snapshot") == []


def test_transactions_are_indexed_once_and_in_order() -> None:
    files = files_with((100, 110))
    for _ in range(2):
        files.store_aborted(100, [transaction(120), transaction(130)])
        files.store_aborted(0, [transaction(50), transaction(140)])
    assert [transaction.last_offset for transaction in files.load_aborted(END)] == [50, 110, 120, 130, 140]


def no_index(operation: Operation) -> OSError | None:
    return OSError(errno.ENOSPC, "no space") if ".txnindex" in operation.path else None


@pytest.mark.parametrize("ending", ["crash", "restart"])
def test_a_marker_needs_no_space_for_the_index(ending: str) -> None:
    cluster = Cluster()
    write(cluster, P, 0, "a")
    cluster.fs.fault = no_index
    end(cluster, after(P), committed=False)
    cluster.fs.fault = lambda operation: None
    write(cluster, Q, 0, "b")
    end(cluster, after(Q), committed=False)
    for _ in range(2):
        assert aborted(cluster) == [(9, 0), (10, 2)]
        getattr(cluster, ending)()


def test_no_snapshot_is_stored_while_the_index_cannot_be_written() -> None:
    cluster = Cluster()
    write(cluster, P, 0, "a")
    end(cluster, after(P), committed=False)
    cluster.fs.fault = no_index
    cluster.stop()
    assert not [name for name in cluster.files() if name.endswith(".snapshot")]
    cluster.fs.fault = lambda operation: None
    cluster.start()
    assert aborted(cluster) == [(9, 0)]
    cluster.restart()
    assert {f"{0:020d}.txnindex", f"{2:020d}.snapshot"} < set(cluster.files())
    assert aborted(cluster) == [(9, 0)]
