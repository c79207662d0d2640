# SPDX-License-Identifier: Apache-2.0
"""bronze.audit, silver.changes and silver.denials: the audit logs of brokers, and what their entries are about.

Theory of operation. A file of an audit log grows, and is renamed by rotations. The digest of its first line names it
in all of them. The note of bronze.audit has the position up to which each file was read. A copy reads what follows, as
whole lines, _BATCH_BYTES at a time. Each such batch has a part of the layout (`batch=N`) in the three tables. The note
comes last: after a crash the next copy replaces the same parts. So each entry is in the tables once.

One entry has one row in bronze.audit. It has a row in silver.changes for each offset that it deleted or set, and one in
silver.denials for each access that was denied. docs/guides/audit.md describes the entries.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from hashlib import sha256
from typing import Final, NamedTuple

import pyarrow as pa
from pyarrow import fs

from kcoord.pipeline.lake.errors import LakeError
from kcoord.pipeline.lake.storage import Lake, TableNote
from kcoord.pipeline.lake.tables import TABLES
from kcoord.pipeline.log_files import open_file_system

Entry = Mapping[str, object]
Row = dict[str, object]

_SUFFIXES: Final = re.compile(r"(\.broker-\d+)?(\.\d+)?")
"""What follows the name of an audit log: the broker if there are several workers, and the number of an older file."""
_FILE: Final = "file."
_ACTIONS: Final = {
    "DeleteGroups": "group-delete",
    "OffsetDelete": "offset-delete",
    "OffsetCommit": "reset",
    "TxnOffsetCommit": "reset",
    "DeleteTopics": "topic-delete",
}
_COMMON: Final = ("broker", "principal", "host", "request")
_DIGEST_LETTERS: Final = 16
_BLOCK_BYTES: Final = 1 << 16
_BATCH_BYTES = 32 << 20
"""The rows of a batch are in memory, and take about ten times as much. A line is much shorter."""


class _File(NamedTuple):
    """A file and where it stands: `digest` names it, `lines` are new, the first at `position`."""

    digest: str
    position: int
    lines: list[bytes]


def copy_audit_log(lake: Lake, uri: str, wait_s: float | None = None) -> int:
    """Copies the new entries of an audit log and its older files. Returns their number.

    Raises LakeError if there is no such file, or another process copies audit logs for `wait_s` (a minute).
    """
    entries = 0
    with lake.lease("audit").held(wait_s):
        while count := _copy_batch(lake, uri):
            entries += count
    return entries


def _copy_batch(lake: Lake, uri: str) -> int:
    note = lake.note("audit") or TableNote()
    batch = note.progress.get("batch", -1) + 1
    progress = dict(note.progress)
    rows: dict[str, list[Row]] = {"audit": [], "changes": [], "denials": []}
    size = 0
    for file in _files(uri, progress):
        position = file.position
        for line in file.lines:
            place: Row = {"file": file.digest, "position": position, "batch": batch}
            for name, table_rows in _rows_of(line).items():
                rows[name] += [{**place, **row} for row in table_rows]
            position += len(line)
        progress[f"{_FILE}{file.digest}"] = position
        size += position - file.position
        if size >= _BATCH_BYTES // 2:
            break
    if not rows["audit"]:
        return 0
    for name, table_rows in rows.items():
        if table_rows:
            lake.replace_rows(name, pa.Table.from_pylist(table_rows, schema=TABLES[name].arrow_schema))
    lake.lease("audit").check()
    for name in ("changes", "denials", "audit"):
        old = lake.note(name) or TableNote()
        lake.set_note(name, TableNote(old.version + 1, {}, {**progress, "batch": batch} if name == "audit" else {}))
    return len(rows["audit"])


def check_audit_log(uri: str) -> list[fs.FileInfo]:
    """Returns an audit log and its older files. Raises LakeError if there are none."""
    system, path = open_file_system(uri)
    folder, _, base = path.rpartition("/")
    infos = [
        info
        for info in system.get_file_info(fs.FileSelector(folder or ".", allow_not_found=True))
        if info.is_file and info.base_name.startswith(base) and _SUFFIXES.fullmatch(info.base_name, len(base))
    ]
    if not infos:
        raise LakeError(f"audit log {uri}: there is no such file")
    return infos


def _files(uri: str, progress: Mapping[str, int]) -> Iterator[_File]:
    """Yields the files that have new whole lines, with at most _BATCH_BYTES of them.

    `progress` has to include the files that were yielded before. A rotation may give a file the name of a later one.
    A file that is being renamed is left to the next copy.
    """
    system, _ = open_file_system(uri)
    for info in check_audit_log(uri):
        try:
            file = system.open_input_file(info.path)
        except FileNotFoundError:
            continue
        with file:
            first = _first_line(file)
            if first is None:
                continue
            digest = sha256(first).hexdigest()[:_DIGEST_LETTERS]
            position = progress.get(f"{_FILE}{digest}", 0)
            file.seek(position)
            whole = file.read(_BATCH_BYTES).rpartition(b"\n")
        if whole[1]:
            yield _File(digest, position, [line + b"\n" for line in whole[0].split(b"\n")])


def _first_line(file: pa.NativeFile) -> bytes | None:
    """Returns the first line without its end, None if the line is not whole yet."""
    line: list[bytes] = []
    while block := file.read(_BLOCK_BYTES):
        head, newline, _ = block.partition(b"\n")
        line.append(head)
        if newline:
            return b"".join(line)
    return None


def _rows_of(line: bytes) -> dict[str, list[Row]]:
    """Returns the rows of one line by table, without its place."""
    text = line.decode("utf-8", "replace").rstrip("\n")
    try:
        entry = json.loads(text)
        common = {**_common(entry), "timestamp": datetime.fromisoformat(entry["time"])}
    except (ValueError, KeyError, TypeError, AttributeError):  # no JSON, no time, or no object
        return {"audit": [{"event": "unreadable", "entry": text}], "changes": [], "denials": []}
    whole = {**common, **{name: entry.get(name) for name in ("event", "allowed", "listener", "version")}, "entry": text}
    return {
        "audit": [whole],
        "changes": [{**common, **change} for change in changes_of(entry)],
        "denials": [{**common, **denial} for denial in denials_of(entry)],
    }


def _common(entry: Entry) -> Row:
    names = {
        "broker": "broker",
        "principal": "principal",
        "host": "host",
        "client_id": "clientId",
        "request": "request",
    }
    return {name: entry.get(key) for name, key in names.items()}


def changes_of(entry: Entry) -> Iterator[Row]:
    """Yields the offsets that an entry deleted or set: action, group, topic, partition, committed offset and error."""
    action = _ACTIONS.get(str(entry.get("request")))
    fields = entry.get("fields")
    if action is None or not isinstance(fields, dict):
        return
    places: list[tuple[Row, object]] = []
    if action == "group-delete":
        places += [({"group": group}, None) for group in _list(fields, "groupsNames")]
    elif action == "topic-delete":
        places += [({"topic": topic}, None) for topic in _list(fields, "topicNames")]
        places += [({"topic": topic.get("name")}, topic.get("topicId")) for topic in _structs(fields, "topics")]
    else:
        for topic in _structs(fields, "topics"):
            for partition in _structs(topic, "partitions"):
                place = {
                    "group": fields.get("groupId"),
                    "topic": topic.get("name"),
                    "partition": partition.get("partitionIndex"),
                    "committed_offset": partition.get("committedOffset"),
                }
                places.append((place, topic.get("topicId")))
    for place, topic_id in places:
        yield {"action": action, **place, "error": _error(entry, place, topic_id)}


def _error(entry: Entry, place: Row, topic_id: object) -> str | None:
    """Returns the error of the entry that is about a place, or DENIED if an ACL denied the whole request."""
    errors = _structs(entry, "errors")
    for error in errors:
        named = (
            (error.get("groupId"), place.get("group")),
            (error.get("name"), place.get("topic")),
            (error.get("partitionIndex"), place.get("partition")),
            (error.get("topicId"), topic_id),
        )
        if all(value is None or value == own for value, own in named):
            return str(error.get("error"))
    return "DENIED" if entry.get("allowed") is False and not errors else None


def denials_of(entry: Entry) -> Iterator[Row]:
    """Yields the denied accesses of an entry: operation, type and name of the resource, and the rule."""
    for decision in _structs(entry, "decisions"):
        if decision.get("allowed") is False:
            yield {
                "operation": decision.get("operation"),
                "resource_type": decision.get("resourceType"),
                "resource": decision.get("resource"),
                "rule": decision.get("rule"),
            }


def _list(struct: Mapping[str, object], name: str) -> Sequence[object]:
    values = struct.get(name)
    return values if isinstance(values, list) else ()


def _structs(struct: Mapping[str, object], name: str) -> list[Mapping[str, object]]:
    return [value for value in _list(struct, name) if isinstance(value, dict)]
