# SPDX-License-Identifier: Apache-2.0
"""`kcoord simulate`: the deterministic simulation of the coordinator. A run depends on the command line alone."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import nullcontext
from itertools import count, islice

from kcoord.cli.options import MOST_PROCESSES, whole_number
from kcoord.config import BrokerConfig, ConfigError
from kcoord.server.errors import StartError
from kcoord.server.shards.own_assignors import start_own_assignors
from kcoord.simulation.options import FAULTS, SCENARIOS
from kcoord.simulation.planted import FAULTS as PLANTS
from kcoord.simulation.planted import NO_FAULT
from kcoord.simulation.reached import Reached
from kcoord.simulation.runner import Outcome, report, run, shrink
from kcoord.simulation.summary import Summary
from kcoord.simulation.world import DEFAULT_STEPS, Setup

_PENDING_PER_PROCESS = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs setups and prints their results. Returns 1 if an invariant does not hold."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    try:
        seeds = _seeds(options)
        faults = _faults(options.faults)
        _check_assignor(options.assignor)
    except (ValueError, ConfigError, StartError) as error:
        parser.error(str(error))
    options.processes = options.processes or len(os.sched_getaffinity(0))
    setups = (Setup(seed, options.steps, options.scenario, faults, assignor=options.assignor) for seed in seeds)
    if options.seed is not None:
        return _run_one(next(setups), options)
    return _run_many(setups, options)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kcoord simulate",
        description="Deterministic simulation of the coordinator: the same seed is the same run.",
        epilog=f"fault families: {', '.join(FAULTS)}",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--seed", type=int, metavar="N", help="run one seed and print its summary and trace hash")
    which.add_argument(
        "--seeds", metavar="A:B", default="0:20", help="run the seeds from A to before B (default: 0:20)"
    )
    which.add_argument("--forever", type=int, metavar="A", help="run the seeds from A on until Ctrl-C")
    parser.add_argument(
        "--steps", type=whole_number(0), default=DEFAULT_STEPS, metavar="N", help="number of steps until the faults end"
    )
    parser.add_argument(
        "--scenario", choices=sorted(filter(None, SCENARIOS)), default="", help="fix a part of the random options"
    )
    parser.add_argument("--faults", metavar="LIST", help="enable only these fault families; none disables all")
    parser.add_argument(
        "--assignor",
        default="",
        metavar="NAME",
        help="the assignor of all consumer groups: a built-in one, package.module:Class, or an entry point of the "
        "group kcoord.assignors",
    )
    parser.add_argument("--plant", choices=sorted(PLANTS), help="plant a fault that the simulation has to find")
    parser.add_argument(
        "--processes",
        type=whole_number(0, MOST_PROCESSES),
        default=1,
        metavar="N",
        help="number of seeds to run in parallel (0: one per core)",
    )
    parser.add_argument(
        "--reached", action="store_true", help="report how often each error branch of the coordinator was reached"
    )
    parser.add_argument("--trace", action="store_true", help="with --seed: print the latest events")
    parser.add_argument("--json", action="store_true", help="print JSON after the last run")
    return parser


def _seeds(options: argparse.Namespace) -> Iterable[int]:
    if options.seed is not None:
        return [options.seed]
    if options.forever is not None:
        return count(options.forever)
    first, _, end = options.seeds.partition(":")
    if not first.isdecimal() or not end.isdecimal():
        raise ValueError(f"--seeds {options.seeds}: must be two numbers with a colon between them, such as 0:20")
    return range(int(first), int(end))


def _faults(text: str | None) -> frozenset[str] | None:
    if text is None:
        return None
    names = frozenset(text.split(",")) - {"none", ""}
    if not names <= set(FAULTS):
        raise ValueError(f"--faults {text}: {', '.join(sorted(names - set(FAULTS)))} must be among {', '.join(FAULTS)}")
    return names


def _check_assignor(name: str) -> None:
    """Raises ConfigError or StartError if brokers cannot use the assignor."""
    if name:
        config = BrokerConfig.from_properties({"group.consumer.assignors": name})
        for assignor in start_own_assignors(config).values():
            assignor.close()


def _run_one(setup: Setup, options: argparse.Namespace) -> int:
    fault = PLANTS[options.plant] if options.plant else NO_FAULT
    with Reached() if options.reached else nullcontext() as reached:
        outcome = run(setup, fault)
    if options.json:
        summary = Summary()
        summary.add(outcome)
        _print_json(summary, reached, {"seed": setup.seed, "trace_hash": outcome.trace_hash})
        return 1 if outcome.failure else 0
    print(f"seed {setup.seed}: {outcome.options}")
    if options.trace and not outcome.failure:
        print("\n".join(outcome.latest))
    summary = Summary()
    summary.add(outcome)
    print("\n".join(summary.lines()))
    if isinstance(reached, Reached):
        print("\n".join(reached.lines()))
    if outcome.failure:
        print(report(shrink(outcome, fault)))
    else:
        print(f"settled {outcome.settled_after_ms} virtual ms after the faults ended")
    print(f"trace hash: {outcome.trace_hash}")
    return 1 if outcome.failure else 0


def _run_many(setups: Iterator[Setup], options: argparse.Namespace) -> int:
    """Runs all setups, or until Ctrl-C. Prints a report for every failure."""
    summary = Summary()
    with Reached() if options.reached else nullcontext() as reached:
        outcomes = _in_processes(setups, options) if options.processes > 1 else _in_turn(setups, options)
        try:
            for outcome in _with_progress(outcomes, summary, is_endless=options.forever is not None):
                if outcome.failure and not options.json:
                    print(report(shrink(outcome, PLANTS[options.plant] if options.plant else NO_FAULT)))
        except KeyboardInterrupt:
            print("stopped", file=sys.stderr)
    if options.json:
        _print_json(summary, reached)
        return 1 if summary.failures else 0
    print("\n".join(summary.lines()))
    if isinstance(reached, Reached):
        print("\n".join(reached.lines()))
    return 1 if summary.failures else 0


def _print_json(summary: Summary, reached: object, more: Mapping[str, object] | None = None) -> None:
    document = dict(more or {}) | summary.to_json()
    if isinstance(reached, Reached):
        document["reached"] = list(reached.lines())
    print(json.dumps(document, indent=2, ensure_ascii=False))


def _in_turn(setups: Iterable[Setup], options: argparse.Namespace) -> Iterator[Outcome]:
    return (_run_planted(setup, options.plant) for setup in setups)


def _run_planted(setup: Setup, plant: str | None) -> Outcome:
    return run(setup, PLANTS[plant] if plant else NO_FAULT)


def _in_processes(setups: Iterator[Setup], options: argparse.Namespace) -> Iterator[Outcome]:
    with ProcessPoolExecutor(options.processes) as pool:
        pending: set[Future[Outcome]] = set()
        try:
            while True:
                count_to_submit = options.processes * _PENDING_PER_PROCESS - len(pending)
                pending |= {
                    pool.submit(_run_planted, setup, options.plant) for setup in islice(setups, count_to_submit)
                }
                if not pending:
                    return
                done, pending = wait(pending, return_when=FIRST_COMPLETED)
                for future in sorted(done, key=lambda future: future.result().seed):
                    yield future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _with_progress(outcomes: Iterator[Outcome], summary: Summary, *, is_endless: bool) -> Iterator[Outcome]:
    """Adds every outcome to the summary. Shows the progress at a terminal, and for an endless run."""
    if not is_endless and not sys.stderr.isatty():
        for outcome in outcomes:
            summary.add(outcome)
            yield outcome
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[text]}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("seeds", total=None, text="")
        for outcome in outcomes:
            summary.add(outcome)
            text = f"{summary.runs} runs, {summary.steps} steps, {len(summary.failures)} failed, seed {outcome.seed}"
            progress.update(task, advance=1, text=text)
            yield outcome
