# SPDX-License-Identifier: Apache-2.0
"""Logs on object storage: an S3 server of this test's own, read by pyarrow's file system in driver and workers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from moto.server import ThreadedMotoServer
from pyarrow import fs
from pyspark.sql import SparkSession

from kcoord.pipeline.lake.ingest import ingest
from kcoord.pipeline.lake.jobs import Jobs
from kcoord.pipeline.lake.settings import MS_PER_MINUTE, Settings
from kcoord.pipeline.lake.storage import Lake
from tests.support.offsets_sample import committed_offsets, described_offsets, unpack_sample
from tests.support.spark import unless_too_busy

READ = (1, 3)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Its address, `host:port`."""
    running = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    yield f"{host}:{port}"
    running.stop()


def test_logs_on_object_storage_are_read_like_local_ones(spark: SparkSession, server: str, tmp_path: Path) -> None:
    unpack_sample(tmp_path / "log")
    storage = fs.S3FileSystem(
        access_key="key",
        secret_key="secret",
        endpoint_override=server,
        scheme="http",
        region="us-east-1",
        allow_bucket_creation=True,
    )
    storage.create_dir("bucket")
    fs.copy_files(str(tmp_path / "log"), "bucket/logs", destination_filesystem=storage)

    uri = f"s3://key:secret@bucket/logs?endpoint_override={server}&scheme=http&region=us-east-1"
    lake = Lake(spark, str(tmp_path / "lake"))
    chosen = ",".join(map(str, READ))
    unless_too_busy(lambda: ingest(lake, uri, options={"logPartitions": chosen}).awaitTermination())
    Jobs(lake, Settings(retention_ms=MS_PER_MINUTE)).run("current")
    assert committed_offsets(lake.read("current_offsets").collect()) == described_offsets(*READ)
    # In one read, the groups' names choose the log partitions: nothing else is fetched.
    frame = spark.read.format("kcoord").option("table", "current_offsets").option("groups", "simple-1").load(uri)
    told = described_offsets()
    assert committed_offsets(frame.collect()) == {key: told[key] for key in told if key[0] == "simple-1"} != {}
