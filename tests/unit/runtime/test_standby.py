# SPDX-License-Identifier: Apache-2.0
"""The edges of a standby and its reader, one by one."""

from __future__ import annotations

import pytest

from kcoord.runtime.loader import Loader
from kcoord.runtime.serde import CoordinatorSerde
from kcoord.runtime.standby import Standby
from kcoord.runtime.upstream_batches import SETTLED_KEY
from kcoord.runtime.upstream_reader import DivergedError, LogMark, LogNote, UpstreamReader
from kcoord.runtime.waiting import Statistics
from kcoord.simulation.upstream.partition import ModelPartition
from kcoord_protocol.batch_header import ATTRIBUTES_POSITION
from kcoord_protocol.errors import CorruptBatchError
from kcoord_protocol.record_batch import crc32c, decode_header, encode_batch_from_parts
from tests.unit.runtime.upstream_walk import Numbers

KEPT_MS = 1_000
FIRST = 1000
CRC = slice(17, 21)
LAST_OFFSET_DELTA = 26
"""The last byte of that field of a batch header."""


class Desk:
    """A partition, and a standby that fetches when the test says so."""

    def __init__(self) -> None:
        self.now_ms = 0
        self.partition = ModelPartition()
        self.sequences: dict[int, int] = {}
        self.stand_by(UpstreamReader(self.now_ms, KEPT_MS))

    def stand_by(self, reader: UpstreamReader, state: dict[bytes, int] | None = None) -> None:
        machine = Numbers()
        machine.state.update(state or {})
        loader = Loader(0, machine, CoordinatorSerde(), 0, Statistics(), set())
        loader.read_offset = reader.position
        self.standby = Standby(0, loader, reader)

    @property
    def state(self) -> dict[bytes, int]:
        return self.standby.loader.machine.state

    def put(self, name: bytes, value: int, producer_id: int = FIRST) -> None:
        sequence = self.sequences.get(producer_id, 0)
        self.sequences[producer_id] = sequence + 1
        self.partition.append(
            encode_batch_from_parts(
                [(name, b"%d" % value)], 1, producer_id=producer_id, producer_epoch=0, base_sequence=sequence
            )
        )
        self.partition.replicate()

    def fetch(self) -> None:
        """Fetches once: at most two batches."""
        offset = self.standby.reader.fetch_offset
        self.standby.fetched(offset, self.partition.fetch(offset), self.partition.high_watermark, self.now_ms)

    def fetch_all(self) -> None:
        while self.standby.lag != 0:
            self.fetch()

    def note(self) -> LogNote:
        note = self.standby.reader.note()
        assert note is not None
        return note

    def mark(self, note: LogNote | None = None) -> LogMark:
        """Returns the mark of a snapshot that ends now. Without a note it also begins now."""
        mark = self.standby.reader.mark(note or self.note())
        assert mark is not None
        return mark


@pytest.fixture
def desk() -> Desk:
    """A standby that has read three batches."""
    desk = Desk()
    for value in (1, 2, 3):
        desk.put(b"a", value)
    desk.fetch_all()
    assert desk.state == {b"a": 3}
    return desk


def test_the_lag_is_unknown_before_the_first_fetch_and_after_a_failure() -> None:
    desk = Desk()
    lags = [desk.standby.lag]
    for value in range(5):
        desk.put(b"a", value)
    desk.fetch()
    lags.append(desk.standby.lag)
    desk.standby.failed()
    lags.append(desk.standby.lag)
    desk.fetch_all()
    assert lags == [None, 3, None]
    assert desk.state == {b"a": 4}


def test_the_same_batch_after_a_failure_is_not_replayed_again(desk: Desk) -> None:
    desk.standby.failed()
    assert desk.standby.reader.fetch_offset == 2
    desk.fetch()
    assert desk.standby.lag == 0
    assert desk.standby.grown_bytes == 3 * len(desk.partition.batches[0][1])


def test_another_batch_at_the_same_offset_is_divergence(desk: Desk) -> None:
    desk.partition.truncate(2)
    desk.put(b"b", 9, FIRST + 1)
    desk.standby.failed()
    with pytest.raises(DivergedError, match="not BatchId"):
        desk.fetch()
    assert desk.standby.reader.has_diverged


def test_batches_of_another_leader_epoch_are_taken_only_after_a_check(desk: Desk) -> None:
    """No request has failed, and the log is longer than what was read."""
    desk.partition.truncate(2)
    desk.put(b"b", 9, FIRST + 1)
    desk.put(b"c", 10, FIRST + 1)
    desk.fetch()
    assert desk.state == {b"a": 3}
    with pytest.raises(DivergedError):
        desk.fetch()


