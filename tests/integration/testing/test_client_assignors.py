# SPDX-License-Identifier: Apache-2.0
"""Groups whose members compute their assignments, on a test broker: what tests see of them and can do to them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

import pytest

from kcoord.client import (
    AssignmentSpec,
    Consumer,
    GroupAssignment,
    MemberAssignment,
    PartitionAssignor,
    TopicPartition,
)
from kcoord.testing import KcoordBroker, start_broker

CONFIG = {"kcoord.client.assignors.enable": "true"}


class Holding(PartitionAssignor):
    """Gives everything to the smallest member id, as soon as `proceed` is set."""

    name = "holding"

    def __init__(self) -> None:
        self.proceed = threading.Event()
        self.proceed.set()
        self.computed = 0

    def assign(self, spec: AssignmentSpec) -> GroupAssignment:
        assert self.proceed.wait(30)
        self.computed += 1
        places = [TopicPartition(name, n) for name, topic in spec.topics.items() for n in range(topic.num_partitions)]
        return GroupAssignment({min(spec.members): MemberAssignment(places)})


@asynccontextmanager
async def member_of(broker: KcoordBroker, assignor: PartitionAssignor) -> AsyncIterator[Consumer]:
    """Yields a consumer of group `g`, topic `t`, that is polled in the background."""
    async with Consumer(
        bootstrap_servers=broker.bootstrap_servers,
        group_id="g",
        retry_backoff_ms=20,
        group_local_assignors=[assignor],
    ) as consumer:
        consumer.subscribe(["t"])

        async def poll() -> None:
            while True:
                await consumer.poll(20)

        polling = asyncio.create_task(poll())
        try:
            yield consumer
        finally:
            polling.cancel()
            await asyncio.gather(polling, return_exceptions=True)


async def until(condition: Callable[[], bool], what: str) -> None:
    async with asyncio.timeout(20):
        while not await asyncio.to_thread(condition):
            await asyncio.sleep(0.02)


def owns(consumer: Consumer, *partitions: int) -> bool:
    return consumer.assignment == {TopicPartition("t", partition) for partition in partitions}


async def test_an_overridden_target_ends_the_computation_of_a_member() -> None:
    assignor = Holding()
    with start_broker(config=CONFIG) as broker:
        broker.create_topic("t", 2)
        async with member_of(broker, assignor) as consumer:
            await until(lambda: owns(consumer, 0, 1), "the first assignment")
            assert broker.group("g").computing_member is None
            assignor.proceed.clear()
            await asyncio.to_thread(broker.add_partitions, "t", 3)
            await until(lambda: broker.group("g").computing_member is not None, "a computation")
            (member,) = broker.group("g").members
            assert broker.group("g").computing_member == member.member_id
            epoch = await asyncio.to_thread(
                partial(broker.override_target_assignment, "g", {member.member_id: {"t": [1]}})
            )
            assert broker.group("g").computing_member is None
            assignor.proceed.set()
            await until(lambda: owns(consumer, 1), "the overridden assignment")
            await until(lambda: assignor.computed == 2, "the end of the computation")
            await until(lambda: bool(broker.requests("ConsumerGroupInstallAssignment", group="g")), "its request")
            group = broker.group("g")
            assert (group.epoch, group.target_epoch) == (epoch, epoch)
            # A change of the group asks the member again.
            await asyncio.to_thread(broker.add_partitions, "t", 4)
            await until(lambda: owns(consumer, 0, 1, 2, 3), "the next assignment")


@pytest.mark.parametrize("api", ["ConsumerGroupPrepareAssignment", "ConsumerGroupInstallAssignment"])
@pytest.mark.parametrize("after_handling", [False, True])
async def test_a_computation_survives_an_injected_fault(api: str, after_handling: bool) -> None:
    assignor = Holding()
    with start_broker(config=CONFIG) as broker:
        broker.create_topic("t", 2)
        fault = broker.inject_fault(api, group="g", close=True, after_handling=after_handling)
        async with member_of(broker, assignor) as consumer:
            await until(lambda: owns(consumer, 0, 1), "the assignment")
            assert fault.hits == 1
            member = broker.wait_for_group("g", state="Stable", members=1).members[0]
            assert broker.requests(api, group="g", member=member.member_id)
            assert assignor.computed == 1
