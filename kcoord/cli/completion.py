# SPDX-License-Identifier: Apache-2.0
"""`kcoord completion bash|zsh|fish|tcsh|powershell`: a script that lets the shell complete commands and options.

shtab makes it from the parsers of the commands, so it knows what they know. Pressing Tab starts no kcoord.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import shtab

from kcoord.cli import COMMANDS

_FOLDERS: Final = ("DIR", "FOLDER")
_FILES: Final = ("FILE", "CSV", "FILE.log")


def main(arguments: Sequence[str]) -> int:
    options = make_parser().parse_args(arguments)
    print(shtab.complete(whole_parser(), shell=options.shell))
    return 0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kcoord completion",
        description="Print a script by which a shell completes kcoord's commands and options.",
        epilog="bash: source <(kcoord completion bash)   zsh: kcoord completion zsh > a file _kcoord in your fpath   "
        "fish: kcoord completion fish > ~/.config/fish/completions/kcoord.fish",
    )
    parser.add_argument("shell", choices=shtab.SUPPORTED_SHELLS)
    return parser


def whole_parser() -> argparse.ArgumentParser:
    """All commands in one parser, which the command line itself does without: it would have to import them all."""
    whole = argparse.ArgumentParser(prog="kcoord", description="A Kafka group coordinator and broker.")
    whole.add_argument("--version", action="store_true", help="print the version")
    commands = whole.add_subparsers(metavar="COMMAND")
    parsers = commands.choices
    for name, text in COMMANDS.items():
        commands.add_parser(name, help=text)
        parsers[name] = parser_of(name)
        # What fish and zsh show beside the command: one line.
        parsers[name].description = text
    return whole


def parser_of(command: str) -> argparse.ArgumentParser:
    """The parser of a command, its files and folders marked as such. A command without a parser completes nothing."""
    module = importlib.import_module(f"kcoord.cli.{command.replace('-', '_')}")
    make = getattr(module, "make_parser", None)
    parser = make() if make is not None else argparse.ArgumentParser(prog=f"kcoord {command}")
    assert isinstance(parser, argparse.ArgumentParser)
    _mark_paths(parser)
    return parser


def _mark_paths(parser: argparse.ArgumentParser) -> None:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for part in action.choices.values():
                _mark_paths(part)
        elif action.metavar in _FOLDERS:
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
        elif action.type is Path or action.metavar in _FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
