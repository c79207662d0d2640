# SPDX-License-Identifier: Apache-2.0
"""Which batches of a partition count: claims, transactions, markers and void batches, one by one."""

from __future__ import annotations

import pytest

from kcoord.runtime.upstream_batches import CLAIM_KEY, MOST_CLAIMS, SETTLED_KEY, Kind, claim_key, with_writer
from kcoord.runtime.upstream_reader import LogMark, LogNote, UpstreamReader
from kcoord_protocol.batch_header import rewrite_header
from kcoord_protocol.compression import Compression
from kcoord_protocol.control_records import ControlRecordType, end_txn_marker
from kcoord_protocol.errors import CorruptBatchError
from kcoord_protocol.record_batch import (
    Record,
    decode_entries,
    decode_header,
    decode_records,
    encode_batch,
    encode_batch_from_parts,
    encode_control_batch,
)

FIRST, SECOND, THIRD = (7, 0), (7, 1), (7, 2)
"""The claims of owners."""
CLIENT = 500
DAY_MS = 24 * 3_600_000


class Log:
    """A partition that is read as it is written."""

    def __init__(self) -> None:
        self.reader = UpstreamReader(0)
        self.end_offset = 0
        self.now_ms = 1_000

    def add(self, data: bytes) -> Kind:
        batch = bytearray(data)
        rewrite_header(batch, base_offset=self.end_offset, log_append_time_ms=self.now_ms)
        (read,) = self.reader.read(bytes(batch), self.now_ms)
        self.end_offset = read.header.next_offset
        assert self.reader.position == self.end_offset
        return read.kind

    def own(self, claim: tuple[int, int], *keys: bytes) -> Kind:
        return self.add(
            encode_batch_from_parts([(key, b"v") for key in keys], 1, producer_id=claim[0], producer_epoch=claim[1])
        )

    def claim(self, claim: tuple[int, int]) -> Kind:
        return self.own(claim, claim_key(claim))

    def offsets(self, claim: tuple[int, int], *keys: bytes, read: int | None = None, sequence: int = 0) -> Kind:
        """Adds a transactional batch of the client, written under a claim, up to now read up to `read`."""
        data = encode_batch_from_parts(
            [(key, b"v") for key in keys], 1, producer_id=CLIENT, producer_epoch=0, is_transactional=True
        )
        return self.add(with_writer(data, claim, self.end_offset if read is None else read, sequence))

    def end(self, kind: ControlRecordType = ControlRecordType.COMMIT, *, epoch: int = 0) -> Kind:
        return self.add(
            encode_control_batch(kind, end_txn_marker(3), timestamp_ms=1, producer_id=CLIENT, producer_epoch=epoch)
        )


@pytest.fixture
def log() -> Log:
    log = Log()
    assert log.claim(FIRST) is Kind.CLAIM
    return log


def test_kinds(log: Log) -> None:
    assert log.own(FIRST, SETTLED_KEY) is Kind.SETTLED
    assert log.reader.settled_id == FIRST[0]
    assert log.own(FIRST, b"a", b"b") is Kind.RECORDS
    assert log.offsets(FIRST, b"a") is Kind.TRANSACTIONAL
    assert log.end() is Kind.MARKER
    assert log.add(encode_batch([], last_offset=0, producer_id=7, producer_epoch=0, base_sequence=3)) is Kind.EMPTY
    leader_change = encode_control_batch(ControlRecordType.LEADER_CHANGE, b"", timestamp_ms=1)
    assert log.add(leader_change) is Kind.EMPTY


def test_the_header_of_the_writer_is_in_each_record_and_nothing_else_changes() -> None:
    data = encode_batch_from_parts(
        [(b"a", b"1"), (b"b", None)],
        9,
        40,
        producer_id=5,
        producer_epoch=2,
        is_transactional=True,
        compression=Compression.GZIP,
    )
    sent = with_writer(data, (7, 1), 33, 12)
    header = decode_header(sent)
    assert (header.producer_id, header.producer_epoch, header.base_sequence, header.base_offset) == (5, 2, 12, 0)
    assert header.is_transactional and header.compression is Compression.GZIP
    assert [entry[1:] for entry in decode_entries(sent)] == [(b"a", b"1"), (b"b", None)]
    value = b"\0\0\0\0\0\0\0\x07\0\x01\0\0\0\0\0\0\0\x21"
    assert [record.headers for record in decode_records(sent)] == [[("kcoord.writer", value)]] * 2
    assert {record.timestamp_ms for record in decode_records(sent)} == {9}


def test_a_batch_of_an_earlier_owner_is_void(log: Log) -> None:
    log.claim(SECOND)
    assert log.offsets(FIRST, b"a") is Kind.VOID
    assert log.offsets(SECOND, b"a", sequence=1) is Kind.TRANSACTIONAL


