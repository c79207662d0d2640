# SPDX-License-Identifier: Apache-2.0
"""The wall clock of a running broker is set forward and back by hours.

No session expires, no offset and no record expires early, and no time is negative.
`make soak` repeats the jumps as often as KCOORD_SOAK_ROUNDS says.
"""

from __future__ import annotations

import json
import os
import re
import struct
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from kcoord.cli import main
from kcoord_protocol.messages import ConsumerGroupDescribeRequest, ConsumerGroupDescribeResponse
from tests.integration.test_metrics import scrape
from tests.integration.wire import WireClient
from tests.soak.crowd import PARTITIONS, SETTINGS, TOPIC, Crowd, rest
from tests.soak.streams import read_all
from tests.support.kcoord_process import KcoordProcess
from tests.support.waiting import wait_until
from tests.support.wall_clock import WallClock

ROUNDS = int(os.environ.get("KCOORD_SOAK_ROUNDS", "1"))
JUMPS_HOURS = (5.0, -7.0, 0.0)
JUMP_SECONDS = 2.2
"""Time for the jump to take effect, then for some expiration checks."""
GROUPS = ("librdkafka", "kcoord")
KEPT = {
    # Far longer than a pause of a busy machine, far shorter than a jump.
    "group.consumer.session.timeout.ms": "20000",
    "kcoord.metrics.port": "0",
    "log.retention.check.interval.ms": "300",
    "log.retention.ms": "3600000",
    "offsets.retention.check.interval.ms": "300",
    "offsets.retention.minutes": "60",
}


@pytest.fixture
def clock(tmp_path: Path) -> WallClock:
    return WallClock(tmp_path / "clock")


@pytest.fixture
def server(tmp_path: Path, clock: WallClock) -> Iterator[KcoordProcess]:
    server = KcoordProcess(tmp_path, SETTINGS | KEPT)
    server.environment = clock.environment
    server.start()
    yield server
    server.kill()


def group_epochs(server: KcoordProcess) -> dict[str, int]:
    """Returns the group epochs. They increase when a member joins, leaves or expires."""
    with WireClient(server.port) as client:
        request = ConsumerGroupDescribeRequest(group_ids=list(GROUPS))
        groups = client.call(request, 1, ConsumerGroupDescribeResponse).groups
        return {group.group_id: group.group_epoch for group in groups}


def expiry(server: KcoordProcess, capsys: pytest.CaptureFixture[str]) -> list[dict[str, int]]:
    """Returns the forecast of the register's offsets. The register sometimes deletes its group and commits again."""
    arguments = ["groups", "expiry", "--bootstrap-server", server.address, "--json", "--group", "register"]

    def forecast() -> list[dict[str, int]]:
        capsys.readouterr()
        if main(arguments):
            return []
        rows = json.loads(capsys.readouterr().out)
        assert isinstance(rows, list)
        return [row for row in rows if row["topic"] is not None]

    return wait_until(forecast, "the register has offsets")


def logged_seconds(server: KcoordProcess) -> float:
    """Returns the time of a new log line. The function provokes it with bytes that are not a request."""
    lines = len(server.log)
    with WireClient(server.port) as client:
        client.socket.sendall(struct.pack(">i", -1))
        wait_until(lambda: len(server.log) > lines, "the rejection is logged")
    stamps = re.findall(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),\d", server.log, re.MULTILINE)
    return datetime.fromisoformat(stamps[-1]).timestamp()


def test_clocks_that_jump(server: KcoordProcess, clock: WallClock, capsys: pytest.CaptureFixture[str]) -> None:
    begin_ms = time.time() * 1000
    with Crowd(server) as crowd:
        crowd.wait_for_commits()
        before = group_epochs(server)
        for hours in JUMPS_HOURS * ROUNDS:
            clock.set_ahead(hours)
            rest(JUMP_SECONDS)
            crowd.wait_for_commits()
            assert abs(logged_seconds(server) - time.time() - hours * 3600) < 60, "the process has another clock"
            assert group_epochs(server) == before, f"a member expired, {hours:+g} h"
            for row in expiry(server, capsys):
                assert begin_ms < row["expires_ms"] < begin_ms + 2 * 3_600_000, row
        negative = {name: value for name, value in scrape(server).items() if value < 0}
        assert not negative
        crowd.finish()
        numbers = read_all(server.address, TOPIC, PARTITIONS)
        lost = [number for number, place in crowd.records.acknowledged.items() if numbers.get(place) != number]
        assert not lost, "retention deleted records that are minutes old"
    assert server.stop() == 0
