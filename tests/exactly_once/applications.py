# SPDX-License-Identifier: Apache-2.0
"""The Java applications, each in a JVM of its own."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Self

from tests.support.java import QUICK_START
from tests.support.kafka_jars import streams_class_path

_SOURCES: Final = Path(__file__).parent / "java"
COPY: Final = _SOURCES / "CopyApplication.java"


class JavaApplication:
    """A Java program, which writes to a file. It is killed at the end of `with`."""

    def __init__(self, source: Path, arguments: Sequence[str], file: Path) -> None:
        self._command = ["java", "-Xmx192m", *QUICK_START.split(), "-cp", streams_class_path()]
        self._command += [str(source), *arguments]
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

    def kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.kill()
