# SPDX-License-Identifier: Apache-2.0
"""Results that are part of a transaction, markers, and tasks that wait for the log."""

from __future__ import annotations

from kcoord.runtime.result import Producer, new_end_transaction_marker
from kcoord.runtime.serde import CoordinatorSerde
from kcoord.runtime.waiting import ShardState
from kcoord_protocol.control_records import ControlRecordType, decode_control_key, decode_end_txn_marker
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.record_batch import decode_entries, iter_headers
from tests.unit.runtime.ledger import SHARD, Bench, Ledger, entry

A, B = Producer(1, 5), Producer(2, 0)


def loaded() -> Bench:
    bench = Bench()
    bench.load()
    return bench


def test_transactional_results_have_batches_of_their_own() -> None:
    bench = loaded()
    bench.run(Ledger.put, "x", 1)
    bench.run(Ledger.put_in_transaction, A, "x", 2)
    bench.run(Ledger.put_in_transaction, A, "y", 3)
    bench.run(Ledger.put, "z", 4)
    bench.run(Ledger.put, "z", 5)
    bench.run(Ledger.end, A, True)
    bench.written(bench.poll())
    headers = [header for _, header in iter_headers(bench.disk)]
    assert [(h.producer_id, h.producer_epoch, h.is_transactional, h.is_control, h.records_count) for h in headers] == [
        (-1, -1, False, False, 1),
        (1, 5, True, False, 1),
        (1, 5, True, False, 1),
        (-1, -1, False, False, 2),
        (1, 5, True, True, 1),
    ]
    assert [header.base_sequence for header in headers] == [-1] * 5
    position = [position for position, _ in iter_headers(bench.disk)][-1]
    ((offset, key, value),) = decode_entries(bench.disk, position)
    assert (offset, decode_control_key(key), decode_end_txn_marker(value)) == (5, ControlRecordType.COMMIT, 3)


def test_live_state_is_the_state_of_the_log() -> None:
    bench = loaded()
    for step, producer in enumerate((A, B, A, B, A)):
        bench.run(Ledger.put_in_transaction, producer, f"n{step % 2}", step)
        bench.run(Ledger.put, f"n{step % 2}", 10 * step)
        if step in (1, 3):
            bench.run(Ledger.end, producer, step == 3)
        bench.written(bench.poll())
        live = bench.ledger
        bench.runtime.close_shard(SHARD)
        bench.load()
        assert bench.ledger is not live
        assert (bench.ledger.balance, bench.ledger.pending) == (live.balance, live.pending)
    assert bench.ledger.pending


def test_a_task_waits_until_its_records_are_durable() -> None:
    bench = loaded()
    bench.run(Ledger.put_and_start, "now", False)
    bench.run(Ledger.put_and_start, "later", True)
    ready = bench.poll()
    assert [task.work for _, task in ready.tasks] == ["now"]
    for append in ready.appends:
        bench.runtime.written(append)
    assert [task.work for _, task in bench.poll().tasks] == ["later"]


def test_a_task_whose_records_were_not_written_is_not_started() -> None:
    bench = loaded()
    bench.run(Ledger.put_and_start, "later", True)
    bench.poll()
    bench.fail_write(OSError("no space"))
    ready = bench.poll()
    assert (ready.tasks, ready.closes) == ([], [SHARD])


# -- a log that may refuse batches of transactions ---------------------------------------------------------------------


def test_the_log_decides_about_provisional_batches_one_by_one() -> None:
    bench = loaded()
    bench.run(Ledger.put, "a", 1)
    bench.run(Ledger.put_provisionally, A, "x", 2)
    bench.run(Ledger.put_provisionally, B, "y", 3)
    bench.run(Ledger.put, "b", 4)
    (append,) = bench.poll().appends
    assert {offset: batch.transactional_id for offset, batch in append.provisional.items()} == {1: "tx", 2: "tx"}
    bench.runtime.decided(append, 1, None)
    assert bench.replies(bench.poll()) == [(1, "a=1"), (2, "x=2")], "everything before it is in the log"
    bench.runtime.decided(append, 2, KafkaError(Errors.INVALID_TXN_STATE))
    assert bench.replies(bench.poll()) == [(3, Errors.INVALID_TXN_STATE)]
    assert (bench.ledger.pending, bench.ledger.provisional) == ({A: {"x": 2}}, {})
    bench.runtime.written(append)
    assert bench.replies(bench.poll()) == [(4, "b=4")]
    bench.runtime.ended(SHARD, new_end_transaction_marker(A, 0, committed=True))
    assert bench.ledger.balance == {"a": 1, "b": 4, "x": 2}
    assert bench.poll().appends == [], "the marker is in the log already"


def test_a_marker_makes_batches_of_its_producer_stale_that_wait_for_an_append() -> None:
    bench = loaded()
    bench.run(Ledger.put, "a", 1)
    (first,) = bench.poll().appends
    bench.run(Ledger.put_provisionally, A, "x", 2)
    bench.run(Ledger.put_provisionally, B, "y", 3)
    bench.runtime.ended(SHARD, new_end_transaction_marker(A, 0, committed=False))
    bench.run(Ledger.put_provisionally, A, "x", 4)
    bench.runtime.written(first)
    (append,) = bench.poll().appends
    assert [batch.is_stale for batch in append.provisional.values()] == [True, False, False]


def test_keys_are_written_again_with_their_present_values() -> None:
    bench = loaded()
    bench.run(Ledger.put, "a", 1)
    bench.written(bench.poll())
    serde = CoordinatorSerde()
    keys = [key for key, _ in (serde.serialize(entry(name, 0)) for name in ("a", "b")) if key is not None]
    bench.runtime.rewrite(SHARD, [*keys, b"\x7f\xffunknown"], bench.now_ms)
    (append,) = bench.poll().appends
    expected = [serde.serialize(entry(name, value)) for name, value in (("a", 1), ("b", 0))]
    assert [(key, value) for _, key, value in decode_entries(append.data)] == expected


def test_events_of_the_log_of_a_shard_that_is_not_active_are_dropped() -> None:
    bench = loaded()
    bench.run(Ledger.put_provisionally, A, "x", 2)
    (append,) = bench.poll().appends
    bench.runtime.close_shard(SHARD)
    bench.runtime.decided(append, 0, None)
    bench.runtime.ended(SHARD, new_end_transaction_marker(A, 0, committed=True))
    bench.runtime.rewrite(SHARD, [], bench.now_ms)
    assert bench.replies(bench.poll()) == [(1, Errors.NOT_COORDINATOR)]


def test_a_marker_that_cannot_be_replayed_fails_the_shard() -> None:
    bench = loaded()
    bench.ledger.fail_replay = True
    bench.runtime.ended(SHARD, new_end_transaction_marker(A, 0, committed=True))
    assert bench.runtime.state(SHARD) is ShardState.FAILED
