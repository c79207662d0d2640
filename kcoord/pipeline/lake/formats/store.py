# SPDX-License-Identifier: Apache-2.0
"""What a format has to be able to do."""

from __future__ import annotations

from typing import Protocol

from pyspark.sql import DataFrame

from kcoord.pipeline.lake.tables import LakeTable


class Store(Protocol):
    """Frames have the table's columns and types."""

    def read(self, table: LakeTable) -> DataFrame | None:
        """All rows as of now; None where the table was never made."""
        ...

    def replace(self, table: LakeTable, frame: DataFrame) -> None:
        """Replaces those parts of the table's layout that the frame has rows of; all of a table without a layout."""
        ...

    def append(self, table: LakeTable, frame: DataFrame) -> None:
        """Adds rows."""
        ...
