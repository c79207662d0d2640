# SPDX-License-Identifier: Apache-2.0
"""Aborts transactions in partitions that no coordinator knows: hanging transactions (KIP-664).

The journal makes the end of a transaction durable, but not the markers in the partitions. So a power loss can take the
marker of a completed transaction, with the end of a partition's log. Then nobody would end the transaction in that
partition, and readers of committed records would see nothing after its first record.

Therefore the transactions that are open in a log when it is opened are looked up at all coordinators, every CHECK_MS,
until they have ended. A transaction is aborted if all of this is true:

* Two checks in a row found no transaction of its producer, neither open nor ending. A single check may be wrong while
  coordinators move from one worker to another.
* Its producer has sent no batch to the partition since the log was opened. So no record of a later transaction, which
  may have begun after the check, is aborted.

If the end of a log is lost, a committed transaction may so be aborted in that partition. Then none of its records
shows, instead of some of them. While its producer has other transactions, a hanging transaction stays open.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Final

from kcoord.runtime.result import Producer
from kcoord.topics.partition import Marker
from kcoord.topics.store import TopicStore
from kcoord_protocol.errors import KafkaError

CHECK_MS: Final = 5_000

_logger = logging.getLogger(__name__)


class HangingTransactions:
    """Checks the transactions of the partitions of one broker. `in_transaction` asks all coordinators."""

    __slots__ = ("_in_transaction", "_suspects", "_topics")

    def __init__(self, topics: TopicStore, in_transaction: Callable[[frozenset[int]], Awaitable[set[int]]]) -> None:
        self._topics = topics
        self._in_transaction = in_transaction
        self._suspects: set[tuple[str, int, int]] = set()
        """The transactions without a coordinator that the last check found: topic, partition and producer id."""

    async def check(self, now_ms: int) -> None:
        """Aborts the hanging transactions. Does nothing if a coordinator does not answer."""
        producer_ids = frozenset(entry.producer_id for _, _, entry in self._topics.unchanged_transactions())
        if not producer_ids:
            return
        try:
            hanging = producer_ids - await self._in_transaction(producer_ids)
        except KafkaError as error:
            _logger.debug("Not all coordinators answer which transactions are open: %s", error)
            self._suspects.clear()
            return
        suspects = {
            (topic, partition, entry.producer_id): entry
            for topic, partition, entry in self._topics.unchanged_transactions()
            if entry.producer_id in hanging
        }
        for (topic, partition, producer_id), entry in suspects.items():
            if (topic, partition, producer_id) in self._suspects:
                producer = Producer(producer_id, entry.producer_epoch)
                marker = Marker(producer, max(entry.coordinator_epoch, 0), committed=False, bumps_epoch=False)
                self._abort(topic, partition, marker, now_ms)
        self._suspects = set(suspects)

    def _abort(self, topic: str, partition: int, marker: Marker, now_ms: int) -> None:
        _logger.warning(
            "Aborting a transaction of producer %d in %s-%d, since no coordinator has it",
            marker.producer.producer_id,
            topic,
            partition,
        )
        try:
            self._topics.write_marker(topic, partition, marker, now_ms)
        except KafkaError as error:
            _logger.warning("The transaction could not be aborted, it will be retried: %s", error)
