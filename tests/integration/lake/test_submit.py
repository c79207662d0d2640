# SPDX-License-Identifier: Apache-2.0
"""The lake submitted to a Spark cluster, and as a declarative pipeline. Both make the same tables.

The command and the Spark settings are those of docs/guides/pipeline-on-a-cluster.md.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

from kcoord.pipeline.lake.builders import BY_LOG_PARTITION, WHOLE
from kcoord.pipeline.lake.jobs import Jobs
from kcoord.pipeline.lake.settings import MS_PER_MINUTE, LakeSettings
from kcoord.pipeline.lake.storage import Lake
from kcoord.pipeline.lake.tables import TABLES
from tests.docs.terminal import blocks_of
from tests.support.offsets_sample import committed_offsets, described_offsets, unpack_sample
from tests.support.private_network import private_network
from tests.support.shared import ROOT
from tests.support.spark import JAVA_OPTIONS, small_settings
from tests.support.spark_cluster import SparkCluster, run_spark

GUIDE = ROOT / "docs" / "guides" / "pipeline-on-a-cluster.md"
BLOCKS = {block.title: block.text for block in blocks_of(GUIDE.read_text())}
CLUSTER = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.ui.enabled": "false",
    "spark.executor.memory": "512m",
    "spark.cores.max": "1",
}
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
    uri = str(folder / "lake")
    command = BLOCKS["a job on a standalone cluster"]
    with SparkCluster(folder) as cluster:
        for shown, path in (
            ("spark://host:7077", cluster.master),
            ("/opt/kcoord/bin/python", sys.executable),
            ("/shared/kafka/data", log),
            ("/shared/lake", uri),
        ):
            assert shown in command
            command = command.replace(shown, path)
        # The settings of the tests follow those of the guide.
        settings = "".join(f"{name} {value}\n" for name, value in {**small_settings(), **CLUSTER}.items())
        (folder / "spark-defaults.conf").write_text(f"{BLOCKS['spark-defaults.conf']}{settings}")
        run_spark(folder, "bash", "-c", f"export SPARK_CONF_DIR={folder}; {command}")
    yield Lake(spark, uri)


def test_a_submitted_job_fills_the_lake(lake: Lake, log: str, spark: SparkSession) -> None:
    note = lake.note("records")
    assert note is not None and note.progress["rows"] == lake.read("records").count() > 0
    Jobs(lake, LakeSettings(retention_ms=MS_PER_MINUTE)).run("current")
    assert committed_offsets(lake.read("current_offsets").collect()) == described_offsets(*READ)


def test_the_declarative_pipeline_makes_the_same_tables(
    lake: Lake, log: str, spark: SparkSession, tmp_path: Path
) -> None:
    """Needs a network of its own: `spark-pipelines` starts a Spark Connect server on a fixed port."""
    command = BLOCKS["the lake as a declarative pipeline"]
    spec = tmp_path / "examples" / "lake-pipeline" / "spark-pipeline.yml"
    assert str(spec.relative_to(tmp_path)) in command
    shutil.copytree(ROOT / "examples" / "lake-pipeline", spec.parent)
    settings = f'{log}\n  kcoord.retention-minutes: "1"\n  kcoord.now: "{NOW.isoformat()}"'
    text = spec.read_text()
    for shown, value in (
        ("/tmp/kcoord-pipeline/log", settings),
        ("/tmp/kcoord-pipeline/storage", str(tmp_path / "storage")),
    ):
        assert shown in text
        text = text.replace(shown, value)
    spec.write_text(text)
    # Spark takes its settings from the properties of Java too. With a folder of settings in its class path, Java would
    # not use the archive of classes.
    properties = {**small_settings(), **CLUSTER}
    java_options = [properties.pop(JAVA_OPTIONS), *(f"-D{name}='{value}'" for name, value in properties.items())]
    with private_network():
        run_spark(tmp_path, "bash", "-c", command, java_options=" ".join(java_options))

    jobs = Jobs(lake, LakeSettings(NOW, retention_ms=MS_PER_MINUTE))
    names = ["records", "commits", "current_offsets", *BY_LOG_PARTITION, *WHOLE]
    jobs.ensure_all(names)
    for name in names:
        made = spark.read.schema(TABLES[name].schema).parquet(str(tmp_path / "spark-warehouse" / name))
        assert _rows(name, made) == _rows(name, lake.read(name)), name


def _rows(name: str, frame: DataFrame) -> list[str]:
    """Returns the rows as sorted text, without the column `batch`, which a declarative pipeline does not have."""
    columns = [f"`{column.name}`" for column in TABLES[name].columns if column.name != "batch"]
    return sorted(str(row.asDict(recursive=True)) for row in frame.select(columns).collect())
