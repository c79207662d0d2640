# SPDX-License-Identifier: Apache-2.0
"""The operations of a table format, and what the stores have in common."""

from __future__ import annotations

from dataclasses import replace
from typing import Final, Protocol

import pyarrow as pa
from pyspark.sql import DataFrame

from kcoord.pipeline.lake.tables import LakeColumn, LakeTable

CLUSTER: Final = "cluster"
_COLUMN: Final = LakeColumn(CLUSTER, "string", "Cluster of the row.", pa.string())


def in_cluster(table: LakeTable, cluster: str | None) -> LakeTable:
    """Returns the table as it is stored: with the column `cluster`, unless the lake is of an older release."""
    if cluster is None:
        return table
    layout = (CLUSTER, *table.partitioned_by)
    return replace(table, columns=(*table.columns, _COLUMN), partitioned_by=layout)


class Store(Protocol):
    """Reads and writes the rows of one cluster in tables. The frames have the table's columns and types."""

    def read(self, table: LakeTable) -> DataFrame | None:
        """Returns the current rows of the table, or None if it was never made."""
        ...

    def replace(self, table: LakeTable, frame: DataFrame) -> None:
        """Replaces the parts of the layout for which the frame has rows, or all rows if the table has no layout."""
        ...

    def replace_rows(self, table: LakeTable, rows: pa.Table) -> None:
        """Does the same as `replace`, without Spark, for a table with a layout."""
        ...

    def append(self, table: LakeTable, rows: pa.Table) -> None:
        """Adds rows."""
        ...
