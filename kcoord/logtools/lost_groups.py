# SPDX-License-Identifier: Apache-2.0
"""Groups that are lost although they have committed offsets: the last that the log says of the group is its tombstone.

This broker lists such a group as one without members. Kafka 4.3.1 keeps its offsets, but has the group in no list,
answers no offset of it, and deletes none. A record of the group behind the tombstone brings it back there too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from kcoord.coordinator.group.classic.rebalance import group_metadata_record
from kcoord.logtools.decode import group_id_of
from kcoord.logtools.live_state import LiveState
from kcoord.logtools.transactions import TransactionResolver
from kcoord.runtime.serde import CoordinatorSerde
from kcoord_protocol.messages import ConsumerGroupMetadataKey, GroupMetadataKey, GroupMetadataValue
from kcoord_protocol.record_batch import Record, decode_header, decode_records

_GROUP_TYPES: Final = tuple(cls.api_key.to_bytes(2, "big") for cls in (GroupMetadataKey, ConsumerGroupMetadataKey))


class LostGroups:
    """Show it all records of a partition, then all batches again if there are candidates: few groups have ended, and
    only their offsets have to be remembered.
    """

    def __init__(self) -> None:
        self.candidates: set[str] = set()

    def note_batch(self, batch: bytes) -> None:
        """Show it all records of a batch."""
        header = decode_header(batch)
        if not header.is_control:
            for record in decode_records(batch):
                self.note(record, is_transactional=header.is_transactional)

    def note(self, record: Record, *, is_transactional: bool) -> None:
        if record.key is None:
            return
        if record.value is None:
            group_id = group_id_of(record.key) if record.key.startswith(_GROUP_TYPES) else None
            if group_id is not None:
                self.candidates.add(group_id)
        elif self.candidates and not is_transactional:
            self.candidates.discard(group_id_of(record.key) or "")

    def find(self, batches: Iterable[bytes]) -> Mapping[str, int]:
        """The groups and how many offsets each has."""
        serde = CoordinatorSerde()
        state = LiveState()
        resolver = TransactionResolver()
        for batch in batches:
            for record in resolver.feed(batch):
                group_id = group_id_of(record.key)
                if group_id is None or group_id not in self.candidates:
                    continue
                found = serde.deserialize(record.key, record.value)
                if found is not None:
                    state.note(found)
                elif record.value is not None:
                    state.note_unknown(group_id)
        return state.lost_groups


def new_group_record(group_id: str, timestamp_ms: int) -> Record:
    """What brings a group back: one that never had a generation, as a commit alone makes it. Its offsets age from
    their commits.
    """
    value = GroupMetadataValue(protocol_type="", generation=0, protocol=None, leader=None, members=[])
    key_bytes, value_bytes = CoordinatorSerde().serialize(group_metadata_record(group_id, value))
    return Record(key_bytes, value_bytes, timestamp_ms=timestamp_ms)


def note_of_return(group_id: str) -> str:
    """What a report says of a lost group."""
    return f"group {group_id} had offsets, but its last record was a tombstone; it is back"
