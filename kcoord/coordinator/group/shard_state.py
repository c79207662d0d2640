# SPDX-License-Identifier: Apache-2.0
"""What all operations of one shard of the group coordinator share: its groups, their offsets, and what rules them.

Only `replay` (of `GroupCoordinatorShard`) changes hard state; operations read it here.
"""

from __future__ import annotations

from kcoord.config import BrokerConfig
from kcoord.coordinator.group.admission import check_new_group
from kcoord.coordinator.group.counters import GroupCounters
from kcoord.coordinator.group.deletion import Deletion
from kcoord.coordinator.group.group import Group
from kcoord.coordinator.group.offsets.committed_offsets import CommittedOffsets
from kcoord.coordinator.group.offsets.transactional_offsets import TransactionalOffsets
from kcoord.coordinator.group.replay import GroupReplay
from kcoord.metadata.image import MetadataImage


class ShardState:
    """The state of one partition of `__consumer_offsets`, and the broker's settings and topics as of now."""

    def __init__(self, config: BrokerConfig, image: MetadataImage, counters: GroupCounters | None = None) -> None:
        self._config = config
        self._image = image
        self.image_epoch = image.epoch
        self._groups: dict[str, Group] = {}
        self._offsets = CommittedOffsets()
        self._pending = TransactionalOffsets()
        self._deletion = Deletion(self._offsets, self._pending)
        self._replay = GroupReplay(self._groups, self._offsets, self._pending)
        self.counters = GroupCounters() if counters is None else counters

    def _present_or_admitted(self, group_id: str) -> Group | None:
        """The group, or None where it may be made."""
        group = self._groups.get(group_id)
        if group is None:
            check_new_group(self._config, group_id, len(self._groups))
        return group
