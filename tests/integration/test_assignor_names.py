# SPDX-License-Identifier: Apache-2.0
"""`group.consumer.assignors` with the names of Kafka's classes: groups work, and each tool shows the fitting name."""

from __future__ import annotations

import pytest

from kcoord.cli import main
from kcoord.testing import start_broker
from kcoord_protocol.errors import Errors
from kcoord_protocol.messages import (
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
    DescribeConfigsRequest,
    DescribeConfigsResponse,
    FindCoordinatorRequest,
    FindCoordinatorResponse,
)
from tests.integration.wire import WireClient
from tests.support.waiting import wait_until

KEY = "group.consumer.assignors"
PACKAGE = "org.apache.kafka.coordinator.group.assignor"
NAMES = f"{PACKAGE}.RangeAssignor,{PACKAGE}.UniformAssignor"


def test_members_join_and_the_setting_is_described_as_it_was_set(capsys: pytest.CaptureFixture[str]) -> None:
    with start_broker(config={KEY: NAMES}) as broker:
        broker.create_topic("orders", partitions=2)
        with WireClient(int(broker.bootstrap_servers.rpartition(":")[2])) as wire:
            joined = join(wire)
            resource = DescribeConfigsRequest.DescribeConfigsResource(
                resource_type=4, resource_name="1", configuration_keys=[KEY]
            )
            described = wire.call(DescribeConfigsRequest(resources=[resource]), 4, DescribeConfigsResponse)
        assert (joined.error_code, joined.member_epoch) == (0, 2)
        assert [config.value for config in described.results[0].configs] == [NAMES]
        assert main(["groups", "explain", "readers", "--bootstrap-server", broker.bootstrap_servers]) == 0
        assert "range: the broker's default" in capsys.readouterr().out


def join(wire: WireClient) -> ConsumerGroupHeartbeatResponse:
    """Joins the group as soon as it has a coordinator; returns the response."""
    request = ConsumerGroupHeartbeatRequest(
        group_id="readers",
        member_id="member",
        rebalance_timeout_ms=60_000,
        subscribed_topic_names=["orders"],
        topic_partitions=[],
    )
    coordinator = FindCoordinatorRequest(key="readers")
    wait_until(
        lambda: wire.call(coordinator, 2, FindCoordinatorResponse).error_code == 0, "the group has a coordinator", 10
    )
    responses: list[ConsumerGroupHeartbeatResponse] = []

    def is_loaded() -> bool:
        responses.append(wire.call(request, 1, ConsumerGroupHeartbeatResponse))
        return responses[-1].error_code not in (Errors.NOT_COORDINATOR, Errors.COORDINATOR_LOAD_IN_PROGRESS)

    wait_until(is_loaded, "the coordinator has loaded", 10)
    return responses[-1]
