# SPDX-License-Identifier: Apache-2.0
"""Instances that replace each other, in front of three brokers of Apache Kafka."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kcoord.client.cluster import Cluster, CoordinatorType
from kcoord.client.config import CommonConfig
from kcoord.client.types import Node
from tests.failover.stage import GROUPS, LONG, Stage, on_stage
from tests.support.kafka_cluster import KafkaCluster
from tests.support.kafka_jars import KafkaJars
from tests.support.private_network import private_network

pytestmark = pytest.mark.java

BROKERS = 3
LOST_COORDINATOR_SECONDS = 20.0
"""The brokers notice the loss of one after 4 s."""


async def lose_the_coordinator(stage: Stage, kafka: KafkaCluster) -> None:
    """Kills the broker that coordinates the instances' group. They serve again as soon as another one does."""
    cluster = Cluster(CommonConfig(bootstrap_servers=kafka.address))
    coordinator = (await cluster.find_coordinators(CoordinatorType.GROUP, ["kcoord"]))["kcoord"]
    await cluster.close()
    assert isinstance(coordinator, Node)
    since = time.monotonic()
    kafka.kill(coordinator.node_id)
    stage.until_served(since + 1, "the loss of the coordinator", LOST_COORDINATOR_SECONDS)
    kafka.start(coordinator.node_id)


async def test_instances_are_replaced(tmp_path: Path) -> None:
    jars = KafkaJars()
    with private_network() as network:
        kafka = KafkaCluster(jars, tmp_path / "kafka", BROKERS, group_min_session_timeout_ms="1000")
        try:
            network.mark(GROUPS)
            async with on_stage(tmp_path, kafka.address, GROUPS) as stage:
                first, second = stage.instances
                stage.kill(first)
                stage.terminate(second)
                stage.cut_off(first, network, kafka.ports)
                if stage.size is LONG:
                    stage.pause(second)
                    await lose_the_coordinator(stage, kafka)
                await stage.judge()
        finally:
            kafka.stop()
