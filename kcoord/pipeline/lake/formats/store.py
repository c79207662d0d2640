# SPDX-License-Identifier: Apache-2.0
"""The operations of a table format."""

from __future__ import annotations

from typing import Protocol

import pyarrow as pa
from pyspark.sql import DataFrame

from kcoord.pipeline.lake.tables import LakeTable


class Store(Protocol):
    """Reads and writes tables. The frames have the table's columns and types."""

    def read(self, table: LakeTable) -> DataFrame | None:
        """Returns the current rows of the table, or None if it was never made."""
        ...

    def replace(self, table: LakeTable, frame: DataFrame) -> None:
        """Replaces the parts of the layout for which the frame has rows, or the whole table if it has no layout."""
        ...

    def append(self, table: LakeTable, rows: pa.Table) -> None:
        """Adds rows."""
        ...
