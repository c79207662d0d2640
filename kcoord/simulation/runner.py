# SPDX-License-Identifier: Apache-2.0
"""Runs seeds and says what came of them. A failed seed is printed with its options and latest events: that is all that
is needed to run it again.
"""

from __future__ import annotations

import argparse
import logging
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from kcoord.simulation.clock import START_MS
from kcoord.simulation.planted import FAULTS, NO_FAULT, Fault
from kcoord.simulation.trace import ViolationError
from kcoord.simulation.world import World


@dataclass(slots=True)
class Outcome:
    """What one seed gave; `failure` is empty where all invariants held."""

    seed: int
    options: str
    trace_hash: str
    virtual_ms: int
    settled_after_ms: int
    failure: str = ""
    invariant: str = ""
    counts: Counter[str] = field(default_factory=Counter)
    latest: list[str] = field(default_factory=list)


def run_seed(seed: int, fault: Fault = NO_FAULT) -> Outcome:
    """Runs one seed to its end, or to the first violation. Any other exception counts as one."""
    world = World(seed, fault)
    failure = invariant = ""
    try:
        world.run()
    except ViolationError as error:
        failure, invariant = str(error), error.invariant
    except Exception:
        failure, invariant = traceback.format_exc(), "I-0 no unexpected error"
    return Outcome(
        seed,
        str(world.options),
        world.trace.hash(),
        world.clock.now_ms - START_MS,
        world.settled_after_ms,
        failure,
        invariant,
        world.trace.counts,
        world.trace.latest(),
    )


def report(outcome: Outcome) -> str:
    """The whole story of a failed seed."""
    lines = [f"seed {outcome.seed} failed after {outcome.virtual_ms} virtual ms", f"  {outcome.options}"]
    lines += (f"  {line}" for line in outcome.latest)
    lines += (f"  {line}" for line in outcome.failure.splitlines())
    lines.append(f"  again: python -m kcoord.simulation --seed {outcome.seed}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="kcoord.simulation", description="Deterministic simulation of the coordinator."
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--seeds", metavar="A:B", default="0:20", help="run the seeds from A to before B (default: 0:20)"
    )
    which.add_argument("--seed", type=int, help="run one seed and print its trace hash")
    parser.add_argument("--plant", choices=sorted(FAULTS), help="plant a fault that has to be found")
    options = parser.parse_args(arguments)
    fault = FAULTS[options.plant] if options.plant else NO_FAULT
    try:
        seeds = [options.seed] if options.seed is not None else _parse_seeds(options.seeds)
    except ValueError:
        parser.error(f"--seeds {options.seeds}: two numbers and a colon between them are needed")
    with _without_log_lines():
        failed = _run_all(seeds, fault, is_single=options.seed is not None)
    print(f"{len(seeds) - failed} passed, {failed} failed")
    return 1 if failed else 0


def _run_all(seeds: list[int], fault: Fault, *, is_single: bool) -> int:
    """Runs the seeds, prints what there is to say, and returns how many failed."""
    failed = 0
    counts: Counter[str] = Counter()
    for seed in seeds:
        outcome = run_seed(seed, fault)
        counts += outcome.counts
        if outcome.failure:
            failed += 1
            print(report(outcome))
        elif is_single:
            print(f"seed {seed}: {outcome.options}")
            print(f"trace hash: {outcome.trace_hash}")
            print(f"{outcome.virtual_ms} virtual ms, settled within {outcome.settled_after_ms} ms")
    print("events: " + ", ".join(f"{kind} {count}" for kind, count in sorted(counts.items())))
    return failed


@contextmanager
def _without_log_lines() -> Iterator[None]:
    """The coordinator reports its misfortunes; here they are expected."""
    logger = logging.getLogger("kcoord")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _parse_seeds(text: str) -> list[int]:
    first, _, end = text.partition(":")
    return list(range(int(first), int(end)))
