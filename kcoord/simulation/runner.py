# SPDX-License-Identifier: Apache-2.0
"""Runs setups, shrinks failures and reports them.

The report of a failure has the seed and options, the disturbances that are left after shrinking, the latest events and
the command that runs it again.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from kcoord.simulation.clock import START_MS
from kcoord.simulation.options import UPSTREAM
from kcoord.simulation.planted import NO_FAULT, Fault
from kcoord.simulation.trace import ViolationError
from kcoord.simulation.upstream.world import UpstreamWorld
from kcoord.simulation.world import Setup, World

_MOST_SHRINK_RUNS = 120


@dataclass(slots=True)
class Outcome:
    """The result of one run. `failure` is empty if all invariants held."""

    setup: Setup
    options: str
    trace_hash: str
    steps: int
    virtual_ms: int
    settled_after_ms: int
    failure: str = ""
    invariant: str = ""
    counts: Counter[str] = field(default_factory=Counter)
    transitions: Counter[str] = field(default_factory=Counter)
    latest: list[str] = field(default_factory=list)
    disturbances: list[str] = field(default_factory=list)

    @property
    def seed(self) -> int:
        return self.setup.seed


def run(setup: Setup, fault: Fault = NO_FAULT) -> Outcome:
    """Runs one setup to its end or to the first violation. Any other exception counts as a violation of I-0."""
    world = UpstreamWorld(setup) if setup.scenario == UPSTREAM else World(setup, fault)
    failure = invariant = ""
    with fault.planted(), world.surroundings():
        try:
            world.run()
        except ViolationError as error:
            failure, invariant = str(error), error.invariant
        except Exception:
            failure, invariant = traceback.format_exc(), "I-0 no unexpected error"
        finally:
            _end(world)
    elapsed_ms = world.clock.now_ms - START_MS
    return Outcome(
        setup,
        str(world.options),
        world.trace.hash(),
        world.steps,
        elapsed_ms,
        world.settled_after_ms,
        failure,
        invariant,
        world.trace.counts,
        world.broker.observer.transitions if isinstance(world, World) else Counter(),
        world.trace.latest(),
        [
            f"{number}: {disturbance}"
            for number, disturbance in enumerate(world.disturbances)
            if number not in setup.without and disturbance.at_ms <= elapsed_ms
        ],
    )


def _end(world: World | UpstreamWorld) -> None:
    """Ends the processes, because the run is over."""
    if isinstance(world, UpstreamWorld):
        world.end()
    else:
        world.broker.end()
        world.controller.end()


def shrink(
    failed: Outcome, fault: Fault = NO_FAULT, on_run: Callable[[Outcome], None] = lambda outcome: None
) -> Outcome:
    """Returns a run that breaks the same invariant with fewer disturbances.

    Leaves disturbances out in ever smaller portions, for at most `_MOST_SHRINK_RUNS` runs.
    """
    best = failed
    runs = 0
    portion = max(len(best.disturbances) // 2, 1)
    while runs < _MOST_SHRINK_RUNS:
        left = [int(line.split(":", 1)[0]) for line in best.disturbances]
        shorter = None
        for first in range(0, len(left), portion):
            without = best.setup.without | frozenset(left[first : first + portion])
            outcome = run(replace(best.setup, without=without), fault)
            runs += 1
            on_run(outcome)
            is_shorter = len(outcome.disturbances) < len(best.disturbances)
            if outcome.invariant == failed.invariant and is_shorter:
                shorter = outcome
            if shorter is not None or runs >= _MOST_SHRINK_RUNS:
                break
        if shorter is not None:
            best = shorter
        elif portion == 1:
            break
        portion = max(min(portion, len(best.disturbances)) // (1 if shorter is not None else 2), 1)
    return best


def report(outcome: Outcome) -> str:
    """Returns the text that describes a failed run, and the command that repeats it."""
    setup = outcome.setup
    lines = [f"seed {outcome.seed} failed at step {outcome.steps}, after {outcome.virtual_ms} virtual ms"]
    lines.append(f"  {outcome.options}")
    lines.append(f"  {len(outcome.disturbances)} disturbances:")
    lines += (f"    {line}" for line in outcome.disturbances)
    lines.append("  the latest events:")
    lines += (f"    {line}" for line in outcome.latest)
    lines += (f"  {line}" for line in outcome.failure.splitlines())
    again = f"kcoord simulate --seed {outcome.seed} --steps {setup.steps}"
    if setup.scenario:
        again += f" --scenario {setup.scenario}"
    if setup.assignor:
        again += f" --assignor {setup.assignor}"
    if setup.faults is not None:
        again += f" --faults {','.join(sorted(setup.faults)) or 'none'}"
    lines.append(f"  again: {again}")
    return "\n".join(lines)
