# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.mutation`: draws mutants, tries them, and prints which survived (`make mutate`)."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path

from tests.mutation.call_map import CallMap, make_call_map
from tests.mutation.equivalent import key_of, outdated, read_equivalent_mutants
from tests.mutation.mutants import Mutant, draw, mutants_of_files
from tests.mutation.sessions import ForkedProcesses
from tests.mutation.trial import Outcome, Verdict, outcome, run_trial

BROKER_PACKAGES = ("coordinator", "metadata", "runtime", "storage")
PACKAGES = (*BROKER_PACKAGES, "client")
BROKER_TESTS = (
    "tests/storage",
    "tests/transcripts",
    "tests/unit/assignor",
    "tests/unit/client/test_membership.py",
    "tests/unit/group",
    "tests/unit/logtools",
    "tests/unit/metadata",
    "tests/unit/runtime",
    "tests/unit/server",
    "tests/unit/test_record_walk.py",
    "tests/unit/test_service.py",
    "tests/unit/topics",
    "tests/unit/transaction",
)
CLIENT_TESTS = ("tests/integration/client", "tests/unit/cli", "tests/unit/client", "tests/unit/testing")
MOST_EQUIVALENT_PERCENT = 3
_PRELOADED = ("asyncio", "crc32c", "hypothesis.stateful", "prometheus_client", "pytest_asyncio", "re2", "uvloop")
"""Modules that no mutant changes. They are imported once before the forks, and not in each trial."""


def main() -> int:
    options = _parser().parse_args()
    entries = read_equivalent_mutants()
    if old := outdated(entries):
        for entry in old:
            print(f"equivalent.toml: this mutant does not exist any more: {entry.file}: {entry.line}: {entry.change}")
        return 1
    mutants = _chosen(options)
    if options.list or not mutants:
        print("\n".join(f"{mutant.file}:{mutant.line}: {mutant.change}" for mutant in mutants) or "no mutants")
        return 0 if mutants else 1
    keys = {entry.key for entry in entries}
    equivalent = [mutant for mutant in mutants if key_of(mutant) in keys]
    outcomes = _try_all([mutant for mutant in mutants if key_of(mutant) not in keys], options)
    _print_table(outcomes, equivalent)
    default_limit = 90 if options.package == ["client"] else 95
    return _conclude(outcomes, equivalent, default_limit if options.limit is None else options.limit)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutation", description="Mutation testing: the tests have to detect small random faults."
    )
    parser.add_argument("--count", type=int, default=60, help="number of mutants to draw (default 60)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the draw (default 1)")
    parser.add_argument(
        "--package", action="append", choices=PACKAGES, help=f"repeatable (default: {', '.join(BROKER_PACKAGES)})"
    )
    parser.add_argument("--limit", type=float, help="percent to be killed (default 95, for the client alone 90)")
    parser.add_argument(
        "--processes",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="number of processes (default: one per core)",
    )
    parser.add_argument("--minutes", type=float, default=inf, help="start no trial after this many minutes")
    parser.add_argument("--list", action="store_true", help="print the drawn mutants and try none of them")
    parser.add_argument("--only", metavar="FILE[:LINE]", help="try all mutants of a file or a line instead of a draw")
    parser.add_argument(
        "--keep-map",
        action="store_true",
        help="reuse the recorded calls of each test file that has not changed, even if the product has changed",
    )
    parser.add_argument("--tests", nargs="+", default=(), metavar="FILE", help="run only these files or folders")
    return parser


def _chosen(options: argparse.Namespace) -> list[Mutant]:
    if options.only:
        file, _, line = options.only.partition(":")
        return [mutant for mutant in mutants_of_files([file]) if not line or mutant.line == int(line)]
    folders = [f"kcoord/{package}" for package in options.package or BROKER_PACKAGES]
    return draw(mutants_of_files(folders), options.count, options.seed)


