# SPDX-License-Identifier: Apache-2.0
"""Passes of the cleaner against a plain model of Kafka's compaction: dicts and lists, no segments, no bytes.

The model follows Kafka's LogCleaner. The map has the last offset of every key in the dirty part. Earlier records of the
key are removed. A tombstone, and a marker without data before it, stays until the delete horizon that the first pass
gives its batch (KIP-534). Aborted data is removed and supersedes nothing (KIP-98). The last batch of an active producer
stays, if necessary without records.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from hypothesis import given, settings
from hypothesis import strategies as st

from kcoord.storage.cleaner import CleaningRules
from kcoord.storage.cleaning_pass import Cleaned, LastOfProducer
from kcoord.storage.log import Log
from kcoord.storage.log_loader import segment_number
from kcoord.storage.memory_file_system import MemoryFileSystem
from kcoord.storage.offset_map import ENTRY_BYTES
from kcoord_protocol.control_records import ControlRecordType, decode_control_key
from kcoord_protocol.record_batch import Record, decode_records, encode_batch
from tests.storage.cleaning import Writer, clean
from tests.storage.support import NOW_MS

ABORT, COMMIT = ControlRecordType.ABORT, ControlRecordType.COMMIT
RETENTION_MS = 1000
RULES = CleaningRules(delete_retention_ms=RETENTION_MS)


@dataclass(frozen=True)
class Batch:
    """The visible content of a batch."""

    base: int
    last: int
    producer: tuple[int, int, int]
    is_transactional: bool
    kind: ControlRecordType | str | None
    """The type of a marker; None for data."""
    horizon_ms: int | None
    max_timestamp: int
    records: tuple[Record, ...]


def batches_of(log: Log) -> list[Batch]:
    made = []
    for header, data in log.batches():
        records = tuple(decode_records(data))
        kind: ControlRecordType | str | None = None
        if header.is_control:
            control_type = decode_control_key(records[0].key) if records else None
            kind = control_type if control_type is not None else "unknown" if records else "empty"
        producer = header.producer_id, header.producer_epoch, header.base_sequence
        made.append(
            Batch(
                header.base_offset,
                header.last_offset,
                producer,
                header.is_transactional,
                kind,
                header.delete_horizon_ms,
                header.max_timestamp,
                records,
            )
        )
    return made


def emptied(batch: Batch) -> Batch:
    return replace(batch, records=(), horizon_ms=None, kind=None if batch.kind is None else "empty")


class Model:
    """One pass over `batches`, all batches of the log."""

    def __init__(self, batches: Sequence[Batch], producers: Mapping[int, LastOfProducer], now_ms: int) -> None:
        self.batches = batches
        self.producers = producers
        self.now_ms = now_ms
        self.removed_aborts: set[int] = set()
        self.kept_records = 0

    def first_open_offset(self) -> float:
        for number, batch in enumerate(self.batches):
            if batch.is_transactional and batch.kind is None and self.end_of(number) is None:
                return batch.base
        return inf

    def end_of(self, number: int) -> ControlRecordType | None:
        """Returns how the transaction of a data batch ends."""
        for later in self.batches[number + 1 :]:
            if later.producer[0] == self.batches[number].producer[0] and later.kind in (ABORT, COMMIT):
                return later.kind
        return None

    def is_aborted(self, number: int) -> bool:
        return self.batches[number].is_transactional and self.end_of(number) is ABORT

    def is_marker_of_nothing(self, number: int) -> bool:
        marker = self.batches[number]
        if marker.kind not in (ABORT, COMMIT):
            return marker.kind == "empty"
        for earlier in reversed(self.batches[:number]):
            if earlier.producer[0] == marker.producer[0]:
                if earlier.kind is None and earlier.is_transactional:
                    return False
                if earlier.kind in (ABORT, COMMIT):
                    return True
        return True

    def fill_map(self, dirty: int, end: int, map_bytes: int) -> int:
        """Returns the offset at which the next pass begins."""
        self.last_offsets: dict[bytes, int] = {}
        self.mapped = dirty - 1
        for number, batch in enumerate(self.batches):
            if batch.base >= end or batch.kind is not None or self.is_aborted(number):
                continue
            for record in batch.records:
                if record.key is None or record.offset < dirty:
                    continue
                keys = {*self.last_offsets, record.key}
                if len(keys) > 1 and sum(ENTRY_BYTES + len(key) for key in keys) > map_bytes:
                    return self.mapped + 1
                self.last_offsets[record.key] = self.mapped = record.offset
        return end

    def cleaned(self, number: int) -> Batch | None:
        batch = self.batches[number]
        has_passed = batch.horizon_ms is not None and batch.horizon_ms <= self.now_ms
        new_horizon_ms = self.now_ms + RETENTION_MS if batch.horizon_ms is None else batch.horizon_ms
        if batch.kind is not None:
            if not self.is_marker_of_nothing(number):
                self.kept_records += len(batch.records)
                return batch
            if batch.records and not has_passed:
                self.kept_records += len(batch.records)
                return replace(batch, horizon_ms=new_horizon_ms)
            if batch.kind is ABORT:
                self.removed_aborts.add(batch.last)
            kept: tuple[Record, ...] = ()
        elif self.is_aborted(number):
            kept = ()
        else:
            kept = tuple(record for record in batch.records if self.stays(record, has_passed=has_passed))
        self.kept_records += len(kept)
        if not kept:
            return emptied(batch) if self.is_last_of_producer(batch) else None
        has_tombstone = any(record.value is None for record in kept)
        horizon_ms = new_horizon_ms if has_tombstone else batch.horizon_ms
        is_same = len(kept) == len(batch.records) and horizon_ms == batch.horizon_ms
        greatest = batch.max_timestamp if is_same else max(record.timestamp_ms for record in kept)
        return replace(batch, records=kept, horizon_ms=horizon_ms, max_timestamp=greatest)

    def stays(self, record: Record, *, has_passed: bool) -> bool:
        if record.offset > self.mapped:
            return True
        if record.key is None or record.offset < self.last_offsets.get(record.key, -1):
            return False
        return record.value is not None or not has_passed

    def is_last_of_producer(self, batch: Batch) -> bool:
        last = self.producers.get(batch.producer[0])
        if last is None:
            return False
        if last.last_data_offset is not None:
            return last.last_data_offset == batch.last
        return batch.kind is not None and last.producer_epoch == batch.producer[1]


KEYS = st.sampled_from([b"k1", b"k2", b"k3", b"k4", b"k5", b"longer", None])
PAIRS = st.tuples(KEYS, st.sampled_from([b"v", b"w", None]))
STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("put"),
            st.sampled_from([-1, 0, 0, 1]),
            st.one_of(
                st.lists(PAIRS, min_size=1, max_size=4),
                # Records of one size, as coordinators write them, which the cleaner reads in runs.
                st.permutations([(b"k1", b"v"), (b"k2", b"v"), (b"k3", b"v"), (b"k4", b"v"), (b"k5", b"v")]),
                st.permutations([(b"k1", None), (b"k2", None), (b"k3", None), (b"k4", None), (b"k5", None)]),
                st.just([(None, b"v")]),
            ),
            st.booleans(),
        ),
        st.tuples(
            st.just("transaction"),
            st.sampled_from([0, 0, 1]),
            st.lists(PAIRS, min_size=1, max_size=2),
            st.sampled_from([ABORT, COMMIT]),
        ),
        st.tuples(st.just("end"), st.sampled_from([0, 0, 1]), st.sampled_from([ABORT, COMMIT])),
        st.tuples(st.just("leader change")),
        st.tuples(st.just("roll")),
        st.tuples(st.just("roll")),
    ),
    min_size=3,
    max_size=14,
)


def written(steps: Sequence[tuple[object, ...]], segment_bytes: int) -> tuple[Log, MemoryFileSystem]:
    file_system = MemoryFileSystem()
    writer = Writer(file_system)
    log = writer.log
    for step in steps:
        match step:
            case "put", int(producer_id), list(pairs), bool(is_transactional):
                put(log, pairs, producer_id, is_transactional=is_transactional and producer_id >= 0)
            case "transaction", int(producer_id), list(pairs), ControlRecordType() as kind:
                put(log, pairs, producer_id, is_transactional=True)
                writer.end(producer_id, kind)
            case "end", int(producer_id), ControlRecordType() as kind:
                writer.end(producer_id, kind)
            case ("leader change",):
                writer.end(-1, ControlRecordType.LEADER_CHANGE)
            case ("roll",):
                writer.roll()
    writer.roll()
    log.config.segment_bytes = segment_bytes
    return log, file_system


def put(
    log: Log, pairs: Sequence[tuple[bytes | None, bytes | None]], producer_id: int, *, is_transactional: bool
) -> None:
    base = log.end_offset
    records = [
        Record(key, value, [], 1000 - 10 * base if base % 4 == 1 else 10 * base + number % 2, base + number)
        for number, (key, value) in enumerate(pairs)
    ]
    data = encode_batch(
        records,
        base_offset=base,
        producer_id=producer_id,
        producer_epoch=producer_id % 3,
        base_sequence=0 if producer_id >= 0 else -1,
        is_transactional=is_transactional,
    )
    log.append(data, now_ms=NOW_MS)


def number_of_groups(sizes: Sequence[int], segment_bytes: int) -> int:
    """Returns the number of segments if every new one has as many of the old ones as fit."""
    groups, room = 0, -1
    for size in sizes:
        if size > room:
            groups, room = groups + 1, segment_bytes
        room -= size
    return groups


def first_greatest_timestamp(batches: Sequence[Batch]) -> tuple[int, int] | None:
    """Returns the expected last time index entry of a segment: Kafka's maxTimestampSoFar and its offset."""
    best = max(batches, key=lambda batch: batch.max_timestamp, default=None)
    return None if best is None or best.max_timestamp < 0 else (best.max_timestamp, best.last)


