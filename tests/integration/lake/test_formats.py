# SPDX-License-Identifier: Apache-2.0
"""A lake in Delta Lake and in Iceberg: the same tables as in Parquet, atomic changes, and readable older versions."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from pyarrow import fs
from pyiceberg.catalog import load_catalog
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import CommitFailedException
from pyiceberg.table import CommitTableResponse
from pyspark.sql import SparkSession

from kcoord.pipeline.lake.errors import LakeError
from kcoord.pipeline.lake.formats import Format, open_store
from kcoord.pipeline.lake.formats.place import LakePlace
from kcoord.pipeline.lake.ingest import ingest
from kcoord.pipeline.lake.jobs import Jobs
from kcoord.pipeline.lake.samples import End, Sample, add_sample
from kcoord.pipeline.lake.settings import MS_PER_MINUTE, LakeSettings
from kcoord.pipeline.lake.storage import Lake, TableNote
from kcoord.pipeline.lake.tables import TABLES
from tests.docs.terminal import blocks_of
from tests.integration.lake.made_log import moment
from tests.support.offsets_sample import Key, committed_offsets, described_offsets, unpack_sample
from tests.support.shared import ROOT
from tests.support.spark import unless_too_busy

FORMATS = (Format.DELTA, Format.ICEBERG)
GUIDE = ROOT / "docs" / "guides" / "maintain-a-lake.md"


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> str:
    return unpack_sample(tmp_path_factory.mktemp("sample"))


def _ingest(lake: Lake, log: str, log_partitions: str) -> None:
    options = {"logPartitions": log_partitions, "checksums": "none"}
    unless_too_busy(lambda: ingest(lake, log, options))


def _current(lake: Lake) -> dict[Key, int]:
    Jobs(lake, LakeSettings(retention_ms=MS_PER_MINUTE)).run("current")
    return committed_offsets(lake.read("current_offsets").collect())


def _versions(lake: Lake) -> list[int]:
    """Returns the number of rows of each version of `current_offsets`, oldest first, read by the format's library."""
    folder = f"{lake.uri}/gold/current_offsets"
    if lake.format is Format.DELTA:
        newest = DeltaTable(folder).version()
        return [DeltaTable(folder, version=version).to_pyarrow_table().num_rows for version in range(1, newest + 1)]
    catalog = load_catalog("kcoord", type="sql", uri=f"sqlite:///{lake.uri}/_kcoord/iceberg.db", warehouse=lake.uri)
    table = catalog.load_table(("gold", "current_offsets"))
    counts = [table.scan(snapshot_id=snapshot.snapshot_id).to_arrow().num_rows for snapshot in table.snapshots()]
    catalog.close()
    return counts


