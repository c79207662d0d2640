# SPDX-License-Identifier: Apache-2.0
"""The `kcoord` command, with one module per subcommand.

A module is imported only when its command runs, since the start of `serve` is measured in milliseconds. The command
line uses argparse for the same reason: click costs 60 ms more at each start. shtab (completion) and rich (tables) are
imported only when they are needed.

`session` has what the commands share: connection options, the order of settings, errors, and exit codes.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from kcoord import __version__

EXIT_INTERRUPTED = 130
OUTDATED_MODULE = "the compiled checks of records are of another source; python protocol/hatch_build.py compiles them"

COMMANDS = {
    "serve": "run a broker",
    "health": "check that a broker answers and its group coordinator is active",
    "wait": "return when a broker, a group or a topic is ready, for scripts",
    "consumer-groups": "list, describe, delete and reset consumer groups",
    "topics": "create, alter, delete, list and describe topics",
    "configs": "show and change the settings of topics, brokers, groups, users and client metrics",
    "users": "list, add, alter and delete the SCRAM credentials of users",
    "delegation-tokens": "create, renew, expire and describe delegation tokens",
    "acls": "add, remove and list ACLs",
    "features": "show and change the levels of the cluster's features",
    "consume": "print records of topics",
    "produce": "write lines of standard input as records",
    "storage": "format a data folder before its first start",
    "migrate": "check whether a classic group can be converted to the consumer protocol",
    "log": "dump, verify, repair, import, export and back up log folders",
    "groups": "explain, watch and simulate groups, list when offsets expire, restore offsets",
    "upstream": "move groups between an existing cluster and kcoord in front of it",
    "workers": "take a broker of several worker processes out of service, and back",
    "lake": "keep the history of consumer groups as tables (Spark)",
    "simulate": "run the deterministic simulation",
    "model-check": "explore all states of small groups",
    "completion": "print a completion script for your shell",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit code."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    _open_closed_streams()
    try:
        try:
            return _run(argv)
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except OSError as error:
        # Standard output cannot be written, so the final flush of the interpreter would fail too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            # The reader of the pipe has closed it, such as `head`.
            return 0
        print(f"kcoord: {error}", file=sys.stderr)
        return 1


def _open_closed_streams() -> None:
    """Gives the null device to standard streams that are closed, as after `>&-`. Python has None for them.

    The system gives a file the lowest free descriptor. So a log would otherwise get that of a closed stream, with all
    that libraries write there.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode)  # noqa: SIM115
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)


def _run(argv: Sequence[str]) -> int:
    if argv and argv[0] in COMMANDS:
        code = _command(argv[0]).main(argv[1:])
        assert isinstance(code, int)
        return code
    _parser().parse_args(argv)
    return 2


def _command(name: str) -> ModuleType:
    """Imports the module of a command, without the garbage collector: all that imports make is kept."""
    is_collecting = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module(f"kcoord.cli.{name.replace('-', '_')}")
    finally:
        if is_collecting:
            gc.enable()


def _parser() -> argparse.ArgumentParser:
    # Commands do not need it, and `serve` starts faster without.
    from kcoord_protocol.compiled import IS_COMPILED, IS_OUTDATED

    form = "with compiled checks of records" if IS_COMPILED else "pure Python"
    if IS_OUTDATED:
        form += f" ({OUTDATED_MODULE})"
    listing = "\n".join(f"  {name:<19}{text}" for name, text in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="kcoord",
        description="A Kafka group coordinator and broker.",
        epilog=f"commands:\n{listing}\n\n`kcoord COMMAND --help` lists the options of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"kcoord {__version__}, {form}")
    parser.add_argument("command", metavar="COMMAND", choices=sorted(COMMANDS))
    return parser
