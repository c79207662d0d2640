# SPDX-License-Identifier: Apache-2.0
"""The job `current` with more keys than are sent to every worker: the plan differs, and the answer is the same.

The limit is a million keys. The test lowers it to a hundredth. `make soak` runs it with the real limit, by
`KCOORD_LAKE_KEYS=1010000`.

Key `i` has group `i / 100`, partition `i % 100` and log partition `i % 4`. The first micro-batch commits every key with
offset `i`, commits every third key again, and removes every seventh key. The second micro-batch commits every eleventh
key again.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession

from kcoord.pipeline.lake import current, jobs
from kcoord.pipeline.lake.jobs import Jobs
from kcoord.pipeline.lake.settings import MS_PER_MINUTE, LakeSettings
from kcoord.pipeline.lake.storage import Lake, TableNote
from kcoord.pipeline.lake.tables import TABLES

KEYS = int(os.environ.get("KCOORD_LAKE_KEYS", "10100"))
MOST_PLACES = min(jobs._MOST_PLACES, KEYS - KEYS // 100)
AGAIN = 2 * KEYS
"""A second commit adds this to the offset."""
SETTINGS = LakeSettings(retention_ms=MS_PER_MINUTE)
NOT_THERE = np.iinfo(np.int64).min
Numbers = npt.NDArray[np.int64]

COMPILED = {
    # The session of the other tests is tuned for tables of ten rows.
    "spark.sql.codegen.wholeStage": "true",
    "spark.sql.codegen.factoryMode": "FALLBACK",
    "spark.sql.shuffle.partitions": "4",
}


def commits(spark: SparkSession, batch: int, turn: int, where: str, offset: str) -> DataFrame:
    """Makes a commit of each key that `where` selects, with log offsets after those of earlier turns.

    `where` and `offset` are SQL, in which `id` is the number of the key. A null offset makes a tombstone.
    """
    return (
        spark.range(KEYS)
        .where(where)
        .selectExpr(
            "CAST(id % 4 AS int) AS log_partition",
            f"id + {turn * KEYS} AS log_offset",
            f"id + {turn * KEYS} AS effective_offset",
            "concat('group-', id DIV 100) AS `group`",
            "'orders' AS topic",
            "CAST(id % 100 AS int) AS partition",
            f"CAST({offset} AS bigint) AS committed_offset",
            f"({offset}) IS NULL AS is_tombstone",
            f"CAST({batch} AS bigint) AS batch",
        )
    )


def add(lake: Lake, batch: int, *parts: DataFrame) -> None:
    """Writes the table `commits` and its note as `Jobs` does."""
    frame = lake.spark.createDataFrame([], TABLES["commits"].schema)
    for part in parts:
        frame = frame.unionByName(part, allowMissingColumns=True)
    lake.write("commits", frame)
    lake.set_note("records", TableNote(batch + 1, {}, {"batch": batch}))
    lake.set_note("commits", TableNote(batch + 1, {"retention_ms": str(SETTINGS.retention_ms)}, {"batch": batch}))


def offsets(lake: Lake) -> Numbers:
    """Returns the offsets of `current_offsets` by key, NOT_THERE for missing keys. Checks that no key occurs twice."""
    table = pq.read_table(lake.path(TABLES["current_offsets"]), columns=["group", "partition", "committed_offset"])
    group = pc.cast(pc.utf8_slice_codeunits(table["group"], len("group-")), "int64").to_numpy()
    keys = group * 100 + table["partition"].to_numpy()
    assert len(np.unique(keys)) == len(keys)
    by_key = np.full(KEYS, NOT_THERE)
    by_key[keys] = table["committed_offset"].to_numpy()
    return by_key


def test_current_offsets_of_more_keys_than_are_sent_are_exact(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "_MOST_PLACES", MOST_PLACES)
    assert KEYS > MOST_PLACES
    session = spark.newSession()
    for key, value in COMPILED.items():
        session.conf.set(key, value)
    lake = Lake(session, str(tmp_path / "lake"))
    add(
        lake,
        0,
        commits(session, 0, 0, "true", "id"),
        commits(session, 0, 1, "id % 3 = 0", f"id + {AGAIN}"),
        commits(session, 0, 2, "id % 7 = 0", "null"),
    )
    plans: list[str] = []
    at_places = current.at_places

    def noted(rows: DataFrame, places: DataFrame) -> DataFrame:
        plans.append("places")
        return at_places(rows, places)

    monkeypatch.setattr(current, "at_places", noted)
    Jobs(lake, SETTINGS).run("current")
    # There are too many places to send them to every worker.
    assert plans == []
    number = np.arange(KEYS)
    expected = np.where(number % 3 == 0, number + AGAIN, number)
    expected[::7] = NOT_THERE
    assert np.count_nonzero(expected != NOT_THERE) == KEYS - len(range(0, KEYS, 7))
    assert np.array_equal(offsets(lake), expected)

    add(lake, 1, commits(session, 1, 3, "id % 11 = 0", "-id - 1"))
    Jobs(lake, SETTINGS).run("current")
    # The few new places are sent, and the new commits are merged with the table.
    assert plans == ["places"]
    expected[::11] = -number[::11] - 1
    assert np.array_equal(offsets(lake), expected)
