# SPDX-License-Identifier: Apache-2.0
"""`kcoord lake`: the history of consumer groups as tables, made by Spark.

`ingest` copies the log, and `ends` samples the end offsets of a broker. The other jobs answer questions: each one first
updates the tables that it needs. Every job can be run again at any time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import TYPE_CHECKING

from kcoord.cli.lake_output import own_error, print_frame
from kcoord.cli.lake_source import add_broker_options, add_source_options, broker_properties
from kcoord.cli.options import MOST_INT, key_value, moment, seconds, whole_number
from kcoord.cli.session import EXIT_FAILED, CommandError, error_text, warn
from kcoord.cli.stopping import end_at_once_on_interrupt, stop_on_signals

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from kcoord.client.config import AdminConfig
    from kcoord.pipeline.lake.samples import Sample
    from kcoord.pipeline.lake.storage import Lake

_HELP = {
    "current": "committed offsets now",
    "status": "lag, and Burrow's status of each partition",
    "rebalances": "rebalance storms, convergence, member churn, busiest groups",
    "expiry": "when committed offsets expire (KIP-211)",
    "orphans": "offsets that no consumer needs (KIP-496)",
    "losses": "offsets that were deleted, reset or expired, by whom, and denied attempts",
    "audit-1327": "records that `latest` lost, or will lose, on new partitions (KIP-1327)",
}
_DEFAULT_LIMIT = 50


def main(arguments: Sequence[str]) -> int:
    parser = make_parser()
    options = parser.parse_args(arguments)
    _check_source(parser, options)
    try:
        from py4j.protocol import Py4JError
        from pyspark.errors import PySparkException

        from kcoord.pipeline.lake.errors import LakeError, java_reason

    except ImportError as error:
        print(f"kcoord lake: {error.name} is missing: pip install '.[spark]' in a checkout of kcoord", file=sys.stderr)
        return EXIT_FAILED
    from kcoord.client.errors import ClientException
    from kcoord_protocol.errors import KafkaError

    try:
        # A job can be killed at any time.
        with end_at_once_on_interrupt():
            code = options.run(options)
    except BrokenPipeError:
        raise
    except KafkaError as error:
        print(f"kcoord lake: {error_text(error)}", file=sys.stderr)
        return EXIT_FAILED
    except (LakeError, CommandError, ClientException, OSError, ValueError, PySparkException) as error:
        print(f"kcoord lake: {_reason(str(error))}", file=sys.stderr)
        return EXIT_FAILED
    except Py4JError as error:
        # PySpark has no exception of its own for most of Java's, such as that of a task on a full disk.
        own = own_error(str(error))
        print(f"kcoord lake: {java_reason(str(error)) if own is None else own[1]}", file=sys.stderr)
        return EXIT_FAILED
    assert isinstance(code, int)
    return code


def _reason(text: str) -> str:
    """Returns the text of an error. An error of this package in a worker of Spark is in the traceback that it sent."""
    own = own_error(text)
    return text.partition("JVM stacktrace")[0].strip() if own is None else own[1]


def _check_source(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Ends with exit code 2 if the options name two logs, not the source that a job needs, or do not go together."""
    log = getattr(options, "log", None)
    from_brokers = getattr(options, "bootstrap_server", None) or getattr(options, "command_config", None)
    if log is not None and from_brokers:
        parser.error("--log: not allowed with --bootstrap-server and --command-config")
    if options.run is _ingest and log is None and not from_brokers:
        parser.error("ingest needs --log, --bootstrap-server or --command-config")
    if options.run is _ends and not from_brokers:
        parser.error("ends needs --bootstrap-server or --command-config")
    if options.run is _ends and options.samples is not None and options.every is None:
        parser.error("--samples needs --every")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kcoord lake", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="JOB")
    ingest = _add(commands, "ingest", "copy the log into the lake, and decode it", _ingest)
    add_source_options(ingest)
    ingest.add_argument(
        "--follow",
        type=seconds(may_be_0=False),
        metavar="SECONDS",
        help="continue until SIGINT or SIGTERM, and read new records at this interval",
    )
    ends = _add(commands, "ends", "sample the end offsets of partitions from a broker", _ends)
    add_broker_options(ends)
    ends.add_argument(
        "--every",
        type=seconds(may_be_0=False),
        metavar="SECONDS",
        help="continue until SIGINT or SIGTERM, with a sample at this interval",
    )
    ends.add_argument("--samples", type=whole_number(1), metavar="N", help="with --every: end after N samples")
    for name, text in _HELP.items():
        command = _add(commands, name, text, _answer)
        command.set_defaults(job=name)
        add_source_options(command)
        _add_output(command)
    asof = _add(commands, "asof", "every group as it was at a given time", _asof)
    asof.add_argument(
        "time", type=moment, metavar="TIME", help="ISO 8601 (UTC), milliseconds since 1970, or an age such as 2h"
    )
    add_source_options(asof)
    asof.add_argument("--group", action="append", default=[], help="only this group; may be repeated")
    _add_output(asof)
    compact = _add(commands, "compact", "merge small files, and remove old history", _compact)
    compact.add_argument(
        "--older-than",
        type=moment,
        metavar="TIME",
        help="remove history before this time or age, such as 90d, that no answer about a later time needs",
    )
    compact.add_argument(
        "--grace",
        type=seconds(may_be_0=True),
        default=60.0,
        metavar="SECONDS",
        help="how long replaced files stay for jobs that still read them (default 60; Parquet only)",
    )
    compact.add_argument("--dry-run", action="store_true", help="print what would be done, and do nothing")
    compact.set_defaults(log=None, bootstrap_server=None, command_config=None, topic=None, audit=[], option=[])
    report = _add(commands, "report", "write a report as one HTML page", _report)
    add_source_options(report)
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
    parser.add_argument(
        "--cluster",
        metavar="NAME",
        help="a cluster in the lake (default: that of the log, or all); with a new name its log is kept under it",
    )
    parser.add_argument("--master", help="Spark's master (default: spark-submit's, else local[*])")
    parser.add_argument(
        "--conf", action="append", type=key_value, default=[], metavar="KEY=VALUE", help="a Spark setting"
    )
    parser.add_argument(
        "--retention-minutes", type=whole_number(1), metavar="N", help="the brokers' offsets.retention.minutes"
    )
    parser.add_argument(
        "--expiry-policy",
        choices=("kip211", "kafka"),
        help="when offsets of empty groups expire: as in kcoord, or as in Kafka",
    )
    parser.add_argument(
        "--storm-epochs", type=whole_number(2), metavar="N", help="number of epochs that make a storm (default 5)"
    )
    parser.add_argument(
        "--storm-window-ms", type=whole_number(1), metavar="MS", help="time span of a storm (default 10000)"
    )
    parser.add_argument(
        "--now", type=moment, metavar="TIME", help="the time that ages refer to (default: the newest time in the lake)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    return parser


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--limit",
        type=whole_number(0, MOST_INT - 1),
        default=_DEFAULT_LIMIT,
        metavar="N",
        help="number of rows of each table (default 50)",
    )


