# SPDX-License-Identifier: Apache-2.0
"""Segment files that Apache Kafka 4.3.1 wrote are read completely, and ours are accepted by its own kafka-dump-log."""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path

import pytest

from kcoord.storage.file_system import RealFileSystem
from kcoord.storage.log import Log
from kcoord.storage.log_dir import Identity, LogDir
from kcoord.storage.recovery import Recovery
from kcoord.storage.segment import LogConfig
from kcoord_protocol.record_batch import Compression, Record, decode_records, encode_batch, iter_headers
from tests.storage.support import NOW_MS
from tests.support.kafka_jars import KafkaJars
from tests.support.shared import SHARED

SAMPLE = SHARED / "spark-sample" / "consumer_offsets.tar.xz"
PARTITIONS = 8
RECORDS = 24_368


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the eight folders of a stopped broker."""
    if not SAMPLE.exists():
        pytest.skip(f"{SAMPLE} is not there")
    folder = tmp_path_factory.mktemp("sample")
    with tarfile.open(SAMPLE) as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.fixture
def folders(sample: Path, tmp_path: Path) -> list[Path]:
    shutil.copytree(sample, tmp_path / "copy")
    return [tmp_path / "copy" / f"__consumer_offsets-{partition}" for partition in range(PARTITIONS)]


def open_folder(folder: Path, recovery: Recovery | None = None) -> Log:
    return Log.open(RealFileSystem(), str(folder), LogConfig(), NOW_MS, recovery=recovery)


def test_every_record_is_read(folders: list[Path]) -> None:
    logs = [open_folder(folder) for folder in folders]
    assert sum(len(decode_records(data)) for log in logs for _, data in log.batches()) == RECORDS
    assert all(log.recovery_report.cuts == [] for log in logs)


@pytest.mark.parametrize("suffix", ["index", "timeindex"])
def test_indexes_built_from_the_log_equal_those_of_kafka(folders: list[Path], suffix: str) -> None:
    """The index of the last segment is not compared: a restarted broker counts its interval from the start again."""
    compared = 0
    for folder in folders:
        names = sorted(folder.glob(f"*.{suffix}"))
        originals = {path: path.read_bytes() for path in names}
        for path in names:
            path.unlink()
        log = open_folder(folder)
        log.close()
        for path, data in originals.items():
            assert path.read_bytes() == data, path
            compared += len(data)
    assert compared > 1000


@pytest.mark.parametrize("clean", [True, False])
def test_fetching_through_the_log_gives_its_bytes(folders: list[Path], clean: bool) -> None:
    for folder in folders:
        end = open_folder(folder).end_offset
        log = open_folder(folder, Recovery(recovery_point=end if clean else 0, clean=clean))
        offset, fetched = log.start_offset, bytearray()
        while offset < log.end_offset:
            data = log.read(offset, 5000)
            fetched += data
            offset = list(iter_headers(data))[-1][1].next_offset
        assert fetched == b"".join(path.read_bytes() for path in sorted(folder.glob("*.log")))


def test_timestamps_agree_with_a_full_search(folders: list[Path]) -> None:
    log = open_folder(folders[4])
    records = [record for _, data in log.batches() for record in decode_records(data)]
    newest = max(record.timestamp_ms for record in records)
    best = log.max_timestamp()
    assert best is not None
    assert (best.timestamp, best.offset) == next(
        (r.timestamp_ms, r.offset) for r in records if r.timestamp_ms == newest
    )
    for record in records[::40]:
        record_position = log.offset_for_timestamp(record.timestamp_ms)
        assert record_position is not None
        assert record_position.offset == next(r.offset for r in records if r.timestamp_ms >= record.timestamp_ms)


@pytest.mark.java
def test_kafka_dump_log_accepts_our_files(tmp_path: Path) -> None:
    jars = KafkaJars()
    log_dir = LogDir.open(RealFileSystem(), str(tmp_path), Identity("c", 1, "d"))
    config = LogConfig(segment_bytes=25_000, index_interval_bytes=1000)
    log = log_dir.open_log("t", 0, config, NOW_MS)
    codecs = list(Compression)
    for number in range(300):
        made = [
            Record(b"key", b"v" * (number % 400), [], 1000 + number * 3 + at, log.end_offset + at) for at in range(3)
        ]
        compression = codecs[number % len(codecs)]
        log.append(encode_batch(made, base_offset=log.end_offset, compression=compression), now_ms=NOW_MS)
        if number == 150:
            log.close()
            log = log_dir.open_log("t", 0, config, NOW_MS)
    log_dir.close()
    folder = tmp_path / "t-0"
    logs = sorted(folder.glob("*.log"))
    assert len(logs) > 1
    files = [str(path) for path in sorted(folder.iterdir()) if path.suffix in (".log", ".index", ".timeindex")]
    dumped = jars.tool("dump-log", "--files", ",".join(files), "--deep-iteration", "--index-sanity-check")
    assert dumped.count("passed sanity check") == len(files) - len(logs)
    dumped = jars.tool("dump-log", "--files", ",".join(files), "--deep-iteration", "--verify-index-only")
    for complaint in (
        "Mismatches",
        "Found timestamp",
        "Found out of order",
        "invalid bytes",
        "not record_position",
        "Exception",
    ):
        assert complaint not in dumped, dumped
    dumped = jars.tool("dump-log", "--files", ",".join(map(str, logs)), "--deep-iteration")
    assert dumped.count("isvalid: true") == 300
    assert "isvalid: false" not in dumped
    assert dumped.count("| offset: ") == 900
