# SPDX-License-Identifier: Apache-2.0
"""Instances that replace each other, in front of three brokers of Apache Kafka."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.failover.stage import GROUPS, on_stage
from tests.support.kafka_cluster import KafkaCluster
from tests.support.kafka_jars import KafkaJars
from tests.support.private_network import private_network

pytestmark = pytest.mark.java

BROKERS = 3


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
                stage.pause(first)
                stage.cut_off(second, network, kafka.ports)
                await stage.judge()
        finally:
            kafka.stop()
