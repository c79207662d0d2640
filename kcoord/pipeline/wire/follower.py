# SPDX-License-Identifier: Apache-2.0
"""Follows the ends of the partitions of a topic in a cluster, for a stream.

The brokers know the stable offsets. The last stable offset of a partition is the first offset of its first transaction
that is open, or whose marker is not replicated yet. If an abandoned transaction (DescribeProducers, KIP-664) holds it,
the follower reads the log behind it, which has the markers of the other transactions. The leader's answers would not
do: it knows no open transaction any more as soon as it has written the marker, which no consumer can read yet.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import replace
from typing import Final

from kcoord.pipeline.log_files import NoLogError
from kcoord.pipeline.log_reader import END_OF_LOG
from kcoord.pipeline.options import SourceOptions
from kcoord.pipeline.range_reader import LogRange
from kcoord.pipeline.routing import is_excluded
from kcoord.pipeline.transactions import OpenTransactions
from kcoord.pipeline.wire.client import LATEST, client_of
from kcoord.pipeline.wire.log import BrokerLog, accept_loss
from kcoord.pipeline.wire.place import BrokerPartition
from kcoord.pipeline.wire.planning import (
    broker_partitions,
    broker_ranges,
    bytes_between,
    range_within,
    with_sizes,
)
from kcoord_protocol.uuid import uuid_to_string

_NO_TRANSACTION: Final = -1


class BrokerFollower:
    """The partitions in the cluster of the options. With `resolves` the ends are stable offsets."""

    def __init__(self, options: SourceOptions, *, resolves: bool) -> None:
        self._options = options
        self._resolves = resolves
        self._logs: list[BrokerPartition] = []
        self._judged: dict[str, int] = {}
        """The ends of the logs when `advance` found their stable offsets. The markers are below them."""

    def look(self) -> str | None:
        """Lists the partitions. There may be none, since a broker creates the topic for its first group."""
        try:
            self._logs = broker_partitions(self._options)
        except NoLogError:
            self._logs = []
        return uuid_to_string(self._logs[0].topic_id) if self._logs else None

    def ends(self) -> dict[str, int]:
        return {str(log.log_partition): log.end_offset for log in self._logs}

    def advance(self, start: dict[str, int], budget_bytes: int, last: dict[str, int] | None) -> dict[str, int]:
        self._check(start)
        stable = self._stable_offsets(start, budget_bytes)
        self._judged = self.ends()
        self._find_sizes(start, min(budget_bytes, self._options.split_bytes))
        end = dict(start)
        for log in self._logs:
            if budget_bytes <= 0:
                break
            name = str(log.log_partition)
            begun = max(start.get(name, 0), log.start_offset)
            stop = stable[log.log_partition] if last is None else min(stable[log.log_partition], last.get(name, 0))
            if stop > begun:
                end[name], size = range_within(log, begun, stop, budget_bytes)
                budget_bytes -= size
        return end

    def ranges(self, start: dict[str, int], end: dict[str, int]) -> list[tuple[LogRange, int]]:
        self._check(end)
        self._find_sizes(start, self._options.split_bytes)
        ranges = []
        for log in self._logs:
            name = str(log.log_partition)
            begun, stop = start.get(name, 0), end.get(name, 0)
            if stop > begun:
                # Every transaction of the range is decided, but its marker may follow the range. A new leader may list
                # an earlier end of the log for a moment. A reader waits for the end that it is given.
                horizon = END_OF_LOG if self._resolves else stop
                log = replace(log, end_offset=max(log.end_offset, self._judged.get(name, 0)))
                cut = broker_ranges(log, self._options.split_bytes, begun, stop, horizon)
                # A log that lost all of the range has an empty one: `_check` has accepted the loss.
                ranges += cut or [(LogRange(log, begun, begun, horizon), 1)]
        return ranges

    def bytes_behind(self, start: dict[str, int]) -> dict[str, int]:
        behind = {}
        for log in self._logs:
            name = str(log.log_partition)
            begun = max(start.get(name, 0), log.start_offset)
            if begun < log.end_offset:
                behind[name] = bytes_between(log, begun, log.end_offset)
        return behind

    def done(self, end: dict[str, int]) -> None:
        """Does nothing: the brokers are asked again for each batch."""

    def _find_sizes(self, start: dict[str, int], enough_bytes: int) -> None:
        """Asks for the sizes of the logs if more than `enough_bytes` seem to follow `start`."""
        if sum(self.bytes_behind(start).values()) > enough_bytes:
            self._logs = with_sizes(self._logs)

    def _check(self, start: dict[str, int]) -> None:
        """Raises DataLossError, or logs a warning, if a partition no longer has the offsets from `start` on."""
        logs = {str(log.log_partition): log for log in self._logs}
        for name, offset in start.items():
            log = logs.get(name)
            loss = None
            if log is None and is_excluded(int(name), self._options.groups, self._options.log_partitions):
                continue
            if log is None:
                loss = f"{self._options.topic}-{name} does not exist any more, and was read up to offset {offset - 1}"
            elif log.end_offset < offset:
                loss = f"{log} ends at offset {log.end_offset - 1}, and was read up to offset {offset - 1}"
            elif log.start_offset > offset:
                loss = f"{log}: the records {offset} to {log.start_offset - 1} were deleted before they were read"
            if loss is not None:
                accept_loss(loss, fails=self._options.fails_on_data_loss)

    def _stable_offsets(self, start: dict[str, int], budget_bytes: int) -> dict[int, int]:
        """Returns the offset of each partition below which every transaction is decided or abandoned."""
        ends = {log.log_partition: log.end_offset for log in self._logs}
        if not self._resolves or not ends:
            return ends
        options = self._options
        client = client_of(options.properties)
        stable = client.offsets(options.topic, ends, LATEST, read_committed=True)
        undecided = [log for log in self._logs if stable[log.log_partition] < log.end_offset]
        if undecided:
            abandoned_before_ms = time.time() * 1000 - options.abandoned_transaction_ms
            producers = client.producers(options.topic, [log.log_partition for log in undecided])
            for log in undecided:
                number = log.log_partition
                abandoned = {
                    producer.producer_id: producer.current_txn_start_offset
                    for producer in producers[number]
                    if producer.current_txn_start_offset != _NO_TRANSACTION
                    and producer.last_timestamp < abandoned_before_ms
                }
                if any(offset <= stable[number] for offset in abandoned.values()):
                    begun = max(stable[number], start.get(str(number), 0))
                    stable[number] = _stable_offset(log, begun, abandoned, budget_bytes)
        return {number: min(stable[number], ends[number]) for number in ends}


def _stable_offset(log: BrokerPartition, begun: int, abandoned: Collection[int], budget_bytes: int) -> int:
    """Returns the first offset of the first transaction from `begun` on that has no marker, or where reading ended.

    Ignores the transactions of the producers `abandoned`. Reads about the budget, and more if nothing else is stable.
    """
    transactions = OpenTransactions()
    stable = begun
    for piece in BrokerLog(log).pieces(begun, log.end_offset, verify=False):
        transactions.note_all(piece.batches, piece.control_types)
        first_offset = transactions.first_offset
        stable = min((first_offset[number] for number in first_offset if number not in abandoned), default=piece.end)
        budget_bytes -= piece.size_bytes
        if budget_bytes <= 0 and stable > begun:
            break
    return stable
