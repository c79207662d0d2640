# SPDX-License-Identifier: Apache-2.0
"""A second kind of log: partitions of a remote cluster, in memory, with a network that delays and loses requests.

A claim is an epoch and a claim record. After the record, the partition's leader rejects appends of older epochs.
Between the new epoch and the record it still accepts them, so a new owner reads up to its own claim. The leader numbers
all records, including claims and the markers of other coordinators. Requests wait in the network until the test
delivers them, loses them, or delivers them after their sender has given up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum

from kcoord.runtime.shard_log import Append, Load, OpenedLog, Release, Save
from kcoord.runtime.shard_set import ShardSet
from kcoord_protocol.record_batch import BatchHeader, decode_header, iter_headers
from tests.unit.runtime.ledger import Ledger

BATCHES_PER_READ = 2


@dataclass
class Entry:
    """Records in a partition: a batch of an owner, or a claim or a marker of another coordinator (`data` is empty)."""

    offset: int
    epoch: int
    data: bytes = b""
    count: int = 1


class Partition:
    """A partition on its leader."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.next_epoch = 0
        self.claimed_epoch = -1

    @property
    def end_offset(self) -> int:
        return self.entries[-1].offset + self.entries[-1].count if self.entries else 0

    def new_epoch(self) -> int:
        self.next_epoch += 1
        return self.next_epoch

    def claim(self, epoch: int) -> bool:
        """Writes a claim record. Returns False if another owner has claimed the partition meanwhile."""
        if epoch < self.claimed_epoch:
            return False
        self.claimed_epoch = epoch
        self.entries.append(Entry(self.end_offset, epoch))
        return True

    def append(self, epoch: int, data: bytes) -> bool:
        """Appends whole batches and numbers their records. Returns False if another owner has claimed the partition."""
        if epoch < self.claimed_epoch:
            return False
        for position, header in iter_headers(data):
            batch = data[position : position + header.size_bytes]
            batch = self.end_offset.to_bytes(8, "big") + batch[8:]
            self.entries.append(Entry(self.end_offset, epoch, batch, header.records_count))
        return True

    def write_marker(self) -> None:
        """Appends the record of another coordinator, of which the owners do not know."""
        self.entries.append(Entry(self.end_offset, self.claimed_epoch))

    def batches(self, offset: int, end_offset: int) -> Iterator[tuple[BatchHeader, bytes]]:
        for entry in self.entries:
            if entry.data and offset <= entry.offset < end_offset:
                yield decode_header(entry.data), entry.data


class Fate(Enum):
    """The fate of a request."""

    ANSWERED = "answered"
    LOST = "lost"
    """The request never arrives."""
    ANSWER_LOST = "answer lost"
    """The request arrives, but its response is lost."""
    LATE = "late"
    """The sender gives up. The request may still arrive."""


@dataclass
class Request:
    """A request in the network. `arrive` runs it at the leader and returns the response: a call of a shard set."""

    shard_id: int
    arrive: Callable[[], Callable[[], None]]
    give_up: Callable[[], None]
    is_append: bool = False


@dataclass
class RemoteShardLog:
    """One instance's view of the partitions. Implements `kcoord.runtime.shard_log.ShardLog`."""

    partitions: dict[int, Partition]
    shards: ShardSet[Ledger]
    now_ms: Callable[[], int]
    requests: list[Request] = field(default_factory=list)
    late: list[Request] = field(default_factory=list)
    may_open: set[int] = field(default_factory=set)
    """The shards that the test has given to this instance and, as far as it knows, no other has claimed since."""
    epochs: dict[int, int] = field(default_factory=dict)

    def open(self, load: Load) -> None:
        assert load.shard_id in self.may_open, "a fenced shard is loaded again although nobody asked for it"
        partition = self.partitions[load.shard_id]
        epoch = partition.new_epoch()

        def arrive() -> Callable[[], None]:
            if not partition.claim(epoch):
                return lambda: self._fenced(load)
            self.epochs[load.shard_id] = epoch
            end_offset = partition.end_offset
            return lambda: self.shards.opened(load, OpenedLog(0, end_offset))

        self._send(load, arrive)

    def read(self, load: Load) -> None:
        partition, epoch = self.partitions[load.shard_id], self.epochs[load.shard_id]
        offset = load.offset

        def arrive() -> Callable[[], None]:
            claim = next(entry for entry in partition.entries if entry.epoch == epoch and not entry.data)
            batches = list(partition.batches(offset, claim.offset))
            some, is_end = batches[:BATCHES_PER_READ], len(batches) <= BATCHES_PER_READ
            return lambda: self.shards.read(load, some, self.now_ms(), is_end=is_end)

        self._send(load, arrive)

    def append(self, append: Append, now_ms: int) -> None:
        partition, epoch = self.partitions[append.shard_id], self.epochs[append.shard_id]

        def arrive() -> Callable[[], None]:
            if not partition.append(epoch, append.data):
                return lambda: self._fenced(append)
            return lambda: self.shards.written(append)

        def give_up() -> None:
            self.shards.unknown(append, OSError("no answer in time"), self.now_ms())

        self.requests.append(Request(append.shard_id, arrive, give_up, is_append=True))

    def _send(self, load: Load, arrive: Callable[[], Callable[[], None]]) -> None:
        def give_up() -> None:
            self.shards.failed(load, OSError("no answer in time"), self.now_ms())

        self.requests.append(Request(load.shard_id, arrive, give_up))

    def _fenced(self, ticket: Append | Load) -> None:
        self.may_open.discard(ticket.shard_id)
        self.shards.fenced(ticket)

    def settle(self, request: Request, fate: Fate) -> None:
        """Decides the fate of a request."""
        self.requests.remove(request)
        match fate:
            case Fate.ANSWERED:
                request.arrive()()
            case Fate.LOST:
                request.give_up()
            case Fate.ANSWER_LOST:
                request.arrive()
                request.give_up()
            case Fate.LATE:
                self.late.append(request)
                request.give_up()

    def save(self, save: Save) -> None:
        self.shards.saved(save, self.now_ms(), succeeded=True)

    def release(self, release: Release) -> None:
        self.shards.released(release)

    def close(self, shard_id: int) -> None:
        """Does nothing: the claim stays until another instance makes one."""

    def is_empty(self, shard_id: int) -> bool:
        return False

    def gained(self, shard_id: int) -> None:
        self.may_open.add(shard_id)

    def tick(self, now_ms: int) -> None:
        """Does nothing: there is no periodic work."""

    def stop(self) -> None:
        """Does nothing: no other thread runs."""

    def finish(self, saves: Iterator[Save]) -> None:
        """Does nothing: this log has no snapshots."""
