# SPDX-License-Identifier: Apache-2.0
"""Ownership and loading of a shard set, without an event loop, a clock and IO."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import TypeVar

import pytest

from kcoord.runtime.result import CoordinatorResult, OperationContext
from kcoord.runtime.serde import CoordinatorSerde
from kcoord.runtime.shard_loads import LOAD_SLICE_BYTES
from kcoord.runtime.shard_log import Append, Load, OpenedLog
from kcoord.runtime.shard_set import ShardSet
from kcoord.runtime.snapshot import Chunk, Snapshot
from kcoord.runtime.waiting import Ready, ShardState
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.record_batch import BatchHeader, decode_header, encode_batch_from_parts
from tests.unit.runtime.ledger import Ledger, SavedLedger, entry

TOPIC = b"t" * 16

T = TypeVar("T")


class Owner:
    """A set of three shards whose outcomes the test makes."""

    def __init__(self, loads_at_a_time: int = 1) -> None:
        self.now_ms = 1_000
        self.shards: ShardSet[Ledger] = ShardSet(
            lambda _: SavedLedger(), CoordinatorSerde(), configured_shards=3, loads_at_a_time=loads_at_a_time
        )

    def poll(self) -> Ready:
        return self.shards.poll(self.now_ms)

    def follow(self, *led: int) -> list[int]:
        return self.shards.follow(TOPIC, 3, led, (), self.now_ms)

    def load(self) -> list[int]:
        """Finishes every load that is due. Returns the shards in the order in which they were opened."""
        opened = []
        while True:
            ready = self.poll()
            for load in ready.opens:
                opened.append(load.shard_id)
                self.shards.opened(load, OpenedLog(0, 0))
            for load in ready.reads:
                self.shards.read(load, (), self.now_ms, is_end=True)
            if not ready.opens and not ready.reads:
                return opened

    def run(self, shard_id: int, operation: Callable[..., CoordinatorResult[T]], *arguments: object) -> object:
        """Runs a method of Ledger."""
        return self.shards.run(
            shard_id,
            lambda ledger, context, _: operation(ledger, context, *arguments),
            None,
            OperationContext(self.now_ms),
        )

    def put(self, shard_id: int) -> Append:
        self.run(shard_id, Ledger.put, "a", 1)
        (append,) = self.poll().appends
        return append

    def error(self, shard_id: int) -> Errors:
        with pytest.raises(KafkaError) as caught:
            self.run(shard_id, Ledger.get, "a")
        return caught.value.error


@pytest.fixture
def owner() -> Owner:
    owner = Owner()
    assert owner.follow(0, 1, 2) == [0, 1, 2]
    assert owner.load() == [0, 1, 2], "one load at a time"
    return owner


def first_open(owner: Owner) -> Load:
    (load,) = owner.poll().opens
    return load


def test_shards_are_loading_until_their_logs_are_read() -> None:
    owner = Owner()
    owner.follow(0, 1)
    assert owner.error(1) is Errors.COORDINATOR_LOAD_IN_PROGRESS
    assert owner.error(2) is Errors.NOT_COORDINATOR
    assert first_open(owner).shard_id == 0
    assert not owner.poll().opens, "the next shard waits"


def test_shards_whose_logs_are_empty_are_active_at_once() -> None:
    owner = Owner()
    assert owner.shards.follow(TOPIC, 3, (0, 1, 2), {0, 2}, owner.now_ms) == [1]
    assert [owner.shards.state(shard_id) for shard_id in (0, 2)] == [ShardState.ACTIVE] * 2


def test_the_time_until_the_next_attempt_doubles_up_to_a_minute() -> None:
    owner = Owner()
    owner.follow(0)
    waited = []
    for _ in range(8):
        load = first_open(owner)
        owner.shards.failed(load, OSError("damaged"), owner.now_ms)
        assert owner.poll().closes == [0]
        deadline_ms = owner.shards.next_deadline_ms()
        assert deadline_ms is not None
        waited.append((deadline_ms - owner.now_ms) // 1_000)
        assert not owner.shards.has_ready(deadline_ms - 1)
        owner.now_ms = deadline_ms
    assert waited == [1, 2, 4, 8, 16, 32, 60, 60]
    assert owner.load() == [0]
    append = owner.put(0)
    owner.shards.unknown(append, OSError(errno.EIO, "broken"), owner.now_ms)
    owner.poll()
    assert owner.shards.next_deadline_ms() == owner.now_ms + 1_000, "a success ends the series"


def test_a_log_that_another_owner_has_open_is_requested_again_soon() -> None:
    owner = Owner()
    owner.follow(0)
    owner.shards.held(first_open(owner), owner.now_ms)
    assert owner.error(0) is Errors.COORDINATOR_LOAD_IN_PROGRESS
    assert owner.shards.next_deadline_ms() == owner.now_ms + 50
    owner.now_ms += 50
    assert owner.load() == [0]


def test_a_shard_on_a_full_disk_is_loaded_at_once_but_not_too_often(owner: Owner) -> None:
    owner.shards.unknown(owner.put(0), OSError(errno.ENOSPC, "full"), owner.now_ms)
    owner.poll()
    assert owner.error(0) is Errors.NOT_COORDINATOR
    assert owner.shards.next_deadline_ms() == owner.now_ms
    assert owner.load() == [0]
    with pytest.raises(KafkaError):
        owner.put(0)
    owner.poll()
    assert owner.shards.state(0) is ShardState.FAILED
    owner.now_ms += 249
    assert owner.load() == []
    owner.now_ms += 1
    assert owner.load() == [0]


def test_a_shard_is_released_when_nothing_of_it_is_in_flight(owner: Owner) -> None:
    append = owner.put(1)
    owner.follow(0, 2)
    assert owner.error(1) is Errors.NOT_COORDINATOR
    assert not owner.poll().releases
    assert owner.follow(0, 1, 2) == [], "the log is still open here"
    owner.shards.written(append)
    (release,) = owner.poll().releases
    assert (list(release.shard_ids), release.deleted_topic_id) == ([1], None)
    assert not owner.poll().releases
    owner.shards.released(release)
    assert owner.poll().has_released
    assert owner.follow(0, 1, 2) == [1]
    assert owner.load() == [1]


def test_a_shard_that_is_lost_while_its_log_is_opened_is_released_after_that() -> None:
    owner = Owner()
    owner.follow(0)
    load = first_open(owner)
    owner.follow()
    assert not owner.poll().releases
    owner.shards.opened(load, OpenedLog(0, 0))
    ready = owner.poll()
    assert len(ready.releases) == 1
    assert not ready.reads
    assert owner.shards.state(0) is ShardState.CLOSED


def test_a_deleted_topic_is_released_and_can_be_created_again(owner: Owner) -> None:
    assert owner.shards.follow(None, 0, (), (), owner.now_ms) == []
    assert owner.shards.follow(b"n" * 16, 2, (0, 1), (), owner.now_ms) == [], "the old logs still exist"
    (release,) = owner.poll().releases
    assert (list(release.shard_ids), release.deleted_topic_id) == ([0, 1, 2], TOPIC)
    owner.shards.released(release)
    assert owner.shards.follow(b"n" * 16, 2, (0, 1), (), owner.now_ms) == [0, 1]
    assert owner.load() == [0, 1]


@pytest.mark.parametrize("is_reported", [True, False])
def test_a_shard_that_failed_and_was_released_is_not_loaded_again(owner: Owner, is_reported: bool) -> None:
    owner.shards.fail_shard(1, "a test")
    if is_reported:
        assert owner.poll().closes == [1]
    owner.follow(0, 2)
    owner.poll()
    owner.now_ms += 60_000
    assert owner.load() == []
    assert owner.shards.state(1) is ShardState.CLOSED


def test_a_closed_set_loads_nothing(owner: Owner) -> None:
    owner.shards.fail_shard(1, "a test")
    owner.shards.close()
    owner.poll()
    owner.now_ms += 60_000
    assert owner.load() == []


def test_the_tasks_timers_and_appends_that_keep_a_set_busy(owner: Owner) -> None:
    """Metrics and an orderly stop use these numbers. The ledger's own timers are due after 100 ms."""

    def busy() -> tuple[list[int], int, bool]:
        assert owner.shards.is_idle() or owner.shards.is_writing(0) or owner.shards.has_ready(owner.now_ms)
        return owner.shards.active_shards(), owner.shards.queue_size(owner.now_ms), owner.shards.is_idle()

    assert busy() == ([0, 1, 2], 0, True)
    owner.run(0, Ledger.put_and_start, "a", False)
    assert busy() == ([0, 1, 2], 1, False), "the next poll returns a task and an append"
    ready = owner.poll()
    assert busy() == ([0, 1, 2], 1, False), "the task runs and the append is in flight"
    owner.shards.written(ready.appends[0])
    assert busy() == ([0, 1, 2], 1, False), "the next poll returns the reply"
    assert len(owner.shards.take_replies()) == 1
    assert owner.shards.take_replies() == []
    assert busy() == ([0, 1, 2], 1, True)
    owner.now_ms += 99
    assert busy() == ([0, 1, 2], 1, True)
    owner.now_ms += 1
    assert busy() == ([0, 1, 2], 1 + 3, True), "the timers of three shards are due"
    owner.shards.fail_shard(2, "a test")
    assert busy() == ([0, 1], 1 + 2, False), "no poll has returned the failure of the shard yet"
    owner.poll()
    owner.shards.complete_task(0, ready.tasks[0][1], "done", OperationContext(owner.now_ms))
    assert busy() == ([0, 1], 0, True)


