# SPDX-License-Identifier: Apache-2.0
"""What the next leader of a partition must know about its log: a file that a leader leaves in the partition's folder.

Checkpoints belong to the worker that writes them; a log that goes to another worker takes what they say along. Whoever
opens the log next takes the file over, and removes it when its own checkpoints say the same.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from kcoord.storage.errors import MalformedCheckpointError
from kcoord.storage.file_system import FileSystem, join, read_file, write_file_atomically

HANDOVER_FILE: Final = "leader-handover-checkpoint"
_VERSION: Final = "0"


class Handover(NamedTuple):
    """As in the checkpoints. `is_clean`: the log was closed in an orderly way, with everything durable."""

    recovery_point: int
    start_offset: int
    cleaned_offset: int
    is_clean: bool


def has_handover(file_system: FileSystem, folder: str) -> bool:
    return file_system.exists(join(folder, HANDOVER_FILE))


def read_handover(file_system: FileSystem, folder: str) -> Handover | None:
    """None where there is no such file; MalformedCheckpointError where it cannot be read."""
    if not has_handover(file_system, folder):
        return None
    path = join(folder, HANDOVER_FILE)
    fields = read_file(file_system, path).decode("ascii", errors="replace").split()
    if len(fields) != 1 + len(Handover._fields) or fields[0] != _VERSION or not all(map(str.isdecimal, fields)):
        raise MalformedCheckpointError(f"{path}: expected the version 0 and four numbers")
    recovery_point, start_offset, cleaned_offset, is_clean = map(int, fields[1:])
    return Handover(recovery_point, start_offset, cleaned_offset, bool(is_clean))


def write_handover(file_system: FileSystem, folder: str, handover: Handover) -> None:
    """Durable on return."""
    text = f"{_VERSION}\n{' '.join(str(int(value)) for value in handover)}\n"
    write_file_atomically(file_system, join(folder, HANDOVER_FILE), text.encode())


def remove_handover(file_system: FileSystem, folder: str) -> None:
    file_system.remove(join(folder, HANDOVER_FILE))
    file_system.sync_dir(folder)