# --- jobs -------------------------------------------------------------------------------------------------------------


def _ingest(options: argparse.Namespace) -> int:
    from kcoord.cli.lake_run import LakeRun

    run = LakeRun(options, json_progress=options.json)
    if options.follow is None:
        run.copy_new_records()
        run.update_silver()
    else:
        run.follow(options.follow)
    return 0


def _ends(options: argparse.Namespace) -> int:
    from kcoord.cli.lake_run import session_of
    from kcoord.client.config import AdminConfig
    from kcoord.pipeline.lake.formats import Format
    from kcoord.pipeline.lake.samples import add_sample
    from kcoord.pipeline.lake.storage import Lake

    config = AdminConfig.from_properties(broker_properties(options), warn)
    lake = Lake(lambda: session_of(options, is_small=True), options.lake, Format(options.format), options.cluster)
    samples = options.samples if options.every is not None else 1
    sample: Sample | None = asyncio.run(_sample(config, lake))
    taken = 0
    with stop_on_signals() as stop:
        while True:
            if sample is not None:
                add_sample(lake, sample)
                taken += 1
                if not sample.ends:
                    warn("the brokers list no partitions: there are no topics, or the client may not DESCRIBE them")
                if options.json:
                    print(json.dumps({"sample": taken, "partitions": len(sample.ends)}), flush=True)
                else:
                    print(f"sample {taken}: {len(sample.ends)} partitions", file=sys.stderr)
            if taken == samples or stop.wait(options.every):
                return 0
            sample = _sample_if_possible(config, lake)


