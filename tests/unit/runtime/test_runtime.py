# SPDX-License-Identifier: Apache-2.0
"""The order of state, log and replies."""

from __future__ import annotations

import pytest

from kcoord.runtime import shard_context
from kcoord.runtime.result import (
    PENDING,
    Cancel,
    CoordinatorRecord,
    CoordinatorResult,
    EncodedRecords,
    MemberTimers,
    OperationContext,
    Schedule,
    Task,
    TimerEffect,
    TimerKey,
)
from kcoord.runtime.serde import CoordinatorSerde, size_bound_bytes
from kcoord.runtime.shard_log import Append
from kcoord.runtime.waiting import ShardState, Waiter
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import OffsetCommitKey
from kcoord_protocol.record_batch import (
    BATCH_OVERHEAD_BYTES,
    decode_header,
    decode_records,
    encode_records,
    verify_crc,
)
from tests.unit.runtime.ledger import SHARD, WAIT, Bench, Ledger, LedgerTimer, entry

SERDE = CoordinatorSerde()


@pytest.fixture
def bench() -> Bench:
    bench = Bench()
    bench.load()
    return bench


def error_of(bench: Bench, *call: object) -> Errors:
    with pytest.raises(KafkaError) as caught:
        bench.run(*call)  # type: ignore[arg-type]
    return caught.value.error


def test_without_records_the_response_is_immediate(bench: Bench) -> None:
    assert bench.run(Ledger.get, "a") is None
    assert error_of(bench, Ledger.refuse) is Errors.INVALID_REQUEST
    ready = bench.poll()
    assert not ready.appends
    assert not ready.replies


def test_the_response_to_a_write_waits_for_the_log(bench: Bench) -> None:
    assert bench.run(Ledger.put, "a", 1) is WAIT
    assert bench.ledger.balance == {"a": 1}, "the state is ahead of the log"
    ready = bench.poll()
    assert [(append.shard_id, append.base_offset, append.next_offset) for append in ready.appends] == [(SHARD, 0, 1)]
    assert not ready.replies
    assert not bench.poll().appends, "a poll returns every append once"
    assert bench.written(ready) == [(1, "a=1")]
    assert bench.runtime.offsets(SHARD) == (1, 1)
    assert bench.run(Ledger.get, "a") == 1


def test_a_read_after_a_write_waits_with_it(bench: Bench) -> None:
    bench.run(Ledger.put, "a", 1)
    assert bench.run(Ledger.get, "a") is WAIT
    assert bench.run(Ledger.refuse) is WAIT
    assert bench.written(bench.poll()) == [(1, "a=1"), (2, 1), (3, Errors.INVALID_REQUEST)]


def test_one_append_is_in_flight_and_later_results_are_the_next_one(bench: Bench) -> None:
    bench.run(Ledger.put, "a", 1)
    first = bench.poll()
    bench.run(Ledger.put, "b", 2)
    bench.run(Ledger.put, "c", 3)
    assert not bench.poll().appends
    assert not bench.runtime.is_idle()
    bench.disk += first.appends[0].data
    bench.runtime.written(first.appends[0])
    second = bench.poll()
    assert bench.replies(second) == [(1, "a=1")]
    assert [(append.base_offset, append.next_offset) for append in second.appends] == [(1, 3)]
    assert bench.written(second) == [(2, "b=2"), (3, "c=3")]
    assert bench.runtime.is_idle()


def test_batches_have_kafkas_format(bench: Bench) -> None:
    bench.now_ms = 1_700_000_000_123
    bench.run(Ledger.put, "a", 1)
    bench.run(Ledger.put, "b", 2)
    [append] = bench.poll().appends
    header = decode_header(append.data)
    assert verify_crc(append.data)
    assert header.size_bytes == len(append.data)
    assert (header.base_offset, header.records_count, header.max_timestamp) == (0, 2, 1_700_000_000_123)
    assert [record.offset for record in decode_records(append.data)] == [0, 1]


def test_a_result_that_is_too_large_changes_nothing() -> None:
    bench = Bench(max_batch_bytes=1_000)
    bench.load()
    with pytest.raises(KafkaError) as caught:
        bench.run(Ledger.put, "a", 1, 2_000)
    assert caught.value.error is Errors.MESSAGE_TOO_LARGE
    assert bench.ledger.balance == {}
    assert not bench.poll().appends
    assert bench.run(Ledger.put, "a", 1, 100) is WAIT


