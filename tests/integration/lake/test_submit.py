# SPDX-License-Identifier: Apache-2.0
"""The lake submitted to a Spark cluster, and as a declarative pipeline. Both make the same tables."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

import kcoord.cli.submit.lake
from kcoord.pipeline.lake.builders import BY_LOG_PARTITION, WHOLE
from kcoord.pipeline.lake.jobs import Jobs
from kcoord.pipeline.lake.settings import MS_PER_MINUTE, LakeSettings
from kcoord.pipeline.lake.storage import Lake
from kcoord.pipeline.lake.tables import TABLES
from tests.support.offsets_sample import committed_offsets, described_offsets, unpack_sample
from tests.support.shared import ROOT
from tests.support.spark_cluster import JVM, LOOPBACK, SparkCluster, run_spark

READ = (1, 3)
NOW = datetime(2026, 11, 21, 3, tzinfo=UTC)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two of the log partitions that Kafka wrote."""
    folder = tmp_path_factory.mktemp("log")
    unpack_sample(folder)
    for path in folder.iterdir():
        if int(path.name.rpartition("-")[2]) not in READ:
            shutil.rmtree(path)
    return str(folder)


@pytest.fixture(scope="module")
def lake(spark: SparkSession, log: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lake]:
    """A lake filled by `ingest` on a cluster."""
    folder = tmp_path_factory.mktemp("cluster")
    program = str(Path(kcoord.cli.submit.lake.__file__))
    uri = str(folder / "lake")
    with SparkCluster(folder) as cluster:
        options = ["--master", cluster.master, *LOOPBACK]
        options += ["--conf", "spark.executor.memory=512m", "--conf", "spark.cores.max=1"]
        options += ["--conf", "spark.sql.shuffle.partitions=1", "--conf", f"spark.driver.extraJavaOptions={JVM}"]
        run_spark(folder, "spark-submit", *options, program, "ingest", "--log", log, "--lake", uri)
    yield Lake(spark, uri)


def test_a_submitted_job_fills_the_lake(lake: Lake, log: str, spark: SparkSession) -> None:
    note = lake.note("records")
    assert note is not None and note.progress["rows"] == lake.read("records").count() > 0
    Jobs(lake, LakeSettings(retention_ms=MS_PER_MINUTE)).run("current")
    assert committed_offsets(lake.read("current_offsets").collect()) == described_offsets(*READ)


def test_the_declarative_pipeline_makes_the_same_tables(
    lake: Lake, log: str, spark: SparkSession, tmp_path: Path
) -> None:
    project = tmp_path / "project"
    shutil.copytree(ROOT / "examples" / "lake-pipeline", project)
    spec = project / "spark-pipeline.yml"
    settings = f'{log}\n  kcoord.retention-minutes: "1"\n  kcoord.now: "{NOW.isoformat()}"'
    text = spec.read_text().replace("/tmp/kcoord-pipeline/log", settings)
    spec.write_text(text.replace("/tmp/kcoord-pipeline/storage", str(tmp_path / "storage")))
    options = [*LOOPBACK, "--conf", "spark.ui.enabled=false", "--conf", "spark.sql.shuffle.partitions=1"]
    options += ["--conf", f"spark.driver.extraJavaOptions={JVM}"]
    run_spark(project, "spark-pipelines", "run", "--spec", "spark-pipeline.yml", *options)

    jobs = Jobs(lake, LakeSettings(NOW, retention_ms=MS_PER_MINUTE))
    names = ["records", "commits", "current_offsets", *BY_LOG_PARTITION, *WHOLE]
    jobs.ensure_all(names)
    for name in names:
        made = spark.read.schema(TABLES[name].schema).parquet(str(project / "spark-warehouse" / name))
        assert _rows(name, made) == _rows(name, lake.read(name)), name


def _rows(name: str, frame: DataFrame) -> list[str]:
    """Returns the rows as sorted text, without the column `batch`, which a declarative pipeline does not have."""
    columns = [f"`{column.name}`" for column in TABLES[name].columns if column.name != "batch"]
    return sorted(str(row.asDict(recursive=True)) for row in frame.select(columns).collect())
