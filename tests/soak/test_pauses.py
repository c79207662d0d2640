# SPDX-License-Identifier: Apache-2.0
"""Processes that are stopped for longer than every session timeout, and then continue: broker, worker and member.

`make soak` repeats each as often as KCOORD_SOAK_ROUNDS says.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kcoord_protocol.errors import Errors
from kcoord_protocol.messages import ListGroupsRequest, ListGroupsResponse
from tests.integration.wire import WireClient
from tests.soak.committer import Committer
from tests.soak.crowd import END_SECONDS, PYTHON_SESSION_MS, SESSION_MS, SETTINGS, TOPIC, Crowd, rest
from tests.support.confluent import committed
from tests.support.kcoord_process import KcoordProcess
from tests.support.waiting import wait_until

ROUNDS = int(os.environ.get("KCOORD_SOAK_ROUNDS", "1"))
PAUSE_SECONDS = max(SESSION_MS, PYTHON_SESSION_MS) / 1000 + 0.5


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[KcoordProcess]:
    server = KcoordProcess(tmp_path, SETTINGS).start()
    yield server
    server.kill()


def test_a_stopped_broker(server: KcoordProcess) -> None:
    with Crowd(server) as crowd:
        crowd.wait_for_commits()
        for _ in range(ROUNDS):
            with stopped(server.pid):
                rest(PAUSE_SECONDS)
            crowd.wait_for_commits()
        crowd.finish()
    assert server.stop() == 0


def test_a_stopped_worker(tmp_path: Path) -> None:
    """Other workers serve their groups and partitions. Requests to the stopped worker finish when it continues."""
    server = KcoordProcess(tmp_path, {**SETTINGS, "group.coordinator.threads": "2", "node.id": "1"}).start()
    try:
        with Crowd(server) as crowd:
            crowd.wait_for_commits()
            for node_id in (1, 2) * ROUNDS:
                with stopped(server.worker_pid(node_id)):
                    other = server.ports[2 - node_id]
                    rest(PAUSE_SECONDS)
                    with WireClient(other) as client:
                        assert client.call(ListGroupsRequest(), 5, ListGroupsResponse).error_code == Errors.NONE
                crowd.wait_for_commits()
            crowd.finish()
        assert server.stop() == 0
    finally:
        server.kill()


def test_a_stopped_member(server: KcoordProcess) -> None:
    """Its partitions move to other members. When it continues, it is fenced, and its late commits are rejected."""
    with Crowd(server) as crowd, Committer(server.address, "kcoord", TOPIC) as zombie:
        for _ in range(ROUNDS):
            wait_until(lambda: zombie.owned and zombie.committed, "the member takes part", END_SECONDS)
            with stopped(zombie.pid):
                rest(PAUSE_SECONDS)
                crowd.wait_for_commits()
            before = dict(zombie.committed)
            wait_until(lambda before=before: zombie.committed != before, "the member is back", END_SECONDS)  # type: ignore[misc]
            crowd.check()
        promised = crowd.promised("kcoord")
        for partition, offset in zombie.committed.items():
            promised[partition] = max(promised[partition], offset)
        stored = committed(server.address, "kcoord", [(TOPIC, partition) for partition in promised])
        for partition, offset in promised.items():
            assert stored[TOPIC, partition] >= offset, "a late commit was accepted"