def test_a_deleted_topic_is_released_once_and_after_all_earlier_releases(owner: Owner) -> None:
    appends = [owner.put(1), owner.put(2)]
    owner.follow(0)
    for _ in range(2):
        assert owner.shards.follow(None, 0, (), (), owner.now_ms) == []
    owner.shards.written(appends[1])
    assert owner.poll().releases == [], "an append of one of the two shards is in flight"
    owner.shards.written(appends[0])
    (moved,) = owner.poll().releases
    assert (list(moved.shard_ids), moved.deleted_topic_id) == ([1, 2], None)
    assert owner.poll().releases == []
    owner.shards.released(moved)
    assert owner.shards.has_ready(owner.now_ms)
    (deleted,) = owner.poll().releases
    assert (list(deleted.shard_ids), deleted.deleted_topic_id) == ([0], TOPIC)
    assert not owner.shards.has_ready(owner.now_ms)
    owner.shards.released(deleted)
    assert owner.shards.has_ready(owner.now_ms)
    assert owner.poll().has_released
    assert not owner.poll().releases
    assert owner.shards.topic_id is None


def test_only_shards_without_an_owner_are_claimed(owner: Owner) -> None:
    owner.shards.claim([0])
    assert owner.load() == [], "the shard is active"
    owner.shards.fail_shard(1, "a test")
    owner.shards.claim([1])
    assert owner.error(1) is Errors.NOT_COORDINATOR, "the shard is failed until its log is open again"
    load = first_open(owner)
    owner.shards.claim([1])
    assert owner.poll().opens == []
    assert owner.shards.next_deadline_ms() == owner.now_ms + 100, "there is no second load, only the ledgers' timers"
    owner.shards.opened(load, OpenedLog(0, 0))
    assert owner.error(1) is Errors.COORDINATOR_LOAD_IN_PROGRESS
    owner.shards.fenced(owner.put(0))
    assert owner.poll().closes == [0]
    owner.shards.claim([0])
    assert owner.error(0) is Errors.COORDINATOR_LOAD_IN_PROGRESS


