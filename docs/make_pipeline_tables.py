# SPDX-License-Identifier: Apache-2.0
"""Writes docs/pipeline-tables.md from kcoord.pipeline.schemas. With `--check` it fails if the file is outdated."""

from __future__ import annotations

import sys
from pathlib import Path

from pyspark.sql.pandas.types import from_arrow_type

from kcoord.pipeline.schemas import TABLES, VALUES, Column, Table, Value

TARGET = Path(__file__).with_name("pipeline-tables.md")

HEAD = """# Tables of the data source

For analysts who query a log. Every table with its columns and units.

`spark.read.format("kcoord").option("table", NAME)` reads a table. Types are Spark's. Timestamps are UTC; their type
has microseconds, but the log has only milliseconds. Columns in bold are never null. `make generate` writes this file.
"""


def row(column: Column) -> str:
    name = f"**`{column.name}`**" if column.required else f"`{column.name}`"
    return f"| {name} | `{from_arrow_type(column.type).simpleString()}` | {column.doc.replace('|', chr(92) + '|')} |"


def section(table: Table) -> str:
    key = ", ".join(f"`{name}`" for name in table.key)
    modes = "batch and stream" if table.is_stream else "batch only"
    head = [
        f"\n## {table.name}\n",
        table.doc,
        "",
        f"Key: {key}. {modes.capitalize()}.",
        "",
        "| column | type | meaning |",
        "|---|---|---|",
    ]
    return "\n".join([*head, *map(row, table.columns), ""])


def value_row(record_type: int, value: Value) -> str:
    return f"| {record_type} | `{value.name}` | `{from_arrow_type(value.type).simpleString()}` | {value.doc} |"


def values() -> str:
    head = [
        "\n## Values in JSON\n",
        "The content of `records.value_json` by record type. Read it with `from_json(value_json, TYPE)`.",
        "Times are in ISO 8601, bytes in base64.",
        "",
        "| record type | name | type for `from_json` | meaning |",
        "|---|---|---|---|",
    ]
    return "\n".join([*head, *(value_row(number, value) for number, value in VALUES.items()), ""])


def tables() -> str:
    return HEAD + "".join(map(section, TABLES.values())) + values()


def main() -> int:
    if "--check" not in sys.argv:
        TARGET.write_text(tables())
    elif not TARGET.exists() or TARGET.read_text() != tables():
        print(f"{TARGET} is not up to date with kcoord.pipeline.schemas; run `make generate`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
