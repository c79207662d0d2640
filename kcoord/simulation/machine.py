# SPDX-License-Identifier: Apache-2.0
"""The parts of a simulated machine that outlive its processes."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import TYPE_CHECKING

from kcoord.config import BrokerConfig
from kcoord.metadata.image import MetadataImage
from kcoord.runtime.serde import partition_for
from kcoord.server.environment import RandomUuids
from kcoord.simulation.clock import VirtualClock
from kcoord.simulation.observer import Observer
from kcoord.simulation.options import Options
from kcoord.simulation.planted import Fault
from kcoord.simulation.trace import Trace
from kcoord.storage.memory_file_system import MemoryFileSystem, Operation, TornWrite
from kcoord.storage.snapshot import SNAPSHOT_FILE

if TYPE_CHECKING:
    # Most runs have no assignor of one's own, so they do not import this.
    from kcoord.server.shards.own_assignors import OwnAssignor


class PowerLost(BaseException):
    """Raised out of a file operation: the machine stops in the middle of it."""


class Machine:
    """The disk with its faults, the configuration, the metadata image, random numbers, trace and observer.

    `opening` is above 0 while logs are opened, which happens without disk faults. `operations_before_power_loss` counts
    down file operations until `PowerLost`; None for never.
    """

    def __init__(self, clock: VirtualClock, random: Random, options: Options, trace: Trace, fault: Fault) -> None:
        self.clock = clock
        self.random = random
        self.options = options
        self.trace = trace
        self.fault = fault
        self.image = MetadataImage.empty()
        self.config: BrokerConfig = options.broker_config()
        self.faults_on = True
        self.opening = 0
        self.power_losses = 0
        self.operations_before_power_loss: int | None = None
        self.uuids = RandomUuids(random.randbytes)
        self.disk = MemoryFileSystem(fault=self._disk_fault)
        self.observer = Observer(trace)
        self._own_assignors: Mapping[str, OwnAssignor] = {}

    def start_assignors(self, config: BrokerConfig) -> Mapping[str, OwnAssignor]:
        """Returns the assignors of one's own by name.

        They are real processes, whose start takes long. So they outlive the simulated processes, until
        `close_assignors`.
        """
        if config.own_assignors and not self._own_assignors:
            from kcoord.server.shards.own_assignors import start_own_assignors

            self._own_assignors = start_own_assignors(config)
        for name in self._own_assignors:
            config.name_assignor(self.options.assignor, name)
        return self._own_assignors

    def close_assignors(self) -> None:
        for assignor in self._own_assignors.values():
            assignor.close()

    def group_shard(self, group_id: str) -> int:
        return partition_for(group_id, self.options.group_partitions)

    def disk_delay_ms(self) -> int:
        return self.random.randint(0, self.options.disk_delay_ms) if self.faults_on else 1

    def _disk_fault(self, operation: Operation) -> BaseException | TornWrite | None:
        if self.operations_before_power_loss is not None:
            self.operations_before_power_loss -= 1
            if self.operations_before_power_loss < 0:
                return PowerLost()
        if operation.kind == "rename" and SNAPSHOT_FILE in operation.path:
            self.trace.add("snapshot", operation.path)
        probability = self.options.disk_error_probability
        if not self.faults_on or not probability or operation.kind not in ("write", "datasync"):
            return None
        if self.opening or self.random.random() >= probability:
            return None
        self.trace.add("disk-error", f"{operation.kind} {operation.path}")
        error = OSError(28 if operation.kind == "write" else 5, "simulated")
        if operation.kind == "write":
            return TornWrite(self.random.randint(0, operation.size), error)
        return error