def _sample_if_possible(config: AdminConfig, lake: Lake) -> Sample | None:
    """Returns a sample, or None with a warning if the brokers do not answer."""
    from kcoord_protocol.errors import KafkaError

    try:
        return asyncio.run(_sample(config, lake))
    except KafkaError as error:
        warn(f"no sample of the brokers: {error_text(error)}")
        return None


async def _sample(config: AdminConfig, lake: Lake) -> Sample:
    from kcoord.client.admin.client import AdminClient
    from kcoord.pipeline.lake.samples import bind, seen_topics, take_sample

    async with AdminClient(config) as admin:
        # An unreachable broker is reported before the lake is touched.
        await bind(lake, admin)
        return await take_sample(admin, seen=seen_topics(lake))


def _answer(options: argparse.Namespace) -> int:
    from kcoord.cli.lake_run import LakeRun
    from kcoord.pipeline.lake.jobs import JOBS
    from kcoord.pipeline.lake.tables import TABLES

    run = LakeRun(options)
    run.copy_new_records()
    frames: dict[str, list[DataFrame]] = {name: [] for name in JOBS[options.job]}
    for lake, jobs in run.each_cluster():
        jobs.run(options.job)
        for name, parts in frames.items():
            parts.append(lake.with_cluster(lake.read(name)))
    return _print(options, frames, {name: TABLES[name].key for name in frames})


def _asof(options: argparse.Namespace) -> int:
    from kcoord.cli.lake_run import LakeRun
    from kcoord.pipeline.lake.asof import snapshot

    run = LakeRun(options)
    run.copy_new_records()
    frames: dict[str, list[DataFrame]] = {"groups": [], "members": [], "assignments": [], "offsets": []}
    for lake, jobs in run.each_cluster():
        groups_then = snapshot(lake, jobs, options.time, tuple(options.group))
        for name, parts in frames.items():
            parts.append(lake.with_cluster(getattr(groups_then, name)))
    return _print(options, frames, {})


def _compact(options: argparse.Namespace) -> int:
    from kcoord.cli.lake_output import compaction_line
    from kcoord.cli.lake_run import LakeRun
    from kcoord.pipeline.lake.compaction import Compaction

    compactions = [Compaction(lake, jobs, options.older_than) for lake, jobs in LakeRun(options).each_cluster()]
    tables = []
    with ExitStack() as leases:
        for compaction in compactions:
            if not options.dry_run:
                # Another one would remove the replaced files before their time.
                leases.enter_context(compaction.alone())
            for done in compaction.run(dry_run=options.dry_run):
                tables.append(done)
                if not options.json and done.files:
                    print(compaction_line(done))
        if options.json:
            print(json.dumps([asdict(done) for done in tables], indent=2))
        if not options.dry_run and any(done.merged for done in tables):
            time.sleep(options.grace)
            for compaction in compactions:
                compaction.remove_replaced()
    return 0


def _report(options: argparse.Namespace) -> int:
    from kcoord.cli.lake_run import LakeRun

    folder = os.path.dirname(os.path.abspath(options.output))
    if not os.access(folder, os.W_OK):
        raise CommandError(f"--output: {folder} is no folder that can be written")
    if os.path.isdir(os.path.abspath(options.output)):
        raise CommandError(f"--output: {options.output!r} is a folder, and the report is one file")
    run = LakeRun(options)
    run.copy_new_records()
    # Spark starts meanwhile.
    from kcoord.pipeline.lake.report.page import write_report

    size = write_report(run.lake, run.jobs(run.lake), options.output, options.title)
    if options.json:
        print(json.dumps({"output": options.output, "size_bytes": size}))
    else:
        print(f"{options.output}: {size / 1e6:.1f} MB", file=sys.stderr)
    return 0


def _print(
    options: argparse.Namespace, frames: Mapping[str, Sequence[DataFrame]], keys: Mapping[str, Sequence[str]]
) -> int:
    """Prints the tables. `frames` has a part for each cluster, `keys` the columns by which a table is ordered."""
    document: dict[str, object] = {}
    more = []
    for name, parts in frames.items():
        document[name], is_cut = print_frame(name, parts, options.limit, keys.get(name, ()), as_json=options.json)
        if is_cut:
            more.append(name)
    if options.json:
        print(json.dumps({**document, "more": more}, indent=2, ensure_ascii=False))
    return 0
