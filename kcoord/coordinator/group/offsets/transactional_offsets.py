# SPDX-License-Identifier: Apache-2.0
"""Offsets that were committed within transactions under way (KIP-98, KIP-447): pending until the marker comes.

This is the definition of which records of a transaction count. The shard's replay follows it, and so do the tools that
read logs (`kcoord.logtools.transactions`). Log order decides between the records of one partition: what was committed
after a pending offset, with or without a transaction, outlives that offset's own marker, and a tombstone deletes what
is pending before it. `kcoord.pipeline.transactions` has the same rule for columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from kcoord.coordinator.group.offsets.committed_offsets import CommittedOffset
from kcoord.runtime.result import Producer
from kcoord_protocol.errors import Errors, KafkaError

T = TypeVar("T")


class OffsetKey(NamedTuple):
    """What a committed offset belongs to."""

    group_id: str
    topic: str
    partition: int


class OpenTransaction(Generic[T]):
    """What one producer has pending. An offset that was superseded is None; its partition stays unstable."""

    __slots__ = ("offsets", "producer_epoch")

    def __init__(self, producer_epoch: int) -> None:
        self.producer_epoch = producer_epoch
        self.offsets: dict[OffsetKey, T | None] = {}


class PendingOffsets(Generic[T]):
    """All pending offsets of a log. `T` is what its reader makes of one: a CommittedOffset, or the record."""

    __slots__ = ("_writers", "open")

    def __init__(self) -> None:
        self.open: dict[int, OpenTransaction[T]] = {}
        """By producer id."""
        self._writers: dict[str, dict[OffsetKey, dict[int, None]]] = {}
        """By group: the producers with a pending offset of each partition, in the order of the log."""

    def __bool__(self) -> bool:
        return bool(self.open)

    # Reading.

    def epoch_of(self, producer_id: int) -> int | None:
        """The epoch of a producer whose transaction is open in this log."""
        found = self.open.get(producer_id)
        return found.producer_epoch if found is not None else None

    def check_epoch(self, producer_id: int, producer_epoch: int) -> int | None:
        """As `epoch_of`; raises INVALID_PRODUCER_EPOCH if that epoch is newer than the caller's."""
        epoch = self.epoch_of(producer_id)
        if epoch is not None and producer_epoch < epoch:
            raise KafkaError(Errors.INVALID_PRODUCER_EPOCH, f"Producer {producer_id} is at epoch {epoch}.")
        return epoch

    def is_pending(self, group_id: str, topic: str, partition: int) -> bool:
        writers = self._writers.get(group_id)
        return writers is not None and OffsetKey(group_id, topic, partition) in writers

    def of_group(self, group_id: str) -> list[OffsetKey]:
        """The group's partitions with pending offsets."""
        return sorted(self._writers.get(group_id, ()))

    def of_topic(self, topic: str) -> list[OffsetKey]:
        """The partitions of a topic with pending offsets, of all groups."""
        return sorted(key for writers in self._writers.values() for key in writers if key.topic == topic)

    def has_group(self, group_id: str) -> bool:
        return group_id in self._writers

    def count_of(self, producer_id: int) -> int:
        """How many offsets would count if the producer's transaction were committed now."""
        transaction = self.open.get(producer_id)
        return 0 if transaction is None else sum(offset is not None for offset in transaction.offsets.values())

    # Changing.

    def note(self, key: OffsetKey, offset: T | None, producer: Producer | None) -> bool:
        """The next record of the log, a tombstone where `offset` is None; `producer` is whose transaction it is part
        of. Whether the record counts from its own place on: a tombstone does, in a transaction too.
        """
        if offset is None:
            self._drop(key)
        elif producer is not None:
            self._put(producer, key, offset)
            return False
        else:
            self._supersede(key)
        return True

    def _put(self, producer: Producer, key: OffsetKey, offset: T) -> None:
        """A producer has committed within its transaction."""
        transaction = self.open.get(producer.producer_id)
        if transaction is None:
            transaction = self.open[producer.producer_id] = OpenTransaction(producer.producer_epoch)
        transaction.producer_epoch = producer.producer_epoch
        transaction.offsets[key] = offset
        writers = self._writers.setdefault(key.group_id, {}).setdefault(key, {})
        writers.pop(producer.producer_id, None)
        writers[producer.producer_id] = None

    def _supersede(self, key: OffsetKey) -> None:
        """There is a newer offset of the partition: none of the pending ones is to replace it."""
        for producer_id in self._writers.get(key.group_id, {}).get(key, ()):
            self.open[producer_id].offsets[key] = None

    def _drop(self, key: OffsetKey) -> None:
        """The partition's offset was deleted, and what is pending goes with it."""
        writers = self._writers.get(key.group_id)
        if writers is None:
            return
        for producer_id in writers.pop(key, ()):
            del self.open[producer_id].offsets[key]
        if not writers:
            del self._writers[key.group_id]

    def end(self, producer_id: int, *, committed: bool) -> Iterator[tuple[OffsetKey, T]]:
        """The producer's transaction has ended; the offsets that count from now on."""
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
        return {
            "open": {
                producer_id: (transaction.producer_epoch, dict(transaction.offsets))
                for producer_id, transaction in sorted(self.open.items())
            },
            "writers": {key: list(producers) for keys in self._writers.values() for key, producers in keys.items()},
        }


TransactionalOffsets: TypeAlias = PendingOffsets[CommittedOffset]
"""Those of a shard."""
