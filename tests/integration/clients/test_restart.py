# SPDX-License-Identifier: Apache-2.0
"""Groups and a restart of the broker, orderly or by kill -9: no acknowledged data is lost, and members continue."""

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
def test_live_members_continue_after_a_restart(start_broker: StartBroker, name: str, how: signal.Signals) -> None:
    broker = start_broker(group_consumer_session_timeout_ms="20000")
    create_topic(broker.address, name, 4)
    with (
        PolledConsumer(broker.address, name, [name], commit_each=True) as first,
        PolledConsumer(broker.address, name, [name], commit_each=True) as second,
    ):
        wait_until(lambda: len(first.assigned) == len(second.assigned) == 2, "both members have partitions")
        produce(broker.address, name, 4, 5)
        wait_until(lambda: len(first.seen) + len(second.seen) == 20, "the messages before the restart are read")
        assignments = len(first.assignments), len(second.assignments)
        broker.restart(how)
        produce(broker.address, name, 4, 5)
        wait_until(lambda: len(first.seen) + len(second.seen) == 40, "the messages after the restart are read", 30)
        assert (len(first.assignments), len(second.assignments)) == assignments, "the restart moved partitions"
        admin = AdminClient({"bootstrap.servers": broker.address})
        group = admin.describe_consumer_groups([name])[name].result(20)
        assert len(group.members) == 2
    partitions = [(name, partition) for partition in range(4)]
    assert committed(broker.address, name, partitions) == dict.fromkeys(partitions, 10)
