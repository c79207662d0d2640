# SPDX-License-Identifier: Apache-2.0
"""kill -9 of applications, of kcoord and of brokers of the upstream in turn: each number is processed exactly once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.exactly_once.instances import KcoordUpstream, Upstream
from tests.exactly_once.stage import LONG, Stage, configured_size
from tests.support.kafka_cluster import KafkaCluster
from tests.support.kafka_jars import KafkaJars

pytestmark = pytest.mark.java


def run(folder: Path, upstream: Upstream) -> None:
    stage = Stage(folder, upstream)
    with stage.running():
        for _ in range(stage.size.rounds):
            stage.round()
        stage.work.judge()


def test_before_kcoord(tmp_path: Path) -> None:
    upstream = KcoordUpstream(tmp_path / "upstream")
    try:
        run(tmp_path, upstream)
    finally:
        upstream.kill()


if configured_size() is LONG:

    def test_before_kafka(tmp_path: Path) -> None:
        kafka = KafkaCluster(
            KafkaJars(),
            tmp_path / "kafka",
            3,
            group_min_session_timeout_ms="1000",
            min_insync_replicas="2",
            transaction_abort_timed_out_transaction_cleanup_interval_ms="500",
        )
        try:
            run(tmp_path, kafka)
        finally:
            kafka.stop()