def test_the_limit_is_the_exact_size_of_the_batch() -> None:
    bench = Bench()
    bench.load()
    bench.run(Ledger.put, "a", 1, 500)
    size = len(bench.poll().appends[0].data)
    for limit, fits in ((size, True), (size - 1, False)):
        other = Bench(max_batch_bytes=limit)
        other.load()
        if fits:
            assert other.run(Ledger.put, "a", 1, 500) is WAIT
        else:
            assert error_of(other, Ledger.put, "a", 1, 500) is Errors.MESSAGE_TOO_LARGE


def test_a_result_never_spans_two_batches() -> None:
    def put_many(ledger: Ledger, context: OperationContext) -> CoordinatorResult[str]:
        return CoordinatorResult("many", [entry(f"{context.token}-{i}", i, 50) for i in range(5)])

    bench = Bench(max_batch_bytes=1_000)
    bench.load()
    for _ in range(4):
        bench.run(put_many)
    ready = bench.poll()
    assert len(ready.appends) == 1, "one append has all the batches"
    assert [value for _, value in bench.written(ready)] == ["many"] * 4
    counts = [header.records_count for header, _ in bench.batches()]
    assert len(counts) > 1
    assert all(count % 5 == 0 for count in counts)
    assert all(len(data) <= 1_000 for _, data in bench.batches())
    assert [header.base_offset for header, _ in bench.batches()] == [sum(counts[:i]) for i in range(len(counts))]


class PackedPut:
    """`Ledger.put` as a packed result."""

    timer = None
    timestamp_ms = 5

    def __init__(self, ledger: Ledger, name: str, padding: int, count: int = 1) -> None:
        self.count = count
        self._ledger = ledger
        self._records = [entry(f"{name}{number}", number, padding) for number in range(count)]

    def encode_records(self, first_delta: int) -> bytes:
        return encode_records([SERDE.serialize(record) for record in self._records], first_delta)

    def replay(self) -> None:
        for record in self._records:
            self._ledger.replay(record)


class Settled(Waiter):
    """A waiter that notes its name when it is settled."""

    def __init__(self, name: str, settled: list[str]) -> None:
        self._name = name
        self._settled = settled

    def settle(self) -> None:
        self._settled.append(self._name)

    def fail(self, error: KafkaError) -> None:
        raise AssertionError(error)


def test_packed_results_share_batches_and_keep_the_order_of_all_results() -> None:
    bench = Bench(max_batch_bytes=1_000)
    bench.load()
    shard = bench.runtime.active(SHARD)
    assert shard is not None

    settled: list[str] = []

    def put(name: str, padding: int, count: int = 1) -> bool:
        return shard.append_packed(PackedPut(bench.ledger, name, padding, count), Settled(name, settled))

    assert not put("huge", 1_000)
    assert bench.ledger.balance == {}
    assert put("a", 50, 3)
    assert put("b", 50)
    bench.run(Ledger.put, "general", 9)
    assert put("c", 50)
    assert not put("huge", 1_000)
    assert put("d", 400, 2), "d has a batch of its own, because c fills the one before"
    assert bench.written(bench.poll()) == [(1, "general=9")]
    assert settled == ["a", "b", "c", "d"]
    names = [[record_name(record.key) for record in decode_records(batch)] for _, batch in bench.batches()]
    assert names == [["a0", "a1", "a2", "b0"], ["general"], ["c0"], ["d0", "d1"]]
    assert [header.base_offset for header, _ in bench.batches()] == [0, 4, 5, 6]
    assert all(verify_crc(batch) and len(batch) <= 1_000 for _, batch in bench.batches())
    again = Bench(max_batch_bytes=1_000)
    again.disk = bench.disk
    again.load()
    assert again.ledger.balance == bench.ledger.balance


def record_name(key: bytes | None) -> str:
    assert key is not None
    return OffsetCommitKey.decode(key[2:], 0).topic


