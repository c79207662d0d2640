# SPDX-License-Identifier: Apache-2.0
"""Random disorder under producers, transactions and a group.

Partitions and coordinators move between workers, brokers are fenced and unfenced, and workers are killed.

`make soak` repeats it as often as KCOORD_SOAK_ROUNDS says; KCOORD_SOAK_SEED repeats the choices.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from kcoord.cli.workers import WorkersNotReached, set_fenced
from kcoord_protocol.errors import DecodeError, Errors
from kcoord_protocol.messages import AlterPartitionReassignmentsRequest, AlterPartitionReassignmentsResponse
from tests.integration.test_workers import (
    SHARDS,
    TIMEOUT_SECONDS,
    WORKERS,
    Writer,
    addresses,
    copies_of,
    create,
    read_committed,
    settings,
)
from tests.integration.wire import ConnectionClosed, WireClient
from tests.support.confluent import PolledConsumer, committed
from tests.support.kcoord_process import KcoordProcess
from tests.support.waiting import wait_until

ROUNDS = int(os.environ.get("KCOORD_SOAK_ROUNDS", "1"))
SEED = int(os.environ.get("KCOORD_SOAK_SEED", str(random.randrange(1 << 32))))
STEPS_PER_ROUND = 25
NODES = [10 + number for number in range(WORKERS)]
TOPICS = {
    "plain": WORKERS,
    "transactional": WORKERS,
    "__consumer_offsets": SHARDS,
    "__transaction_state": SHARDS,
}
_REFUSED = (OSError, ConnectionClosed, WorkersNotReached, DecodeError)
"""The errors of a request to a worker that has just died or is about to die."""


class Disorder:
    """Runs random actions in sequence. Any action may fail, since a worker may be dead at that time."""

    def __init__(self, broker: KcoordProcess, chance: random.Random) -> None:
        self._broker = broker
        self._chance = chance
        self._fenced: int | None = None
        self.done: Counter[str] = Counter()

    def step(self) -> None:
        action = self._chance.choice((self.move, self.move, self.fence_or_unfence, self.kill))
        try:
            if action():
                self.done[action.__name__] += 1
        except _REFUSED:
            self.done["refused"] += 1
        time.sleep(self._chance.random() / 2)

    def move(self) -> bool:
        """Reassigns all partitions of a topic, to two replicas at least, since one may be fenced."""
        topic = self._chance.choice(list(TOPICS))
        request = AlterPartitionReassignmentsRequest(
            topics=[
                AlterPartitionReassignmentsRequest.ReassignableTopic(
                    name=topic,
                    partitions=[
                        AlterPartitionReassignmentsRequest.ReassignablePartition(
                            partition_index=index,
                            replicas=self._chance.sample(NODES, self._chance.randint(2, WORKERS)),
                        )
                        for index in range(TOPICS[topic])
                    ],
                )
            ]
        )
        ports = [port for node, port in zip(NODES, self._broker.ports, strict=True) if node != self._fenced]
        with WireClient(self._chance.choice(ports)) as client:
            answer = client.call(request, 1, AlterPartitionReassignmentsResponse)
        return not answer.error_code

    def fence_or_unfence(self) -> bool:
        node = self._chance.choice(NODES) if self._fenced is None else self._fenced
        fences = self._fenced is None
        done = set_fenced(str(self._broker.data), node, fenced=fences, timeout_seconds=10) is Errors.NONE
        if done:
            self._fenced = node if fences else None
        return done

    def kill(self) -> bool:
        os.kill(self._chance.choice(self._broker.worker_pids()), signal.SIGKILL)
        return True

    def end(self) -> None:
        """Unfences all brokers, including a broker whose response was lost."""
        self._fenced = None
        for node in NODES:
            wait_until(lambda: self._unfences(node), f"broker {node} is in service", TIMEOUT_SECONDS)  # noqa: B023

    def _unfences(self, node: int) -> bool:
        try:
            return set_fenced(str(self._broker.data), node, fenced=False, timeout_seconds=10) is Errors.NONE
        except _REFUSED:
            return False


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[KcoordProcess]:
    factors = {f"{kind}.replication.factor": str(WORKERS) for kind in ("offsets.topic", "transaction.state.log")}
    process = KcoordProcess(tmp_path, {**settings(), **factors}).start()
    yield process
    process.kill()


def test_nothing_is_lost_while_everything_moves(broker: KcoordProcess) -> None:
    bootstrap = addresses(broker)
    for topic in ("plain", "transactional"):
        assert create(broker.port, topic, WORKERS, WORKERS).error_code == 0
    disorder = Disorder(broker, random.Random(SEED))
    writer = Writer(bootstrap)
    with PolledConsumer(bootstrap, "group", ["plain"], commit_each=True) as consumer:
        for _ in range(ROUNDS):
            for _ in range(STEPS_PER_ROUND):
                disorder.step()
            disorder.end()
            writer.wait_for_progress()
            consumer.wait_for(len(consumer.seen) + 1, TIMEOUT_SECONDS)
        writer.close()
        seen = list(consumer.seen)
    context = f"seed {SEED}, {dict(disorder.done)}"
    copies = copies_of(broker.data, "plain")
    assert set(copies.values()) == {1}, f"a message of an idempotent producer is duplicated; {context}"
    assert writer.acknowledged <= set(read_committed(bootstrap, "plain")), context
    committed_values = Counter(read_committed(bootstrap, "transactional"))
    assert set(committed_values.values()) == {WORKERS}, f"a transaction is incomplete; {context}"
    assert writer.committed <= committed_values.keys(), context
    offsets = committed(bootstrap, "group", [("plain", number) for number in range(WORKERS)])
    assert all(offset < offsets[topic, partition] for topic, partition, offset in seen), context
    assert "Traceback" not in broker.log, context
    assert broker.stop() == 0, broker.log