def test_a_failed_shard_that_is_claimed_before_the_next_poll_is_loaded_once(owner: Owner) -> None:
    owner.shards.fail_shard(0, "a test")
    owner.shards.claim([0])
    assert owner.load() == [0]
    owner.now_ms += 60_000
    assert owner.load() == []
    assert owner.shards.state(0) is ShardState.ACTIVE


def test_closing_a_set_drops_its_loads(owner: Owner) -> None:
    for shard_id in range(3):
        owner.shards.fail_shard(shard_id, "a test")
    owner.poll()
    owner.shards.claim([0, 1])
    load = first_open(owner)
    has_loads = [owner.shards.is_loading]
    owner.shards.close()
    has_loads.append(owner.shards.is_loading)
    assert has_loads == [True, False]
    owner.shards.opened(load, OpenedLog(0, 0))
    assert owner.load() == []


def log_of(*names: str, base_offset: int = 0) -> list[tuple[BatchHeader, bytes]]:
    """Returns a log of one batch that sets every name to 1."""
    records = [CoordinatorSerde().serialize(entry(name, 1)) for name in names]
    data = encode_batch_from_parts(records, base_offset=base_offset, timestamp_ms=0)
    return [(decode_header(data), data)]


def snapshot_of(*chunks: bytes) -> OpenedLog:
    return OpenedLog(0, 8, snapshot=Snapshot(7, 7, 0, [Chunk(4, chunk) for chunk in chunks]))


