# SPDX-License-Identifier: Apache-2.0
"""How the tables of a lake are kept: Parquet alone, or Parquet files under the log of a table format.

Spark reads and writes the Parquet files whatever the format. What Delta Lake and Iceberg add, which of the files are
the table, is kept by their own Python libraries in the driver. So neither needs a connector, which is built for one
version of Spark and comes months after it.
"""

from __future__ import annotations

import importlib.util
from enum import StrEnum

from pyspark.sql import SparkSession

from kcoord.pipeline.lake.errors import LakeError
from kcoord.pipeline.lake.formats.place import LakePlace
from kcoord.pipeline.lake.formats.store import Store


class Format(StrEnum):
    """Of all tables of a lake, from its beginning on."""

    PARQUET = "parquet"
    DELTA = "delta"
    ICEBERG = "iceberg"


_LIBRARIES = {Format.DELTA: "deltalake", Format.ICEBERG: "pyiceberg"}


def open_store(spark: SparkSession, place: LakePlace, table_format: Format) -> Store:
    """Raises `LakeError` where the library of the format is missing or has no catalog."""
    library = _LIBRARIES.get(table_format)
    if library is not None and importlib.util.find_spec(library) is None:
        raise LakeError(f"--format {table_format} needs {library}: pip install 'kcoord[{table_format}]'")
    if table_format is Format.DELTA:
        from kcoord.pipeline.lake.formats.delta import DeltaStore

        return DeltaStore(spark, place)
    if table_format is Format.ICEBERG:
        from kcoord.pipeline.lake.formats.iceberg import IcebergStore

        return IcebergStore(spark, place)
    from kcoord.pipeline.lake.formats.parquet import ParquetStore

    return ParquetStore(spark, place)
