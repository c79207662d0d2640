# SPDX-License-Identifier: Apache-2.0
"""A model of a consumer that only commits (member epoch -1, as with manual assignment), and reads its commits back."""

from __future__ import annotations

from random import Random
from typing import Final

from kcoord.simulation.apis import OFFSET_COMMIT_VERSION, OFFSET_FETCH_VERSION
from kcoord.simulation.checkers import AcknowledgedCommits
from kcoord.simulation.client import RETRIABLE, RETRY_MS, Client
from kcoord.simulation.clock import Clock
from kcoord.simulation.network import Network
from kcoord.simulation.options import Options
from protocol.api_keys import ApiKey
from protocol.errors import Errors
from protocol.messages import (
    OffsetCommitRequest,
    OffsetCommitResponse,
    OffsetFetchRequest,
    OffsetFetchResponse,
)

_PAUSE_MS: Final = 400
_FETCH_PROBABILITY: Final = 0.3


class Committer(Client):
    """Commits growing offsets for the partitions of one topic, one request at a time."""

    def __init__(
        self,
        group_id: str,
        topic: str,
        partitions: int,
        clock: Clock,
        random: Random,
        network: Network,
        options: Options,
        commits: AcknowledgedCommits,
    ) -> None:
        super().__init__("committer", clock, network, options)
        self.group_id = group_id
        self.acknowledged = 0
        self._topic = topic
        self._partitions = partitions
        self._random = random
        self._commits = commits

    def start(self) -> None:
        self._next_after(0)

    def on_timeout(self) -> None:
        self._next_after(RETRY_MS)

    def _next_after(self, delay_ms: int) -> None:
        self.clock.after(delay_ms, self._next)

    def _next(self) -> None:
        if self._random.random() < _FETCH_PROBABILITY:
            self._fetch()
        else:
            self._commit()

    def _commit(self) -> None:
        offset = self._commits.next_offset()
        partition = self._random.randrange(self._partitions)
        committed = OffsetCommitRequest.OffsetCommitRequestPartition(
            partition_index=partition, committed_offset=offset, committed_metadata=f"at {offset}"
        )
        topic = OffsetCommitRequest.OffsetCommitRequestTopic(name=self._topic, partitions=[committed])
        request = OffsetCommitRequest(group_id=self.group_id, generation_id_or_member_epoch=-1, topics=[topic])

        def on_answer(body: bytes) -> None:
            error = OffsetCommitResponse.decode(body, OFFSET_COMMIT_VERSION).topics[0].partitions[0].error_code
            if error == Errors.NONE:
                self.acknowledged += 1
                self._commits.acknowledge(self.group_id, self._topic, partition, offset)
            self._go_on(error)

        self.request(ApiKey.OFFSET_COMMIT, OFFSET_COMMIT_VERSION, self.group_id, request, on_answer)

    def _fetch(self) -> None:
        expected = self._commits.of_group(self.group_id)
        group = OffsetFetchRequest.OffsetFetchRequestGroup(group_id=self.group_id, topics=None)
        request = OffsetFetchRequest(groups=[group], require_stable=True)

        def on_answer(body: bytes) -> None:
            answer = OffsetFetchResponse.decode(body, OFFSET_FETCH_VERSION).groups[0]
            if answer.error_code == Errors.NONE:
                self._commits.check(self.group_id, expected, answer)
            self._go_on(answer.error_code)

        self.request(ApiKey.OFFSET_FETCH, OFFSET_FETCH_VERSION, self.group_id, request, on_answer)

    def _go_on(self, error: int) -> None:
        if error == Errors.NONE:
            self._next_after(self._random.randint(1, _PAUSE_MS))
        elif error in RETRIABLE:
            self._next_after(RETRY_MS)
        else:
            raise self.unexpected(error, "of the committer")
