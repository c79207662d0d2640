# SPDX-License-Identifier: Apache-2.0
"""Old forms of command lines. They are accepted until the next release, with a warning that names the new option."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Final

_NEXT_RELEASE: Final = "the next release does not accept it"


def add_old_positional(parser: argparse.ArgumentParser, option: str, metavar: str) -> None:
    """Accepts the value of `option` as a positional argument too."""
    parser.add_argument(
        option.removeprefix("--").replace("-", "_"),
        nargs="?",
        action=_OldPositional,
        option=option,
        default=argparse.SUPPRESS,
        metavar=metavar,
        help=argparse.SUPPRESS,
    )


def add_old_format(parser: argparse.ArgumentParser, dest: str) -> None:
    """Accepts `--format json` for `--json`; `dest` gets "json" or "table"."""
    parser.add_argument(
        "--format",
        action=_OldFormat,
        dest=dest,
        choices=("table", "json"),
        default=argparse.SUPPRESS,
        help=argparse.SUPPRESS,
    )


def _warn(prog: str, old: str, new: str) -> None:
    print(f"warning: {prog}: use {new} instead of {old}: {_NEXT_RELEASE}", file=sys.stderr)


def require_group(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Exits with code 2 if there is no group, as argparse does for a required option."""
    if options.group is None:
        parser.error("the following arguments are required: --group")


class _OldPositional(argparse.Action):
    def __init__(self, option_strings: Sequence[str], dest: str, option: str, **more: object) -> None:
        super().__init__(option_strings, dest, **more)  # type: ignore[arg-type]
        self._option = option

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        _warn(parser.prog, f"the argument {values}", f"{self._option} {values}")
        setattr(namespace, self.dest, values)


class _OldFormat(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        new = "--json" if values == "json" else "no option"
        _warn(parser.prog, f"{option_string} {values}", new)
        setattr(namespace, self.dest, values)
