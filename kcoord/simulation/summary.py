# SPDX-License-Identifier: Apache-2.0
"""The sums over several runs: events, faults, and state transitions of groups and transactions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from kcoord.simulation.runner import Outcome

FAULT_EVENTS: Final = frozenset(
    {
        *("drop", "drop-response", "duplicate", "hold-up", "cut-off", "reset-all", "slow-link", "slow-reader"),
        *("disk-error", "open-failed", "failed", "snapshot-failed", "clean-failed"),
        *("crash", "stop", "broker-pause", "give-up-shard", "worker-loss", "controller-crash", "start-slow-clock"),
        *("pause", "reset", "last-words", "election", "unclean-election", "topic-deleted", "too-few-replicas"),
        *("coordinator-moves", "ids-forgotten", "epochs-near-their-end"),
        *("member-crash", "member-leave", "member-pause", "subscribe", "freeze", "lull"),
    }
)
"""Kinds of events that are faults or their direct effects."""


@dataclass(slots=True)
class Summary:
    """Sums over outcomes, and the outcomes that failed."""

    runs: int = 0
    steps: int = 0
    virtual_ms: int = 0
    events: Counter[str] = field(default_factory=Counter)
    transitions: Counter[str] = field(default_factory=Counter)
    failures: list[Outcome] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        self.runs += 1
        self.steps += outcome.steps
        self.virtual_ms += outcome.virtual_ms
        self.events += outcome.counts
        self.transitions += outcome.transitions
        if outcome.failure:
            self.failures.append(outcome)

    def to_json(self) -> dict[str, object]:
        """Returns the sums and the failures for programs."""
        return {
            "runs": self.runs,
            "steps": self.steps,
            "virtual_ms": self.virtual_ms,
            "events": dict(sorted(self.events.items())),
            "transitions": dict(sorted(self.transitions.items())),
            "failures": [
                {"seed": outcome.seed, "options": outcome.options, "failure": outcome.failure}
                for outcome in self.failures
            ],
        }

    def lines(self) -> Iterator[str]:
        """Yields the sums as text."""
        yield f"{self.runs} runs, {self.steps} steps, {self.virtual_ms / 1000:.1f} s of virtual time"
        yield "events: " + _listed({kind: n for kind, n in self.events.items() if kind not in FAULT_EVENTS})
        yield "faults: " + _listed({kind: n for kind, n in self.events.items() if kind in FAULT_EVENTS})
        yield "transitions: " + _listed(self.transitions)
        yield f"{self.runs - len(self.failures)} passed, {len(self.failures)} failed"


def _listed(counts: dict[str, int] | Counter[str]) -> str:
    return ", ".join(f"{kind} {count}" for kind, count in sorted(counts.items())) or "none"
