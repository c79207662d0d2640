# SPDX-License-Identifier: Apache-2.0
"""Writes docs/lake-tables.md from the tables of the lake. With `--check` it fails if the file is not up to date."""

from __future__ import annotations

import sys
from pathlib import Path

from kcoord.pipeline.lake.tables import TABLES, LakeTable

TARGET = Path(__file__).with_name("lake-tables.md")
HEAD = """# Tables of the lake

For analysts who query a lake. Every table with its columns, keys and units.

Each table also has the column `cluster`, by which its files are laid out first; lakes of older releases do not have it.
Types are Spark's; timestamps are UTC. `now` is the newest timestamp in the lake, unless a job was given `--now`.
[The data pipeline](pipeline.md) lists the tables of each job. `make generate` writes this file.
"""


def render() -> str:
    return "\n".join([HEAD, *(_table(table) for table in TABLES.values())])


def _table(table: LakeTable) -> str:
    key = ", ".join(f"`{name}`" for name in table.key)
    layout = ", ".join(f"`{name}`" for name in table.partitioned_by)
    lines = [f"## {table.layer}.{table.name}", "", table.doc, "", f"Key: {key}."]
    if layout:
        lines[-1] += f" Files are laid out by {layout}."
    lines += ["", "| column | type | meaning |", "|---|---|---|"]
    lines += [f"| `{column.name}` | `{column.type}` | {column.doc} |" for column in table.columns]
    return "\n".join([*lines, ""])


def main() -> int:
    text = render()
    if "--check" in sys.argv[1:]:
        if TARGET.read_text(encoding="utf-8") != text:
            print(f"{TARGET} is not up to date; run `make generate`", file=sys.stderr)
            return 1
        return 0
    TARGET.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
