# SPDX-License-Identifier: Apache-2.0
"""What one seed decides before anything happens: the mix of faults and the size of the world (swarm testing)."""

from __future__ import annotations

from dataclasses import dataclass, fields
from random import Random

from kcoord.config import BrokerConfig

MEMBERS_PER_GROUP = 3


@dataclass(slots=True)
class Options:
    """Probabilities are per message or per disk operation; 0 switches a fault off. Times are virtual milliseconds."""

    groups: int
    shards: int
    partitions: int
    segment_bytes: int
    heartbeat_interval_ms: int
    session_timeout_ms: int
    rebalance_timeout_ms: int
    assignment_interval_ms: int
    network_delay_ms: int
    disk_delay_ms: int
    drop_probability: float
    duplicate_probability: float
    disk_error_probability: float
    broker_crash_every_ms: int
    member_stop_every_ms: int
    topic_change_every_ms: int
    static_share: float
    request_timeout_ms: int = 2_000

    @classmethod
    def draw(cls, random: Random) -> Options:
        return cls(
            groups=random.choice((1, 2)),
            shards=random.choice((1, 2, 3)),
            partitions=random.choice((2, 3, 4, 6)),
            segment_bytes=random.choice((2_048, 16_384, 1 << 20)),
            heartbeat_interval_ms=random.choice((500, 1_000, 3_000)),
            session_timeout_ms=random.choice((10_000, 15_000)),
            rebalance_timeout_ms=random.choice((5_000, 20_000)),
            assignment_interval_ms=random.choice((0, 0, 1_000)),
            network_delay_ms=random.choice((2, 50, 300)),
            disk_delay_ms=random.choice((1, 10, 200)),
            drop_probability=random.choice((0.0, 0.01, 0.05)),
            duplicate_probability=random.choice((0.0, 0.02, 0.1)),
            disk_error_probability=random.choice((0.0, 0.0, 0.01)),
            broker_crash_every_ms=random.choice((0, 8_000, 20_000)),
            member_stop_every_ms=random.choice((3_000, 10_000)),
            topic_change_every_ms=random.choice((0, 15_000)),
            static_share=random.choice((0.0, 0.3, 1.0)),
        )

    def broker_config(self) -> BrokerConfig:
        """Limits far below Kafka's defaults, so that timeouts happen within a short run."""
        return BrokerConfig.from_properties(
            {
                "group.consumer.session.timeout.ms": str(self.session_timeout_ms),
                "group.consumer.min.session.timeout.ms": "5000",
                "group.consumer.heartbeat.interval.ms": str(self.heartbeat_interval_ms),
                "group.consumer.min.heartbeat.interval.ms": "100",
                "group.consumer.assignment.interval.ms": str(self.assignment_interval_ms),
                # With the larger topics, targets are computed in the background.
                "kcoord.assignor.inline.ms": "0" if self.partitions >= 4 else "10",
            }
        )

    def __str__(self) -> str:
        return " ".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))
