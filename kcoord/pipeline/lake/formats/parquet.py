# SPDX-License-Identifier: Apache-2.0
"""Tables as folders of Parquet files.

Theory of operation. All files in the folder of a table belong to it, except the hidden ones. `_hidden.json` in the
folder names these, and its number rises with each change. Other programs that read the folder do not know it, so they
may see half of a change. `rewrite` changes a table in one step for the readers of this package:

1. Spark writes the new files into a folder whose name begins with an underscore, so that nobody reads them.
2. The names that they will have become hidden, and they move to these names.
3. One new `_hidden.json` hides the replaced files instead of the new ones. This is the step.

The replaced files stay until `remove_replaced`, for readers that have begun before the step. A killed `rewrite` leaves
files that are hidden or in the folder of step 1; `remove_replaced` removes these too. If two programs rewrite a table
at the same time, the number in `_hidden.json` makes the slower one fail.

A reader lists the files between two looks at `_hidden.json`, and again if the number has changed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from typing import Final, NamedTuple
from uuid import uuid4

import pyarrow as pa
from pyarrow import fs
from pyspark.sql import DataFrame, SparkSession

from kcoord.pipeline.lake.errors import LakeError
from kcoord.pipeline.lake.files import replace_text, write_parts
from kcoord.pipeline.lake.formats.data_files import WITHOUT_DICTIONARY
from kcoord.pipeline.lake.formats.place import LakePlace
from kcoord.pipeline.lake.formats.store import CLUSTER, StoredFile
from kcoord.pipeline.lake.tables import LakeTable

_HIDDEN: Final = "_hidden.json"
_UNFINISHED: Final = "_rewrite-"
"""Prefix of the folders of step 1."""


class _Hidden(NamedTuple):
    """The number of the change, and the paths of hidden files in the folder of the table."""

    number: int
    paths: frozenset[str]


class ParquetStore:
    """Reads and writes the lake's tables as folders of Parquet files. A cluster has a folder in each table."""

    def __init__(self, session: Callable[[], SparkSession], place: LakePlace, cluster: str | None) -> None:
        self._session = session
        self._place = place
        self._folder = "" if cluster is None else f"/{CLUSTER}={cluster}"

    def read(self, table: LakeTable) -> DataFrame | None:
        if not self._place.exists(f"{table.layer}/{table.name}{self._folder}"):
            return None
        hidden = self._hidden(table)
        while True:
            frame = self._read_without(table, hidden.paths)
            before, hidden = hidden, self._hidden(table)
            if hidden.number == before.number:
                return frame

    def revision(self, table: LakeTable) -> int:
        return self._hidden(table).number

    def replace(self, table: LakeTable, frame: DataFrame, *, whole: bool, parts: Collection[str]) -> None:
        old = self._files_of(table, parts)
        writer = frame.write.mode("overwrite").options(**WITHOUT_DICTIONARY)
        if table.partitioned_by:
            writer = writer.partitionBy(*table.partitioned_by)
            writer = writer.option("partitionOverwriteMode", "static" if whole else "dynamic")
        writer.parquet(self._uri(table))
        self._remove(table, old)

    def replace_rows(self, table: LakeTable, rows: pa.Table, *, whole: bool, parts: Collection[str]) -> None:
        old = self._files_of(table, parts)
        if whole or not table.partitioned_by:
            self._place.files.delete_dir_contents(self._path(table), missing_dir_ok=True)
        write_parts(self._place.files, self._path(table), table.partitioned_by, rows, replaces=True)
        self._remove(table, old)

    def append(self, table: LakeTable, rows: pa.Table) -> None:
        write_parts(self._place.files, self._path(table), table.partitioned_by, rows)

    def stored_files(self, table: LakeTable) -> list[StoredFile]:
        paths = self._sizes(table)
        return [StoredFile(_value(table, path), paths[path]) for path in paths.keys() - self._hidden(table).paths]

    def rewrite(self, table: LakeTable, frame: DataFrame | None, values: Sequence[str]) -> None:
        root, unfinished = self._path(table), f"{_UNFINISHED}{uuid4()}"
        hidden = self._hidden(table)
        rewritten = frozenset(values)
        replaced = {path for path in self._sizes(table) if _value(table, path) in rewritten}
        moves = {} if frame is None else self._write_unfinished(table, frame, unfinished)
        expected = self._hide(table, hidden, hidden.paths | moves.keys())
        for path, source in moves.items():
            self._place.files.create_dir(f"{root}/{_folder(path)}")
            self._place.files.move(source, f"{root}/{path}")
        if moves:
            self._place.files.delete_dir(f"{root}/{unfinished}")
        self._hide(table, expected, hidden.paths | replaced)

    def remove_replaced(self, table: LakeTable) -> None:
        if not self._place.exists(f"{table.layer}/{table.name}{self._folder}"):
            return
        hidden = self._hidden(table)
        paths = self._sizes(table).keys()
        for path in hidden.paths & paths:
            self._place.files.delete_file(f"{self._path(table)}/{path}")
        # Spark lists each folder, and leaves files with checksums in it.
        for folder in {_folder(path) for path in hidden.paths & paths} - {
            _folder(path) for path in paths - hidden.paths
        }:
            self._place.files.delete_dir(f"{self._path(table)}/{folder}")
        for info in self._place.files.get_file_info(fs.FileSelector(self._path(table))):
            if info.base_name.startswith(_UNFINISHED):
                self._place.files.delete_dir(info.path)
        if hidden.paths:
            self._hide(table, hidden, frozenset())

    def _read_without(self, table: LakeTable, hidden: frozenset[str]) -> DataFrame:
        reader = self._session().read.schema(table.schema)
        if not hidden:
            return reader.parquet(self._uri(table))
        paths = [f"{self._uri(table)}/{path}" for path in sorted(self._sizes(table).keys() - hidden)]
        if not paths:
            return self._session().createDataFrame([], table.schema)
        return reader.option("basePath", self._uri(table)).parquet(*paths)

    def _write_unfinished(self, table: LakeTable, frame: DataFrame, folder: str) -> dict[str, str]:
        """Writes the frame. Returns the path that each new file will have, and the present path."""
        writer = frame.write.options(compression="zstd", **WITHOUT_DICTIONARY).partitionBy(*table.partitioned_by)
        writer.parquet(f"{self._uri(table)}/{folder}")
        root = f"{self._path(table)}/{folder}/"
        infos = self._place.files.get_file_info(fs.FileSelector(root, recursive=True))
        return {info.path.removeprefix(root): info.path for info in infos if info.path.endswith(".parquet")}

    def _files_of(self, table: LakeTable, parts: Collection[str]) -> set[str]:
        """Returns the paths of the files whose last column of the layout has one of the values."""
        return {path for path in self._sizes(table) if _value(table, path) in parts} if parts else set()

    def _remove(self, table: LakeTable, old: set[str]) -> None:
        """Removes old files after a write. A part that got rows has lost its old files already."""
        for path in old and old & self._sizes(table).keys():
            self._place.files.delete_file(f"{self._path(table)}/{path}")

    def _sizes(self, table: LakeTable) -> dict[str, int]:
        """Returns the paths of all complete files in the folder of the table, and their sizes."""
        root = f"{self._path(table)}/"
        infos = self._place.files.get_file_info(fs.FileSelector(root, recursive=True, allow_not_found=True))
        sizes = {info.path.removeprefix(root): info.size for info in infos if info.path.endswith(".parquet")}
        return {path: size for path, size in sizes.items() if not path.startswith("_") and "/_" not in path}

    def _hidden(self, table: LakeTable) -> _Hidden:
        try:
            with self._place.files.open_input_stream(f"{self._path(table)}/{_HIDDEN}") as file:
                content = json.loads(file.read())
        except FileNotFoundError:
            return _Hidden(0, frozenset())
        return _Hidden(content["number"], frozenset(content["paths"]))

    def _hide(self, table: LakeTable, expected: _Hidden, paths: frozenset[str]) -> _Hidden:
        """Replaces the hidden files. Raises LakeError if another program has replaced them meanwhile."""
        if self._hidden(table).number != expected.number:
            raise LakeError(f"{self._uri(table)}: another job rewrites the table; run this one again later")
        hidden = _Hidden(expected.number + 1, paths)
        text = json.dumps({"number": hidden.number, "paths": sorted(paths)})
        replace_text(self._place.files, f"{self._path(table)}/{_HIDDEN}", text)
        return hidden

    def _path(self, table: LakeTable) -> str:
        return f"{self._place.path_of(table)}{self._folder}"

    def _uri(self, table: LakeTable) -> str:
        return f"{self._place.table_uri(table)}{self._folder}"


def _value(table: LakeTable, path: str) -> str:
    """Returns the value of the last column of the layout, which is the name of the file's folder."""
    return _folder(path).rpartition("/")[2].removeprefix(f"{table.partitioned_by[-1]}=")


def _folder(path: str) -> str:
    return path.rpartition("/")[0]
