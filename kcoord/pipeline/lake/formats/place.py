# SPDX-License-Identifier: Apache-2.0
"""The folder of a lake, with its names in Spark and in pyarrow."""

from __future__ import annotations

from dataclasses import dataclass

from pyarrow import fs

from kcoord.pipeline.lake.files import file_system
from kcoord.pipeline.lake.formats.s3 import S3Options
from kcoord.pipeline.lake.tables import LakeTable
from kcoord.pipeline.log_files import long_name_in


@dataclass(frozen=True, slots=True)
class LakePlace:
    """The folder of a lake.

    `uri` is Spark's name of the folder. `root` is its path in pyarrow's file system `files`. `s3` has the options of
    an S3 URI.
    """

    uri: str
    files: fs.FileSystem
    root: str
    s3: S3Options | None = None

    @classmethod
    def of(cls, uri: str) -> LakePlace:
        """Finds the file system of a URI. Raises ValueError or OSError if there can be no such folder."""
        if not uri:
            raise ValueError("its URI is empty")
        problem = long_name_in(uri)
        if problem is not None:
            raise ValueError(problem)
        s3 = S3Options.of(uri)
        if s3 is not None:
            files, root = file_system(uri)
            return cls(s3.uri, files, root.rstrip("/"), s3)
        files, root = file_system(uri.rstrip("/"))
        return cls(uri.rstrip("/") if "://" in uri else root, files, root)

    @property
    def is_local(self) -> bool:
        return isinstance(self.files, fs.LocalFileSystem)

    def table_uri(self, table: LakeTable) -> str:
        return f"{self.uri}/{table.layer}/{table.name}"

    def path_of(self, table: LakeTable) -> str:
        """Returns the path of a table's folder in `files`."""
        return f"{self.root}/{table.layer}/{table.name}"

    def exists(self, path: str) -> bool:
        """True if there is a file or folder at a path under the root."""
        return self.files.get_file_info(f"{self.root}/{path}").type is not fs.FileType.NotFound
