# SPDX-License-Identifier: Apache-2.0
"""Options of a command line, and whether they go together."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence


def parse_options(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str],
    find_problem: Callable[[argparse.Namespace], str | None],
) -> argparse.Namespace:
    """Returns the options. Ends with exit code 2 if `find_problem` returns why they do not go together."""
    options = parser.parse_args(arguments)
    problem = find_problem(options)
    if problem is not None:
        parser.error(problem)
    return options


def option_name(attribute: str) -> str:
    """Returns `--dry-run` for `dry_run`."""
    return f"--{attribute.replace('_', '-')}"
