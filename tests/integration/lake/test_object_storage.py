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
from pyarrow import fs
from pyiceberg.catalog import load_catalog
from pyspark.sql import SparkSession

import kcoord.pipeline
from kcoord.cli.lake import main
from kcoord.pipeline.lake.errors import LakeError
from kcoord.pipeline.lake.formats import Format
from kcoord.pipeline.lake.formats.s3 import S3Options
from kcoord.pipeline.lake.ingest import ingest
from kcoord.pipeline.lake.jobs import Jobs
from kcoord.pipeline.lake.settings import MS_PER_MINUTE, LakeSettings
from kcoord.pipeline.lake.storage import Lake
from tests.support.hadoop_jars import s3_jars
from tests.support.offsets_sample import Key, committed_offsets, described_offsets, unpack_sample
from tests.support.spark import JAVA_OPTIONS, small_settings, unless_too_busy

SECRET = "se/cret"
EXPECT_CONTINUE = "fs.s3a.connection.expect.continue"
"""If true, each upload would wait for a response that the test server does not send."""

SERVER = """
import sys
from moto.server import ThreadedMotoServer

server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(*server.get_host_and_port(), sep=":", flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Starts an S3 server. Yields its address, `host:port`. The server ends if this process does.

    It is a process of its own, because deltalake does not release the GIL in some requests.
    """
    with subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        yield running.stdout.readline().strip()
        running.kill()


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