def test_a_failed_write_fails_the_shard_until_it_is_loaded_again(bench: Bench) -> None:
    bench.run(Ledger.put, "a", 1)
    bench.written(bench.poll())
    bench.run(Ledger.put, "a", 2)
    bench.run(Ledger.get, "a")
    bench.run(Ledger.wait)
    bench.poll()
    bench.fail_write(OSError(5, "Input/output error"))
    assert bench.runtime.state(SHARD) is ShardState.FAILED
    assert bench.runtime.machine(SHARD) is None
    ready = bench.poll()
    assert bench.replies(ready) == [(token, Errors.NOT_COORDINATOR) for token in (2, 3, 4)]
    assert ready.closes == [SHARD]
    assert bench.poll().closes == ()
    assert error_of(bench, Ledger.get, "a") is Errors.NOT_COORDINATOR
    assert bench.runtime.next_deadline_ms() == bench.now_ms + 1_000, "the shard is loaded again"
    bench.load()
    assert bench.run(Ledger.get, "a") == 1, "the unacknowledged record is lost"
    assert bench.run(Ledger.put, "a", 3) is WAIT
    assert bench.poll().appends[0].base_offset == 1


def fill_disk(bench: Bench) -> None:
    """Fails the append in flight because there is no space, and loads the shard again."""
    bench.poll()
    bench.fail_write(OSError(28, "No space left on device"))
    assert bench.poll().closes == [SHARD]
    bench.load()


def is_read_only(bench: Bench) -> bool:
    shard = bench.runtime.active(SHARD)
    return shard is not None and shard.is_read_only(bench.now_ms)


def refusable_put(ledger: Ledger, context: OperationContext) -> CoordinatorResult[str]:
    return CoordinatorResult("put", [entry("a", 9)], is_refusable=True)


def test_with_a_full_disk_a_shard_is_read_only_for_a_while(bench: Bench) -> None:
    bench.run(Ledger.put, "a", 1)
    bench.written(bench.poll())
    for read_only_ms in (1000, 2000, 4000, 8000, 8000):
        bench.run(Ledger.put, "a", 2)
        fill_disk(bench)
        assert is_read_only(bench)
        assert error_of(bench, refusable_put) is Errors.NOT_COORDINATOR
        assert bench.run(Ledger.get, "a") == 1
        assert bench.poll().appends == []
        bench.now_ms += read_only_ms - 1
        assert is_read_only(bench)
        bench.now_ms += 1
        assert not is_read_only(bench)
    bench.run(Ledger.put, "a", 3)
    assert [value for _, value in bench.written(bench.poll())] == ["a=3"]
    bench.run(Ledger.put, "a", 4)
    fill_disk(bench)
    bench.now_ms += 1000
    assert not is_read_only(bench), "after a success the times begin with the shortest again"


def test_a_result_that_cannot_be_refused_on_a_full_disk_fails_the_shard(bench: Bench) -> None:
    """The state is dropped as after a failed write, so nothing of the result is left."""
    bench.run(Ledger.put, "a", 1)
    fill_disk(bench)
    assert error_of(bench, Ledger.put, "a", 2) is Errors.NOT_COORDINATOR
    assert bench.poll().closes == [SHARD]
    bench.load()
    bench.ledger.on_timer = lambda: CoordinatorResult(None, [entry("a", 3)])
    bench.now_ms += 100
    assert bench.poll().closes == [SHARD]


def test_an_assertion_in_an_operation_fails_the_shard(bench: Bench) -> None:
    def broken(ledger: Ledger, context: OperationContext) -> CoordinatorResult[str]:
        raise AssertionError("never")

    bench.run(Ledger.put, "a", 1)
    assert error_of(bench, broken) is Errors.NOT_COORDINATOR
    ready = bench.poll()
    assert bench.replies(ready) == [(1, Errors.NOT_COORDINATOR)]
    assert ready.closes == [SHARD]
    assert not ready.appends


def test_a_failed_replay_leaves_nothing_to_write(bench: Bench) -> None:
    bench.ledger.fail_replay = True
    assert error_of(bench, Ledger.put, "a", 1) is Errors.NOT_COORDINATOR
    ready = bench.poll()
    assert not ready.appends
    assert not ready.replies
    assert ready.closes == [SHARD]


def test_a_shard_that_fails_during_a_write_is_loaded_after_it(bench: Bench) -> None:
    bench.run(Ledger.put, "a", 1)
    ready = bench.poll()
    bench.ledger.fail_replay = True
    assert error_of(bench, Ledger.put, "a", 2) is Errors.NOT_COORDINATOR
    after = bench.poll()
    assert bench.replies(after) == [(1, Errors.NOT_COORDINATOR)]
    assert after.closes == ()
    with pytest.raises(AssertionError):
        bench.load()
    bench.disk += ready.appends[0].data
    bench.runtime.written(ready.appends[0])
    assert bench.poll().closes == [SHARD]
    bench.load()
    assert bench.run(Ledger.get, "a") == 1


