# SPDX-License-Identifier: Apache-2.0
"""Tables of results. Each row is printed as Markdown at once; JSON has all tables."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

Cell: TypeAlias = str | int | float


class Table:
    """One table of a report."""

    def __init__(self, name: str, columns: Sequence[str]) -> None:
        self.name = name
        self.columns = list(columns)
        self.rows: list[list[Cell]] = []
        print(f"\n{self._head()}", flush=True)

    def row(self, *cells: Cell) -> None:
        assert len(cells) == len(self.columns)
        self.rows.append(list(cells))
        print(_line(cells), flush=True)

    def markdown(self) -> str:
        return "\n".join([self._head(), *map(_line, self.rows)])

    def _head(self) -> str:
        return f"{self.name}:\n\n{_line(self.columns)}\n|{'---|' * len(self.columns)}"


class Report:
    """All tables of one run. The JSON file also has the machine and its load."""

    def __init__(self) -> None:
        self.tables: list[Table] = []

    def table(self, name: str, *columns: str) -> Table:
        table = Table(name, columns)
        self.tables.append(table)
        return table

    def write_json(self, path: Path) -> None:
        machine = {"python": platform.python_version(), "system": platform.platform(), "cpus": os.cpu_count()}
        tables = {
            table.name: [dict(zip(table.columns, row, strict=True)) for row in table.rows] for table in self.tables
        }
        content = {"time": int(time.time()), "machine": machine, "load": os.getloadavg(), "tables": tables}
        path.write_text(json.dumps(content, indent=1) + "\n")


def write_into(document: Path, section: str, content: str) -> None:
    """Replaces what a Markdown document has between the comments that begin and end the section."""
    begin, end = f"<!-- {section} -->\n", f"<!-- end of {section} -->\n"
    before, found_begin, rest = document.read_text().partition(begin)
    _, found_end, after = rest.partition(end)
    assert found_begin and found_end, f"{document} has no section between {begin.strip()} and {end.strip()}"
    document.write_text(f"{before}{begin}\n{content}\n\n{end}{after}")


def _line(cells: Sequence[Cell]) -> str:
    return f"| {' | '.join(map(_text, cells))} |"


def _text(cell: Cell) -> str:
    if isinstance(cell, float):
        return f"{cell:,.0f}" if abs(cell) >= 100 else f"{cell:.1f}" if abs(cell) >= 10 else f"{cell:.2f}"
    return f"{cell:,}" if isinstance(cell, int) else cell
