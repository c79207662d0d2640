# SPDX-License-Identifier: Apache-2.0
"""Which of the offsets that are committed in transactions count."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from hypothesis import given

from kcoord.logtools.decode import group_id_of
from kcoord.logtools.transactions import TransactionCounts, TransactionResolver
from kcoord.runtime.serde import CoordinatorSerde
from kcoord_protocol.messages import OffsetCommitKey, OffsetCommitValue
from kcoord_protocol.record_batch import ControlRecordType, Record, encode_batch, encode_control_batch, end_txn_marker
from tests.support.coordinator_log import OffsetOf, Step, batches_of, logs, offsets_of, replayed
from tests.unit.logtools.support import NOW_MS


class Script:
    """Builds the batches of one log, with consecutive offsets."""

    def __init__(self) -> None:
        self.batches: list[bytes] = []
        self._next_offset = 0

    def write(self, name: str, value: str | None, producer_id: int = -1, key_type: int = 1) -> None:
        """Appends a committed offset of the group `name`. The value is a text here."""
        key = key_type.to_bytes(2, "big") + OffsetCommitKey(group=name, topic="t", partition=0).encode(0)
        record = Record(key, None if value is None else value.encode(), timestamp_ms=NOW_MS)
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
    return [f"{group_id_of(record.key)}={(record.value or b'-').decode()}" for record in records], resolver.counts


def test_a_pending_record_counts_from_the_commit_marker_on() -> None:
    script = Script()
    script.write("a", "1", producer_id=7)
    script.write("b", "2")
    script.commit(7)
    assert resolve(script.batches) == (["b=2", "a=1"], TransactionCounts(committed=1))


def test_a_pending_record_gets_the_timestamp_of_the_marker() -> None:
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


def test_a_tombstone_deletes_the_pending_records_of_its_key() -> None:
    script = Script()
    script.write("a", "1", producer_id=7)
    script.write("b", "1", producer_id=7)
    script.write("a", "2", producer_id=8)
    script.write("a", None)
    script.commit(7)
    script.write("a", "3", producer_id=8)
    script.commit(8)
    assert resolve(script.batches) == (["a=-", "b=1", "a=3"], TransactionCounts(committed=2))


def test_a_tombstone_counts_at_once_in_a_transaction_too() -> None:
    script = Script()
    script.write("a", "1")
    script.write("a", None, producer_id=7)
    script.abort(7)
    assert resolve(script.batches)[0] == ["a=1", "a=-"]


def test_old_and_new_keys_of_offset_commits_are_the_same_key() -> None:
    script = Script()
    script.write("a", "old", producer_id=7)
    script.write("a", "new", key_type=0)
    script.commit(7)
    assert resolve(script.batches)[0] == ["a=new"]


def test_other_records_than_offset_commits_count_at_once() -> None:
    script = Script()
    script.write("a", "1", producer_id=7, key_type=3)
    script.abort(7)
    assert resolve(script.batches) == (["a=1"], TransactionCounts())


@given(steps=logs(oddities=True))
def test_the_records_that_count_are_those_that_the_coordinator_applies(steps: list[Step]) -> None:
    """The reference is the load of a broker's shard, not another tool."""
    batches = batches_of(steps)
    shard = replayed(batches)
    serde = CoordinatorSerde()
    offsets: dict[OffsetOf, int] = {}
    resolver = TransactionResolver()
    for record in (record for batch in batches for record in resolver.feed(batch)):
        decoded = serde.deserialize(record.key, record.value)
        if decoded is not None and isinstance(decoded.key, OffsetCommitKey):
            key = decoded.key.group, decoded.key.topic, decoded.key.partition
            offsets.pop(key, None)
            if isinstance(decoded.value, OffsetCommitValue):
                offsets[key] = decoded.value.offset
    assert offsets == offsets_of(shard)


def test_a_prepared_transaction_counts_without_its_marker() -> None:
    script = Script()
    script.write("a", "1", producer_id=7)
    script.write("b", "2", producer_id=8)
    assert resolve(script.batches, prepared={7}) == (["a=1"], TransactionCounts(committed=1, pending=1))


def test_a_record_after_the_marker_begins_a_new_transaction() -> None:
    script = Script()
    script.write("a", "1", producer_id=7)
    script.abort(7)
    script.write("b", "2", producer_id=7)
    script.commit(7)
    assert resolve(script.batches)[0] == ["b=2"]
