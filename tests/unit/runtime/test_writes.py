# SPDX-License-Identifier: Apache-2.0
"""The appends of a shard: their codec, how long they linger, and replies that have waited too long."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kcoord.runtime.result import Producer, Schedule, TimerKey
from kcoord.runtime.serde import CoordinatorSerde, size_bound_bytes
from kcoord.runtime.waiting import Ready, Refusal, ShardState, Waiter
from kcoord_protocol.compression import Compression
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.record_batch import (
    BATCH_OVERHEAD_BYTES,
    decode_header,
    encode_batch_from_parts,
    encode_records,
)

from .ledger import SHARD, WAIT, Bench, Ledger, LedgerTimer, entry

SERDE = CoordinatorSerde()


def codecs(bench: Bench) -> list[tuple[Compression, bool]]:
    """Returns the codec of every batch in the log, and whether it is a marker."""
    return [(header.compression, header.is_control) for header, _ in bench.batches()]


def completed(bench: Bench, ready: Ready) -> Ready:
    """Ends the appends of `ready`. Returns the next work."""
    for append in ready.appends:
        bench.runtime.written(append)
    return bench.poll()


@pytest.mark.parametrize("codec", list(Compression))
def test_batches_have_the_configured_codec_and_markers_none(codec: Compression) -> None:
    bench = Bench(compression=codec)
    bench.load()
    bench.run(Ledger.put, "a", 1, 1000)
    bench.run(Ledger.put_in_transaction, Producer(7, 0), "b", 2)
    bench.run(Ledger.end, Producer(7, 0), True)
    bench.written(bench.poll())
    assert codecs(bench) == [(codec, False), (codec, False), (Compression.NONE, True)]
    assert (len(bench.disk) < 800) == (codec is not Compression.NONE)
    balance = dict(bench.ledger.balance)
    again = Bench()
    again.disk = bench.disk
    again.load()
    assert again.ledger.balance == balance


@pytest.mark.parametrize("linger_ms", [1, 20])
def test_an_append_lingers_for_more_results(linger_ms: int) -> None:
    bench = Bench(linger_ms=linger_ms)
    bench.load()
    assert bench.run(Ledger.put, "a", 1) is WAIT
    assert bench.poll().appends == []
    assert bench.runtime.next_deadline_ms() == 1_000 + linger_ms
    bench.now_ms += linger_ms - 1
    bench.run(Ledger.put, "b", 2)
    assert bench.poll().appends == []
    bench.now_ms += 1
    ready = bench.poll()
    assert len(ready.appends) == 1
    assert decode_header(ready.appends[0].data).records_count == 2
    assert bench.written(ready) == [(1, "a=1"), (2, "b=2")]
    assert bench.runtime.is_idle()


def test_a_full_batch_does_not_linger() -> None:
    bench = Bench(max_batch_bytes=2000, linger_ms=20)
    bench.load()
    bench.run(Ledger.put, "a", 1, 1200)
    assert bench.poll().appends == []
    bench.run(Ledger.put, "b", 1, 1200)
    ready = bench.poll()
    assert len(ready.appends) == 1
    assert len(bench.written(ready)) == 2
    assert bench.runtime.next_deadline_ms() == 1_100, "only the ledger's own timer is left"


def test_a_result_during_an_append_lingers_from_its_own_time() -> None:
    bench = Bench(linger_ms=20)
    bench.load()
    bench.run(Ledger.put, "a", 1)
    bench.now_ms += 20
    first = bench.poll()
    bench.run(Ledger.put, "b", 1)
    bench.now_ms += 5
    assert bench.written(first) == [(1, "a=1")]
    bench.now_ms += 15
    second = bench.poll()
    bench.run(Ledger.put, "c", 1)
    bench.now_ms += 20
    assert bench.poll().appends == []
    third = completed(bench, second)
    assert bench.replies(third) == [(2, "b=1")]
    assert bench.replies(completed(bench, third)) == [(3, "c=1")]


def test_a_batch_whose_linger_ends_during_an_append_follows_it_at_once() -> None:
    bench = Bench(linger_ms=20)
    bench.load()
    bench.run(Ledger.put, "a", 1)
    bench.now_ms += 20
    first = bench.poll()
    bench.run(Ledger.put, "b", 1)
    bench.now_ms += 30
    assert bench.poll().appends == []
    assert len(completed(bench, first).appends) == 1


def test_a_shard_that_fails_while_a_batch_lingers_begins_with_an_empty_buffer() -> None:
    bench = Bench(linger_ms=20)
    bench.load()
    bench.run(Ledger.put, "a", 1)
    bench.runtime.fail_shard(SHARD, "test")
    assert bench.replies(bench.poll()) == [(1, Errors.NOT_COORDINATOR)]
    bench.load()
    bench.now_ms += 100
    assert bench.poll().appends == []
    assert bench.run(Ledger.get, "a") is None


class Heard(Waiter):
    def __init__(self) -> None:
        self.news: list[object] = []

    def settle(self) -> None:
        self.news.append("settled")

    def fail(self, error: KafkaError) -> None:
        self.news.append(error.error)


def test_a_request_that_waits_too_long_for_the_log_fails() -> None:
    bench = Bench()
    bench.load()
    bench.run(Ledger.put, "a", 1)
    ready = bench.poll()
    shard = bench.runtime.active(SHARD)
    assert shard is not None
    heard = Heard()
    assert shard.defer(heard)
    bench.runtime.expire_replies(bench.now_ms, 5_000)
    bench.now_ms += 1_000
    bench.run(Ledger.put, "b", 2)
    bench.runtime.expire_replies(bench.now_ms, 5_000)
    bench.now_ms += 3_999
    bench.runtime.expire_replies(bench.now_ms, 5_000)
    assert bench.replies(bench.poll()) == []
    bench.now_ms += 1
    bench.runtime.expire_replies(bench.now_ms, 5_000)
    late = bench.poll()
    assert bench.replies(late) == [(1, Errors.COORDINATOR_NOT_AVAILABLE)]
    assert heard.news == [Errors.COORDINATOR_NOT_AVAILABLE]
    # The append continues: its records become durable, and later requests get their responses.
    ready = completed(bench, ready)
    assert bench.replies(ready) == []
    assert bench.replies(completed(bench, ready)) == [(2, "b=2")]
    assert len(heard.news) == 1
    assert bench.ledger.balance == {"a": 1, "b": 2}


def test_a_request_that_was_answered_does_not_time_out() -> None:
    bench = Bench()
    bench.load()
    for _ in range(3):
        bench.run(Ledger.put, "a", 1)
        bench.runtime.expire_replies(bench.now_ms, 2_000)
        assert len(bench.written(bench.poll())) == 1
        bench.now_ms += 1_500
    bench.run(Ledger.put, "a", 1)
    bench.runtime.expire_replies(bench.now_ms, 2_000)
    assert bench.replies(bench.poll()) == []


def test_the_timeout_begins_again_after_a_failure() -> None:
    """The shard is loaded without the records that were not durable, so the same offsets are used again."""
    bench = Bench()
    bench.load()
    for _ in range(3):
        bench.run(Ledger.put, "a", 1)
    bench.poll()
    bench.runtime.expire_replies(bench.now_ms, 2_000)
    bench.fail_write(OSError(5, "Input/output error"))
    assert len(bench.replies(bench.poll())) == 3
    bench.load()
    bench.now_ms += 1_999
    bench.run(Ledger.put, "a", 1)
    bench.runtime.expire_replies(bench.now_ms, 2_000)
    bench.now_ms += 1
    bench.runtime.expire_replies(bench.now_ms, 2_000)
    assert bench.replies(bench.poll()) == []
    bench.now_ms += 1_999
    bench.runtime.expire_replies(bench.now_ms, 2_000)
    assert bench.replies(bench.poll()) == [(4, Errors.COORDINATOR_NOT_AVAILABLE)]


def test_a_refusal_fails_its_waiter_too() -> None:
    heard = Heard()
    refusal = Refusal(heard, KafkaError(Errors.COORDINATOR_NOT_AVAILABLE))
    refusal.fail(KafkaError(Errors.NOT_COORDINATOR))
    refusal.settle()
    assert heard.news == [Errors.NOT_COORDINATOR, Errors.COORDINATOR_NOT_AVAILABLE]


def test_packed_results_fill_a_batch_to_the_last_byte() -> None:
    """Results whose sizes are only bounded behave likewise: two fit if both bounds fit."""
    pair = SERDE.serialize(entry("a", 1))
    bound_bytes = BATCH_OVERHEAD_BYTES + 2 * size_bound_bytes([pair])
    exact_bytes = len(encode_batch_from_parts([pair, pair], timestamp_ms=0))
    for limit, batches in ((bound_bytes, [2]), (bound_bytes - 1, [1, 1])):
        assert batch_sizes(limit, lambda bench: bench.run(Ledger.put, "a", 1)) == batches
    for limit, batches in ((exact_bytes, [2]), (exact_bytes - 1, [1, 1])):
        assert batch_sizes(limit, lambda bench: append_packed(bench, PackedPut(bench.ledger))) == batches
    alone_bytes = len(encode_batch_from_parts([pair], timestamp_ms=0))
    for limit, batches in ((alone_bytes, [1, 1]), (alone_bytes - 1, [])):
        assert batch_sizes(limit, lambda bench: append_packed(bench, PackedPut(bench.ledger))) == batches


def batch_sizes(max_batch_bytes: int, put: Callable[[Bench], object]) -> list[int]:
    """Returns the number of records of every batch after two results."""
    bench = Bench(max_batch_bytes)
    bench.load()
    put(bench)
    put(bench)
    bench.written(bench.poll())
    return [header.records_count for header, _ in bench.batches()]


def append_packed(bench: Bench, packed: PackedPut) -> tuple[bool, Heard]:
    shard = bench.runtime.active(SHARD)
    assert shard is not None
    heard = Heard()
    return shard.append_packed(packed, heard), heard


class PackedPut:
    """`Ledger.put` of a=1 as a packed result."""

    count = 1
    timestamp_ms = 5

    def __init__(self, ledger: Ledger, timer: Schedule | None = None) -> None:
        self.timer = timer
        self._ledger = ledger

    def encode_records(self, first_delta: int) -> bytes:
        return encode_records([SERDE.serialize(entry("a", 1))], first_delta)

    def replay(self) -> None:
        self._ledger.replay(entry("a", 1))


def test_a_packed_result_arms_its_timer_and_fails_its_shard_if_it_cannot_be_replayed() -> None:
    bench = Bench()
    bench.load()
    key = TimerKey(LedgerTimer.WORK, "packed")
    assert append_packed(bench, PackedPut(bench.ledger, Schedule(key, 1_050)))[0]
    assert bench.runtime.next_deadline_ms() == 1_050
    bench.ledger.fail_replay = True
    has_happened, heard = append_packed(bench, PackedPut(bench.ledger))
    assert has_happened
    assert bench.runtime.state(SHARD) is ShardState.FAILED
    bench.replies(bench.poll())
    assert heard.news == [Errors.NOT_COORDINATOR]
    assert bench.runtime.next_deadline_ms() == 2_000, "only the timer of the next load is left"
