# SPDX-License-Identifier: Apache-2.0
"""The options that a seed draws before a run with an upstream, and the disturbances of the run.

Each seed draws its own mix of faults (swarm testing). Times are virtual milliseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from random import Random
from typing import Final

from kcoord.simulation.disturbances import Disturbance

WRITE_TIMEOUT_MS: Final = 6_000
LONGEST_HOLD_UP_MS: Final = 9_000
"""The longest time that the network holds up a request.

It is longer than a session, and shorter than the time that a new owner waits for one with another producer id.
"""
_ZOMBIE_SHARE: Final = 0.3
_KINDS: Final[Mapping[str, tuple[str, ...]]] = {
    "crash": ("crash", "crash", "stop"),
    "zombie": ("zombie",),
    "pause": ("pause",),
    "network": ("cut-off", "cut-off", "reset"),
    "election": ("election",),
    "replicas": ("too-few-replicas",),
    "coordinator": ("coordinator-moves",),
    "ids": ("ids",),
    "compaction": ("compact",),
    "unclean": ("unclean-election", *(3 * ("unseen-unclean-election",)), "delete-topic"),
    "snapshot": ("snapshot",),
}
_FAMILY_OF: Final[Mapping[str, str]] = {
    "crash": "crash",
    "zombie": "crash",
    "pause": "pause",
    "network": "network",
    **dict.fromkeys(("election", "replicas", "coordinator", "ids", "compaction", "unclean"), "upstream"),
}
"""The family of faults (`--faults`) that a kind of disturbance belongs to. Those that are missing are no faults."""


@dataclass(slots=True)
class UpstreamOptions:
    """The options of one run. Probabilities are per message."""

    instances: int
    shards: int
    session_timeout_ms: int
    heartbeat_interval_ms: int
    delay_ms: int
    replication_ms: int
    tombstones_kept_ms: int
    """How long compaction keeps tombstones."""
    loss: float
    hold_up: float
    clients: int
    transactional_clients: int
    slow_clock_share: float
    """The share of processes whose clock runs at half the speed, so that their lease lasts too long."""
    forgotten_ids_share: float
    """The share of zombies with whose death the upstream forgets the transactional ids of the shards."""
    every_ms: Mapping[str, int]
    """Mean time between disturbances by kind; 0 for never."""

    @classmethod
    def draw(cls, random: Random, faults: frozenset[str] | None) -> UpstreamOptions:
        """Draws the options of one seed. `faults` keeps the families that it names; None keeps all."""
        choice = random.choice
        options = cls(
            instances=choice((2, 2, 3)),
            shards=choice((1, 2, 2)),
            session_timeout_ms=6_000,
            heartbeat_interval_ms=choice((500, 2_000)),
            delay_ms=choice((2, 30, 200)),
            replication_ms=choice((1, 20, 300)),
            tombstones_kept_ms=choice((4_000, 20_000)),
            loss=choice((0.0, 0.005, 0.02)),
            hold_up=choice((0.0, 0.01, 0.03)),
            clients=choice((1, 2, 4)),
            transactional_clients=choice((0, 1, 2)),
            slow_clock_share=choice((0.0, 0.0, 0.5)),
            forgotten_ids_share=0.0,
            every_ms={
                "crash": choice((0, 8_000, 16_000)),
                "zombie": choice((0, 0, 10_000)),
                "pause": choice((0, 8_000, 16_000)),
                "network": choice((0, 8_000, 16_000)),
                "election": choice((0, 3_000, 12_000)),
                "replicas": choice((0, 0, 12_000)),
                "coordinator": choice((0, 0, 15_000)),
                "ids": choice((0, 0, 0, 10_000)),
                "compaction": choice((0, 2_000)),
                "unclean": choice((0, 8_000)),
                "snapshot": choice((0, 400)),
            },
        )
        if random.random() < _ZOMBIE_SHARE:
            options._favour_zombies(random)
        if options.every_ms["unclean"]:
            # The promises about transactions do not hold if the upstream loses them.
            options.transactional_clients = 0
            # Compaction may have removed what the lost batches had replaced. Then the log does not tell what is right.
            options.every_ms = {**options.every_ms, "compaction": 0}
        if faults is not None:
            options._keep_only(faults)
        return options

    def _favour_zombies(self, random: Random) -> None:
        """Owners change often, and requests of earlier owners arrive late: also in transactions, or with other ids."""
        self.hold_up, self.loss, self.transactional_clients = 0.01, 0.0, 2
        self.slow_clock_share = random.choice((0.0, 0.5))
        self.forgotten_ids_share = random.choice((0.0, 0.5))
        self.every_ms = {
            **dict.fromkeys(self.every_ms, 0),
            **{"crash": 15_000, "zombie": 1_500, "ids": random.choice((0, 5_000)), "compaction": 6_000},
        }

    def _keep_only(self, faults: frozenset[str]) -> None:
        if "network" not in faults:
            self.loss = self.hold_up = 0.0
        if "clock" not in faults:
            self.slow_clock_share = 0.0
        self.every_ms = {
            kind: every if _FAMILY_OF.get(kind) in faults or kind not in _FAMILY_OF else 0
            for kind, every in self.every_ms.items()
        }

    def disturbances(self, random: Random, duration_ms: int) -> list[Disturbance]:
        """Returns all disturbances of the run, ordered by time."""
        drawn = []
        for kind, every_ms in self.every_ms.items():
            at_ms = 0
            while every_ms:
                at_ms += random.randint(1, 2 * every_ms)
                if at_ms >= duration_ms:
                    break
                drawn.append(Disturbance(at_ms, random.choice(_KINDS[kind]), random.getrandbits(32)))
        return sorted(drawn, key=lambda disturbance: disturbance.at_ms)

    def __str__(self) -> str:
        return " ".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))
