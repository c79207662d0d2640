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


_LENGTH_OF_IDS: Final = 36
_GAP: Final = 3
"""The space between two columns of a drawn table."""


def is_terminal() -> bool:
    return sys.stdout.isatty()


def console() -> Console:
    """Returns the console of stdout."""
    from rich.console import Console

    return Console(highlight=False, soft_wrap=False)


def print_table(titles: Sequence[str], rows: Iterable[Sequence[object]], *, title: str = "") -> None:
    """Prints rows under their titles. `title` is printed at a terminal only.

    A terminal that is too narrow for the table gets the plain columns, too. It breaks the lines, and ids stay whole.
    """
    cells = list(rows)
    if is_terminal():
        screen = console()
        table = make_table(titles, cells, title=title, keeps_ids=True)
        if sum((column.min_width or 0) + _GAP for column in table.columns) <= screen.width:
            screen.print(table)
            return
        if title:
            print(title)
    print(format_table(titles, cells))


def make_table(
    titles: Sequence[str], rows: Iterable[Sequence[object]], *, title: str = "", keeps_ids: bool = False
) -> Table:
    """Returns a table that wraps long cells instead of truncating them.

    With `keeps_ids` it does not wrap titles and ids of members, so it may be wider than the terminal.
    """
    from rich import box
    from rich.table import Table

    texts = [[cell_text(value) for value in row] for row in rows]
    table = Table(box=box.SIMPLE_HEAD, title=title or None, title_justify="left", header_style="bold", pad_edge=False)
    for column, name in enumerate(titles):
        is_number = align_right([row[column] for row in texts])
        longest = max((len(row[column]) for row in texts), default=0)
        table.add_column(
            name,
            justify="right" if is_number else "left",
            overflow="fold",
            min_width=max(len(name), min(longest, _LENGTH_OF_IDS)) if keeps_ids else None,
        )
    for row in texts:
        table.add_row(*map(styled, row))
    return table


def styled(text: str) -> Text:
    """Returns the unchanged text with a style. Brackets are not markup."""
    from rich.text import Text

    return Text(text, style=STYLES.get(text, "red" if text.startswith("Error:") else ""))
