# SPDX-License-Identifier: Apache-2.0
"""Refreshes metadata on request. One refresh is in flight at a time and serves all requests made until it began."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from kcoord.client.cluster import Cluster
from kcoord.client.signal import Signal
from kcoord.client.tasks import spawn, stop
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import MetadataResponse

_log = logging.getLogger(__name__)


class MetadataUpdater:
    """A task that refreshes the metadata of requested topics.

    `request` returns at once. `changed` is notified after each refresh. If a topic is still missing then, its user
    requests it again, and the next refresh waits for a backoff.
    """

    def __init__(self, cluster: Cluster, changed: Signal, *, allow_auto_create_topics: bool) -> None:
        self._cluster = cluster
        self._changed = changed
        self._allow_auto_create_topics = allow_auto_create_topics
        self._names: set[str] = set()
        self._creatable: set[str] = set()
        self._topic_ids: set[bytes] = set()
        self._failure: KafkaError | None = None
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = spawn(self._run(), "kcoord consumer metadata")

    async def stop(self) -> None:
        await stop([self._task])

    def take_failure(self) -> KafkaError | None:
        """Returns the error that `poll` has to raise, once."""
        failure, self._failure = self._failure, None
        return failure

    def request(self, *, names: Iterable[str] = (), topic_ids: Iterable[bytes] = (), may_create: bool = False) -> None:
        """Requests the metadata of topics by name or id.

        Set `may_create` only for topics that the application has just named. Otherwise a consumer that still reads a
        deleted topic would create it again.
        """
        self._names.update(names)
        self._topic_ids.update(topic_ids)
        if may_create and self._allow_auto_create_topics:
            self._creatable.update(names)
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
                _log.debug("the metadata refresh failed: %s", error)
                self.request(names=names, topic_ids=topic_ids)
            self._changed.notify()
            # Users request a topic that was not in the response again at once. The backoff gives the broker time to
            # learn of the topic.
            rounds = rounds + 1 if self._wake.is_set() else 1
            await self._cluster.sleep_backoff(rounds)

    async def _refresh(self, names: set[str], topic_ids: set[bytes]) -> None:
        creatable = names & self._creatable
        if creatable:
            self._check(await self._cluster.refresh_metadata(creatable, allow_auto_topic_creation=True))
            self._creatable -= creatable
        if names - creatable:
            self._check(await self._cluster.refresh_metadata(names - creatable))
        if topic_ids:
            await self._cluster.refresh_topic_ids(topic_ids)

    def _check(self, response: MetadataResponse) -> None:
        """Keeps an error for `poll` if a name can never be that of a topic. All other errors may pass."""
        for topic in response.topics:
            if topic.error_code == Errors.INVALID_TOPIC_EXCEPTION:
                self._failure = KafkaError(Errors.INVALID_TOPIC_EXCEPTION, topic.name)
