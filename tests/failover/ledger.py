# SPDX-License-Identifier: Apache-2.0
"""Judges acknowledged commits: the lines of a ledger, and the log of the groups in the upstream."""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from kcoord.client.cluster import Cluster
from kcoord.client.config import CommonConfig
from kcoord.runtime.upstream_batches import CLAIM_KEY
from kcoord.upstream.own_topics import OFFSETS_TOPIC
from kcoord.upstream.requests import PartitionRequests
from kcoord_protocol.messages import OffsetCommitKey
from kcoord_protocol.record_batch import BatchHeader, decode_entries, walk_batches
from tests.failover.load import TOPIC
from tests.failover.next_release import decode_commit

_OFFSET_COMMIT: Final = OffsetCommitKey.api_key.to_bytes(2)
_NODE: Final = re.compile(rb"node\.id=(\d+)")


class Ack(NamedTuple):
    """An acknowledged commit: who acknowledged it, and when it was sent and answered."""

    group: str
    partition: int
    offset: int
    node_id: int
    sent: float
    answered: float


class Written(NamedTuple):
    """A commit in the log. `node_id`: the instance that had claimed the log under the epoch of the batch."""

    group: str
    partition: int
    offset: int
    node_id: int
    version: int
    """The version of the record."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """What the clients have seen."""

    acks: Sequence[Ack]
    lost: Sequence[str]
    """Members that the coordinator did not know any more."""
    is_ready: bool

    @classmethod
    def read(cls, file: Path) -> Ledger:
        acks, lost, is_ready = [], [], False
        text = file.read_text() if file.exists() else ""
        # The load may be writing the last line.
        for line in text[: text.rfind("\n") + 1].splitlines():
            what, *fields = line.split()
            if what == "ack":
                group, partition, offset, node_id, sent, answered = fields
                acks.append(Ack(group, int(partition), int(offset), int(node_id), float(sent), float(answered)))
            elif what == "lost":
                lost.append(line)
            is_ready |= what == "ready"
        return cls(acks, lost, is_ready)

    def owners_at(self, time: float) -> dict[str, int]:
        """Returns the instance that acknowledged the last commit of each group before a time."""
        return {ack.group: ack.node_id for ack in self.acks if ack.answered <= time}

    def gaps(self, node_id: int, since: float) -> dict[str, float]:
        """Returns for each group of an instance how long after `since` another one acknowledged its first commit."""
        groups = [group for group, owner in self.owners_at(since).items() if owner == node_id]
        gaps = dict.fromkeys(groups, float("inf"))
        for ack in self.acks:
            if ack.group in gaps and ack.node_id != node_id and ack.sent > since:
                gaps[ack.group] = min(gaps[ack.group], ack.answered - since)
        return gaps

    def last_offsets(self) -> dict[tuple[str, int], int]:
        """Returns the last acknowledged offset of each partition of each group."""
        last: dict[tuple[str, int], int] = {}
        for ack in self.acks:
            last[ack.group, ack.partition] = max(ack.offset, last.get((ack.group, ack.partition), 0))
        return last

    def check(self, written: Sequence[Written]) -> None:
        """Fails if a commit was acknowledged by an instance that has not written it as the owner of the log."""
        assert not self.lost, self.lost[:5]
        writers: defaultdict[tuple[str, int, int], set[int]] = defaultdict(set)
        for commit in written:
            writers[commit[:3]].add(commit.node_id)
        wrong = [ack for ack in self.acks if ack.node_id not in writers.get(ack[:3], ())]
        assert not wrong, f"{len(wrong)} acknowledged commits are not in the log of their owner, such as {wrong[:3]}"


async def read_log(address: str, partitions: int) -> list[Written]:
    """Returns all commits of `TOPIC` in the log of the groups. Nothing may have been compacted yet."""
    cluster = Cluster(CommonConfig(bootstrap_servers=address))
    requests = PartitionRequests(cluster, OFFSETS_TOPIC, attempt_timeout_ms=10_000)
    try:
        await cluster.start(cluster.deadline(20_000))
        parts = await asyncio.gather(*(_read_partition(requests, partition) for partition in range(partitions)))
        return [commit for part in parts for commit in part]
    finally:
        await requests.stop()
        await cluster.close()


async def _read_partition(requests: PartitionRequests, partition: int) -> list[Written]:
    owners: dict[tuple[int, int], int] = {}
    commits: list[Written] = []
    offset = 0
    while data := await requests.fetch(partition, offset):
        for position, fields in walk_batches(data):
            header = BatchHeader(*fields)
            if header.next_offset <= offset:
                continue
            offset = header.next_offset
            producer = header.producer_id, header.producer_epoch
            for _, key, value in decode_entries(data, position):
                if key is not None and key.startswith(CLAIM_KEY) and value is not None:
                    node = _NODE.search(value)
                    assert node is not None, value
                    owners[producer] = int(node[1])
                elif key is not None and value is not None and key[:2] == _OFFSET_COMMIT:
                    commit = OffsetCommitKey.decode(key[2:], 0)
                    if commit.topic == TOPIC:
                        committed, version = decode_commit(value)
                        owner = owners.get(producer, -1)
                        commits.append(Written(commit.group, commit.partition, committed.offset, owner, version))
    return commits
