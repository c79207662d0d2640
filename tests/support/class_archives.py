# SPDX-License-Identifier: Apache-2.0
"""A cache folder of the user, and archives of the classes that the JVMs of tests load (AppCDS) in it.

With an archive a JVM of Spark takes 8 s of CPU time instead of 13 s until its first query is done, and a tool of Kafka
0.7 s instead of 1.1 s. The JVM ignores an archive that does not fit its class path.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

_SECONDS = 60


def cache_folder() -> Path:
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "kcoord-tests"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def only_one_makes(name: str) -> Iterator[None]:
    """Keeps other processes from making the file or folder `name` of the cache folder at the same time.

    Without a lock, each process of pytest-xdist would make it in the first run on a machine.
    """
    with (cache_folder() / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def archive_options(name: str, java: str, options: str, class_path: str, dump: Callable[[str], object]) -> str:
    """Returns the JVM options that use the archive `name`.

    Java, its options and the class path decide whether another archive is needed. If there is none, `dump` gets the
    options of a JVM that writes it at its end.
    """
    facts = zlib.crc32("\n".join((_version(java), options, class_path)).encode())
    archive = cache_folder() / f"{name}-{facts:08x}.jsa"
    with only_one_makes(archive.name):
        if not archive.exists():
            written = archive.with_suffix(f".{os.getpid()}")
            dump(f"-XX:ArchiveClassesAtExit={written} -Xlog:disable")
            assert written.exists(), f"{java} has not written {written}"
            written.replace(archive)
    return f"-XX:SharedArchiveFile={archive} -Xlog:disable"


@cache
def _version(java: str) -> str:
    return subprocess.run([java, "-version"], capture_output=True, text=True, timeout=_SECONDS).stderr
