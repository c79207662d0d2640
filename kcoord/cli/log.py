# SPDX-License-Identifier: Apache-2.0
"""`kcoord log`: dump, verify, repair, import, export and back up the log folders of kcoord and Kafka brokers.

Exit codes: 0 if it succeeded without damage, 1 if it found damage or failed, 2 if the command line is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from kcoord.cli.old_forms import add_old_format
from kcoord.cli.options import whole_number
from kcoord.cli.table import current_time_ms, format_table, format_time

if TYPE_CHECKING:
    from collections import Counter

    from kcoord.logtools.decode import Json
    from kcoord.logtools.export_logs import ExportReport
    from kcoord.logtools.findings import Finding
    from kcoord.logtools.import_logs import ImportReport

_TABLE_ROWS = 1000
"""The number of rows that are aligned and printed together. It bounds the memory of a long table."""
_WIDEST_CELL = 160
_HIGHEST_NODE_ID = 2**31 - 1
_BACKUP_WAIT_SECONDS = 0.05


def main(arguments: Sequence[str]) -> int:
    from kcoord.config import ConfigError
    from kcoord.storage.errors import StorageError

    options = make_parser().parse_args(arguments)
    try:
        code = options.run(options)
    except BrokenPipeError:
        raise
    except (StorageError, ConfigError, OSError, ValueError) as error:
        print(f"kcoord log: {error}", file=sys.stderr)
        return 1
    assert isinstance(code, int)
    return code


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kcoord log", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_dump(commands)
    _add_verify(commands)
    _add_repair(commands)
    _add_import(commands)
    _add_export(commands)
    _add_backup(commands)
    return parser


def _folder(text: str) -> str:
    return os.path.abspath(text)


def _format_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", dest="format", action="store_const", const="json", default="table", help="print an object per line"
    )
    add_old_format(parser, "format")


def new_uuid() -> bytes:
    """Returns a random id whose text does not begin with `-`, as Kafka's ids."""
    while True:
        made = uuid.uuid4().bytes
        if made[0] >> 2 != 62:
            return made


# --- dump -------------------------------------------------------------------------------------------------------------


