# SPDX-License-Identifier: Apache-2.0
"""All parts of a run with an upstream, and the loop that runs its steps.

The run has two phases, as `kcoord.simulation.world`: faults happen for a while, and then end. Within a bounded time
every shard has to be served by its owner, every standby has to be at the end of its log, and every client has to make
progress.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from random import Random
from types import SimpleNamespace
from typing import Final, cast

from kcoord.client import cluster
from kcoord.runtime import shard_snapshots, upstream_batches
from kcoord.server.environment import RandomUuids
from kcoord.simulation.clock import START_MS, VirtualClock
from kcoord.simulation.disturbances import Disturbance
from kcoord.simulation.surroundings import LogObserver
from kcoord.simulation.trace import Trace, ViolationError
from kcoord.simulation.upstream.brokers import UpstreamBrokers
from kcoord.simulation.upstream.checks import UpstreamChecks
from kcoord.simulation.upstream.clients import ClientScene, InstanceClient, PlainClient, TransactionalClient
from kcoord.simulation.upstream.instance import Announcements, SimulatedInstance, Surroundings
from kcoord.simulation.upstream.network import InstanceLoop, LastWords, UpstreamNetwork
from kcoord.simulation.upstream.options import LONGEST_HOLD_UP_MS, UpstreamOptions
from kcoord.simulation.world import Setup
from kcoord.upstream import instance_group

FAULT_PHASE_MS: Final = 45_000
_SETTLE_MS: Final = 90_000
_COMPARE_EVERY: Final = 20
_MOST_STEPS: Final = 200_000
_LONGEST_PAUSE_MS: Final = 3_000
"""The longest time between the end of a process and the next start."""
_ZOMBIES_IN_TRANSACTIONS: Final = 0.7
_ZOMBIES_IN_NEXT_TRANSACTION: Final = 0.5
"""The share of zombies' requests that arrive in the next transaction of their client, if they are in a transaction."""
_FIRST_INSTANCE: Final = 100
_SHARED_GROUP: Final = "group-0"
_FIRST_PRODUCER: Final = 10_000


