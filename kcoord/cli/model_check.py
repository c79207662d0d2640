# SPDX-License-Identifier: Apache-2.0
"""`kcoord model-check`: explores every order of events in small groups, with the real state machine."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

from kcoord.cli.options import MOST_PROCESSES, whole_number
from kcoord.simulation.model_check.model import Budget, ModelAssignor
from kcoord.simulation.model_check.search import Configuration, Report, Search
from kcoord.simulation.model_check.takeover import TakeoverBudget
from kcoord.simulation.model_check.takeover_search import TakeoverReport, TakeoverSearch

CONFIGURATIONS = (
    Configuration(3, 2, Budget(joins=4, leaves=1, crashes=1, losses=1, expiries=1, growths=0)),
    Configuration(2, 3, Budget(joins=4, leaves=2, crashes=1, losses=2, expiries=1, growths=1)),
)
"""The small groups to search, in sequence or in parallel."""

_GOOD, _BAD = ModelAssignor.GOOD, ModelAssignor.BAD
COMPUTING_CONFIGURATIONS = (
    Configuration(2, 2, Budget(2, 1, 0, 0, 0, 0, failovers=1, failures=1), assignors=(_GOOD, _GOOD)),
    Configuration(2, 2, Budget(2, 0, 0, 1, 0, 0, failovers=0, failures=1), assignors=(_GOOD, _GOOD)),
    Configuration(2, 2, Budget(2, 1, 0, 0, 0, 0, failovers=1), assignors=(_GOOD, _BAD)),
    Configuration(2, 2, Budget(2, 1, 0, 0, 0, 1, failovers=1, failures=1), assignors=(_GOOD, ModelAssignor.NONE)),
    Configuration(3, 2, Budget(3, 1, 1, 1, 1, 0, failovers=1, failures=1), assignors=(_GOOD, _GOOD, _BAD)),
)
"""Small groups whose members compute target assignments. The graphs with two clients are complete."""


TAKEOVER_BUDGETS = (
    TakeoverBudget(claims=3, puts=2, losses=0, late=0, crashes=0),
    TakeoverBudget(claims=2, puts=1, losses=1, late=0, crashes=1),
    TakeoverBudget(claims=2, puts=1, losses=1, late=1, crashes=0),
)
"""The graphs of two instances and one shard in an upstream. All are explored completely."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a report per configuration. Returns 1 if a property does not hold."""
    options = make_parser().parse_args(arguments)
    if options.upstream:
        return _check_takeovers(as_json=options.json)
    sizes = COMPUTING_CONFIGURATIONS if options.client_assignors else CONFIGURATIONS
    share = -(-options.states // len(sizes))
    configurations = [replace(configuration, max_states=share) for configuration in sizes]
    if options.processes > 1:
        with ProcessPoolExecutor(options.processes) as pool:
            reports = list(pool.map(_search, configurations))
    else:
        reports = [_search(configuration, show=sys.stderr.isatty()) for configuration in configurations]
    if options.json:
        print(json.dumps([json_of(report) for report in reports], indent=2))
    else:
        for report in reports:
            print("\n".join(lines_of(report)))
        print(f"{sum(report.states for report in reports)} states explored")
    return 1 if any(report.violation for report in reports) else 0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kcoord model-check", description="Explores all states of small groups, and checks KIP-848's properties."
    )
    parser.add_argument(
        "--states",
        type=whole_number(1),
        default=1_000_000,
        metavar="N",
        help="the maximum number of states, over all groups",
    )
    parser.add_argument(
        "--processes",
        type=whole_number(1, MOST_PROCESSES),
        default=1,
        metavar="N",
        help="number of groups to search in parallel",
    )
    parser.add_argument(
        "--client-assignors", action="store_true", help="search groups whose members compute target assignments"
    )
    parser.add_argument(
        "--upstream",
        action="store_true",
        help="explore claims and takeovers of two instances in front of an upstream, for one shard",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    return parser


def _check_takeovers(*, as_json: bool) -> int:
    reports = [TakeoverSearch(budget).run() for budget in TAKEOVER_BUDGETS]
    if as_json:
        print(json.dumps([_takeover_json(report) for report in reports], indent=2))
    else:
        for report in reports:
            print("\n".join(_takeover_lines(report)))
    return 1 if any(report.violation for report in reports) else 0


def _takeover_json(report: TakeoverReport) -> dict[str, object]:
    return {
        "budget": report.budget._asdict(),
        "states": report.states,
        "transitions": report.transitions,
        "depth": report.depth,
        "served": report.served,
        "actions": dict(sorted(report.actions.items())),
        "violation": report.violation,
        "trace": report.trace,
    }


def _takeover_lines(report: TakeoverReport) -> list[str]:
    budget = ", ".join(f"{name} {count}" for name, count in report.budget._asdict().items())
    lines = [
        f"two instances, one shard; {budget}",
        f"  {report.states} states; {report.transitions} steps, depth {report.depth}",
        f"  {report.served} states in which an owner serves all that the log has",
    ]
    if not report.violation:
        return [*lines, "  the whole graph; every property holds"]
    return [*lines, f"  {report.violation}", "  the steps to it:", *(f"    {step}" for step in report.trace)]


def _search(configuration: Configuration, show: bool = False) -> Report:
    def on_progress(states: int) -> None:
        print(f"\r{states} states", end="", file=sys.stderr, flush=True)

    report = Search(configuration, on_progress if show else lambda states: None).run()
    if show:
        print(file=sys.stderr)
    return report


def json_of(report: Report) -> dict[str, object]:
    return {
        "configuration": str(report.configuration),
        "complete": report.is_complete,
        "states": report.states,
        "transitions": report.transitions,
        "depth": report.depth,
        "converged": report.converged,
        "followed": report.followed,
        "actions": dict(sorted(report.actions.items())),
        "violation": report.violation,
        "trace": report.trace,
    }


def lines_of(report: Report) -> list[str]:
    whole = "the whole graph" if report.is_complete else f"{report.expanded} states with all their steps"
    lines = [
        str(report.configuration),
        f"  {report.states} states, {whole}; {report.transitions} steps, depth {report.depth}",
        f"  {report.converged} states in which all members agree; "
        f"{report.followed} states followed to such a state by fair turns",
        "  steps: " + ", ".join(f"{action} {count}" for action, count in sorted(report.actions.items())),
    ]
    if not report.violation:
        return [*lines, "  every property holds"]
    return [*lines, f"  {report.violation}", "  the steps to it:", *(f"    {step}" for step in report.trace)]
