# SPDX-License-Identifier: Apache-2.0
"""Compactions: the same rows in fewer files, whenever the job is killed or somebody reads, and what is too old goes."""

from __future__ import annotations

import json
import pkgutil
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from itertools import count
from pathlib import Path
from threading import Event, Thread

import pytest
from pyarrow import fs
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from kcoord.cli.lake import main
from kcoord.pipeline.lake.asof import snapshot
from kcoord.pipeline.lake.compaction import Compaction, TableCompaction
from kcoord.pipeline.lake.errors import LakeError
from kcoord.pipeline.lake.formats import Format
from kcoord.pipeline.lake.formats.parquet import ParquetStore
from kcoord.pipeline.lake.jobs import Jobs
from kcoord.pipeline.lake.lease import LeaseError
from kcoord.pipeline.lake.settings import LakeSettings
from kcoord.pipeline.lake.storage import Lake
from kcoord.pipeline.lake.tables import TABLES, LakeTable
from tests.docs.terminal import blocks_of
from tests.integration.lake.made_log import MadeLog, moment
from tests.integration.lake.scenario import DAY, add_samples, fill, first_half, second_half
from tests.support.shared import ROOT

GUIDE = ROOT / "docs" / "guides" / "maintain-a-lake.md"
BATCHES = 4
SAMPLED_SECONDS = (0, 40, DAY, DAY + 40)
BEFORE_S = 40
TABLES_OF_ROWS = ("records", "commits", "current_offsets", "ends")

Rows = list[tuple[object, ...]]


def logs() -> tuple[MadeLog, MadeLog]:
    log, other = first_half()
    second_half(log, other)
    return log, other


