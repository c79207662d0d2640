# SPDX-License-Identifier: Apache-2.0
"""The Spark data source `kcoord` (Python Data Source API): batch and stream readers of the tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, EqualTo, Filter, In, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema, from_arrow_type, to_arrow_schema
from pyspark.sql.types import StructType

from kcoord.pipeline.options import OptionError, SourceOptions
from kcoord.pipeline.planning import list_logs, log_ranges, pack
from kcoord.pipeline.range_reader import LogRange
from kcoord.pipeline.reading import Ranges, read_ranges
from kcoord.pipeline.schemas import Table
from kcoord.pipeline.stream import KcoordStreamReader

_PUSHDOWN_SETTING: Final = "spark.sql.python.filterPushdown.enabled"


class KcoordDataSource(DataSource):
    """`spark.read.format("kcoord").option("table", ...).load(path)`.

    `.schema("a few columns")` reads only these columns.
    """

    @classmethod
    def name(cls) -> str:
        return "kcoord"

    def schema(self) -> StructType:
        return from_arrow_schema(self._parsed().table.schema())

    def reader(self, schema: StructType) -> DataSourceReader:
        options = self._parsed()
        return KcoordReader(options, arrow_schema(options.table, schema))

    def streamReader(self, schema: StructType) -> KcoordStreamReader:
        options = self._parsed()
        if not options.table.is_stream:
            raise OptionError(
                f"table: {options.table.name} cannot be streamed, since its rows change; "
                "stream commits and keep the newest row of each key"
            )
        return KcoordStreamReader(options, arrow_schema(options.table, schema))

    def _parsed(self) -> SourceOptions:
        return SourceOptions.parse(dict(self.options))


class PushdownDataSource(KcoordDataSource):
    """Supports filter pushdown. Spark rejects such a source while the setting is off."""

    def reader(self, schema: StructType) -> DataSourceReader:
        options = self._parsed()
        return PushdownReader(options, arrow_schema(options.table, schema))


def register(spark: SparkSession) -> None:
    """Registers the format `kcoord` in a session, with filter pushdown if the session's setting is on now."""
    pushes = spark.conf.get(_PUSHDOWN_SETTING, "false") == "true"
    spark.dataSource.register(PushdownDataSource if pushes else KcoordDataSource)


def arrow_schema(table: Table, schema: StructType) -> pa.Schema:
    """Converts a schema to Arrow. Raises OptionError if the table has no such column, or another type for it."""
    types = {column.name: from_arrow_type(column.type).simpleString() for column in table.columns}
    for field in schema.fields:
        given = field.dataType.simpleString()
        if field.name not in types:
            raise OptionError(f"schema: the table {table.name} has no column {field.name!r}")
        if given != types[field.name]:
            raise OptionError(f"schema: the column {field.name} has type {types[field.name]}, not {given}")
    return to_arrow_schema(schema, timezone="UTC")


class KcoordReader(DataSourceReader):
    """One read of a table. Spark pickles it and sends it to planners and workers, so it has plain data only."""

    def __init__(self, options: SourceOptions, schema: pa.Schema) -> None:
        self._options = options
        self._schema = schema
        self._groups = options.groups
        self._log_partitions = options.log_partitions

    def partitions(self) -> Sequence[InputPartition]:
        options = replace(self._options, groups=self._groups, log_partitions=self._log_partitions)
        logs = list_logs(options)
        if options.table.name == "current_offsets":
            return [Ranges([LogRange(log)]) for log in logs]
        ranges = [sized_range for log in logs for sized_range in log_ranges(log, options.split_bytes)]
        return [Ranges(packed) for packed in pack(ranges, options.split_bytes)]

    def read(self, partition: InputPartition | None) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, Ranges):
            return iter(())  # Spark passes None if there are no partitions
        return read_ranges(partition, self._options, self._schema, self._groups)


class PushdownReader(KcoordReader):
    """Applies the filters `group = ...` and `group IN ...`, and the same for `log_partition`."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Applies what it can, and yields the filters that Spark has to apply."""
        for filter in filters:
            values = _values(filter)
            if values is not None and filter.attribute == ("group",):  # type: ignore[attr-defined]
                groups = frozenset(str(value) for value in values)
                self._groups = groups if self._groups is None else self._groups & groups
            elif values is not None and filter.attribute == ("log_partition",):  # type: ignore[attr-defined]
                numbers = frozenset(int(value) for value in values)
                self._log_partitions = numbers if self._log_partitions is None else self._log_partitions & numbers
            else:
                yield filter


def _values(filter: Filter) -> tuple[str | int, ...] | None:
    """Returns the values that an equality or IN filter allows for its column, or None for other filters."""
    if isinstance(filter, EqualTo):
        return (filter.value,)
    if isinstance(filter, In):
        return filter.value
    return None
