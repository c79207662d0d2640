# SPDX-License-Identifier: Apache-2.0
"""Assignors of one's own in a running broker: what harms one group does not harm others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kcoord.testing import KcoordBroker, start_broker
from kcoord_protocol.errors import Errors
from kcoord_protocol.messages import (
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
    FindCoordinatorRequest,
    FindCoordinatorResponse,
)
from tests.integration.wire import WireClient
from tests.support.waiting import wait_until

MODULE = """
import time
from kcoord.assignors import ServerAssignor

class All(ServerAssignor):
    name = "all"

    def assign(self, members, topics):
        return {min(members): {name: range(topic.partition_count) for name, topic in topics.items()}}

class Hanging(All):
    name = "hanging"

    def assign(self, members, topics):
        while True:
            time.sleep(60)
"""


@pytest.fixture
def broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KcoordBroker]:
    (tmp_path / "assignors_of_a_broker.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    settings = {
        "group.consumer.assignors": "uniform,assignors_of_a_broker:All,assignors_of_a_broker:Hanging",
        "kcoord.assignor.timeout.ms": "60000",
    }
    with start_broker(config=settings) as broker:
        broker.create_topic("t", partitions=2)
        yield broker


class Member:
    """The only member of a group, which asks for an assignor."""

    def __init__(self, wire: WireClient, assignor: str) -> None:
        self._wire = wire
        self._request = ConsumerGroupHeartbeatRequest(
            group_id=f"with-{assignor}",
            member_id="member",
            rebalance_timeout_ms=60_000,
            subscribed_topic_names=["t"],
            topic_partitions=[],
            server_assignor=assignor,
        )
        find = FindCoordinatorRequest(key=self._request.group_id)
        wait_until(lambda: wire.call(find, 2, FindCoordinatorResponse).error_code == 0, "a coordinator", 10)
        wait_until(lambda: self.heartbeat().error_code == 0, "the coordinator has loaded", 10)

    def heartbeat(self) -> ConsumerGroupHeartbeatResponse:
        response = self._wire.call(self._request, 1, ConsumerGroupHeartbeatResponse)
        assert response.error_code in (0, Errors.NOT_COORDINATOR, Errors.COORDINATOR_LOAD_IN_PROGRESS)
        self._request.member_epoch = response.member_epoch
        return response

    def has_partitions(self) -> bool:
        assignment = self.heartbeat().assignment
        return assignment is not None and bool(assignment.topic_partitions)


def test_an_assignor_that_hangs_does_not_delay_the_groups_of_another_one(broker: KcoordBroker) -> None:
    with WireClient(int(broker.bootstrap_servers.rpartition(":")[2])) as wire:
        hanging = Member(wire, "hanging")
        assert not hanging.has_partitions()
        wait_until(Member(wire, "all").has_partitions, "the other group has its partitions", 20)
        assert not hanging.has_partitions()