@pytest.fixture(scope="module")
def made(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a lake with several batches and samples."""
    folder = tmp_path_factory.mktemp("made")
    fill_lake(spark, Lake(spark, str(folder), cluster="one"))
    return folder


@pytest.fixture
def lake(spark: SparkSession, made: Path, tmp_path: Path) -> Lake:
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return Lake(spark, str(tmp_path))


def fill_lake(spark: SparkSession, lake: Lake) -> None:
    add_batches(spark, lake, 0, BATCHES - 1)
    add_samples(lake, SAMPLED_SECONDS)
    jobs(lake).ensure("current_offsets")


def add_batches(spark: SparkSession, lake: Lake, first: int, last: int) -> None:
    """Writes some of the batches of the logs."""
    for batch in range(first, last + 1):
        parts = []
        for log in logs():
            part = MadeLog(log.log_partition)
            part.rows = log.rows[len(log.rows) * batch // BATCHES : len(log.rows) * (batch + 1) // BATCHES]
            parts.append(part)
        fill(spark, lake, batch, *parts)


def jobs(lake: Lake) -> Jobs:
    return Jobs(lake, LakeSettings(now=moment(200)))


def rows(lake: Lake, name: str) -> Rows:
    """Returns the rows of a table, sorted, without the number of the batch."""
    frame = lake.read(name).drop("batch").toArrow().to_pylist()
    return sorted((tuple(row.values()) for row in frame), key=repr)


def compact(lake: Lake, before: datetime | None = None) -> dict[str, TableCompaction]:
    """Compacts, and removes the replaced files at once."""
    compaction = Compaction(lake, jobs(lake), before)
    done = {table.table: table for table in compaction.run()}
    compaction.remove_replaced()
    return done


@pytest.mark.parametrize("table_format", [*Format])
def test_a_compaction_keeps_all_rows_but_those_that_are_too_old(
    spark: SparkSession, made: Path, tmp_path: Path, table_format: Format
) -> None:
    lake = Lake(spark, str(tmp_path), table_format, "one")
    if table_format is Format.PARQUET:
        shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    else:
        fill_lake(spark, lake)
    other = Lake(spark, str(tmp_path), table_format, "two")
    add_batches(spark, other, 0, 1)
    before = {name: rows(lake, name) for name in TABLES_OF_ROWS}
    files = lake_files(other, "records")
    compactor = Lake(spark, str(tmp_path), table_format, "one")

    done = compact(compactor)

    assert {name for name, table in done.items() if table.merged} == {"records", "commits", "ends"}
    assert {name: rows(lake, name) for name in before} == before
    for name, number in (("commits", 1), ("records", 3), ("ends", 3)):
        # A frame from before the compaction would read files that a vacuum removes some day.
        assert len(lake.stored_files(name)) == len(lake.read(name).inputFiles()) == number

    done = compact(compactor, moment(BEFORE_S))

    expected = set.union(*map(surviving, logs()))
    assert done["records"].removed_rows == len(before["records"]) - len(expected) > 20
    assert places(lake, "records") == expected
    assert places(lake, "commits") == expected & places(lake, "commits")
    assert lake_files(other, "records") == files
    # Days of samples go as a whole, and the newest day stays.
    compact(lake, moment(9 * DAY))
    assert {row[3] for row in rows(lake, "ends")} == {moment(second) for second in SAMPLED_SECONDS[2:]}


def test_jobs_go_on_after_a_compaction(spark: SparkSession, made: Path, tmp_path: Path) -> None:
    lake = Lake(spark, str(tmp_path), cluster="one")
    add_batches(spark, lake, 0, 1)
    compact(lake)
    add_batches(spark, lake, 2, 3)
    jobs(lake).ensure("current_offsets")
    for name in ("records", "commits", "current_offsets"):
        assert rows(lake, name) == rows(Lake(spark, str(made)), name), name
    # With other settings, commits are made again from records that were merged.
    Jobs(lake, LakeSettings(retention_ms=1000)).ensure("commits")
    assert len(rows(lake, "commits")) == len(places(lake, "commits")) == len(rows(Lake(spark, str(made)), "commits"))


def lake_files(lake: Lake, name: str) -> list[tuple[str, int]]:
    return sorted((file.value, file.size_bytes) for file in lake.stored_files(name))


class Killed(BaseException):
    """Stands for SIGKILL: nothing of the package catches it."""


class KilledFiles:
    """A file system for a process that is killed when it makes its change number `left`."""

    def __init__(self, left: int) -> None:
        self._files = fs.LocalFileSystem()
        self.left = left

    def __getattr__(self, name: str) -> object:
        if name in ("create_dir", "delete_dir", "delete_file", "move", "open_output_stream"):
            if self.left == 0:
                raise Killed
            self.left -= 1
        return getattr(self._files, name)


def test_a_rewrite_that_is_killed_at_any_change_shows_each_row_once(
    spark: SparkSession, lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = rows(lake, "commits")
    for changes in count():
        files = KilledFiles(changes)
        with monkeypatch.context() as killed:
            killed.setattr("kcoord.pipeline.lake.formats.place.file_system", lambda uri, files=files: (files, uri))
            job = Lake(spark, str(tmp_path))
            one_batch = job.read("commits").withColumn("batch", F.lit(BATCHES - 1).cast("bigint"))
            try:
                job.remove_replaced("commits")
                job.rewrite("commits", one_batch, [*map(str, range(BATCHES))])
                job.remove_replaced("commits")
                break
            except Killed:
                assert rows(lake, "commits") == before, changes
    assert changes > 10
    assert rows(lake, "commits") == before
    assert len([*(tmp_path / "silver" / "commits").rglob("*.parquet")]) == 1


def test_readers_see_each_row_once_while_files_are_merged(spark: SparkSession, lake: Lake, tmp_path: Path) -> None:
    follower = Lake(spark, str(tmp_path))
    begun = follower.read("records")
    expected = begun.count()
    compaction = Compaction(lake, jobs(lake))
    with reader_of(tmp_path, spark) as counts:
        assert any(table.merged for table in compaction.run())
    assert set(counts) == {expected}
    # Replaced files stay for those who have begun, and nobody needs them who reads later.
    assert begun.count() == expected
    compaction.remove_replaced()
    assert follower.read("records").count() == expected


@contextmanager
def reader_of(folder: Path, spark: SparkSession) -> Iterator[list[int]]:
    """Counts the records again and again in a thread. Yields the counts."""
    counts: list[int] = []
    stop = Event()

    def read() -> None:
        while not stop.is_set() or not counts:
            counts.append(Lake(spark, str(folder)).read("records").count())

    thread = Thread(target=read)
    thread.start()
    try:
        yield counts
    finally:
        stop.set()
        thread.join()


def test_two_compactions_at_once_lose_nothing(spark: SparkSession, lake: Lake) -> None:
    before = rows(lake, "commits")

    class Interrupted(ParquetStore):
        def _write_unfinished(self, table: LakeTable, frame: DataFrame, folder: str) -> dict[str, str]:
            moves = super()._write_unfinished(table, frame, folder)
            compact(lake)
            return moves

    slower = Interrupted(lambda: spark, lake._place, "one")
    with pytest.raises(LakeError, match="another job rewrites the table"):
        slower.rewrite(TABLES["commits"], lake.read("commits"), ["0", "1"])
    compact(lake)
    assert rows(lake, "commits") == before


def test_one_compaction_at_a_time_works_on_a_cluster(
    spark: SparkSession, lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one would take new files for replaced ones in the moment before the last step, and remove them."""
    monkeypatch.setattr("kcoord.pipeline.lake.lease.WAIT_SECONDS", 0)
    other = Compaction(Lake(spark, str(tmp_path)), jobs(lake))
    running = Compaction(lake, jobs(lake)).run()
    next(running)
    for again in (lambda: [*other.run()], other.remove_replaced):
        with pytest.raises(LeaseError, match="compacts tables since"):
            again()
    assert [table.table for table in running if table.merged]
    other.remove_replaced()
    assert len(lake.stored_files("commits")) == 1


@pytest.mark.parametrize(
    ("table_format", "change"),
    [(Format.DELTA, "deltalake.DeltaTable.create_write_transaction"),
     (Format.ICEBERG, "pyiceberg.table.Transaction.commit_transaction")],
)  # fmt: skip
def test_a_batch_is_written_although_others_are_merged_at_that_moment(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table_format: Format, change: str
) -> None:
    lake = Lake(spark, str(tmp_path), table_format, "one")
    add_batches(spark, lake, 0, 1)
    jobs(lake).ensure("current_offsets")
    owner, _, name = change.rpartition(".")
    method = pkgutil.resolve_name(change)

    def delayed(*arguments: object) -> object:
        monkeypatch.setattr(pkgutil.resolve_name(owner), name, method)
        compact(Lake(spark, str(tmp_path), table_format))
        return method(*arguments)

    monkeypatch.setattr(pkgutil.resolve_name(owner), name, delayed)
    add_batches(spark, lake, 2, 2)
    expected = {(log.log_partition, offset) for log in logs() for offset in range(len(log.rows) * 3 // BATCHES)}
    assert places(lake, "records") == expected
    assert len(rows(lake, "records")) == len(expected)
    assert {file.value for file in lake.stored_files("records")} == {"1", "2"}


def surviving(log: MadeLog) -> set[tuple[int, int]]:
    """Returns the places of the records that a compaction with BEFORE_S keeps, found one by one."""
    kept: set[int] = set()
    last: dict[object, tuple[int, int]] = {}
    """The effective offset and the log offset of the newest old record of each key."""
    for offset, row in enumerate(log.rows):
        at = row.get("marker_timestamp") or row["timestamp"]
        assert isinstance(at, datetime)
        if at >= moment(BEFORE_S) or row.get("group_end"):
            kept.add(offset)
        effective = row["effective_offset"]
        if at < moment(BEFORE_S) and isinstance(effective, int):
            last[row["key"]] = max((effective, offset), last.get(row["key"], (-1, -1)))
    kept |= {offset for _, offset in last.values() if not log.rows[offset]["is_tombstone"]}
    return {(log.log_partition, offset) for offset in kept}


def test_every_answer_about_later_times_stays(lake: Lake) -> None:
    moments = [moment(second) for second in (BEFORE_S, DAY)]
    before = [states(lake, at) for at in moments]
    planned = {table.table: table for table in Compaction(lake, jobs(lake), moment(BEFORE_S)).run(dry_run=True)}
    assert len(rows(lake, "records")) == sum(len(log.rows) for log in logs())
    assert compact(lake, moment(BEFORE_S)) == planned
    assert [states(lake, at) for at in moments] == before
    assert places(lake, "group_epochs") <= places(lake, "records")
    assert not any(table.removed_rows for table in compact(lake, moment(BEFORE_S)).values())


def test_a_tombstone_stays_while_a_commit_before_it_does(spark: SparkSession, tmp_path: Path) -> None:
    """A new coordinator has a clock that is behind, so the tombstone seems older than the commit that it removes."""
    log, other = MadeLog(0), MadeLog(1)
    log.commit("g", 0, 5, BEFORE_S + 5)
    log.commit("g", 0, None, BEFORE_S - 5)
    log.member("g", "m", BEFORE_S + 5)
    log.member_gone("g", "m", BEFORE_S - 5)
    log.commit("g", 1, 7, BEFORE_S - 6)
    log.commit("g", 1, None, BEFORE_S - 5)
    lake = Lake(spark, str(tmp_path), cluster="one")
    fill(spark, lake, 0, log, other)

    done = compact(lake, moment(BEFORE_S))

    assert (done["commits"].removed_rows, done["records"].removed_rows) == (2, 4)
    then = snapshot(lake, jobs(lake), moment(DAY))
    assert then.offsets.collect() == then.members.collect() == []


def places(lake: Lake, name: str) -> set[tuple[int, int]]:
    return set(map(tuple, lake.read(name).select("log_partition", "log_offset").collect()))


def states(lake: Lake, at: datetime) -> list[list[tuple[object, ...]]]:
    """Returns every group as it was at a moment, without when it came to be so."""
    then = snapshot(lake, jobs(lake), at)
    frames = (then.offsets, then.groups, then.members, then.assignments)
    return [sorted(map(tuple, frame.drop("from_timestamp").collect()), key=repr) for frame in frames]


def test_the_command_prints_what_it_does(lake: Lake, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["compact", "--lake", str(tmp_path), "--grace", "0"]
    assert main([*command, "--dry-run"]) == 0
    planned = capsys.readouterr().out
    assert "one: commits: 4 of 4 files" in planned and len(lake.stored_files("commits")) == 4
    (session,) = (block.text for block in blocks_of(GUIDE.read_text()) if block.title == "a compaction")
    shown, _, output = session.partition("\n")
    assert main(shown.replace("/data/lake", str(tmp_path)).split()[3:]) == 0
    assert capsys.readouterr().out == output
    assert main([*command, "--json"]) == 0
    done = {table["table"]: table for table in json.loads(capsys.readouterr().out)}
    assert done["commits"]["merged"] == 4 and done["commits"]["removed_rows"] == 0
    assert len([*(tmp_path / "silver" / "commits").rglob("*.parquet")]) == 1
    assert main(["compact", "--lake", str(tmp_path / "none")]) == 1
    assert "has no records" in capsys.readouterr().err
