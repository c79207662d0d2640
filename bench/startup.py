# SPDX-License-Identifier: Apache-2.0
"""The time from exec to the first response to a heartbeat, with an empty and a used folder, and the idle memory."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from bench.report import Report
from bench.wire import Broker, Connection
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.messages import ConsumerGroupHeartbeatRequest, ConsumerGroupHeartbeatResponse

ROUNDS = 5
IDLE_SECONDS = 1.0


def main(report: Report) -> None:
    table = report.table("start", "start", "wall ms", "CPU ms", "RSS MB idle")
    with tempfile.TemporaryDirectory() as folder:
        for name in ["fresh", *["again"] * (ROUNDS - 1)]:
            wall, cpu, resident = measure(Path(folder))
            table.row(name, wall * 1000, cpu * 1000, resident)


def measure(folder: Path) -> tuple[float, float, float]:
    request = ConsumerGroupHeartbeatRequest(
        group_id="g", member_id="m", rebalance_timeout_ms=60000, subscribed_topic_names=["t"], topic_partitions=[]
    )
    with Broker(folder) as broker:
        connection = Connection(broker.port)
        connection.find_coordinator("g")
        answer = connection.call(ApiKey.CONSUMER_GROUP_HEARTBEAT, 1, request, ConsumerGroupHeartbeatResponse)
        wall, cpu = time.perf_counter() - broker.started, broker.cpu_seconds()
        assert answer.error_code == 0, answer
        connection.close()
        time.sleep(IDLE_SECONDS)
        return wall, cpu, broker.resident_mb()
