# SPDX-License-Identifier: Apache-2.0
"""The supervisor of worker processes, and the processes that it forks."""

from __future__ import annotations

import os

import pytest

from kcoord.config import BrokerConfig
from kcoord.server.workers import supervisor


def test_a_worker_that_is_ready_after_the_end_of_its_supervisor_does_not_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stops in an orderly way, because its lifeline has ended."""
    parent = supervisor.Supervisor(BrokerConfig.from_properties({"group.coordinator.threads": "2"}))
    monkeypatch.setattr(parent, "_folder", None, raising=False)
    monkeypatch.setattr(supervisor, "close_inherited", lambda launch, inherited: None)
    monkeypatch.setattr(supervisor, "run_worker", lambda launch, on_ready: on_ready())
    read_end, write_end = os.pipe()
    os.close(read_end)
    process_id = os.fork()
    if process_id == 0:
        parent._be_worker(0, write_end, is_restart=True)
    os.close(write_end)
    assert os.waitstatus_to_exitcode(os.waitpid(process_id, 0)[1]) == 0
