# SPDX-License-Identifier: Apache-2.0
"""How a shard writes: the codec, how long a write waits for others, and who does not wait for the disk any longer."""

from __future__ import annotations

import pytest

from kcoord.runtime.result import Producer
from kcoord.runtime.waiting import Ready, Waiter
from kcoord_protocol.compression import Compression
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.record_batch import decode_header

from .ledger import SHARD, WAIT, Bench, Ledger


def codecs(bench: Bench) -> list[tuple[Compression, bool]]:
    """Codec of each batch in the log, and whether it is a marker."""
    return [(header.compression, header.is_control) for header, _ in bench.batches()]


def completed(bench: Bench, ready: Ready) -> Ready:
    """The writes of `ready` end; what there is to do next."""
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


def test_a_write_lingers_for_others_to_join_it() -> None:
    bench = Bench(linger_ms=20)
    bench.load()
    assert bench.run(Ledger.put, "a", 1) is WAIT
    assert bench.poll().appends == []
    assert bench.runtime.next_deadline_ms() == 1_020
    bench.now_ms += 19
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


def test_what_comes_during_a_write_lingers_from_its_own_time() -> None:
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


def test_a_write_whose_linger_ended_during_another_one_follows_it_at_once() -> None:
    bench = Bench(linger_ms=20)
    bench.load()
    bench.run(Ledger.put, "a", 1)
    bench.now_ms += 20
    first = bench.poll()
    bench.run(Ledger.put, "b", 1)
    bench.now_ms += 30
    assert bench.poll().appends == []
    assert len(completed(bench, first).appends) == 1


def test_a_shard_that_fails_while_a_write_lingers_starts_anew() -> None:
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


def test_who_waits_too_long_for_the_disk_is_told_so() -> None:
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
    # The write goes on: what it holds has happened, and who came later is answered.
    ready = completed(bench, ready)
    assert bench.replies(ready) == []
    assert bench.replies(completed(bench, ready)) == [(2, "b=2")]
    assert len(heard.news) == 1
    assert bench.ledger.balance == {"a": 1, "b": 2}


def test_nobody_is_told_of_a_wait_that_is_over() -> None:
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