ACTIVE = st.sampled_from(["not active", "not active", "has data", "has no data", "has data of an older epoch"])


def last_of_producer(batches: Sequence[Batch], producer_id: int, how: str) -> LastOfProducer:
    data = [batch.last for batch in batches if batch.producer[0] == producer_id and batch.kind is None]
    last = data[-1] if data and how == "has data" else None
    return LastOfProducer(last, producer_id if how != "has data of an older epoch" else 7)


@settings(max_examples=120)
@given(
    STEPS,
    st.lists(st.tuples(st.sampled_from([0, 1, 999, 1000]), ACTIVE, ACTIVE), min_size=1, max_size=4),
    st.sampled_from([1, 1 << 20]),
    st.data(),
)
def test_passes_keep_what_kafka_keeps(
    steps: list[tuple[object, ...]],
    passes: list[tuple[int, str, str]],
    segment_bytes: int,
    data: st.DataObject,
) -> None:
    """Every pass begins at the end of the last one, or at any other offset. Some passes get a map that is too small.

    Segments are cleaned alone, or all are merged into one, which has the same end offset.
    """
    log, file_system = written(steps, segment_bytes)
    now_ms, dirty = NOW_MS, 0
    for later_ms, *active in passes:
        now_ms += later_ms
        map_bytes = data.draw(st.sampled_from([1 << 20, 1 << 20, ENTRY_BYTES, 2 * (ENTRY_BYTES + 2), 1000]))
        if data.draw(st.booleans()):
            dirty = data.draw(st.integers(0, log.end_offset))
        before = batches_of(log)
        producers = {
            producer_id: last_of_producer(before, producer_id, how)
            for producer_id, how in enumerate(active)
            if how != "not active"
        }
        model = Model(before, producers, now_ms)
        bases = [segment.base_offset for segment in log.segments]
        sizes = [segment.size_bytes for segment in log.segments]
        start = dirty if dirty <= bases[-1] else 0
        end = max((base for base in bases if base <= model.first_open_offset()), default=start)
        if end < bases[-1] and not sum(
            size for following, size in zip(bases[1:], sizes, strict=False) if start < following <= end
        ):
            end = next_dirty = start
            count = 0
        else:
            next_dirty = model.fill_map(start, end, map_bytes)
            count = sum(base < next_dirty for base in bases[:-1])
        bound = bases[count]
        expected = [
            batch if batch.base >= bound else model.cleaned(number) for number, batch in enumerate(model.batches)
        ]
        read = [batch for batch in model.batches if batch.base < bound]
        if read and segment_bytes > 1 and count > 1 and expected[len(read) - 1] is None:
            expected[len(read) - 1] = emptied(read[-1])
        forgotten: list[int] = []
        rests: list[int] = []

        def forget_aborted(offsets: set[int], sizes: list[int] = forgotten) -> None:
            sizes.append(len(offsets))

        result = clean(
            log,
            file_system,
            first_dirty_offset=dirty,
            now_ms=now_ms,
            rules=RULES,
            producers=producers,
            max_map_bytes=map_bytes,
            pause=rests.append,
            forget_aborted=forget_aborted,
        )
        assert batches_of(log) == [batch for batch in expected if batch is not None]
        dirty = result.next_dirty_offset
        groups = number_of_groups(sizes[:count], segment_bytes)
        assert result == Cleaned(
            next_dirty_offset=next_dirty,
            records_read=sum(len(batch.records) for batch in read),
            records_kept=model.kept_records,
            bytes_before=sum(sizes[:count]),
            bytes_after=sum(segment.size_bytes for segment in log.segments[:groups]),
            segments_before=count,
            segments_after=groups,
            removed_aborts=model.removed_aborts,
        )
        assert forgotten == sorted(set(forgotten)), "every call has new offsets"
        assert forgotten[-1:] == ([len(model.removed_aborts)] if model.removed_aborts else [])
        if next_dirty == end and count:
            first = max(number for number in range(count) if bases[number] <= start)
            mapped = sizes[first:count]
            assert sum(rests) == sum(mapped) + sum(sizes[:count]), "the thread rests for every byte that it reads"
        for segment in log.segments:
            own = [
                batch for batch in batches_of(log) if segment is log.segments[segment_number(log.segments, batch.base)]
            ]
            assert segment.largest_timestamp == first_greatest_timestamp(own)
