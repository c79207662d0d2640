# SPDX-License-Identifier: Apache-2.0
"""Applications in processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Self

from tests.exactly_once.work import SOURCE
from tests.support.java import SHORT_LIVED
from tests.support.kafka_jars import compiled, streams_class_path
from tests.support.shared import ROOT

_SOURCES: Final = Path(__file__).parent / "java"
_COPY: Final = _SOURCES / "CopyApplication.java"
_STREAMS: Final = _SOURCES / "StreamsApplication.java"


def java(source: Path, *arguments: str) -> list[str]:
    """Returns the command that runs a Java program."""
    class_path = f"{compiled(source, streams_class_path())}:{streams_class_path()}"
    return ["java", "-Xmx192m", *SHORT_LIVED.split(), "-cp", class_path, source.stem, *arguments]


def copy_command(
    address: str, target: str, transactional_id: str, protocol: str, settings: Sequence[str] = (), source: str = SOURCE
) -> list[str]:
    """Copies the source exactly once. The group has the name of the target."""
    return java(_COPY, address, source, target, target, transactional_id, protocol, *settings)


def streams_command(address: str, target: str, folder: Path, guarantee: str, settings: Sequence[str] = ()) -> list[str]:
    """Counts the numbers of each key with Kafka Streams. The application id is the name of the target."""
    return java(_STREAMS, address, SOURCE, target, target, str(folder), guarantee, *settings)


class Application:
    """A program that writes to a file. The end of `with` kills it, with the processes that it has started."""

    def __init__(self, command: Sequence[str], file: Path) -> None:
        self._command = command
        self._file = file
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def output(self) -> str:
        return self._file.read_text(errors="replace")

    def start(self) -> Self:
        """Starts the program, also after it was killed. Its output is added to the file."""
        with self._file.open("ab") as file:
            self._process = subprocess.Popen(
                self._command, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True
            )
        return self

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.kill()
