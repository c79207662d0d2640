# SPDX-License-Identifier: Apache-2.0
"""Opens the file system of a lake, for files that Spark does not write. Both Spark and pyarrow must support it."""

from __future__ import annotations

import os

from pyarrow import fs


def file_system(uri: str) -> tuple[fs.FileSystem, str]:
    """Returns the file system of a URI or local path, and the path in it.

    Raises ValueError or OSError if pyarrow has no such file system.
    """
    if "://" not in uri:
        return fs.LocalFileSystem(), os.path.abspath(uri)
    system, path = fs.FileSystem.from_uri(uri)
    return system, str(path)
