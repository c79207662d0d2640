# SPDX-License-Identifier: Apache-2.0
"""Faults built in on purpose: a simulation that does not find them proves nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kcoord.config import BrokerConfig
from kcoord.coordinator.group.shard import GroupCoordinatorShard
from kcoord.coordinator.result import CoordinatorRecord, CoordinatorResult, OperationContext
from kcoord.metadata.image import MetadataImage
from protocol.messages import ConsumerGroupCurrentMemberAssignmentValue

_SKIPPED_OF: Final = 40


class ForgetfulShard(GroupCoordinatorShard):
    """Skips some replays of live results; what it loads, it loads whole."""

    def __init__(self, config: BrokerConfig, image: MetadataImage) -> None:
        super().__init__(config, image)
        self._is_loaded = False
        self._replayed = 0

    def on_loaded(self, context: OperationContext) -> CoordinatorResult[None]:
        self._is_loaded = True
        return super().on_loaded(context)

    def replay(self, record: CoordinatorRecord) -> None:
        self._replayed += self._is_loaded
        if not self._is_loaded or self._replayed % _SKIPPED_OF:
            super().replay(record)


class HastyShard(GroupCoordinatorShard):
    """Forgets which partitions a member still has to revoke, and so gives them to the next one at once."""

    def replay(self, record: CoordinatorRecord) -> None:
        value = record.value
        if isinstance(value, ConsumerGroupCurrentMemberAssignmentValue) and value.partitions_pending_revocation:
            value.partitions_pending_revocation = []
        super().replay(record)


@dataclass(slots=True)
class Fault:
    """A fault to plant: another state machine, or replies that do not wait for the disk."""

    make_machine: Callable[[BrokerConfig, MetadataImage], GroupCoordinatorShard] = GroupCoordinatorShard
    early_replies: bool = False


FAULTS: Final = {
    "reply-before-durable": Fault(early_replies=True),
    "skip-a-replay": Fault(ForgetfulShard),
    "grant-before-revocation": Fault(HastyShard),
}
NO_FAULT: Final = Fault()
