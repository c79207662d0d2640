# SPDX-License-Identifier: Apache-2.0
"""Files of a lake that Spark does not write. Both Spark and pyarrow must support the file system."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import fs


def file_system(uri: str) -> tuple[fs.FileSystem, str]:
    """Returns the file system of a URI or local path, and the path in it.

    Raises ValueError or OSError if pyarrow has no such file system.
    """
    if "://" not in uri:
        return fs.LocalFileSystem(), os.path.abspath(uri)
    system, path = fs.FileSystem.from_uri(uri)
    return system, str(path)


def names_in(files: fs.FileSystem, folder: str) -> list[str]:
    """Returns the names in a folder; none if there is no such folder."""
    selector = fs.FileSelector(folder, allow_not_found=True)
    try:
        infos = files.get_file_info(selector)
    except FileNotFoundError:
        # pyarrow raises it if another process creates the folder meanwhile: there was none, and now there is one.
        infos = files.get_file_info(selector)
    return [info.base_name for info in infos]


def replace_text(files: fs.FileSystem, path: str, text: str) -> None:
    """Replaces a file. A reader sees either the old text or the new text, also while others replace the file."""
    files.create_dir(path.rpartition("/")[0])
    unfinished = f"{path}.{uuid4().hex}.new"
    with files.open_output_stream(unfinished) as file:
        file.write(text.encode())
    files.move(unfinished, path)


def write_parts(
    files: fs.FileSystem, root: str, layout: Sequence[str], rows: pa.Table, prefix: str = "", *, replaces: bool = False
) -> None:
    """Writes one Parquet file for each combination of values in the columns of the layout, as Spark lays out files.

    With a `prefix` for the names of the folders the files have these columns too. If it `replaces`, the files that a
    folder had are removed.
    """
    for values, part in _parts(rows, layout):
        folder = "/".join([root, *(f"{prefix}{name}={value}" for name, value in values.items())])
        files.create_dir(folder)
        name = f"part-{uuid4()}.parquet"
        # Spark ignores names that begin with an underscore, so it never reads a file that is not complete.
        unfinished = f"{folder}/_{name}"
        pq.write_table(part if prefix else part.drop_columns([*values]), unfinished, filesystem=files)
        if replaces:
            for info in files.get_file_info(fs.FileSelector(folder)):
                if info.path != unfinished:
                    files.delete_file(info.path)
        files.move(unfinished, f"{folder}/{name}")


def _parts(rows: pa.Table, layout: Sequence[str]) -> Iterator[tuple[Mapping[str, object], pa.Table]]:
    for values in rows.select(layout).group_by([*layout]).aggregate([]).to_pylist():
        part = rows
        for name, value in values.items():
            part = part.filter(pc.equal(part.column(name), pa.scalar(value, part.schema.field(name).type)))
        yield values, part
