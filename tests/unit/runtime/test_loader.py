# SPDX-License-Identifier: Apache-2.0
"""A shard is rebuilt from its log."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from kcoord.runtime.loader import Loader, LoadError
from kcoord.runtime.result import Producer
from kcoord.runtime.serde import CoordinatorSerde
from kcoord.runtime.shard_log import OpenedLog
from kcoord.runtime.upstream_reader import UpstreamReader
from kcoord.runtime.waiting import ShardState, Statistics
from kcoord_protocol.compression import Compression
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.record_batch import Record, decode_header, encode_batch, encode_batch_from_parts
from tests.unit.runtime.ledger import SHARD, WAIT, Bench, Ledger, entry

UNKNOWN_TYPE = b"\x00\x63what", b"\x00\x00value"
UNKNOWN_VERSION = b"\x00\x01" + b"\0\0\0\0\0\0\0\0", b"\x00\x63"


def batch(base_offset: int, *pairs: tuple[bytes | None, bytes | None], is_control: bool = False) -> bytes:
    return encode_batch(
        [Record(key, value, timestamp_ms=0) for key, value in pairs], base_offset=base_offset, is_control=is_control
    )


def written(name: str, value: int) -> tuple[bytes | None, bytes | None]:
    return CoordinatorSerde().serialize(entry(name, value))


def test_live_state_is_the_state_of_the_log() -> None:
    bench = Bench()
    bench.load()
    for i in range(10):
        bench.run(Ledger.put, f"n{i % 4}", i)
        if i % 3 == 0:
            bench.written(bench.poll())
    bench.written(bench.poll())
    live = bench.ledger
    bench.runtime.close_shard(SHARD)
    bench.now_ms = 5_000
    bench.load()
    assert bench.ledger is not live
    assert bench.ledger.balance == live.balance
    assert bench.ledger.loaded_at_ms == 5_000
    assert bench.runtime.offsets(SHARD) == (10, 10)


def test_loading_goes_in_slices() -> None:
    bench = Bench()
    bench.disk = b"".join(batch(i, written("a", i)) for i in range(5))
    bench.runtime.claim([SHARD])
    (load,) = bench.poll().opens
    bench.runtime.opened(load, OpenedLog(0, 5))
    for number, batch_of_log in enumerate(bench.batches()):
        assert error_of(bench, Ledger.get, "a") is Errors.COORDINATOR_LOAD_IN_PROGRESS
        assert bench.poll().reads == [load]
        assert load.offset == number
        bench.runtime.read(load, [batch_of_log], bench.now_ms, is_end=number == 4)
    assert bench.poll().active == [load]
    assert bench.run(Ledger.get, "a") == 4


def error_of(bench: Bench, *call: object) -> Errors:
    with pytest.raises(KafkaError) as caught:
        bench.run(*call)  # type: ignore[arg-type]
    return caught.value.error


def test_unknown_records_are_counted_logged_once_and_skipped(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.disk = batch(0, UNKNOWN_TYPE, written("a", 1), UNKNOWN_VERSION, UNKNOWN_TYPE, (None, b"no key"))
    with caplog.at_level(logging.WARNING):
        bench.load()
    assert bench.ledger.balance == {"a": 1}
    assert bench.runtime.statistics.records_skipped == 4
    assert [record.args[0] for record in caplog.records if isinstance(record.args, tuple)] == [
        "record type 99, version 0",
        "record type 1, version 99",
        "a record without a key",
    ]


@pytest.mark.parametrize(
    ("unknown", "name"), [(UNKNOWN_TYPE, "record type 99, version 0"), (UNKNOWN_VERSION, "record type 1, version 99")]
)
def test_a_standby_skips_no_unknown_record(unknown: tuple[bytes, bytes], name: str) -> None:
    standby = Bench().runtime.stand_by(SHARD, UpstreamReader(0))
    data = batch(0, written("a", 1), unknown)
    with pytest.raises(LoadError, match=f"{name}: a later release has written it"):
        standby.fetched(0, data, 2, 0)


def test_control_batches_that_end_no_transaction_are_skipped() -> None:
    bench = Bench()
    bench.disk = batch(0, written("a", 1)) + batch(1, (b"\0\0\0\2", b"\0\0\0\0\0\0"), is_control=True)
    bench.load()
    assert bench.ledger.balance == {"a": 1}
    assert bench.runtime.offsets(SHARD) == (2, 2)
    assert bench.runtime.statistics.records_skipped == 0


def test_the_end_of_the_log_may_be_after_its_last_batch() -> None:
    bench = Bench()
    bench.disk = batch(4, written("a", 1))
    bench.runtime.load(SHARD, bench.batches(), bench.now_ms, 9)
    assert bench.run(Ledger.put, "a", 2) is WAIT
    assert bench.poll().appends[0].base_offset == 9


@pytest.mark.parametrize("damaged", [(b"\x00", b""), (b"\x00\x01\x00", b"\x00\x03"), (b"\x00\x01\x00\x00", b"\x00")])
def test_a_malformed_record_fails_the_load_and_is_named(damaged: tuple[bytes, bytes]) -> None:
    bench = Bench()
    bench.disk = batch(7, written("a", 1), damaged)
    with pytest.raises(LoadError, match=r"shard 3: the record at offset 8"):
        bench.load()
    assert bench.runtime.state(SHARD) is ShardState.FAILED
    assert bench.poll().closes == ()


def test_the_outcome_of_a_dropped_load_changes_nothing() -> None:
    bench = Bench()
    bench.disk = batch(0, written("a", 1))
    bench.runtime.claim([SHARD])
    (overtaken,) = bench.poll().opens
    bench.load()
    bench.runtime.opened(overtaken, OpenedLog(0, 9))
    bench.runtime.read(overtaken, [], bench.now_ms, is_end=True)
    assert not bench.poll().active
    assert bench.run(Ledger.get, "a") == 1
    assert bench.runtime.offsets(SHARD) == (1, 1)


@pytest.mark.parametrize("error", [AssertionError("broken"), KeyError("oops"), KafkaError(Errors.MESSAGE_TOO_LARGE)])
def test_a_state_that_cannot_be_started_fails_the_load(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def refuse(ledger: Ledger, context: object) -> None:
        raise error

    monkeypatch.setattr(Ledger, "on_loaded", refuse)
    bench = Bench()
    with pytest.raises(LoadError):
        bench.load()
    assert bench.runtime.state(SHARD) is ShardState.FAILED
    assert bench.runtime.next_deadline_ms() is None
    assert bench.poll().closes == ()


class QuickLedger(Ledger):
    """Replays the batches that it is offered, and counts their records."""

    def __init__(self) -> None:
        super().__init__()
        self.offered: list[int] = []
        self.is_quick = True

    def batch_replay(self) -> Callable[[bytes, int], bool]:
        def replay(batch: bytes, count: int) -> bool:
            self.offered.append(count)
            return self.is_quick

        return replay


@pytest.mark.parametrize("is_quick", [True, False])
def test_only_plain_batches_are_offered_for_batch_replay(is_quick: bool) -> None:
    pair = written("a", 1)
    plain = batch(0, pair, pair, pair)
    machine = QuickLedger()
    machine.is_quick = is_quick
    statistics = Statistics()
    loader = Loader(SHARD, machine, CoordinatorSerde(), 0, statistics, set())
    loader.replay(
        (decode_header(data), data)
        for data in (
            plain,
            encode_batch_from_parts([pair], base_offset=3, timestamp_ms=0, compression=Compression.GZIP),
            encode_batch_from_parts(
                [pair], base_offset=4, timestamp_ms=0, producer_id=7, producer_epoch=0, is_transactional=True
            ),
            batch(5, (b"\0\0\0\2", b"\0\0\0\0\0\0"), is_control=True),
        )
    )
    assert machine.offered == [3]
    assert machine.balance == {"a": 1}, "of the compressed batch"
    assert machine.pending == {Producer(7, 0): {"a": 1}}
    assert (statistics.records_loaded, loader.next_offset) == (6, 6)
