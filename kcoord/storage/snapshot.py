# SPDX-License-Identifier: Apache-2.0
"""The snapshot file of a shard, in the partition's folder beside the log.

A snapshot only saves time. It is not used if it is missing, damaged, of another version, or ahead of its log. The file
is replaced atomically, so a crash leaves the old or the new one. If the log loses its end and grows again, offsets of
the snapshot could belong to other records, so such a snapshot is removed.

    magic (8 bytes), version (int16), offset from which the log has to be replayed, offset that the log must reach,
    time in ms (3 x int64), CRC-32C of all these fields (uint32)
    per chunk: kind (int16), length (uint32), CRC-32C of the bytes that begins with the kind (uint32), bytes
    end: kind -1, the number of chunks as length, the CRC-32C of all chunks' CRCs
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing, suppress
from struct import Struct
from typing import Final

from kcoord.runtime.snapshot import Chunk, Snapshot
from kcoord.storage.errors import StorageError
from kcoord.storage.file_system import FileSystem, join, parent, read_file, write_all
from kcoord.storage.log import Log
from kcoord_protocol.record_batch import crc32c

SNAPSHOT_FILE: Final = "shard-state.kcoord"
_MAGIC: Final = b"KCSHARD\n"
_VERSION: Final = 1
_HEADER: Final = Struct(">8shqqqI")
_CHUNK: Final = Struct(">hII")
_CRC_BYTES: Final = 4
_END: Final = -1


class SnapshotError(StorageError):
    """The file is not a snapshot of this version, or is damaged."""


def write_snapshot(file_system: FileSystem, directory: str, snapshot: Snapshot, name: str = SNAPSHOT_FILE) -> None:
    """Replaces the snapshot in a folder. It is durable on return."""
    assert 0 <= snapshot.offset <= snapshot.end_offset, (
        f"S-13: the log would be replayed from offset {snapshot.offset} after a snapshot of the state "
        f"at offset {snapshot.end_offset}"
    )
    path = join(directory, name)
    temporary = f"{path}.tmp"
    try:
        with closing(file_system.open_append(temporary)) as file:
            file.truncate(0)
            for data in _encode(snapshot):
                write_all(file, data)
            file.datasync()
        file_system.rename(temporary, path)
    except OSError:
        # If the disk is full, the logs need the space.
        with suppress(OSError):
            file_system.remove(temporary)
        raise
    file_system.sync_dir(parent(path))


def _encode(snapshot: Snapshot) -> Iterable[bytes]:
    fields = (_MAGIC, _VERSION, snapshot.offset, snapshot.end_offset, snapshot.created_ms)
    header = _HEADER.pack(*fields, 0)[:-_CRC_BYTES]
    yield header + crc32c(header).to_bytes(_CRC_BYTES, "big")
    all_crcs = 0
    for kind, data in snapshot.chunks:
        crc = _crc(kind, data)
        all_crcs = crc32c(crc.to_bytes(_CRC_BYTES, "big"), all_crcs)
        yield _CHUNK.pack(kind, len(data), crc)
        yield data
    yield _CHUNK.pack(_END, len(snapshot.chunks), all_crcs)


def _crc(kind: int, data: bytes | memoryview) -> int:
    return crc32c(data, kind & 0xFFFF)


def read_snapshot(file_system: FileSystem, directory: str, name: str = SNAPSHOT_FILE) -> Snapshot | None:
    """Returns the snapshot, or None if there is none. Raises SnapshotError if any byte of it is wrong."""
    path = join(directory, name)
    try:
        data = read_file(file_system, path)
    except FileNotFoundError:
        return None
    return _decode(path, data)


def may_miss_deletions(snapshot: Snapshot, log: Log, now_ms: int, tombstones_kept_ms: int) -> bool:
    """True if the log after the snapshot may lack tombstones for keys in the snapshot.

    Cleaning removes a tombstone `tombstones_kept_ms` after a pass, so a younger snapshot misses none. If the log after
    the snapshot has all of its records, it was not cleaned, and no tombstone is missing.
    """
    if now_ms - snapshot.created_ms < tombstones_kept_ms:
        return False
    expected = snapshot.offset
    for header, _ in log.batches(snapshot.offset):
        if header.base_offset > expected or header.records_count <= header.last_offset_delta:
            return True
        expected = header.next_offset
    return expected < log.end_offset


def remove_snapshot(file_system: FileSystem, directory: str) -> None:
    """Removes the snapshot durably, before the log can get other records at the snapshot's offsets."""
    file_system.remove(join(directory, SNAPSHOT_FILE))
    file_system.sync_dir(directory)


def _decode(path: str, data: bytes) -> Snapshot:
    if len(data) < _HEADER.size:
        raise SnapshotError(f"{path}: the file has {len(data)} bytes, but the header has {_HEADER.size}")
    magic, version, offset, end_offset, created_ms, crc = _HEADER.unpack_from(data)
    if magic != _MAGIC or version != _VERSION:
        raise SnapshotError(f"{path}: the file is not a snapshot of version {_VERSION}")
    if crc32c(data[: _HEADER.size - _CRC_BYTES]) != crc:
        raise SnapshotError(f"{path}: the CRC of the header does not match")
    view = memoryview(data)
    chunks: list[Chunk] = []
    position = _HEADER.size
    all_crcs = 0
    while position + _CHUNK.size <= len(data):
        kind, length, crc = _CHUNK.unpack_from(data, position)
        position += _CHUNK.size
        if kind == _END:
            if length != len(chunks) or crc != all_crcs or position != len(data):
                raise SnapshotError(f"{path}: the end mark at {position} does not fit the chunks before it")
            return Snapshot(offset, end_offset, created_ms, chunks)
        if _crc(kind, view[position : position + length]) != crc:
            raise SnapshotError(f"{path}: the CRC of the chunk at {position} does not match")
        all_crcs = crc32c(crc.to_bytes(_CRC_BYTES, "big"), all_crcs)
        chunks.append(Chunk(kind, data[position : position + length]))
        position += length
    raise SnapshotError(f"{path}: the file ends inside a chunk")
