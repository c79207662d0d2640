# SPDX-License-Identifier: Apache-2.0
"""KIP-848 online migration with librdkafka: a live group changes its protocol, there and back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from confluent_kafka import ConsumerGroupType
from confluent_kafka.admin import AdminClient

from tests.support.confluent import PolledConsumer, committed, create_topic, partitions_of, produce, wait_for_split
from tests.support.kcoord_process import FAST, KcoordProcess
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KcoordProcess]:
    """With no delay before a group's first rebalance."""
    overrides = {**FAST, "group.initial.rebalance.delay.ms": "0", "group.min.session.timeout.ms": "1000"}
    process = KcoordProcess(tmp_path_factory.mktemp("kcoord"), overrides).start()
    yield process
    assert process.stop() == 0, process.log


def test_a_live_group_moves_to_the_consumer_protocol_and_back(broker: KcoordProcess, name: str) -> None:
    """KIP-848 online migration: one member after the other is replaced."""
    admin = AdminClient({"bootstrap.servers": broker.address})

    def group_type() -> ConsumerGroupType:
        (found,) = (group.type for group in admin.list_consumer_groups().result(20).valid if group.group_id == name)
        assert isinstance(found, ConsumerGroupType)
        return found

    create_topic(broker.address, name, 4)
    everything = partitions_of(name, 4)
    classic = [PolledConsumer(broker.address, name, [name], classic="range", commit_each=True) for _ in range(2)]
    new: list[PolledConsumer] = []
    try:
        wait_for_split(classic, everything)
        assert group_type() == ConsumerGroupType.CLASSIC
        produce(broker.address, name, 4, 3)
        wait_until(lambda: sum(len(member.seen) for member in classic) == 12, "all is read")
        new.append(PolledConsumer(broker.address, name, [name], commit_each=True))
        wait_until(lambda: group_type() == ConsumerGroupType.CONSUMER, "the group is a consumer group")
        wait_until(lambda: sum(len(member.assigned) for member in [*classic, *new]) == 4 and new[0].assigned, "a share")
        classic[0].close()
        wait_for_split([classic[1], *new], everything)
        produce(broker.address, name, 4, 3)
        wait_until(lambda: sum(len(member.seen) for member in [*classic, *new]) == 24, "all is read in the mixed group")
        new[0].close()
        wait_until(lambda: group_type() == ConsumerGroupType.CLASSIC, "the group is a classic group again")
        wait_for_split([classic[1]], everything)
    finally:
        for member in [*classic, *new]:
            member.close()
    assert committed(broker.address, name, sorted(everything)) == dict.fromkeys(everything, 6)
