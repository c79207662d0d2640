# SPDX-License-Identifier: Apache-2.0
"""Logs and lakes on object storage: this module starts an S3 server, which pyarrow, Spark and the formats use."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from moto.server import ThreadedMotoServer
from pyarrow import fs
from pyiceberg.catalog import load_catalog
from pyspark.sql import SparkSession

import kcoord.pipeline
from kcoord.pipeline.lake.errors import LakeError
from kcoord.pipeline.lake.formats import Format
from kcoord.pipeline.lake.formats.s3 import S3Options
from kcoord.pipeline.lake.storage import Lake
from tests.integration.lake import s3_driver
from tests.support.client_races import note_retry
from tests.support.hadoop_jars import s3_jars
from tests.support.offsets_sample import Key, committed_offsets, described_offsets, unpack_sample
from tests.support.shared import ROOT

READ = (1, 3)
SECRET = "se/cret"


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Starts an S3 server. Yields its address, `host:port`."""
    running = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    yield f"{host}:{port}"
    running.stop()


@pytest.fixture(scope="module")
def storage(server: str) -> fs.S3FileSystem:
    """Creates the empty bucket `bucket`."""
    files = fs.S3FileSystem(
        access_key="key",
        secret_key=SECRET,
        endpoint_override=server,
        scheme="http",
        region="us-east-1",
        allow_bucket_creation=True,
    )
    files.create_dir("bucket")
    return files


@pytest.fixture(scope="module")
def options(server: str) -> str:
    """The query of an S3 URI."""
    return f"?endpoint_override={server}&scheme=http&region=us-east-1"


def at(path: str, options: str) -> str:
    return f"s3://key:{quote(SECRET, safe='')}@bucket/{path}{options}"


def test_logs_on_object_storage_are_read_like_local_ones(
    spark: SparkSession, storage: fs.S3FileSystem, options: str, tmp_path: Path
) -> None:
    unpack_sample(tmp_path / "log")
    fs.copy_files(str(tmp_path / "log"), "bucket/logs", destination_filesystem=storage)

    uri = at("logs", options)
    lake = Lake(spark, str(tmp_path / "lake"))
    s3_driver.grow(lake, uri, READ)
    assert s3_driver.current(lake) == described_offsets(*READ)
    # The option `groups` prunes the log partitions.
    kcoord.pipeline.register(spark)
    frame = spark.read.format("kcoord").option("table", "current_offsets").option("groups", "simple-1").load(uri)
    expected = described_offsets()
    assert committed_offsets(frame.collect()) == {key: expected[key] for key in expected if key[0] == "simple-1"} != {}


def test_spark_without_the_file_system_is_rejected(spark: SparkSession, storage: fs.S3FileSystem, options: str) -> None:
    with pytest.raises(LakeError, match=r"lake s3://bucket/early: Spark cannot read it.*S3AFileSystem") as rejected:
        Lake(spark, at("early", options))
    assert SECRET not in str(rejected.value)


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('catalog')}/catalog.db"


@pytest.fixture(scope="module")
def grown(
    storage: fs.S3FileSystem, options: str, catalog: str, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[dict[Key, int]]]:
    """Format -> committed offsets after each step of the driver."""
    folder = tmp_path_factory.mktemp("grown")
    s3_jars()
    lakes = [f"{table_format}={at(f'lakes/{table_format}', options)}" for table_format in Format]
    own = {"TYPE": "sql", "URI": catalog}
    done = subprocess.run(
        [sys.executable, "-m", s3_driver.__name__, unpack_sample(folder / "log"), *lakes],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            **{f"PYICEBERG_CATALOG__KCOORD__{key}": value for key, value in own.items()},
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-8000:]
    # No library has created a local folder named like a URI.
    assert {path.name for path in folder.iterdir()} <= {"log", "spark-warehouse", "artifacts"}
    offsets_by_format: dict[str, list[dict[Key, int]]] = {}
    *steps, (_, retries) = map(json.loads, done.stdout.splitlines())
    for race in retries:
        note_retry(race)
    for table_format, offsets in steps:
        offsets_by_format.setdefault(table_format, []).append({tuple(key): offset for key, offset in offsets})
    return offsets_by_format


@pytest.mark.parametrize("table_format", Format)
def test_a_lake_on_object_storage_grows_like_a_local_one(
    grown: dict[str, list[dict[Key, int]]],
    storage: fs.S3FileSystem,
    options: str,
    catalog: str,
    table_format: Format,
) -> None:
    steps = grown[table_format]
    assert steps == [described_offsets(*log_partitions) for log_partitions in s3_driver.STEPS]
    s3 = S3Options.of(at(f"lakes/{table_format}/gold/current_offsets", options))
    assert s3 is not None
    assert rows_of_another_reader(s3, storage, catalog, table_format) == len(steps[-1]) > 0


def rows_of_another_reader(s3: S3Options, storage: fs.S3FileSystem, catalog: str, table_format: Format) -> int:
    """Returns the number of rows of `current_offsets` that a reader other than Spark finds."""
    if table_format is Format.DELTA:
        return int(DeltaTable(s3.uri, storage_options=s3.delta()).to_pyarrow_table().num_rows)
    if table_format is Format.ICEBERG:
        tables = load_catalog("kcoord", type="sql", uri=catalog, **s3.iceberg())
        rows = int(tables.load_table(("gold", "current_offsets")).scan().to_arrow().num_rows)
        tables.close()
        return rows
    return int(pq.read_table(f"{s3.bucket}{s3.path}", filesystem=storage).num_rows)
