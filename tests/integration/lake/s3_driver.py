# SPDX-License-Identifier: Apache-2.0
"""Grows lakes on S3 in two steps, compacts them, and removes history from them.

`python -m tests.integration.lake.s3_driver LOG FORMAT=URI...` is a process of its own, since the JVM needs the jars of
Hadoop's S3 file system at its start. Each step uses a new `Lake` object. After each step of growth it prints the format
and the committed offsets as a line of JSON. The last line has the retries because of a busy machine.
"""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout

from kcoord.cli import lake as cli
from kcoord.pipeline.lake.formats import Format
from kcoord.pipeline.lake.ingest import ingest
from kcoord.pipeline.lake.jobs import Jobs
from kcoord.pipeline.lake.session import get_session
from kcoord.pipeline.lake.settings import MS_PER_MINUTE, LakeSettings
from kcoord.pipeline.lake.storage import Lake
from tests.support.client_races import take_retries
from tests.support.hadoop_jars import s3_jars
from tests.support.offsets_sample import Key, committed_offsets
from tests.support.spark import small_settings, unless_too_busy

WITHOUT_WAITING = {
    # The test server does not support `Expect: 100-continue`, so each upload would wait for a response to it.
    "spark.hadoop.fs.s3a.connection.expect.continue": "false",
}
STEPS = ((1,), (1, 3))
RETRIES = "retries"


def grow(lake: Lake, log: str, log_partitions: tuple[int, ...]) -> None:
    chosen = ",".join(map(str, log_partitions))
    unless_too_busy(lambda: ingest(lake, log, {"logPartitions": chosen}))


def current(lake: Lake) -> dict[Key, int]:
    Jobs(lake, LakeSettings(retention_ms=MS_PER_MINUTE)).run("current")
    return committed_offsets(lake.read("current_offsets").collect())


def compact(lake: Lake, uri: str) -> None:
    """Compacts, and checks that each commit is still there once, in one file."""
    before = commits(lake)
    lake = run_command(lake, uri)
    assert commits(lake) == before
    assert len(lake.stored_files("commits")) == 1


def remove_history(lake: Lake, uri: str) -> None:
    """Removes all history, and checks that the last commit of each key is left, in one file."""
    offsets, records = current(lake), lake.read("records").count()
    lake = run_command(lake, uri, "--older-than", "1s")
    rows = lake.read("commits").collect()
    assert committed_offsets(rows) == offsets and len(rows) == len(offsets) > 0
    assert len(lake.stored_files("commits")) == 1
    assert 0 < lake.read("records").count() < records
    assert current(lake) == offsets


def run_command(lake: Lake, uri: str, *options: str) -> Lake:
    """Runs `kcoord lake compact` in this process, with its session of Spark. Returns the lake, opened again."""
    with redirect_stdout(sys.stderr):
        assert cli.main(["compact", "--lake", uri, "--format", lake.format, "--grace", "0", *options]) == 0
    return Lake(lake.spark, uri, lake.format)


def commits(lake: Lake) -> list[tuple[int, int]]:
    return sorted(map(tuple, lake.read("commits").select("log_partition", "log_offset").collect()))


def main(log: str, *lakes: str) -> None:
    spark = get_session("local[2]", {**small_settings(), **WITHOUT_WAITING, "spark.jars": ",".join(s3_jars())})
    spark.sparkContext.setLogLevel("ERROR")
    for argument in lakes:
        table_format, _, uri = argument.partition("=")
        for log_partitions in STEPS:
            lake = Lake(spark, uri, Format(table_format))
            grow(lake, log, log_partitions)
            print(json.dumps([table_format, list(current(lake).items())]))
        for step in (compact, remove_history):
            step(Lake(spark, uri, Format(table_format)), uri)
    print(json.dumps([RETRIES, take_retries()]))
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
