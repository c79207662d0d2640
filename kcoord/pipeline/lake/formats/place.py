# SPDX-License-Identifier: Apache-2.0
"""The folder of a lake, as Spark names it and as pyarrow does."""

from __future__ import annotations

from dataclasses import dataclass

from pyarrow import fs

from kcoord.pipeline.lake.files import file_system
from kcoord.pipeline.lake.tables import Table


@dataclass(frozen=True, slots=True)
class Place:
    """`uri` is Spark's name of the folder; `root` is the path in the file system `files`."""

    uri: str
    files: fs.FileSystem
    root: str

    @classmethod
    def of(cls, uri: str) -> Place:
        """Raises ValueError or OSError where pyarrow has no such file system."""
        files, root = file_system(uri.rstrip("/"))
        return cls(uri.rstrip("/") if "://" in uri else root, files, root)

    @property
    def is_local(self) -> bool:
        return isinstance(self.files, fs.LocalFileSystem)

    def table_uri(self, table: Table) -> str:
        return f"{self.uri}/{table.layer}/{table.name}"

    def exists(self, path: str) -> bool:
        """Whether there is anything at a path under the root."""
        return self.files.get_file_info(f"{self.root}/{path}").type is not fs.FileType.NotFound
