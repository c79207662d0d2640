# SPDX-License-Identifier: Apache-2.0
"""Parses the options of a command line and checks their combination."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Final

from kcoord.cli.table import current_time_ms, parse_time

MOST_SHORT: Final = 2**15 - 1
"""The greatest replication factor."""
MOST_INT: Final = 2**31 - 1
"""The greatest int of Java, which Kafka's settings and Spark's methods have."""
MOST_PROCESSES: Final = 256
"""The greatest value of --processes. A pool starts all its processes at once."""
MOST_LONG: Final = 2**63 - 1
"""The greatest offset and the greatest time of a record."""


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


def add_topics(parser: argparse.ArgumentParser) -> None:
    """Adds `topics`: names as arguments, or with --topic as for Kafka's console consumer and producer."""
    parser.add_argument("topics", nargs="*", action="extend", default=[], metavar="TOPIC")
    parser.add_argument("--topic", action="append", dest="topics", metavar="TOPIC", help="the same as TOPIC")


def option_name(attribute: str) -> str:
    """Returns `--dry-run` for `dry_run`."""
    return f"--{attribute.replace('_', '-')}"


def key_value(text: str) -> tuple[str, str]:
    """The type of an option KEY=VALUE."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    return key, value


def whole_number(least: int, most: int = MOST_INT) -> Callable[[str], int]:
    """Returns the type of an option whose values are whole numbers from `least` to `most`."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if not least <= number <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} to {most}")
        return number

    return parse


def seconds(*, may_be_0: bool) -> Callable[[str], float]:
    """Returns the type of an option whose values are seconds."""

    def parse(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not 0 <= number <= MOST_INT or (not number and not may_be_0):
            least = "from" if may_be_0 else "above"
            raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds {least} 0 up to {MOST_INT}")
        return number

    return parse


def moment(text: str) -> datetime:
    """The type of an option whose values are times (`parse_time`)."""
    try:
        return datetime.fromtimestamp(parse_time(text, current_time_ms()) / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no time: give an age such as 2h, ISO 8601, or milliseconds since 1970"
        ) from None
