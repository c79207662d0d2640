# SPDX-License-Identifier: Apache-2.0
"""Metadata refreshes that somebody needs, one request for all of them at a time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from kcoord.client.cluster import Cluster
from kcoord.client.signal import Signal
from kcoord.client.tasks import spawn, stop
from protocol.errors import KafkaError

_log = logging.getLogger(__name__)


class MetadataUpdater:
    """`request` returns at once; `changed` is notified when an answer has come. What is still missing has to be
    requested again, which then waits for a backoff.
    """

    def __init__(self, cluster: Cluster, changed: Signal, *, allow_auto_create_topics: bool) -> None:
        self._cluster = cluster
        self._changed = changed
        self._allow_auto_create_topics = allow_auto_create_topics
        self._names: set[str] = set()
        self._topic_ids: set[bytes] = set()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = spawn(self._run(), "kcoord consumer metadata")

    async def stop(self) -> None:
        await stop([self._task])

    def request(self, *, names: Iterable[str] = (), topic_ids: Iterable[bytes] = ()) -> None:
        """Asks about topics as soon as possible."""
        self._names.update(names)
        self._topic_ids.update(topic_ids)
        if self._names or self._topic_ids:
            self._wake.set()

    async def _run(self) -> None:
        rounds = 0
        while True:
            await self._wake.wait()
            names, topic_ids = self._names, self._topic_ids
            self._names, self._topic_ids = set(), set()
            self._wake.clear()
            try:
                await self._refresh(names, topic_ids)
            except KafkaError as error:
                _log.debug("metadata could not be refreshed: %s", error)
                self.request(names=names, topic_ids=topic_ids)
            self._changed.notify()
            # What was not in the answer is requested again at once by those who need it; a broker needs time to learn.
            rounds = rounds + 1 if self._wake.is_set() else 1
            await self._cluster.sleep_backoff(rounds)

    async def _refresh(self, names: set[str], topic_ids: set[bytes]) -> None:
        if names:
            await self._cluster.refresh_metadata(names, allow_auto_topic_creation=self._allow_auto_create_topics)
        if topic_ids:
            await self._cluster.refresh_topic_ids(topic_ids)
