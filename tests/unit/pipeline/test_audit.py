# SPDX-License-Identifier: Apache-2.0
"""Audit logs copied into a lake: what entries are about, files that grow and rotate, and crashes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pyarrow.parquet as pq
import pytest

from kcoord.pipeline.lake import audit
from kcoord.pipeline.lake.audit import changes_of, check_audit_log, copy_audit_log, denials_of
from kcoord.pipeline.lake.errors import LakeError
from kcoord.pipeline.lake.storage import Lake
from tests.support.offsets_sample import Row


class CrashError(Exception):
    """Stands for a kill -9."""


def no_spark() -> NoReturn:
    raise AssertionError("copying an audit log needs no Spark")


def entry(request: str, second: int = 0, **more: object) -> dict[str, object]:
    return {
        "time": f"2026-11-24T06:00:{second:02d}.000Z",
        "event": "change",
        "broker": 1,
        "allowed": True,
        "principal": "User:admin",
        "host": "10.0.0.7",
        "clientId": "tool",
        "listener": "ADMIN",
        "request": request,
        "version": 2,
        "errors": [],
        **more,
    }


def line(request: str, second: int = 0, **more: object) -> str:
    return json.dumps(entry(request, second, **more)) + "\n"


def delete_group(group: str, second: int = 0) -> str:
    return line("DeleteGroups", second, fields={"groupsNames": [group]})


def table(lake: Lake, name: str) -> list[Row]:
    """Returns the rows of a table that was copied, ordered by file and position."""
    folder = Path(lake.uri, name)
    rows: list[Row] = []
    for path in folder.rglob("[!_]*.parquet"):
        rows += pq.read_table(path, partitioning=None).to_pylist()
    return sorted(rows, key=lambda row: (row["file"], row["position"]))


@pytest.mark.parametrize(
    ("request_name", "fields", "errors", "expected"),
    [
        (
            "DeleteGroups",
            {"groupsNames": ["a", "b"]},
            [{"groupId": "b", "error": "NON_EMPTY_GROUP"}],
            [("group-delete", "a", None, None, None, None), ("group-delete", "b", None, None, None, "NON_EMPTY_GROUP")],
        ),
        (
            "OffsetDelete",
            {"groupId": "g", "topics": [{"name": "t", "partitions": [{"partitionIndex": 0}, {"partitionIndex": 1}]}]},
            [{"name": "t", "partitionIndex": 1, "error": "GROUP_SUBSCRIBED_TO_TOPIC"}],
            [
                ("offset-delete", "g", "t", 0, None, None),
                ("offset-delete", "g", "t", 1, None, "GROUP_SUBSCRIBED_TO_TOPIC"),
            ],
        ),
        (
            "OffsetCommit",
            {
                "groupId": "g",
                "topics": [
                    {"topicId": "A", "name": "t", "partitions": [{"partitionIndex": 0, "committedOffset": 5}]},
                    {"topicId": "B", "partitions": [{"partitionIndex": 0, "committedOffset": 6}]},
                ],
            },
            [{"topicId": "B", "partitionIndex": 0, "error": "UNKNOWN_TOPIC_ID"}],
            [("reset", "g", "t", 0, 5, None), ("reset", "g", None, 0, 6, "UNKNOWN_TOPIC_ID")],
        ),
        (
            "TxnOffsetCommit",
            {"groupId": "g", "topics": [{"name": "t", "partitions": [{"partitionIndex": 0, "committedOffset": 5}]}]},
            [],
            [("reset", "g", "t", 0, 5, None)],
        ),
        (
            "DeleteTopics",
            {"topicNames": ["old"], "topics": [{"name": "t", "topicId": "A"}]},
            [],
            [("topic-delete", None, "old", None, None, None), ("topic-delete", None, "t", None, None, None)],
        ),
        ("CreateTopics", {"topics": [{"name": "t"}]}, [], []),
    ],
)
def test_changes_name_what_a_request_deleted_or_set(
    request_name: str, fields: object, errors: list[object], expected: list[tuple[object, ...]]
) -> None:
    names = ("action", "group", "topic", "partition", "committed_offset", "error")
    changes = changes_of(entry(request_name, fields=fields, errors=errors))
    assert [tuple(change.get(name) for name in names) for change in changes] == expected


def test_a_denied_request_changes_nothing() -> None:
    decision = {
        "operation": "DELETE",
        "resourceType": "GROUP",
        "resource": "g",
        "allowed": False,
        "rule": "DefaultDeny",
    }
    allowed = {**decision, "operation": "DESCRIBE", "allowed": True}
    denied = entry("DeleteGroups", allowed=False, fields={"groupsNames": ["g"]}, decisions=[allowed, decision])
    assert [change["error"] for change in changes_of(denied)] == ["DENIED"]
    (denial,) = denials_of(denied)
    assert denial == {"operation": "DELETE", "resource_type": "GROUP", "resource": "g", "rule": "DefaultDeny"}


def test_each_entry_is_copied_once_while_files_grow_and_rotate(tmp_path: Path) -> None:
    lake, path = Lake(no_spark, str(tmp_path / "lake")), tmp_path / "audit.log"
    path.write_text(delete_group("a", 1) + delete_group("b", 2)[:20])
    assert copy_audit_log(lake, str(path)) == 1
    path.write_text(delete_group("a", 1) + delete_group("b", 2))
    assert copy_audit_log(lake, str(path)) == 1
    assert copy_audit_log(lake, str(path)) == 0
    path.rename(tmp_path / "audit.log.1")
    path.write_text(delete_group("c", 3) + 'no entry\n["no object"]\n' + line("DescribeGroups", 4))
    (tmp_path / "audit.log.broker-2").write_text(delete_group("d", 5))
    (tmp_path / "audit.log.next").write_text(delete_group("another file", 6))
    assert copy_audit_log(lake, str(path)) == 5
    assert copy_audit_log(lake, str(path)) == 0
    groups = [row["group"] for row in table(lake, "silver/changes")]
    assert sorted(map(str, groups)) == ["a", "b", "c", "d"]
    events = [str(row["event"]) for row in table(lake, "bronze/audit")]
    assert sorted(events) == [*["change"] * 5, *["unreadable"] * 2]
    with pytest.raises(LakeError, match="there is no such file"):
        copy_audit_log(lake, str(tmp_path / "nothing.log"))


@pytest.mark.parametrize("step", range(6))
def test_a_copy_that_crashed_is_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """The steps are three tables and three notes. The copy before them had another batch."""
    lake, path = Lake(no_spark, str(tmp_path / "lake")), tmp_path / "audit.log"
    text = delete_group("a", 1)
    path.write_text(text)
    assert copy_audit_log(lake, str(path)) == 1
    denial = {"operation": "DELETE", "resourceType": "GROUP", "resource": "b", "allowed": False, "rule": "DefaultDeny"}
    text += line("DeleteGroups", 2, allowed=False, fields={"groupsNames": ["b"]}, decisions=[denial])
    path.write_text(text)
    left = iter(range(step))

    def crashing(method: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: object) -> None:
            if next(left, None) is None:
                raise CrashError
            method(*arguments)

        return call

    with monkeypatch.context() as patch:
        for name in ("replace_rows", "set_note"):
            patch.setattr(Lake, name, crashing(getattr(Lake, name)))
        with pytest.raises(CrashError):
            copy_audit_log(lake, str(path))
    path.write_text(text + delete_group("c", 3))
    assert copy_audit_log(lake, str(path)) == 2
    assert [row["group"] for row in table(lake, "silver/changes")] == ["a", "b", "c"]
    assert [row["resource"] for row in table(lake, "silver/denials")] == ["b"]
    assert len(table(lake, "bronze/audit")) == 3


def test_a_large_audit_log_is_copied_in_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lake, path = Lake(no_spark, str(tmp_path / "lake")), tmp_path / "audit.log"
    text = [delete_group(f"g{number:02}", number) for number in range(20)]
    path.write_text("".join(text[10:]))
    (tmp_path / "audit.log.1").write_text("".join(text[:10]))
    monkeypatch.setattr(audit, "_BATCH_BYTES", 4 * len(text[0]))
    assert copy_audit_log(lake, str(path)) == 20
    assert sorted(str(row["group"]) for row in table(lake, "silver/changes")) == [f"g{n:02}" for n in range(20)]
    note = lake.note("audit")
    assert note is not None and note.progress["batch"] == 5


def test_a_rotation_during_a_copy_puts_no_entry_in_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first file was read, it is renamed to the name of the second one, and gets another entry."""
    lake, path = Lake(no_spark, str(tmp_path / "lake")), tmp_path / "audit.log"
    path.write_text(delete_group("b", 2))
    (tmp_path / "audit.log.1").write_text(delete_group("a", 1))
    listed = sorted(check_audit_log(str(path)), key=lambda info: str(info.base_name))
    monkeypatch.setattr(audit, "check_audit_log", lambda uri: listed)
    parse = audit._rows_of

    def rotate(entry_line: bytes) -> dict[str, list[Row]]:
        if path.exists():
            path.write_text(delete_group("b", 2) + delete_group("c", 3))
            (tmp_path / "audit.log.1").rename(tmp_path / "audit.log.2")
            path.rename(tmp_path / "audit.log.1")
        return parse(entry_line)

    monkeypatch.setattr(audit, "_rows_of", rotate)
    assert copy_audit_log(lake, str(path)) == 2
    monkeypatch.undo()
    path.write_text(delete_group("d", 4))
    assert copy_audit_log(lake, str(path)) == 2
    assert sorted(str(row["group"]) for row in table(lake, "silver/changes")) == ["a", "b", "c", "d"]


def test_a_file_with_a_long_first_line_is_copied(tmp_path: Path) -> None:
    """The line has a thousand groups, and does not fit into the first block that is read."""
    lake, path = Lake(no_spark, str(tmp_path / "lake")), tmp_path / "audit.log"
    names = [f"{'g' * 200}-{number}" for number in range(1000)]
    long = line("DeleteGroups", 1, fields={"groupsNames": names})
    path.write_text(long[:100_000])
    assert copy_audit_log(lake, str(path)) == 0
    path.write_text(long + delete_group("a", 2))
    assert copy_audit_log(lake, str(path)) == 2
    assert len(table(lake, "silver/changes")) == len(names) + 1
    assert copy_audit_log(lake, str(path)) == 0
