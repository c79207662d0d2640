# SPDX-License-Identifier: Apache-2.0
"""Tables of Iceberg, whose metadata `pyiceberg` writes.

A change is atomic, and older snapshots stay readable until they are expired.

The catalog is the one that pyiceberg's configuration names `kcoord` (`PYICEBERG_CATALOG__KCOORD__URI` and so on, or
`.pyiceberg.yaml`). A lake on a local disk without such a catalog has its catalog in a file of the lake.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from datetime import date, timedelta
from typing import Final

import pyarrow as pa
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.exceptions import NoSuchTableError
from pyiceberg.expressions import AlwaysFalse, AlwaysTrue, And, BooleanExpression, EqualTo, Or, Reference
from pyiceberg.expressions.literals import literal
from pyiceberg.table import Table as IcebergTable
from pyiceberg.utils.config import Config
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

CATALOG: Final = "kcoord"
OWN_CATALOG: Final = "_kcoord/iceberg.db"
_PROPERTIES: Final = {"commit.retry.num-retries": "9", "commit.retry.max-wait-ms": "1000"}
"""How often pyiceberg repeats a change of a table while other jobs change other parts of it."""


class IcebergStore:
    """Reads and writes the lake's tables as Iceberg tables, through a catalog."""

    def __init__(self, session: Callable[[], SparkSession], place: LakePlace, cluster: str | None) -> None:
        self._session = session
        self._place = place
        self._cluster = cluster
        configured = Config().get_catalog_config(CATALOG)
        self._catalog_properties = {} if configured is None else {key: str(configured[key]) for key in configured}
        if configured is None:
            if not place.is_local:
                raise LakeError(
                    f"--format iceberg needs a catalog for {place.uri}: set PYICEBERG_CATALOG__{CATALOG.upper()}__URI "
                    f"and its other properties, or configure the catalog {CATALOG} in .pyiceberg.yaml"
                )
            place.files.create_dir(f"{place.root}/{OWN_CATALOG.rpartition('/')[0]}")
            own = {"type": "sql", "uri": f"sqlite:///{place.root}/{OWN_CATALOG}", "warehouse": place.root}
            self._catalog_properties = own
        if place.s3 is not None:
            self._catalog_properties |= place.s3.iceberg()

    def read(self, table: LakeTable) -> DataFrame | None:
        with self._catalog() as catalog:
            iceberg = self._load(catalog, table)
            if iceberg is None:
                return None
            uris = []
            for task in iceberg.scan(row_filter=self._own_rows()).plan_files():
                if task.delete_files:
                    # Spark would read rows that another program has marked as deleted.
                    raise LakeError(f"{iceberg.location()} has delete files; rewrite its data files")
                uris.append(task.file.file_path)
        return read_files(self._session(), table, uris)

    def revision(self, table: LakeTable) -> int:
        """Returns the id of the snapshot; -1 if there is none. Old files stay only until another program's cleanup."""
        with self._catalog() as catalog:
            iceberg = self._load(catalog, table)
            snapshot = None if iceberg is None else iceberg.current_snapshot()
        return -1 if snapshot is None else snapshot.snapshot_id

    def replace(self, table: LakeTable, frame: DataFrame, *, whole: bool, parts: Collection[str]) -> None:
        stored = in_cluster(table, self._cluster)
        self._replace(stored, write_files(self._place, stored, frame, self._cluster), whole=whole, parts=parts)

    def replace_rows(self, table: LakeTable, rows: pa.Table, *, whole: bool, parts: Collection[str]) -> None:
        stored = in_cluster(table, self._cluster)
        self._replace(stored, write_rows(self._place, stored, rows, self._cluster), whole=whole, parts=parts)

    def append(self, table: LakeTable, rows: pa.Table) -> None:
        stored = in_cluster(table, self._cluster)
        self._commit(stored, write_rows(self._place, stored, rows, self._cluster), None)

    def stored_files(self, table: LakeTable) -> list[StoredFile]:
        position = len(in_cluster(table, self._cluster).partitioned_by) - 1
        with self._catalog() as catalog:
            iceberg = self._load(catalog, table)
            tasks = [] if iceberg is None else iceberg.scan(row_filter=self._own_rows()).plan_files()
            return [
                StoredFile(_value_text(table, task.file.partition[position]), task.file.file_size_in_bytes)
                for task in tasks
            ]

    def rewrite(self, table: LakeTable, frame: DataFrame | None, values: Sequence[str]) -> None:
        stored = in_cluster(table, self._cluster)
        files = [] if frame is None else write_files(self._place, stored, frame, self._cluster)
        self._overwrite(stored, files, rewritten_values(stored, values, self._cluster))

    def remove_replaced(self, table: LakeTable) -> None:
        """The older snapshots of the table need them."""

    def _own_rows(self) -> BooleanExpression:
        if self._cluster is None:
            return AlwaysTrue()
        return EqualTo(term=Reference(CLUSTER), value=literal(self._cluster))

    def _replace(self, stored: LakeTable, files: list[DataFile], *, whole: bool, parts: Collection[str]) -> None:
        replaced = replaced_values(stored, files, self._cluster, whole=whole, parts=parts)
        if replaced is not None:
            self._overwrite(stored, files, replaced)

    def _overwrite(self, stored: LakeTable, files: list[DataFile], replaced: Mapping[str, list[str]]) -> None:
        rows: BooleanExpression = AlwaysTrue()
        for name, values in replaced.items():
            any_value = (EqualTo(term=Reference(name), value=literal(value)) for value in values)
            rows = And(rows, Or(*any_value, AlwaysFalse()))
        self._commit(stored, files, rows)

    def _commit(self, table: LakeTable, files: list[DataFile], replaced: BooleanExpression | None) -> None:
        uri = self._place.table_uri(table)
        with self._catalog() as catalog:
            iceberg = self._load(catalog, table) or self._create(catalog, table)
            if {column.name for column in table.columns} - {field.name for field in iceberg.schema().fields}:
                with iceberg.update_schema() as evolution:  # a newer release has more columns
                    evolution.union_by_name(table.arrow_schema)
            with iceberg.transaction() as change:
                if replaced is not None and any(iceberg.scan(row_filter=replaced).plan_files()):
                    change.delete(replaced)
                if files:
                    change.add_files([f"{uri}/{file.path}" for file in files], check_duplicate_files=False)

    def _create(self, catalog: Catalog, table: LakeTable) -> IcebergTable:
        catalog.create_namespace_if_not_exists(table.layer)
        schema = table.arrow_schema
        place = self._place.table_uri(table)
        creation = catalog.create_table_transaction(_identifier(table), schema, place, properties=_PROPERTIES)
        with creation, creation.update_spec() as layout:
            for name in table.partitioned_by:
                layout.add_identity(name)
        return catalog.load_table(_identifier(table))

    def _load(self, catalog: Catalog, table: LakeTable) -> IcebergTable | None:
        try:
            iceberg = catalog.load_table(_identifier(table))
        except NoSuchTableError:
            return None
        if iceberg.location() != self._place.table_uri(table):
            raise LakeError(
                f"catalog {CATALOG} has another lake's {table.layer}.{table.name}, at {iceberg.location()}: "
                "each lake needs a catalog of its own"
            )
        return iceberg

    @contextmanager
    def _catalog(self) -> Iterator[Catalog]:
        # Each kind of catalog has a library of its own, whose errors have no class in common.
        with (
            errors_of(f"catalog {CATALOG}", Exception),
            closing(load_catalog(CATALOG, **self._catalog_properties)) as catalog,
        ):
            yield catalog


def _value_text(table: LakeTable, value: object) -> str:
    """Returns the value of the last column of the layout. Iceberg has a date as its days since 1970."""
    if table.partitioned_by[-1] == "date" and isinstance(value, int):
        return (date(1970, 1, 1) + timedelta(days=value)).isoformat()
    return str(value)


def _identifier(table: LakeTable) -> tuple[str, str]:
    return table.layer, table.name
