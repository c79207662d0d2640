# SPDX-License-Identifier: Apache-2.0
"""Writes that replace parts of a table, in every format: parts that get no rows, and parts of other values."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pytest

from kcoord.pipeline.lake.formats import Format
from kcoord.pipeline.lake.storage import Lake
from kcoord.pipeline.lake.tables import TABLES
from tests.unit.pipeline.test_ingest import no_spark

pytest.importorskip("deltalake")
pytest.importorskip("pyiceberg")


def regexes(*log_partitions: int) -> pa.Table:
    rows = [{"group": "g", "regex": "a.*", "topics": [], "log_partition": number} for number in log_partitions]
    return pa.Table.from_pylist(rows, schema=TABLES["regexes"].arrow_schema)


def parts(lake: Lake) -> Sequence[str]:
    return sorted(file.value for file in lake.stored_files("regexes"))


@pytest.mark.parametrize("table_format", [*Format])
def test_parts_that_get_no_rows_are_emptied_if_they_are_named(tmp_path: Path, table_format: Format) -> None:
    lake = Lake(no_spark, str(tmp_path), table_format, "one")
    other = Lake(no_spark, str(tmp_path), table_format, "two")
    for cluster in (lake, other):
        cluster.replace_rows("regexes", regexes(0, 1, 2, 3))
    lake.replace_rows("regexes", regexes(1), parts=["1", "2", "7"])
    assert parts(lake) == ["0", "1", "3"]
    lake.replace_rows("regexes", regexes(), parts=["0"])
    assert parts(lake) == ["1", "3"]
    lake.replace_rows("regexes", regexes(4))
    assert parts(lake) == ["1", "3", "4"]
    assert parts(other) == ["0", "1", "2", "3"]
