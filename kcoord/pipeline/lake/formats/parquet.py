# SPDX-License-Identifier: Apache-2.0
"""Tables as folders of Parquet files. All files of a folder belong to the table. A reader may see half of a change."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from kcoord.pipeline.lake.files import write_parts
from kcoord.pipeline.lake.formats.data_files import WITHOUT_DICTIONARY
from kcoord.pipeline.lake.formats.place import LakePlace
from kcoord.pipeline.lake.tables import LakeTable


class ParquetStore:
    """Reads and writes the lake's tables as folders of Parquet files."""

    def __init__(self, session: Callable[[], SparkSession], place: LakePlace) -> None:
        self._session = session
        self._place = place

    def read(self, table: LakeTable) -> DataFrame | None:
        if not self._place.exists(f"{table.layer}/{table.name}"):
            return None
        return self._session().read.schema(table.schema).parquet(self._place.table_uri(table))

    def replace(self, table: LakeTable, frame: DataFrame) -> None:
        writer = frame.write.mode("overwrite").options(**WITHOUT_DICTIONARY)
        if table.partitioned_by:
            writer = writer.partitionBy(*table.partitioned_by).option("partitionOverwriteMode", "dynamic")
        writer.parquet(self._place.table_uri(table))

    def append(self, table: LakeTable, rows: pa.Table) -> None:
        write_parts(self._place.files, self._place.path_of(table), table.partitioned_by, rows)
