# SPDX-License-Identifier: Apache-2.0
"""Transaction indexes and producer snapshots: failed writes, and what stays when parts of the log are removed."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence

import pytest

from kcoord.server.disk import cleanable_logs
from kcoord.storage.memory_file_system import MemoryFileSystem, Operation
from kcoord.storage.replacement import ReplacementAbandoned
from kcoord.topics import open_log, partition_log
from kcoord.topics.partition_files import PartitionFiles
from kcoord.topics.producer_files import encode_snapshot
from kcoord.topics.producer_state import AbortedTransaction, ProducerEntry, ProducerState
from tests.unit.topics.helpers import TOPIC, Cluster, batch_of, image_of
from tests.unit.topics.test_log_opening import Restarted
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
        files.store_snapshot(offset, encode_snapshot([]))
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


def lose_index(kind: str, path: str, pending: int) -> int:
    """Decides about a power loss: all bytes of transaction indexes that were not synced are lost, and nothing else."""
    return 0 if kind == "zeros" or path.endswith(".txnindex") else pending


def test_d10_a_snapshot_does_not_outlive_the_index_that_it_relies_on() -> None:
    cluster = Cluster(image_of({TOPIC: 1}, configs={TOPIC: {"internal.segment.bytes": "300"}}))
    write(cluster, P, 0, "a" * 100)
    end(cluster, after(P), committed=False)
    cluster.append(batch_of("b" * 100))
    assert f"{2:020d}.snapshot" in cluster.files()
    for _ in range(2):
        cluster.fs.crash(lose_index)
        cluster.start()
        assert aborted(cluster) == [(9, 0)]


def test_d10_transactions_that_were_cleaned_away_do_not_come_back() -> None:
    files = files_with((0, 50), (0, 60))
    assert isinstance(files.fs, MemoryFileSystem)
    files.fs.sync_dir("")
    files.forget_aborted({60})
    files.fs.crash(lose_index)
    assert files.load_aborted(END) == [transaction(50)]
    files.load_aborted(40)
    files.fs.crash(lose_index)
    assert files.load_aborted(END) == []


def test_d10_a_snapshot_beyond_the_end_of_the_log_does_not_come_back() -> None:
    files = files_with()
    assert isinstance(files.fs, MemoryFileSystem)
    files.store_snapshot(16, encode_snapshot([]))
    files.fs.sync_dir("")
    files.fs.sync_dir("t-0")
    assert files.load_snapshot(0, 15) is None
    files.fs.crash()
    assert files.offsets_with(".snapshot") == []


@pytest.mark.parametrize("damage", [lambda d: d[:-3], lambda d: d + d[:1], lambda d: b"\x00\x07" + d[2:]])
def test_d10_a_damaged_index_is_made_again_from_the_log(damage: Callable[[bytes], bytes]) -> None:
    cluster = Cluster()
    for producer, sequence in ((P, 0), (Q, 0)):
        write(cluster, producer, sequence, "a")
        end(cluster, after(producer), committed=False)
        cluster.restart()
    cluster.stop()
    cluster.fs.damage(f"data/{TOPIC}-0/{0:020d}.txnindex", damage)
    cluster.start()
    for _ in range(3):
        assert aborted(cluster) == [(9, 0), (10, 2)]
        cluster.restart()


# --- snapshots that wait for the disk ---------------------------------------------------------------------------------


def rolled() -> Restarted:
    """Returns a broker whose partition has rolled after an abort, so another thread has to store the snapshot at 2."""
    cluster = Restarted([])
    cluster.restart()
    cluster.update(image_of({TOPIC: 1}, configs={TOPIC: {"internal.segment.bytes": "300"}}))
    write(cluster, P, 0, "a" * 100)
    end(cluster, after(P), committed=False)
    cluster.append(batch_of("b" * 100))
    assert len(cluster.thread.work) == 1
    return cluster


def snapshots(cluster: Cluster) -> list[int]:
    return cluster.store.partition(TOPIC, 0).files.offsets_with(".snapshot")


def test_another_thread_stores_a_snapshot_that_waits_for_the_index() -> None:
    cluster = rolled()
    assert snapshots(cluster) == [1]
    cluster.thread.run()
    assert snapshots(cluster) == [1, 2]
    assert f"{1:020d}.txnindex" in cluster.files()
    cluster.append(batch_of("c" * 100))
    assert snapshots(cluster) == [1, 2, 3]
    cluster.crash()
    assert aborted(cluster) == [(9, 0)]


def test_a_snapshot_that_was_not_begun_is_part_of_the_next_one() -> None:
    cluster = rolled()
    cluster.append(batch_of("c" * 100))
    for _ in range(2):
        assert snapshots(cluster) in ([1], [1, 3])
        cluster.thread.run()
    assert snapshots(cluster) == [1, 3]
    cluster.crash()
    assert aborted(cluster) == [(9, 0)]


def test_a_snapshot_that_fails_in_the_thread_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    cluster = rolled()
    cluster.fs.fault = no_index
    cluster.thread.run()
    assert "Writing the producer state of orders-0 failed: [Errno 28] no space" in caplog.text
    cluster.fs.fault = lambda operation: None
    cluster.append(batch_of("c" * 100))
    cluster.thread.run()
    assert snapshots(cluster) == [1, 3]


def test_another_thread_makes_a_snapshot_of_many_producers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition_log, "STORED_AT_ONCE", 2)
    cluster = Restarted([])
    cluster.restart()
    cluster.update(image_of({TOPIC: 1}, configs={TOPIC: {"internal.segment.bytes": "300"}}))
    encoded: list[int] = []

    def noted(entries: Sequence[ProducerEntry], *arguments: object) -> bytes:
        encoded.append(len(entries))
        return encode_snapshot(entries, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(open_log, "encode_snapshot", noted)
    for producer_id in range(3):
        cluster.append(batch_of("a" * 80, producer=(producer_id, 0, 0)))
    assert (encoded, snapshots(cluster)) == ([1, 2], [1, 2])
    cluster.append(batch_of("a" * 80, producer=(1, 0, 1)))
    # The snapshot at 3 waits for the thread, which does not see this batch.
    assert (encoded, snapshots(cluster), len(cluster.thread.work)) == ([1, 2], [1, 2], 1)
    cluster.thread.run()
    assert (encoded, snapshots(cluster)) == ([1, 2, 3], [1, 2, 3])
    stored = cluster.store.partition(TOPIC, 0).files.load_snapshot(0, 3)
    assert stored is not None
    assert [(entry.producer_id, entry.last_offset) for entry in stored[1]] == [(0, 0), (1, 1), (2, 2)]


@pytest.mark.parametrize("ending", ["restart", "delete", "fail", "forget"])
def test_the_thread_touches_no_file_that_has_another_owner(ending: str) -> None:
    cluster = rolled()
    partition = cluster.store.partition(TOPIC, 0)
    if ending == "restart":
        cluster.restart()
    elif ending == "delete":
        cluster.update(image_of({}))
        cluster.update(image_of({TOPIC: 1}, generation=1))
    elif ending == "fail":
        partition.fail(AssertionError("broken"))
    else:
        partition.forget_aborted(partition.open(cluster.now_ms), {1}).run()
    cluster.store.partition(TOPIC, 0).open(cluster.now_ms)
    before = cluster.files()
    cluster.thread.run()
    assert cluster.files() == before


# --- transactions that the cleaner removes ----------------------------------------------------------------------------


class Cleaning:
    """A partition with an indexed aborted transaction, whose marker at 1 the cleaner's thread removes."""

    def __init__(self) -> None:
        self.cluster = rolled()
        self.cluster.thread.run()
        self.partition = self.cluster.store.partition(TOPIC, 0)
        self.opened = self.partition.open(self.cluster.now_ms)
        self.turns = 0
        self.in_loop = False
        self.waits_in_loop: list[str] = []
        self.after_turn: Callable[[], None] = lambda: None
        self.cluster.fs.fault = self._note

    def _note(self, operation: Operation) -> None:
        if self.in_loop and operation.kind in ("datasync", "sync_dir"):
            self.waits_in_loop.append(operation.path)

    def on_owner(self, step: Callable[[], None]) -> None:
        self.turns += 1
        self.in_loop = True
        step()
        self.after_turn()
        self.in_loop = False

    def forget(self) -> None:
        cleanable_logs._forget_aborted(self.partition, self.opened, self.on_owner, {1})


