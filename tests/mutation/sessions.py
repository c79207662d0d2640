# SPDX-License-Identifier: Apache-2.0
"""pytest sessions in forked processes.

They use no caches, do not rewrite assertions, and run the same Hypothesis examples each time.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType

import pytest
from hypothesis import Phase, settings

from tests.mutation.mutants import ROOT

CACHE = ROOT / ".mutation_cache"
_FORK = multiprocessing.get_context("fork")
_PROFILE = "mutation"

Finished = Callable[[int, Path], None]
"""Called with the exit code of a process, which is negative after a signal, and its folder."""


def run_pytest(arguments: Sequence[str], plugin: object, folder: Path) -> int:
    """Runs pytest in this process, without the tests that need Java, and returns its exit code."""
    options = [
        "-q",
        "-m",
        "not java",
        "--tb=short",
        "--assert=plain",
        "-p",
        "no:cacheprovider",
        "-o",
        "faulthandler_timeout=0",
    ]
    return int(pytest.main([*options, f"--basetemp={folder / 'pytest'}", *arguments], plugins=[plugin]))


def make_hypothesis_repeatable() -> None:
    """Loads a Hypothesis profile with fixed examples, which neither shrinks nor stores failures.

    The profile derives from that of tests/conftest.py, so this runs after conftest.py.
    """
    settings.register_profile(
        _PROFILE,
        settings(),
        derandomize=True,
        database=None,
        phases=(Phase.explicit, Phase.generate, Phase.target),
    )
    settings.load_profile(_PROFILE)


class ForkedProcesses:
    """Runs functions in forked processes, at most `most` at a time, each with a temporary folder of its own.

    The exit code of a process is the result of its function. Its output goes to the file `output` in the folder.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._running: dict[int, tuple[BaseProcess, tempfile.TemporaryDirectory[str], Finished]] = {}

    def __enter__(self) -> ForkedProcesses:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Waits for all processes, or ends them after an error."""
        if error is not None:
            for process, folder, _ in self._running.values():
                _kill_group(process)
                process.join()
                folder.cleanup()
            self._running.clear()
        while self._running:
            self._wait()

    def run(self, function: Callable[[Path], int], finished: Finished) -> None:
        """Starts the function as soon as fewer than `most` processes run."""
        while len(self._running) >= self._most:
            self._wait()
        folder = tempfile.TemporaryDirectory(prefix="kcoord-mutation-", ignore_cleanup_errors=True)
        process = _FORK.Process(target=_in_child, args=(function, Path(folder.name)))
        process.start()
        self._running[process.sentinel] = (process, folder, finished)

    def _wait(self) -> None:
        for sentinel in wait(list(self._running)):
            assert isinstance(sentinel, int)
            process, folder, finished = self._running.pop(sentinel)
            process.join()
            assert process.exitcode is not None
            _kill_group(process)
            with folder:
                finished(process.exitcode, Path(folder.name))


def _in_child(function: Callable[[Path], int], folder: Path) -> None:
    # Tests may start processes, which are killed as a group when this process ends.
    os.setsid()
    sys.dont_write_bytecode = False
    sys.pycache_prefix = str(CACHE / "bytecode")
    with open(folder / "output", "wb") as output, open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    code = function(folder)
    sys.stdout.flush()
    # A thread that a mutant has left running must not keep the process alive.
    os._exit(code)


def _kill_group(process: BaseProcess) -> None:
    assert process.pid is not None
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