class UpstreamWorld:
    """All parts of one run. Each part has a random stream of its own."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.options = options = UpstreamOptions.draw(self.stream("options"), setup.faults)
        self.clock = VirtualClock()
        self.trace = Trace(self.clock)
        self.brokers = UpstreamBrokers(self.clock, self.stream("brokers"), options, self.trace)
        self.network = UpstreamNetwork(self.clock, self.stream("network"), options, self.trace, self.brokers)
        shared = Surroundings(
            self.clock,
            self.stream("instances"),
            self.trace,
            options,
            self.network,
            RandomUuids(self.stream("uuids").randbytes),
            self._not_handled,
        )
        announcements = Announcements(self.network)
        self.instances = [
            SimulatedInstance(node_id, shared, announcements)
            for node_id in range(_FIRST_INSTANCE, _FIRST_INSTANCE + options.instances)
        ]
        self.checks = UpstreamChecks(self.brokers, self.instances)
        self.clients = list(self._make_clients())
        self.disturbances = options.disturbances(self.stream("disturbances"), FAULT_PHASE_MS)
        self.settled_after_ms = -1
        self.steps = 0
        self._faults_on = True

    def stream(self, name: str) -> Random:
        """Returns the random generator of one part, so that its draws do not change those of another part."""
        return Random(f"{self.setup.seed}/{name}")

    def _make_clients(self) -> Iterator[InstanceClient]:
        scene = ClientScene(self.clock, self.options, self.trace, self.brokers, self.instances, self.checks, count(1))
        for number in range(self.options.clients):
            name = f"client-{number}"
            yield PlainClient(name, f"group-{number}", scene, self.stream(name))
        for number in range(self.options.transactional_clients):
            name, is_shared = f"producer-{number}", number == 1
            group_id = _SHARED_GROUP if is_shared else name
            yield TransactionalClient(
                name, group_id, _FIRST_PRODUCER + number, scene, self.stream(name), is_shared=is_shared
            )

    def _not_handled(self, message: str, error: BaseException | None) -> None:
        """Reports an error that asyncio would have logged as a violation."""
        self.checks.violated(ViolationError("U-0 no unexpected error", f"{message}: {error!r}"))

    @contextmanager
    def surroundings(self) -> Iterator[None]:
        """Gives the product clocks and random numbers of the run, and small limits, while the run lasts."""
        patches: list[tuple[object, str, object]] = [
            (cluster, "random", SimpleNamespace(Random=lambda: self.stream("client"))),
            (instance_group, "lease_clock_ms", _lease_clock_ms),
            (upstream_batches, "MOST_CLAIMS", 2),
            (shard_snapshots, "LEAST_GROWTH_BYTES", 2_000),
            (shard_snapshots, "LEAST_GROWTH_AT_STOP_BYTES", 500),
        ]
        before = [(owner, name, getattr(owner, name)) for owner, name, _ in patches]
        logger = logging.getLogger("kcoord")
        observer = LogObserver(self.trace, self.checks.violated)
        level, propagate = logger.level, logger.propagate
        logger.setLevel(logging.INFO)
        logger.propagate = False
        logger.addHandler(observer)
        for owner, name, value in patches:
            setattr(owner, name, value)
        try:
            yield
        finally:
            for owner, name, value in before:
                setattr(owner, name, value)
            logger.level, logger.propagate = level, propagate
            logger.removeHandler(observer)

    def run(self) -> None:
        """Runs both phases. Raises ViolationError if an invariant does not hold."""
        random = self.stream("begin")
        for instance in self.instances:
            self.clock.after(random.randint(1, 500), instance.start)
        for client in self.clients:
            client.start()
        for number, disturbance in enumerate(self.disturbances):
            if number not in self.setup.without:
                self.clock.after(
                    disturbance.at_ms,
                    lambda disturbance=disturbance: self._disturb(disturbance),  # type: ignore[misc]
                )
        while self.clock.now_ms < START_MS + FAULT_PHASE_MS:
            self._step()
        self._end_faults()
        self._settle()

    def end(self) -> None:
        """Ends the processes that still run, because the run is over."""
        for instance in self.instances:
            instance.end()

    def _step(self) -> None:
        assert self.clock.step(), "the clients always have an event in the queue"
        self.steps += 1
        if self.steps > _MOST_STEPS:
            raise ViolationError("U-8 everything settles", f"the run does not end within {_MOST_STEPS} steps")
        if not self.steps % _COMPARE_EVERY:
            self._compare()
        if self.checks.violation is not None:
            raise self.checks.violation

    def _compare(self) -> None:
        self.checks.compare()
        self.checks.check_order(_SHARED_GROUP)
        for client in self.clients:
            if isinstance(client, TransactionalClient):
                client.check()

    # The first phase.

    def _disturb(self, disturbance: Disturbance) -> None:
        if not self._faults_on:
            return
        random = Random(disturbance.seed)
        instance = random.choice(self.instances)
        brokers, session_ms = self.brokers, self.options.session_timeout_ms
        match disturbance.kind:
            case "crash":
                instance.crash()
                self._start_later(instance, random)
            case "stop":
                instance.stop()
                self._start_later(instance, random)
            case "zombie":
                self._leave_a_zombie(instance, random)
            case "pause":
                instance.pause(random.choice((500, session_ms + 500, 2 * session_ms)))
            case "cut-off":
                self.network.cut_off(instance.node_id, random, 3 * session_ms)
            case "reset":
                self.network.reset(instance.node_id)
            case "unseen-unclean-election":
                # An instance finds other batches at the offsets that it has read, or that its copy has.
                match random.randrange(3):
                    case 0:
                        self.network.cut_off(instance.node_id, random, 3 * session_ms)
                    case 1:
                        instance.pause(random.randint(session_ms // 2, 2 * session_ms))
                    case _:
                        instance.crash()
                        self._start_later(instance, random)
                brokers.lose_tail(random)
            case "snapshot":
                self._take_snapshot(instance, random)
            case kind:
                faults = {
                    "election": brokers.elect,
                    "too-few-replicas": brokers.lose_replicas,
                    "coordinator-moves": brokers.move_coordinator,
                    "ids": brokers.forget_ids,
                    "compact": brokers.compact,
                    "unclean-election": brokers.lose_tail,
                    "delete-topic": brokers.delete_topic,
                }
                faults[kind](random)

    def _start_later(self, instance: SimulatedInstance, random: Random, longest_ms: int = 0) -> None:
        """Starts an instance again within a time, by default sometimes much later than its session ends."""
        rate = 0.5 if random.random() < self.options.slow_clock_share else 1.0
        delay_ms = longest_ms or random.choice((1, _LONGEST_PAUSE_MS, 3 * self.options.session_timeout_ms))
        self.clock.after(random.randint(1, delay_ms), lambda: instance.start(rate))

    def _leave_a_zombie(self, instance: SimulatedInstance, random: Random) -> None:
        """Kills an instance when it sends a batch, which arrives when another process may own the shard."""
        hold_up_ms = random.choice((500, 1_500, 3_000, LONGEST_HOLD_UP_MS))

        def die() -> None:
            instance.crash()
            if random.random() < self.options.forgotten_ids_share:
                self.brokers.expire_ids()
            self._start_later(instance, random, _LONGEST_PAUSE_MS)

        in_transaction = random.random() < _ZOMBIES_IN_TRANSACTIONS
        until_next = random.random() < _ZOMBIES_IN_NEXT_TRANSACTION
        held_up_ms = LONGEST_HOLD_UP_MS if until_next else random.randint(1, hold_up_ms)
        words = LastWords(in_transaction, held_up_ms, die, until_next_transaction=until_next)
        self.network.hear_last_words(instance.node_id, words)

    def _take_snapshot(self, instance: SimulatedInstance, random: Random) -> None:
        process = instance.process
        if process is not None and process.has_begun:
            shards = process.broker.groups.shards
            shard_id = random.randrange(self.options.shards)
            process.loop.enter(lambda: shards.take_snapshot(shard_id, process.now_ms()))

    # The second phase.

    def _end_faults(self) -> None:
        self._faults_on = self.network.faults_on = False
        self.brokers.heal()
        self.trace.add("faults-end")
        for instance in self.instances:
            instance.start()
        for client in self.clients:
            client.settle()

    def _settle(self) -> None:
        """U-8: everything works again. Raises ViolationError after the longest time."""
        began_ms = self.clock.now_ms
        why = ""
        while self.clock.now_ms < began_ms + _SETTLE_MS:
            self._step()
            if all(client.is_settled() for client in self.clients):
                why = self.checks.settled()
                if not why:
                    self._compare()
                    if self.checks.violation is not None:
                        raise self.checks.violation
                    self.checks.check_acknowledged()
                    self.settled_after_ms = self.clock.now_ms - began_ms
                    self.trace.add("settled")
                    return
        waiting = [client.name for client in self.clients if not client.is_settled()]
        text = f"not settled {_SETTLE_MS} ms after the last fault: clients {waiting}; {why}"
        raise ViolationError("U-8 everything settles", text)


def _lease_clock_ms() -> int:
    return cast("InstanceLoop", asyncio.get_running_loop()).elapsed_ms()
