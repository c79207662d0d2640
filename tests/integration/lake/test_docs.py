# SPDX-License-Identifier: Apache-2.0
"""The programs in docs/pipeline.md run as they stand there, on logs that Kafka wrote."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from kcoord.testing import start_broker
from tests.docs.terminal import blocks_of
from tests.support.offsets_sample import unpack_sample
from tests.support.shared import ROOT

PAGE = ROOT / "docs" / "pipeline.md"
PROGRAMS = [block.text for block in blocks_of(PAGE.read_text()) if block.language == "python"]


def test_programs(spark: SparkSession, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log"
    unpack_sample(log)
    paths = {"/var/lib/kafka/data": log, "s3://bucket/kafka-logs": log, "s3://bucket/lake": tmp_path / "lake"}
    # The page uses these without saying where they come from: a session, functions, and paths of the reader.
    names: dict[str, Any] = {
        "spark": spark,
        "F": F,
        "path": str(log),
        "lake": str(tmp_path / "copy"),
        "checkpoint": str(tmp_path / "checkpoint"),
    }
    reading, asking, grouping, streaming, notebook = PROGRAMS

    run(reading, names, paths)
    assert "billing" not in capfd.readouterr().out
    assert "committed_offset" in names["commits"].columns

    with start_broker() as broker:
        broker.create_topic("orders")
        broker.commit("billing", {"orders": {0: 7}})
        run(asking, names, {"broker:9092": broker.bootstrap_servers})
        assert [row["committed_offset"] for row in names["commits"].collect()] == [7]
    run(reading, names, paths)

    names["records"] = spark.read.format("kcoord").load(str(log))
    run(grouping, names, paths)
    assert names["groups"].where("value.epoch > 0").count() > 0

    run(streaming, names, paths)
    names["query"].processAllAvailable()
    names["query"].stop()
    assert spark.read.parquet(names["lake"]).count() == names["commits"].count() > 0

    run(notebook, names, paths)
    assert names["lake"].read("status").count() > 0


def run(program: str, names: dict[str, Any], paths: Mapping[str, object]) -> None:
    """Runs a program of the page with other paths."""
    for shown, path in paths.items():
        program = program.replace(shown, str(path))
    exec(compile(program, str(PAGE), "exec"), names)
