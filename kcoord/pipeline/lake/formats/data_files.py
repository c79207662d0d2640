# SPDX-License-Identifier: Apache-2.0
"""The data files of Delta Lake and Iceberg tables, which Spark writes and reads.

Theory of operation. Each write creates a new folder in the table's `data`, so the files in that folder are those of the
write. Only then the store adds them to the metadata of the table, in one step. If a job crashes before that step, its
files belong to no table; the format's own cleaning removes them.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from kcoord.pipeline.lake.files import write_parts
from kcoord.pipeline.lake.formats.place import LakePlace
from kcoord.pipeline.lake.formats.store import CLUSTER
from kcoord.pipeline.lake.tables import LakeTable

_LAYOUT = "_"
"""Prefix of the copies of the layout's columns. Spark omits the columns by which it lays out files from the files, but
both formats need the original columns in them.
"""

WITHOUT_DICTIONARY: Final = {
    f"parquet.enable.dictionary#{name}": "false"
    for name in ("log_offset", "effective_offset", "timestamp", "effective_timestamp", "commit_timestamp")
}
"""These columns are nearly unique, so Parquet would build a dictionary for them and then discard it."""


@dataclass(frozen=True, slots=True)
class DataFile:
    """One data file. `path` is relative to the table's folder; `layout` has the values of the layout's columns."""

    path: str
    size_bytes: int
    rows: int
    layout: dict[str, str]


def write_files(place: LakePlace, table: LakeTable, frame: DataFrame, cluster: str | None) -> list[DataFile]:
    """Writes the frame into a new folder. Returns the files that have rows. The table is the one that is stored."""
    frame = frame if cluster is None else frame.withColumn(CLUSTER, F.lit(cluster))
    folder = _new_folder()
    copies = [F.col(f"`{name}`").alias(_LAYOUT + name) for name in table.partitioned_by]
    writer = frame.select("*", *copies).write.options(**WITHOUT_DICTIONARY)
    if copies:
        writer = writer.partitionBy(*(_LAYOUT + name for name in table.partitioned_by))
    writer.parquet(f"{place.table_uri(table)}/{folder}")
    return _files_in(place, table, folder)


def write_rows(place: LakePlace, table: LakeTable, rows: pa.Table, cluster: str | None) -> list[DataFile]:
    """Does the same as `write_files`, without Spark."""
    if cluster is not None:
        rows = rows.append_column(CLUSTER, pa.repeat(pa.scalar(cluster, pa.string()), len(rows)))
    folder = _new_folder()
    write_parts(place.files, f"{place.path_of(table)}/{folder}", table.partitioned_by, rows, _LAYOUT)
    return _files_in(place, table, folder)


def _new_folder() -> str:
    return f"data/{uuid.uuid4()}"


def _files_in(place: LakePlace, table: LakeTable, folder: str) -> list[DataFile]:
    """Returns the files of a folder that have rows."""
    root = f"{place.path_of(table)}/"
    files = []
    for info in place.files.get_file_info(fs.FileSelector(root + folder, recursive=True, allow_not_found=True)):
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


def replaced_values(
    table: LakeTable,
    files: Sequence[DataFile],
    cluster: str | None,
    *,
    whole: bool = False,
    parts: Collection[str] = (),
) -> dict[str, list[str]] | None:
    """Returns the values of the layout's columns whose rows a write replaces. None if it replaces no rows.

    `parts` has values of the last column that it replaces in any case. A write replaces the rows with any combination
    of these values. That equals Spark's dynamic overwriting: only `records` has two columns in its layout, and a write
    has one batch.
    """
    own = [] if whole else [name for name in table.partitioned_by if name != CLUSTER]
    if own and not files and not parts:
        return None
    values = {name: {file.layout[name] for file in files} for name in own}
    if own:
        values[own[-1]].update(parts)
    return ({} if cluster is None else {CLUSTER: [cluster]}) | {name: sorted(values[name]) for name in own}


def rewritten_values(table: LakeTable, values: Sequence[str], cluster: str | None) -> dict[str, list[str]]:
    """Returns the values of the layout's columns whose rows a rewrite replaces."""
    return ({} if cluster is None else {CLUSTER: [cluster]}) | {table.partitioned_by[-1]: [*values]}


def _layout(path: str) -> dict[str, str]:
    pairs = [part.partition("=") for part in path.split("/")[:-1] if "=" in part]
    return {unquote(name.removeprefix(_LAYOUT)): unquote(value) for name, _, value in pairs}
