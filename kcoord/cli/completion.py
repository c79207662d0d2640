# SPDX-License-Identifier: Apache-2.0
"""`kcoord completion bash|zsh|fish|tcsh|powershell`: prints a script that completes commands and options in the shell.

shtab generates it from the parsers of the commands, so it has all their options. Pressing Tab does not start kcoord.
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
        description="Print a script that completes the commands and options of kcoord in a shell.",
        epilog="bash: source <(kcoord completion bash)   zsh: kcoord completion zsh > a file _kcoord in your fpath   "
        "fish: kcoord completion fish > ~/.config/fish/completions/kcoord.fish",
    )
    parser.add_argument("shell", choices=shtab.SUPPORTED_SHELLS)
    return parser


def whole_parser() -> argparse.ArgumentParser:
    """Returns one parser with all commands. The command line does not use it, since it imports every command."""
    whole = argparse.ArgumentParser(prog="kcoord", description="A Kafka group coordinator and broker.")
    whole.add_argument("--version", action="store_true", help="print the version")
    commands = whole.add_subparsers(metavar="COMMAND")
    parsers = commands.choices
    for name, text in COMMANDS.items():
        commands.add_parser(name, help=text)
        parsers[name] = parser_of(name)
        # fish and zsh show this line beside the command.
        parsers[name].description = text
    return whole


def parser_of(command: str) -> argparse.ArgumentParser:
    """Returns the parser of a command, with its files and folders marked. Without a parser nothing is completed."""
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
