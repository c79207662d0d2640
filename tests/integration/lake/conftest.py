# SPDX-License-Identifier: Apache-2.0
"""One Spark session for all tests of the lake in a process, tuned for tables of ten rows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from kcoord.pipeline.lake.errors import LakeError
from kcoord.pipeline.lake.session import check_java, get_session
from tests.support.shared import missing
from tests.support.spark import JAVA_OPTIONS, small_settings


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    try:
        check_java()
    except LakeError as error:
        missing(str(error))
    session = get_session("local[2]", {JAVA_OPTIONS: small_settings()[JAVA_OPTIONS]}, is_small=True)
    session.sparkContext.setLogLevel("ERROR")
    yield session
    session.stop()
