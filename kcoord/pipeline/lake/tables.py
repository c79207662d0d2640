# SPDX-License-Identifier: Apache-2.0
"""The tables of the lake: every column with its type and meaning, read from `tables.txt` in this folder.

docs/lake-tables.md is generated from it. The frames of the builders are cast to these columns, in this order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from kcoord.pipeline.schemas import RECORDS as SOURCE_RECORDS

_COMMON: Final = "[common]"
_OF_THE_SOURCE: Final = "*records of the source"


@dataclass(frozen=True, slots=True)
class LakeColumn:
    """One column: its name, its type as Spark writes it, its meaning with the unit."""

    name: str
    type: str
    doc: str


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
        schema = StructType.fromDDL(", ".join(f"`{column.name}` {column.type}" for column in self.columns))
        assert isinstance(schema, StructType)
        return schema

    def conform(self, frame: DataFrame) -> DataFrame:
        """Selects the table's columns and casts them to its types.

        Does not analyze the frame, since a declarative pipeline does not allow that.
        """
        return frame.select([F.col(f"`{column.name}`").cast(column.type).alias(column.name) for column in self.columns])


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
            yield LakeColumn(column.name, field.dataType.simpleString(), column.doc)
    elif " | " in line:
        name, kind, doc = (part.strip() for part in line.split(" | ", 2))
        yield LakeColumn(name, kind, doc)
    else:
        yield from (shared[name] for name in line.split())


TABLES: Final = {
    table.name: table for table in _parse(files(__package__).joinpath("tables.txt").read_text(encoding="utf-8"))
}
