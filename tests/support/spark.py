# SPDX-License-Identifier: Apache-2.0
"""A small local Spark session for tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

import kcoord.pipeline
from tests.support.client_races import note_retry
from tests.support.java import JavaNotFoundError, require_java
from tests.support.shared import missing

Result = TypeVar("Result")

TOO_BUSY: Final = "Python worker failed to connect back"
"""Spark's error if a new Python process does not start within 10 s, as on a loaded machine."""
TOO_BUSY_RACE: Final = "Spark gives up on a Python process that takes more than 10 s to start"


def unless_too_busy(work: Callable[[], Result]) -> Result:
    """Runs `work`, and once more if a Python process of Spark did not start in time. The retry is counted."""
    try:
        return work()
    except PySparkException as error:
        if TOO_BUSY not in str(error):
            raise
    note_retry(TOO_BUSY_RACE)
    return work()


def start_spark(folder: Path) -> SparkSession:
    """Starts `local[2]` with all files in `folder`. Without Java 17 the test is skipped, or fails in CI."""
    try:
        require_java()
    except JavaNotFoundError as error:
        missing(str(error))
    os.environ["PYSPARK_PYTHON"] = sys.executable
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.memory": "1g",
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -Dlog4j2.level=error",
        "spark.local.dir": str(folder / "spark"),
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.streaming.stopTimeout": "60s",
    }
    builder = SparkSession.builder.master("local[2]").appName("kcoord tests")
    for name, value in settings.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    kcoord.pipeline.register(session)
    return session
