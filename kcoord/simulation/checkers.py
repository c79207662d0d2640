# SPDX-License-Identifier: Apache-2.0
"""The invariants about responses: owners of partitions, epochs and committed offsets.

Owners are those in the view of the clients. A client that has to assume that the coordinator has given its partitions
to another member owns nothing. Epochs and offsets are those that responses contained.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from kcoord.simulation.observer import CommitKey, Observer
from kcoord.simulation.trace import ViolationError
from kcoord_protocol.messages import OffsetFetchResponse

TopicPartition: TypeAlias = tuple[bytes, int]


class PartitionOwners:
    """I-1: a partition has at most one owner in a group, across both protocols."""

    def __init__(self) -> None:
        self._owners: dict[tuple[str, TopicPartition], str] = {}

    def grant(self, group_id: str, owner: str, partitions: Iterable[TopicPartition]) -> None:
        for partition in sorted(partitions):
            other = self._owners.setdefault((group_id, partition), owner)
            if other != owner:
                text = f"group {group_id}: {owner} was assigned {partition[0].hex()}-{partition[1]}, which {other} owns"
                raise ViolationError("I-1 one owner", text)

    def release(self, group_id: str, owner: str, partitions: Iterable[TopicPartition]) -> None:
        for partition in partitions:
            if self._owners.get((group_id, partition)) == owner:
                del self._owners[group_id, partition]

    def owned(self, group_id: str) -> dict[TopicPartition, str]:
        return {partition: owner for (group, partition), owner in self._owners.items() if group == group_id}


class ToldEpochs:
    """I-5: the member epoch in the responses to a member never decreases, across crashes and rejoins."""

    def __init__(self) -> None:
        self._epochs: dict[tuple[str, str], int] = {}

    def told(self, group_id: str, member_id: str, epoch: int) -> None:
        before = self._epochs.get((group_id, member_id), 0)
        if epoch < before:
            text = f"member {member_id} of group {group_id} got member epoch {before}, then {epoch}"
            raise ViolationError("I-5 epochs grow", text)
        self._epochs[group_id, member_id] = epoch

    def forget(self, group_id: str) -> None:
        """Forgets the epochs of a deleted group: a new group of that name begins at a new epoch."""
        for key in [key for key in self._epochs if key[0] == group_id]:
            del self._epochs[key]


class AcknowledgedCommits:
    """I-11, I-12: a fetch returns the acknowledged offset or a later commit, and no offset that was not committed.

    Every attempt commits an offset of its own (`next_offset`), so an offset identifies its commit.
    """

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._acknowledged: dict[CommitKey, int] = {}
        self._attempts = 0

    def next_offset(self) -> int:
        self._attempts += 1
        return self._attempts

    def acknowledge(self, key: CommitKey, offset: int) -> None:
        place = self._observer.place_of(key, offset)
        before = self._acknowledged.get(key)
        if place is not None and (before is None or self._place(key, before) < place):
            self._acknowledged[key] = offset

    def _place(self, key: CommitKey, offset: int) -> int:
        """Returns the place of the commit in the log, or -1 if it was deleted since."""
        place = self._observer.place_of(key, offset)
        return -1 if place is None else place

    def of_group(self, group_id: str) -> dict[CommitKey, int]:
        return {key: offset for key, offset in self._acknowledged.items() if key.group_id == group_id}

    def answered(self, expected: dict[CommitKey, int], response: OffsetFetchResponse.OffsetFetchResponseGroup) -> None:
        """Takes a response to a client. A committed offset that was read counts as acknowledged from then on."""
        self.check(expected, response)
        for topic in response.topics:
            for partition in topic.partitions:
                if partition.committed_offset >= 0 and not partition.error_code:
                    key = CommitKey(response.group_id, topic.name, partition.partition_index)
                    self.acknowledge(key, partition.committed_offset)

    def check(self, expected: dict[CommitKey, int], response: OffsetFetchResponse.OffsetFetchResponseGroup) -> None:
        """Checks a response. `expected` are the commits that were acknowledged before the fetch was sent."""
        fetched = {
            CommitKey(response.group_id, topic.name, partition.partition_index): partition.committed_offset
            for topic in response.topics
            for partition in topic.partitions
            if not partition.error_code
        }
        unstable = {
            CommitKey(response.group_id, topic.name, partition.partition_index)
            for topic in response.topics
            for partition in topic.partitions
            if partition.error_code
        }
        for key, fetched_offset in fetched.items():
            if fetched_offset >= 0:
                self._check_committed(key, fetched_offset)
        for key, offset in sorted(expected.items()):
            place = self._place(key, offset)
            if place < 0 or key in unstable:
                continue
            fetched_offset = fetched.get(key, -1)
            if fetched_offset < 0 or self._place(key, fetched_offset) < place:
                text = f"{key}: {offset} was acknowledged, {fetched_offset} was fetched"
                raise ViolationError("I-11 no acknowledged commit is lost", text)

    def _check_committed(self, key: CommitKey, offset: int) -> None:
        if not self._observer.was_written(key, offset):
            raise ViolationError("I-12 no offset is made up", f"{key}: {offset} was never committed")
        if not self._observer.is_visible(key, offset):
            text = f"{key}: {offset} belongs to a transaction that was not committed"
            raise ViolationError("I-18 a transaction is atomic", text)
