# SPDX-License-Identifier: Apache-2.0
"""`kcoord serve [server.properties] [--override key=value ...]`: runs a broker until SIGTERM or Ctrl-C.

Settings: defaults < file < KCOORD_* environment variables < overrides. Settings are checked before any file or socket
is opened.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from kcoord.cli import OUTDATED_MODULE
from kcoord.config import BROKER_KEYS, BrokerConfig, ConfigError, merge_properties
from kcoord.config.properties import read_text
from kcoord.config.security import foreign_principal_builders, ineffective_settings

if TYPE_CHECKING:
    from kcoord.server.process import ReadyLine

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_CONTROL_HOST = "127.0.0.1"
_LARGEST_PORT = 65535
_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def main(arguments: Sequence[str]) -> int:
    parser = make_parser()
    options = parser.parse_args(arguments)
    for_tests = (options.control_port, options.control_host, options.end_with_stdin or None)
    if not options.test_mode and any(option is not None for option in for_tests):
        parser.error("--control-port, --control-host and --end-with-stdin need --test-mode")
    _set_up_logging(options.log_level)
    try:
        settings = broker_settings(options.properties, options.override)
        if options.test_mode:
            return _serve_tests(settings, options)
        config = _config(settings)
    except (ConfigError, OSError) as error:
        return _failed(str(error))
    # These imports are most of the start time, so wrong settings are reported before them.
    from kcoord.server import open_files
    from kcoord.server.errors import StartError
    from kcoord_protocol.compiled import IS_OUTDATED

    if config.kcoord_upstream_bootstrap_servers:
        from kcoord.upstream.process import run
    else:
        from kcoord.server.start import run

    if IS_OUTDATED:
        logging.getLogger(__name__).warning("Records are checked in pure Python: %s", OUTDATED_MODULE)
    open_files.raise_limit()
    try:
        run(config, _print_ready_json if options.json else _print_ready)
    except StartError as error:
        return _failed(str(error))
    return 0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kcoord serve", description="Run a broker until SIGTERM or Ctrl-C.")
    parser.add_argument("properties", nargs="?", type=Path, metavar="server.properties", help="a Kafka properties file")
    parser.add_argument(
        "--override",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a setting that overrides the file; may be repeated",
    )
    parser.add_argument(
        "--log-level",
        default=os.environ.get("KCOORD_LOG_LEVEL") or "INFO",
        type=_log_level,
        choices=LOG_LEVELS,
        help="the lowest level that is logged to stderr (default INFO, or KCOORD_LOG_LEVEL)",
    )
    parser.add_argument("--json", action="store_true", help="print the ready line as JSON")
    tests = parser.add_argument_group("options for tests")
    tests.add_argument(
        "--test-mode",
        action="store_true",
        help="keep all data in memory, and open an HTTP control for tests that moves the clock and injects faults",
    )
    tests.add_argument("--control-port", type=_port, metavar="PORT", help="port of the control (default: a free port)")
    tests.add_argument(
        "--end-with-stdin",
        action="store_true",
        help="also end with standard input, a pipe of the process that started the broker",
    )
    tests.add_argument("--control-host", metavar="HOST", help=f"host of the control (default {_CONTROL_HOST})")
    return parser


def _log_level(text: str) -> str:
    # argparse compares a default with no choices.
    if text.upper() not in LOG_LEVELS:
        levels = ", ".join(LOG_LEVELS)
        raise argparse.ArgumentTypeError(f"{text!r}, here or in KCOORD_LOG_LEVEL, is not one of {levels}")
    return text.upper()


def _port(text: str) -> int:
    port = int(text) if text.isdecimal() else -1
    if not 0 <= port <= _LARGEST_PORT:
        raise argparse.ArgumentTypeError(f"a port is a number from 0 to {_LARGEST_PORT}, not {text}")
    return port


class OneLineFormatter(logging.Formatter):
    """Shows control characters as question marks. Names come from clients, and must not look like another line."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        return "".join([character if character.isprintable() else "?" for character in line])


def _set_up_logging(level: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(OneLineFormatter(_LOG_FORMAT))
    logging.basicConfig(level=level, handlers=[handler])
    logging.raiseExceptions = False


def _serve_tests(settings: Mapping[str, str], options: argparse.Namespace) -> int:
    from kcoord.server import open_files
    from kcoord.server.errors import StartError
    from kcoord.testing.serve import run

    if "log.dirs" in settings or "log.dir" in settings:
        logging.getLogger(__name__).warning("Test mode keeps its data in memory, so log.dirs has no effect")
    if "group.coordinator.threads" in settings or "kcoord.worker.ports" in settings:
        logging.getLogger(__name__).warning("Test mode is one process, so the settings of workers have no effect")
    open_files.raise_limit()
    try:
        on_ready = _print_ready_json if options.json else _print_ready
        run(
            settings,
            options.control_host or _CONTROL_HOST,
            options.control_port or 0,
            on_ready,
            ends_with_stdin=options.end_with_stdin,
        )
    except StartError as error:
        return _failed(str(error))
    return 0


def broker_settings(properties: Path | None, overrides: list[str]) -> Mapping[str, str]:
    """Returns the settings of the file, the environment and the overrides."""
    text = read_text(properties) if properties is not None else None
    return merge_properties(text, _environment(), overrides, BROKER_KEYS)


def _config(settings: Mapping[str, str]) -> BrokerConfig:
    config = BrokerConfig.from_properties(settings)
    logger = logging.getLogger(__name__)
    if config.ignored:
        logger.info("Accepted, but without effect: %s", ", ".join(sorted(config.ignored)))
    if config.unknown:
        logger.warning("Unknown configuration keys: %s", ", ".join(sorted(config.unknown)))
    for name, reason in ineffective_settings(config).items():
        logger.warning("%s has no effect: %s", name, reason)
    for name, principal in config.listener_principals.items():
        logger.warning(
            "Every client of listener %s is %s without authentication (kcoord.listener.principals)", name, principal
        )
    for name, class_name in foreign_principal_builders(config).items():
        logger.warning("kcoord does not load %s (%s): use kcoord.listener.principals", class_name, name)
    return config


def _environment() -> Mapping[str, str]:
    """Returns the environment without KCOORD_LOG_LEVEL, which is an option of this command."""
    return {key: value for key, value in os.environ.items() if key != "KCOORD_LOG_LEVEL"}


def _failed(reason: str) -> int:
    print(f"kcoord: {reason}", file=sys.stderr)
    return 1


def _print_ready(ready: ReadyLine, control_url: str | None = None) -> None:
    addresses = ", ".join(ready.addresses)
    last = ready.node_id + ready.nodes - 1
    nodes = f"node {ready.node_id}" if ready.nodes == 1 else f"nodes {ready.node_id} to {last}"
    identity = f"{nodes}, cluster {ready.cluster_id}"
    control = f", control {control_url}" if control_url is not None else ""
    print(f"kcoord is ready: {addresses}, {identity}, {milliseconds_since_exec()} ms{control}", flush=True)


def _print_ready_json(ready: ReadyLine, control_url: str | None = None) -> None:
    start_ms = milliseconds_since_exec()
    print(json.dumps({**asdict(ready), "start_ms": start_ms, "control_url": control_url}), flush=True)


def milliseconds_since_exec() -> int:
    """Returns the age of this process in ms, including the start of the interpreter."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        started = ticks / os.sysconf("SC_CLK_TCK")
        return round((time.clock_gettime(time.CLOCK_BOOTTIME) - started) * 1000)
    except (OSError, ValueError, IndexError, AttributeError):
        return round(time.process_time() * 1000)
