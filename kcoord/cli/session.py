# SPDX-License-Identifier: Apache-2.0
"""What all commands that ask brokers share: how they name them, how they fail, and their exit codes.

0: done; 1: it failed, wholly or in part; 2: the command line is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from kcoord import __version__
from kcoord.client.admin.client import AdminClient
from kcoord.client.config import AdminConfig, CommonConfig
from kcoord.client.errors import ClientException, DisconnectException, TimeoutException
from kcoord.config import ConfigError
from kcoord.config.properties import parse_properties
from kcoord_protocol.errors import KafkaError

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130

_DEFAULT_ADDRESS = "127.0.0.1:9092"
_DEFAULT_TIMEOUT_MS = 30_000

Config = TypeVar("Config", bound=CommonConfig)
AdminWork = Callable[[AdminClient, argparse.Namespace], Awaitable[int]]


class CommandError(Exception):
    """What the user is told before the command ends with exit code 1."""


def add_connection_options(
    parser: argparse.ArgumentParser, timeout_help: str = "how long each question may take"
) -> None:
    parser.add_argument("--version", action="version", version=f"kcoord {__version__}")
    parser.add_argument(
        "--bootstrap-server",
        metavar="HOST:PORT",
        help=f"brokers to ask, separated by commas (default: those of --command-config, else {_DEFAULT_ADDRESS})",
    )
    parser.add_argument("--command-config", type=Path, metavar="FILE", help="a properties file with client settings")
    parser.add_argument(
        "--timeout",
        type=int,
        metavar="MS",
        help=f"{timeout_help} (default {_DEFAULT_TIMEOUT_MS} ms)",
    )


def add_json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def client_config(kind: type[Config], options: argparse.Namespace, **settings: str) -> Config:
    """Client settings: defaults of the commands, then the file, then the options. Afterwards `options.timeout` is the
    timeout in use.
    """
    properties = {
        "client.id": "kcoord-cli",
        "bootstrap.servers": _DEFAULT_ADDRESS,
        "default.api.timeout.ms": str(_DEFAULT_TIMEOUT_MS),
    }
    if options.command_config is not None:
        properties |= parse_properties(options.command_config.read_text(encoding="utf-8"))
    if options.bootstrap_server is not None:
        properties["bootstrap.servers"] = options.bootstrap_server
    if options.timeout is not None:
        properties["default.api.timeout.ms"] = str(options.timeout)
    config = kind.from_properties(properties | settings, warn)
    options.timeout = config.default_api_timeout_ms
    return config


def run_with_admin(program: str, options: argparse.Namespace, work: AdminWork) -> int:
    """Runs `work` with a connected admin client."""

    async def run() -> int:
        async with AdminClient(client_config(AdminConfig, options)) as admin:
            return await work(admin, options)

    return run_safely(program, run)


def run_safely(program: str, work: Callable[[], Awaitable[int]]) -> int:
    """Runs a command; a failure that can be expected is one line on stderr."""

    async def run() -> int:
        return await work()

    try:
        return asyncio.run(run())
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of the output has seen enough. Without this the interpreter would complain when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KafkaError as error:
        print(f"{program}: {error_text(error)}", file=sys.stderr)
    except (CommandError, ClientException, ConfigError, OSError, UnicodeDecodeError) as error:
        print(f"{program}: {error}", file=sys.stderr)
    return EXIT_FAILED


def error_text(error: KafkaError) -> str:
    """The error's name and words; what the client found out by itself has no name that would tell more."""
    if isinstance(error, DisconnectException | TimeoutException):
        return error.message or error.error.description
    return str(error)


def error_json(error: KafkaError | None) -> dict[str, object]:
    """What a row of JSON says of an error."""
    if error is None:
        return {"error": None, "message": None}
    return {"error": error.error.name, "message": error.message or error.error.description}


def report_failure(text: str) -> None:
    """A part that failed, where others may not have; the exit code shall be EXIT_FAILED."""
    print(f"error: {text}", file=sys.stderr)


def warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)


def split_list(text: str) -> list[str]:
    """The items of a comma-separated list."""
    return [item for item in (part.strip() for part in text.split(",")) if item]
