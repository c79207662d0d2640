# SPDX-License-Identifier: Apache-2.0
"""`kcoord lake`: the history of consumer groups as tables, made by Spark.

`ingest` copies the log, and `ends` samples the end offsets of a broker. The other jobs answer questions: each one first
updates the tables that it needs. Every job can be run again at any time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from kcoord.cli.lake_output import print_frame, print_made
from kcoord.cli.session import EXIT_FAILED, EXIT_INTERRUPTED, add_connection_options, client_config
from kcoord.cli.stopping import stop_on_signals
from kcoord.cli.table import current_time_ms, parse_time

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

    from kcoord.client.config import AdminConfig
    from kcoord.pipeline.lake.ends import End
    from kcoord.pipeline.lake.ingest import Ingested
    from kcoord.pipeline.lake.jobs import Jobs
    from kcoord.pipeline.lake.storage import Lake

_HELP = {
    "current": "committed offsets now",
    "status": "lag, and Burrow's status of each partition",
    "rebalances": "rebalance storms, convergence, member churn, busiest groups",
    "expiry": "when committed offsets expire (KIP-211)",
    "orphans": "offsets that no consumer needs (KIP-496)",
    "audit-1327": "records that `latest` lost, or will lose, on new partitions (KIP-1327)",
}
_DEFAULT_LIMIT = 50
_STOP_STEP_S = 1
"""The interval at which a followed stream checks for a signal."""
_STOP_PATIENCE_S = 60.0
"""How long a running micro-batch may continue after a signal."""


def main(arguments: Sequence[str]) -> int:
    options = make_parser().parse_args(arguments)
    try:
        from pyspark.errors import PySparkException

        from kcoord.pipeline.lake.errors import LakeError

    except ImportError as error:
        print(f"kcoord lake: {error.name} is missing: pip install '.[spark]' in a checkout of kcoord", file=sys.stderr)
        return EXIT_FAILED
    from kcoord.cli.session import CommandError
    from kcoord.client.errors import ClientException
    from kcoord_protocol.errors import KafkaError

    try:
        code = options.run(options)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except (LakeError, CommandError, ClientException, KafkaError, OSError, ValueError, PySparkException) as error:
        print(f"kcoord lake: {str(error).partition('JVM stacktrace')[0].strip()}", file=sys.stderr)
        return EXIT_FAILED
    assert isinstance(code, int)
    return code


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kcoord lake", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="JOB")
    ingest = _add(commands, "ingest", "copy the log into the lake, and decode it", _ingest)
    ingest.add_argument("--log", required=True, metavar="URI", help="folder that holds __consumer_offsets-N")
    ingest.add_argument(
        "--follow",
        type=float,
        metavar="SECONDS",
        help="continue until SIGINT or SIGTERM, and read new records at this interval",
    )
    ingest.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="option of the data source")
    ends = _add(commands, "ends", "sample the end offsets of partitions from a broker", _ends)
    add_connection_options(ends)
    ends.add_argument(
        "--every",
        type=float,
        metavar="SECONDS",
        help="continue until SIGINT or SIGTERM, with a sample at this interval",
    )
    ends.add_argument("--samples", type=int, metavar="N", help="with --every: end after N samples")
    for name, text in _HELP.items():
        command = _add(commands, name, text, _answer)
        command.set_defaults(job=name)
        _add_output(command)
    asof = _add(commands, "asof", "every group as it was at a given time", _asof)
    asof.add_argument("time", metavar="TIME", help="ISO 8601 (UTC), milliseconds since 1970, or an age such as 2h")
    asof.add_argument("--group", action="append", default=[], help="only this group; may be repeated")
    _add_output(asof)
    report = _add(commands, "report", "write a report as one HTML page", _report)
    report.add_argument("--output", default="kcoord-report.html", metavar="FILE")
    report.add_argument("--title", default="Consumer groups")
    return parser


def _add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, text: str, run: object
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=text, description=text)
    parser.set_defaults(run=run)
    parser.add_argument("--lake", required=True, metavar="URI", help="folder of the lake")
    parser.add_argument(
        "--format", choices=("parquet", "delta", "iceberg"), default="parquet", help="format of the tables"
    )
    parser.add_argument("--master", help="Spark's master (default: spark-submit's, else local[*])")
    parser.add_argument("--conf", action="append", default=[], metavar="KEY=VALUE", help="a Spark setting")
    parser.add_argument("--retention-minutes", type=int, metavar="N", help="the brokers' offsets.retention.minutes")
    parser.add_argument(
        "--expiry-policy", choices=("kip211", "kafka"), help="the expiry policy for KIP-848 groups without members"
    )
    parser.add_argument("--storm-epochs", type=int, metavar="N", help="number of epochs that make a storm (default 5)")
    parser.add_argument("--storm-window-ms", type=int, metavar="MS", help="time span of a storm (default 10000)")
    parser.add_argument(
        "--now", metavar="TIME", help="the time that ages refer to (default: the newest time in the lake)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    return parser


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--limit", type=int, default=_DEFAULT_LIMIT, metavar="N", help="number of rows to print (default 50)"
    )


# --- jobs -------------------------------------------------------------------------------------------------------------


def _ingest(options: argparse.Namespace) -> int:
    from kcoord.pipeline.lake.ingest import ingest
    from kcoord.pipeline.lake.jobs import SILVER

    lake, jobs = _open(options)
    began = time.monotonic()

    def on_batch(done: Ingested) -> None:
        speed = done.total / max(time.monotonic() - began, 1e-3)
        if options.json:
            print(json.dumps({"batch": done.batch, "records": done.rows, "total": done.total}), flush=True)
        else:
            print(f"batch {done.batch}: {done.rows:,} records, {done.total:,} in all, {speed:,.0f}/s", file=sys.stderr)
        if options.follow is not None:
            jobs.again().ensure_all(SILVER)

    interval_ms = None if options.follow is None else round(options.follow * 1000)
    query = ingest(lake, options.log, follow_interval_ms=interval_ms, options=_pairs(options.option), on_batch=on_batch)
    if options.follow is None:
        query.awaitTermination()
    else:
        _follow(query)
    if lake.note("records") is not None:
        jobs.again().ensure_all(SILVER)
    return 0


def _follow(query: StreamingQuery) -> None:
    """Waits for a signal, then for the end of the running micro-batch.

    A micro-batch that takes too long is cancelled. The next run does it again.
    """
    with stop_on_signals() as stop:
        while not stop.is_set() and not query.awaitTermination(_STOP_STEP_S):
            pass
    patience = time.monotonic() + _STOP_PATIENCE_S
    while query.isActive and query.status["isTriggerActive"] and time.monotonic() < patience:
        time.sleep(_STOP_STEP_S / 50)
    query.stop()


def _ends(options: argparse.Namespace) -> int:
    from kcoord.client.config import AdminConfig
    from kcoord.pipeline.lake.ends import add_sample

    config = client_config(AdminConfig, options)
    asyncio.run(_sample(config))  # an unreachable broker is reported before Spark starts
    lake, _ = _open(options)
    samples = options.samples if options.every is not None else 1
    taken = 0
    with stop_on_signals() as stop:
        while True:
            ends = asyncio.run(_sample(config))
            add_sample(lake, ends, datetime.now(UTC))
            taken += 1
            if options.json:
                print(json.dumps({"sample": taken, "partitions": len(ends)}), flush=True)
            else:
                print(f"sample {taken}: {len(ends)} partitions", file=sys.stderr)
            if taken == samples or stop.wait(options.every):
                return 0


async def _sample(config: AdminConfig) -> list[End]:
    from kcoord.client.admin.client import AdminClient
    from kcoord.pipeline.lake.ends import ask

    async with AdminClient(config) as admin:
        return await ask(admin)


def _answer(options: argparse.Namespace) -> int:
    from kcoord.pipeline.lake.jobs import JOBS

    lake, jobs = _open(options)
    jobs.run(options.job)
    frames = {name: lake.read(name) for name in JOBS[options.job]}
    return _print(options, frames)


def _asof(options: argparse.Namespace) -> int:
    from kcoord.pipeline.lake.asof import snapshot

    lake, jobs = _open(options)
    groups_then = snapshot(lake, jobs, _moment(options.time), tuple(options.group))
    frames = {
        "groups": groups_then.groups,
        "members": groups_then.members,
        "assignments": groups_then.assignments,
        "offsets": groups_then.offsets,
    }
    return _print(options, frames)


def _report(options: argparse.Namespace) -> int:
    from kcoord.pipeline.lake.report.page import write_report

    lake, jobs = _open(options)
    size = write_report(lake, jobs, options.output, options.title)
    if options.json:
        print(json.dumps({"output": options.output, "size_bytes": size}))
    else:
        print(f"{options.output}: {size / 1e6:.1f} MB", file=sys.stderr)
    return 0


# --- shared by the jobs -----------------------------------------------------------------------------------------------


def _open(options: argparse.Namespace) -> tuple[Lake, Jobs]:
    from dataclasses import replace

    from kcoord.pipeline.lake.formats import Format
    from kcoord.pipeline.lake.jobs import Jobs
    from kcoord.pipeline.lake.session import get_session
    from kcoord.pipeline.lake.settings import MS_PER_MINUTE, LakeSettings
    from kcoord.pipeline.lake.storage import Lake

    spark = get_session(options.master, _pairs(options.conf), progress=sys.stderr.isatty())
    spark.sparkContext.setLogLevel("ERROR")
    lake = Lake(spark, options.lake, Format(options.format))
    retention_ms = None if options.retention_minutes is None else options.retention_minutes * MS_PER_MINUTE
    settings = LakeSettings.from_text(
        lake.stored_settings(),
        retention_ms=retention_ms,
        expiry_policy=options.expiry_policy,
        storm_epochs=options.storm_epochs,
        storm_window_ms=options.storm_window_ms,
    )
    lake.store_settings(settings.to_text())
    if options.now is not None:
        settings = replace(settings, now=_moment(options.now))
    return lake, Jobs(lake, settings, print_made)


def _moment(text: str) -> datetime:
    return datetime.fromtimestamp(parse_time(text, current_time_ms()) / 1000, UTC)


def _pairs(texts: Sequence[str]) -> dict[str, str]:
    pairs = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"{text!r} is not KEY=VALUE")
        pairs[key] = value
    return pairs


def _print(options: argparse.Namespace, frames: Mapping[str, DataFrame]) -> int:
    tables = {name: print_frame(name, frame, options.limit, as_json=options.json) for name, frame in frames.items()}
    if options.json:
        print(json.dumps(tables, indent=2, ensure_ascii=False))
    return 0
