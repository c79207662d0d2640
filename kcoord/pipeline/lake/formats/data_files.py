# SPDX-License-Identifier: Apache-2.0
"""Data files: what Spark writes before a table format is told of it, and reads after that.

Each write has a folder of its own in the table's `data`, so that what it wrote is what lies there. What a job that was
killed left there belongs to no table; the formats' own cleaning removes it.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote

import pyarrow.parquet as pq
from pyarrow import fs
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from kcoord.pipeline.lake.formats.place import LakePlace
from kcoord.pipeline.lake.tables import LakeTable

_LAYOUT = "_"
"""Begins the names of the columns by which Spark lays out files: it leaves those out of the files themselves, and both
formats want the real ones in there.
"""

WITHOUT_DICTIONARY: Final = {
    f"parquet.enable.dictionary#{name}": "false"
    for name in ("log_offset", "effective_offset", "timestamp", "effective_timestamp", "commit_timestamp")
}
"""Nearly every row has another value there, so that a dictionary is begun, filled and given up for nothing."""


@dataclass(frozen=True, slots=True)
class DataFile:
    """`path` is relative to the table's folder; `layout` has the values of the columns of the table's layout."""

    path: str
    size_bytes: int
    rows: int
    layout: dict[str, str]


def write_files(place: LakePlace, table: LakeTable, frame: DataFrame) -> list[DataFile]:
    """Writes the frame and returns the files that have rows."""
    folder = f"data/{uuid.uuid4()}"
    copies = [F.col(f"`{name}`").alias(_LAYOUT + name) for name in table.partitioned_by]
    writer = frame.select("*", *copies).write.options(**WITHOUT_DICTIONARY)
    if copies:
        writer = writer.partitionBy(*(_LAYOUT + name for name in table.partitioned_by))
    writer.parquet(f"{place.table_uri(table)}/{folder}")
    root = f"{place.root}/{table.layer}/{table.name}/"
    found = place.files.get_file_info(fs.FileSelector(root + folder, recursive=True))
    files = []
    for info in found:
        if not info.path.endswith(".parquet"):
            continue
        rows = pq.read_metadata(info.path, filesystem=place.files).num_rows
        if rows:
            path = info.path.removeprefix(root)
            files.append(DataFile(path, info.size, rows, _layout(path)))
    return files


def read_files(spark: SparkSession, table: LakeTable, uris: Sequence[str]) -> DataFrame:
    if not uris:
        return spark.createDataFrame([], table.schema)
    return spark.read.schema(table.schema).parquet(*uris)


def replaced_values(table: LakeTable, files: Sequence[DataFile]) -> dict[str, list[str]]:
    """Of each column of the layout: the values of which the files have rows, in order.

    Rows with any combination of them are replaced. That is as with Spark's own dynamic overwriting, since `records`,
    alone in being laid out by two columns, is written one micro-batch at a time.
    """
    return {name: sorted({each.layout[name] for each in files}) for name in table.partitioned_by}


def _layout(path: str) -> dict[str, str]:
    pairs = [part.partition("=") for part in path.split("/")[:-1] if "=" in part]
    return {unquote(name.removeprefix(_LAYOUT)): unquote(value) for name, _, value in pairs}
