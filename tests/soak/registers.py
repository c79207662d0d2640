# SPDX-License-Identifier: Apache-2.0
"""Commits and deletions by one client, one request at a time, so that the possible values are always known."""

from __future__ import annotations

import random
import time

from kcoord_protocol.errors import Errors
from kcoord_protocol.messages import (
    DeleteGroupsRequest,
    DeleteGroupsResponse,
    FindCoordinatorRequest,
    FindCoordinatorResponse,
    OffsetCommitRequest,
    OffsetCommitResponse,
    OffsetDeleteRequest,
    OffsetDeleteResponse,
    OffsetFetchRequest,
    OffsetFetchResponse,
)
from tests.integration.wire import ConnectionClosed, WireClient
from tests.soak.worker import Worker

RETRIED = (Errors.NOT_COORDINATOR, Errors.COORDINATOR_LOAD_IN_PROGRESS, Errors.COORDINATOR_NOT_AVAILABLE)
RETRY_SECONDS = 0.02
GHOSTLY = 1 << 40
"""Added to offsets whose commit the broker has to reject."""


class NotReady(Exception):
    """The coordinator is not available; the request had no effect."""


class Register(Worker):
    """The offsets of all partitions of a topic in one group.

    Each request sets or deletes all of these offsets together, so they are always equal. A request without a response
    may have been executed or not, so `possible` then has both values.
    """

    def __init__(self, port: int, group_id: str, topic: str, partitions: int, seed: int) -> None:
        super().__init__()
        self.group_id = group_id
        self.possible: set[int | None] = {None}
        self.done = 0
        self._port = port
        self._topic = topic
        self._partitions = range(partitions)
        self._random = random.Random(seed)
        self._next = 0

    def _run(self) -> None:
        """Sends requests until `end`, and then checks the offsets once more."""
        while True:
            is_last = self._ending.is_set()
            try:
                with WireClient(self._port, 10.0) as client:
                    self._work(client)
                if is_last:
                    return
            except (OSError, ConnectionClosed, NotReady):
                time.sleep(RETRY_SECONDS)
            except Exception as error:
                raise AssertionError(f"{self.group_id}, after {self.done} requests: {error!r}") from error

    def _work(self, client: WireClient) -> None:
        find = FindCoordinatorRequest(coordinator_keys=[self.group_id])
        client.call(find, 4, FindCoordinatorResponse)
        self._look(client)
        while not self._ending.is_set():
            action = self._random.choices(
                (self._commit, self._look, self._delete_offsets, self._delete_group, self._commit_as_a_ghost),
                (80, 8, 5, 4, 3),
            )[0]
            action(client)
            self.done += 1
        self._look(client)

    def _look(self, client: WireClient) -> None:
        """Fetches the offsets and checks that they are possible. Then they are the only possible ones."""
        requested = OffsetFetchRequest.OffsetFetchRequestGroup(group_id=self.group_id, topics=None, member_id=None)
        group = client.call(OffsetFetchRequest(groups=[requested]), 9, OffsetFetchResponse).groups[0]
        _check(group.error_code)
        offsets = {part.partition_index: part.committed_offset for topic in group.topics for part in topic.partitions}
        values = {offsets.get(partition) for partition in self._partitions}
        assert len(values) == 1, f"a part of a commit: {offsets}"
        assert values <= self.possible, f"fetched {values}, possible are {self.possible}"
        self.possible = values

    def _commit(self, client: WireClient) -> None:
        self._next += 1
        self.possible.add(self._next)
        _check(self._send_commit(client, self._next))
        self.possible = {self._next}

    def _send_commit(self, client: WireClient, offset: int, member_id: str = "", epoch: int = -1) -> int:
        topic = OffsetCommitRequest.OffsetCommitRequestTopic(
            name=self._topic,
            partitions=[
                OffsetCommitRequest.OffsetCommitRequestPartition(partition_index=partition, committed_offset=offset)
                for partition in self._partitions
            ],
        )
        request = OffsetCommitRequest(
            group_id=self.group_id, generation_id_or_member_epoch=epoch, member_id=member_id, topics=[topic]
        )
        answer = client.call(request, 9, OffsetCommitResponse)
        (error,) = {part.error_code for committed in answer.topics for part in committed.partitions}
        return error

    def _commit_as_a_ghost(self, client: WireClient) -> None:
        """Sends a commit of a member that does not exist. The broker must reject it, and no fetch may return it."""
        error = self._send_commit(client, GHOSTLY + self._next, "ghost", 7)
        if error not in RETRIED:
            assert error in (Errors.UNKNOWN_MEMBER_ID, Errors.ILLEGAL_GENERATION, Errors.GROUP_ID_NOT_FOUND), error

    def _delete_offsets(self, client: WireClient) -> None:
        topic = OffsetDeleteRequest.OffsetDeleteRequestTopic(
            name=self._topic,
            partitions=[
                OffsetDeleteRequest.OffsetDeleteRequestPartition(partition_index=partition)
                for partition in self._partitions
            ],
        )
        self.possible.add(None)
        answer = client.call(OffsetDeleteRequest(group_id=self.group_id, topics=[topic]), 0, OffsetDeleteResponse)
        self._deleted(answer.error_code)

    def _delete_group(self, client: WireClient) -> None:
        self.possible.add(None)
        answer = client.call(DeleteGroupsRequest(groups_names=[self.group_id]), 2, DeleteGroupsResponse)
        self._deleted(answer.results[0].error_code)

    def _deleted(self, error: int) -> None:
        if error != Errors.GROUP_ID_NOT_FOUND:
            _check(error)
        self.possible = {None}


def _check(error: int) -> None:
    if error in RETRIED:
        raise NotReady
    assert error == Errors.NONE, Errors(error).name
