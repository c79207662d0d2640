# SPDX-License-Identifier: Apache-2.0
"""Groups over a restart of the broker, orderly or by kill -9: nothing acknowledged is lost, and members go on."""

from __future__ import annotations

import signal

import pytest
from confluent_kafka.admin import AdminClient

from tests.integration.clients.conftest import StartBroker
from tests.support.confluent import PolledConsumer, committed, create_topic, produce
from tests.support.waiting import wait_until

HOW = [signal.SIGTERM, signal.SIGKILL]


@pytest.mark.parametrize("how", HOW, ids=["SIGTERM", "SIGKILL"])
def test_a_group_resumes_at_its_committed_offsets(start_broker: StartBroker, name: str, how: signal.Signals) -> None:
    broker = start_broker()
    create_topic(broker.address, name, 2)
    produce(broker.address, name, 2, 20)
    with PolledConsumer(broker.address, name, [name], commit_each=True) as member:
        member.wait_for(40)
    broker.restart(how)
    assert committed(broker.address, name, [(name, 0), (name, 1)]) == {(name, 0): 20, (name, 1): 20}
    produce(broker.address, name, 2, 5)
    with PolledConsumer(broker.address, name, [name], commit_each=True) as member:
        member.wait_for(10)
        assert {offset for _, _, offset in member.seen} == {20, 21, 22, 23, 24}


@pytest.mark.parametrize("how", HOW, ids=["SIGTERM", "SIGKILL"])
def test_live_members_go_on_after_a_restart(start_broker: StartBroker, name: str, how: signal.Signals) -> None:
    broker = start_broker(group_consumer_session_timeout_ms="20000")
    create_topic(broker.address, name, 4)
    with (
        PolledConsumer(broker.address, name, [name], commit_each=True) as one,
        PolledConsumer(broker.address, name, [name], commit_each=True) as two,
    ):
        wait_until(lambda: len(one.assigned) == len(two.assigned) == 2, "both members have partitions")
        produce(broker.address, name, 4, 5)
        wait_until(lambda: len(one.seen) + len(two.seen) == 20, "the messages before the restart")
        told = len(one.assignments), len(two.assignments)
        broker.restart(how)
        produce(broker.address, name, 4, 5)
        wait_until(lambda: len(one.seen) + len(two.seen) == 40, "the messages after the restart", 30)
        assert (len(one.assignments), len(two.assignments)) == told, "the restart moved partitions"
        admin = AdminClient({"bootstrap.servers": broker.address})
        group = admin.describe_consumer_groups([name])[name].result(20)
        assert len(group.members) == 2
    partitions = [(name, partition) for partition in range(4)]
    assert committed(broker.address, name, partitions) == dict.fromkeys(partitions, 10)
