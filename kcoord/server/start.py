# SPDX-License-Identifier: Apache-2.0
"""Runs a broker as its configuration asks: one process, or a supervisor with several workers."""

from __future__ import annotations

from collections.abc import Callable

import uvloop

from kcoord.config import BrokerConfig
from kcoord.config.workers import worker_count, worker_properties
from kcoord.server.heap import keep_freed_memory
from kcoord.server.process import ReadyLine, run_process
from kcoord.server.time_slice import shorten_time_slice


def run(config: BrokerConfig, on_ready: Callable[[ReadyLine], None]) -> None:
    """Runs a broker until a signal ends it. Raises StartError if it cannot start."""
    keep_freed_memory()
    if worker_count(config) > 1:
        # Most brokers are one process, so their start does not import the supervisor.
        from kcoord.server.workers.supervisor import Supervisor

        Supervisor(config).run(on_ready)
        return
    if config.kcoord_worker_ports or config.of_workers:
        config = BrokerConfig.from_properties(worker_properties(config, 0))
    shorten_time_slice()
    uvloop.run(run_process(config, on_ready))