def test_every_batch_of_an_owner_tells_who_owns_the_log(log: Log) -> None:
    """Compaction may have removed the claim."""
    log.own(SECOND, b"a")
    assert log.offsets(FIRST, b"a") is Kind.VOID


def test_a_batch_without_a_writer_is_void(log: Log) -> None:
    variants: list[list[tuple[str, bytes | None]]] = [[], [("kcoord.writer", b"short")], [("other", b"")]]
    for headers in variants:
        data = encode_batch(
            [Record(b"a", b"v", headers, 1)], producer_id=CLIENT, producer_epoch=0, is_transactional=True
        )
        assert log.add(data) is Kind.VOID


def test_all_batches_with_a_claim_count_before_the_first_claim_that_is_left() -> None:
    log = Log()
    assert log.offsets(FIRST, b"a") is Kind.TRANSACTIONAL
    assert log.offsets(SECOND, b"a", sequence=1) is Kind.TRANSACTIONAL


def test_a_batch_whose_claim_was_compacted_counts(log: Log) -> None:
    """All claims have one key. Batches of an earlier owner may be left before those of one whose claim is gone."""
    log.own(FIRST, b"b")
    assert log.offsets(SECOND, b"a") is Kind.TRANSACTIONAL
    assert log.end() is Kind.MARKER
    assert log.offsets(FIRST, b"a", sequence=1) is Kind.VOID, "its writer had lost the shard before the last batch"
    log.end()
    assert log.offsets((8, 0), b"a", sequence=2) is Kind.TRANSACTIONAL, "an owner with another producer id"


def to_delete(log: Log) -> tuple[int, int] | None:
    return log.reader.batches.to_delete


def test_the_oldest_claim_is_deleted_if_there_are_many_and_no_void_batch_waits(log: Log) -> None:
    for epoch in range(1, MOST_CLAIMS):
        log.claim((7, epoch))
    assert to_delete(log) is None
    log.claim((7, MOST_CLAIMS))
    assert to_delete(log) == FIRST
    assert log.offsets(FIRST, b"a") is Kind.VOID
    assert to_delete(log) is None, "the claim that makes the batch void is needed"
    log.end()
    assert to_delete(log) is None, "the value has to be written again first"
    log.own((7, MOST_CLAIMS), b"a")
    assert to_delete(log) == FIRST
    tombstone = encode_batch_from_parts([(claim_key(FIRST), None)], 1, producer_id=7, producer_epoch=MOST_CLAIMS)
    assert log.add(tombstone) is Kind.DELETED_CLAIM
    assert to_delete(log) is None


def test_a_claim_with_a_malformed_key_is_corrupt(log: Log) -> None:
    with pytest.raises(CorruptBatchError, match="a claim has the key 7530"):
        log.own(FIRST, CLAIM_KEY)


def test_batches_of_an_earlier_producer_id_are_void(log: Log) -> None:
    log.claim((8, 0))
    assert log.offsets(SECOND, b"a") is Kind.VOID
    log.end()
    log.own((6, 0), b"b")
    assert log.offsets((8, 0), b"a", sequence=1) is Kind.VOID
    assert log.offsets((6, 0), b"a", sequence=2) is Kind.TRANSACTIONAL


def test_a_batch_that_arrives_after_a_marker_that_its_writer_had_not_read_is_void(log: Log) -> None:
    log.offsets(FIRST, b"a")
    before = log.end_offset
    log.end(ControlRecordType.ABORT)
    assert log.offsets(FIRST, b"a", read=before, sequence=1) is Kind.VOID
    assert log.offsets(FIRST, b"a", sequence=2) is Kind.TRANSACTIONAL


def test_keys_of_void_batches_are_to_be_rewritten_after_a_commit(log: Log) -> None:
    log.claim(SECOND)
    log.offsets(FIRST, b"a", b"b", b"c")
    log.offsets(SECOND, b"d", sequence=3)
    assert log.reader.batches.to_rewrite == set()
    log.end()
    assert log.reader.batches.to_rewrite == {b"a", b"b", b"c"}
    log.own(SECOND, b"a", b"x")
    assert log.reader.batches.to_rewrite == {b"b", b"c"}
    log.reader.batches.written(encode_batch_from_parts([(b"b", b"v"), (b"y", b"v")], 1))
    assert log.reader.batches.to_rewrite == {b"c"}
    log.offsets(SECOND, b"c", sequence=4)
    log.end()
    assert log.reader.batches.to_rewrite == {b"c"}, "readers may take the void record for the later one"


