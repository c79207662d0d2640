# SPDX-License-Identifier: Apache-2.0
"""The operations of a table format, and what the stores have in common."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Final, NamedTuple, Protocol

import pyarrow as pa
from pyspark.sql import DataFrame

from kcoord.pipeline.lake.errors import LakeError, TablesUnavailableError
from kcoord.pipeline.lake.tables import LakeColumn, LakeTable

CLUSTER: Final = "cluster"
_COLUMN: Final = LakeColumn(CLUSTER, "string", "Cluster of the row.", pa.string())


class StoredFile(NamedTuple):
    """A file of a table: the value of the last column of the table's layout, and the size."""

    value: str
    size_bytes: int


def in_cluster(table: LakeTable, cluster: str | None) -> LakeTable:
    """Returns the table as it is stored: with the column `cluster`, unless the lake is of an older release."""
    if cluster is None:
        return table
    layout = (CLUSTER, *table.partitioned_by)
    return replace(table, columns=(*table.columns, _COLUMN), partitioned_by=layout)


@contextmanager
def errors_of(place: str, kind: type[Exception]) -> Iterator[None]:
    """Raises TablesUnavailableError for an error of a format's library, which may have a text of many lines."""
    try:
        yield
    except LakeError:
        raise
    except kind as error:
        raise TablesUnavailableError(f"{place}: {(str(error) or repr(error)).splitlines()[0]}") from error


class Store(Protocol):
    """Reads and writes the rows of one cluster in tables. The frames have the table's columns and types."""

    def read(self, table: LakeTable) -> DataFrame | None:
        """Returns the current rows of the table, or None if it was never made."""
        ...

    def revision(self, table: LakeTable) -> int:
        """Returns a number that changes if frames that were read before may need files that are gone."""
        ...

    def replace(self, table: LakeTable, frame: DataFrame, *, whole: bool, parts: Collection[str]) -> None:
        """Replaces the parts of the layout for which the frame has rows, or all rows.

        The parts whose last column of the layout has one of the values `parts` are replaced even by no rows. A
        table without a layout is always replaced as a whole.
        """
        ...

    def replace_rows(self, table: LakeTable, rows: pa.Table, *, whole: bool, parts: Collection[str]) -> None:
        """Does the same as `replace`, without Spark."""
        ...

    def append(self, table: LakeTable, rows: pa.Table) -> None:
        """Adds rows."""
        ...

    def stored_files(self, table: LakeTable) -> list[StoredFile]:
        """Returns the files of a table that has a layout."""
        ...

    def rewrite(self, table: LakeTable, frame: DataFrame | None, values: Sequence[str]) -> None:
        """Replaces all rows whose last column of the layout has these values, in one step. None stands for no rows.

        The frame has rows with these values only. Rows of other values may be written meanwhile.
        """
        ...

    def remove_replaced(self, table: LakeTable) -> None:
        """Removes the files that `rewrite` has replaced, and those of a `rewrite` that was killed."""
        ...
