# SPDX-License-Identifier: Apache-2.0
"""Kafka's own kafka-dump-log accepts and decodes the files of the cleaner."""

from __future__ import annotations

from pathlib import Path

import pytest

from kcoord.storage.cleaning_pass import LastOfProducer
from kcoord.storage.file_system import RealFileSystem
from kcoord_protocol.control_records import ControlRecordType
from kcoord_protocol.record_batch import Compression
from tests.storage.cleaning import Writer, clean
from tests.storage.support import DIRECTORY
from tests.support.kafka_jars import KafkaJars


@pytest.mark.java
def test_kafka_dump_log_accepts_cleaned_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have partly emptied and compressed batches, a delete horizon, and a marker without data."""
    jars = KafkaJars()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    file_system = RealFileSystem()
    writer = Writer(file_system, index_interval_bytes=50)
    writer.put(("a", "1"), ("b", "1"), ("gone", None), timestamp_ms=1_700_000_000_000)
    writer.put(("a", "2"), ("c", "1"), compression=Compression.GZIP)
    writer.put(("c", "2"), compression=Compression.ZSTD)
    writer.put(("x", "1"), producer_id=5, sequence=0)
    writer.put(("x", "2"))
    writer.roll()
    writer.put(("t", "1"), producer_id=6, sequence=0, is_transactional=True)
    writer.end(6, ControlRecordType.ABORT)
    writer.roll()
    writer.put(("z", "1"))
    for now_ms in (1_700_000_001_000, 1_700_000_001_500):
        clean(writer.log, file_system, now_ms=now_ms, producers={5: LastOfProducer(6, 0)})
    writer.log.close()
    files = [str(path) for path in sorted((tmp_path / DIRECTORY).iterdir()) if path.stat().st_size]
    logs = [name for name in files if name.endswith(".log")]
    dumped = jars.tool("dump-log", "--files", ",".join(files), "--index-sanity-check")
    assert dumped.count("passed sanity check") == len(files) - len(logs)
    dumped = jars.tool("dump-log", "--files", logs[0], "--deep-iteration", "--print-data-log")
    assert "isvalid: false" not in dumped
    assert [line.split("offset: ")[1].split()[0] for line in dumped.splitlines() if "| offset: " in line] == [
        "1",
        "2",
        "3",
        "5",
        "7",
        "9",
    ]
    assert "deleteHorizonMs: OptionalLong[1700000002000]" in dumped
    assert "baseOffset: 6 lastOffset: 6 count: 0 baseSequence: 0 lastSequence: 0 producerId: 5" in dumped
