# SPDX-License-Identifier: Apache-2.0
"""The Spark data source `kcoord` (Python Data Source API): batch and stream readers of the tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, EqualTo, Filter, In, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema, from_arrow_type, to_arrow_schema
from pyspark.sql.types import StructType

from kcoord.pipeline.log_files import folders_at
from kcoord.pipeline.options import OptionError, SourceOptions
from kcoord.pipeline.planning import log_ranges, pack, prune
from kcoord.pipeline.range_reader import LogRange
from kcoord.pipeline.reading import Ranges, read_ranges
from kcoord.pipeline.schemas import Table
from kcoord.pipeline.stream import KcoordStreamReader

_PUSHDOWN_SETTING: Final = "spark.sql.python.filterPushdown.enabled"


class KcoordDataSource(DataSource):
    """`spark.read.format("kcoord").option("table", ...).load(path)`; `.schema("a few columns")` leaves out the
    others.
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
                f"table: {options.table.name} cannot be streamed, since its rows change: "
                "stream commits and keep the newest"
            )
        return KcoordStreamReader(options, arrow_schema(options.table, schema))

    def _parsed(self) -> SourceOptions:
        return SourceOptions.parse(dict(self.options))


class PushdownDataSource(KcoordDataSource):
    """Takes part in filter pushdown. Spark refuses such a source while the setting is off."""

    def reader(self, schema: StructType) -> DataSourceReader:
        options = self._parsed()
        return PushdownReader(options, arrow_schema(options.table, schema))


def register(spark: SparkSession) -> None:
    """Makes the format `kcoord` known to a session, with filter pushdown if the session's setting has it switched on
    now.
    """
    pushes = spark.conf.get(_PUSHDOWN_SETTING, "false") == "true"
    spark.dataSource.register(PushdownDataSource if pushes else KcoordDataSource)


def arrow_schema(table: Table, schema: StructType) -> pa.Schema:
    """The columns that a schema asks for; they have to be the table's, with the table's types."""
    types = {each.name: from_arrow_type(each.type).simpleString() for each in table.columns}
    for each in schema.fields:
        found = each.dataType.simpleString()
        if each.name not in types:
            raise OptionError(f"schema: the table {table.name} has no column {each.name!r}")
        if found != types[each.name]:
            raise OptionError(f"schema: the column {each.name} has type {types[each.name]}, not {found}")
    return to_arrow_schema(schema, timezone="UTC")


class KcoordReader(DataSourceReader):
    """One read of a table. Only plain data in here: it is pickled to planners and workers."""

    def __init__(self, options: SourceOptions, schema: pa.Schema) -> None:
        self._options = options
        self._schema = schema
        self._groups = options.groups
        self._log_partitions = options.log_partitions

    def partitions(self) -> Sequence[InputPartition]:
        options = self._options
        folders = folders_at(options.paths, options.topic)
        wanted = prune(folders, self._groups, self._log_partitions, options.offsets_topic_partitions)
        if options.table.name == "current_offsets":
            return [Ranges([LogRange(folder)]) for folder in wanted]
        ranges = [each for folder in wanted for each in log_ranges(folder, options.split_bytes)]
        return [Ranges(each) for each in pack(ranges, options.split_bytes)]

    def read(self, partition: InputPartition | None) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, Ranges):
            return iter(())  # Spark's way to say that there are no partitions
        return read_ranges(partition, self._options, self._schema, self._groups)


class PushdownReader(KcoordReader):
    """Takes over `group = ...`, `group IN ...` and the same of `log_partition`."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        for each in filters:
            values = _values(each)
            if values is not None and each.attribute == ("group",):  # type: ignore[attr-defined]
                groups = frozenset(str(value) for value in values)
                self._groups = groups if self._groups is None else self._groups & groups
            elif values is not None and each.attribute == ("log_partition",):  # type: ignore[attr-defined]
                numbers = frozenset(int(value) for value in values)
                self._log_partitions = numbers if self._log_partitions is None else self._log_partitions & numbers
            else:
                yield each


def _values(filter: Filter) -> tuple[str | int, ...] | None:
    """What a column may be, where the filter says so."""
    if isinstance(filter, EqualTo):
        return (filter.value,)
    if isinstance(filter, In):
        return filter.value
    return None
