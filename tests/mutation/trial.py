# SPDX-License-Identifier: Apache-2.0
"""The trial of one mutant, in a forked process that has not imported kcoord.

First the unit tests run that call the mutated function. Then the system runs: the simulation for the broker's packages,
tests against a real broker for the client.

Each test and the simulation have a limit of CPU time, and a higher limit of real time for mutants that block forever.
The process does not handle the signals of these timers, so they kill it.
"""

from __future__ import annotations

import importlib
import resource
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import pytest

from tests.mutation.call_map import UnitTest
from tests.mutation.mutants import ROOT, Mutant
from tests.mutation.mutated_import import MutatedModuleFinder
from tests.mutation.sessions import make_hypothesis_repeatable, run_pytest

FIRST_FILES = 2
"""The number of test files that run first. The tests that are closest to a mutant kill most mutants."""
SYSTEM_TESTS = "tests/integration/"
SIMULATION_SECONDS = 60
SEEDS = 60
STEPS = 400
_MOST_BYTES = 6 << 30
_KILLED_BY_UNIT_TEST = 10
_KILLED_BY_SYSTEM = 11
_TIMEOUTS = (-signal.SIGPROF, -signal.SIGALRM)


class Verdict(Enum):
    """How a trial ended. Every verdict but SURVIVED kills the mutant."""

    UNIT_TESTS = "killed by unit tests"
    SYSTEM = "killed by the system"
    TIMEOUT = "timed out"
    CRASH = "crashed"
    SURVIVED = "survived"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The verdict of a trial, and where it was reached."""

    verdict: Verdict
    place: str
    """The test that failed or exceeded its time, or the simulation."""


def run_trial(mutant: Mutant, tests: Sequence[UnitTest], with_simulation: bool, folder: Path) -> int:
    """Runs in a process of its own and returns the exit code for `outcome`."""
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))
    MutatedModuleFinder(mutant.module, mutant.apply((ROOT / mutant.file).read_text())).install()
    unit_tests = [test for test in tests if not test.file.startswith(SYSTEM_TESTS)]
    files = _most_promising_files(unit_tests)
    for chosen in (files[:FIRST_FILES], files[FIRST_FILES:]):
        if _fails([test for test in unit_tests if test.file in chosen], folder):
            return _KILLED_BY_UNIT_TEST
    if _fails([test for test in tests if test.file.startswith(SYSTEM_TESTS)], folder):
        return _KILLED_BY_SYSTEM
    return _KILLED_BY_SYSTEM if with_simulation and _simulation_fails(folder) else 0


def _most_promising_files(tests: Sequence[UnitTest]) -> list[str]:
    scores: dict[str, float] = {}
    for test in tests:
        scores[test.file] = scores.get(test.file, 0) + test.score
    return sorted(scores, key=lambda file: (-scores[file], file))


def _fails(tests: Sequence[UnitTest], folder: Path) -> bool:
    files = list(dict.fromkeys(test.file for test in tests))
    return bool(files) and run_pytest(["-x", *files], _Selection(tests, folder), folder) != pytest.ExitCode.OK


def outcome(exit_code: int, folder: Path) -> Outcome:
    """Returns the outcome of a trial from its exit code and its folder."""
    place = (folder / "place").read_text() if (folder / "place").exists() else ""
    if exit_code in _TIMEOUTS:
        return Outcome(Verdict.TIMEOUT, place)
    verdicts = {0: Verdict.SURVIVED, _KILLED_BY_UNIT_TEST: Verdict.UNIT_TESTS, _KILLED_BY_SYSTEM: Verdict.SYSTEM}
    return Outcome(verdicts.get(exit_code, Verdict.CRASH), place)


class _Selection:
    """A pytest plugin that runs the chosen tests in the given order, and writes the current test to a file."""

    def __init__(self, tests: Sequence[UnitTest], folder: Path) -> None:
        self._order = {test.node_id: position for position, test in enumerate(tests)}
        self._seconds = {test.node_id: test.seconds for test in tests}
        self._folder = folder

    def pytest_configure(self) -> None:
        make_hypothesis_repeatable()
        _enter(self._folder, "import of the tests", 30)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted(
            (item for item in items if item.nodeid in self._order), key=lambda item: self._order[item.nodeid]
        )

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        _enter(self._folder, nodeid, 5 + 3 * self._seconds[nodeid])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            (self._folder / "place").write_text(report.nodeid)


def _simulation_fails(folder: Path) -> bool:
    _enter(folder, "simulation", SIMULATION_SECONDS)
    simulate = importlib.import_module("kcoord.cli.simulate")
    for seed in range(SEEDS):
        options = ["--seed", str(seed), "--steps", str(STEPS)]
        # With --json a failure is not shrunk.
        if simulate.main([*options, "--json"]) != 0:
            (folder / "place").write_text(f"kcoord simulate {' '.join(options)}")
            return True
    return False


def _enter(folder: Path, place: str, seconds: float) -> None:
    (folder / "place").write_text(place)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    # A test may have to start a broker on a busy machine.
    signal.setitimer(signal.ITIMER_REAL, 60 + 4 * seconds)
