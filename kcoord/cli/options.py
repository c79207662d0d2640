# SPDX-License-Identifier: Apache-2.0
"""Parses the options of a command line and checks their combination."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence


def parse_options(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str],
    find_problem: Callable[[argparse.Namespace], str | None],
) -> argparse.Namespace:
    """Returns the options. Exits with code 2 and the text of `find_problem` if it returns one."""
    options = parser.parse_args(arguments)
    problem = find_problem(options)
    if problem is not None:
        parser.error(problem)
    return options


def option_name(attribute: str) -> str:
    """Returns `--dry-run` for `dry_run`."""
    return f"--{attribute.replace('_', '-')}"
