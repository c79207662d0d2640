# SPDX-License-Identifier: Apache-2.0
"""The folders that `tests.support.scheduling` names."""

from __future__ import annotations

from pathlib import Path

from tests.support.scheduling import SPARK_FOLDERS, uses_spark
from tests.support.shared import ROOT


def test_every_file_that_starts_spark_is_in_a_folder_of_spark() -> None:
    assert all((ROOT / folder).is_dir() for folder in SPARK_FOLDERS)
    for path in (ROOT / "tests").rglob("test_*.py"):
        nodeid = path.relative_to(ROOT).as_posix()
        takes_session = "spark: SparkSession" in path.read_text() and path != Path(__file__)
        assert uses_spark(nodeid) == takes_session, nodeid
