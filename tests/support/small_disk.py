# SPDX-License-Identifier: Apache-2.0
"""A small file system that tests can fill: a tmpfs of some megabytes."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.shared import missing

_CHUNK = bytes(4096)


class SmallDisk:
    """A small file system that is mounted at `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ballast = folder / "ballast"

    def fill(self) -> None:
        """Writes a file until the disk is full."""
        with self._ballast.open("ab", buffering=0) as ballast:
            try:
                while ballast.write(_CHUNK):
                    continue
            except OSError:
                return

    def free(self) -> None:
        """Deletes the file of `fill`."""
        self._ballast.unlink()


@contextmanager
def small_disk(folder: Path, mebibytes: int) -> Iterator[SmallDisk]:
    """Mounts a small file system, and unmounts it at the end. Needs root."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m,mode=0700", "kcoord-small-disk", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        missing(f"a small file system cannot be mounted here: {done.stderr.strip()}")
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
