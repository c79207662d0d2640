# SPDX-License-Identifier: Apache-2.0
"""Tables of Delta Lake, whose log `deltalake` writes.

A change is atomic, and older versions stay readable until they are vacuumed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import pyarrow as pa
from deltalake import DeltaTable, Schema
from deltalake.transaction import AddAction, RemoveAction
from pyspark.sql import DataFrame, SparkSession

from kcoord.pipeline.lake.errors import LakeError
from kcoord.pipeline.lake.formats.data_files import DataFile, read_files, replaced_values, write_files, write_rows
from kcoord.pipeline.lake.formats.place import LakePlace
from kcoord.pipeline.lake.formats.store import CLUSTER, in_cluster
from kcoord.pipeline.lake.tables import LakeTable


class DeltaStore:
    """Reads and writes the lake's tables as Delta tables."""

    def __init__(self, session: Callable[[], SparkSession], place: LakePlace, cluster: str | None) -> None:
        self._session = session
        self._place = place
        self._cluster = cluster
        self._options = place.s3.delta() if place.s3 is not None else None

    def read(self, table: LakeTable) -> DataFrame | None:
        uri = self._place.table_uri(table)
        if not DeltaTable.is_deltatable(uri, self._options):
            return None
        delta = DeltaTable(uri, storage_options=self._options)
        if "deletionVectors" in (delta.protocol().reader_features or []):
            # Spark would read rows in the files that another program has marked as deleted.
            raise LakeError(f"{uri} has deletion vectors; run REORG TABLE ... APPLY (PURGE) and switch them off")
        filters = None if self._cluster is None else [(CLUSTER, "=", self._cluster)]
        return read_files(self._session(), table, delta.file_uris(file_pruning_predicate=filters))

    def replace(self, table: LakeTable, frame: DataFrame) -> None:
        stored = in_cluster(table, self._cluster)
        self._replace(stored, write_files(self._place, stored, frame, self._cluster))

    def replace_rows(self, table: LakeTable, rows: pa.Table) -> None:
        stored = in_cluster(table, self._cluster)
        self._replace(stored, write_rows(self._place, stored, rows, self._cluster))

    def append(self, table: LakeTable, rows: pa.Table) -> None:
        stored = in_cluster(table, self._cluster)
        self._commit(stored, write_rows(self._place, stored, rows, self._cluster), "append", [])

    def _replace(self, stored: LakeTable, files: list[DataFile]) -> None:
        replaced = replaced_values(stored, files, self._cluster)
        if replaced is not None:
            self._commit(stored, files, "overwrite", [(name, "in", values) for name, values in replaced.items()])

    def _commit(
        self, table: LakeTable, files: list[DataFile], mode: str, filters: list[tuple[str, str, list[str]]]
    ) -> None:
        uri, layout = self._place.table_uri(table), list(table.partitioned_by)
        schema = table.arrow_schema
        delta = DeltaTable.create(uri, schema, mode="ignore", partition_by=layout, storage_options=self._options)
        stored_names = {field.name for field in delta.schema().fields}
        new_fields = [field for field in Schema.from_arrow(schema).fields if field.name not in stored_names]
        if new_fields:  # a newer release has more columns
            delta.alter.add_columns(new_fields)
        now_ms = round(time.time() * 1000)
        actions: list[AddAction | RemoveAction] = [
            AddAction(file.path, file.size_bytes, file.layout, now_ms, True, json.dumps({"numRecords": file.rows}))
            for file in files
        ]
        delta.create_write_transaction(actions, mode, schema, layout, filters or None)
