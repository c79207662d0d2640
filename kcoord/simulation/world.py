# SPDX-License-Identifier: Apache-2.0
"""One simulated cluster: a broker, groups of model members, a committer, and what goes wrong around them.

A run has two phases. In the first, everything fails as the options say, and safety is checked after every step. In the
second nothing fails any more, and the groups have to settle within a time that follows from their timeouts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Final

from kcoord.coordinator.result import CoordinatorRecord
from kcoord.metadata.image import ImageBuilder
from kcoord.simulation.broker import SimulatedBroker
from kcoord.simulation.checkers import (
    AcknowledgedCommits,
    BrokerChecks,
    Ownership,
    ToldEpochs,
    TopicPartition,
    described_partitions,
)
from kcoord.simulation.clock import START_MS, Clock
from kcoord.simulation.committer import Committer
from kcoord.simulation.consumer import ModelConsumer, Promises, Subscription
from kcoord.simulation.network import Network
from kcoord.simulation.options import MEMBERS_PER_GROUP, Options
from kcoord.simulation.planted import NO_FAULT, Fault
from kcoord.simulation.trace import Trace, ViolationError
from protocol.messages import PartitionRecord, TopicRecord

FAULT_PHASE_MS: Final = 45_000
_COMMITTER_GROUP: Final = "committers"
_FIRST_TOPIC: Final = "topic-0"
_LATER_TOPIC: Final = "topic-1"
_MOST_PARTITIONS: Final = 12
_LONGEST_BROKER_PAUSE_MS: Final = 3_000
_LONGEST_MEMBER_PAUSE_MS: Final = 4_000


@dataclass(slots=True)
class Slot:
    """A place for a member of a group; its incarnations follow each other."""

    group_id: str
    number: int
    instance_id: str | None
    incarnation: int = 0
    member: ModelConsumer | None = None


class World:
    """Everything that one seed makes."""

    def __init__(self, seed: int, fault: Fault = NO_FAULT) -> None:
        self.random = Random(seed)
        self.options = Options.draw(self.random)
        self.clock = Clock()
        self.trace = Trace(self.clock)
        self.network = Network(self.clock, self.random, self.options, self.trace)
        self.broker = SimulatedBroker(
            self.clock, self.random, self.options, self.trace, self.network, fault.make_machine, fault.early_replies
        )
        self.commits = AcknowledgedCommits()
        self.ownership = Ownership()
        self.promises = Promises(self.trace, self.ownership, ToldEpochs(), self.commits, self._topic_name)
        self.group_ids = [f"group-{number}" for number in range(self.options.groups)]
        self.checks = BrokerChecks(self.broker, [*self.group_ids, _COMMITTER_GROUP], self.options.shards, self.commits)
        self.slots = [
            Slot(group_id, number, self._draw_instance(group_id, number))
            for group_id in self.group_ids
            for number in range(MEMBERS_PER_GROUP)
        ]
        self.committer = Committer(
            _COMMITTER_GROUP,
            _FIRST_TOPIC,
            self.options.partitions,
            self.clock,
            self.random,
            self.network,
            self.options,
            self.commits,
        )
        self.settled_after_ms = -1
        self._faults_on = True

    def _draw_instance(self, group_id: str, number: int) -> str | None:
        return f"{group_id}-instance-{number}" if self.random.random() < self.options.static_share else None

    def _topic_name(self, topic_id: bytes) -> str:
        return self.broker.image.topics_by_id[topic_id].name

    def run(self) -> None:
        """Raises ViolationError where an invariant does not hold."""
        self._begin()
        while self.clock.now_ms < START_MS + FAULT_PHASE_MS:
            self._step()
        self._end_faults()
        self._settle()
        self.checks.rebuild()

    def _step(self) -> None:
        assert self.clock.step(), "there is always somebody who wants something"
        self.checks.after_step(self.clock.now_ms)

    # The first phase.

    def _begin(self) -> None:
        self._add_topic(_FIRST_TOPIC, self.options.partitions)
        self.broker.start()
        self.committer.start()
        for slot in self.slots:
            self.clock.after(self.random.randint(0, 2_000), lambda slot=slot: self._join(slot))  # type: ignore[misc]
        self._repeat(self.options.broker_crash_every_ms, self._crash_broker)
        self._repeat(self.options.member_stop_every_ms, self._disturb_member)
        self._repeat(self.options.topic_change_every_ms, self._change_topics)

    def _repeat(self, every_ms: int, action: Callable[[], None]) -> None:
        """Runs `action` at random times, on average every so often, as long as there are faults."""
        if not every_ms:
            return

        def fire() -> None:
            if self._faults_on:
                action()
                self.clock.after(self.random.randint(1, 2 * every_ms), fire)

        self.clock.after(self.random.randint(1, 2 * every_ms), fire)

    def _crash_broker(self) -> None:
        if self.broker.process is not None:
            self.broker.crash(whole_machine=self.random.random() < 0.5)
            self.clock.after(self.random.randint(1, _LONGEST_BROKER_PAUSE_MS), self._start_broker)

    def _start_broker(self) -> None:
        if self.broker.process is None:
            self.broker.start()

    def _join(self, slot: Slot) -> None:
        if slot.member is not None:
            return
        slot.incarnation += 1
        slot.member = ModelConsumer(
            f"{slot.group_id}-member-{slot.number}-{slot.incarnation}",
            slot.group_id,
            slot.instance_id,
            self._draw_subscription(),
            self.random.choice((None, "uniform", "range")),
            self.clock,
            self.random,
            self.network,
            self.options,
            self.promises,
        )
        self.trace.add("join", slot.member.member_id)
        slot.member.start()

    def _draw_subscription(self) -> Subscription:
        both = Subscription([_FIRST_TOPIC, _LATER_TOPIC])
        return self.random.choice((both, both, Subscription([_FIRST_TOPIC]), Subscription([], "topic-.*")))

    def _disturb_member(self) -> None:
        slot = self.random.choice(self.slots)
        member = slot.member
        if member is None:
            return
        what = self.random.choice(("crash", "leave", "pause", "subscribe", "freeze"))
        self.trace.add(what, member.member_id)
        if what == "subscribe":
            member.subscribe(self._draw_subscription())
            return
        if what == "freeze":
            member.freeze(self.random.randint(1, 2 * self.options.session_timeout_ms))
            return
        if what == "crash":
            member.crash()
        else:
            member.leave(stay_static=what == "pause")
        slot.member = None
        self.clock.after(self.random.randint(1, _LONGEST_MEMBER_PAUSE_MS), lambda: self._join(slot))

    def _change_topics(self) -> None:
        topic = self.broker.image.topics.get(_LATER_TOPIC)
        if topic is None:
            self._add_topic(_LATER_TOPIC, self.random.randint(1, 4))
            return
        topic = self.broker.image.topics[self.random.choice((_FIRST_TOPIC, _LATER_TOPIC))]
        if len(topic.partitions) < _MOST_PARTITIONS:
            self._add_partitions(topic.id, len(topic.partitions), self.random.randint(1, 3))

    def _add_topic(self, name: str, partitions: int) -> None:
        topic_id = self.random.randbytes(16)
        self._add_partitions(
            topic_id, 0, partitions, [CoordinatorRecord(None, TopicRecord(name=name, topic_id=topic_id))]
        )

    def _add_partitions(
        self, topic_id: bytes, first: int, count: int, records: list[CoordinatorRecord] | None = None
    ) -> None:
        builder = ImageBuilder(self.broker.image)
        for record in records or []:
            builder.replay(record)
        for partition in range(first, first + count):
            value = PartitionRecord(partition_id=partition, topic_id=topic_id, replicas=[1], isr=[1], leader=1)
            builder.replay(CoordinatorRecord(None, value))
        self.trace.add("topics", f"{topic_id.hex()} {first}+{count}")
        self.broker.update_image(builder.build())

    # The second phase.

    def _end_faults(self) -> None:
        self._faults_on = self.network.faults_on = self.broker.faults_on = False
        self.trace.add("faults-end")
        self._start_broker()
        for slot in self.slots:
            self._join(slot)

    def _settle(self) -> None:
        """I-28: all groups settle, and the committer gets on."""
        options = self.options
        began_ms = self.clock.now_ms
        longest_ms = (
            options.session_timeout_ms
            + options.rebalance_timeout_ms
            + 2 * options.assignment_interval_ms
            + 6 * options.heartbeat_interval_ms
            + 3 * options.request_timeout_ms
        )
        acknowledged = self.committer.acknowledged
        while self.clock.now_ms < began_ms + longest_ms:
            self._step()
            if self.committer.acknowledged > acknowledged and all(map(self._is_settled, self.group_ids)):
                self.settled_after_ms = self.clock.now_ms - began_ms
                self.trace.add("settled")
                return
        states = {group_id: self.checks.describe(group_id, self.clock.now_ms) for group_id in self.group_ids}
        raise ViolationError("I-28 groups settle", f"not within {longest_ms} ms: {states}")

    def _is_settled(self, group_id: str) -> bool:
        """Coordinator and members agree, and every partition that somebody subscribes to has an owner."""
        group = self.checks.describe(group_id, self.clock.now_ms)
        members = [slot.member for slot in self.slots if slot.group_id == group_id and slot.member is not None]
        if group is None or group.group_state != "Stable" or len(group.members) != len(members):
            return False
        described = {member.member_id: member for member in group.members}
        for member in members:
            known = described.get(member.member_id)
            if known is None or known.member_epoch != member.epoch:
                return False
            if described_partitions(known.assignment) != member.owned:
                return False
        return self.ownership.owned(group_id).keys() == self._subscribed(members)

    def _subscribed(self, members: list[ModelConsumer]) -> set[TopicPartition]:
        return {
            (topic.id, partition.partition_id)
            for topic in self.broker.image.topics.values()
            if any(member.subscription.covers(topic.name) for member in members)
            for partition in topic.partitions
        }
