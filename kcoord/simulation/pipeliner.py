# SPDX-License-Identifier: Apache-2.0
"""A model of a client that sends commits, fetches and metadata requests without waiting for responses.

Equal requests follow each other on one connection, as those of a busy consumer with manual assignment do. This is the
load of the fast paths.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kcoord.simulation.client import RETRIABLE, RETRY_MS, Scene, SimulatedClient
from kcoord.simulation.observer import CommitKey
from kcoord.simulation.options import PIPELINE_GROUP
from kcoord.simulation.promises import Promises
from kcoord.simulation.topics import FIRST_TOPIC, LATER_TOPIC
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors
from kcoord_protocol.messages import (
    MetadataRequest,
    MetadataResponse,
    OffsetCommitRequest,
    OffsetCommitResponse,
    OffsetFetchRequest,
    OffsetFetchResponse,
)

_COMMIT_VERSIONS: Final = (7, 9, 10)
_FIRST_VERSION_WITH_IDS: Final = 10
_METADATA_VERSION: Final = 12
_MOST_AT_A_TIME: Final = 5
_LONGEST_REST_MS: Final = 600
_REFRESH_PROBABILITY: Final = 0.2
_OF_THE_TOPIC: Final = frozenset({Errors.UNKNOWN_TOPIC_ID, Errors.UNKNOWN_TOPIC_OR_PARTITION})


class Pipeliner(SimulatedClient):
    """Sends a burst, waits for all its responses, rests, and sends the next one.

    With `only_reads` it sends no commits, and fetches offsets of commits of another client that are not answered yet.
    """

    def __init__(
        self,
        name: str,
        scene: Scene,
        promises: Promises,
        *,
        only_reads: bool = False,
    ) -> None:
        super().__init__(name, scene)
        self.bursts = 0
        self.resting_until_ms = 0
        self._commits = promises.commits
        self._promises = promises
        self._only_reads = only_reads
        self._version = self.random.choice(_COMMIT_VERSIONS)
        self._by_id = self.random.random() < 0.5
        self._topics: dict[str, bytes] = {}
        """Topic ids by name, as this client last saw them; they may be out of date."""
        self._wanted = 0
        self._rest_number = 0

    def start(self) -> None:
        self._rest(0)

    def settle(self) -> None:
        self._wanted = self.bursts + 1
        self.resting_until_ms = 0
        self._rest(0)

    def is_settled(self) -> bool:
        return self.bursts > self._wanted

    def on_timeout(self) -> None:
        self._rest(RETRY_MS)

    def _rest(self, delay_ms: int) -> None:
        self._rest_number += 1
        number = self._rest_number
        self.clock.after(delay_ms, lambda: self._send() if number == self._rest_number else None)

    def _send(self) -> None:
        if self.is_waiting:
            return
        if self.clock.now_ms < self.resting_until_ms:
            self._rest(self.resting_until_ms - self.clock.now_ms)
            return
        if FIRST_TOPIC not in self._topics or self.random.random() < _REFRESH_PROBABILITY:
            ids = {name: self._promises.topic_id(name) for name in (FIRST_TOPIC, LATER_TOPIC)}
            self._topics = {name: topic_id for name, topic_id in ids.items() if topic_id is not None}
        kinds: list[Callable[[], None]] = [self._fetch, self._fetch, self._look]
        if not self._only_reads:
            kinds += self._commit, self._commit
        for _ in range(self.random.randint(1, _MOST_AT_A_TIME)):
            self.random.choice(kinds)()

    def _answered(self, error: int) -> None:
        if error and error not in RETRIABLE and error not in _OF_THE_TOPIC:
            raise self.unexpected(error, "of the pipeliner")
        if not self.is_waiting:
            self.bursts += 1
            self._rest(self.random.randint(1, _LONGEST_REST_MS))

    def _commit(self) -> None:
        offset, version = self._commits.next_offset(), self._version
        topics = [
            OffsetCommitRequest.OffsetCommitRequestTopic(
                name=name,
                topic_id=topic_id,
                partitions=[
                    OffsetCommitRequest.OffsetCommitRequestPartition(partition_index=number, committed_offset=offset)
                    for number in range(self.options.partitions if name == FIRST_TOPIC else 1)
                ],
            )
            for name, topic_id in self._topics.items()
        ]
        request = OffsetCommitRequest(group_id=PIPELINE_GROUP, generation_id_or_member_epoch=-1, topics=topics)

        def on_answer(body: bytes) -> None:
            errors = [Errors.NONE.value]
            for topic in OffsetCommitResponse.decode(body, version).topics:
                name = topic.name or self._promises.topic_name(topic.topic_id)
                for partition in topic.partitions:
                    errors.append(partition.error_code)
                    if not partition.error_code:
                        self._commits.acknowledge(CommitKey(PIPELINE_GROUP, name, partition.partition_index), offset)
            self._answered(max(errors))

        self.request(ApiKey.OFFSET_COMMIT, version, PIPELINE_GROUP, request, on_answer)

    def _fetch(self) -> None:
        """Fetches offsets by name or by id, of the topics that the client has seen or of all topics."""
        # Only the first topic exists all the time, so only its commits are expected.
        commits = self._commits.of_group(PIPELINE_GROUP)
        expected = {key: offset for key, offset in commits.items() if key.topic == FIRST_TOPIC}
        version = _FIRST_VERSION_WITH_IDS if self._by_id else _FIRST_VERSION_WITH_IDS - 1
        topics = [
            OffsetFetchRequest.OffsetFetchRequestTopics(
                name=name, topic_id=topic_id, partition_indexes=list(range(self.options.partitions))
            )
            for name, topic_id in self._topics.items()
        ]
        group = OffsetFetchRequest.OffsetFetchRequestGroup(
            group_id=PIPELINE_GROUP, topics=self.random.choice((topics, None))
        )
        request = OffsetFetchRequest(groups=[group], require_stable=self.random.random() < 0.5)

        def on_answer(body: bytes) -> None:
            (answer,) = OffsetFetchResponse.decode(body, version).groups
            for topic in answer.topics:
                topic.name = topic.name or self._promises.topic_name(topic.topic_id)
            if not answer.error_code:
                self._commits.answered(expected, answer)
            self._answered(answer.error_code)

        self.request(ApiKey.OFFSET_FETCH, version, PIPELINE_GROUP, request, on_answer)

    def _look(self) -> None:
        """Asks for the metadata of all topics, as clients do periodically."""

        def on_answer(body: bytes) -> None:
            MetadataResponse.decode(body, _METADATA_VERSION)
            self._answered(Errors.NONE)

        request = MetadataRequest(topics=None)
        self.request(ApiKey.METADATA, _METADATA_VERSION, PIPELINE_GROUP, request, on_answer)
