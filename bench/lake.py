# SPDX-License-Identifier: Apache-2.0
"""CPU time and memory of the jobs `ingest` and `current` of the lake, on a generated log of commits.

    python -m bench.lake --records 100000000 --folder /var/tmp/lake

The broker's own code encodes one batch of 24 commits. numpy writes groups, partitions, offsets and times into copies
of the batch. Only the checksums are computed one by one.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import crc32c
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from bench.report import Report
from kcoord.coordinator.group.offsets.committed_offsets import CommittedOffset
from kcoord.coordinator.group.records import new_offset_commit_record
from kcoord.runtime.serde import CoordinatorSerde
from kcoord_protocol.record_batch import Record, encode_batch

RECORDS: Final = 1_000_000
MEMORY: Final = "1g"
LOG_PARTITIONS: Final = 8
RECORDS_PER_BATCH: Final = 24
GROUPS: Final = 200
"""Groups per log partition. With 24 partitions per group there are 38,400 keys."""
SEGMENT_BATCHES: Final = 25_000
_BEGIN_MS: Final = 1_767_225_600_000
_GROUP_DIGITS: Final = 4
_CRC_AT: Final = 17
_ATTRIBUTES_AT: Final = 21
_FIRST_TIME_AT: Final = 27
_LAST_TIME_AT: Final = 35

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]


def main(report: Report) -> None:
    """Runs the measurement with `BENCH_RECORDS` records, in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        run(report, Path(folder), int(os.environ.get("BENCH_RECORDS", RECORDS)), MEMORY)


def run(report: Report, folder: Path, records: int, memory: str) -> None:
    size = write_log(folder / "log", records)
    lake = folder / "lake"
    shutil.rmtree(lake, ignore_errors=True)
    table = report.table(
        f"lake of {records:,} records, {size / 1e6:,.0f} MB of log",
        *("job", "s", "CPU s", "records per CPU s", "most memory, MB"),
    )
    for name, more in (("ingest", ["--log", str(folder / "log")]), ("current", ["--limit", "1"])):
        used = _measured(name, [*more, "--lake", str(lake), "--conf", f"spark.driver.memory={memory}"])
        speed = round(records / used.cpu_seconds)
        table.row(name, used.seconds, used.cpu_seconds, speed, round(used.peak_bytes / 1e6))
    check(lake, records)


def check(lake: Path, records: int) -> None:
    """Checks that bronze and silver have every record once, and that each key has its last committed offset."""
    batches = [_batches(records, number) for number in range(LOG_PARTITIONS)]
    for name in ("bronze/records", "silver/commits"):
        places: list[list[Ints]] = [[] for _ in batches]
        for path in (lake / name).rglob("*.parquet"):
            for group in _row_groups(path, ["log_partition", "log_offset"]):
                columns = (group.column(column) for column in ("log_partition", "log_offset"))
                numbers, offsets = (column.to_numpy() for column in columns)
                for number in np.unique(numbers).tolist():
                    places[number].append(offsets[numbers == number])
        for number, count in enumerate(batches):
            log_offsets = np.sort(np.concatenate(places[number]))
            if not np.array_equal(log_offsets, np.arange(count * RECORDS_PER_BATCH)):
                raise SystemExit(f"{name} does not have each record of log partition {number} exactly once")
    current = pq.ParquetDataset(lake / "gold" / "current_offsets").read(["group", "partition", "committed_offset"])
    rows = zip(*(column.to_pylist() for column in current.columns), strict=True)
    current_offsets = {(group, partition): offset for group, partition, offset in rows}
    if current.num_rows != len(current_offsets) or current_offsets != _last_offsets(batches):
        raise SystemExit("gold/current_offsets does not have the last committed offset of each key")


def _row_groups(path: Path, names: list[str]) -> Iterator[pa.Table]:
    with pq.ParquetFile(path) as file:
        for number in range(file.num_row_groups):
            yield file.read_row_group(number, names)


def _last_offsets(batches: list[int]) -> dict[tuple[str, int], int]:
    """Returns the last offset that `_segment` writes for each group and partition."""
    last_offsets = {}
    for number, count in enumerate(batches):
        for batch in range(max(count - GROUPS, 0), count):
            for partition in range(RECORDS_PER_BATCH):
                last_offsets[f"group-{number}-{batch % GROUPS:04d}", partition] = batch // GROUPS + 1
    return last_offsets


class Usage(NamedTuple):
    """Wall time and CPU time of a job's processes in seconds, and the largest sum of their memory in bytes."""

    seconds: float
    cpu_seconds: float
    peak_bytes: int


