# SPDX-License-Identifier: Apache-2.0
"""The Parquet files of bronze.records that the workers write."""

from __future__ import annotations

import pickle
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from kcoord.pipeline.lake import record_files
from kcoord.pipeline.log_files import folders_at
from kcoord.pipeline.options import SourceOptions
from kcoord.pipeline.planning import log_ranges, pack
from kcoord.pipeline.reading import Ranges
from kcoord.pipeline.schemas import RECORDS
from tests.support.offsets_sample import Row, unpack_sample
from tests.unit.pipeline.support import table_rows


def place(row: Row) -> tuple[int, int]:
    return int(str(row["log_partition"])), int(str(row["log_offset"]))


def kind(row: Row) -> str:
    if row["control_type"] is not None:
        return "control"
    return "offset" if row["record_type"] in (0, 1) else "group"


def test_the_files_have_the_records_of_the_source(tmp_path: Path) -> None:
    sample = unpack_sample(tmp_path)
    lake = str(tmp_path / "lake")
    options = SourceOptions.parse({"path": sample, "table": "records", "splitBytes": "300000"})
    folders = folders_at(options.paths, options.topic)
    ranges = [sized_range for folder in folders for sized_range in log_ranges(folder, 300_000)]
    works = [Ranges(packed) for packed in pack(ranges, 300_000)]
    assert len(works) > 4
    facts: list[Row] = []
    for work in (*works, works[0]):  # a repeated task replaces its own file
        facts += record_files.write_ranges(pickle.loads(pickle.dumps(work)), options, lake, 7).to_pylist()
    rows = table_rows(sample)
    for name in record_files.KINDS:
        path = Path(lake, f"kind={name}", "batch=7")
        written = pq.read_table(path, schema=RECORDS.schema(), partitioning=None).to_pylist()
        assert sorted(written, key=place) == sorted((row for row in rows if kind(row) == name), key=place)
        assert not list(path.glob("_*"))
    first_facts = facts[: -len(record_files.write_ranges(works[0], options, lake, 7))]
    assert sum(int(str(fact["rows"])) for fact in first_facts) == len(rows)
    groups = [place(row) for row in rows if kind(row) == "group"]
    last = dict(sorted(groups))
    offsets: dict[object, int] = {}
    for fact in first_facts:
        if fact["group_offset"] is not None:
            number = fact["log_partition"]
            offsets[number] = max(offsets.get(number, -1), int(str(fact["group_offset"])))
    assert offsets == last
    newest = max(row["timestamp"].timestamp() for row in rows if row["timestamp"])  # type: ignore[attr-defined]
    assert max(int(str(fact["newest_ms"])) for fact in first_facts) == round(newest * 1000)


def test_clear_removes_the_files_of_an_earlier_attempt(tmp_path: Path) -> None:
    for batch in (3, 4):
        folder = tmp_path / "kind=offset" / f"batch={batch}"
        folder.mkdir(parents=True)
        (folder / "part-0.parquet").touch()
    record_files.clear(str(tmp_path), 3)
    assert sorted(path.name for path in (tmp_path / "kind=offset").iterdir()) == ["batch=4"]


def test_a_failed_attempt_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = unpack_sample(tmp_path)
    options = SourceOptions.parse({"path": sample, "table": "records"})
    (folder, *_) = folders_at(options.paths, options.topic)
    calls = []

    def fail(*arguments: object) -> None:
        calls.append(arguments)
        if len(calls) == 2:
            raise OSError("no space left")

    monkeypatch.setattr(record_files, "_note_facts", fail)
    work = Ranges([log_range for log_range, _ in log_ranges(folder, 1 << 20)] * 2)
    with pytest.raises(OSError, match="no space left"):
        record_files.write_ranges(work, options, str(tmp_path / "lake"), 1)
    assert not [path for path in (tmp_path / "lake").rglob("*") if path.is_file()]
