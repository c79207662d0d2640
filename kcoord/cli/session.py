# SPDX-License-Identifier: Apache-2.0
"""Shared by all commands that connect to brokers: connection options, settings, errors and exit codes.

* Exit codes: 0 if everything succeeded; 1 if anything failed, even in part; 2 if the command line is wrong; 130 after
  Ctrl-C, 143 after SIGTERM, 129 after SIGHUP, which a closed terminal sends. These signals end the command in order:
  consumers commit and leave their group.
* Settings of the client: defaults < file of --command-config < options.
* Results go to stdout. Warnings and errors go to stderr, and an expected error is one line.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from kcoord import __version__
from kcoord.cli.options import whole_number
from kcoord.client.admin.client import AdminClient
from kcoord.client.config import AdminConfig, CommonConfig, parse_addresses
from kcoord.client.errors import ClientException, ConfigException, DisconnectException, TimeoutException
from kcoord.config import ConfigError
from kcoord.config.properties import parse_properties, read_text
from kcoord_protocol.errors import KafkaError

EXIT_FAILED = 1
_SIGNAL_EXIT = 128

_DEFAULT_ADDRESS = "127.0.0.1:9092"
_DEFAULT_TIMEOUT_MS = 30_000

Config = TypeVar("Config", bound=CommonConfig)
AdminWork = Callable[[AdminClient, argparse.Namespace], Awaitable[int]]


class CommandError(Exception):
    """The command fails with exit code 1 and prints the text."""


def add_connection_options(
    parser: argparse.ArgumentParser,
    timeout_help: str = "timeout of each request",
    timeout_ms: int = _DEFAULT_TIMEOUT_MS,
) -> None:
    parser.add_argument("--version", action="version", version=f"kcoord {__version__}")
    parser.add_argument(
        "--bootstrap-server",
        type=_addresses,
        metavar="HOST:PORT",
        help=f"brokers to connect to, separated by commas (default: as in --command-config, else {_DEFAULT_ADDRESS})",
    )
    parser.add_argument("--command-config", type=Path, metavar="FILE", help="a properties file with client settings")
    parser.add_argument(
        "--timeout",
        type=whole_number(1),
        metavar="MS",
        help=f"{timeout_help} (default {timeout_ms} ms)",
    )


def _addresses(text: str) -> str:
    """The type of an option whose value is a list of addresses, which the client parses again."""
    try:
        parse_addresses(text)
    except ConfigException:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT[,HOST:PORT...]") from None
    return text


def add_json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def client_config(kind: type[Config], options: argparse.Namespace, **settings: str) -> Config:
    """Returns the client settings of `client_properties`. Sets `options.timeout` to the effective timeout in ms."""
    config = kind.from_properties(client_properties(options) | settings, warn)
    options.timeout = config.default_api_timeout_ms
    return config


def client_properties(
    options: argparse.Namespace, client_id: str = "kcoord-cli", timeout_ms: int = _DEFAULT_TIMEOUT_MS
) -> dict[str, str]:
    """Returns the properties of a client: the given defaults, overridden by the file, then by the options."""
    properties = {
        "client.id": client_id,
        "bootstrap.servers": _DEFAULT_ADDRESS,
        "default.api.timeout.ms": str(timeout_ms),
    }
    if options.command_config is not None:
        properties |= parse_properties(read_text(options.command_config))
    if options.bootstrap_server is not None:
        properties["bootstrap.servers"] = options.bootstrap_server
    if options.timeout is not None:
        properties["default.api.timeout.ms"] = str(options.timeout)
    return properties


def run_with_admin(program: str, options: argparse.Namespace, work: AdminWork) -> int:
    """Runs `work` with a connected admin client."""

    async def run() -> int:
        async with AdminClient(client_config(AdminConfig, options)) as admin:
            return await work(admin, options)

    return run_safely(program, run)


def run_safely(program: str, work: Callable[[], Awaitable[int]]) -> int:
    """Runs a command and returns its exit code. Prints an expected failure as one line to stderr."""
    ended_by = signal.SIGTERM

    async def run() -> int:
        task = asyncio.current_task()
        assert task is not None

        def end(number: signal.Signals) -> None:
            nonlocal ended_by
            if number == signal.SIGHUP and task.cancelling():
                return  # A terminal that is closed sends it twice: the kernel does, and the shell.
            ended_by = number
            task.cancel()

        for number in (signal.SIGTERM, signal.SIGHUP):
            # asyncio.run does the same on SIGINT. Under nohup, SIGHUP stays ignored.
            if threading.current_thread() is threading.main_thread() and signal.getsignal(number) != signal.SIG_IGN:
                asyncio.get_running_loop().add_signal_handler(number, end, number)
        return await work()

    try:
        return asyncio.run(run())
    except asyncio.CancelledError:
        return _SIGNAL_EXIT + ended_by
    except BrokenPipeError:
        raise
    except KafkaError as error:
        print(f"{program}: {error_text(error)}", file=sys.stderr)
    except (CommandError, ClientException, ConfigError, OSError, UnicodeDecodeError) as error:
        print(f"{program}: {error}", file=sys.stderr)
    return EXIT_FAILED


def error_text(error: KafkaError) -> str:
    """Returns the error's name and text. Timeouts and disconnects of the client have no Kafka error name."""
    if isinstance(error, DisconnectException | TimeoutException):
        return error.message or error.error.description
    return str(error)


def error_json(error: KafkaError | None) -> dict[str, object]:
    """Returns the fields of an error in a row of JSON."""
    if error is None:
        return {"error": None, "message": None}
    return {"error": error.error.name, "message": error.message or error.error.description}


def report_failure(text: str) -> None:
    """Prints the failure of one part of a command. The caller then returns EXIT_FAILED."""
    print(f"error: {text}", file=sys.stderr)


def warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)


def split_list(text: str) -> list[str]:
    """Returns the items of a comma-separated list."""
    return [item for item in (part.strip() for part in text.split(",")) if item]
