# SPDX-License-Identifier: Apache-2.0
"""Records which test calls which functions of the product, by running the tests once with a trace function.

The result of a test file stays in the cache until the file, the product or the tests' support changes. With --keep-map
only a change of the test file counts. Lines are not recorded: tracing lines costs several times as much, and most
functions are short.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from types import CodeType, FrameType

import pytest

from tests.mutation.mutants import ROOT, Mutant
from tests.mutation.sessions import CACHE, ForkedProcesses, make_hypothesis_repeatable, run_pytest

MOST_SECONDS = 40.0
"""The longest time that the unit tests of one mutant take together. Nearly every test calls some functions."""

Function = tuple[str, str]
"""File and qualified name."""


@dataclass(frozen=True, slots=True)
class UnitTest:
    """A test that passes without a mutant."""

    node_id: str
    seconds: float
    functions: frozenset[Function]

    @property
    def file(self) -> str:
        return self.node_id.partition("::")[0]

    @property
    def score(self) -> float:
        """High for quick tests that call few functions. If one of these functions is wrong, they are likely to fail."""
        return 1 / ((len(self.functions) + 1) * (self.seconds + 0.05))


class CallMap:
    """The tests by the functions that they call."""

    def __init__(self, tests: Iterable[UnitTest]) -> None:
        self.tests = list(tests)
        self._by_function: dict[Function, list[UnitTest]] = defaultdict(list)
        self._by_file: dict[str, set[UnitTest]] = defaultdict(set)
        for test in self.tests:
            for function in test.functions:
                self._by_function[function].append(test)
                self._by_file[function[0]].add(test)

    def tests_of(self, mutant: Mutant) -> list[UnitTest]:
        """Returns the tests that call the mutant's function, the highest score first, up to MOST_SECONDS.

        If no test calls it, the code may run during the import of its module. Then these are the tests that call any
        function of the module or of its direct importers.
        """
        tests: Iterable[UnitTest] = self._by_function.get((mutant.file, mutant.function), ())
        if not tests:
            tests = set().union(*(self._by_file[file] for file in (mutant.file, *_importers(mutant.module))))
        ordered = sorted(tests, key=lambda test: (-test.score, test.node_id))
        until = accumulate(test.seconds for test in ordered)
        return [test for test, seconds in zip(ordered, until, strict=True) if seconds <= MOST_SECONDS] or ordered[:1]


def make_call_map(targets: Sequence[str], processes: int, *, keep: bool = False) -> CallMap:
    """Runs the test files below the targets (files or folders), except those in the cache, and returns all calls.

    With `keep` the cached calls of a test file are used although the product has changed since.
    """
    files = sorted(
        path.relative_to(ROOT).as_posix()
        for target in targets
        for path in ([ROOT / target] if target.endswith(".py") else (ROOT / target).rglob("test_*.py"))
    )
    common = "" if keep else _digest(_common_files())
    digests = {file: (_digest([ROOT / file]), common) for file in files}
    stale = [file for file in files if _read(file, *digests[file]) is None]
    share = max(1, -(-len(stale) // (4 * processes)))
    with ForkedProcesses(processes) as forks:
        for start in range(0, len(stale), share):
            chunk = stale[start : start + share]
            forks.run(partial(_measure, {file: digests[file] for file in chunk}), _check)
    tests = [_read(file, *digests[file]) for file in files]
    return CallMap(test for of_file in tests if of_file is not None for test in of_file)


def _check(exit_code: int, folder: Path) -> None:
    if exit_code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        sys.exit(
            f"the tests cannot run without a mutant (exit code {exit_code}):\n"
            + (folder / "output").read_text(errors="replace")[-3000:]
        )


def _common_files() -> Iterator[Path]:
    """Yields the files of the product and of the tests' support."""
    for folder in ("kcoord", "protocol", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            if folder != "tests" or not path.name.startswith("test_"):
                yield path


def _measure(digests: dict[str, tuple[str, str]], folder: Path) -> int:
    recorder = _Recorder()
    code = run_pytest(list(digests), recorder, folder)
    for file, digest in digests.items():
        _write(file, *digest, recorder.tests.get(file, []))
    return code


class _Recorder:
    """A pytest plugin that records the functions that each test calls, in all threads."""

    def __init__(self) -> None:
        self.tests: dict[str, list[UnitTest]] = defaultdict(list)
        self._codes: set[CodeType] = set()
        self._functions: dict[CodeType, Function | None] = {}
        self._failed: set[str] = set()

    def pytest_configure(self) -> None:
        make_hypothesis_repeatable()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._codes.clear()
        started = time.perf_counter()
        sys.settrace(self._trace)
        threading.settrace(self._trace)
        try:
            result = yield
        finally:
            sys.settrace(None)
            threading.settrace(None)
        seconds = time.perf_counter() - started
        if item.nodeid not in self._failed:
            # A copy, because a thread that the test has left behind may still be adding to the set.
            functions = frozenset(filter(None, map(self._function, self._codes.copy())))
            test = UnitTest(item.nodeid, seconds, functions)
            self.tests[test.file].append(test)
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed:
            self._failed.add(report.nodeid)

    def _trace(self, frame: FrameType, event: str, argument: object) -> None:
        self._codes.add(frame.f_code)

    def _function(self, code: CodeType) -> Function | None:
        if code not in self._functions:
            path = Path(code.co_filename)
            is_product = path.is_relative_to(ROOT / "kcoord")
            # Comprehensions and lambdas have code objects of their own, which count as the function around them.
            name = code.co_qualname
            while name.endswith(">"):
                name = name.rpartition(".<locals>")[0]
            self._functions[code] = (path.relative_to(ROOT).as_posix(), name) if is_product and name else None
        return self._functions[code]


def _digest(paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _cache_file(file: str) -> Path:
    return CACHE / "calls" / f"{file}.json"


def _write(file: str, digest: str, common: str, tests: Sequence[UnitTest]) -> None:
    functions = sorted(frozenset().union(*(test.functions for test in tests)))
    number = {function: index for index, function in enumerate(functions)}
    content = {
        "digest": digest,
        "common": common,
        "functions": functions,
        "tests": [[test.node_id, test.seconds, sorted(number[name] for name in test.functions)] for test in tests],
    }
    path = _cache_file(file)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def _read(file: str, digest: str, common: str) -> list[UnitTest] | None:
    """Returns the cached calls of a test file, or None if a digest differs. An empty `common` matches any digest."""
    path = _cache_file(file)
    content = json.loads(path.read_text()) if path.exists() else {}
    if content.get("digest") != digest or (common and content["common"] != common):
        return None
    functions = [(file, name) for file, name in content["functions"]]
    return [
        UnitTest(node_id, seconds, frozenset(functions[index] for index in calls))
        for node_id, seconds, calls in content["tests"]
    ]


def _importers(module: str) -> list[str]:
    """Returns the files of the product that import names from the module, or the module from its package."""
    package, _, name = module.rpartition(".")
    needles = (f"from {module} import ", f"import {module}\n", f"from {package} import {name}\n")
    return [
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "kcoord").rglob("*.py")
        if any(needle in path.read_text() for needle in needles)
    ]
