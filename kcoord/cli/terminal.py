# SPDX-License-Identifier: Apache-2.0
"""Prints tables: drawn by rich at a terminal, and in the plain columns of Kafka's tools into a pipe, for scripts.

rich is imported only at a terminal. It follows NO_COLOR, TERM=dumb and COLUMNS.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

from kcoord.cli.table import align_right, cell_text, format_table

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

STYLES: Final = {
    "Stable": "green",
    "Successful": "green",
    "Empty": "dim",
    "Dead": "dim",
    "Assigning": "yellow",
    "Reconciling": "yellow",
    "PreparingRebalance": "yellow",
    "CompletingRebalance": "yellow",
    "N/A": "dim",
    "-": "dim",
}
"""The style of a cell by its whole text."""


def is_terminal() -> bool:
    return sys.stdout.isatty()


def console() -> Console:
    """Returns the console of stdout."""
    from rich.console import Console

    return Console(highlight=False, soft_wrap=False)


def print_table(titles: Sequence[str], rows: Iterable[Sequence[object]], *, title: str = "") -> None:
    """Prints rows under their titles. `title` is printed at a terminal only."""
    if is_terminal():
        console().print(make_table(titles, rows, title=title))
    else:
        print(format_table(titles, rows))


def make_table(titles: Sequence[str], rows: Iterable[Sequence[object]], *, title: str = "") -> Table:
    """Returns a table that wraps long cells instead of truncating them."""
    from rich import box
    from rich.table import Table

    texts = [[cell_text(value) for value in row] for row in rows]
    table = Table(box=box.SIMPLE_HEAD, title=title or None, title_justify="left", header_style="bold", pad_edge=False)
    for column, name in enumerate(titles):
        is_number = align_right([row[column] for row in texts])
        table.add_column(name, justify="right" if is_number else "left", overflow="fold")
    for row in texts:
        table.add_row(*map(styled, row))
    return table


def styled(text: str) -> Text:
    """Returns the unchanged text with a style. Brackets are not markup."""
    from rich.text import Text

    return Text(text, style=STYLES.get(text, "red" if text.startswith("Error:") else ""))
