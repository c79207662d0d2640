# SPDX-License-Identifier: Apache-2.0
"""Breaks each named invariant of the runtime, and sees its assertion (docs/contributing/invariants.md).

A broken invariant of a shard fails the shard: waiting requests get NOT_COORDINATOR, and the shard is loaded from its
log again. Most tests break an invariant by a change of the offsets that a shard shows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest

from kcoord.runtime.result import (
    CoordinatorResult,
    OperationContext,
    Producer,
    Provisional,
    Schedule,
    TimerKey,
    new_end_transaction_marker,
)
from kcoord.runtime.serde import CoordinatorSerde
from kcoord.runtime.shard_context import ShardContext
from kcoord.runtime.shard_log import Append, Load, OpenedLog
from kcoord.runtime.shard_set import ShardSet
from kcoord.runtime.snapshot import Snapshot
from kcoord.runtime.waiting import DeferredReply, Refusal, ShardState
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.record_batch import BatchHeader, decode_header, encode_batch_from_parts
from tests.unit.runtime.ledger import SHARD, WAIT, Bench, Ledger, LedgerTimer, SavedLedger, entry

T = TypeVar("T")

A = Producer(7, 1)


def loaded() -> tuple[Bench, ShardContext[Ledger]]:
    bench = Bench()
    bench.load()
    shard = bench.runtime.active(SHARD)
    assert shard is not None
    return bench, shard


def log_of(*names: str) -> list[tuple[BatchHeader, bytes]]:
    """Returns a log of one batch that sets every name to 1."""
    data = encode_batch_from_parts([CoordinatorSerde().serialize(entry(name, 1)) for name in names], timestamp_ms=0)
    return [(decode_header(data), data)]


def claimed(bench: Bench) -> Load:
    bench.runtime.claim([SHARD])
    (load,) = bench.poll().opens
    return load


def assert_failed(bench: Bench, caplog: pytest.LogCaptureFixture, name: str) -> None:
    """The shard has failed because of the invariant, and is loaded from its log again."""
    assert f"AssertionError: {name}: " in caplog.text
    assert bench.runtime.state(SHARD) is ShardState.FAILED
    bench.poll()
    bench.now_ms += 1_000
    assert [load.shard_id for load in bench.poll().opens] == [SHARD]


def error_of(bench: Bench, operation: Callable[..., CoordinatorResult[T]], *arguments: object) -> Errors:
    with pytest.raises(KafkaError) as caught:
        bench.run(operation, *arguments)
    return caught.value.error


def test_an_active_shard_cannot_be_loaded() -> None:
    bench, _ = loaded()
    with pytest.raises(AssertionError, match="R-1: shard 3 cannot go from Active to Loading"):
        bench.load()


def test_a_shard_is_not_loaded_while_an_append_is_in_flight() -> None:
    bench, _ = loaded()
    bench.run(Ledger.put, "a", 1)
    bench.poll()
    bench.runtime.fail_shard(SHARD, "a test")
    with pytest.raises(AssertionError, match="R-2: shard 3 is loaded while"):
        bench.load()


def test_no_timer_fires_for_a_stopped_shard(caplog: pytest.LogCaptureFixture) -> None:
    bench, shard = loaded()
    bench.runtime.fail_shard(SHARD, "a test")
    shard.timers.schedule(TimerKey(LedgerTimer.WORK), bench.now_ms)
    bench.poll()
    assert "R-3: a timer of shard 3 fires while it is Failed" in caplog.text
    assert bench.ledger.fired == []


def test_only_the_append_in_flight_ends(caplog: pytest.LogCaptureFixture) -> None:
    bench, _ = loaded()
    bench.runtime.written(Append(SHARD, 0, 1, b""))
    assert_failed(bench, caplog, "R-4")


def test_only_the_append_in_flight_has_an_unknown_outcome(caplog: pytest.LogCaptureFixture) -> None:
    bench, _ = loaded()
    bench.runtime.unknown(Append(SHARD, 0, 1, b""), OSError("a test"), bench.now_ms)
    assert_failed(bench, caplog, "R-4")


def test_a_fenced_append_that_is_not_in_flight_closes_the_shard(caplog: pytest.LogCaptureFixture) -> None:
    bench, _ = loaded()
    bench.runtime.fenced(Append(SHARD, 0, 1, b""))
    assert "AssertionError: R-4: " in caplog.text
    assert bench.runtime.state(SHARD) is ShardState.CLOSED


def test_an_append_has_exactly_the_records_that_are_not_durable(caplog: pytest.LogCaptureFixture) -> None:
    bench, shard = loaded()
    bench.run(Ledger.put, "a", 1)
    shard.next_offset += 1
    ready = bench.poll()
    assert ready.appends == []
    assert_failed(bench, caplog, "R-5")


@pytest.mark.parametrize("next_offset", [-1, 2])
def test_the_durable_offset_neither_falls_nor_passes_the_state(
    caplog: pytest.LogCaptureFixture, next_offset: int
) -> None:
    bench, _ = loaded()
    assert bench.run(Ledger.put, "a", 1) is WAIT
    (append,) = bench.poll().appends
    append.next_offset = next_offset
    bench.runtime.written(append)
    assert bench.runtime.offsets(SHARD)[0] == 0
    assert_failed(bench, caplog, "R-6")


def test_replies_wait_in_the_order_of_offsets(caplog: pytest.LogCaptureFixture) -> None:
    bench, shard = loaded()
    for name in ("a", "b"):
        assert bench.run(Ledger.put, name, 1) is WAIT
    shard.next_offset = 1
    assert error_of(bench, Ledger.get, "a") is Errors.NOT_COORDINATOR
    replies = bench.poll().replies
    assert len(replies) == 2
    assert all(isinstance(reply, Refusal) for reply in replies)
    assert_failed(bench, caplog, "R-7")


def test_a_deferred_response_that_breaks_the_order_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    bench, shard = loaded()
    for name in ("a", "b"):
        assert bench.run(Ledger.put, name, 1) is WAIT
    shard.next_offset = 1
    errors: list[object] = []
    reply = DeferredReply("response")
    reply.deliver = errors.append
    assert shard.defer(reply)
    for waiter in bench.poll().replies:
        waiter.settle()
    assert [error.error for error in errors if isinstance(error, KafkaError)] == [Errors.NOT_COORDINATOR]
    assert_failed(bench, caplog, "R-7")


def test_a_load_replays_no_batch_twice() -> None:
    bench = Bench()
    with pytest.raises(AssertionError, match="R-8: shard 3 replays the batch at offset 0 after everything below 2"):
        bench.runtime.load(SHARD, log_of("a", "b") * 2, bench.now_ms)
    assert bench.runtime.state(SHARD) is ShardState.FAILED


def test_a_claimed_log_does_not_grow(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    load = claimed(bench)
    bench.runtime.opened(load, OpenedLog(0, 1))
    assert bench.poll().reads == [load]
    bench.runtime.read(load, log_of("a", "b"), bench.now_ms, is_end=True)
    assert "R-9: the log of shard 3 ended at offset 1" in caplog.text
    assert bench.runtime.state(SHARD) is ShardState.FAILED


def test_a_snapshot_has_only_durable_records(caplog: pytest.LogCaptureFixture) -> None:
    shards = ShardSet(lambda shard_id: SavedLedger(), CoordinatorSerde())
    shards.load(SHARD, log_of("a", "b"), 0)
    shard = shards.active(SHARD)
    assert shard is not None
    assert shards.take_snapshot(SHARD, 0)
    shard.next_offset = shard.durable_offset = 1
    assert [list(shards.poll(now_ms).saves) for now_ms in range(5)] == [[]] * 5
    assert "AssertionError: R-10: " in caplog.text
    assert not shards.snapshots.is_taking
    assert shards.state(SHARD) is ShardState.FAILED


def test_a_snapshot_is_not_ahead_of_its_log(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    load = claimed(bench)
    assert load.with_snapshot
    bench.runtime.opened(load, OpenedLog(0, 5, snapshot=Snapshot(3, 7, 0, [])))
    (again,) = bench.poll().opens
    assert "R-11: the snapshot of shard 3 has records up to offset 7" in caplog.text
    assert not again.with_snapshot, "the whole log is read"


def mixed(ledger: Ledger, context: OperationContext) -> CoordinatorResult[object]:
    first, second = entry("x", 1), entry("y", 2)
    first.producer = A
    return CoordinatorResult("", [first, second])


def two_markers(ledger: Ledger, context: OperationContext) -> CoordinatorResult[object]:
    marker = new_end_transaction_marker(A, 0, committed=True)
    return CoordinatorResult("", [marker, new_end_transaction_marker(A, 0, committed=True)])


@pytest.mark.parametrize(("operation", "name"), [(mixed, "R-12"), (two_markers, "R-13")])
def test_a_result_is_part_of_one_transaction_or_is_its_marker(
    caplog: pytest.LogCaptureFixture, operation: Callable[..., CoordinatorResult[object]], name: str
) -> None:
    bench, _ = loaded()
    assert error_of(bench, operation) is Errors.NOT_COORDINATOR
    assert bench.ledger.balance == {}
    assert_failed(bench, caplog, name)


def test_requests_that_wait_have_tokens_of_their_own(caplog: pytest.LogCaptureFixture) -> None:
    bench, _ = loaded()

    def wait() -> object:
        context = OperationContext(bench.now_ms, token="same")
        return bench.runtime.run(SHARD, lambda ledger, context, _: ledger.wait(context), None, context)

    assert isinstance(wait(), DeferredReply)
    with pytest.raises(KafkaError, match="NOT_COORDINATOR"):
        wait()
    assert_failed(bench, caplog, "R-14")


def test_batches_of_an_append_have_no_gap(caplog: pytest.LogCaptureFixture) -> None:
    bench, shard = loaded()
    bench.run(Ledger.put, "a", 1)
    shard.next_offset += 3
    assert error_of(bench, Ledger.put_in_transaction, A, "b", 1) is Errors.NOT_COORDINATOR
    assert bench.ledger.balance == {"a": 1}
    assert_failed(bench, caplog, "R-15")


class Packed:
    """A packed result with one record and a timer, as operations of the fast paths prepare it."""

    count = 1
    timestamp_ms = 5
    timer = Schedule(TimerKey(LedgerTimer.WORK), 9_000)

    def encode_records(self, first_delta: int) -> bytes:
        return b"record"

    def replay(self) -> None:
        raise NotImplementedError


def test_a_packed_result_after_a_gap_is_not_appended(caplog: pytest.LogCaptureFixture) -> None:
    bench, shard = loaded()
    bench.run(Ledger.put, "a", 1)
    shard.next_offset += 3
    assert not shard.append_packed(Packed(), DeferredReply(""))
    assert_failed(bench, caplog, "R-15")


def test_a_shard_becomes_active_with_nothing_unwritten() -> None:
    bench, shard = loaded()
    bench.run(Ledger.put, "a", 1)
    shard.state = ShardState.LOADING
    with pytest.raises(AssertionError, match="R-16: shard 3 becomes active with 1 unwritten batches"):
        shard.activate(Ledger(), 5, bench.now_ms)


def outside(ledger: Ledger, context: OperationContext) -> CoordinatorResult[object]:
    return CoordinatorResult("", [entry("x", 1)], provisional=Provisional("tx", 1))


def test_provisional_records_are_in_a_transaction(caplog: pytest.LogCaptureFixture) -> None:
    bench, _ = loaded()
    assert error_of(bench, outside) is Errors.NOT_COORDINATOR
    assert_failed(bench, caplog, "R-17")


def test_the_log_decides_about_provisional_batches_only(caplog: pytest.LogCaptureFixture) -> None:
    bench, _ = loaded()
    bench.run(Ledger.put, "a", 1)
    (append,) = bench.poll().appends
    bench.runtime.decided(append, 0, None)
    bench.runtime.written(append)
    assert_failed(bench, caplog, "R-18")