def test_the_error_of_requests_during_a_load_that_fails() -> None:
    """Until the log is open, the shard is loading; after that it has failed. Its log is closed in both cases."""
    owner = Owner()
    owner.follow(0)
    tries_ms: list[int] = []

    def next_try(hears: Errors) -> Load:
        ready = owner.poll()
        assert (ready.closes, ready.opens, owner.error(0)) == ([0], [], hears)
        deadline_ms = owner.shards.next_deadline_ms()
        assert deadline_ms is not None
        tries_ms.append(deadline_ms - owner.now_ms)
        owner.now_ms = deadline_ms
        return first_open(owner)

    load = first_open(owner)
    owner.shards.failed(load, OSError("cannot be opened"), owner.now_ms)
    load = next_try(Errors.COORDINATOR_LOAD_IN_PROGRESS)
    owner.shards.opened(load, OpenedLog(0, 0))
    assert owner.poll().reads == [load]
    owner.shards.failed(load, OSError("cannot be read"), owner.now_ms)
    load = next_try(Errors.NOT_COORDINATOR)
    owner.shards.opened(load, OpenedLog(0, 0))
    (header, data) = log_of("a")[0]
    owner.shards.read(load, [(header, data[:-1])], owner.now_ms, is_end=True)
    load = next_try(Errors.NOT_COORDINATOR)
    owner.shards.failed(load, OSError("cannot be opened"), owner.now_ms)
    load = next_try(Errors.NOT_COORDINATOR)
    owner.shards.opened(load, OpenedLog(0, 0))
    assert owner.error(0) is Errors.COORDINATOR_LOAD_IN_PROGRESS
    assert owner.load() == []
    assert tries_ms == [1_000, 2_000, 4_000, 8_000]
    assert owner.shards.state(0) is ShardState.ACTIVE


def test_a_snapshot_is_restored_in_slices_while_other_shards_are_loaded() -> None:
    owner = Owner(loads_at_a_time=2)
    owner.follow(0, 1, 2)
    long, short = owner.poll().opens
    half = LOAD_SLICE_BYTES // 2
    owner.shards.opened(long, snapshot_of(*(name + b"x" * (half - 3) + b"=1" for name in (b"a", b"b", b"c", b"d"))))
    assert owner.shards.has_ready(owner.now_ms)
    assert owner.poll().reads == []
    owner.shards.opened(short, OpenedLog(0, 1))
    assert owner.poll().reads == [short], "the second slice is restored in the same poll"
    assert owner.shards.has_ready(owner.now_ms), "the log owes an outcome only for the other shard"
    assert owner.error(0) is Errors.COORDINATOR_LOAD_IN_PROGRESS
    assert owner.poll().reads == [long]
    assert long.offset == 7
    assert not owner.shards.has_ready(owner.now_ms), "the log owes an outcome"
    assert owner.poll().reads == []
    owner.shards.read(long, log_of("z", base_offset=7), owner.now_ms, is_end=False)
    assert owner.shards.has_ready(owner.now_ms)
    assert owner.poll().reads == [long]
    owner.shards.read(short, (), owner.now_ms, is_end=True)
    ready = owner.poll()
    assert ready.active == [short]
    assert [load.shard_id for load in ready.opens] == [2], "another load may begin"
    owner.shards.read(long, (), owner.now_ms, is_end=True)
    assert owner.poll().active == [long]
    assert not owner.shards.has_ready(owner.now_ms), "one load is in flight, and no shard waits"
    machine = owner.shards.machine(0)
    assert machine is not None
    assert [name[0] for name in machine.balance] == ["a", "b", "c", "d", "z"]


