# SPDX-License-Identifier: Apache-2.0
"""A model of a consumer that only commits and fetches offsets (member epoch -1, as with manual assignment)."""

from __future__ import annotations

from typing import Final

from kcoord.simulation.checkers import AcknowledgedCommits
from kcoord.simulation.client import RETRIABLE, RETRY_MS, Scene, SimulatedClient
from kcoord.simulation.observer import CommitKey
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors
from kcoord_protocol.messages import (
    OffsetCommitRequest,
    OffsetCommitResponse,
    OffsetFetchRequest,
    OffsetFetchResponse,
)

_COMMIT_VERSIONS: Final = (2, 4, 6, 8, 9)
_FETCH_VERSION: Final = 9
_LAST_VERSION_WITH_RETENTION: Final = 4
_PAUSE_MS: Final = 400
_FETCH_PROBABILITY: Final = 0.3
_RETENTION_PROBABILITY: Final = 0.3
_LONGEST_RETENTION_MS: Final = 12_000


class Committer(SimulatedClient):
    """Commits growing offsets for the partitions of one topic, one request at a time, and fetches them again.

    Some commits of old versions have a short retention of their own (`retention_time_ms`).
    """

    def __init__(
        self,
        group_id: str,
        topic: str,
        scene: Scene,
        commits: AcknowledgedCommits,
    ) -> None:
        super().__init__("committer", scene)
        self.group_id = group_id
        self.acknowledged = 0
        self.resting_until_ms = 0
        self._topic = topic
        self._commits = commits
        self._wanted = 0

    def start(self) -> None:
        self._next_after(0)

    def settle(self) -> None:
        self._wanted = self.acknowledged + 1
        self.resting_until_ms = 0

    def is_settled(self) -> bool:
        return self.acknowledged >= self._wanted

    def on_timeout(self) -> None:
        self._next_after(RETRY_MS)

    def _next_after(self, delay_ms: int) -> None:
        self.clock.after(delay_ms, self._next)

    def _next(self) -> None:
        if self.clock.now_ms < self.resting_until_ms:
            self._next_after(min(self.resting_until_ms - self.clock.now_ms, 10 * _PAUSE_MS))
        elif self.random.random() < _FETCH_PROBABILITY:
            self._fetch()
        else:
            self._commit()

    def _commit(self) -> None:
        offset = self._commits.next_offset()
        version = self.random.choice(_COMMIT_VERSIONS)
        partition = self.random.randrange(self.options.partitions)
        committed = OffsetCommitRequest.OffsetCommitRequestPartition(
            partition_index=partition, committed_offset=offset, committed_metadata=f"at {offset}"
        )
        topic = OffsetCommitRequest.OffsetCommitRequestTopic(name=self._topic, partitions=[committed])
        request = OffsetCommitRequest(group_id=self.group_id, generation_id_or_member_epoch=-1, topics=[topic])
        if version <= _LAST_VERSION_WITH_RETENTION and self.random.random() < _RETENTION_PROBABILITY:
            request.retention_time_ms = self.random.randint(1, _LONGEST_RETENTION_MS)

        def on_answer(body: bytes) -> None:
            error = OffsetCommitResponse.decode(body, version).topics[0].partitions[0].error_code
            if error == Errors.NONE:
                self.acknowledged += 1
                self._commits.acknowledge(CommitKey(self.group_id, self._topic, partition), offset)
            self._go_on(error)

        self.request(ApiKey.OFFSET_COMMIT, version, self.group_id, request, on_answer)

    def _fetch(self) -> None:
        expected = self._commits.of_group(self.group_id)
        group = OffsetFetchRequest.OffsetFetchRequestGroup(group_id=self.group_id, topics=None)
        request = OffsetFetchRequest(groups=[group], require_stable=self.random.random() < 0.5)

        def on_answer(body: bytes) -> None:
            answer = OffsetFetchResponse.decode(body, _FETCH_VERSION).groups[0]
            if answer.error_code == Errors.NONE:
                self._commits.answered(expected, answer)
            self._go_on(answer.error_code)

        self.request(ApiKey.OFFSET_FETCH, _FETCH_VERSION, self.group_id, request, on_answer)

    def _go_on(self, error: int) -> None:
        if error == Errors.NONE:
            self._next_after(self.random.randint(1, _PAUSE_MS))
        elif error in RETRIABLE:
            self._next_after(RETRY_MS)
        else:
            raise self.unexpected(error, "of the committer")
