# SPDX-License-Identifier: Apache-2.0
"""Batches and logs for the storage tests."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

from kcoord.storage.file_system import FileSystem, join, make_durable_dirs
from kcoord.storage.log import Log
from kcoord.storage.memory_file_system import Operation
from kcoord.storage.recovery import Recovery
from kcoord.storage.rolled import LaterSyncs
from kcoord.storage.segment import LogConfig
from kcoord_protocol.record_batch import Record, encode_batch

DIRECTORY = "data/topic-0"
LOG_FILE = join(DIRECTORY, f"{0:020d}.log")
INDEX_FILE = join(DIRECTORY, f"{0:020d}.index")
TIME_INDEX_FILE = join(DIRECTORY, f"{0:020d}.timeindex")
NOW_MS = 1_000_000


class MachineCrash(BaseException):
    """The machine stops here. No product code may catch it."""


def batch(
    base_offset: int, records: int = 1, value_size: int = 10, timestamp_ms: int = 5, leader_epoch: int = 0
) -> bytes:
    value = bytes([65 + base_offset % 26]) * value_size
    made = [Record(b"key", value, [], timestamp_ms + number, base_offset + number) for number in range(records)]
    return encode_batch(made, base_offset=base_offset, partition_leader_epoch=leader_epoch)


def batches(count: int, records: int = 1, value_size: int = 10) -> list[bytes]:
    """Returns consecutive batches with one millisecond per record."""
    return [
        batch(number * records, records, value_size, timestamp_ms=100 + number * records) for number in range(count)
    ]


def new_config(**values: int) -> LogConfig:
    config = LogConfig(segment_bytes=1 << 20, segment_ms=10**12, segment_index_bytes=1 << 16, index_interval_bytes=200)
    for name, value in values.items():
        setattr(config, name, value)
    return config


def open_log(file_system: FileSystem, config: LogConfig | None = None, **recovery: object) -> Log:
    make_durable_dirs(file_system, "data")
    state = Recovery()
    for name, value in recovery.items():
        setattr(state, name, value)
    return Log.open(file_system, DIRECTORY, config or new_config(), NOW_MS, recovery=state)


def filled_log(file_system: FileSystem, data: list[bytes], config: LogConfig | None = None) -> Log:
    """Returns an open log with `data`, which is flushed."""
    log = open_log(file_system, config)
    for batch_bytes in data:
        log.append(batch_bytes, now_ms=NOW_MS)
    log.flush()
    return log


def content(log: Log) -> list[bytes]:
    return [data for _, data in log.batches()]


def runs_through(action: Callable[..., object], *arguments: object, **named: object) -> bool:
    """Returns whether the action ended before the machine stopped."""
    try:
        action(*arguments, **named)
    except MachineCrash:
        return False
    return True


def crash_at(step: int, kinds: frozenset[str] | None = None) -> Callable[[Operation], BaseException | None]:
    """Returns a fault that stops the machine before the `step`-th operation that changes anything."""
    seen = 0

    def fault(operation: Operation) -> BaseException | None:
        nonlocal seen
        if operation.kind == "read_at" or (kinds is not None and operation.kind not in kinds):
            return None
        seen += 1
        return MachineCrash() if seen > step else None

    return fault


class Later:
    """Syncs the closed segments of logs when a test says so."""

    def __init__(self) -> None:
        self.syncs = LaterSyncs(lambda work, done: self.jobs.append((work, done)), nullcontext)
        self.jobs: list[tuple[Callable[[], None], Callable[[], None] | None]] = []

    def open(self, file_system: FileSystem, config: LogConfig, recovery: Recovery | None = None) -> Log:
        make_durable_dirs(file_system, "data")
        log = Log.open(file_system, DIRECTORY, config, NOW_MS, recovery=recovery)
        log.later_syncs = self.syncs
        return log

    def run(self) -> None:
        """Syncs all segments that were closed so far, and tells their logs."""
        while self.jobs:
            work, done = self.jobs.pop(0)
            work()
            if done is not None:
                done()