def test_a_clean_change_of_the_leader_costs_one_more_fetch(desk: Desk) -> None:
    desk.partition.change_leader()
    desk.put(b"b", 9)
    desk.fetch()
    assert desk.state == {b"a": 3}
    desk.fetch()
    assert desk.state == {b"a": 3, b"b": 9}
    desk.put(b"b", 10)
    desk.fetch()
    assert desk.state == {b"a": 3, b"b": 10}


def test_a_topic_that_was_created_again_is_divergence(desk: Desk) -> None:
    desk.partition = ModelPartition()
    desk.sequences.clear()
    for value in range(5):
        desk.put(b"b", value, FIRST + 1)
    desk.standby.failed()
    with pytest.raises(DivergedError):
        desk.fetch()


def test_a_log_that_is_shorter_than_what_was_read_is_divergence(desk: Desk) -> None:
    with pytest.raises(DivergedError, match="does not have offset 3"):
        desk.standby.begin_at(0)


def test_a_log_that_begins_behind_the_position_is_divergence(desk: Desk) -> None:
    with pytest.raises(DivergedError):
        desk.standby.begin_at(50)


def test_an_empty_standby_begins_at_the_first_offset_of_the_log() -> None:
    desk = Desk()
    desk.standby.begin_at(50)
    assert desk.standby.reader.fetch_offset == 50


def test_a_batch_that_was_compacted_meanwhile_is_the_same_batch(desk: Desk) -> None:
    pairs: list[tuple[bytes | None, bytes | None]] = [(b"b", b"4"), (b"c", b"5")]
    desk.partition.append(encode_batch_from_parts(pairs, 1, producer_id=FIRST, producer_epoch=0, base_sequence=3))
    desk.partition.replicate()
    desk.fetch()
    compacted = bytearray(
        encode_batch_from_parts(pairs[:1], 1, base_offset=3, producer_id=FIRST, producer_epoch=0, base_sequence=3)
    )
    compacted[LAST_OFFSET_DELTA] = 1
    compacted[CRC] = crc32c(compacted[ATTRIBUTES_POSITION:]).to_bytes(4, "big")
    desk.partition.batches[-1] = decode_header(compacted), bytes(compacted)
    desk.standby.failed()
    desk.fetch()
    assert desk.standby.lag == 0
    assert desk.state == {b"a": 3, b"b": 4, b"c": 5}


def test_a_standby_that_was_away_for_long_does_not_take_a_compacted_log(desk: Desk) -> None:
    for value in (4, 5, 6):
        desk.put(b"b", value)
    del desk.partition.batches[3]
    desk.now_ms = KEPT_MS // 2 - 1
    desk.fetch()
    assert desk.state == {b"a": 3, b"b": 6}
    desk.put(b"b", 7)
    desk.put(b"b", 8)
    desk.now_ms += KEPT_MS // 2
    del desk.partition.batches[-2]
    with pytest.raises(DivergedError, match="deletions may be missing"):
        desk.fetch()


def test_a_new_leader_epoch_is_checked_once_if_each_fetch_returns_one_batch() -> None:
    """A fetch ends with a segment of the upstream, or after a batch that is as large as its limit."""
    batches = []
    for offset, epoch in ((0, 1), (1, 2)):
        data = bytearray(
            encode_batch_from_parts(
                [(b"a", b"1")], 1, base_offset=offset, producer_id=FIRST, producer_epoch=0, base_sequence=offset
            )
        )
        data[12:16] = epoch.to_bytes(4, "big")
        batches.append(bytes(data))
    reader = UpstreamReader(0)
    reader.take(batches[0], 0)
    reader.take(batches[1], 0)
    assert (reader.position, reader.fetch_offset) == (1, 0)
    reader.take(batches[0], 0)
    assert (reader.position, reader.fetch_offset) == (1, 1)
    reader.take(batches[1], 0)
    assert (reader.position, reader.fetch_offset) == (2, 2)


def test_a_copy_from_the_future_does_not_take_a_compacted_log(desk: Desk) -> None:
    """The clock of the machine is wrong after a start, so nobody knows for how long the instance was away."""
    desk.now_ms = KEPT_MS
    desk.put(b"b", 4)
    desk.fetch()
    desk.now_ms = 0
    for value in (5, 6):
        desk.put(b"b", value)
    del desk.partition.batches[-2]
    with pytest.raises(DivergedError, match="deletions may be missing"):
        desk.fetch()


