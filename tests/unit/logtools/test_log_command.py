# SPDX-License-Identifier: Apache-2.0
"""The command line of `kcoord log`: what it prints, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kcoord.cli import main
from kcoord.storage.file_system import RealFileSystem
from kcoord.storage.journal import JOURNAL_FILE, Extent, Journal
from tests.unit.logtools.support import make_small_folder
from tests.unit.logtools.test_repair import flip
from tests.unit.logtools.test_verify import logs


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_small_folder(str(tmp_path / "data"))
    return tmp_path / "data"


def test_verify_and_repair(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["log", "verify", str(folder)]) == 0
    assert "sound: 4 partitions, 52 batches, 108 records" in capsys.readouterr().err
    path = logs(folder, "orders-0")[0]
    flip(path, 1)
    assert main(["log", "verify", str(folder), "--json"]) == 1
    (finding,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert (finding["kind"], finding["file"], finding["offset"]) == ("damaged bytes", str(path), 3)
    damaged = path.read_bytes()
    assert main(["log", "repair", str(folder)]) == 1
    output = capsys.readouterr()
    assert "left out" in output.out and "Nothing was changed" in output.err
    assert path.read_bytes() == damaged
    keep = folder.parent / "kept"
    assert main(["log", "repair", str(folder), "--yes", "--keep", str(keep)]) == 0
    assert "sound now" in capsys.readouterr().err
    assert (keep / "repair.json").exists()
    assert main(["log", "verify", str(folder)]) == 0
    assert main(["log", "repair", str(folder), "--yes"]) == 0
    assert "nothing to repair" in capsys.readouterr().err


def test_a_repair_first_replays_the_journal(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """If the journal were replayed after the repair, it would overwrite bytes that the repair has moved."""
    path = logs(folder, "orders-0")[-1]
    whole = path.read_bytes()
    end = len(whole) // 2
    path.write_bytes(whole[:end])
    journal = Journal(RealFileSystem(), str(folder / JOURNAL_FILE))
    journal.write([Extent("orders-0", int(path.stem), end, whole[end:])])
    journal.sync()
    assert main(["log", "verify", str(folder)]) == 1
    assert main(["log", "repair", str(folder), "--yes"]) == 0
    assert "nothing to repair" in capsys.readouterr().err
    assert path.read_bytes() == whole
    assert not (folder / JOURNAL_FILE).exists()


def test_dump_as_a_table_and_as_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["log", "dump", str(folder), "--partition", "orders-0", "--limit", "2"]
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].endswith("orders-0/00000000000000000000.log")
    assert lines[2].split() == ["OFFSET", "TIME", "FLAGS", "KEY", "VALUE"]
    assert lines[3].split()[0] == "0" and len(lines) == 5
    assert main([*command, "--json"]) == 0
    assert [json.loads(line)["offset"] for line in capsys.readouterr().out.splitlines()] == [0, 1]
    index = str(folder / "orders-0" / "00000000000000000000.index")
    assert main(["log", "dump", index]) == 0
    assert capsys.readouterr().out.splitlines()[2].split() == ["offset", "position"]


def test_a_dump_of_damage_exits_with_1(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(logs(folder, "orders-0")[0], 1)
    assert main(["log", "dump", str(folder)]) == 1
    output = capsys.readouterr()
    assert "damage" in output.out and "1 places are damaged" in output.err


def test_a_table_of_records_after_damage_has_their_keys_and_values(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = logs(folder, "orders-0")[0]
    flip(path, 0)
    assert main(["log", "dump", str(path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == ["OFFSET", "TIME", "FLAGS", "KEY", "VALUE"]
    assert lines[3].split()[:5] == ["0", "-", "damage", "position", "0"]
    assert lines[4].split()[-2:] == ["k1", "value-0" * 3]


def test_a_dump_rejects_a_partition_that_does_not_exist(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["log", "dump", str(folder), "--partition", "orders-0", "--partition", "order-1"]) == 1
    assert capsys.readouterr() == ("", f"kcoord log: {folder}: there is no partition folder order-1\n")


@pytest.mark.parametrize("limit", ["-1", "ten"])
def test_a_dump_rejects_a_wrong_limit(folder: Path, capsys: pytest.CaptureFixture[str], limit: str) -> None:
    with pytest.raises(SystemExit):
        main(["log", "dump", str(folder), "--limit", limit])
    assert f"argument --limit: {limit!r} is not a whole number from 0" in capsys.readouterr().err


def test_import_and_backup(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, backup = folder.parent / "imported", folder.parent / "backup"
    command = ["log", "import", str(folder), "--into", str(target), "--override", "node.id=1"]
    assert main([*command, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["classic groups"], printed["committed offsets"]) == (
        1,
        2,
    )
    assert main(command) == 1
    assert "already exists" in capsys.readouterr().err
    assert main(["log", "backup", str(target), "--into", str(backup), "--verify"]) == 0
    assert "would serve 2 topics, 1 groups, 2 offsets" in capsys.readouterr().out
    assert main(["log", "backup", str(backup), "--verify", "--json"]) == 0
    served = json.loads(capsys.readouterr().out)
    assert (served["sound"], served["topics"], served["groups"], served["offsets"]) == (True, 2, 1, 2)
    again = folder.parent / "again"
    assert main(["log", "backup", str(target), "--into", str(again), "--json"]) == 0
    copied = json.loads(capsys.readouterr().out)
    assert (copied["backup"], copied["repeated"]) == (str(again), 0)
    assert copied["partitions"] > 0
    flip(logs(backup, "orders-0")[0], 1)
    assert main(["log", "backup", str(backup), "--verify"]) == 1
    assert "not sound" in capsys.readouterr().out
    assert main(["log", "backup", str(target)]) == 2


def test_a_path_without_logs_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["log", "verify", str(tmp_path / "missing")]) == 1
    assert main(["log", "verify", str(tmp_path)]) == 1
    assert "there is no partition folder" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["log", "no-such-command"])
