# SPDX-License-Identifier: Apache-2.0
"""Creates the Spark session of a job, with the settings on which the content of the tables depends."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from pyspark.find_spark_home import _find_spark_home
from pyspark.sql import SparkSession

from kcoord.pipeline.lake.errors import LakeError

SMALL_ROWS: Final = 1_000_000
"""With fewer records in the lake, starting Spark takes most of the time of a job."""
SHUFFLE_PARTITIONS: Final = "spark.sql.shuffle.partitions"
SETTINGS: Final = {
    # Timestamps are UTC on every machine. Parquet readers other than Spark understand microseconds, but not INT96.
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    # A task writes into few folders of a table at a time. An open file per folder is cheaper than sorting all rows.
    "spark.sql.maxConcurrentOutputFileWriters": "16",
    # A row takes a few bytes in a file. With Spark's default of 128 MB a task would have about 30 million rows.
    "spark.sql.files.maxPartitionBytes": "16m",
}
ARROW_UNCHECKED: Final = "-Darrow.enable_unsafe_memory_access=true -Darrow.enable_null_check_for_get=false"
"""Java options for a JVM that makes rows from Arrow columns. Spark checks for null itself before it reads a value."""
_LOCAL: Final = {
    "spark.driver.extraJavaOptions": ARROW_UNCHECKED,
    "spark.ui.enabled": "false",
    SHUFFLE_PARTITIONS: "8",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
}
_QUICK_JVM: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
QUICK: Final = {
    # The second compiler of Java, and code that Spark generates for each query, pay off after minutes of work only.
    # The byte code of published jars needs no verification, which takes a sixth of the start. Loading Spark's classes
    # fills Java's table of symbols and its first metaspace several times over.
    "spark.driver.extraJavaOptions": f"{ARROW_UNCHECKED} {_QUICK_JVM} -Xmn200m -XX:MetaspaceSize=256m "
    "-XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote "
    "-XX:+UnlockExperimentalVMOptions -XX:SymbolTableSize=262144 "
    # Java would generate a class for each method that is called by reflection more than 15 times.
    "-Dsun.reflect.inflationThreshold=2147483647",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.adaptive.enabled": "false",
    SHUFFLE_PARTITIONS: "1",
    # Sending a table to the tasks is a job of its own. Without it the one task of a small query joins the tables.
    "spark.sql.autoBroadcastJoinThreshold": "-1",
    "spark.sql.optimizer.disableHints": "true",  # F.broadcast is one
    # Even with the settings above, Spark generates code for an aggregation in two steps, and for a sort with a limit.
    "spark.sql.execution.combineAdjacentAggregation": "true",
    "spark.sql.execution.topKSortFallbackThreshold": "0",
    # Spark looks for filters that follow from other filters, in each step of each plan. Here they would save few rows.
    "spark.sql.constraintPropagation.enabled": "false",
    # The listeners of the web interface format the plan of every query, even without the web interface.
    "spark.sql.ui.explainMode": "simple",
    # With it, each call of a column's method sends its place in the Python code to the JVM.
    "spark.python.sql.dataFrameDebugging.enabled": "false",
}
"""Settings of a local session whose work takes seconds. The tests use them too."""
_OLDEST_JAVA: Final = 17
_LOOKED_UP: Final = {"functions", "org.apache.spark.sql.functions", "PythonUtils"}
"""The names by which PySpark looks up the classes whose methods make columns."""


def get_session(
    master: str | None = None, config: dict[str, str] | None = None, *, progress: bool = False, is_small: bool = False
) -> SparkSession:
    """Returns the existing session (of spark-submit or a notebook), or else creates a local session.

    `progress` shows progress bars on stderr. `is_small` makes a new local session start and compile less; it would be
    slower than the other kind with millions of rows.
    """
    if master is None and SparkSession.getActiveSession() is None and "SPARK_ENV_LOADED" not in os.environ:
        master = "local[*]"
    builder = SparkSession.builder.appName("kcoord-lake")
    settings = dict(SETTINGS)
    if master is not None:
        builder = builder.master(master)
        if master.startswith("local"):
            check_java()
            # Spark's default is `python3`, which may not have our libraries.
            os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
            # Spark's scripts start two Pythons to find its folder, and a JVM to build the command of the real one.
            os.environ.setdefault("SPARK_HOME", _find_spark_home())
            os.environ.setdefault("SPARK_LAUNCHER_OPTS", _QUICK_JVM)
            settings |= _LOCAL | {"spark.ui.showConsoleProgress": str(progress).lower()}
            settings |= QUICK if is_small else {}
    for key, value in {**settings, **(config or {})}.items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    _keep_functions(session)
    return session


class _JavaFunctions:
    """The static methods of a class in Java, each looked up once."""

    def __init__(self, java_class: object) -> None:
        self._java_class = java_class

    def __getattr__(self, name: str) -> object:
        function = getattr(self._java_class, name)
        setattr(self, name, function)
        return function


def _keep_functions(session: SparkSession) -> None:
    """Keeps the functions in Java that PySpark looks up for each column and each list of columns.

    Py4J asks Java for them again each time. For a name without a package, Java looks for classes in all its jars.
    """
    jvm = session.sparkContext._jvm
    for name in _LOOKED_UP - vars(jvm).keys():
        setattr(jvm, name, _JavaFunctions(getattr(jvm, name)))


def check_java() -> None:
    """Raises LakeError if there is no Java 17 or newer. Spark would fail with a stack trace."""
    home = os.environ.get("JAVA_HOME")
    java = os.path.join(home, "bin", "java") if home else shutil.which("java")
    if java is None or not os.path.exists(java):
        raise LakeError(
            "Spark needs Java 17 or newer, but `java` is neither in JAVA_HOME nor in PATH; "
            "install it (Debian: openjdk-17-jre-headless)"
        )
    version = _release_of(java).partition('"')[2].partition('"')[0].partition(".")[0]
    if version.isdigit() and int(version) < _OLDEST_JAVA:
        raise LakeError(f"Spark needs Java 17 or newer, but {java} has version {version}")


def _release_of(java: str) -> str:
    """Returns a text in which the version is the first thing in quotes. Starting Java to ask it takes much longer."""
    try:
        lines = (Path(java).resolve().parents[1] / "release").read_text(encoding="utf-8").splitlines()
        return next(line for line in lines if line.startswith("JAVA_VERSION="))
    except (OSError, IndexError, StopIteration, UnicodeDecodeError):
        return subprocess.run([java, "-version"], capture_output=True, text=True, check=False).stderr
