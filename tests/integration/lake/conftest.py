# SPDX-License-Identifier: Apache-2.0
"""One Spark session for all tests of the lake in a process, tuned for tables of ten rows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from kcoord.pipeline.lake.errors import LakeError
from kcoord.pipeline.lake.session import check_java, get_session
from tests.support.shared import missing

SMALL = {
    "spark.sql.shuffle.partitions": "1",
    "spark.sql.adaptive.enabled": "false",
    # For such tables, compiling code takes longer than it saves.
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
}


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    try:
        check_java()
    except LakeError as error:
        missing(str(error))
    session = get_session("local[2]", SMALL)
    session.sparkContext.setLogLevel("ERROR")
    yield session
    session.stop()