def test_keys_of_void_batches_are_forgotten_after_an_abort(log: Log) -> None:
    log.claim(SECOND)
    log.offsets(FIRST, b"a")
    log.end(ControlRecordType.ABORT)
    log.end()
    assert log.reader.batches.to_rewrite == set()


def test_open_transactions(log: Log) -> None:
    log.offsets(FIRST, b"a")
    assert log.reader.batches.open == {CLIENT}
    log.end()
    assert log.reader.batches.open == set()


def test_sequence_numbers_continue_after_all_batches_and_begin_again_with_an_epoch(log: Log) -> None:
    reader = log.reader.batches
    assert reader.next_sequence(CLIENT, 0) == 0
    log.offsets(FIRST, b"a", b"b", sequence=0)
    assert reader.next_sequence(CLIENT, 0) == 2
    log.claim(SECOND)
    log.offsets(FIRST, b"a", sequence=2)
    assert reader.next_sequence(CLIENT, 0) == 3, "the leader counts void batches, too"
    log.end()
    assert reader.next_sequence(CLIENT, 0) == 3
    log.offsets(SECOND, b"a", sequence=0x7FFF_FFFF)
    assert reader.next_sequence(CLIENT, 0) == 0
    log.end(ControlRecordType.ABORT, epoch=1)
    assert (reader.next_sequence(CLIENT, 1), reader.next_sequence(CLIENT, 0)) == (0, 0)
    log.add(encode_batch([], last_offset=2, producer_id=9, producer_epoch=4, base_sequence=5, is_transactional=True))
    assert reader.next_sequence(9, 4) == 8, "compaction keeps the header of the last batch"


def test_producers_that_brokers_have_forgotten_are_forgotten(log: Log) -> None:
    log.offsets(FIRST, b"a")
    log.now_ms += 9 * DAY_MS
    log.add(
        encode_control_batch(
            ControlRecordType.ABORT, end_txn_marker(0), timestamp_ms=1, producer_id=6, producer_epoch=0
        )
    )
    assert list(log.reader.batches._clients) == [6]


def test_a_marker_tells_outcome_and_epoch_of_the_coordinator() -> None:
    marker = encode_control_batch(
        ControlRecordType.ABORT, end_txn_marker(3), timestamp_ms=1, producer_id=5, producer_epoch=2
    )
    (read,) = UpstreamReader(0).read(marker, 0)
    assert read.marker() == (False, 3)
    assert read.producer == (5, 2)


def noted(log: Log) -> LogNote:
    note = log.reader.note()
    assert note is not None
    return note


def restored(log: Log, note: LogNote) -> UpstreamReader:
    mark = log.reader.mark(note)
    assert mark is not None
    return UpstreamReader.restored(LogMark.decode(mark.encode()), DAY_MS)


def test_a_snapshot_has_the_sequence_numbers_of_clients(log: Log) -> None:
    log.offsets(FIRST, b"a", b"b")
    assert log.reader.note() is None, "a transaction is open"
    log.end()
    assert restored(log, noted(log)).batches.next_sequence(CLIENT, 0) == 2


def test_a_snapshot_has_what_was_known_at_its_beginning(log: Log) -> None:
    note = noted(log)
    log.offsets(FIRST, b"a", b"b")
    log.end()
    assert restored(log, note).batches.next_sequence(CLIENT, 0) == 0, "the batches are read again"


def test_a_snapshot_has_the_claims_of_the_log(log: Log) -> None:
    for epoch in range(1, MOST_CLAIMS + 1):
        log.claim((7, epoch))
    assert restored(log, noted(log)).batches.to_delete == FIRST


def test_a_snapshot_waits_until_values_are_rewritten(log: Log) -> None:
    log.claim(SECOND)
    log.offsets(FIRST, b"a")
    log.end()
    assert log.reader.note() is None
    log.own(SECOND, b"a")
    assert log.reader.note() is not None


@pytest.mark.parametrize(("writer", "kind"), [(FIRST, Kind.VOID), (SECOND, Kind.TRANSACTIONAL)])
def test_after_a_snapshot_batches_of_the_owner_of_that_time_still_count(
    log: Log, writer: tuple[int, int], kind: Kind
) -> None:
    """The log is read again from the beginning of the snapshot, before the last claim that the snapshot has."""
    log.claim(SECOND)
    note = noted(log)
    log.offsets(SECOND, b"a")
    log.end()
    log.claim(THIRD)
    again = Log()
    again.reader.batches = restored(log, note).batches
    again.reader.position = again.end_offset = note.position
    assert again.offsets(writer, b"a") is kind


def test_a_mark_with_half_a_client_is_refused(log: Log) -> None:
    log.end()
    mark = log.reader.mark(noted(log))
    assert mark is not None
    with pytest.raises(ValueError, match="malformed"):
        LogMark.decode(mark.encode()[:-1])