def test_a_snapshot_that_cannot_be_restored_costs_one_attempt() -> None:
    owner = Owner()
    owner.follow(0)
    load = first_open(owner)
    assert load.with_snapshot
    owner.shards.opened(load, snapshot_of(b"nonsense"))
    assert owner.shards.has_ready(owner.now_ms)
    ready = owner.poll()
    assert (ready.reads, ready.closes) == ([], [])
    (again,) = ready.opens
    assert not again.with_snapshot
    owner.shards.opened(again, OpenedLog(0, 1))
    owner.poll()
    owner.shards.read(again, log_of("a"), owner.now_ms, is_end=True)
    assert owner.run(0, Ledger.get, "a") == 1


def test_a_snapshot_that_hid_damage_is_used_again_only_after_a_new_one() -> None:
    owner = Owner()
    owner.follow(0)
    assert owner.load() == [0]

    def fail_and_open() -> bool:
        owner.shards.fail_shard(0, "a test")
        assert owner.poll().closes == [0]
        owner.now_ms += 60_000
        load = first_open(owner)
        owner.shards.opened(load, OpenedLog(0, 0))
        owner.poll()
        owner.shards.read(load, (), owner.now_ms, is_end=True)
        return load.with_snapshot

    def save(*, succeeded: bool) -> None:
        assert owner.shards.take_snapshot(0, owner.now_ms)
        assert not owner.poll().saves, "the load continues after the first slice"
        owner.now_ms += 1
        (save,) = owner.poll().saves
        assert owner.shards.saved(save, owner.now_ms, succeeded=succeeded)

    assert fail_and_open()
    owner.shards.damaged(0, "a test")
    assert owner.shards.state(0) is ShardState.FAILED
    owner.poll()
    owner.now_ms += 60_000
    owner.load()
    assert not fail_and_open()
    save(succeeded=False)
    assert not fail_and_open()
    owner.shards.fail_shard(0, "a test")
    owner.shards.claim([0])
    (load,) = owner.poll().opens
    assert not load.with_snapshot
    owner.shards.opened(load, OpenedLog(0, 0))
    owner.poll()
    owner.shards.read(load, (), owner.now_ms, is_end=True)
    save(succeeded=True)
    assert fail_and_open()


def test_every_machine_gets_an_update_when_it_is_loaded_and_with_every_new_update() -> None:
    owner = Owner()

    def update(ledger: Ledger, context: OperationContext, value: object) -> CoordinatorResult[None]:
        return CoordinatorResult(None, [entry("update", context.now_ms)])

    owner.shards.catch_up = update
    owner.follow(0, 1, 2)
    owner.load()

    def updates() -> list[int]:
        return [owner.shards.machine(shard_id).balance["update"] for shard_id in owner.shards.active_shards()]  # type: ignore[union-attr]

    assert updates() == [1_000] * 3
    owner.shards.close_shard(1)
    owner.now_ms += 1
    owner.shards.run_on_active(update, None, owner.now_ms)
    assert updates() == [1_001] * 2
    assert owner.shards.active_shards() == [0, 2]


def test_an_append_is_published_before_its_replies_leave_even_if_that_fails(owner: Owner) -> None:
    published: list[Append] = []

    def fail(append: Append) -> None:
        raise OSError("nobody listens")

    owner.shards.append_observers += [fail, published.append]
    append = owner.put(0)
    assert not published
    owner.shards.written(append)
    assert published == [append]
    assert len(owner.poll().replies) == 1
