# SPDX-License-Identifier: Apache-2.0
"""Leases of a lake on a local disk and on object storage: who has one, and what happens to one whose holder is gone."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from threading import Thread
from typing import NoReturn

import pytest
from pyarrow import fs

from kcoord.cli.lake import main, make_parser
from kcoord.cli.lake_run import LakeRun
from kcoord.cli.session import EXIT_FAILED
from kcoord.pipeline.lake import ingest
from kcoord.pipeline.lake import lease as module
from kcoord.pipeline.lake.files import replace_text
from kcoord.pipeline.lake.jobs import Jobs
from kcoord.pipeline.lake.lease import Lease, LeaseError
from kcoord.pipeline.lake.settings import LakeSettings
from kcoord.pipeline.lake.storage import Lake
from tests.unit.pipeline.support import LogWriter
from tests.unit.pipeline.test_ingest import lake_at, no_spark

HOLD = """
import sys
from kcoord.pipeline.lake.storage import Lake
from tests.unit.pipeline.support import LogWriter
from tests.unit.pipeline.test_ingest import no_spark

with Lake(no_spark, sys.argv[1]).lease("ingest").held(0):
    print("held", flush=True)
    sys.stdin.read()
"""
HOLDER = rf"process {os.getpid()} on \S+ copies a log since \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d UTC"


def test_a_lease_names_its_holder_and_ends_with_a_killed_process(tmp_path: Path) -> None:
    lake = lake_at(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, lake.uri], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        line = (
            rf"^lake {lake.uri}, cluster default: process {holder.pid} on \S+ copies a log since 2\S+ \S+ UTC, and only"
        )
        with pytest.raises(LeaseError, match=line), lake.lease("ingest").held(0):
            pass
        with lake.lease("tables").held(0), Lake(no_spark, lake.uri, cluster="b").lease("ingest").held(0):
            pass
        holder.kill()
        holder.wait()
    with lake.lease("ingest").held(0), lake.lease("ingest").held(0):
        lake.lease("ingest").check()


def test_a_second_command_that_copies_fails_with_a_line_that_names_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ingest, "_ENDING_SECONDS", 0.0)
    LogWriter(tmp_path / "log", 0).close()
    with lake_at(tmp_path).lease("ingest").held():
        code = main(["status", "--log", str(tmp_path / "log"), "--lake", str(tmp_path / "lake")])
    assert code == EXIT_FAILED
    assert re.fullmatch(
        rf"kcoord lake: lake \S+, cluster default: {HOLDER}, and only one .*\n", capsys.readouterr().err
    )


def test_jobs_make_no_tables_while_another_process_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(module, "WAIT_SECONDS", 0.05)
    with lake_at(tmp_path).lease("tables").held(), pytest.raises(LeaseError, match="updates tables since"):
        Jobs(lake_at(tmp_path), LakeSettings()).ensure("commits")


def test_a_copy_that_follows_leaves_tables_to_a_job_that_updates_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    LogWriter(tmp_path / "log", 0).close()
    lake = lake_at(tmp_path)
    run = LakeRun(make_parser().parse_args(["ingest", "--log", str(tmp_path / "log"), "--lake", lake.uri]))
    with lake.lease("tables").held():
        run._update_silver_now()
    assert re.fullmatch(r"warning: .* updates tables since .*; copying continues\n", capsys.readouterr().err)


@pytest.fixture
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> fs.FileSystem:
    """A file system that has no locks. Holders renew their leases often."""
    monkeypatch.setattr(module, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(module, "_RENEWAL_SECONDS", 0.05)
    monkeypatch.setattr(module, "_SILENT_SECONDS", 1.0)
    return fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem())


def lease(storage: fs.FileSystem) -> Lease:
    return Lease(storage, "notes", "ingest", "lake l")


def test_a_lease_on_object_storage_is_renewed_and_deleted(storage: fs.FileSystem) -> None:
    first, second = lease(storage), lease(storage)
    with first.held():
        for _ in range(2):
            with (
                pytest.raises(LeaseError, match=f"^lake l: {HOLDER}, and only one process may at a time"),
                second.held(0),
            ):
                pass
        first.check()
    assert storage.get_file_info("notes/ingest.lease").type is fs.FileType.NotFound
    with second.held(0):
        second.check()


def test_a_lease_on_object_storage_whose_holder_is_silent_is_taken(
    storage: fs.FileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first holder only stood still. It finds out before its next step."""
    monkeypatch.setattr(module, "_RENEWAL_SECONDS", 60.0)
    first, second = lease(storage), lease(storage)
    with first.held(), second.held(0):
        second.check()
        with pytest.raises(LeaseError, match=HOLDER):
            first.check()


def test_a_lease_that_cannot_be_written_keeps_nobody_from_reading(
    storage: fs.FileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> NoReturn:
        raise PermissionError("no rights")

    monkeypatch.setattr(module, "replace_text", refuse)
    unwritable = lease(storage)
    line = r"^lake l: this job copies a log, and notes/ingest\.lease cannot be written: no rights$"
    with unwritable.held(0), pytest.raises(LeaseError, match=line):
        unwritable.check()
    (tmp_path / "file").touch()
    unwritable = Lease(fs.LocalFileSystem(), str(tmp_path / "file"), "ingest", "lake l")
    with unwritable.held(0), pytest.raises(LeaseError, match=r"file/ingest\.lease cannot be written: \S"):
        unwritable.check()


def test_a_process_that_may_only_read_does_not_wait_for_the_holder(
    storage: fs.FileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On object storage. On a local disk it cannot even open the file."""

    def refuse(*arguments: object) -> NoReturn:
        raise PermissionError("no rights")

    monkeypatch.setattr(module, "_RENEWAL_SECONDS", 60.0)
    monkeypatch.setattr(module, "_SILENT_SECONDS", 60.0)
    with lease(storage).held():
        reader = lease(storage)
        with monkeypatch.context() as patch:
            patch.setattr(module, "replace_text", refuse)
            patch.setattr(time, "sleep", refuse)
            with reader.held(0), pytest.raises(LeaseError, match="no rights"):
                reader.check()
        monkeypatch.setattr(module, "_SILENT_SECONDS", 0.0)
        with reader.held(0):
            reader.check()
            assert [path.name for path in (tmp_path / "notes").iterdir()] == ["ingest.lease"]


def test_a_local_file_system_without_locks_has_leases_as_object_storage(
    storage: fs.FileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> NoReturn:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    first, second = (Lease(fs.LocalFileSystem(), str(tmp_path), "ingest", "lake l") for _ in range(2))
    with first.held():
        with pytest.raises(LeaseError, match=HOLDER), second.held(0):
            pass
        first.check()


def test_a_full_disk_leaves_no_lock_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> NoReturn:
        raise OSError(errno.ENOSPC, "no space left")

    first, second = (Lease(fs.LocalFileSystem(), str(tmp_path), "ingest", "lake l") for _ in range(2))
    with monkeypatch.context() as patch:
        patch.setattr(os, "ftruncate", refuse)
        with first.held(0), pytest.raises(LeaseError), second.held(0):
            pass
    with second.held(0):
        pass


def test_a_note_may_be_replaced_by_several_writers_at_once(tmp_path: Path) -> None:
    failures = []

    def write(text: str) -> None:
        try:
            for _ in range(300):
                replace_text(fs.LocalFileSystem(), str(tmp_path / "note"), text)
        except OSError as error:
            failures.append(error)

    threads = [Thread(target=write, args=(text * 1000,)) for text in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert (tmp_path / "note").read_text() in ("a" * 1000, "b" * 1000)
