# SPDX-License-Identifier: Apache-2.0
"""Instances that are members of a modelled group of the upstream, over a network with faults.

Time is a number that the world moves on.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from random import Random

from kcoord.runtime.shard_map import Instance, ShardMap
from kcoord.runtime.upstream_membership import (
    Assigned,
    Failed,
    Heartbeat,
    InstanceState,
    JoinGroup,
    LeaseOver,
    Reclaim,
    Request,
    SyncGroup,
    UpstreamMembership,
)
from kcoord.simulation.upstream.instances_group import InstancesGroup
from kcoord_protocol.errors import Errors, KafkaError

SESSION_MS = 6_000
INTERVAL_MS = 200
SHARDS = 10
STEP_MS = 10


@dataclass
class Process:
    """A process of an instance."""

    node_id: int
    machine: UpstreamMembership
    owned: list[int] = field(default_factory=list)
    is_alive: bool = True
    stalled_until_ms: int = 0
    cut_until_ms: int = 0
    """Until then no packet passes between the process and the upstream."""
    log: list[str] = field(default_factory=list)
    failure: KafkaError | None = None


def instance(node_id: int, port: int = 9092) -> Instance:
    return Instance(node_id, f"host{node_id}", port)


class World:
    """The group, the processes, and the messages between them. `loss` is the probability that a message is lost."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.now_ms = 1_000
        self.group = InstancesGroup(SESSION_MS)
        self.processes: list[Process] = []
        self.loss = 0.0
        self.longest_delay_ms = 10
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._numbers = count()

    def start(self, node_id: int, **settings: int) -> Process:
        """Starts a process, also beside an old one of the same node."""
        machine = UpstreamMembership(
            node_id,
            SHARDS,
            **{
                "session_timeout_ms": SESSION_MS,
                "heartbeat_interval_ms": INTERVAL_MS,
                "record_version": 1,
                **settings,
            },
        )
        process = Process(node_id, machine)
        self.processes.append(process)
        machine.join(instance(node_id), self.now_ms)
        self._execute(process)
        return process

    def run(self, ms: int) -> None:
        end_ms = self.now_ms + ms
        while self.now_ms < end_ms:
            self.now_ms += STEP_MS
            self.group.tick(self.now_ms)
            while self._events and self._events[0][0] <= self.now_ms:
                heapq.heappop(self._events)[2]()
            for process in self.processes:
                is_running = process.is_alive and self.now_ms >= process.stalled_until_ms
                if is_running and process.machine.next_ms <= self.now_ms:
                    process.machine.tick(self.now_ms)
                    self._execute(process)
            self.check()

    def check(self) -> None:
        """A process that holds its lease is a member, so the group has given its shards to nobody else.

        Only another process with its node id may have replaced it.
        """
        newest = {process.node_id: process for process in self.processes}
        for process in self.processes:
            machine = process.machine
            if process.is_alive and machine.holds_lease(self.now_ms):
                member = self.group.members.get(process.node_id)
                assert member is not None, f"{process.node_id} holds a lease, and the group has removed it"
                assert member.member_id == machine.member_id or process is not newest[process.node_id]
                assert machine.shard_map is not None
                assert process.owned == machine.shard_map.shards_of(process.node_id)
            elif process.is_alive and self.now_ms >= process.stalled_until_ms + STEP_MS:
                assert not process.owned, f"{process.node_id} owns shards without a lease"

    def owners(self) -> dict[int, list[int]]:
        return {process.node_id: process.owned for process in self.processes if process.is_alive}

    def is_settled(self) -> bool:
        """Returns whether all live processes have the same map, and all shards an owner."""
        alive = [process for process in self.processes if process.is_alive]
        maps: list[ShardMap | None] = [process.machine.shard_map for process in alive]
        owned = sorted(shard_id for process in alive for shard_id in process.owned)
        return (
            all(process.machine.state is InstanceState.MEMBER for process in alive)
            and all(shard_map == maps[0] for shard_map in maps)
            and owned == list(range(SHARDS))
        )

    # Messages.

    def _execute(self, process: Process) -> None:
        actions, process.machine.actions = process.machine.actions, []
        for action in actions:
            match action:
                case Assigned(shard_map, shard_ids):
                    process.owned = list(shard_ids)
                    process.log.append(f"generation {shard_map.generation}")
                case LeaseOver(reason):
                    process.owned = []
                    process.log.append(reason)
                case Reclaim():
                    raise AssertionError("no shard was fenced")
                case Failed(error):
                    process.owned = []
                    process.failure = error
                case _:
                    self._send(process, action)

    def _send(self, process: Process, request: Request) -> None:
        def arrive() -> None:
            self.group.handle(process.node_id, request, answer, self.now_ms)

        def answer(value: object) -> None:
            self._later(process, lambda: self._deliver(process, request, value))

        self._later(process, arrive)
        # The process notices a lost request or answer by its own timeout. After an answer this changes nothing.
        timeout_ms = SESSION_MS + 5_000 if isinstance(request, JoinGroup) else 2_000
        lost = KafkaError(Errors.REQUEST_TIMED_OUT)
        self._at(self.now_ms + timeout_ms, lambda: self._deliver(process, request, lost))

    def _later(self, process: Process, event: Callable[[], None]) -> None:
        if self.now_ms >= process.cut_until_ms and self.random.random() >= self.loss:
            self._at(self.now_ms + self.random.randint(1, self.longest_delay_ms), event)

    def _at(self, at_ms: int, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at_ms, next(self._numbers), event))

    def _deliver(self, process: Process, request: Request, value: object) -> None:
        if not process.is_alive:
            return
        if self.now_ms < process.stalled_until_ms:
            self._at(process.stalled_until_ms, lambda: self._deliver(process, request, value))
            return
        machine = process.machine
        if isinstance(value, KafkaError):
            machine.refused(request, value, self.now_ms)
        elif isinstance(request, Heartbeat):
            machine.beaten(request, self.now_ms, rebalances=bool(value))
        elif isinstance(request, SyncGroup):
            assert isinstance(value, bytes)
            machine.synced(request, value, self.now_ms)
        elif isinstance(request, JoinGroup):
            assert isinstance(value, tuple)
            member_id, generation, members = value
            machine.joined(request, member_id, generation, members, self.now_ms)
        self._execute(process)
