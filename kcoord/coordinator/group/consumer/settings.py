# SPDX-License-Identifier: Apache-2.0
"""The timing of one consumer group: its own configs (KIP-848 Group Configurations) where set, else the broker's,
within the broker's bounds.
"""

from __future__ import annotations

from kcoord.config import BrokerConfig
from kcoord.metadata.image import MetadataImage


class GroupSettings:
    """Reads each value on demand, so that a changed config takes effect with the next heartbeat."""

    __slots__ = ("_broker", "_own")

    def __init__(self, broker: BrokerConfig, image: MetadataImage, group_id: str) -> None:
        self._broker = broker
        self._own = image.group_configs(group_id)

    @property
    def session_timeout_ms(self) -> int:
        broker = self._broker
        own = self._own.get("consumer.session.timeout.ms")
        if own is None:
            return broker.group_consumer_session_timeout_ms
        return _clamp(own, broker.group_consumer_min_session_timeout_ms, broker.group_consumer_max_session_timeout_ms)

    @property
    def heartbeat_interval_ms(self) -> int:
        broker = self._broker
        own = self._own.get("consumer.heartbeat.interval.ms")
        if own is None:
            return broker.group_consumer_heartbeat_interval_ms
        return _clamp(
            own, broker.group_consumer_min_heartbeat_interval_ms, broker.group_consumer_max_heartbeat_interval_ms
        )

    @property
    def assignment_interval_ms(self) -> int:
        broker = self._broker
        own = self._own.get("consumer.assignment.interval.ms")
        if own is None:
            return broker.group_consumer_assignment_interval_ms
        return _clamp(
            own, broker.group_consumer_min_assignment_interval_ms, broker.group_consumer_max_assignment_interval_ms
        )

    @property
    def assignor_offload_enable(self) -> bool:
        """True if a target assignment that takes long may be computed in the background."""
        own = self._own.get("consumer.assignor.offload.enable")
        return self._broker.group_consumer_assignor_offload_enable if own is None else own.strip().lower() == "true"


def _clamp(value: str, lowest: int, highest: int) -> int:
    return max(lowest, min(int(value), highest))
