# SPDX-License-Identifier: Apache-2.0
"""A group member in its own process, which a test kills."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType

from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]


class Victim:
    """Runs `python -m MODULE ARGUMENT...` until it is killed. The module prints `ready` when it owns partitions."""

    def __init__(self, module: str, *arguments: str) -> None:
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the victim)
        command = [sys.executable, "-m", module, *arguments]
        self._process = subprocess.Popen(command, stdout=self._output, stderr=subprocess.STDOUT, cwd=ROOT)

    def __enter__(self) -> Victim:
        try:
            wait_until(self._is_ready, f"the member to be killed owns partitions, it prints {self._printed()!r}")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.kill()
        self._output.close()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def _is_ready(self) -> bool:
        printed = self._printed()
        assert self._process.poll() is None, printed
        return "ready\n" in printed

    def _printed(self) -> str:
        self._output.seek(0)
        return self._output.read().decode(errors="replace")
