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
        print(f"\n{name}\n\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)

    def row(self, *cells: Cell) -> None:
        assert len(cells) == len(self.columns)
        self.rows.append(list(cells))
        print(f"| {' | '.join(map(_text, cells))} |", flush=True)


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


def _text(cell: Cell) -> str:
    if isinstance(cell, float):
        return f"{cell:.0f}" if abs(cell) >= 100 else f"{cell:.1f}" if abs(cell) >= 10 else f"{cell:.2f}"
    return f"{cell:,}" if isinstance(cell, int) else cell
