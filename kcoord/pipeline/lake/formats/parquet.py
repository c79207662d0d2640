# SPDX-License-Identifier: Apache-2.0
"""Tables as folders of Parquet files. All files of a folder belong to the table. A reader may see half of a change."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from kcoord.pipeline.lake.files import write_parts
from kcoord.pipeline.lake.formats.data_files import WITHOUT_DICTIONARY
from kcoord.pipeline.lake.formats.place import LakePlace
from kcoord.pipeline.lake.formats.store import CLUSTER
from kcoord.pipeline.lake.tables import LakeTable


class ParquetStore:
    """Reads and writes the lake's tables as folders of Parquet files. A cluster has a folder in each table."""

    def __init__(self, session: Callable[[], SparkSession], place: LakePlace, cluster: str | None) -> None:
        self._session = session
        self._place = place
        self._folder = "" if cluster is None else f"/{CLUSTER}={cluster}"

    def read(self, table: LakeTable) -> DataFrame | None:
        if not self._place.exists(f"{table.layer}/{table.name}{self._folder}"):
            return None
        return self._session().read.schema(table.schema).parquet(self._uri(table))

    def replace(self, table: LakeTable, frame: DataFrame) -> None:
        writer = frame.write.mode("overwrite").options(**WITHOUT_DICTIONARY)
        if table.partitioned_by:
            writer = writer.partitionBy(*table.partitioned_by).option("partitionOverwriteMode", "dynamic")
        writer.parquet(self._uri(table))

    def replace_rows(self, table: LakeTable, rows: pa.Table) -> None:
        write_parts(self._place.files, self._path(table), table.partitioned_by, rows, replaces=True)

    def append(self, table: LakeTable, rows: pa.Table) -> None:
        write_parts(self._place.files, self._path(table), table.partitioned_by, rows)

    def _path(self, table: LakeTable) -> str:
        return f"{self._place.path_of(table)}{self._folder}"

    def _uri(self, table: LakeTable) -> str:
        return f"{self._place.table_uri(table)}{self._folder}"
