# SPDX-License-Identifier: Apache-2.0
"""Results that are part of a transaction, markers, and tasks that wait for the log."""

from __future__ import annotations

from kcoord.runtime.result import Producer
from kcoord_protocol.control_records import ControlRecordType, decode_control_key, decode_end_txn_marker
from kcoord_protocol.record_batch import decode_entries, iter_headers
from tests.unit.runtime.ledger import SHARD, Bench, Ledger

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
