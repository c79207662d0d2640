# SPDX-License-Identifier: Apache-2.0
"""Copies of files, durable when they are done, and new folders that appear when they are complete."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from kcoord.storage.errors import StorageError
from kcoord.storage.file_system import File, FileSystem, join, make_durable_dirs, parent, write_all

INCOMPLETE_SUFFIX: Final = ".incomplete"
_CHUNK_BYTES: Final = 1 << 20


@contextmanager
def new_folder(fs: FileSystem, target: str, what: str) -> Iterator[str]:
    """Gives a folder to build in, which becomes `target` at the end of the block. If the block raises, nothing is left.

    A `target` that already holds something is refused, and so is the rest of an earlier run that was killed.
    """
    building = target + INCOMPLETE_SUFFIX
    for path in (target, building):
        if fs.exists(path) and (path == building or fs.list_dir(path)):
            raise StorageError(f"{path}: is there already; {what} makes a new folder")
    make_durable_dirs(fs, building)
    try:
        yield building
    except BaseException:
        remove_tree(fs, building)
        raise
    if fs.exists(target):
        fs.remove_dir(target)
    fs.rename(building, target)
    fs.sync_dir(parent(target))


def copy_file(fs: FileSystem, source: str, target: str) -> int:
    """Copy a whole file; returns its size. The caller syncs the folder."""
    file = fs.open_read(source)
    try:
        return copy_range(fs, file, 0, file.size(), target)
    finally:
        file.close()


def copy_range(fs: FileSystem, file: File, position: int, end: int, target: str) -> int:
    """Append [position, end) of an open file to `target`, which is made where it is missing; returns the bytes."""
    copy = fs.open_append(target)
    begin = position
    try:
        while position < end:
            data = file.read_at(position, min(_CHUNK_BYTES, end - position))
            if not data:
                break
            write_all(copy, data)
            position += len(data)
        copy.datasync()
    finally:
        copy.close()
    return position - begin


def remove_tree(fs: FileSystem, path: str) -> None:
    """Remove a folder of files and of folders of files."""
    for name in fs.list_dir(path):
        entry = join(path, name)
        try:
            names = fs.list_dir(entry)
        except NotADirectoryError:
            fs.remove(entry)
            continue
        for each in names:
            fs.remove(join(entry, each))
        fs.remove_dir(entry)
    fs.remove_dir(path)
