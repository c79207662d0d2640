# SPDX-License-Identifier: Apache-2.0
"""Copies files durably, and creates folders that get their name only when they are complete."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from kcoord.storage.errors import StorageError
from kcoord.storage.file_system import File, FileSystem, join, make_durable_dirs, parent, write_all

INCOMPLETE_SUFFIX: Final = ".incomplete"
_CHUNK_BYTES: Final = 1 << 20


@contextmanager
def new_folder(fs: FileSystem, target: str, what: str, sources: Iterable[str] = ()) -> Iterator[str]:
    """Yields a folder to build in, which is renamed to `target` at the end of the block.

    If the block raises, the folder is removed. Raises StorageError if `target` is not empty or is inside one of the
    `sources`, or if the incomplete folder of an earlier run that was killed is still there. `what` names the result in
    the error text.
    """
    building = target + INCOMPLETE_SUFFIX
    for source in sources:
        if target.startswith(f"{source}/"):
            raise StorageError(f"{target}: is inside {source}; {what} does not change its source")
    for path in (target, building):
        if fs.exists(path) and (path == building or fs.list_dir(path)):
            raise StorageError(f"{path}: already exists; {what} needs a new folder")
    make_durable_dirs(fs, building)
    try:
        with named_errors(building):
            yield building
    except BaseException:
        remove_tree(fs, building)
        raise
    if fs.exists(target):
        fs.remove_dir(target)
    fs.rename(building, target)
    fs.sync_dir(parent(target))


@contextmanager
def named_errors(path: str) -> Iterator[None]:
    """Adds `path` to an OSError without a file name, such as that of a write to a full disk."""
    try:
        yield
    except OSError as error:
        if isinstance(error, StorageError) or error.filename is not None:
            raise
        raise StorageError(f"{path}: {error}") from error


def copy_file(fs: FileSystem, source: str, target: str) -> int:
    """Copies a whole file and returns its size. The caller syncs the folder."""
    file = fs.open_read(source)
    try:
        return copy_range(fs, file, 0, file.size(), target)
    finally:
        file.close()


def copy_range(fs: FileSystem, file: File, position: int, end: int, target: str) -> int:
    """Appends [position, end) of an open file to `target`, creating it if missing. Returns the number of bytes."""
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
    """Removes a folder that holds files and folders of files; no deeper levels."""
    for name in fs.list_dir(path):
        entry = join(path, name)
        try:
            file_names = fs.list_dir(entry)
        except NotADirectoryError:
            fs.remove(entry)
            continue
        for file_name in file_names:
            fs.remove(join(entry, file_name))
        fs.remove_dir(entry)
    fs.remove_dir(path)
