# SPDX-License-Identifier: Apache-2.0
"""Which offsets of transactions count."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from kcoord.logtools.transactions import TransactionCounts, TransactionResolver
from protocol.record_batch import ControlRecordType, Record, encode_batch, encode_control_batch, end_txn_marker
from tests.unit.logtools.support import NOW_MS


class Script:
    """Batches with the offsets that they would have in one log."""

    def __init__(self) -> None:
        self.batches: list[bytes] = []
        self._next_offset = 0

    def write(self, key: str, value: str | None, producer_id: int = -1) -> None:
        record = Record(key.encode(), None if value is None else value.encode(), timestamp_ms=NOW_MS)
        self._add(
            encode_batch(
                [record],
                base_offset=self._next_offset,
                producer_id=producer_id,
                producer_epoch=0 if producer_id >= 0 else -1,
                is_transactional=producer_id >= 0,
            )
        )

    def end(self, producer_id: int, kind: ControlRecordType) -> None:
        marker = end_txn_marker(0)
        self._add(
            encode_control_batch(
                kind, marker, timestamp_ms=NOW_MS + 5, producer_id=producer_id, base_offset=self._next_offset
            )
        )

    def commit(self, producer_id: int) -> None:
        self.end(producer_id, ControlRecordType.COMMIT)

    def abort(self, producer_id: int) -> None:
        self.end(producer_id, ControlRecordType.ABORT)

    def _add(self, batch: bytes) -> None:
        self.batches.append(batch)
        self._next_offset += 1


def resolve(batches: Iterable[bytes], prepared: Collection[int] = ()) -> tuple[list[str], TransactionCounts]:
    resolver = TransactionResolver(prepared)
    records = [record for batch in batches for record in resolver.feed(batch)]
    records += resolver.finish()
    return [f"{(one.key or b'').decode()}={(one.value or b'-').decode()}" for one in records], resolver.counts


def test_a_record_counts_from_its_commit_on() -> None:
    script = Script()
    script.write("a", "1", producer_id=7)
    script.write("b", "2")
    script.commit(7)
    assert resolve(script.batches) == (["b=2", "a=1"], TransactionCounts(committed=1))


def test_its_time_is_that_of_the_marker() -> None:
    script = Script()
    script.write("a", "1", producer_id=7)
    script.commit(7)
    resolver = TransactionResolver()
    (record,) = (record for batch in script.batches for record in resolver.feed(batch))
    assert (record.offset, record.timestamp_ms) == (0, NOW_MS + 5)


def test_aborted_and_undecided_records_never_count() -> None:
    script = Script()
    script.write("a", "1", producer_id=7)
    script.write("a", "2", producer_id=8)
    script.abort(7)
    assert resolve(script.batches) == ([], TransactionCounts(aborted=1, pending=1))


def test_only_the_last_record_of_a_key_in_a_transaction_counts() -> None:
    script = Script()
    script.write("a", "1", producer_id=7)
    script.write("a", "2", producer_id=7)
    script.commit(7)
    assert resolve(script.batches)[0] == ["a=2"]


def test_a_later_record_of_the_same_key_wins_over_the_commit() -> None:
    script = Script()
    script.write("a", "old", producer_id=7)
    script.write("a", "new")
    script.commit(7)
    assert resolve(script.batches)[0] == ["a=new"]


def test_of_two_transactions_the_later_record_wins_whatever_the_order_of_the_markers() -> None:
    script = Script()
    script.write("a", "old", producer_id=7)
    script.write("a", "new", producer_id=8)
    script.commit(8)
    script.commit(7)
    assert resolve(script.batches)[0] == ["a=new"]


def test_a_tombstone_does_not_stop_a_transaction() -> None:
    script = Script()
    script.write("a", "1", producer_id=7)
    script.write("a", None)
    script.commit(7)
    assert resolve(script.batches)[0] == ["a=-", "a=1"]


def test_a_prepared_transaction_counts_without_its_marker() -> None:
    script = Script()
    script.write("a", "1", producer_id=7)
    script.write("b", "2", producer_id=8)
    assert resolve(script.batches, prepared={7}) == (["a=1"], TransactionCounts(committed=1, pending=1))


def test_a_producer_that_goes_on_begins_a_new_transaction() -> None:
    script = Script()
    script.write("a", "1", producer_id=7)
    script.abort(7)
    script.write("b", "2", producer_id=7)
    script.commit(7)
    assert resolve(script.batches)[0] == ["b=2"]
