# SPDX-License-Identifier: Apache-2.0
"""Offsets of open transactions (KIP-98, KIP-447): they are pending until the marker of their transaction.

This module defines which records of a transaction count. The shard's replay uses it, and so do the tools that read
logs (`kcoord.logtools.transactions`); `kcoord.pipeline.transactions` has the same rules for columns.

The life of a pending offset:

* A record of a transaction makes it pending. The first such record opens the producer's transaction in this log.
* A commit marker makes it the committed offset. An abort marker drops it. Either marker closes the transaction.
* A later record of the same partition supersedes it: a plain commit at once, a commit in another transaction when that
  transaction commits. Then its own marker no longer makes it count. The partition stays unstable until that marker.
* A tombstone deletes it, in a transaction too.

In front of an upstream, the log may refuse the records of a request after they were replayed. Until it has decided,
they are *provisional*: they have a ticket, and their request is a writer of its own, with the number `-ticket`. So
later records supersede and delete them as usual. `decide` then passes them on to the transaction of their producer, at
the same place in the order of the log, or drops them. A partition with a provisional offset is unstable.

The order of records in the log decides all of this. The state is rebuilt from the log after a crash; snapshots are not
written while there is a pending offset.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from kcoord.coordinator.group.offsets.committed_offsets import CommittedOffset
from kcoord.runtime.result import Producer
from kcoord_protocol.errors import Errors, KafkaError

T = TypeVar("T")


class OffsetKey(NamedTuple):
    """The key of a committed offset."""

    group_id: str
    topic: str
    partition: int


class OpenTransaction(Generic[T]):
    """The pending offsets of one producer. A superseded offset is None; its partition stays unstable."""

    __slots__ = ("offsets", "producer")

    def __init__(self, producer: Producer) -> None:
        self.producer = producer
        self.offsets: dict[OffsetKey, T | None] = {}


class PendingOffsets(Generic[T]):
    """All pending offsets of a log. `T` is the reader's form of an offset: a CommittedOffset, or the record."""

    __slots__ = ("_writers", "open")

    def __init__(self) -> None:
        self.open: dict[int, OpenTransaction[T]] = {}
        """Producer id -> its open transaction. -ticket -> the provisional offsets of a request."""
        self._writers: dict[str, dict[OffsetKey, dict[int, None]]] = {}
        """Group id -> partition -> the keys in `open` with a pending offset of it, in the order of the log."""

    def __bool__(self) -> bool:
        return bool(self.open)

    # Reading.

    def epoch_of(self, producer_id: int) -> int | None:
        """Returns the epoch of a producer whose transaction is open in this log, else None."""
        transaction = self.open.get(producer_id)
        return transaction.producer.producer_epoch if transaction is not None else None

    def check_epoch(self, producer_id: int, producer_epoch: int) -> int | None:
        """Returns `epoch_of`; raises INVALID_PRODUCER_EPOCH if that epoch is newer than the caller's."""
        epoch = self.epoch_of(producer_id)
        if epoch is not None and producer_epoch < epoch:
            raise KafkaError(Errors.INVALID_PRODUCER_EPOCH, f"Producer {producer_id} is at epoch {epoch}.")
        return epoch

    def is_pending(self, group_id: str, topic: str, partition: int) -> bool:
        writers = self._writers.get(group_id)
        return writers is not None and OffsetKey(group_id, topic, partition) in writers

    def of_group(self, group_id: str) -> list[OffsetKey]:
        """Returns the group's partitions with pending offsets."""
        return sorted(self._writers.get(group_id, ()))

    def of_topic(self, topic: str) -> list[OffsetKey]:
        """Returns the partitions of a topic with pending offsets, of all groups."""
        return sorted(key for writers in self._writers.values() for key in writers if key.topic == topic)

    def has_group(self, group_id: str) -> bool:
        return group_id in self._writers

    def count_of(self, producer_id: int) -> int:
        """Returns how many offsets would count if the producer's transaction were committed now."""
        transaction = self.open.get(producer_id)
        return 0 if transaction is None else sum(offset is not None for offset in transaction.offsets.values())

    # Changing.

    def note(self, key: OffsetKey, offset: T | None, producer: Producer | None, ticket: int = 0) -> bool:
        """Adds the next record of the log. Returns True if the record counts at once, without a marker.

        `offset` is None for a tombstone, which always counts at once. `producer` is the producer of the record's
        transaction, None outside a transaction. A provisional record has a `ticket`.
        """
        if offset is None:
            self._drop(key)
        elif producer is not None:
            self._put(-ticket or producer.producer_id, producer, key, offset)
            return False
        else:
            self._supersede(key)
        return True

    def _put(self, writer: int, producer: Producer, key: OffsetKey, offset: T) -> None:
        """Makes an offset pending in the producer's transaction, or in the provisional one."""
        self._transaction(writer, producer).offsets[key] = offset
        writers = self._writers.setdefault(key.group_id, {}).setdefault(key, {})
        writers.pop(writer, None)
        writers[writer] = None

    def _transaction(self, writer: int, producer: Producer) -> OpenTransaction[T]:
        transaction = self.open.get(writer)
        if transaction is None:
            transaction = self.open[writer] = OpenTransaction(producer)
        transaction.producer = producer
        return transaction

    def decide(self, ticket: int, *, accepted: bool) -> None:
        """Makes the provisional offsets with this ticket part of their producer's transaction, or drops them."""
        provisional = self.open.pop(-ticket, None)
        if provisional is None:
            return
        if not accepted:
            for key in provisional.offsets:
                self._forget(key, -ticket)
            return
        producer_id = provisional.producer.producer_id
        # The transaction is open even if all offsets of the request were deleted meanwhile.
        self._transaction(producer_id, provisional.producer).offsets.update(provisional.offsets)
        for key in provisional.offsets:
            writers = self._writers[key.group_id]
            writers[key] = {
                producer_id if writer == -ticket else writer: None for writer in writers[key] if writer != producer_id
            }

    def _supersede(self, key: OffsetKey) -> None:
        """Supersedes all pending offsets of the partition, since there is a newer committed offset."""
        for producer_id in self._writers.get(key.group_id, {}).get(key, ()):
            self.open[producer_id].offsets[key] = None

    def _drop(self, key: OffsetKey) -> None:
        """Deletes all pending offsets of the partition."""
        writers = self._writers.get(key.group_id)
        if writers is None:
            return
        for producer_id in writers.pop(key, ()):
            del self.open[producer_id].offsets[key]
        if not writers:
            del self._writers[key.group_id]

    def end(self, producer_id: int, *, committed: bool) -> Iterator[tuple[OffsetKey, T]]:
        """Closes the producer's transaction and yields the offsets that count from now on."""
        transaction = self.open.pop(producer_id, None)
        if transaction is None:
            return
        for key, offset in transaction.offsets.items():
            if committed and offset is not None:
                self._supersede_older(key, producer_id)
                yield key, offset
            self._forget(key, producer_id)

    def _supersede_older(self, key: OffsetKey, producer_id: int) -> None:
        for other in self._writers[key.group_id][key]:
            if other == producer_id:
                return
            self.open[other].offsets[key] = None

    def _forget(self, key: OffsetKey, producer_id: int) -> None:
        groups = self._writers[key.group_id]
        writers = groups[key]
        del writers[producer_id]
        if not writers:
            del groups[key]
            if not groups:
                del self._writers[key.group_id]

    # For tests and checkers.

    def hard_state(self) -> Mapping[str, object]:
        """Returns what the log rebuilds, so not the provisional offsets."""
        writers = {
            key: [writer for writer in writers if writer >= 0]
            for keys in self._writers.values()
            for key, writers in keys.items()
        }
        return {
            "open": {
                producer_id: (transaction.producer.producer_epoch, dict(transaction.offsets))
                for producer_id, transaction in sorted(self.open.items())
                if producer_id >= 0
            },
            "writers": {key: producer_ids for key, producer_ids in writers.items() if producer_ids},
        }


TransactionalOffsets: TypeAlias = PendingOffsets[CommittedOffset]
"""The pending offsets of a shard."""
