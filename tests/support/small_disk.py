# SPDX-License-Identifier: Apache-2.0
"""A file system of its own that can be filled: a tmpfs of some megabytes."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.shared import missing

_CHUNK = bytes(4096)


class SmallDisk:
    """Mounted at `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ballast = folder / "ballast"

    def fill(self) -> None:
        """Takes every byte that is left."""
        with self._ballast.open("ab", buffering=0) as ballast:
            try:
                while ballast.write(_CHUNK):
                    continue
            except OSError:
                return

    def free(self) -> None:
        """Gives back what `fill` took."""
        self._ballast.unlink()


@contextmanager
def small_disk(folder: Path, mebibytes: int) -> Iterator[SmallDisk]:
    """Mounts it, and takes it away at the end. It needs the rights of an administrator."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m,mode=0700", "kcoord-small-disk", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        missing(f"a small file system cannot be mounted here: {done.stderr.strip()}")
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
