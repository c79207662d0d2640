# SPDX-License-Identifier: Apache-2.0
"""Tables for people at a terminal, drawn by rich; for a pipe, the plain columns of Kafka's tools that scripts read.

rich is imported when there is a terminal and something to draw. It follows NO_COLOR, TERM=dumb and COLUMNS.
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
"""How cells look that say only this."""


def is_terminal() -> bool:
    return sys.stdout.isatty()


def console() -> Console:
    """The terminal behind stdout."""
    from rich.console import Console

    return Console(highlight=False, soft_wrap=False)


def print_table(titles: Sequence[str], rows: Iterable[Sequence[object]], *, title: str = "") -> None:
    """Prints rows under their titles; `title` is for people only."""
    if is_terminal():
        console().print(make_table(titles, rows, title=title))
    else:
        print(format_table(titles, rows))


def make_table(titles: Sequence[str], rows: Iterable[Sequence[object]], *, title: str = "") -> Table:
    """A table whose cells are never cut off: what is too wide goes on in the next line."""
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
    """The text as it is, whatever brackets it has; only its look depends on what it says."""
    from rich.text import Text

    return Text(text, style=STYLES.get(text, "red" if text.startswith("Error:") else ""))
