# SPDX-License-Identifier: Apache-2.0
"""The Java applications, each in a JVM of its own."""

from __future__ import annotations

import os
import subprocess
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Self

from tests.support.class_archives import cache_folder
from tests.support.java import SHORT_LIVED
from tests.support.kafka_jars import streams_class_path

_SOURCES: Final = Path(__file__).parent / "java"
COPY: Final = _SOURCES / "CopyApplication.java"
STREAMS: Final = _SOURCES / "StreamsApplication.java"
_COMPILE_SECONDS: Final = 60


def _compiled(source: Path) -> Path:
    """Returns the folder with the classes of a source. It is compiled once, into a cache folder of the user."""
    folder = cache_folder() / f"{source.stem}-{zlib.crc32(source.read_bytes()):08x}"
    if not folder.exists():
        written = folder.with_suffix(f".{os.getpid()}")
        command = ["javac", "-cp", streams_class_path(), "-d", str(written), str(source)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_SECONDS)
        assert done.returncode == 0, done.stdout + done.stderr
        # Another process may have compiled it meanwhile.
        if not folder.exists():
            written.rename(folder)
    return folder


class JavaApplication:
    """A Java program, which writes to a file. It is killed at the end of `with`."""

    def __init__(self, source: Path, arguments: Sequence[str], file: Path) -> None:
        class_path = f"{_compiled(source)}:{streams_class_path()}"
        self._command = ["java", "-Xmx192m", *SHORT_LIVED.split(), "-cp", class_path]
        self._command += [source.stem, *arguments]
        self._file = file
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def output(self) -> str:
        return self._file.read_text(errors="replace")

    def start(self) -> Self:
        """Starts the program, also after it was killed. Its output is added to the file."""
        with self._file.open("ab") as file:
            self._process = subprocess.Popen(self._command, stdout=file, stderr=subprocess.STDOUT)
        return self

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.kill()
