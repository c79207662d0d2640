# SPDX-License-Identifier: Apache-2.0
"""Finds lost groups: they have committed offsets, but their last group record is a tombstone.

kcoord lists such a group as a group without members. Kafka 4.3.1 keeps its offsets in the log, but it does not list
the group, returns none of its offsets, and expires none. A group record after the tombstone restores the group there.
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
    """Finds the lost groups of a partition in two passes.

    `note` takes all records of the partition and collects candidates: groups with a tombstone. If there are any, `find`
    reads all batches again. Two passes save memory, since few groups are candidates and only their offsets are kept.
    """

    def __init__(self) -> None:
        self.candidates: set[str] = set()

    def note_batch(self, batch: bytes) -> None:
        """Notes all records of a batch."""
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
        """Returns the lost groups with the number of their offsets."""
        serde = CoordinatorSerde()
        state = LiveState()
        resolver = TransactionResolver()
        for batch in batches:
            for record in resolver.feed(batch):
                group_id = group_id_of(record.key)
                if group_id is None or group_id not in self.candidates:
                    continue
                decoded = serde.deserialize(record.key, record.value)
                if decoded is not None:
                    state.note(decoded)
                elif record.value is not None:
                    state.note_unknown(group_id)
        return state.lost_groups


def new_group_record(group_id: str, timestamp_ms: int) -> Record:
    """Returns the record that restores a lost group: a group at generation 0, as a commit alone creates it.

    The retention of its offsets then counts from their commits.
    """
    value = GroupMetadataValue(protocol_type="", generation=0, protocol=None, leader=None, members=[])
    key_bytes, value_bytes = CoordinatorSerde().serialize(group_metadata_record(group_id, value))
    return Record(key_bytes, value_bytes, timestamp_ms=timestamp_ms)


def note_of_return(group_id: str) -> str:
    """Returns the line of a report for a lost group."""
    return f"group {group_id} had offsets, but its last record was a tombstone; the group is restored"