def test_the_cleaners_thread_waits_for_the_indexes_that_forget_transactions() -> None:
    cleaning = Cleaning()
    cleaning.forget()
    assert (cleaning.turns, cleaning.waits_in_loop) == (1, [])
    assert aborted(cleaning.cluster) == []
    cleaning.cluster.restart()
    assert aborted(cleaning.cluster) == []


def test_the_cleaner_begins_again_if_the_files_were_needed_meanwhile() -> None:
    cleaning = Cleaning()

    def end_first() -> None:
        if cleaning.turns < 3:
            cleaning.partition._end_snapshot(cleaning.opened)

    cleaning.after_turn = end_first
    cleaning.forget()
    assert cleaning.turns == 3
    assert f"{1:020d}.txnindex" in cleaning.cluster.files()
    assert cleaning.partition.files.load_aborted(END) == []


def test_an_index_that_cannot_be_written_ends_the_pass_of_the_cleaner() -> None:
    cleaning = Cleaning()
    cleaning.cluster.fs.fault = no_index
    with pytest.raises(OSError, match="no space"):
        cleaning.forget()


def test_the_files_of_a_log_that_was_closed_are_left_alone() -> None:
    cleaning = Cleaning()
    before = cleaning.cluster.files()
    cleaning.opened.log.abandon()
    with pytest.raises(ReplacementAbandoned):
        cleaning.forget()
    assert cleaning.cluster.files() == before