def _try_all(mutants: Sequence[Mutant], options: argparse.Namespace) -> list[tuple[Mutant, Outcome]]:
    """Tries the mutants. Before them it tries a mutant that changes nothing, which has to survive."""
    if not mutants:
        return []
    for module in _PRELOADED:
        importlib.import_module(module)
    importlib.import_module("kcoord_protocol.messages")
    targets = set(options.tests) or {
        target for mutant in mutants for target in (CLIENT_TESTS if _is_of_client(mutant) else BROKER_TESTS)
    }
    started = time.monotonic()
    call_map = make_call_map(sorted(targets), options.processes, keep=options.keep_map)
    print(f"recorded the calls of {len(call_map.tests)} tests ({time.monotonic() - started:.0f} s)")
    quickest = min(mutants, key=lambda mutant: len(call_map.tests_of(mutant)) or len(call_map.tests))
    unchanged = _try([replace(quickest, new=quickest.old)], call_map, 1)
    if unchanged[0][1].verdict is not Verdict.SURVIVED:
        sys.exit(f"the tests fail without a mutant: {unchanged[0][1]}")
    return _try(mutants, call_map, options.processes, time.monotonic() + 60 * options.minutes)


def _try(
    mutants: Sequence[Mutant], call_map: CallMap, processes: int, until: float = inf
) -> list[tuple[Mutant, Outcome]]:
    outcomes: list[tuple[Mutant, Outcome]] = []

    def finished(mutant: Mutant, exit_code: int, folder: Path) -> None:
        result = outcome(exit_code, folder)
        outcomes.append((mutant, result))
        if mutant.new != mutant.old:
            where = "" if result.verdict is Verdict.SURVIVED else f" ({result.place})"
            print(f"{mutant.file}:{mutant.line}: {mutant.change}: {result.verdict.value}{where}", flush=True)

    with ForkedProcesses(processes) as forks:
        for mutant in mutants:
            if time.monotonic() > until:
                break
            trial = partial(run_trial, mutant, call_map.tests_of(mutant), not _is_of_client(mutant))
            forks.run(trial, partial(finished, mutant))
    return outcomes


def _print_table(outcomes: Sequence[tuple[Mutant, Outcome]], equivalent: Sequence[Mutant]) -> None:
    for mutant, result in outcomes:
        if result.verdict is Verdict.SURVIVED:
            print(f"\n{mutant.diff()}")
    counts = Counter((_package(mutant), result.verdict) for mutant, result in outcomes)
    columns = [f"{'package':<11}", "drawn", *(verdict.value for verdict in Verdict), "equivalent"]
    print("\n" + "  ".join(columns))
    for package in PACKAGES:
        listed = sum(_package(mutant) == package for mutant in equivalent)
        row = [counts[package, verdict] for verdict in Verdict]
        if sum(row) + listed:
            cells = [package, sum(row) + listed, *row, listed]
            print("  ".join(f"{cell:<{len(column)}}" for cell, column in zip(cells, columns, strict=True)))


def _conclude(outcomes: Sequence[tuple[Mutant, Outcome]], equivalent: Sequence[Mutant], limit: float) -> int:
    survived = sum(result.verdict is Verdict.SURVIVED for _, result in outcomes)
    killed = len(outcomes) - survived
    percent = 100 * killed / len(outcomes) if outcomes else 100
    drawn = len(outcomes) + len(equivalent)
    print(f"\n{killed} of {len(outcomes)} killed: {percent:.1f} %, {limit:g} % required")
    # Even a small draw may contain one of the listed mutants by chance.
    most_listed = max(1, drawn * MOST_EQUIVALENT_PERCENT // 100)
    print(f"{len(equivalent)} of {drawn} are listed as equivalent, {most_listed} allowed")
    return 0 if percent >= limit and len(equivalent) <= most_listed else 1


def _package(mutant: Mutant) -> str:
    return mutant.file.split("/")[1]


def _is_of_client(mutant: Mutant) -> bool:
    return _package(mutant) == "client"


if __name__ == "__main__":
    sys.exit(main())
