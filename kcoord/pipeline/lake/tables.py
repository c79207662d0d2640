# SPDX-License-Identifier: Apache-2.0
"""The tables of the lake: every column with its type and meaning, read from `tables.txt` in this folder.

docs/lake-tables.md is generated from it. The frames of the builders are cast to these columns, in this order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Final

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from kcoord.pipeline.schemas import RECORDS as SOURCE_RECORDS
from kcoord.pipeline.schemas import TIMESTAMP, list_of
from kcoord_protocol.batch_header import crc32c

_TYPES: Final = {
    "bigint": pa.int64(),
    "boolean": pa.bool_(),
    "date": pa.date32(),
    "double": pa.float64(),
    "int": pa.int32(),
    "string": pa.string(),
    "timestamp": TIMESTAMP,
    "array<string>": list_of(pa.string()),
    "map<string,bigint>": pa.map_(pa.string(), pa.int64()),
}
_COMMON: Final = "[common]"
_OF_THE_SOURCE: Final = "*records of the source"


@dataclass(frozen=True, slots=True)
class LakeColumn:
    """One column: its name, its type as Spark writes it, its meaning with the unit, its type in Arrow."""

    name: str
    type: str
    doc: str
    arrow: pa.DataType


@dataclass(frozen=True, slots=True)
class LakeTable:
    """One table. The columns `key` identify a row.

    Files are laid out by the columns `partitioned_by`. A table without such columns is replaced as a whole.
    """

    layer: str
    name: str
    doc: str
    key: tuple[str, ...]
    columns: tuple[LakeColumn, ...]
    partitioned_by: tuple[str, ...] = ()

    @property
    def schema(self) -> StructType:
        return from_arrow_schema(self.arrow_schema)

    @property
    def arrow_schema(self) -> pa.Schema:
        return pa.schema([pa.field(column.name, column.arrow) for column in self.columns])

    @property
    def digest(self) -> str:
        """A text that changes if the table gets other columns."""
        return f"{crc32c(repr([(column.name, column.type) for column in self.columns]).encode()):08x}"

    def conform(self, frame: DataFrame, **expressions: str) -> DataFrame:
        """Selects the table's columns and casts them to its types. Columns may be given as expressions of SQL.

        Does not analyze the frame, since a declarative pipeline does not allow that.
        """
        values = {column.name: f"`{column.name}`" for column in self.columns}
        assert expressions.keys() <= values.keys(), f"{self.name} has no column {expressions.keys() - values.keys()}"
        values |= expressions
        return frame.selectExpr(
            *(f"CAST({values[column.name]} AS {column.type}) AS `{column.name}`" for column in self.columns)
        )


def _parse(text: str) -> Iterator[LakeTable]:
    common, *sections = (section.strip().splitlines() for section in text.split("\n\n") if not section.startswith("#"))
    assert common[0] == _COMMON, common[0]
    shared = {column.name: column for line in common[1:] for column in _columns(line, {})}
    for title, doc, *lines in sections:
        layer, _, name = title.strip("[]").partition(".")
        key, layout = _names(lines, "key:"), _names(lines, "layout:")
        columns = tuple(column for line in lines for column in _columns(line, shared))
        yield LakeTable(layer, name, doc, key, columns, layout)


def _names(lines: list[str], title: str) -> tuple[str, ...]:
    """Removes the first line if it begins with the title, and returns the names in it."""
    if not lines[0].startswith(title):
        return ()
    return tuple(lines.pop(0).removeprefix(title).split())


def _columns(line: str, shared: Mapping[str, LakeColumn]) -> Iterator[LakeColumn]:
    if line == _OF_THE_SOURCE:
        fields = from_arrow_schema(SOURCE_RECORDS.schema()).fields
        for column, field in zip(SOURCE_RECORDS.columns, fields, strict=True):
            yield LakeColumn(column.name, field.dataType.simpleString(), column.doc, column.type)
    elif " | " in line:
        name, kind, doc = (part.strip() for part in line.split(" | ", 2))
        yield LakeColumn(name, kind, doc, _TYPES[kind])
    else:
        yield from (shared[name] for name in line.split())


TABLES: Final = {
    table.name: table for table in _parse(files(__package__).joinpath("tables.txt").read_text(encoding="utf-8"))
}
