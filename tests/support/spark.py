# SPDX-License-Identifier: Apache-2.0
"""A small local Spark session for tests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, TypeVar

import pyspark
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

import kcoord.pipeline
from kcoord.pipeline.lake.session import QUICK, get_session
from tests.support.class_archives import archive_options
from tests.support.client_races import note_retry
from tests.support.java import JavaNotFoundError, require_java
from tests.support.shared import missing

Result = TypeVar("Result")

JAVA_OPTIONS: Final = "spark.driver.extraJavaOptions"
# The small code cache of the first compiler would be swept again and again in a JVM of many tests.
SPARK_JVM: Final = f"{QUICK[JAVA_OPTIONS]} -XX:ReservedCodeCacheSize=256m"
_WITH_HINTS: Final = {**QUICK, "spark.sql.optimizer.disableHints": "false"}

TOO_BUSY: Final = "Python worker failed to connect back"
"""Spark's error if a new Python process does not start within 10 s, as on a loaded machine."""
TOO_BUSY_RACE: Final = "Spark gives up on a Python process that takes more than 10 s to start"


@cache
def small_settings() -> dict[str, str]:
    """Returns the settings of a small session for commands that do not know how small their log is.

    Spark obeys `F.broadcast` with them. The session that most tests share ignores it, as the product's small session.
    """
    java = str(Path(os.environ["JAVA_HOME"], "bin", "java")) if "JAVA_HOME" in os.environ else "java"
    archive = archive_options("spark", java, SPARK_JVM, pyspark.__file__ + pyspark.__version__, _dump_classes)
    options = f"{SPARK_JVM} {archive}"
    return {**_WITH_HINTS, JAVA_OPTIONS: options, "spark.executor.extraJavaOptions": options}


def _dump_classes(options: str) -> None:
    """Runs small queries in a process of its own, whose JVM ends with it."""
    code = f"from {__name__} import run_queries; run_queries({options!r})"
    with TemporaryDirectory() as folder:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, check=True)


def run_queries(options: str) -> None:
    """Writes and reads a table in the present folder."""
    spark = get_session("local[2]", {**_WITH_HINTS, JAVA_OPTIONS: f"{SPARK_JVM} {options}"})
    spark.range(10).selectExpr("id", "id % 2 AS odd").groupBy("odd").count().write.parquet("table")
    assert spark.read.parquet("table").where("odd = 1").collect()[0]["count"] == 5
    spark.stop()


def unless_too_busy(work: Callable[[], Result]) -> Result:
    """Runs `work`, and once more if a Python process of Spark did not start in time. The retry is counted."""
    try:
        return work()
    except PySparkException as error:
        if TOO_BUSY not in str(error):
            raise
    note_retry(TOO_BUSY_RACE)
    return work()


def small_options() -> list[str]:
    """Returns `small_settings` as options of a command."""
    return [word for name, value in small_settings().items() for word in ("--conf", f"{name}={value}")]


def start_spark(folder: Path) -> SparkSession:
    """Starts `local[2]` with all files in `folder`. Without Java 17 the test is skipped, or fails in CI."""
    try:
        require_java()
    except JavaNotFoundError as error:
        missing(str(error))
    os.environ["PYSPARK_PYTHON"] = sys.executable
    settings = {
        **small_settings(),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.memory": "1g",
        JAVA_OPTIONS: f"{small_settings()[JAVA_OPTIONS]} -Dlog4j2.level=error",
        "spark.local.dir": str(folder / "spark"),
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.streaming.stopTimeout": "60s",
    }
    builder = SparkSession.builder.master("local[2]").appName("kcoord tests")
    for name, value in settings.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    kcoord.pipeline.register(session)
    return session
