# SPDX-License-Identifier: Apache-2.0
"""Backups of a folder that is being written to. The copy equals what a crash at that time would have left."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from kcoord.logtools.backup import Backup, BackupReport
from kcoord.logtools.replay_check import replay_folder
from kcoord.logtools.verify import FolderCheck
from kcoord.runtime.serde import partition_for
from kcoord.storage.checkpoints import CLEANER_OFFSET_FILE
from kcoord.storage.errors import StorageError
from kcoord.storage.file_system import File, RealFileSystem
from kcoord_protocol.record_batch import encode_batch
from tests.unit.logtools.support import NOW_MS, SMALL, commit_record, make_small_folder, open_folder

HOME = partition_for("readers", 4)


class Interrupting(RealFileSystem):
    """Calls `then` once, right before a file whose path ends with `path` is opened."""

    def __init__(self, path: str, then: Callable[[], None]) -> None:
        super().__init__()
        self._path = path
        self._then: Callable[[], None] | None = then

    def open_read(self, path: str) -> File:
        then = self._then
        if then is not None and path.endswith(self._path):
            self._then = None
            then()
        return super().open_read(path)


def no_wait() -> None:
    raise AssertionError("the backup must not wait here")


def back_up(folder: Path, fs: RealFileSystem | None = None, wait: Callable[[], None] = no_wait) -> BackupReport:
    return Backup(fs or RealFileSystem(), str(folder), str(folder.parent / "backup"), wait).run()


def is_sound(folder: Path) -> bool:
    fs = RealFileSystem()
    return not list(FolderCheck(fs, str(folder)).run()) and not replay_folder(fs, str(folder)).problems


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_small_folder(str(tmp_path / "data"))
    return tmp_path / "data"


@pytest.fixture
def backup(folder: Path) -> Path:
    return folder.parent / "backup"


def test_the_folder_of_a_stopped_broker_is_copied_whole(folder: Path, backup: Path) -> None:
    report = back_up(folder)
    assert (report.partitions, report.repeated, report.notes) == (4, 0, [])
    for path in folder.glob("*/*.log"):
        assert (backup / path.relative_to(folder)).read_bytes() == path.read_bytes()
    assert is_sound(backup)
    replayed = replay_folder(RealFileSystem(), str(backup))
    assert (sum(replayed.groups.values()), replayed.offsets) == (1, 2)
    assert set(replayed.image.topics) == {"orders", "__consumer_offsets"}
    assert not (backup / ".kafka_cleanshutdown").exists()


def test_a_batch_that_is_appended_meanwhile_is_copied_whole_or_not_at_all(folder: Path, backup: Path) -> None:
    log = sorted((folder / f"__consumer_offsets-{HOME}").glob("*.log"))[-1]

    def write() -> None:
        with log.open("ab") as file:
            record = commit_record("readers", "orders", 0, 99)
            file.write(encode_batch([record], base_offset=16))
            file.write(encode_batch([record], base_offset=17)[:50])

    back_up(folder, Interrupting(log.name, write))
    assert is_sound(backup)
    copy = backup / log.relative_to(folder)
    assert copy.stat().st_size == log.stat().st_size - 50


def test_a_segment_that_is_rolled_meanwhile_is_not_copied(folder: Path, backup: Path) -> None:
    log = sorted((folder / f"__consumer_offsets-{HOME}").glob("*.log"))[-1]
    following = log.with_name(f"{16:020d}.log")

    def roll() -> None:
        following.write_bytes(encode_batch([commit_record("readers", "orders", 0, 99)], base_offset=16))

    assert back_up(folder, Interrupting(log.name, roll)).repeated == 0
    assert is_sound(backup)
    assert not (backup / following.relative_to(folder)).exists()


def test_a_partition_that_is_compacted_meanwhile_is_copied_again(folder: Path, backup: Path) -> None:
    first, second = sorted((folder / f"__consumer_offsets-{HOME}").glob("*.log"))[:2]
    waited = []

    def compact() -> None:
        first.write_bytes(first.read_bytes() + second.read_bytes())
        second.unlink()
        for index in (*first.parent.glob(f"{first.stem}.*index"), *first.parent.glob(f"{second.stem}.*index")):
            index.unlink()

    report = back_up(folder, Interrupting(second.name, compact), lambda: waited.append(1))
    assert (report.repeated, len(waited)) == (1, 1)
    assert is_sound(backup)
    assert (backup / first.relative_to(folder)).read_bytes() == first.read_bytes()


def test_a_backup_waits_for_a_cleaner_that_is_replacing_segments(folder: Path, backup: Path) -> None:
    first = sorted((folder / f"__consumer_offsets-{HOME}").glob("*.log"))[0]
    swap = first.with_name(f"{first.name}.swap")
    first.rename(swap)

    def finish() -> None:
        swap.rename(first)

    assert back_up(folder, wait=finish).repeated == 1
    assert is_sound(backup)


def test_a_cleaner_that_never_finishes_is_an_error(folder: Path, backup: Path) -> None:
    (folder / "orders-0" / "00000000000000000000.log.swap").write_bytes(b"")
    with pytest.raises(StorageError, match="changed during each of 100 attempts"):
        back_up(folder, wait=lambda: None)
    assert [path.name for path in folder.parent.iterdir()] == ["data"]


def test_a_first_cleaning_meanwhile_is_in_the_cleaner_checkpoint(folder: Path, backup: Path) -> None:
    checkpoint = folder / CLEANER_OFFSET_FILE

    def clean() -> None:
        checkpoint.write_text("0\n1\n__consumer_offsets 0 5\n")

    back_up(folder, Interrupting("orders-0/00000000000000000000.log", clean))
    assert (backup / CLEANER_OFFSET_FILE).read_text() == "0\n0\n"


def test_a_topic_that_is_deleted_meanwhile_is_left_out(folder: Path, backup: Path) -> None:
    def delete() -> None:
        gone = folder / "orders-1"
        gone.rename(folder / f"orders-1.{'0' * 32}-delete")

    report = back_up(folder, Interrupting("orders-1/leader-epoch-checkpoint", delete), lambda: None)
    assert report.notes == ["orders-1 was deleted meanwhile"]
    assert not (backup / "orders-1").exists()
    assert is_sound(backup)


def test_offsets_are_copied_before_data_and_metadata_last(folder: Path, backup: Path) -> None:
    opened: list[str] = []

    class Noting(RealFileSystem):
        def open_read(self, path: str) -> File:
            opened.append(path)
            return super().open_read(path)

    back_up(folder, Noting())
    segments = [path.split("/")[-2] for path in opened if path.endswith(".log")]
    assert list(dict.fromkeys(segments)) == [
        f"__consumer_offsets-{HOME}",
        "orders-0",
        "orders-1",
        "__cluster_metadata-0",
    ]
    points = next(number for number, path in enumerate(opened) if "recovery-point" in path)
    assert points < next(number for number, path in enumerate(opened) if path.endswith(".log"))


def test_damage_is_copied_and_noted(folder: Path, backup: Path) -> None:
    log = sorted((folder / "orders-0").glob("*.log"))[-1]
    data = bytearray(log.read_bytes())
    data[70] ^= 1
    log.write_bytes(data)
    report = back_up(folder)
    assert len(report.notes) == 1 and "is damaged at position 0" in report.notes[0]
    assert (backup / log.relative_to(folder)).read_bytes() == bytes(data)
    assert not is_sound(backup)


def test_the_copy_can_be_opened(folder: Path, backup: Path) -> None:
    back_up(folder)
    log_dir = open_folder(str(backup))
    assert not log_dir.had_clean_shutdown
    for topic, number in log_dir.partitions():
        log_dir.open_log(topic, number, SMALL, NOW_MS)
    assert log_dir.close()


def test_a_full_disk_is_an_error_that_names_the_folder(
    folder: Path, backup: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("kcoord.logtools.copying.write_all", full)
    with pytest.raises(StorageError, match=r"backup\.incomplete: .*No space left on device"):
        back_up(folder)
    assert not backup.with_name(f"{backup.name}.incomplete").exists()


def test_a_backup_needs_a_data_folder_and_a_new_target(folder: Path, backup: Path) -> None:
    back_up(folder)
    with pytest.raises(StorageError, match="already exists"):
        back_up(folder)
    with pytest.raises(StorageError, match="not a data folder"):
        back_up(folder / "orders-0")
    with pytest.raises(StorageError, match=f"^{folder}/x: is inside {folder}; a backup does not change its source"):
        Backup(RealFileSystem(), str(folder), str(folder / "x"), lambda: None).run()
