# SPDX-License-Identifier: Apache-2.0
"""The file in a partition's folder that tells its next leader the state of the log.

Checkpoints belong to the worker that writes them. When a log moves to another worker, the old leader writes its entries
to this file. The worker that opens the log next reads the file, copies it to its own checkpoints, and then removes it.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from kcoord.storage.errors import MalformedCheckpointError
from kcoord.storage.file_system import FileSystem, join, read_file, write_file_atomically

HANDOVER_FILE: Final = "leader-handover-checkpoint"
_VERSION: Final = "0"


class Handover(NamedTuple):
    """The checkpoint entries of one log. `is_clean`: the log was closed orderly, with everything durable."""

    recovery_point: int
    start_offset: int
    cleaned_offset: int
    is_clean: bool


def has_handover(file_system: FileSystem, folder: str) -> bool:
    return file_system.exists(join(folder, HANDOVER_FILE))


def read_handover(file_system: FileSystem, folder: str) -> Handover | None:
    """Returns the handover, or None if the file does not exist. Raises MalformedCheckpointError if it is malformed."""
    if not has_handover(file_system, folder):
        return None
    path = join(folder, HANDOVER_FILE)
    fields = read_file(file_system, path).decode("ascii", errors="replace").split()
    if len(fields) != 1 + len(Handover._fields) or fields[0] != _VERSION or not all(map(str.isdecimal, fields)):
        raise MalformedCheckpointError(f"{path}: expected the version 0 and four numbers")
    recovery_point, start_offset, cleaned_offset, is_clean = map(int, fields[1:])
    return Handover(recovery_point, start_offset, cleaned_offset, bool(is_clean))


def write_handover(file_system: FileSystem, folder: str, handover: Handover) -> None:
    """Writes the file. It is durable on return."""
    text = f"{_VERSION}\n{' '.join(str(int(value)) for value in handover)}\n"
    write_file_atomically(file_system, join(folder, HANDOVER_FILE), text.encode())


def remove_handover(file_system: FileSystem, folder: str) -> None:
    file_system.remove(join(folder, HANDOVER_FILE))
    file_system.sync_dir(folder)
