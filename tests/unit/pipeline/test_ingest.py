# SPDX-License-Identifier: Apache-2.0
"""`ingest` in this process, without Spark: batches, crashes between its steps, and checkpoints of older releases."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import NoReturn

import pyarrow.parquet as pq
import pytest

from kcoord.pipeline.errors import DataLossError, OtherTopicError
from kcoord.pipeline.lake import record_files
from kcoord.pipeline.lake.errors import LakeError
from kcoord.pipeline.lake.ingest import PLAN, Ingest, Ingested, ingest
from kcoord.pipeline.lake.storage import Lake
from kcoord.pipeline.options import OptionError, SourceOptions
from tests.support.coordinator_log import batches_of, random_log
from tests.unit.pipeline.support import LogWriter, table_rows

FEW_BYTES = {"maxBytesPerTrigger": "1500", "splitBytes": "4096"}

Place = tuple[int, int]


class CrashError(Exception):
    """Stands for a kill -9."""


def no_spark() -> NoReturn:
    raise AssertionError("a small batch needs no Spark")


def lake_at(folder: Path) -> Lake:
    return Lake(no_spark, str(folder / "lake"))


@pytest.fixture
def log(tmp_path: Path) -> str:
    folder = tmp_path / "log"
    for number in range(3):
        writer = LogWriter(folder, number, segment_bytes=4000)
        for batch in batches_of(random_log(Random(number), 60)):
            writer.append(batch)
        writer.close()
    return str(folder)


def places(lake: Lake) -> list[Place]:
    """Returns the place of every record in the lake, with repetitions."""
    rows: list[Place] = []
    for path in Path(lake.uri, "bronze", "records").rglob("[!_]*.parquet"):
        table = pq.read_table(path, columns=["log_partition", "log_offset"], partitioning=None)
        rows += [(row["log_partition"], row["log_offset"]) for row in table.to_pylist()]
    return sorted(rows)


def places_in_log(log: str) -> list[Place]:
    return sorted((int(str(row["log_partition"])), int(str(row["log_offset"]))) for row in table_rows(log))


def test_each_record_is_copied_once_in_batches(tmp_path: Path, log: str) -> None:
    lake = lake_at(tmp_path)
    done = ingest(lake, log, FEW_BYTES)
    assert [batch.batch for batch in done] == [*range(len(done))]
    assert len(done) > 3
    assert places(lake) == places_in_log(log)
    assert done[-1].total == sum(batch.rows for batch in done) == len(places(lake))
    left = [sum(batch.left_bytes.values()) for batch in done]
    assert left == sorted(left, reverse=True) and left[0] > left[-1] == 0
    assert ingest(lake, log) == []


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [("groups", "g", "a lake gets all groups"), ("isolationLevel", "read_uncommitted", "a lake needs read_committed")],
)
def test_an_option_must_not_leave_out_records(tmp_path: Path, log: str, name: str, value: str, reason: str) -> None:
    """Later copies would not read the other groups, or the outcome of a transaction that was open."""
    with pytest.raises(OptionError, match=f"^{name}: {reason}"):
        ingest(lake_at(tmp_path), log, {name: value})
    assert not (tmp_path / "lake").exists()
    ingest(lake_at(tmp_path), log, {"logPartitions": "1"})
    ingest(lake_at(tmp_path), log)
    assert places(lake_at(tmp_path)) == places_in_log(log)


def test_a_new_ingest_reads_what_follows(tmp_path: Path, log: str) -> None:
    lake = lake_at(tmp_path)
    ingest(lake, log)
    writer = LogWriter(Path(log), 0)
    for batch in batches_of(random_log(Random(9), 20)):
        writer.append(batch)
    writer.close()
    (done,) = ingest(lake_at(tmp_path), log)
    assert done.batch == 1
    assert places(lake) == places_in_log(log)


@pytest.mark.parametrize("step", ["write", "note"])
def test_a_batch_that_was_not_done_is_done_again_with_the_same_files(
    tmp_path: Path, log: str, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second run would cut the batch into other ranges, and finds more records in the log."""
    lake = lake_at(tmp_path)
    job = Ingest(lake, SourceOptions.parse({"path": log, **FEW_BYTES}))
    assert job.next() is not None
    with monkeypatch.context() as crashing:
        if step == "note":
            crashing.setattr(Lake, "set_note", _crash)
        else:
            crashing.setattr(record_files, "_note_facts", _crash)
        with pytest.raises(CrashError):
            job.next()
    before = files(lake)
    writer = LogWriter(Path(log), 2)
    for batch in batches_of(random_log(Random(7), 20)):
        writer.append(batch)
    writer.close()
    again = Ingest(lake_at(tmp_path), SourceOptions.parse({"path": log, "splitBytes": "1000000"}))
    assert sum(again.left_bytes().values()) > 0
    done: Ingested | None = again.next()
    assert done is not None and done.batch == 1
    if step == "note":
        assert files(lake) == before
    assert [*iter(again.next, None)]
    assert places(lake) == places_in_log(log)


