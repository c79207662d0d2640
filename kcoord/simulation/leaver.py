# SPDX-License-Identifier: Apache-2.0
"""A model of members that commit again after they have left, with the same bytes as an earlier commit."""

from __future__ import annotations

from typing import Final

from kcoord.simulation.client import RETRY_MS, Scene, SimulatedClient
from kcoord.simulation.options import LEAVER_GROUP
from kcoord.simulation.topics import FIRST_TOPIC
from kcoord.simulation.trace import ViolationError
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.messages import (
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
    OffsetCommitRequest,
    OffsetCommitResponse,
)

_HEARTBEAT_VERSION: Final = 1
_COMMIT_VERSION: Final = 9
_LEAVE_EPOCH: Final = -1
_SHORTEST_REST_MS: Final = 1_000
_LONGEST_REST_MS: Final = 4_000


class Leaver(SimulatedClient):
    """Runs one member after the other: join, two commits, leave, and one more commit.

    After the response to the join it sends all other requests without waiting. Checks that the last commit fails if the
    leave succeeded (I-13).
    """

    def __init__(self, scene: Scene) -> None:
        super().__init__("leaver", scene)
        self.rounds = 0
        self._wanted = 0
        self._member = 0
        self._has_left = False

    def start(self) -> None:
        self._rest()

    def settle(self) -> None:
        self._wanted = self.rounds + 1

    def is_settled(self) -> bool:
        return self.rounds >= self._wanted

    def on_timeout(self) -> None:
        self.clock.after(RETRY_MS, self._join)

    def _rest(self) -> None:
        self.clock.after(self.random.randint(_SHORTEST_REST_MS, _LONGEST_REST_MS), self._join)

    def _join(self) -> None:
        self._member += 1
        request = self._heartbeat(0)
        request.rebalance_timeout_ms = self.options.rebalance_timeout_ms
        request.subscribed_topic_names = [FIRST_TOPIC]
        request.topic_partitions = []

        def on_answer(body: bytes) -> None:
            response = ConsumerGroupHeartbeatResponse.decode(body, _HEARTBEAT_VERSION)
            if response.error_code:
                self._rest()
            else:
                self._go_on(response.member_epoch)

        self.request(ApiKey.CONSUMER_GROUP_HEARTBEAT, _HEARTBEAT_VERSION, LEAVER_GROUP, request, on_answer)

    def _heartbeat(self, epoch: int) -> ConsumerGroupHeartbeatRequest:
        return ConsumerGroupHeartbeatRequest(
            group_id=LEAVER_GROUP, member_id=f"leaver-{self._member}", member_epoch=epoch
        )

    def _go_on(self, epoch: int) -> None:
        self._commit(epoch)
        self._commit(epoch)
        self._leave()
        self._commit(epoch, is_last=True)

    def _leave(self) -> None:
        def on_answer(body: bytes) -> None:
            self._has_left = not ConsumerGroupHeartbeatResponse.decode(body, _HEARTBEAT_VERSION).error_code

        self._has_left = False
        request = self._heartbeat(_LEAVE_EPOCH)
        self.request(ApiKey.CONSUMER_GROUP_HEARTBEAT, _HEARTBEAT_VERSION, LEAVER_GROUP, request, on_answer)

    def _commit(self, epoch: int, *, is_last: bool = False) -> None:
        partition = OffsetCommitRequest.OffsetCommitRequestPartition(partition_index=0, committed_offset=epoch)
        topic = OffsetCommitRequest.OffsetCommitRequestTopic(name=FIRST_TOPIC, partitions=[partition])
        request = OffsetCommitRequest(
            group_id=LEAVER_GROUP,
            member_id=f"leaver-{self._member}",
            generation_id_or_member_epoch=epoch,
            topics=[topic],
        )

        def on_answer(body: bytes) -> None:
            if not is_last:
                return
            error = OffsetCommitResponse.decode(body, _COMMIT_VERSION).topics[0].partitions[0].error_code
            if self._has_left and not error:
                raise ViolationError("I-13 no commit of a zombie", f"leaver-{self._member} committed after it had left")
            self.rounds += 1
            self._rest()

        self.request(ApiKey.OFFSET_COMMIT, _COMMIT_VERSION, LEAVER_GROUP, request, on_answer)