def _add_dump(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("dump", help="print the content of log files")
    parser.add_argument("paths", nargs="+", type=_folder, metavar="PATH", help="data folder, partition folder or file")
    parser.add_argument(
        "--partition",
        action="append",
        default=[],
        metavar="TOPIC-N",
        help="only this partition of a data folder; may be repeated",
    )
    parser.add_argument("--from-offset", type=int, default=0, metavar="OFFSET")
    parser.add_argument("--to-offset", type=int, default=2**63 - 1, metavar="OFFSET")
    parser.add_argument("--limit", type=whole_number(0), metavar="ROWS", help="stop after ROWS rows")
    parser.add_argument(
        "--decoder",
        choices=("offsets", "metadata", "transactions", "data"),
        help="the kind of records (default: by the folder's name)",
    )
    _format_option(parser)
    parser.set_defaults(run=_dump)


def _dump(options: argparse.Namespace) -> int:
    from kcoord.logtools.decode import LogKind
    from kcoord.logtools.dump import Selection, dump_file, files_at
    from kcoord.storage.file_system import RealFileSystem

    fs = RealFileSystem()
    kind = LogKind(options.decoder) if options.decoder else None
    selection = Selection(options.from_offset, options.to_offset, kind)
    partitions = frozenset(options.partition)
    files = [file for path in options.paths for file in files_at(fs, path, partitions)]
    rows = islice((row for file in files for row in dump_file(fs, file, selection)), options.limit)
    damaged = 0
    if options.format == "json":
        for row in rows:
            damaged += "damage" in row
            print(json.dumps(row, ensure_ascii=False))
    else:
        damaged = _print_tables(rows)
    if damaged:
        print(f"kcoord log: {damaged} places are damaged; `kcoord log verify` has details", file=sys.stderr)
    return 1 if damaged else 0


def _print_tables(rows: Iterator[Json]) -> int:
    damaged = 0
    file: object = None
    while piece := list(islice(rows, _TABLE_ROWS)):
        damaged += sum("damage" in row for row in piece)
        while piece:
            first = piece[0]
            same = [row for row in piece if row["file"] == first["file"]]
            piece = piece[len(same) :]
            if first["file"] != file:
                file = first["file"]
                print(f"\n{file}")
            if "partition" in first:
                print(format_table(("OFFSET", "TIME", "FLAGS", "KEY", "VALUE"), map(_record_row, same)))
            else:
                titles = [name for name in first if name != "file"]
                print(format_table(titles, ([row.get(name) for name in titles] for row in same)))
    return damaged


def _record_row(row: Json) -> tuple[object, ...]:
    if "damage" in row:
        return row.get("offset"), "-", "damage", f"position {row['position']}", row["damage"]
    flags = "".join(letter for letter, name in (("T", "isTransactional"), ("C", "isControl")) if row[name])
    timestamp = row["timestamp"]
    assert isinstance(timestamp, int)
    value = row["value"] if row["value"] is not None else _why(row["headers"])
    return row["offset"], format_time(timestamp), flags or "-", _short(row["key"]), _short(value)


def _why(headers: object) -> str | None:
    """Returns why a tombstone was written and by whom, from its headers; None if it has no reason."""
    from kcoord.runtime.serde import PRINCIPAL_HEADER, REASON_HEADER

    assert isinstance(headers, list)
    texts = {header["key"]: header["value"] for header in headers}
    if REASON_HEADER not in texts:
        return None
    by = f" by {texts[PRINCIPAL_HEADER]}" if PRINCIPAL_HEADER in texts else ""
    return f"({texts[REASON_HEADER]}{by})"


def _short(value: object) -> str | None:
    if value is None:
        return None
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    text = "".join(letter if letter.isprintable() else "." for letter in text)
    return text if len(text) <= _WIDEST_CELL else text[: _WIDEST_CELL - 1] + "…"


# --- verify -----------------------------------------------------------------------------------------------------------


def _add_verify(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "verify", help="check every batch, record, index and checkpoint; exit code 1 if there is damage"
    )
    parser.add_argument("path", type=_folder, metavar="DIR", help="data folder or partition folder")
    _format_option(parser)
    parser.set_defaults(run=_verify)


def _verify(options: argparse.Namespace) -> int:
    from kcoord.logtools.verify import FolderCheck
    from kcoord.storage.file_system import RealFileSystem

    check = FolderCheck(RealFileSystem(), options.path, in_use=_is_in_use(options.path))
    findings = list(check.run())
    _print_findings(findings, options.format)
    totals = check.totals
    looked_at = f"{totals.partitions} partitions, {totals.batches} batches, {totals.records} records"
    meanwhile = "; a broker is writing here, so the ends were not checked" if check.in_use else ""
    result = f"{len(findings)} findings" if findings else "sound"
    print(f"{options.path}: {result}: {looked_at}, {totals.size_bytes} bytes{meanwhile}", file=sys.stderr)
    return 1 if findings else 0


def _is_in_use(path: str) -> bool:
    """Whether a running broker has locked the data folder."""
    from kcoord.storage.checkpoints import LOCK_FILE
    from kcoord.storage.errors import DirectoryLockedError
    from kcoord.storage.file_system import RealFileSystem

    for folder in (path, os.path.dirname(path)):
        lock = os.path.join(folder, LOCK_FILE)
        if os.path.exists(lock):
            try:
                RealFileSystem().lock(lock).release()
            except DirectoryLockedError:
                return True
            except OSError:
                # Without permission for the lock file, the folder counts as not in use.
                return False
    return False


def _print_findings(findings: Sequence[Finding], form: str) -> None:
    if form == "json":
        for finding in findings:
            print(json.dumps({**asdict(finding), "kind": finding.kind.value}, ensure_ascii=False))
    elif findings:
        rows = (
            (finding.kind.value, finding.file, finding.position, finding.offset, finding.reason) for finding in findings
        )
        print(format_table(("WHAT", "FILE", "POSITION", "OFFSET", "WHY"), rows))


# --- repair -----------------------------------------------------------------------------------------------------------


def _add_repair(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "repair",
        help="repair the damage that verify found in a stopped broker's data folder",
        description="Without --yes it only shows the steps. Removed bytes and files are kept in a new folder.",
    )
    parser.add_argument("path", type=_folder, metavar="DIR", help="data folder")
    parser.add_argument("--yes", action="store_true", help="repair the folder: records may be lost")
    parser.add_argument(
        "--mode",
        choices=("skip", "truncate"),
        default="skip",
        help="skip: remove only the damaged bytes (default); truncate: end the log before the first damage",
    )
    parser.add_argument(
        "--keep", type=_folder, metavar="FOLDER", help="a new folder for removed bytes and files (default: beside DIR)"
    )
    _format_option(parser)
    parser.set_defaults(run=_repair)


def _repair(options: argparse.Namespace) -> int:
    from kcoord.logtools.repair import Repair, RepairMode
    from kcoord.logtools.verify import FolderCheck
    from kcoord.storage.errors import DirectoryLockedError
    from kcoord.storage.file_system import RealFileSystem
    from kcoord.storage.worker_checkpoints import restore_journals

    fs = RealFileSystem()
    if _is_in_use(options.path):
        raise DirectoryLockedError(f"{options.path}: a broker is using it; stop it first")
    if options.yes:
        # A journal that is replayed after the repair would overwrite moved bytes, so it is replayed first.
        restore_journals(fs, options.path)
    findings = list(FolderCheck(fs, options.path).run())
    keep = options.keep or f"{options.path}.repair-{current_time_ms()}"
    repair = Repair(fs, options.path, RepairMode(options.mode), keep, findings)
    steps = repair.run() if options.yes and findings else repair.plan()
    if options.format == "json":
        for step in steps:
            print(json.dumps(asdict(step), ensure_ascii=False))
    elif steps:
        rows = ((step.file, step.position, step.lost_bytes, step.what) for step in steps)
        print(format_table(("FILE", "POSITION", "LOST BYTES", "WHAT"), rows))
    if not findings:
        print(f"{options.path}: sound, nothing to repair", file=sys.stderr)
        return 0
    if not options.yes:
        print("Nothing was changed. Use --yes to repair the folder.", file=sys.stderr)
        return 1
    left = list(FolderCheck(fs, options.path).run())
    _print_findings(left, options.format)
    state = f"{len(left)} findings are left" if left else "sound now"
    print(f"{options.path}: {state}; removed bytes and files are in {keep}", file=sys.stderr)
    return 1 if left else 0


# --- import -----------------------------------------------------------------------------------------------------------


def _add_import(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "import",
        help="create a data folder from the log folders of a stopped broker",
        description="Imports __consumer_offsets-* and, if present, __cluster_metadata-0, __transaction_state-* "
        "and topic folders of a stopped Kafka 4.x broker into a new data folder. The source is not changed.",
    )
    parser.add_argument("sources", nargs="+", type=_folder, metavar="DIR", help="the broker's log.dirs")
    parser.add_argument("--into", required=True, type=_folder, metavar="NEW_DATA_DIR")
    parser.add_argument(
        "--properties", type=Path, metavar="FILE", help="the server.properties of the broker that will serve the folder"
    )
    parser.add_argument(
        "--override",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a setting that overrides the file; may be repeated",
    )
    _format_option(parser)
    parser.set_defaults(run=_import)


def _import(options: argparse.Namespace) -> int:
    from kcoord.config import BROKER_KEYS, BrokerConfig, merge_properties
    from kcoord.config.properties import read_text
    from kcoord.logtools.import_logs import LogImport
    from kcoord.storage.file_system import RealFileSystem

    text = read_text(options.properties) if options.properties is not None else None
    config = BrokerConfig.from_properties(merge_properties(text, {}, options.override, BROKER_KEYS))
    work = LogImport(RealFileSystem(), config, options.into, current_time_ms(), new_uuid)
    report = work.run(options.sources)
    return _report(
        options,
        _import_lines(report),
        report.notes,
        f"{options.into} is ready: serve it with node.id={config.node_id} and "
        f"offsets.topic.num.partitions={config.offsets_topic_num_partitions}",
    )


def _import_lines(report: ImportReport) -> Iterator[tuple[str, int]]:
    for group_type, count in sorted(report.groups.items()):
        yield f"{group_type} groups", count
    yield "committed offsets", report.offsets
    yield "group records", report.group_records
    yield "group records in another partition than before", report.rerouted_records
    yield from _counted("kept, but not served", report.kept_unknown)
    yield "transactional offsets committed", report.transactions.committed
    yield "transactional offsets left out: aborted", report.transactions.aborted
    yield "transactional offsets left out: never decided", report.transactions.pending
    yield f"topics from the {'metadata log' if report.from_metadata else 'group records'}", report.topics
    yield "partitions of them", report.partitions
    yield "partitions with data", report.copied_partitions
    yield "open transactions in topics ended", report.ended_transactions
    yield from _counted("left out", report.skipped)


def _report(options: argparse.Namespace, lines: Iterable[tuple[str, int]], notes: Sequence[str], next_step: str) -> int:
    """Prints the report of an import or export. After the table it prints the next step."""
    rows = list(lines)
    if options.format == "json":
        print(json.dumps(dict(rows) | {"notes": notes}))
        return 0
    print(format_table(("WHAT", "COUNT"), rows))
    for note in notes:
        print(f"note: {note}")
    print(next_step)
    return 0


def _counted(title: str, counts: Counter[str]) -> Iterable[tuple[str, int]]:
    return [(f"{title}: {name}", count) for name, count in sorted(counts.items())]


# --- export -----------------------------------------------------------------------------------------------------------


def _add_export(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "export",
        help="export the data folder of a stopped broker to a folder that Apache Kafka starts on",
        description="Exports topics with their ids, configs and data, groups, offsets and transactions. "
        "The source is not changed.",
    )
    parser.add_argument("source", type=_folder, metavar="DATA_DIR", help="the data folder")
    parser.add_argument("destination", type=_folder, metavar="NEW_LOG_DIR", help="a new folder, Kafka's log.dirs")
    parser.add_argument("--node-id", type=_node_id, default=1, metavar="N", help="Kafka's node.id (default: 1)")
    _format_option(parser)
    parser.set_defaults(run=_export)


def _node_id(text: str) -> int:
    if not text.isdecimal() or int(text) > _HIGHEST_NODE_ID:
        raise argparse.ArgumentTypeError(f"{text!r} is not a node.id: give a number from 0 to {_HIGHEST_NODE_ID}")
    return int(text)


def _export(options: argparse.Namespace) -> int:
    from kcoord.logtools.export_logs import LogExport
    from kcoord.storage.file_system import RealFileSystem

    now_ms = current_time_ms()
    work = LogExport(RealFileSystem(), options.source, options.destination, options.node_id, now_ms, new_uuid)
    report = work.run()
    return _report(
        options,
        _export_lines(report),
        report.notes,
        f"{options.destination} is ready: start Kafka with log.dirs={options.destination}, node.id={options.node_id} "
        "and process.roles=broker,controller, without formatting it",
    )


def _export_lines(report: ExportReport) -> Iterator[tuple[str, int]]:
    for group_type, count in sorted(report.groups.items()):
        yield f"{group_type} groups", count
    yield "committed offsets", report.offsets
    yield "topics", report.topics
    yield "partitions of them", report.partitions
    yield "partitions with data", report.copied_partitions
    yield from _counted("left out", report.skipped)


# --- backup -----------------------------------------------------------------------------------------------------------


def _add_backup(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "backup",
        help="copy the data folder of a running broker",
        description="The copy is what a start after a crash would find: serve it, or copy it back. "
        "With --verify the copy is read and replayed afterwards. Without --into, --verify checks an earlier backup.",
    )
    parser.add_argument("path", type=_folder, metavar="DIR", help="the data folder of a running or stopped broker")
    parser.add_argument("--into", type=_folder, metavar="BACKUP", help="a new folder")
    parser.add_argument("--verify", action="store_true", help="check every byte of the copy, and replay it")
    _format_option(parser)
    parser.set_defaults(run=_backup)


def _backup(options: argparse.Namespace) -> int:
    from kcoord.logtools.backup import Backup
    from kcoord.storage.file_system import RealFileSystem

    if options.into is None and not options.verify:
        print("kcoord log backup: give --into BACKUP, or --verify to check an earlier backup", file=sys.stderr)
        return 2
    if options.into is not None:
        work = Backup(RealFileSystem(), options.path, options.into, lambda: time.sleep(_BACKUP_WAIT_SECONDS))
        report = work.run()
        copied = f"{report.partitions} partitions, {report.segments} segments, {report.size_bytes} bytes"
        if options.format == "json":
            print(json.dumps({"backup": options.into, **asdict(report)}, ensure_ascii=False))
        else:
            print(f"{options.into}: {copied}, {report.repeated} copied again")
            for note in report.notes:
                print(f"note: {note}")
    return _verify_backup(options.into or options.path, options.format) if options.verify else 0


def _verify_backup(path: str, form: str) -> int:
    from kcoord.logtools.replay_check import replay_folder
    from kcoord.logtools.verify import FolderCheck
    from kcoord.storage.file_system import RealFileSystem

    fs = RealFileSystem()
    findings = list(FolderCheck(fs, path).run())
    _print_findings(findings, form)
    replayed = replay_folder(fs, path)
    groups = sum(replayed.groups.values())
    if form == "json":
        is_sound = not findings and not replayed.problems
        served = {"topics": len(replayed.image.topics), "groups": groups, "offsets": replayed.offsets}
        print(json.dumps({"backup": path, "sound": is_sound, **served, "problems": replayed.problems}))
        return 0 if is_sound else 1
    for problem in replayed.problems:
        print(f"problem: {problem}")
    serves = f"{len(replayed.image.topics)} topics, {groups} groups, {replayed.offsets} offsets"
    is_sound = not findings and not replayed.problems
    print(f"{path}: {'sound' if is_sound else 'not sound'}: it would serve {serves}")
    return 0 if is_sound else 1