def _measured(job: str, arguments: list[str]) -> Usage:
    began = time.perf_counter()
    command = [sys.executable, "-m", "kcoord", "lake", job, *arguments]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    ticks: dict[int, int] = {}
    peak = 0
    while process.poll() is None:
        peak = max(peak, _look(process.pid, ticks))
        time.sleep(0.5)
    if process.returncode:
        raise SystemExit(f"kcoord lake {job} failed with exit code {process.returncode}")
    return Usage(time.perf_counter() - began, sum(ticks.values()) / os.sysconf("SC_CLK_TCK"), peak)


def _look(session: int, ticks: dict[int, int]) -> int:
    """Returns the current memory of a session's processes, counting each shared page once. Adds CPU times to `ticks`.

    Spark's JVM and workers are not children of this process, but they belong to the session.
    """
    total = 0
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) != session:
                continue
            ticks[int(entry.name)] = int(fields[11]) + int(fields[12])
            rollup = (entry / "smaps_rollup").read_text()
            total += int(rollup.partition("\nPss:")[2].split()[0]) * 1024
        except (OSError, IndexError, ValueError):
            continue  # the process has just ended
    return total


# --- the log ----------------------------------------------------------------------------------------------------------


def write_log(folder: Path, records: int) -> int:
    """Writes the segments of all log partitions. Returns their size in bytes.

    The number of records is rounded up to whole batches.
    """
    template = _template()
    size = 0
    for number in range(LOG_PARTITIONS):
        place = folder / f"__consumer_offsets-{number}"
        place.mkdir(parents=True, exist_ok=True)
        count = _batches(records, number)
        for first in range(0, count, SEGMENT_BATCHES):
            data = _segment(template, number, first, min(SEGMENT_BATCHES, count - first))
            (place / f"{first * RECORDS_PER_BATCH:020d}.log").write_bytes(data)
            size += len(data)
    return size


def _batches(records: int, log_partition: int) -> int:
    batches = -(-records // RECORDS_PER_BATCH)
    return batches // LOG_PARTITIONS + (log_partition < batches % LOG_PARTITIONS)


def _template() -> bytes:
    """Encodes one batch with commits of one group, one per partition."""
    serde = CoordinatorSerde()
    records = []
    for partition in range(RECORDS_PER_BATCH):
        commit = CommittedOffset(offset=1, leader_epoch=0, metadata="", commit_timestamp_ms=_BEGIN_MS)
        key, value = serde.serialize(new_offset_commit_record("group-0-0000", "topic", partition, commit))
        records.append(Record(key=key, value=value, timestamp_ms=_BEGIN_MS))
    return encode_batch(records, base_offset=0)


def _segment(template: bytes, log_partition: int, first: int, count: int) -> bytes:
    batches = np.tile(np.frombuffer(template, np.uint8), (count, 1))
    numbers = np.arange(first, first + count, dtype=np.int64)
    times = _BEGIN_MS + numbers * 10
    _put(batches, 0, numbers * RECORDS_PER_BATCH)
    _put(batches, _FIRST_TIME_AT, times)
    _put(batches, _LAST_TIME_AT, times)
    at = 0
    groups = numbers % GROUPS
    digits = np.stack([groups // 10**power % 10 for power in reversed(range(_GROUP_DIGITS))], axis=1) + ord("0")
    for _ in range(RECORDS_PER_BATCH):
        at = template.index(b"group-", at) + len(b"group-")
        batches[:, at] = ord("0") + log_partition
        batches[:, at + 2 : at + 2 + _GROUP_DIGITS] = digits
        # A value begins with its version and the offset. The time follows later in the value.
        value = template.index(_offset_bytes(), at)
        _put(batches, value + 2, numbers // GROUPS + 1)
        _put(batches, template.index(_BEGIN_MS.to_bytes(8, "big"), value), times)
    checked = memoryview(batches.tobytes())
    size = len(template)
    sums = [crc32c.crc32c(checked[at + _ATTRIBUTES_AT : at + size]) for at in range(0, len(checked), size)]
    batches[:, _CRC_AT : _CRC_AT + 4] = np.array(sums, ">u4").view(np.uint8).reshape(count, 4)
    return batches.tobytes()


def _offset_bytes() -> bytes:
    """Returns the version 3 and the offset 1 of the values in the template."""
    return (3).to_bytes(2, "big") + (1).to_bytes(8, "big")


def _put(batches: Bytes, at: int, values: npt.NDArray[np.int64]) -> None:
    batches[:, at : at + 8] = values.astype(">i8").view(np.uint8).reshape(len(values), 8)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=RECORDS)
    parser.add_argument("--folder", type=Path, required=True, help="folder for the log and the lake, which are kept")
    parser.add_argument("--memory", default=MEMORY, help="memory of Spark's JVM")
    chosen = parser.parse_args()
    run(Report(), chosen.folder, chosen.records, chosen.memory)