def test_an_unexpected_error_fails_the_request_and_not_the_shard(bench: Bench) -> None:
    def broken(ledger: Ledger, context: OperationContext) -> CoordinatorResult[str]:
        raise KeyError("oops")

    assert error_of(bench, broken) is Errors.UNKNOWN_SERVER_ERROR
    assert bench.runtime.statistics.operations_failed == 1
    assert bench.runtime.state(SHARD) is ShardState.ACTIVE


def test_a_shard_that_is_not_active_rejects_requests() -> None:
    bench = Bench()
    assert error_of(bench, Ledger.get, "a") is Errors.NOT_COORDINATOR
    bench.runtime.claim([SHARD])
    assert error_of(bench, Ledger.get, "a") is Errors.COORDINATOR_LOAD_IN_PROGRESS
    bench.load()
    bench.run(Ledger.put, "a", 1)
    ready = bench.poll()
    bench.runtime.close_shard(SHARD)
    assert bench.replies(bench.poll()) == [(3, Errors.NOT_COORDINATOR)]
    assert error_of(bench, Ledger.get, "a") is Errors.NOT_COORDINATOR
    bench.runtime.written(ready.appends[0])
    assert not bench.poll().closes


def test_a_completion_answers_a_pending_request(bench: Bench) -> None:
    assert bench.run(Ledger.wait) is WAIT
    assert bench.run(Ledger.complete, 1, "late") == "completed"
    assert bench.replies(bench.poll()) == [(1, "late")]
    bench.run(Ledger.complete, 1, "twice")
    assert bench.replies(bench.poll()) == []


def test_a_completion_waits_for_the_log_like_any_response(bench: Bench) -> None:
    bench.run(Ledger.wait)
    bench.run(Ledger.put, "a", 1)
    bench.run(Ledger.complete, 1, "late")
    assert bench.written(bench.poll()) == [(2, "a=1"), (1, "late"), (3, "completed")]


def test_timers_fire_as_operations(bench: Bench) -> None:
    assert bench.runtime.next_deadline_ms() == 1_100
    bench.now_ms = 1_099
    bench.poll()
    assert bench.ledger.fired == []
    bench.ledger.on_timer = lambda: CoordinatorResult(
        None, [entry("t", 1)], timers=[Schedule(TimerKey(LedgerTimer.AGAIN), 2_000)]
    )
    bench.now_ms = 1_150
    ready = bench.poll()
    assert bench.ledger.fired == [(1_150, TimerKey(LedgerTimer.LOADED))]
    assert ready.appends
    assert bench.runtime.next_deadline_ms() == 2_000


def test_a_timer_that_fails_is_tried_again(bench: Bench) -> None:
    def fail() -> CoordinatorResult[None]:
        raise KafkaError(Errors.MESSAGE_TOO_LARGE)

    bench.ledger.on_timer = fail
    bench.now_ms = 1_100
    bench.poll()
    assert bench.runtime.next_deadline_ms() == 1_600
    bench.ledger.on_timer = lambda: CoordinatorResult(None)
    bench.now_ms = 1_600
    bench.poll()
    assert [fired for fired, _ in bench.ledger.fired] == [1_100, 1_600]
    assert bench.runtime.next_deadline_ms() is None


def test_a_task_runs_once_and_its_outcome_reaches_the_machine(bench: Bench) -> None:
    task = Task(TimerKey(LedgerTimer.WORK, "g"), "work")
    same = Task(TimerKey(LedgerTimer.WORK, "g"), "work")

    def start(ledger: Ledger, context: OperationContext, work: Task) -> CoordinatorResult[str]:
        return CoordinatorResult("started", tasks=[work])

    assert bench.run(start, task) == "started"
    assert bench.run(start, same) == "started"
    assert bench.poll().tasks == [(SHARD, task)]
    bench.runtime.complete_task(SHARD, same, "stale", OperationContext(bench.now_ms))
    bench.runtime.complete_task(SHARD, task, "value", OperationContext(bench.now_ms))
    bench.runtime.complete_task(SHARD, task, "twice", OperationContext(bench.now_ms))
    assert bench.ledger.completed == [(task, "value")]
    bench.run(start, same)
    assert bench.poll().tasks == [(SHARD, same)]


