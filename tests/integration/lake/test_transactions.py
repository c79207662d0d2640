# SPDX-License-Identifier: Apache-2.0
"""Transactions and deletions in a growing lake: compares its tables with a coordinator that loads the same log."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from random import Random

from pyspark.sql import SparkSession

from kcoord.pipeline.lake.asof import snapshot
from kcoord.pipeline.lake.ingest import ingest
from kcoord.pipeline.lake.jobs import Jobs
from kcoord.pipeline.lake.settings import LakeSettings
from kcoord.pipeline.lake.storage import Lake
from tests.support.coordinator_log import Step, batches_of, offsets_of, random_log, replayed
from tests.support.offsets_sample import committed_offsets
from tests.support.spark import unless_too_busy
from tests.unit.pipeline.support import NOW_MS, LogWriter

BEGIN = datetime.fromtimestamp(NOW_MS / 1000, UTC)


def grown(spark: SparkSession, folder: Path, batches: list[bytes], *ends: int) -> Lake:
    """Makes a lake that reads the log and updates its tables at each of these numbers of batches, and at the end."""
    lake = Lake(spark, str(folder / "lake"))
    writer = LogWriter(folder / "log")
    for begin, end in pairwise((0, *ends, len(batches))):
        for batch in batches[begin:end]:
            writer.append(batch)
        unless_too_busy(lambda: ingest(lake, str(folder / "log")))
        Jobs(lake, LakeSettings()).run("current")
    writer.close()
    return lake


def check_as_of(lake: Lake, batches: list[bytes], *counts: int) -> None:
    """Compares the state after each of these numbers of batches. These logs have one batch per millisecond."""
    jobs = Jobs(lake, LakeSettings())
    for count in counts:
        as_of = snapshot(lake, jobs, BEGIN + timedelta(milliseconds=count - 1))
        assert committed_offsets(as_of.offsets.collect()) == offsets_of(replayed(batches[:count])), count


def test_a_lake_that_grows_has_the_offsets_of_the_coordinator(spark: SparkSession, tmp_path: Path) -> None:
    batches = batches_of(random_log(Random(16), 120))
    lake = grown(spark, tmp_path, batches, 40, 80)
    assert committed_offsets(lake.read("current_offsets").collect()) == offsets_of(replayed(batches))
    check_as_of(lake, batches, 39, 41, 60, 79, 81, 100, len(batches))


def test_commits_count_from_a_marker_that_a_later_micro_batch_has(spark: SparkSession, tmp_path: Path) -> None:
    """The first micro-batch ends where the open transaction of producer 8 begins. The marker of producer 7 follows."""
    steps = [
        Step("commit offsets", producer_id=7),
        Step("commit offsets", "h", producer_id=8),
        Step("commit", producer_id=7),
        Step("commit", producer_id=8),
    ]
    batches = batches_of(steps)
    lake = grown(spark, tmp_path, batches, 3)
    check_as_of(lake, batches, 1, 2, 3, 4)
