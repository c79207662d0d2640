# SPDX-License-Identifier: Apache-2.0
"""Tables of Delta Lake, whose log `deltalake` writes.

A change is atomic, and older versions stay readable until they are vacuumed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

import pyarrow as pa
from deltalake import DeltaTable, Schema
from deltalake.exceptions import CommitFailedError, DeltaError
from deltalake.transaction import AddAction, RemoveAction
from pyspark.sql import DataFrame, SparkSession

from kcoord.pipeline.lake.errors import LakeError
from kcoord.pipeline.lake.formats.data_files import (
    DataFile,
    read_files,
    replaced_values,
    rewritten_values,
    write_files,
    write_rows,
)
from kcoord.pipeline.lake.formats.place import LakePlace
from kcoord.pipeline.lake.formats.store import CLUSTER, StoredFile, errors_of, in_cluster
from kcoord.pipeline.lake.tables import LakeTable

_COMMIT_ATTEMPTS: Final = 10
"""How often a change of a table is tried while other jobs change other parts of it."""


class DeltaStore:
    """Reads and writes the lake's tables as Delta tables."""

    def __init__(self, session: Callable[[], SparkSession], place: LakePlace, cluster: str | None) -> None:
        self._session = session
        self._place = place
        self._cluster = cluster
        self._options = place.s3.delta() if place.s3 is not None else None

    def read(self, table: LakeTable) -> DataFrame | None:
        uri = self._place.table_uri(table)
        delta = self._load(table)
        if delta is None:
            return None
        if "deletionVectors" in (delta.protocol().reader_features or []):
            # Spark would read rows in the files that another program has marked as deleted.
            raise LakeError(f"{uri} has deletion vectors; run REORG TABLE ... APPLY (PURGE) and switch them off")
        filters = None if self._cluster is None else [(CLUSTER, "=", self._cluster)]
        return read_files(self._session(), table, delta.file_uris(file_pruning_predicate=filters))

    def revision(self, table: LakeTable) -> int:
        """Returns the version of the table; -1 if there is no table. Old files stay only until somebody's vacuum."""
        delta = self._load(table)
        return -1 if delta is None else delta.version()

    def replace(self, table: LakeTable, frame: DataFrame, *, whole: bool, parts: Collection[str]) -> None:
        stored = in_cluster(table, self._cluster)
        self._replace(stored, write_files(self._place, stored, frame, self._cluster), whole=whole, parts=parts)

    def replace_rows(self, table: LakeTable, rows: pa.Table, *, whole: bool, parts: Collection[str]) -> None:
        stored = in_cluster(table, self._cluster)
        self._replace(stored, write_rows(self._place, stored, rows, self._cluster), whole=whole, parts=parts)

    def append(self, table: LakeTable, rows: pa.Table) -> None:
        stored = in_cluster(table, self._cluster)
        self._commit(stored, write_rows(self._place, stored, rows, self._cluster), "append", [])

    def stored_files(self, table: LakeTable) -> list[StoredFile]:
        delta = self._load(table)
        actions = [] if delta is None else pa.table(delta.get_add_actions(flatten=True)).to_pylist()
        column = f"partition.{table.partitioned_by[-1]}"
        return [
            StoredFile(str(action[column]), action["size_bytes"])
            for action in actions
            if self._cluster is None or action[f"partition.{CLUSTER}"] == self._cluster
        ]

    def rewrite(self, table: LakeTable, frame: DataFrame | None, values: Sequence[str]) -> None:
        stored = in_cluster(table, self._cluster)
        files = [] if frame is None else write_files(self._place, stored, frame, self._cluster)
        self._overwrite(stored, files, rewritten_values(stored, values, self._cluster))

    def remove_replaced(self, table: LakeTable) -> None:
        """A vacuum removes them, but older versions of the table need them."""

    def _load(self, table: LakeTable) -> DeltaTable | None:
        uri = self._place.table_uri(table)
        with errors_of(uri, DeltaError):
            if not DeltaTable.is_deltatable(uri, self._options):
                return None
            return DeltaTable(uri, storage_options=self._options)

    def _replace(self, stored: LakeTable, files: list[DataFile], *, whole: bool, parts: Collection[str]) -> None:
        replaced = replaced_values(stored, files, self._cluster, whole=whole, parts=parts)
        if replaced is not None:
            self._overwrite(stored, files, replaced)

    def _overwrite(self, stored: LakeTable, files: list[DataFile], replaced: Mapping[str, list[str]]) -> None:
        self._commit(stored, files, "overwrite", [(name, "in", values) for name, values in replaced.items()])

    def _commit(
        self, table: LakeTable, files: list[DataFile], mode: str, filters: list[tuple[str, str, list[str]]]
    ) -> None:
        now_ms = round(time.time() * 1000)
        actions: list[AddAction | RemoveAction] = [
            AddAction(file.path, file.size_bytes, file.layout, now_ms, True, json.dumps({"numRecords": file.rows}))
            for file in files
        ]
        with errors_of(self._place.table_uri(table), DeltaError):
            for attempt in range(1, _COMMIT_ATTEMPTS + 1):
                try:
                    self._open(table).create_write_transaction(
                        actions, mode, table.arrow_schema, list(table.partitioned_by), filters or None
                    )
                    return
                except CommitFailedError:
                    # A compaction has removed files of other parts since the table was opened.
                    if attempt == _COMMIT_ATTEMPTS:
                        raise

    def _open(self, table: LakeTable) -> DeltaTable:
        """Returns the newest version of the table, with all columns. Creates the table if there is none."""
        uri, layout, schema = self._place.table_uri(table), list(table.partitioned_by), table.arrow_schema
        delta = DeltaTable.create(uri, schema, mode="ignore", partition_by=layout, storage_options=self._options)
        stored_names = {field.name for field in delta.schema().fields}
        new_fields = [field for field in Schema.from_arrow(schema).fields if field.name not in stored_names]
        if new_fields:  # a newer release has more columns
            delta.alter.add_columns(new_fields)
        return delta
