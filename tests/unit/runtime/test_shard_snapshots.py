# SPDX-License-Identifier: Apache-2.0
"""The choice of the shard that gets a snapshot, and the steps of a snapshot."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from kcoord.runtime.result import OperationContext
from kcoord.runtime.serde import CoordinatorSerde, size_bound_bytes
from kcoord.runtime.shard_log import Append, OpenedLog, Save
from kcoord.runtime.shard_set import ShardSet
from kcoord.runtime.shard_snapshots import MOST_PER_TICK
from kcoord.runtime.snapshot import RECORDS, Chunk, Snapshot, make_chunks
from kcoord_protocol.record_batch import decode_header, decode_records
from tests.unit.runtime.ledger import Ledger, SavedLedger, entry

MIB = 1_048_576


def plain_log(size_bytes: int) -> OpenedLog:
    return OpenedLog(0, 0, size_bytes)


def log_with_snapshot(snapshot_bytes: int, unread_bytes: int) -> OpenedLog:
    """Returns a log with a snapshot of this size and with as many bytes of records after it."""
    chunks = [Chunk(4, b"a=1"), Chunk(4, b"n" * (snapshot_bytes - 5) + b"=1")]
    snapshot = Snapshot(0, 9, 0, chunks)
    return OpenedLog(0, 9, snapshot_bytes + unread_bytes, snapshot, unread_bytes)


class Shards:
    """A set whose shards were loaded from the given logs."""

    def __init__(self, *logs: OpenedLog) -> None:
        self.now_ms = 1_000
        self.set: ShardSet[Ledger] = ShardSet(lambda _: SavedLedger(), CoordinatorSerde(), configured_shards=len(logs))
        self.set.open_shards(len(logs), range(len(logs)), (), self.now_ms)
        self.saves: list[Save] = []
        while self.set.is_loading:
            ready = self.set.poll(self.now_ms)
            for load in ready.opens:
                self.set.opened(load, logs[load.shard_id])
            for load in ready.reads:
                self.set.read(load, (), self.now_ms, is_end=True)

    def put(self, shard_id: int, name: str = "a", padding: int = 0) -> None:
        context = OperationContext(self.now_ms)
        self.set.run(shard_id, lambda ledger, context, _: ledger.put(context, name, 1, padding), None, context)

    def poll(self) -> list[Append]:
        ready = self.set.poll(self.now_ms)
        self.saves += ready.saves
        return list(ready.appends)

    def write(self, shard_id: int, padding: int = 0, name: str = "a") -> int:
        """Returns the growth of the log."""
        self.put(shard_id, name, padding)
        (append,) = self.poll()
        self.set.written(append)
        self.poll()
        return len(append.data)

    def next_save(self) -> Save | None:
        """Returns the snapshots of the next few milliseconds."""
        for _ in range(50):
            if self.saves:
                return self.saves.pop()
            self.now_ms += 1
            self.poll()
        return None

    def saved_in_turn(self, *, succeeded: bool = True) -> list[int]:
        """Returns the shards that get a snapshot in one tick, in order."""
        self.set.take_snapshots(self.now_ms)
        shard_ids = []
        while (save := self.next_save()) is not None:
            shard_ids.append(save.shard_id)
            assert self.set.saved(save, self.now_ms, succeeded=succeeded)
        return shard_ids

    def last(self) -> list[int]:
        return [save.shard_id for save in self.set.snapshots.last(self.now_ms)]


@pytest.mark.parametrize(
    ("opened", "is_due"),
    [
        (plain_log(MIB - 1), False),
        (plain_log(MIB), True),
        (log_with_snapshot(3_000, MIB - 1), False),
        (log_with_snapshot(3_000, MIB), True),
        (log_with_snapshot(3 * MIB, 3 * MIB - 1), False),
        (log_with_snapshot(3 * MIB, 3 * MIB), True),
    ],
)
def test_a_log_that_outgrew_its_snapshot_gets_a_new_one(opened: OpenedLog, is_due: bool) -> None:
    shards = Shards(opened)
    assert shards.set.snapshots.due() == (0 if is_due else None)
    assert shards.saved_in_turn() == [0] * is_due
    assert shards.set.snapshots.due() is None


def test_a_set_without_shards_needs_none() -> None:
    assert Shards().saved_in_turn() == []


def test_a_tick_takes_a_few_snapshots_of_the_most_grown_logs() -> None:
    sizes = [5, 9, 2, 0, 7, 11, 3, 8, 6, 4, 10]
    shards = Shards(*(plain_log(size * MIB) for size in sizes))
    in_order = sorted((number for number, size in enumerate(sizes) if size), key=lambda number: -sizes[number])
    assert shards.saved_in_turn() == in_order[:MOST_PER_TICK]
    assert shards.saved_in_turn() == in_order[MOST_PER_TICK:]
    assert shards.saved_in_turn() == []


def test_growth_counts_from_the_begin_of_the_last_snapshot() -> None:
    shards = Shards(plain_log(MIB))
    assert shards.saved_in_turn() == [0]
    assert shards.last() == []
    grown = 0
    while grown < MIB:
        assert shards.saved_in_turn() == []
        grown += shards.write(0, 30_000)
    assert shards.saved_in_turn() == [0]


def test_a_snapshot_that_was_not_saved_waits_for_more_growth_and_is_taken_at_a_stop() -> None:
    shards = Shards(plain_log(MIB))
    assert shards.saved_in_turn(succeeded=False) == [0]
    assert shards.saved_in_turn() == []
    assert shards.last() == [0]


def test_a_larger_snapshot_needs_more_growth() -> None:
    shards = Shards(plain_log(MIB))
    for number in range(50):
        shards.write(0, name=str(number) + "n" * 30_000)
    assert shards.saved_in_turn() == [0]
    grown = 0
    while grown < 50 * 30_000:
        assert shards.saved_in_turn() == []
        grown += shards.write(0, 30_000)
    assert shards.saved_in_turn() == [0]


def test_a_snapshot_is_taken_in_slices_and_saved_when_its_content_is_durable() -> None:
    shards = Shards(plain_log(MIB))
    for number in range(60):
        shards.write(0, name=f"n{number:02}")
    shards.set.take_snapshots(shards.now_ms)
    assert not shards.set.take_snapshot(0, shards.now_ms), "one snapshot at a time"
    shards.put(0, "b")
    due: list[int] = []
    while (due_ms := shards.set.snapshots.step_due_ms) is not None and len(due) < 8:
        assert not shards.set.has_timer_before(due_ms)
        assert shards.set.has_ready(due_ms)
        due.append(due_ms - 1_000)
        shards.now_ms = due_ms
        for append in shards.poll():
            appended = append
        if len(due) == 2:
            shards.put(0, "c")
        if len(due) == 6:
            shards.set.written(appended)
    assert due == [0, 1, 2, 3, 13, 23, 33, 43], "three slices of work, then periodic checks of the durable offset"
    shards.set.written(appended)
    shards.now_ms += 10
    shards.poll()
    (save,) = shards.saves
    snapshot = save.snapshot
    assert (snapshot.offset, snapshot.end_offset, snapshot.created_ms) == (60, 62, 1_000)
    assert not shards.set.snapshots.step_due_ms
    assert not shards.set.take_snapshot(0, shards.now_ms), "this snapshot is being saved"
    assert shards.set.saved(save, shards.now_ms, succeeded=True)
    assert not shards.set.snapshots.is_taking
    assert not shards.set.saved(save, shards.now_ms, succeeded=True), "the outcome was reported before"


def test_the_snapshot_of_a_shard_that_is_loaded_again_is_dropped() -> None:
    shards = Shards(plain_log(2 * MIB), plain_log(MIB))
    shards.set.take_snapshots(shards.now_ms)
    shards.set.fail_shard(0, "a test")
    save = shards.next_save()
    assert save is not None
    assert save.shard_id == 1, "the next shard has its turn"
    shards.set.fail_shard(1, "a test")
    assert not shards.set.saved(save, shards.now_ms, succeeded=True)
    assert not shards.set.take_snapshot(1, shards.now_ms), "the shard is not active"


def test_closing_a_set_cancels_its_snapshot() -> None:
    shards = Shards(plain_log(MIB))
    shards.set.take_snapshots(shards.now_ms)
    shards.poll()
    shards.set.close()
    assert shards.next_save() is None
    shards = Shards(plain_log(MIB))
    shards.set.close()
    assert shards.saved_in_turn() == []


def test_a_stop_saves_all_logs_that_have_grown_the_most_grown_first() -> None:
    least = 16_384
    shards = Shards(*map(plain_log, (least, least - 1, 3 * least, 2 * least, 5 * least, MIB)))
    assert shards.last() == [5, 4, 2, 3, 0]
    shards.put(2)
    shards.set.take_snapshots(shards.now_ms)
    assert shards.last() == [5, 4, 3, 0], "no snapshot of 2, which is not durable; the unfinished one is taken again"
    save = shards.next_save()
    assert save is not None
    assert save.shard_id == 5
    assert shards.last() == [4, 3, 0], "its snapshot is being saved"
    shards.write(3, name="z")
    (last,) = [save for save in shards.set.snapshots.last(7) if save.shard_id == 3]
    assert (last.snapshot.offset, last.snapshot.end_offset, last.snapshot.created_ms) == (1, 1, 7)
    assert names_in(last.snapshot.chunks) == ["z"]


def names_in(chunks: Iterable[Chunk]) -> list[str]:
    """Returns the names in the records and packed parts."""
    serde = CoordinatorSerde()
    names = []
    for chunk in chunks:
        if chunk.kind != RECORDS:
            names.append(chunk.data.decode().partition("=")[0])
            continue
        for record in decode_records(chunk.data):
            decoded = serde.deserialize(record.key, record.value)
            assert decoded is not None
            names.append(decoded.key.topic)  # type: ignore[union-attr]
    return names


def test_records_fill_batches_of_some_size_and_every_slice_is_small() -> None:
    parts = [entry(f"n{number:03}", number, padding=1_500) for number in range(130)]
    slices = list(make_chunks(iter(parts), CoordinatorSerde()))
    chunks = [chunk for slice_ in slices for chunk in slice_]
    assert names_in(chunks) == [f"n{number:03}" for number in range(130)]
    assert [decode_header(chunk.data).records_count for chunk in chunks] == [50, 50, 30]
    assert [len(slice_) for slice_ in slices] == [0, 1, 0, 1, 0, 1], "every slice has 25 records"


@pytest.mark.parametrize(("beyond", "counts"), [(0, [50]), (1, [25, 25])])
def test_a_batch_ends_with_the_slice_in_which_it_exceeds_its_size(beyond: int, counts: list[int]) -> None:
    serde = CoordinatorSerde()
    small = [entry("a", 1, padding=2_000)] * 24
    rest = 65_536 + beyond - size_bound_bytes([serde.serialize(part) for part in [*small, entry("a", 1)]])
    parts = [*small, entry("a", 1, padding=rest)] + [entry("b", 1)] * 25
    chunks = [chunk for slice_ in make_chunks(iter(parts), serde) for chunk in slice_]
    assert [decode_header(chunk.data).records_count for chunk in chunks] == counts
