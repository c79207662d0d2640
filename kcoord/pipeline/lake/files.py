# SPDX-License-Identifier: Apache-2.0
"""The files of a lake that are not written by Spark: on any file system that both Spark and pyarrow know."""

from __future__ import annotations

import os

from pyarrow import fs


def file_system(uri: str) -> tuple[fs.FileSystem, str]:
    """The file system of a URI or local path, and the path in it. ValueError or OSError where there is none."""
    if "://" not in uri:
        return fs.LocalFileSystem(), os.path.abspath(uri)
    found, path = fs.FileSystem.from_uri(uri)
    return found, str(path)
