# SPDX-License-Identifier: Apache-2.0
"""The Spark session of a job, and the settings without which the tables would be others."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import Final

from pyspark.sql import SparkSession

from kcoord.pipeline.lake.errors import LakeError

SETTINGS: Final = {
    # Timestamps mean the same everywhere, and Parquet readers other than Spark understand them (not INT96).
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    # A task writes into few folders of a table at a time: a file for each is cheaper than a sort of all rows by folder.
    "spark.sql.maxConcurrentOutputFileWriters": "16",
    # A row takes a few bytes in a file: a task of Spark's usual 128 MB would have some 30 million of them.
    "spark.sql.files.maxPartitionBytes": "16m",
}
ARROW_UNCHECKED: Final = "-Darrow.enable_unsafe_memory_access=true -Darrow.enable_null_check_for_get=false"
"""For a JVM that makes rows from Arrow's columns: Spark itself asks whether a value is there before it takes it."""
_LOCAL: Final = {
    "spark.driver.extraJavaOptions": ARROW_UNCHECKED,
    "spark.ui.enabled": "false",
    "spark.sql.shuffle.partitions": "8",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
}
_OLDEST_JAVA: Final = 17


def get_session(
    master: str | None = None, config: dict[str, str] | None = None, *, progress: bool = False
) -> SparkSession:
    """The session that is there (spark-submit, a notebook), else a local one. `progress` shows bars on stderr."""
    if master is None and SparkSession.getActiveSession() is None and "SPARK_ENV_LOADED" not in os.environ:
        master = "local[*]"
    builder = SparkSession.builder.appName("kcoord-lake")
    settings = dict(SETTINGS)
    if master is not None:
        builder = builder.master(master)
        if master.startswith("local"):
            check_java()
            os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # else whatever `python3` is, without our libraries
            settings |= _LOCAL | {"spark.ui.showConsoleProgress": str(progress).lower()}
    for key, value in {**settings, **(config or {})}.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def check_java() -> None:
    """Spark would fail with a stack trace."""
    home = os.environ.get("JAVA_HOME")
    java = os.path.join(home, "bin", "java") if home else shutil.which("java")
    if java is None or not os.path.exists(java):
        raise LakeError("Spark needs Java 17 or newer, and there is no `java` (Debian: openjdk-17-jre-headless)")
    told = subprocess.run([java, "-version"], capture_output=True, text=True, check=False).stderr
    version = told.partition('"')[2].partition('"')[0].partition(".")[0]
    if version.isdigit() and int(version) < _OLDEST_JAVA:
        raise LakeError(f"Spark needs Java 17 or newer; {java} is {version}")