def test_a_standby_that_was_away_for_long_takes_a_log_that_has_all_offsets(desk: Desk) -> None:
    desk.now_ms = 100 * KEPT_MS
    desk.put(b"b", 4)
    desk.fetch()
    assert desk.state == {b"a": 3, b"b": 4}
    assert desk.mark().complete_ms == desk.now_ms


def test_a_corrupt_batch_is_not_replayed(desk: Desk) -> None:
    desk.put(b"b", 4)
    header, data = desk.partition.batches[-1]
    desk.partition.batches[-1] = header, data[:-1] + bytes([data[-1] ^ 1])
    with pytest.raises(CorruptBatchError):
        desk.fetch()
    assert desk.state == {b"a": 3}


def test_a_paused_standby_ignores_what_is_in_flight(desk: Desk) -> None:
    desk.put(b"b", 4)
    desk.standby.is_paused = True
    desk.fetch()
    desk.standby.failed()
    desk.standby.begin_at(50)
    assert desk.state == {b"a": 3}
    desk.standby.is_paused = False
    desk.fetch()
    assert desk.state == {b"a": 3, b"b": 4}


def test_the_response_to_a_request_of_an_earlier_reader_is_ignored(desk: Desk) -> None:
    """It has batches from the earlier position on, and lacks those before."""
    desk.put(b"b", 4)
    data = desk.partition.fetch(3)
    desk.stand_by(UpstreamReader(0, KEPT_MS))
    desk.standby.fetched(3, data, 4, 0)
    assert desk.state == {}
    desk.fetch_all()
    assert desk.state == {b"a": 3, b"b": 4}


def test_settled_records_are_noted_and_not_replayed(desk: Desk) -> None:
    assert desk.standby.reader.settled_id == -1
    desk.partition.append(
        encode_batch_from_parts([(SETTLED_KEY, b"x")], 1, producer_id=FIRST, producer_epoch=0, base_sequence=3)
    )
    desk.partition.replicate()
    desk.fetch()
    assert desk.mark().settled_id == FIRST
    assert desk.state == {b"a": 3}


# -- snapshots ---------------------------------------------------------------------------------------------------------


def test_a_mark_is_restored_from_its_bytes(desk: Desk) -> None:
    mark = desk.mark()
    assert LogMark.decode(mark.encode()) == mark
    with pytest.raises(ValueError, match="malformed"):
        LogMark.decode(mark.encode()[:-1])


def test_a_restored_standby_reads_what_followed_the_snapshot(desk: Desk) -> None:
    mark = desk.mark()
    desk.put(b"b", 4)
    desk.stand_by(UpstreamReader.restored(mark, KEPT_MS), {b"a": 3})
    assert desk.standby.machine is None, "a snapshot of it is worth nothing before it is checked"
    desk.fetch_all()
    assert desk.state == {b"a": 3, b"b": 4}


def test_a_restored_standby_reads_from_the_beginning_of_the_snapshot(desk: Desk) -> None:
    """The state is partly that of offset 3 and partly that of offset 5."""
    note = desk.note()
    desk.put(b"b", 4)
    desk.put(b"c", 5)
    desk.fetch()
    desk.stand_by(UpstreamReader.restored(desk.mark(note), KEPT_MS), {b"a": 3, b"c": 5})
    desk.fetch_all()
    assert desk.state == {b"a": 3, b"b": 4, b"c": 5}


def test_a_snapshot_of_a_tail_that_the_log_has_lost_is_divergence(desk: Desk) -> None:
    note = desk.note()
    desk.put(b"b", 4)
    desk.fetch()
    mark = desk.mark(note)
    desk.partition.truncate(3)
    desk.put(b"b", 9, FIRST + 1)
    desk.stand_by(UpstreamReader.restored(mark, KEPT_MS), {b"a": 3, b"b": 4})
    with pytest.raises(DivergedError):
        desk.fetch()


def test_an_old_snapshot_of_a_compacted_log_is_divergence(desk: Desk) -> None:
    mark = desk.mark()
    desk.put(b"b", 4)
    desk.put(b"b", 5)
    del desk.partition.batches[3]
    desk.now_ms = KEPT_MS
    desk.stand_by(UpstreamReader.restored(mark, KEPT_MS), {b"a": 3})
    with pytest.raises(DivergedError, match="deletions may be missing"):
        desk.fetch()