@pytest.mark.parametrize("table_format", FORMATS)
def test_a_lake_grows_by_atomic_changes_exactly_once(
    spark: SparkSession, sample: str, tmp_path: Path, table_format: Format, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = Lake(spark, str(tmp_path / "lake"), table_format)
    _ingest(lake, sample, "3")
    assert _current(lake) == described_offsets(3) != {}

    # A job that fails after writing files and before the change of the metadata does not change the table.
    before = lake.read("current_offsets").toArrow()
    with monkeypatch.context() as broken:
        broken.setattr(pq, "read_metadata", lambda *arguments, **options: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            lake.write("current_offsets", lake.read("current_offsets").limit(1))
    assert lake.read("current_offsets").toArrow().equals(before)

    _ingest(lake, sample, "1,3")
    # This is the note after a crash before the end of the second batch, so the batch is done again.
    places = sorted(map(tuple, lake.read("records").select("log_partition", "log_offset").collect()))
    note = lake.note("records")
    assert note is not None
    lake.set_note("records", TableNote(note.version, {}, {**note.progress, "batch": 0}))
    _ingest(lake, sample, "1,3")
    assert sorted(map(tuple, lake.read("records").select("log_partition", "log_offset").collect())) == places
    assert len(places) == len(set(places)) > 0
    assert _current(lake) == described_offsets(1, 3)

    # Another cluster in the same tables replaces no row of the first one.
    second = Lake(spark, lake.uri, table_format, "second")
    _ingest(second, sample, "3")
    assert _current(second) == described_offsets(3)
    assert _current(lake) == described_offsets(1, 3)
    assert second.clusters() == ["default", "second"]

    # The older version of the table is still readable.
    counts = _versions(lake)
    both = len(described_offsets(1, 3))
    assert counts[0] == len(described_offsets(3)) < both
    assert both in counts and counts[-1] == both + len(described_offsets(3))


@pytest.mark.parametrize("table_format", [*Format])
@pytest.mark.parametrize("is_old", [True, False])
def test_a_table_gets_the_columns_of_a_newer_release(
    spark: SparkSession, tmp_path: Path, table_format: Format, is_old: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lake of an older release has no column `cluster` either."""
    if is_old:
        (tmp_path / "_kcoord").mkdir()
        (tmp_path / "_kcoord" / "format").write_text(table_format.value)
    whole = TABLES["ends"]
    fewer = replace(whole, columns=tuple(column for column in whole.columns if column.name != "created_timestamp"))
    with monkeypatch.context() as older:
        older.setitem(TABLES, "ends", fewer)
        add_sample(Lake(spark, str(tmp_path), table_format), Sample(moment(0), [End("t", "id", 0, 0, 1, None)]))
    newer = Lake(spark, str(tmp_path), table_format)
    assert newer.read("ends").collect()[0]["created_timestamp"] is None
    add_sample(newer, Sample(moment(9), [End("t", "id", 0, 0, 2, moment(5))]))
    rows = newer.read("ends").orderBy("timestamp").collect()
    assert [(row["end_offset"], row["created_timestamp"] is not None) for row in rows] == [(1, False), (2, True)]


def test_a_format_without_its_library_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for table_format in FORMATS:
        with pytest.raises(LakeError, match=rf"pip install '\.\[{table_format}\]'"):
            Lake(lambda: pytest.fail("Spark is not needed"), str(tmp_path / "lake"), table_format)
    assert not (tmp_path / "lake").exists()


def test_iceberg_on_object_storage_needs_a_catalog(spark: SparkSession, tmp_path: Path) -> None:
    elsewhere = LakePlace("s3://bucket/lake", fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem()), "lake")
    with pytest.raises(LakeError, match="PYICEBERG_CATALOG__KCOORD__URI"):
        open_store(lambda: spark, elsewhere, Format.ICEBERG, None)


@pytest.mark.parametrize("table_format", FORMATS)
def test_an_error_of_a_formats_library_is_one_line(
    tmp_path: Path, table_format: Format, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYICEBERG_CATALOG__KCOORD__URI", f"sqlite:///{tmp_path}/nowhere/catalog.db")
    log = tmp_path / "silver" / "ends" / "_delta_log"
    log.mkdir(parents=True)
    (log / f"{0:020}.json").write_text("damaged")
    lake = Lake(lambda: pytest.fail("Spark is not needed"), str(tmp_path), table_format)
    with pytest.raises(LakeError, match=rf"^(catalog kcoord|{log.parent}): .+$") as raised:
        lake.stored_files("ends")
    assert "\n" not in str(raised.value)


def test_a_catalog_of_another_lake_is_rejected(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYICEBERG_CATALOG__KCOORD__TYPE", "sql")
    monkeypatch.setenv("PYICEBERG_CATALOG__KCOORD__URI", f"sqlite:///{tmp_path}/catalog.db")
    first = Lake(spark, str(tmp_path / "one"), Format.ICEBERG)
    first.write("regexes", first.read("regexes"))
    first.append("ends", first.read("ends").toArrow())
    assert first.read("ends").count() == 0
    with pytest.raises(LakeError, match=r"another lake's silver\.ends"):
        Lake(spark, str(tmp_path / "two"), Format.ICEBERG).read("ends")


def test_a_commit_to_iceberg_is_repeated_as_often_as_one_to_delta(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = Lake(lambda: pytest.fail("Spark is not needed"), str(tmp_path), Format.ICEBERG)
    lake.append("ends", pa.Table.from_pylist([], schema=TABLES["ends"].arrow_schema))
    conflicts = [CommitFailedException("a compaction was faster")] * 9
    commit = SqlCatalog.commit_table

    def after_conflicts(*arguments: Any) -> CommitTableResponse:
        if conflicts:
            raise conflicts.pop()
        return commit(*arguments)

    monkeypatch.setattr(SqlCatalog, "commit_table", after_conflicts)
    monkeypatch.setattr("pyiceberg.table.time.sleep", lambda seconds: None)
    add_sample(lake, Sample(moment(0), [End("t", "id", 0, 0, 1, None)]))
    assert not conflicts
    assert len(lake.stored_files("ends")) == 1


def test_the_program_of_the_guide_deletes_files_of_no_version(tmp_path: Path) -> None:
    (program,) = (block.text for block in blocks_of(GUIDE.read_text()) if block.language == "python")
    lake = Lake(lambda: pytest.fail("Spark is not needed"), str(tmp_path), Format.DELTA)
    add_sample(lake, Sample(moment(0), [End("t", "id", 0, 0, 1, None)]))
    left = tmp_path / "silver" / "ends" / "data" / "left.parquet"
    left.write_text("a killed job left it")
    os.utime(left, (0, 0))
    exec(program.replace("/data/lake", lake.uri), {})
    assert not left.exists()
    (stored,) = DeltaTable(str(tmp_path / "silver" / "ends")).file_uris()
    assert Path(stored).exists()