def test_no_task_outlives_its_machine(bench: Bench) -> None:
    def start(ledger: Ledger, context: OperationContext, work: Task) -> CoordinatorResult[str]:
        return CoordinatorResult("started", tasks=[work])

    running = Task(TimerKey(LedgerTimer.WORK, "running"), "work")
    bench.run(start, running)
    assert bench.poll().tasks == [(SHARD, running)]
    bench.run(Ledger.put_and_start, "deferred", True)
    assert bench.poll().tasks == []
    bench.fail_write(OSError(5, "Input/output error"))
    bench.replies(bench.poll())
    bench.load()
    bench.runtime.complete_task(SHARD, running, "late", OperationContext(bench.now_ms))
    assert bench.ledger.completed == []
    again = Task(running.key, "again")
    bench.run(start, again)
    assert bench.poll().tasks == [(SHARD, again)]
    bench.run(Ledger.put, "a", 1)
    bench.runtime.written(bench.poll().appends[0])
    assert bench.poll().tasks == [], "a task that waits for lost records is lost with them"


def test_a_task_waits_only_for_its_own_records(bench: Bench) -> None:
    bench.run(Ledger.put_and_start, "first", True)
    bench.run(Ledger.put_and_start, "at once", False)
    first = bench.poll()
    assert [task.work for _, task in first.tasks] == ["at once"]
    bench.run(Ledger.put_and_start, "third", True)
    bench.poll()

    def written(append: Append) -> tuple[list[object], list[Append]]:
        bench.runtime.written(append)
        ready = bench.poll()
        return [task.work for _, task in ready.tasks], ready.appends

    works, (second,) = written(first.appends[0])
    assert works == ["first"]
    assert written(second) == (["third"], [])


def test_a_pending_request_fails_once_with_its_shard(bench: Bench) -> None:
    bench.run(Ledger.wait)
    bench.runtime.fail_shard(SHARD, "a test")
    assert bench.replies(bench.poll()) == [(1, Errors.NOT_COORDINATOR)]
    bench.load()
    bench.run(Ledger.complete, 1, "late")
    bench.runtime.fail_shard(SHARD, "a test")
    assert bench.replies(bench.poll()) == []


def test_the_timers_of_a_pending_result_are_armed(bench: Bench) -> None:
    def wait(ledger: Ledger, context: OperationContext) -> CoordinatorResult[object]:
        return CoordinatorResult(PENDING, timers=[Schedule(TimerKey(LedgerTimer.AGAIN), 1_010)])

    assert bench.run(wait) is WAIT
    assert bench.runtime.next_deadline_ms() == 1_010


def test_a_timer_is_cancelled_by_its_key(bench: Bench) -> None:
    def cancel(ledger: Ledger, context: OperationContext) -> CoordinatorResult[str]:
        return CoordinatorResult("cancelled", timers=[Cancel(TimerKey(LedgerTimer.LOADED))])

    assert bench.run(cancel) == bench.run(cancel) == "cancelled"
    assert bench.runtime.next_deadline_ms() is None


def test_a_timer_that_finds_a_broken_invariant_fails_the_shard(bench: Bench) -> None:
    def broken() -> CoordinatorResult[None]:
        raise AssertionError("never")

    bench.ledger.on_timer = broken
    bench.now_ms = 1_100
    assert bench.poll().closes == [SHARD]
    assert bench.runtime.statistics.operations_failed == 0
    assert bench.runtime.statistics.invariants_broken == 1


def test_a_timer_with_records_fails_the_shard_while_the_disk_is_full(bench: Bench) -> None:
    for milliseconds, closes in ((999, [SHARD]), (1_000, ())):
        bench.run(Ledger.put, "a", 1)
        fill_disk(bench)
        bench.now_ms += milliseconds
        bench.ledger.on_timer = lambda: CoordinatorResult(None, [entry("t", 3)])
        ready = bench.poll()
        assert ready.closes == closes
        assert len(ready.appends) == (not closes)
        if closes:
            bench.load()
            bench.now_ms += 1
            assert not is_read_only(bench)
            bench.run(Ledger.put, "a", 1)
            bench.written(bench.poll())


