# SPDX-License-Identifier: Apache-2.0
"""The file of the audit log has whole lines, and never too many."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from kcoord.server.errors import StartError
from kcoord.server.observe import audit_file
from kcoord.server.observe.audit_file import AuditFile
from tests.support.waiting import wait_until

MAX_BYTES = 4096


def entry(number: int) -> dict[str, object]:
    return {"time": "2026-01-01T00:00:00.000Z", "number": number}


def numbers(path: Path) -> list[object]:
    return [json.loads(line).get("number") for line in path.read_text().splitlines()]


def wait_until_written(file: AuditFile, entries: int) -> None:
    wait_until(lambda: file.written == entries, "the lines are written")


def has_lost(file: AuditFile, entries: int) -> bool:
    return file.lost == entries


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "audit.log"


@pytest.fixture
def file(path: Path) -> Iterator[AuditFile]:
    file = AuditFile(str(path), MAX_BYTES, 3)
    yield file
    file.close()


def test_lines_are_appended_to_a_file_that_only_its_owner_reads(file: AuditFile, path: Path) -> None:
    path.chmod(0o644)
    file.add({**entry(1), "clientId": 'a\n{"time": "forged"}\u2028'})
    file.close()
    again = AuditFile(str(path), MAX_BYTES, 3)
    again.add(entry(2))
    again.close()
    assert numbers(path) == [1, 2]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert (file.written, again.written, again.lost) == (1, 1, 0)


@pytest.mark.parametrize("max_files", [1, 3])
def test_a_file_that_is_full_is_renamed_and_the_oldest_removed(path: Path, max_files: int) -> None:
    size = len(json.dumps(entry(100), separators=(",", ":"))) + 1
    file = AuditFile(str(path), 10 * size, max_files)
    for number in range(100, 145):
        file.add(entry(number))
        wait_until_written(file, number - 99)
    file.close()
    names = [path, *(path.with_name(f"audit.log.{number}") for number in range(1, max_files))]
    assert sorted(path.parent.iterdir()) == names
    assert [numbers(name) for name in names] == [
        [*range(140, 145)],
        [*range(130, 140)],
        [*range(120, 130)],
    ][:max_files]
    assert {stat.S_IMODE(name.stat().st_mode) for name in names} == {0o600}


@pytest.mark.parametrize("max_files", [1, 3])
@pytest.mark.parametrize("failing", ["open", "replace"])
def test_a_rotation_that_fails_loses_nothing_and_is_tried_again(
    path: Path, max_files: int, failing: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A client can cause EMFILE with many connections. It must not remove the traces of others."""
    size = len(json.dumps(entry(100), separators=(",", ":"))) + 1
    file = AuditFile(str(path), 2 * size, max_files)
    for number in range(100, 104):
        file.add(entry(number))
        wait_until_written(file, number - 99)
    files = {name.name: numbers(name) for name in path.parent.iterdir()}
    with monkeypatch.context() as patch:

        def fail(*_: object, **__: object) -> int:
            raise OSError(errno.EMFILE, "Too many open files")

        patch.setattr(f"os.{failing}", fail)
        for number in range(104, 110):
            file.add(entry(number))
            wait_until_written(file, number - 99)
    after = {name.name: numbers(name) for name in path.parent.iterdir() if name.suffix != ".next"}
    assert after == files | {"audit.log": [*range(102, 110)]}
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    file.add(entry(110))
    file.close()
    assert file.lost == 0
    assert numbers(path) == [110]
    assert max_files == 1 or numbers(path.with_name("audit.log.1")) == [*range(102, 110)]
    assert not path.with_name("audit.log.next").exists()


def test_an_incomplete_last_line_is_cut(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = json.dumps(entry(1)).replace(": ", ":") + "\n"
    path.write_text(whole + whole[: -len('1"}\n')] + "x" * 100_000)
    file = AuditFile(str(path), 10 * MAX_BYTES, 3)
    file.add(entry(2))
    file.close()
    assert numbers(path) == [1, 2]
    assert "was incomplete and is cut off" in caplog.text
    path.write_text(whole[:5])
    AuditFile(str(path), MAX_BYTES, 3).close()
    assert path.read_text() == ""


@pytest.mark.parametrize("content", ["key=value\n", "no line", "{}\n"])
def test_another_file_is_refused_and_not_touched(path: Path, content: str) -> None:
    path.write_text(content)
    path.chmod(0o644)
    with pytest.raises(StartError, match=r"Invalid value .*/audit.log for configuration kcoord.audit.log: .* no audit"):
        AuditFile(str(path), MAX_BYTES, 3)
    assert path.read_text() == content
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_a_file_that_cannot_be_used_is_refused(file: AuditFile, path: Path) -> None:
    pipe = path.with_name("pipe")
    os.mkfifo(pipe)
    for place, reason in (
        (path, "another broker writes it"),
        (path.parent, "Is a directory"),
        (path.with_name("missing") / "audit.log", "No such file or directory"),
        (pipe, "it is no regular file"),
    ):
        with pytest.raises(StartError, match=f"the file cannot be written: {reason}"):
            AuditFile(str(place), MAX_BYTES, 3)


def test_a_full_disk_leaves_whole_lines_and_their_number(
    file: AuditFile, path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write = os.write

    def write_a_part(descriptor: int, data: bytes) -> int:
        if len(data) < 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data[: len(data) - 19])

    file.add(entry(1))
    wait_until_written(file, 1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write_a_part)
        for lost in (1, 2):
            file.add(entry(0))
            wait_until(partial(has_lost, file, lost), "the line is lost")
    assert numbers(path) == [1]
    file.add(entry(2))
    file.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [entry(1), {"time": entry(2)["time"], "event": "lost", "entries": 2}, entry(2)]
    assert (file.written, file.lost) == (2, 2)
    assert caplog.text.count("are lost: No space left on device. The broker serves on") == 1


def test_entries_that_wait_are_bounded(
    file: AuditFile, path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(audit_file, "MAX_WAITING", 0)
    file.add(entry(0))
    assert file.lost == 1
    assert "entries come faster than they can be written" in caplog.text
    monkeypatch.setattr(audit_file, "MAX_WAITING", 10)
    file.add(entry(1))
    file.close()
    assert [json.loads(line).get("entries") for line in path.read_text().splitlines()] == [1, None]
