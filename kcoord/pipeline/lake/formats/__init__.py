# SPDX-License-Identifier: Apache-2.0
"""The formats of a lake's tables: plain Parquet, or Parquet files with the metadata of Delta Lake or Iceberg.

Spark reads and writes the Parquet files of every format. The metadata of Delta Lake and Iceberg says which files belong
to the table; their own Python libraries keep it in the driver. So neither format needs a Spark connector. Connectors
are built for one version of Spark and are released months after it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from enum import StrEnum

from pyspark.sql import SparkSession

from kcoord.pipeline.lake.errors import LakeError
from kcoord.pipeline.lake.formats.place import LakePlace
from kcoord.pipeline.lake.formats.store import Store


class Format(StrEnum):
    """The format of all tables of a lake. It is chosen when the lake is created."""

    PARQUET = "parquet"
    DELTA = "delta"
    ICEBERG = "iceberg"


_LIBRARIES = {Format.DELTA: "deltalake", Format.ICEBERG: "pyiceberg"}


def check_library(table_format: Format) -> None:
    """Raises LakeError if the library of the format is missing."""
    library = _LIBRARIES.get(table_format)
    if library is not None and importlib.util.find_spec(library) is None:
        install = f"pip install '.[{table_format}]' in a checkout of kcoord"
        raise LakeError(f"--format {table_format} needs {library}: {install}")


def open_store(
    session: Callable[[], SparkSession], place: LakePlace, table_format: Format, cluster: str | None
) -> Store:
    """Opens the store of a format. Raises LakeError if the format has no catalog."""
    if table_format is Format.DELTA:
        from kcoord.pipeline.lake.formats.delta import DeltaStore

        return DeltaStore(session, place, cluster)
    if table_format is Format.ICEBERG:
        from kcoord.pipeline.lake.formats.iceberg import IcebergStore

        return IcebergStore(session, place, cluster)
    from kcoord.pipeline.lake.formats.parquet import ParquetStore

    return ParquetStore(session, place, cluster)
