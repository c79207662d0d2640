# SPDX-License-Identifier: Apache-2.0
"""The small files have the bytes that Kafka writes, and errors name the malformed line."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kcoord.storage import checkpoints
from kcoord.storage.errors import MalformedCheckpointError, MetaPropertiesError
from kcoord.storage.file_system import FileSystem, read_file, write_file_atomically
from kcoord.storage.memory_file_system import MemoryFileSystem

TOPIC_ID = bytes(range(16))


@pytest.fixture
def fs() -> MemoryFileSystem:
    return MemoryFileSystem()


def test_offset_checkpoint(fs: MemoryFileSystem) -> None:
    offsets = {("b", 10): 7, ("a", 0): 2**40, ("b", 2): 0}
    checkpoints.write_offset_checkpoint(fs, "f", offsets)
    assert read_file(fs, "f") == b"0\n3\na 0 1099511627776\nb 2 0\nb 10 7\n"
    assert checkpoints.read_offset_checkpoint(fs, "f") == offsets
    checkpoints.write_offset_checkpoint(fs, "f", {})
    assert read_file(fs, "f") == b"0\n0\n"
    assert checkpoints.read_offset_checkpoint(fs, "f") == {}


def test_leader_epochs(fs: MemoryFileSystem) -> None:
    write_file_atomically(fs, "f", b"0\n5\n0 0\n2 2172\n4 2967\n6 4014\n8 4386\n")
    epochs = checkpoints.read_leader_epochs(fs, "f")
    assert epochs == [(0, 0), (2, 2172), (4, 2967), (6, 4014), (8, 4386)]
    before = read_file(fs, "f")
    checkpoints.write_leader_epochs(fs, "f", epochs)
    assert read_file(fs, "f") == before


def test_topic_id(fs: MemoryFileSystem) -> None:
    checkpoints.write_topic_id(fs, "f", TOPIC_ID)
    assert read_file(fs, "f") == b"version: 0\ntopic_id: AAECAwQFBgcICQoLDA0ODw"
    assert checkpoints.read_topic_id(fs, "f") == TOPIC_ID


def test_properties_as_java_writes_them(fs: MemoryFileSystem) -> None:
    write_file_atomically(fs, "f", b"#\n#Fri Nov 21 02:07:00 UTC 2026\ncluster.id=a-b_c\nnode.id = 1\n! x\nversion=1\n")
    assert checkpoints.read_properties(fs, "f") == {"cluster.id": "a-b_c", "node.id": "1", "version": "1"}


def test_missing_files_have_no_entries(fs: MemoryFileSystem) -> None:
    assert checkpoints.read_offset_checkpoint(fs, "f") == {}
    assert checkpoints.read_leader_epochs(fs, "f") == []
    assert checkpoints.read_topic_id(fs, "f") is None
    assert checkpoints.read_properties(fs, "f") is None


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "line 1"),
        (b"0\n", "line 1"),
        (b"1\n0\n", "line 1"),
        (b"0\nx\n", "line 2: 'x' is not a number"),
        (b"0\n2\na 0 1\n", "line 2: the count is 2, but the number of lines after it is 1"),
        (b"0\n1\na 0\n", "line 3: expected 3 fields"),
        (b"0\n1\na 0 x\n", "line 3: 'x' is not a number"),
        (b"0\n1\n\xff 0 1\n", "not UTF-8 text"),
    ],
)
def test_malformed_offset_checkpoints(fs: MemoryFileSystem, data: bytes, reason: str) -> None:
    write_file_atomically(fs, "f", data)
    with pytest.raises(MalformedCheckpointError, match=reason):
        checkpoints.read_offset_checkpoint(fs, "f")


@pytest.mark.parametrize(
    ("read", "data", "error"),
    [
        (checkpoints.read_topic_id, b"version: 1\ntopic_id: AAECAwQFBgcICQoLDA0ODw", MalformedCheckpointError),
        (checkpoints.read_topic_id, b"version: 0\n", MalformedCheckpointError),
        (checkpoints.read_topic_id, b"version: 0\ntopic_id: ???", MalformedCheckpointError),
        (checkpoints.read_properties, b"cluster.id\n", MetaPropertiesError),
        (checkpoints.read_properties, b"\xff\xfe", MetaPropertiesError),
        (checkpoints.read_leader_epochs, b"0\n1\n1\n", MalformedCheckpointError),
        (checkpoints.read_leader_epochs, b"0\n1\n1 21", MalformedCheckpointError),
    ],
)
def test_other_malformed_files(
    fs: MemoryFileSystem, read: Callable[[FileSystem, str], object], data: bytes, error: type[Exception]
) -> None:
    write_file_atomically(fs, "f", data)
    with pytest.raises(error, match="f"):
        read(fs, "f")
