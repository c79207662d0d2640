# SPDX-License-Identifier: Apache-2.0
"""Bytes of Kafka's own serializer, and the command that checks them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from kcoord_protocol import vectors
from kcoord_protocol.json_form import from_json
from kcoord_protocol.messages import message_class
from tests.support.shared import shared

GOOD = {"name": "OffsetDeleteRequest", "version": 0, "hex": "00016700000000", "doc": {"groupId": "g", "topics": []}}


@pytest.mark.parametrize(("folder", "checked", "skipped"), [("kafka-facts", 2031, 0), ("kafka-facts-4.4.0", 2061, 150)])
def test_kafkas_bytes(folder: str, checked: int, skipped: int) -> None:
    count = skipped_count = 0
    for vector in vectors.read_vectors(shared(folder, "vectors.jsonl.gz")):
        name, version, document = str(vector["name"]), int(str(vector["version"])), vector["doc"]
        if vectors.is_skipped(name):
            skipped_count += 1
            continue
        assert vectors.check_vector(vector) is None, (name, version)
        assert isinstance(document, dict)
        message = from_json(message_class(name), document, version)
        assert message.encode(version).hex() == vector["hex"], (name, version)
        count += 1
    assert (count, skipped_count) == (checked, skipped)


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz"])
def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], suffix: str) -> None:
    path = tmp_path / f"v.{suffix}"
    write_lines(path, [GOOD])
    assert vectors.main([str(path)]) == 0
    assert capsys.readouterr().out == "1 passed, 0 failed\n"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"name": "NoSuchRequest"}, "no schema"),
        ({"version": 9}, "UnsupportedVersionError"),
        ({"hex": "0001"}, "DecodeError: group_id"),
        ({"doc": {"groupId": "h", "topics": []}}, "decoded to"),
        ({"doc": {"groupId": "g", "topics": [], "more": 1}}, "decoded to"),
    ],
)
def test_failures_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], problem: str
) -> None:
    path = tmp_path / "v.jsonl"
    write_lines(path, [GOOD | change, GOOD])
    assert vectors.main([str(path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert problem in lines[0]
    assert lines[-1] == "1 passed, 1 failed"


def test_messages_of_groups_that_are_not_served_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "v.jsonl"
    write_lines(path, [GOOD | {"name": "ShareFetchRequest"}, GOOD])
    assert vectors.main([str(path), str(path)]) == 0
    assert capsys.readouterr().out == "1 passed, 0 failed, 1 skipped (share and streams groups)\n" * 2


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert vectors.main([]) == 2
    assert "usage" in capsys.readouterr().err


def test_numbers_without_json_form() -> None:
    comparable = vectors._comparable
    assert comparable([float("nan"), float("inf")]) == comparable(["NaN", "Infinity"])
    assert comparable(True) != comparable(1)


def write_lines(path: Path, items: list[dict[str, Any]]) -> None:
    data = "".join(json.dumps(item) + "\n" for item in items).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
