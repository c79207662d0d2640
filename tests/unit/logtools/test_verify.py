# SPDX-License-Identifier: Apache-2.0
"""A check finds every kind of planted damage, and names its file and position."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kcoord.logtools.findings import Finding, FindingKind
from kcoord.logtools.verify import FolderCheck
from kcoord.runtime.serde import partition_for
from kcoord.storage.checkpoints import CLEANER_OFFSET_FILE, write_offset_checkpoint
from kcoord.storage.file_system import RealFileSystem
from kcoord.storage.memory_file_system import MemoryFileSystem
from kcoord.storage.rolled import UNSYNCED_SUFFIX
from kcoord.topics.producer_files import encode_aborted
from kcoord.topics.producer_state import AbortedTransaction
from kcoord_protocol.record_batch import Compression, encode_batch, iter_headers, rewrite_header
from tests.storage.cleaning import Writer, clean
from tests.storage.support import DIRECTORY
from tests.unit.logtools.support import append, commit_record, make_small_folder, open_folder

FS = RealFileSystem()
Damage = Callable[[Path], Path]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound") / "data"
    make_small_folder(str(folder))
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "data"))


def check(folder: Path, *, in_use: bool = False) -> list[Finding]:
    return list(FolderCheck(FS, str(folder), in_use=in_use).run())


def logs(folder: Path, partition: str) -> list[Path]:
    return sorted((folder / partition).glob("*.log"))


def test_a_sound_folder_has_no_findings(folder: Path) -> None:
    work = FolderCheck(FS, str(folder))
    assert list(work.run()) == []
    assert work.totals.partitions == 4
    assert work.totals.records == 16 + 2 * 14 * 3 + 8
    assert work.totals.size_bytes == sum(path.stat().st_size for path in folder.glob("*/*.log"))


def test_one_partition_folder_is_checked_alone(folder: Path) -> None:
    work = FolderCheck(FS, str(folder / "orders-0"))
    assert list(work.run()) == []
    assert work.totals.partitions == 1


@pytest.mark.parametrize("suffix", [".log", ".index", ".timeindex"])
@pytest.mark.parametrize("partition", ["__consumer_offsets-0", "orders-1", "__cluster_metadata-0"])
def test_any_flipped_bit_is_found_in_its_file(folder: Path, partition: str, suffix: str) -> None:
    for path in sorted((folder / partition).glob(f"*{suffix}"))[:2]:
        data = path.read_bytes()
        step = 13 if suffix == ".log" else 3
        for position in range(0, len(data), step):
            flipped = bytearray(data)
            flipped[position] ^= 1 << position % 8
            path.write_bytes(flipped)
            findings = check(folder / partition if suffix == ".log" and position % 2 else folder)
            assert any(finding.file == str(path) for finding in findings), position
        path.write_bytes(data)


def test_every_byte_outside_of_the_crc_is_covered(folder: Path) -> None:
    """These bytes are base offset, length, leader epoch and magic of each batch."""
    for path in logs(folder, "orders-0"):
        data = path.read_bytes()
        for start, header in iter_headers(data):
            for position in range(start, start + 17):
                flipped = bytearray(data)
                flipped[position] ^= 4
                path.write_bytes(flipped)
                findings = check(folder)
                assert any(finding.file == str(path) and finding.position == start for finding in findings), (
                    position,
                    header,
                )
        path.write_bytes(data)


def cut(path: Path, size: int) -> Path:
    path.write_bytes(path.read_bytes()[:size])
    return path


def positions(path: Path) -> list[int]:
    return [position for position, _ in iter_headers(path.read_bytes())]


def test_a_file_that_ends_early_is_found_wherever_it_ends(folder: Path) -> None:
    for number, path in enumerate(logs(folder, "orders-0")):
        data = path.read_bytes()
        for size in range(0, len(data), 29):
            cut(path, size)
            kinds = {finding.kind for finding in check(folder)}
            assert kinds & {FindingKind.DAMAGED, FindingKind.GAP, FindingKind.SHORT}, (number, size)
        path.write_bytes(data)


def test_a_torn_end_after_a_crash_is_found_as_torn(folder: Path) -> None:
    (folder / ".kafka_cleanshutdown").unlink()
    (folder / "recovery-point-offset-checkpoint").unlink()
    path = logs(folder, "orders-0")[-1]
    last = positions(path)[-1]
    cut(path, path.stat().st_size - 5)
    (torn,) = [finding for finding in check(folder) if finding.file == str(path)]
    assert (torn.kind, torn.position, torn.end) == (FindingKind.TORN, last, path.stat().st_size)
    assert [finding for finding in check(folder, in_use=True) if finding.file == str(path)] == []


@pytest.mark.parametrize("lost_bytes", [5, None])
def test_an_unsynced_segment_without_its_end_is_found_as_torn(folder: Path, lost_bytes: int | None) -> None:
    """The start removes the segments after it, so they have no finding. None: the last batch is lost as a whole."""
    (folder / ".kafka_cleanshutdown").unlink()
    (folder / "recovery-point-offset-checkpoint").unlink()
    first, second = logs(folder, "orders-0")[:2]
    mark = second.with_suffix(UNSYNCED_SUFFIX)
    mark.touch()
    last = positions(first)[-1]
    cut(first, first.stat().st_size - lost_bytes if lost_bytes else last)
    cut(second, second.stat().st_size - 1)
    in_logs = [finding for finding in check(folder) if finding.file in map(str, logs(folder, "orders-0"))]
    assert [(torn.kind, torn.file, torn.position) for torn in in_logs] == [(FindingKind.TORN, str(first), last)]
    mark.unlink()
    kinds = {finding.kind for finding in check(folder)}
    assert kinds & {FindingKind.DAMAGED, FindingKind.GAP}


def test_a_finding_in_the_middle_names_the_next_valid_batch(folder: Path) -> None:
    path = logs(folder, "orders-0")[0]
    second, third = positions(path)[1:3]
    data = bytearray(path.read_bytes())
    data[second + 70] ^= 1
    path.write_bytes(data)
    (finding,) = check(folder)
    assert (finding.kind, finding.position, finding.offset) == (FindingKind.DAMAGED, second, 3)
    assert (finding.end, finding.next_offset) == (third, 6)
    assert "CRC" in finding.reason
    assert str(finding).startswith(f"{path}: position {second}, offset 3: damaged bytes")


def test_every_damage_of_several_is_found(folder: Path) -> None:
    touched = set()
    for path in (*logs(folder, "orders-0"), *logs(folder, "orders-1"), *logs(folder, "__consumer_offsets-0")):
        data = bytearray(path.read_bytes())
        for start in positions(path)[::2]:
            data[start + 65] ^= 0x10
            touched.add((str(path), start))
        path.write_bytes(data)
    positions_found = {
        (finding.file, finding.position) for finding in check(folder) if finding.kind is FindingKind.DAMAGED
    }
    assert positions_found == touched


def remove_middle_segment(folder: Path) -> Path:
    path = logs(folder, "orders-0")[1]
    path.unlink()
    return logs(folder, "orders-0")[1]


def remove_last_segment(folder: Path) -> Path:
    logs(folder, "orders-0")[-1].unlink()
    return logs(folder, "orders-0")[-1]


def repeat_a_batch(folder: Path) -> Path:
    path = logs(folder, "orders-0")[0]
    data = path.read_bytes()
    second, third = positions(path)[1:3]
    path.write_bytes(data[:third] + data[second:third] + data[third:])
    return path


def insert_garbage(folder: Path) -> Path:
    path = logs(folder, "orders-0")[0]
    data = path.read_bytes()
    second = positions(path)[1]
    path.write_bytes(data[:second] + b"garbage " * 20 + data[second:])
    return path


def append_zeros(folder: Path) -> Path:
    path = logs(folder, "orders-0")[-1]
    path.write_bytes(path.read_bytes() + bytes(300))
    return path


def swap_two_segments(folder: Path) -> Path:
    first, second = logs(folder, "orders-0")[:2]
    first_data, second_data = first.read_bytes(), second.read_bytes()
    first.write_bytes(second_data)
    second.write_bytes(first_data)
    return second


def write_old_format(folder: Path) -> Path:
    path = logs(folder, "orders-0")[0]
    data = bytearray(path.read_bytes())
    data[positions(path)[0] + 16] = 1
    path.write_bytes(data)
    return path


def truncate_index(folder: Path) -> Path:
    return cut(folder / "orders-0" / "00000000000000000000.index", 13)


def truncate_time_index(folder: Path) -> Path:
    return cut(folder / "orders-0" / "00000000000000000000.timeindex", 24)


def other_index(folder: Path) -> Path:
    path = folder / "orders-0" / "00000000000000000000.index"
    path.write_bytes((folder / "orders-0" / "00000000000000000015.index").read_bytes())
    return path


def put_foreign_group(folder: Path) -> Path:
    log_dir = open_folder(str(folder))
    stranger = next(name for name in map(str, range(9)) if partition_for(name, 4) != 0)
    append(log_dir, "__consumer_offsets", 0, [encode_batch([commit_record(stranger, "orders", 0, 1)])])
    log_dir.close()
    return logs(folder, "__consumer_offsets-0")[-1]


def put_malformed_record(folder: Path) -> Path:
    record = commit_record("readers", "orders", 0, 1)
    assert record.value is not None
    record.value = record.value[:-3]
    log_dir = open_folder(str(folder))
    append(log_dir, "__consumer_offsets", 0, [encode_batch([record])])
    log_dir.close()
    return logs(folder, "__consumer_offsets-0")[-1]


def break_topic_id(folder: Path) -> Path:
    path = folder / "orders-1" / "partition.metadata"
    path.write_text("version: 0\ntopic_id: AAAAAAAAAAAAAAAAAAAAAQ")
    return path


def break_leader_epochs(folder: Path) -> Path:
    path = folder / "orders-1" / "leader-epoch-checkpoint"
    path.write_text("0\n2\n0 0\n0 7\n")
    return path


def break_checkpoint(folder: Path) -> Path:
    path = folder / "recovery-point-offset-checkpoint"
    path.write_text("0\n99\norders 0 1\n")
    return path


def promise_too_much(folder: Path) -> Path:
    path = folder / "log-start-offset-checkpoint"
    write_offset_checkpoint(FS, str(path), {("orders", 0): 1_000})
    return path


def break_snapshot(folder: Path) -> Path:
    path = folder / "orders-0" / "00000000000000000015.snapshot"
    path.write_bytes(b"\0\1\0\0\0\0\0\0\0\0")
    return path


def tear_transaction_index(folder: Path) -> Path:
    path = folder / "orders-0" / "00000000000000000015.txnindex"
    path.write_bytes(encode_aborted(AbortedTransaction(7, 15, 20, 21)) * 2)
    return cut(path, path.stat().st_size - 1)


def break_identity(folder: Path) -> Path:
    path = folder / "meta.properties"
    path.write_text("version=1\nnode.id=1\n")
    return path


def change_identity(folder: Path, old: str, new: str) -> Path:
    path = folder / "meta.properties"
    path.write_text(path.read_text().replace(old, new))
    return path


def write_newer_identity(folder: Path) -> Path:
    return change_identity(folder, "version=1", "version=2")


def write_malformed_node_id(folder: Path) -> Path:
    return change_identity(folder, "node.id=1", "node.id=one")


@pytest.mark.parametrize(
    ("damage", "kind"),
    [
        (remove_middle_segment, FindingKind.GAP),
        (remove_last_segment, FindingKind.SHORT),
        (repeat_a_batch, FindingKind.MISPLACED),
        (insert_garbage, FindingKind.DAMAGED),
        (append_zeros, FindingKind.DAMAGED),
        (swap_two_segments, FindingKind.MISPLACED),
        (write_old_format, FindingKind.DAMAGED),
        (truncate_index, FindingKind.INDEX),
        (truncate_time_index, FindingKind.INDEX),
        (other_index, FindingKind.INDEX),
        (put_foreign_group, FindingKind.FOREIGN_GROUP),
        (put_malformed_record, FindingKind.MALFORMED),
        (break_topic_id, FindingKind.IDENTITY),
        (break_leader_epochs, FindingKind.SIDE_FILE),
        (break_checkpoint, FindingKind.CHECKPOINT),
        (promise_too_much, FindingKind.CHECKPOINT),
        (break_snapshot, FindingKind.SIDE_FILE),
        (tear_transaction_index, FindingKind.SIDE_FILE),
        (break_identity, FindingKind.IDENTITY),
        (write_newer_identity, FindingKind.IDENTITY),
        (write_malformed_node_id, FindingKind.IDENTITY),
    ],
)
def test_planted_damage_is_named(folder: Path, damage: Damage, kind: FindingKind) -> None:
    path = damage(folder)
    assert (kind, str(path)) in [(finding.kind, finding.file) for finding in check(folder)]


def test_gaps_are_no_finding_in_a_compacted_log(folder: Path) -> None:
    path = logs(folder, "__consumer_offsets-0")[0]
    data = path.read_bytes()
    second, third = positions(path)[1:3]
    path.write_bytes(data[:second] + data[third:])
    for index in (folder / "__consumer_offsets-0").glob("00000000000000000000.*index"):
        index.unlink()
    assert [finding.kind for finding in check(folder)] == [FindingKind.GAP]
    write_offset_checkpoint(FS, str(folder / CLEANER_OFFSET_FILE), {("__consumer_offsets", 0): 5})
    assert check(folder) == []


def test_the_batch_with_the_wrong_base_offset_is_named_and_not_its_neighbour(folder: Path) -> None:
    path = logs(folder, "orders-0")[0]
    second = positions(path)[1]
    data = bytearray(path.read_bytes())
    rewrite_header(data, second, base_offset=1_000)
    path.write_bytes(data)
    findings = [finding for finding in check(folder) if finding.kind is not FindingKind.INDEX]
    assert [(finding.kind, finding.position, finding.offset) for finding in findings] == [
        (FindingKind.MISPLACED, second, 3)
    ]


def test_the_batch_with_the_wrong_leader_epoch_is_named_and_not_its_neighbour(folder: Path) -> None:
    path = logs(folder, "orders-0")[0]
    second = positions(path)[1]
    data = bytearray(path.read_bytes())
    rewrite_header(data, second, partition_leader_epoch=9)
    path.write_bytes(data)
    (finding,) = check(folder)
    assert (finding.kind, finding.position, finding.leader_epoch) == (FindingKind.WRONG_EPOCH, second, 0)


@pytest.mark.parametrize("compression", list(Compression))
def test_a_log_is_sound_after_the_log_cleaner(compression: Compression) -> None:
    file_system = MemoryFileSystem()
    writer = Writer(file_system)
    for number in range(60):
        writer.put((f"k{number % 7}", str(number)), (f"gone{number % 3}", None), compression=compression)
        if number % 10 == 9:
            writer.roll()
    writer.put(("a", "1"), producer_id=7, sequence=0)
    clean(writer.log, file_system)
    writer.log.close()
    check = FolderCheck(file_system, DIRECTORY)
    assert list(check.run()) == []
    assert check.totals.records < 60
