# SPDX-License-Identifier: Apache-2.0
"""`kcoord produce TOPIC`: writes each line of standard input as a record, from text or JSON.

A line is sent as soon as it is read, so input may come from a program that is still running. The first malformed line
ends the input; records of earlier lines are still sent. The exit code is 0 only if every record is stored.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from typing import BinaryIO, NamedTuple

from kcoord.cli.options import MOST_INT, MOST_LONG, add_topics, parse_options, whole_number
from kcoord.cli.session import (
    EXIT_FAILED,
    add_connection_options,
    client_config,
    error_text,
    report_failure,
    run_safely,
)
from kcoord.client.config import ProducerConfig
from kcoord.client.errors import RecordTooLargeException
from kcoord.client.producer.client import Producer
from kcoord.client.types import RecordMetadata
from kcoord_protocol.errors import KafkaError

# Reading pauses at this number of records without an acknowledgement.
_MAX_UNSENT = 10_000
_CHUNK_BYTES = 1 << 16
# `kcoord consume --json` prints these fields. Ignoring them allows to write its output again.
_IGNORED_FIELDS = {"topic", "offset"}


class NotARecord(Exception):
    """A line is malformed. The text has the reason."""


class InputRecord(NamedTuple):
    """The record of a line."""

    value: bytes | None
    key: bytes | None = None
    headers: tuple[tuple[str, bytes | None], ...] = ()
    partition: int | None = None
    timestamp_ms: int | None = None


def main(arguments: Sequence[str]) -> int:
    parser = make_parser()
    options = parse_options(parser, arguments, find_problem)
    return run_safely(parser.prog, lambda: _produce(options))


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kcoord produce", description=__doc__, allow_abbrev=False)
    add_connection_options(parser)
    add_topics(parser)
    parser.add_argument(
        "--partition", type=whole_number(0), metavar="N", help="the partition of records that have none"
    )
    parser.add_argument("--key-separator", metavar="TEXT", help="the text between key and value in each line")
    parser.add_argument("--null-marker", metavar="TEXT", help="a key or value equal to TEXT becomes null")
    parser.add_argument("--acks", choices=("0", "1", "all"), help="(default: acks of --command-config, else all)")
    parser.add_argument(
        "--compression",
        choices=("none", "gzip", "snappy", "lz4", "zstd"),
        help="(default: compression.type of --command-config, else none)",
    )
    parser.add_argument(
        "--json", action="store_true", help="each line is an object: value, key, headers, partition, timestamp_ms"
    )
    return parser


def find_problem(options: argparse.Namespace) -> str | None:
    """Returns why the options cannot be combined, or None if they can."""
    if len(options.topics) != 1:
        return "one TOPIC is needed"
    if options.json and (options.key_separator is not None or options.null_marker is not None):
        return "--key-separator and --null-marker cannot be used with --json"
    if options.key_separator == "":
        return "--key-separator must not be empty"
    return None


def parse_line(line: bytes, options: argparse.Namespace) -> InputRecord:
    """Parses a line. Raises NotARecord if it is malformed."""
    if options.json:
        return _from_json(line)
    marker = None if options.null_marker is None else options.null_marker.encode()
    if options.key_separator is None:
        return InputRecord(_or_null(line, marker))
    key, separator, value = line.partition(options.key_separator.encode())
    if not separator:
        raise NotARecord(f"no {options.key_separator!r} between key and value")
    return InputRecord(_or_null(value, marker), _or_null(key, marker))


def _or_null(text: bytes, marker: bytes | None) -> bytes | None:
    return None if text == marker else text


def _from_json(line: bytes) -> InputRecord:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise NotARecord(f"not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise NotARecord("not a JSON object")
    unknown = sorted(fields.keys() - set(InputRecord._fields) - _IGNORED_FIELDS)
    if unknown:
        raise NotARecord(f"{unknown[0]}: unknown field")
    headers = fields.get("headers") or {}
    if not isinstance(headers, dict):
        raise NotARecord("headers: not an object")
    for name in headers:
        _bytes("headers", name)
    return InputRecord(
        _bytes("value", fields.get("value")),
        _bytes("key", fields.get("key")),
        tuple((name, _bytes(name, value)) for name, value in headers.items()),
        _integer("partition", fields.get("partition"), MOST_INT),
        _integer("timestamp_ms", fields.get("timestamp_ms"), MOST_LONG),
    )


def _bytes(name: str, value: object) -> bytes | None:
    """Returns a string as UTF-8, and any other JSON value as JSON."""
    if value is None:
        return None
    try:
        return value.encode() if isinstance(value, str) else json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise NotARecord(f"{name}: a surrogate without its other half") from None


def _integer(name: str, value: object, most: int) -> int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most):
        return value
    raise NotARecord(f"{name}: not an integer from 0 to {most}")


def config_of(options: argparse.Namespace) -> ProducerConfig:
    """Returns the settings of the producer. It waits for the metadata of a topic for --timeout at most."""
    settings = {
        "acks": options.acks,
        "compression.type": options.compression,
        "max.block.ms": None if options.timeout is None else str(options.timeout),
    }
    given = {key: value for key, value in settings.items() if value is not None}
    config = client_config(ProducerConfig, options, **given)
    config.max_block_ms = min(config.max_block_ms, config.default_api_timeout_ms)
    return config


async def _produce(options: argparse.Namespace) -> int:
    config = config_of(options)
    failures: list[str] = []
    unsent = asyncio.Semaphore(_MAX_UNSENT)

    def finished(future: asyncio.Future[RecordMetadata]) -> None:
        unsent.release()
        error = None if future.cancelled() else future.exception()
        if error is not None:
            failures.append(_text_of(error))

    number = 0
    async with Producer(config) as producer:
        async for line in _lines(sys.stdin.buffer):
            number += 1
            try:
                record = parse_line(line, options)
            except NotARecord as problem:
                failures.append(f"line {number}: {problem}")
                break
            await unsent.acquire()
            try:
                future = await _send(producer, options, record)
            except (KafkaError, RecordTooLargeException) as error:
                failures.append(f"line {number}: {_text_of(error)}")
                break
            future.add_done_callback(finished)
        await producer.flush()
    for failure in dict.fromkeys(failures):
        report_failure(failure)
    return EXIT_FAILED if failures else 0


def _text_of(error: BaseException) -> str:
    return error_text(error) if isinstance(error, KafkaError) else str(error)


async def _send(producer: Producer, options: argparse.Namespace, record: InputRecord) -> asyncio.Future[RecordMetadata]:
    return await producer.send(
        options.topics[0],
        record.value,
        record.key,
        partition=options.partition if record.partition is None else record.partition,
        timestamp_ms=record.timestamp_ms,
        headers=record.headers,
    )


async def _lines(source: BinaryIO) -> AsyncIterator[bytes]:
    """Yields lines as they arrive. A thread reads them in chunks, at most a few ahead of the event loop.

    The thread is a daemon, since a pending read must not keep the process alive. It reads without a buffer: the lock of
    a buffer that a read holds would crash the interpreter at its end.
    """
    unbuffered = getattr(source, "raw", source)
    loop = asyncio.get_running_loop()
    chunks: asyncio.Queue[bytes] = asyncio.Queue(maxsize=4)

    def read() -> None:
        while True:
            chunk = unbuffered.read(_CHUNK_BYTES)
            asyncio.run_coroutine_threadsafe(chunks.put(chunk), loop).result()
            if not chunk:
                return

    threading.Thread(target=read, daemon=True).start()
    rest = b""
    while chunk := await chunks.get():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line.removesuffix(b"\r")
    if rest:
        yield rest
