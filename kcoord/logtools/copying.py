# SPDX-License-Identifier: Apache-2.0
"""Copies of files, durable when they are done."""

from __future__ import annotations

from typing import Final

from kcoord.storage.file_system import File, FileSystem, join, write_all

_CHUNK_BYTES: Final = 1 << 20


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
