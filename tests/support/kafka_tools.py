# SPDX-License-Identifier: Apache-2.0
"""Kafka's command-line tools, one after the other in one JVM: KafkaTools.java.

In a JVM of its own a tool takes 0.7 s of CPU time, nearly all of it before its first request.
"""

from __future__ import annotations

import struct
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, Final

from tests.support.shared import ROOT

SOURCE: Final = ROOT / "tests" / "integration" / "clients" / "java" / "KafkaTools.java"
_LENGTH: Final = struct.Struct(">i")


class KafkaTools:
    """A JVM that runs tools until this process ends. It starts with the first tool."""

    def __init__(self, command: Sequence[str], seconds: float) -> None:
        self._command = command
        self._seconds = seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Runs the tool with this class and these arguments. A JVM that takes too long is killed."""
        with self._lock:
            if self._process is None:
                self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/")
            process = self._process
            killer = threading.Timer(self._seconds, process.kill)
            killer.start()
            try:
                return _ask(process, words)
            except EOFError:
                self._process = None
                raise AssertionError(f"the JVM of {words} ended with {process.wait()}") from None
            finally:
                killer.cancel()


def _ask(process: subprocess.Popen[bytes], words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    assert process.stdin is not None
    assert process.stdout is not None
    encoded = [word.encode() for word in words]
    with suppress(BrokenPipeError):  # The end of the responses says that the JVM has ended.
        process.stdin.write(_LENGTH.pack(len(words)) + b"".join(_LENGTH.pack(len(word)) + word for word in encoded))
        process.stdin.flush()
    code = _number(process.stdout)
    out, err = (_read(process.stdout, _number(process.stdout)).decode() for _ in range(2))
    return subprocess.CompletedProcess(list(words), code, out, err)


def _number(stream: IO[bytes]) -> int:
    return int(_LENGTH.unpack(_read(stream, _LENGTH.size))[0])


def _read(stream: IO[bytes], size: int) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        raise EOFError
    return data