@pytest.fixture(scope="module")
def log(storage: fs.S3FileSystem, options: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The URI of a log on the server, without the files that no reader opens. Each file costs three requests."""
    folder = tmp_path_factory.mktemp("log")
    unpack_sample(folder)
    for path in folder.glob("*/*"):
        if path.suffix not in (".log", ".metadata"):
            path.unlink()
    fs.copy_files(str(folder), "bucket/logs", destination_filesystem=storage)
    return at("logs", options)


def at(path: str, options: str) -> str:
    return f"s3://key:{quote(SECRET, safe='')}@bucket/{path}{options}"


def test_a_log_on_object_storage_is_read_like_a_local_one(spark: SparkSession, log: str) -> None:
    """The option `groups` prunes the log partitions."""
    kcoord.pipeline.register(spark)
    frame = spark.read.format("kcoord").option("table", "current_offsets").option("groups", "simple-1").load(log)
    expected = described_offsets()
    assert committed_offsets(frame.collect()) == {key: expected[key] for key in expected if key[0] == "simple-1"} != {}


def test_spark_without_the_file_system_is_rejected(spark: SparkSession, storage: fs.S3FileSystem, options: str) -> None:
    with pytest.raises(LakeError, match=r"lake s3://bucket/early: Spark cannot read it.*S3AFileSystem") as rejected:
        Lake(spark, at("early", options))
    assert SECRET not in str(rejected.value)


def test_a_command_with_the_jars_of_the_guide_keeps_a_lake_on_object_storage(
    storage: fs.S3FileSystem, options: str, tmp_path: Path
) -> None:
    """The command starts a JVM of its own, which gets the jars as the guide about clusters of Spark shows."""
    job = ["current", "--log", unpack_sample(tmp_path), "--option", "logPartitions=1", "--lake", at("guide", options)]
    settings = [f"spark.jars={','.join(s3_jars())}", f"spark.hadoop.{EXPECT_CONTINUE}=false"]
    confs = [word for setting in settings for word in ("--conf", setting)]
    command = [sys.executable, "-m", "kcoord", "lake", *job, *confs, "--json", "--limit", "1000"]
    environment = os.environ | {"SPARK_SUBMIT_OPTS": small_settings()[JAVA_OPTIONS]}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["current_offsets"]
    assert committed_offsets(rows) == described_offsets(1)
    assert len(pq.read_table("bucket/guide/gold/current_offsets", filesystem=storage)) == len(rows) > 0


@pytest.fixture(scope="module")
def s3_spark(spark: SparkSession) -> SparkSession:
    """Gives the running JVM the jars that a user names in `spark.jars`, so these tests need no JVM of their own."""
    gateway, hadoop = spark.sparkContext._gateway, spark.sparkContext._jsc.hadoopConfiguration()
    assert gateway is not None
    net, loader = gateway.jvm.java.net, hadoop.getClassLoader()
    for jar in s3_jars():
        loader.addURL(net.URI(Path(jar).as_uri()).toURL())
    # Hadoop remembers for each class loader which classes are missing.
    hadoop.setClassLoader(net.URLClassLoader(gateway.new_array(net.URL, 0), loader))
    spark.conf.set(EXPECT_CONTINUE, "false")
    return spark


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URI of the catalog of Iceberg, which the environment names."""
    uri = f"sqlite:///{tmp_path_factory.mktemp('catalog')}/catalog.db"
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYICEBERG_CATALOG__KCOORD__TYPE", "sql")
        environment.setenv("PYICEBERG_CATALOG__KCOORD__URI", uri)
        yield uri


@pytest.mark.parametrize("table_format", Format)
def test_a_lake_on_object_storage_grows_and_shrinks_like_a_local_one(
    s3_spark: SparkSession,
    log: str,
    storage: fs.S3FileSystem,
    options: str,
    catalog: str,
    table_format: Format,
) -> None:
    """The log is on object storage too. Each step uses a new `Lake` object."""
    uri = at(f"lakes/{table_format}", options)
    for log_partitions in ((1,), (1, 3)):
        lake = Lake(s3_spark, uri, table_format)
        grow(lake, log, log_partitions)
        offsets = current(lake)
        assert offsets == described_offsets(*log_partitions)
    if table_format is Format.PARQUET:
        # With Parquet a merge consists of several steps. The other formats have one step, whatever its rows are.
        before = commits(lake)
        lake = run_compact(lake, uri)
        assert commits(lake) == before
        assert len(lake.stored_files("commits")) == 1
    records = lake.read("records").count()
    lake = run_compact(lake, uri, "--older-than", "1s")
    # The last commit of each key is left, in one file.
    rows = lake.read("commits").collect()
    assert committed_offsets(rows) == offsets and len(rows) == len(offsets) > 0
    assert len(lake.stored_files("commits")) == 1
    assert 0 < lake.read("records").count() < records
    assert current(lake) == offsets

    s3 = S3Options.of(at(f"lakes/{table_format}/gold/current_offsets", options))
    assert s3 is not None
    assert rows_of_another_reader(s3, storage, catalog, table_format) == len(offsets) > 0
    # No library has created a local folder named like a URI.
    assert s3_spark.sparkContext._jvm is not None
    for folder in (Path.cwd(), s3_spark.sparkContext._jvm.java.lang.System.getProperty("user.dir")):
        assert not Path(folder, "s3:").exists()


def grow(lake: Lake, log: str, log_partitions: tuple[int, ...]) -> None:
    chosen = ",".join(map(str, log_partitions))
    unless_too_busy(lambda: ingest(lake, log, {"logPartitions": chosen}))


def current(lake: Lake) -> dict[Key, int]:
    Jobs(lake, LakeSettings(retention_ms=MS_PER_MINUTE)).run("current")
    return committed_offsets(lake.read("current_offsets").collect())


def run_compact(lake: Lake, uri: str, *options: str) -> Lake:
    """Runs `kcoord lake compact` in this process, with its session of Spark. Returns the lake, opened again."""
    assert (
        main(["compact", "--lake", uri, "--format", lake.format, "--retention-minutes", "1", "--grace", "0", *options])
        == 0
    )
    return Lake(lake.spark, uri, lake.format)


def commits(lake: Lake) -> list[tuple[int, int]]:
    return sorted(map(tuple, lake.read("commits").select("log_partition", "log_offset").collect()))


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