def test_two_copies_that_take_turns_copy_each_record_once(tmp_path: Path) -> None:
    """The second one begins while the first one follows the log, as a report does beside `ingest --follow`."""
    options = SourceOptions.parse({"path": str(tmp_path / "log")})
    grow(tmp_path, 1)
    first = Ingest(lake_at(tmp_path), options)
    assert [batch.batch for batch in iter(first.next, None)] == [0]
    grow(tmp_path, 2)
    second = Ingest(lake_at(tmp_path), options)
    assert [batch.batch for batch in iter(first.next, None)] == [1]
    grow(tmp_path, 3)
    assert [batch.batch for batch in iter(second.next, None)] == [2]
    grow(tmp_path, 4)
    assert [batch.batch for batch in iter(first.next, None)] == [3]
    assert places(lake_at(tmp_path)) == places_in_log(str(tmp_path / "log"))


def grow(folder: Path, seed: int) -> None:
    writer = LogWriter(folder / "log", 0)
    for batch in batches_of(random_log(Random(seed), 10)):
        writer.append(batch)
    writer.close()


def test_a_copy_that_lost_its_lease_writes_no_plan_and_no_note(
    tmp_path: Path, log: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process stood still before the step, and another one copied the batch meanwhile."""
    for name, step in (("_store", 0), ("_write", 1)):
        lake = lake_at(tmp_path / name)
        job = Ingest(lake, SourceOptions.parse({"path": log}))
        method = getattr(Ingest, name)

        def stand_still(self: Ingest, *arguments: object, method: object = method, lake: Lake = lake) -> object:
            assert callable(method)
            monkeypatch.setattr(lake.lease("ingest"), "check", _crash)
            return method(self, *arguments)

        with monkeypatch.context() as stalled:
            stalled.setattr(Ingest, name, stand_still)
            with pytest.raises(CrashError):
                job.next()
        assert (lake.text(PLAN) is not None, lake.note("records")) == (bool(step), None)


def _crash(*arguments: object) -> NoReturn:
    raise CrashError


def files(lake: Lake) -> set[str]:
    return {str(path) for path in Path(lake.uri, "bronze").rglob("*.parquet")}


@pytest.mark.parametrize("is_done", [True, False])
def test_a_checkpoint_of_an_older_release_is_continued(tmp_path: Path, log: str, is_done: bool) -> None:
    """The checkpoint of Spark has two batches. The second was done, or not. The lake has one nameless cluster."""
    notes = tmp_path / "lake" / "_kcoord"
    notes.mkdir(parents=True)
    (notes / "format").write_text("parquet")
    old = lake_at(tmp_path)
    job = Ingest(old, SourceOptions.parse({"path": log, **FEW_BYTES}))
    ends = []
    for _ in range(2):
        assert job.next() is not None
        ends.append({name: end for name, end in _plan(old)["end"].items() if name != "topic_id"})
    _write_checkpoint(notes / "checkpoint", ends)
    (notes / PLAN).unlink()
    if not is_done:
        note = json.loads((notes / "records.json").read_text())
        note["progress"]["batch"] = 0
        (notes / "records.json").write_text(json.dumps(note))
    lake = lake_at(tmp_path)
    done = ingest(lake, log)
    assert [batch.batch for batch in done] == ([2] if is_done else [1, 2])
    assert places(lake) == places_in_log(log)
    assert lake.cluster is None
    with pytest.raises(LakeError, match="is of an older release, and has one cluster only"):
        Lake(no_spark, lake.uri, cluster="second")


def _plan(lake: Lake) -> dict[str, dict[str, int]]:
    plan: dict[str, dict[str, int]] = json.loads(lake.text(PLAN) or "")
    return plan


def _write_checkpoint(folder: Path, ends: Iterable[dict[str, int]]) -> None:
    (folder / "offsets").mkdir(parents=True)
    for batch, end in enumerate(ends):
        text = f'v1\n{{"batchWatermarkMs":0,"conf":{{}}}}\n{json.dumps(end)}'
        (folder / "offsets" / str(batch)).write_text(text)
        (folder / "offsets" / f".{batch}.crc").write_text("crc")


def test_a_lake_without_its_plan_is_refused(tmp_path: Path, log: str) -> None:
    ingest(lake_at(tmp_path), log)
    Path(tmp_path, "lake", "_kcoord", "cluster=default", PLAN).unlink()
    with pytest.raises(LakeError, match=r"ingest\.json does not exist, so it is unknown which records the lake has"):
        ingest(lake_at(tmp_path), log)


@pytest.mark.parametrize("is_empty", [False, True])
def test_a_lake_that_begins_at_the_latest_offset_has_what_follows_the_first_copy(
    tmp_path: Path, is_empty: bool
) -> None:
    log, latest = str(tmp_path / "log"), {"startingOffsets": "latest"}
    if is_empty:
        LogWriter(tmp_path / "log").close()
    else:
        grow(tmp_path, 1)
    old = places_in_log(log)
    assert ingest(lake_at(tmp_path), log, latest) == []
    assert ingest(lake_at(tmp_path), log, latest) == []
    grow(tmp_path, 2)
    assert [batch.batch for batch in ingest(lake_at(tmp_path), log, latest)] == [0]
    grow(tmp_path, 3)
    assert [batch.batch for batch in ingest(lake_at(tmp_path), log)] == [1]
    assert places(lake_at(tmp_path)) == places_in_log(log)[len(old) :]


def test_a_start_that_the_log_does_not_have_can_be_corrected(tmp_path: Path) -> None:
    grow(tmp_path, 1)
    log, wrong = str(tmp_path / "log"), {"startingOffsets": '{"0": 1000000}', "failOnDataLoss": "true"}
    for _ in range(2):
        with pytest.raises(DataLossError):
            ingest(lake_at(tmp_path), log, wrong)
    ingest(lake_at(tmp_path), log)
    assert places(lake_at(tmp_path)) == places_in_log(log)


def test_a_first_run_that_failed_does_not_give_its_cluster_to_another_one(tmp_path: Path) -> None:
    """It leaves notes, but no records and no id."""
    failed = lake_at(tmp_path)
    failed.choose("A")
    failed.replace_text("settings.json", "{}")
    other = lake_at(tmp_path)
    other.bind("B")
    assert (other.cluster, other.clusters()) == ("B", ["A", "B"])


@pytest.mark.parametrize("name", [PLAN, "records.json", "settings.json"])
def test_a_damaged_file_of_the_notes_is_named(tmp_path: Path, log: str, name: str) -> None:
    lake = lake_at(tmp_path)
    ingest(lake, log)
    path = Path(tmp_path, "lake", "_kcoord", "cluster=default", name)
    for text in ("", "{", "[]"):
        path.write_text(text)
        with pytest.raises(LakeError, match=rf"^{path} is damaged: restore it"):
            lake.stored_settings() if name == "settings.json" else ingest(lake_at(tmp_path), log)


# --- clusters ---------------------------------------------------------------------------------------------------------


def name_cluster(log: str, cluster_id: str) -> str:
    """Makes the log that of a broker of a cluster."""
    Path(log, "meta.properties").write_text(f"version=1\ncluster.id={cluster_id}\nnode.id=1\n")
    return log


def other_log(tmp_path: Path) -> str:
    writer = LogWriter(tmp_path / "other", 0)
    for batch in batches_of(random_log(Random(5), 10)):
        writer.append(batch)
    writer.close()
    return str(tmp_path / "other")


def test_each_cluster_has_its_own_place_in_a_lake(tmp_path: Path, log: str) -> None:
    other = name_cluster(other_log(tmp_path), "B")
    ingest(lake_at(tmp_path), name_cluster(log, "A"))
    ingest(lake_at(tmp_path), other)
    lake = lake_at(tmp_path)
    assert lake.clusters() == ["A", "B"]
    assert places(lake) == sorted([*places_in_log(log), *places_in_log(other)])
    with pytest.raises(LakeError, match=r"has the clusters A, B: choose one \(--cluster\)"):
        lake.note("records")
    assert ingest(lake_at(tmp_path), log) == []
    note = Lake(no_spark, lake.uri, cluster="B").note("records")
    assert note is not None and note.progress["rows"] == len(places_in_log(other))
    with pytest.raises(LakeError, match=r"has the cluster B under the name B, not A: choose another name"):
        ingest(Lake(no_spark, lake.uri, cluster="B"), log)
    with pytest.raises(LakeError, match="cluster 'a/b': a name has 1 to 247 letters"):
        Lake(no_spark, lake.uri, cluster="a/b")


def test_a_name_of_a_cluster_stays(tmp_path: Path, log: str) -> None:
    """The first `ingest` names the cluster, whose id is unknown. The next ones find it by its id."""
    uri = str(tmp_path / "lake")
    ingest(Lake(no_spark, uri, cluster="production"), log)
    writer = LogWriter(Path(log), 0)
    for batch in batches_of(random_log(Random(9), 5)):
        writer.append(batch)
    writer.close()
    assert len(ingest(Lake(no_spark, uri), name_cluster(log, "A"))) == 1
    ingest(Lake(no_spark, uri), name_cluster(other_log(tmp_path), "B"))
    lake = Lake(no_spark, uri)
    assert lake.clusters() == ["B", "production"]
    assert ingest(Lake(no_spark, uri), log) == []


def test_a_cluster_is_kept_under_one_name(tmp_path: Path, log: str) -> None:
    lake = lake_at(tmp_path)
    ingest(lake, name_cluster(log, "A"))
    with pytest.raises(
        LakeError, match=r"has the cluster A under the name A already: omit --cluster, or give that name"
    ):
        ingest(Lake(no_spark, lake.uri, cluster="production"), log)
    assert lake.clusters() == ["A"]
    assert ingest(Lake(no_spark, lake.uri, cluster="A"), log) == []


def test_the_log_of_another_cluster_leaves_a_cluster_without_an_id_as_it_is(tmp_path: Path, log: str) -> None:
    """The lake was begun from a copied folder. The topic's id shows that the second log is another cluster's."""
    name_topic(log, "AAAAAAAAAAAAAAAAAAAAAQ")
    ingest(lake_at(tmp_path), log)
    other = name_cluster(other_log(tmp_path), "B")
    name_topic(other, "AAAAAAAAAAAAAAAAAAAAAg")
    with pytest.raises(OtherTopicError):
        ingest(lake_at(tmp_path), other)
    assert ingest(lake_at(tmp_path), name_cluster(log, "A")) == []
    lake = lake_at(tmp_path)
    assert (lake.clusters(), lake.text("cluster_id")) == (["default"], "A")
    assert len(ingest(lake_at(tmp_path), other)) == 1


def name_topic(log: str, topic_id: str) -> None:
    for folder in Path(log).glob("__consumer_offsets-*"):
        (folder / "partition.metadata").write_text(f"version: 0\ntopic_id: {topic_id}\n")


def test_a_lake_of_an_older_release_goes_on_with_its_only_cluster(tmp_path: Path, log: str) -> None:
    notes = tmp_path / "lake" / "_kcoord"
    notes.mkdir(parents=True)
    (notes / "format").write_text("parquet")
    ingest(lake_at(tmp_path), name_cluster(log, "A"))
    assert (notes / "records.json").exists() and (tmp_path / "lake" / "bronze" / "records" / "kind=offset").exists()
    with pytest.raises(LakeError, match="has the cluster A, not B: begin another lake"):
        ingest(lake_at(tmp_path), name_cluster(other_log(tmp_path), "B"))