class EncodedPuts(EncodedRecords):
    """Encoded records that set numbers."""

    def __init__(self, ledger: Ledger, records: list[CoordinatorRecord]) -> None:
        super().__init__(len(records), encode_records(list(map(SERDE.serialize, records)), 0), self._replay)
        self._ledger = ledger
        self._records = records

    def _replay(self) -> None:
        for record in self._records:
            self._ledger.replay(record)


def complete_with(bench: Bench, encoded: list[CoordinatorRecord], records: list[CoordinatorRecord]) -> None:
    """Ends a task with these records."""

    def start(ledger: Ledger, context: OperationContext) -> CoordinatorResult[None]:
        return CoordinatorResult(None, tasks=[Task(TimerKey(LedgerTimer.WORK), "work")])

    bench.run(start)
    ((_, task),) = bench.poll().tasks
    result = CoordinatorResult(None, records, encoded=EncodedPuts(bench.ledger, encoded) if encoded else None)
    bench.ledger.on_task = lambda: result
    bench.runtime.complete_task(SHARD, task, "done", OperationContext(bench.now_ms))


def test_the_outcome_of_a_task_is_one_batch_of_any_size() -> None:
    bench = Bench(max_batch_bytes=1_000)
    bench.load()
    bench.run(Ledger.put, "before", 1)
    bench.written(bench.poll())
    complete_with(bench, [entry("a", 1, 2_000), entry("b", 2, 2_000)], [entry("c", 3, 2_000), entry("d", 4)])
    bench.written(bench.poll())
    complete_with(bench, [], [entry("e", 5, 2_000)])
    bench.run(Ledger.put, "after", 6)
    assert bench.written(bench.poll()) == [(4, "after=6")]
    assert [header.records_count for header, _ in bench.batches()] == [1, 4, 1, 1]
    assert bench.runtime.offsets(SHARD) == (7, 7)
    assert bench.ledger.balance == {"before": 1, "a": 1, "b": 2, "c": 3, "d": 4, "e": 5, "after": 6}
    statistics = bench.runtime.statistics
    assert (statistics.records_appended, statistics.batches_appended) == (7, 4)
    assert statistics.bytes_appended == len(bench.disk)
    again = Bench()
    again.disk = bench.disk
    again.load()
    assert again.ledger.balance == bench.ledger.balance
    assert again.runtime.statistics.records_loaded == 7


def test_the_outcome_of_a_task_has_a_limit_of_its_own(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes of encoded records count. A result above the limit fails and changes nothing."""
    records = [entry("a", 1, 500)], [entry("b", 2, 500)]
    size_bytes = size_bound_bytes([SERDE.serialize(records[1][0])]) + len(EncodedPuts(bench.ledger, records[0]).body)
    for most_bytes, fits in ((size_bytes + BATCH_OVERHEAD_BYTES, True), (size_bytes - 100, False)):
        limited = Bench(max_batch_bytes=400)
        monkeypatch.setattr(shard_context, "MAX_GROUP_BYTES", most_bytes)
        limited.load()
        complete_with(limited, *records)
        assert limited.ledger.balance == ({"a": 1, "b": 2} if fits else {})
        assert limited.runtime.statistics.operations_failed == (not fits)
        assert len(limited.poll().appends) == fits


def test_a_failed_shard_is_loaded_when_its_append_ends_with_an_unknown_outcome(bench: Bench) -> None:
    bench.run(Ledger.put, "a", 1)
    bench.poll()
    bench.runtime.fail_shard(SHARD, "a test")
    assert bench.poll().closes == ()
    bench.fail_write(OSError(5, "Input/output error"))
    assert bench.poll().closes == [SHARD]


def test_timers_of_members_are_armed_and_moved_in_the_order_of_the_effects(bench: Bench) -> None:
    keys = {name: TimerKey(LedgerTimer.AGAIN, "g", name) for name in "abc"}
    timers: list[TimerEffect] = [
        *(Schedule(keys[name], 2_000) for name in "ab"),
        MemberTimers(LedgerTimer.AGAIN, "g", {"a": 1_500, "c": 1_500}),
        Cancel(keys["a"]),
        Schedule(keys["c"], 1_600),
    ]
    bench.run(lambda ledger, context: CoordinatorResult(None, timers=timers))
    bench.now_ms = 2_000
    bench.poll()
    assert [key for _, key in bench.ledger.fired] == [TimerKey(LedgerTimer.LOADED), keys["c"], keys["b"]]
