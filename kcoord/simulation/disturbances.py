# SPDX-License-Identifier: Apache-2.0
"""The disturbances of a run, as a list that is drawn before the run begins.

Each entry has its own time, kind and random seed. A run without some of them therefore keeps all others as they are,
which is how `runner.shrink` shortens a failure.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Final

from kcoord.simulation.options import Options

KINDS: Final[dict[str, tuple[str, ...]]] = {
    "broker": ("crash", "machine-crash", "stop"),
    "pause": ("broker-pause",),
    "shard": ("give-up-shard", "give-up-shard", "worker-loss"),
    "member": ("member-crash", "member-leave", "member-pause", "subscribe", "freeze"),
    "partition": ("cut-off", "cut-off", "reset-all", "slow-link"),
    "topic": ("topic",),
    "config": ("config",),
    "admin": ("admin",),
    "rude": ("rude",),
    "lull": ("lull",),
    "controller": ("controller-crash",),
    "acl": ("acl",),
    "quota": ("quota",),
}
"""The kinds of disturbances of each family."""


@dataclass(frozen=True, slots=True)
class Disturbance:
    """One disturbance. `at_ms` counts from the beginning of the run; `seed` decides the details."""

    at_ms: int
    kind: str
    seed: int

    def __str__(self) -> str:
        return f"+{self.at_ms} {self.kind} ({self.seed})"


def draw(random: Random, options: Options, duration_ms: int) -> list[Disturbance]:
    """Returns all disturbances of a run, ordered by time."""
    drawn = []
    for family, every_ms in options.every_ms.items():
        at_ms = 0
        while every_ms:
            at_ms += random.randint(1, 2 * every_ms)
            if at_ms >= duration_ms:
                break
            drawn.append(Disturbance(at_ms, random.choice(KINDS[family]), random.getrandbits(32)))
    at_ms = 0
    while options.clean_every_ms:
        at_ms += random.randint(1, 2 * options.clean_every_ms)
        if at_ms >= duration_ms:
            break
        drawn.append(Disturbance(at_ms, "clean", random.getrandbits(32)))
    return sorted(drawn, key=lambda disturbance: disturbance.at_ms)
