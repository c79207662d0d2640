# SPDX-License-Identifier: Apache-2.0
"""Logs to clean, and the state that their readers see."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from kcoord.storage.cleaner import Assessment, Cleaner, CleaningRules, assess
from kcoord.storage.cleaning_pass import Cleaned, LastOfProducer
from kcoord.storage.file_system import FileSystem
from kcoord.storage.log import Log
from kcoord.storage.record_filter import RawRecord, Run
from kcoord_protocol.control_records import ControlRecordType, decode_control_key
from kcoord_protocol.record_batch import Compression, Record, decode_records, encode_batch, encode_control_batch
from tests.storage.support import NOW_MS, new_config, open_log

RULES = CleaningRules(delete_retention_ms=1000)
MAP_BYTES = 1 << 20


def on_this_thread(step: Callable[[], None]) -> None:
    step()


class Writer:
    """Appends batches with consecutive offsets to a log."""

    def __init__(self, file_system: FileSystem, **config: int) -> None:
        self.log = open_log(file_system, new_config(**config))

    def put(
        self,
        *pairs: tuple[str, str | None],
        timestamp_ms: int | None = None,
        compression: Compression = Compression.NONE,
        producer_id: int = -1,
        sequence: int = -1,
        is_transactional: bool = False,
    ) -> int:
        """Appends one batch. Returns its base offset."""
        base = self.log.end_offset
        records = [
            Record(
                key.encode(),
                None if value is None else value.encode(),
                [("header", b"h")],
                base + number if timestamp_ms is None else timestamp_ms,
                base + number,
            )
            for number, (key, value) in enumerate(pairs)
        ]
        data = encode_batch(
            records,
            base_offset=base,
            compression=compression,
            producer_id=producer_id,
            producer_epoch=0 if producer_id >= 0 else -1,
            base_sequence=sequence,
            is_transactional=is_transactional,
        )
        self.log.append(data, now_ms=NOW_MS)
        return base

    def end(self, producer_id: int, control_type: ControlRecordType) -> int:
        """Appends a transaction marker. Returns its offset."""
        base = self.log.end_offset
        data = encode_control_batch(
            control_type,
            b"\0\0\0\0\0\0",
            timestamp_ms=base,
            producer_id=producer_id,
            producer_epoch=0,
            base_offset=base,
        )
        self.log.append(data, now_ms=NOW_MS)
        return base

    def roll(self) -> None:
        self.log.roll(NOW_MS)


def clean(
    log: Log,
    file_system: FileSystem,
    *,
    first_dirty_offset: int = 0,
    now_ms: int = NOW_MS,
    rules: CleaningRules = RULES,
    stable_offset: int | None = None,
    producers: Mapping[int, LastOfProducer] | None = None,
    max_map_bytes: int = MAP_BYTES,
    pause: Callable[[int], None] = lambda size: None,
    forget_aborted: Callable[[set[int]], None] = lambda offsets: None,
) -> Cleaned:
    """Runs one pass over everything that can be cleaned."""
    stable = log.end_offset if stable_offset is None else stable_offset
    assessment = assess(log, first_dirty_offset, rules, stable, now_ms)
    return pass_over(
        log, file_system, assessment, now_ms, rules, stable, producers, max_map_bytes, pause, forget_aborted
    )


def pass_over(
    log: Log,
    file_system: FileSystem,
    assessment: Assessment,
    now_ms: int,
    rules: CleaningRules,
    stable_offset: int,
    producers: Mapping[int, LastOfProducer] | None = None,
    max_map_bytes: int = MAP_BYTES,
    pause: Callable[[int], None] = lambda size: None,
    forget_aborted: Callable[[set[int]], None] = lambda offsets: None,
) -> Cleaned:
    cleaner = Cleaner(file_system, max_map_bytes=max_map_bytes, pause=pause)
    return cleaner.clean(
        log,
        assessment,
        rules,
        on_this_thread,
        now_ms,
        stable_offset=stable_offset,
        producers=producers,
        forget_aborted=forget_aborted,
    )


def records(log: Log) -> list[Record]:
    """Returns all data records of the log."""
    return [record for header, data in log.batches() if not header.is_control for record in decode_records(data)]


def offsets_left(log: Log) -> list[int]:
    return [record.offset for record in records(log)]


def state(data_records: Iterable[Record]) -> dict[bytes, tuple[bytes, int, int]]:
    """Returns the state after a replay of all records: value, offset and timestamp by key."""
    result: dict[bytes, tuple[bytes, int, int]] = {}
    for record in data_records:
        assert record.key is not None
        result.pop(record.key, None)
        if record.value is not None:
            result[record.key] = record.value, record.offset, record.timestamp_ms
    return result


def committed_state(log: Log) -> dict[bytes, tuple[bytes, int, int]]:
    """Returns the state for a read_committed reader, which finds aborted transactions by their markers."""
    aborted: set[tuple[int, int]] = set()
    opened: dict[int, list[int]] = {}
    for header, data in log.batches():
        if header.is_control:
            kinds = [decode_control_key(record.key) for record in decode_records(data)]
            bases = opened.pop(header.producer_id, [])
            if kinds == [ControlRecordType.ABORT]:
                aborted.update((header.producer_id, base) for base in bases)
        elif header.is_transactional:
            opened.setdefault(header.producer_id, []).append(header.base_offset)
    committed = [
        record
        for header, data in log.batches()
        if not header.is_control and (header.producer_id, header.base_offset) not in aborted
        for record in decode_records(data)
    ]
    return state(committed)


def raw_records(runs: Iterable[Run]) -> list[RawRecord]:
    """Returns the single records of runs."""
    return [
        RawRecord(*run.span(number), run.offset_deltas[number], key, run.has_values)
        for run in runs
        for number, key in enumerate(run.keys)
    ]
