# SPDX-License-Identifier: Apache-2.0
"""One simulated cluster: a broker, a controller, groups of model members, other clients, and their disturbances.

A run has two phases. In the first, faults happen as the options say, and the invariants are checked after every step.
In the second no faults happen, and all clients have to settle within a time that follows from their timeouts (I-28).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import ceil
from random import Random
from typing import Final

from kcoord.coordinator.group.classic.group import ClassicGroup
from kcoord.coordinator.group.consumer.group import ConsumerGroup
from kcoord.simulation import corners
from kcoord.simulation.acl_admin import AclAdmin, creation_of
from kcoord.simulation.admin import Admin
from kcoord.simulation.assignor_member import AssignorMember, draw_member
from kcoord.simulation.broker import SimulatedBroker
from kcoord.simulation.checkers import AcknowledgedCommits, PartitionOwners, ToldEpochs, TopicPartition
from kcoord.simulation.classic import ClassicConsumer
from kcoord.simulation.client import ModelClient, Scene
from kcoord.simulation.clock import START_MS, VirtualClock
from kcoord.simulation.committer import Committer
from kcoord.simulation.consumer import ModelConsumer
from kcoord.simulation.controller import Controller
from kcoord.simulation.disturbances import Disturbance, draw
from kcoord.simulation.guest import guests_of
from kcoord.simulation.leaver import Leaver
from kcoord.simulation.ledger import Ledger
from kcoord.simulation.network import Network
from kcoord.simulation.options import (
    COMMITTER_GROUP,
    MEMBERS_PER_GROUP,
    PIPELINE_GROUP,
    PRODUCER_GROUP,
    RUDE_GROUPS,
    Options,
)
from kcoord.simulation.pipeliner import Pipeliner
from kcoord.simulation.planted import NO_FAULT, Fault
from kcoord.simulation.principals import GUEST_TOPIC, SECRET_TOPIC, first_acls
from kcoord.simulation.process import AWAY_ID, TOPICS
from kcoord.simulation.producer import TransactionalProducer
from kcoord.simulation.promises import PromisedSubscription, Promises
from kcoord.simulation.quota_watch import QuotaWatch
from kcoord.simulation.record_producer import RecordProducer
from kcoord.simulation.record_reader import RecordReader
from kcoord.simulation.rights_watch import RightsWatch
from kcoord.simulation.rude import RudeClient
from kcoord.simulation.state_checks import BrokerChecks, has_error_target, partitions_of
from kcoord.simulation.surroundings import around
from kcoord.simulation.throttled import QuotaAdmin, ThrottledClient
from kcoord.simulation.topics import FIRST_TOPIC, LATER_TOPIC, TopicAdmin, first_topics, new_topic
from kcoord.simulation.trace import Trace, ViolationError
from kcoord_protocol.messages import CreateAclsRequest

DEFAULT_STEPS: Final = 2_500
_LONGEST_FAULT_PHASE_MS: Final = 240_000
_LONGEST_BROKER_PAUSE_MS: Final = 3_000
_LONGEST_MEMBER_PAUSE_MS: Final = 4_000
_LULL_MS: Final = 75_000
_RUDE_CLIENTS: Final = 3
_HAVE_CLIENT_ASSIGNORS: Final = 0.96
LONGEST_PAUSE_MS: Final = 60_000
"""The longest pause between two rounds in which all members fail to compute."""


@dataclass(frozen=True, slots=True)
class Setup:
    """Everything that a run depends on: two runs of equal setups are the same run.

    `faults` are the families of faults to keep; None keeps all. `without` leaves disturbances out by their number, to
    shrink a failure. `make_clients` adds the user's own clients. If `assignor` is not empty, all members use this one,
    which is named as in `group.consumer.assignors`.
    """

    seed: int
    steps: int = DEFAULT_STEPS
    scenario: str = ""
    faults: frozenset[str] | None = None
    without: frozenset[int] = frozenset()
    make_clients: Callable[[World], Sequence[ModelClient]] | None = None
    assignor: str = ""


@dataclass(slots=True)
class Slot:
    """A place for a member of a group. A new incarnation joins after the previous one has stopped."""

    group_id: str
    number: int
    protocol: str
    is_cooperative: bool
    instance_id: str | None
    incarnation: int = 0
    member: ModelConsumer | ClassicConsumer | None = None

    @property
    def computes_well_at_last(self) -> bool:
        """True if the member computes well after the faults. In mixed groups the others may be classic members."""
        return self.number == 0 or self.protocol == "mixed"


class World:
    """All parts of one run, and the loop that runs its steps. Each part has a random stream of its own."""

    def __init__(self, setup: Setup, fault: Fault = NO_FAULT) -> None:
        self.setup = setup
        self.options = Options.draw(self.stream("options"), setup.scenario, setup.faults)
        self.options.assignor = setup.assignor
        self.clock = VirtualClock()
        self.trace = Trace(self.clock)
        self.network = Network(self.clock, self.stream("network"), self.options, self.trace)
        self.scene = scene = Scene(self.clock, self.network, self.options, self.trace, self.stream)
        self.broker = SimulatedBroker(self.clock, self.stream("broker"), self.options, self.trace, self.network, fault)
        self.commits = AcknowledgedCommits(self.broker.observer)
        self.ownership = PartitionOwners()
        self.controller = Controller(self.broker, self.stream("times"), self.trace)
        self.topics = TopicAdmin(scene)
        self.promises = Promises(
            self.trace, self.ownership, ToldEpochs(), self.commits, lambda: self.broker.image, self.controller.names
        )
        self.group_ids = [f"group-{number}" for number in range(len(self.options.protocols))]
        watched = [*self.group_ids, *RUDE_GROUPS, COMMITTER_GROUP, PRODUCER_GROUP, PIPELINE_GROUP]
        self.checks = BrokerChecks(self.broker, watched, self.commits)
        self.slots = list(self._make_slots())
        self.committer = Committer(COMMITTER_GROUP, FIRST_TOPIC, scene, self.commits)
        self.pipeliners = [
            Pipeliner(name, scene, self.promises, only_reads=name == "reader") for name in ("pipeliner", "reader")
        ]
        has_records = self.options.record_producers > 0
        self.ledger = Ledger(lambda: self.broker.power_losses, lambda: self.clock.now_ms) if has_records else None
        self.clients: list[ModelClient] = [self.committer, *self.pipeliners, Leaver(scene)]
        for number in range(self.options.producers):
            producer = TransactionalProducer(number, PRODUCER_GROUP, FIRST_TOPIC, scene, self.promises, self.ledger)
            self.clients.append(producer)
        if self.ledger is not None:
            self.clients += self._make_record_clients(self.ledger)
        if setup.scenario == "corners":
            self.clients += corners.actors(scene, self.broker.group_shard)
        if setup.make_clients is not None:
            self.clients += setup.make_clients(self)
        self.rude = [RudeClient(number, [*self.group_ids], scene, self._member_ids) for number in range(_RUDE_CLIENTS)]
        self.admin = Admin(scene)
        self.acl_admin: AclAdmin | None = None
        self.quota_admin: QuotaAdmin | None = None
        if self.options.has_acls:
            self._admit_guests()
        self.disturbances = draw(self.stream("disturbances"), self.options, _LONGEST_FAULT_PHASE_MS)
        self.settled_after_ms = -1
        self.steps = 0
        self._faults_on = True

    def stream(self, name: str) -> Random:
        """Returns the random generator of one part, so that its draws do not change those of another part."""
        return Random(f"{self.setup.seed}/{name}")

    def _make_slots(self) -> list[Slot]:
        random = self.stream("slots")
        slots = []
        for group_id, protocol in zip(self.group_ids, self.options.protocols, strict=True):
            is_cooperative = protocol != "consumer" and random.random() < 0.5
            for number in range(MEMBERS_PER_GROUP):
                is_static = random.random() < self.options.static_share
                instance_id = f"{group_id}-instance-{number}" if is_static else None
                slots.append(Slot(group_id, number, protocol, is_cooperative, instance_id))
        return slots

    def _make_record_clients(self, ledger: Ledger) -> Iterator[ModelClient]:
        """Yields the producers and readers of records. The first producer is not idempotent, all others are."""
        for number in range(self.options.record_producers):
            name = f"record-producer-{number}"
            yield RecordProducer(name, self.scene, self.promises, ledger, is_idempotent=number > 0)
        for is_committed in (False, True):
            name = "reader-of-committed" if is_committed else "reader-of-all"
            yield RecordReader(name, self.scene, self.promises, ledger, is_committed=is_committed)

    def _admit_guests(self) -> None:
        """Adds the guests and the sender, the checks of their rights and quotas, and the operators who change these."""
        self.clients += [*guests_of(self.scene, self.promises), ThrottledClient(self.scene)]
        self.acl_admin, self.quota_admin = AclAdmin(self.scene), QuotaAdmin(self.scene)
        watch = RightsWatch(self.options, self.clock, self.trace, self.controller.names)
        self.broker.checks.rights = watch
        self.broker.observer.on_regex_resolved = watch.regex_resolved
        self.broker.checks.quotas = QuotaWatch(self.trace)

    def _member_ids(self, group_id: str) -> list[str]:
        return [
            slot.member.member_id
            for slot in self.slots
            if slot.group_id == group_id and slot.member is not None and slot.member.member_id
        ]

    def surroundings(self) -> AbstractContextManager[None]:
        return around(self.options, self.trace, self.broker.observer)

    def run(self) -> None:
        """Runs both phases. Raises ViolationError if an invariant does not hold."""
        self._begin()
        while self.steps < self.setup.steps and self.clock.now_ms < START_MS + _LONGEST_FAULT_PHASE_MS:
            self._step()
        self._end_faults()
        self._settle()
        self.checks.rebuild()

    def _step(self) -> None:
        assert self.clock.step(), "the clients always have an event in the queue"
        self.steps += 1
        self.checks.after_step()

    # The first phase.

    def _begin(self) -> None:
        self.broker.observer.now_ms = lambda: (
            self.broker.process.broker.now_ms() if self.broker.process is not None else 0
        )
        self.broker.observer.log_offsets = self.broker.log_offsets
        self.broker.observer.shard_of = self.broker.group_shard
        self.broker.observer.on_group_gone = self.promises.epochs.forget
        topics = first_topics(self.options)
        acls: list[CreateAclsRequest.AclCreation] = []
        if self.options.has_acls:
            topics += new_topic(SECRET_TOPIC, 1), new_topic(GUEST_TOPIC, 1)
            acls += map(creation_of, first_acls())
        self.controller.begin(topics, self._open, acls)

    def _open(self) -> None:
        """Starts the broker and the clients, and schedules the disturbances; the controller has made the topics."""
        random = self.stream("begin")
        self.broker.image = self.controller.image
        self.clock.after(0, self.broker.start_again)
        for client in self.clients:
            client.start()
        for slot in self.slots:
            self.clock.after(random.randint(0, 2_000), lambda slot=slot: self._join(slot))  # type: ignore[misc]
        for number, disturbance in enumerate(self.disturbances):
            if number not in self.setup.without:
                self.clock.after(
                    disturbance.at_ms,
                    lambda disturbance=disturbance: self._disturb(disturbance),  # type: ignore[misc]
                )

    def _disturb(self, disturbance: Disturbance) -> None:
        if not self._faults_on:
            return
        random = Random(disturbance.seed)
        match disturbance.kind:
            case "crash" | "machine-crash" | "stop":
                self._end_process(disturbance.kind, random)
            case "broker-pause":
                self.broker.pause(random.choice((500, 3_000, self.options.session_timeout_ms + 2_000)))
            case "give-up-shard":
                self._give_up_shard(random)
            case "cut-off":
                self._cut_off(random)
            case "slow-link":
                self._slow_down(random)
            case "worker-loss":
                self._lose_worker(random)
            case "reset-all":
                self.network.reset_all()
            case "topic":
                self.topics.change(random)
            case "config":
                self.topics.configure(random, self.group_ids)
            case "admin":
                self.admin.act(random, [*self.group_ids, *RUDE_GROUPS, COMMITTER_GROUP])
            case "rude":
                self.rude[random.randrange(_RUDE_CLIENTS)].trick(disturbance.seed)
            case "clean":
                self.broker.clean(random.choice(self.options.own_shards), may_lose_power=random.random() < 0.1)
            case "acl":
                assert self.acl_admin is not None
                self.acl_admin.change(random)
            case "quota":
                assert self.quota_admin is not None
                self.quota_admin.change(random)
            case "controller-crash":
                self.controller.crash(random)
            case "lull":
                self._lull(random)
            case _:
                self._disturb_member(disturbance.kind, random)

    def _end_process(self, kind: str, random: Random) -> None:
        if self.broker.process is None:
            return
        offset_ms = random.choice((0, 0, 0, 1_500, -1_500))
        # A fast clock would end sessions before the clients' own deadlines, which both protocols rely on.
        clock_rate = random.choice((1.0, 1.0, 1.0, 0.5))
        pause_ms = random.randint(1, _LONGEST_BROKER_PAUSE_MS)

        def start() -> None:
            if self.broker.process is None:
                self.broker.start(offset_ms, clock_rate)

        if kind == "stop":
            self.broker.stop(lambda: self.clock.after(pause_ms, start))
        else:
            self.broker.crash(whole_machine=kind == "machine-crash")
            self.clock.after(pause_ms, start)

    def _give_up_shard(self, random: Random) -> None:
        """Makes another broker the leader of one shard for a while; this broker then answers NOT_COORDINATOR."""
        name = random.choice(("groups", "groups", "transactions"))
        shard_id = random.choice(self._shards(name))
        self.trace.add("give-up-shard", f"{name} {shard_id}")
        self._lead_elsewhere(name, shard_id, random.randint(1, 2_000))

    def _shards(self, name: str) -> list[int]:
        return self.options.own_shards if name == "groups" else list(range(self.options.transaction_shards))

    def _lead_elsewhere(self, name: str, shard_id: int, duration_ms: int) -> None:
        self.controller.move(TOPICS[name], shard_id, AWAY_ID)
        self.clock.after(duration_ms, lambda: self.controller.move(TOPICS[name], shard_id, 1))

    def _cut_off(self, random: Random) -> None:
        slot = random.choice(self.slots)
        if slot.member is None:
            return
        requests, responses = random.choice(((True, False), (False, True), (True, True)))
        until_ms = self.clock.now_ms + random.randint(1, 2 * self.options.session_timeout_ms)
        self.network.cut_off(slot.member.name, until_ms, requests=requests, responses=responses)

    def _slow_down(self, random: Random) -> None:
        slot = random.choice(self.slots)
        if slot.member is None:
            return
        until_ms = self.clock.now_ms + random.randint(1, 2 * self.options.session_timeout_ms)
        bytes_per_s, reads_only = random.choice((1, 40, 1_000)), random.random() < 0.5
        self.network.slow_down(slot.member.name, until_ms, bytes_per_s, reads_only=reads_only)

    def _lose_worker(self, random: Random) -> None:
        """Ends one of two imagined workers: its unwritten batches are lost, and its shards return after a while."""
        if self.broker.process is None:
            return
        number = random.randrange(2)
        self.trace.add("worker-loss", str(number))
        lost = [(name, shard_id) for name in TOPICS for shard_id in self._shards(name) if shard_id % 2 == number]
        self.broker.lose_worker(lost)
        for name, shard_id in lost:
            self._lead_elsewhere(name, shard_id, random.randint(1, 2_000))

    def _lull(self, random: Random) -> None:
        """Stops members and committing clients for longer than the broker retains offsets."""
        self.trace.add("lull")
        self.committer.resting_until_ms = self.clock.now_ms + _LULL_MS
        for pipeliner in self.pipeliners:
            pipeliner.resting_until_ms = self.clock.now_ms + _LULL_MS
        for slot in self.slots:
            if slot.member is not None:
                slot.member.leave(stay_static=False)
                slot.member = None
            self.clock.after(_LULL_MS + random.randint(0, 2_000), lambda slot=slot: self._join(slot))  # type: ignore[misc]

    # Members.

    def _join(self, slot: Slot) -> None:
        if slot.member is not None:
            return
        slot.incarnation += 1
        random = self.stream(f"{slot.group_id}-{slot.number}-{slot.incarnation}")
        protocol = slot.protocol if slot.protocol != "mixed" else random.choice(("consumer", "classic"))
        name = f"{slot.group_id}-member-{slot.number}-{slot.incarnation}"
        member: ModelConsumer | ClassicConsumer
        if protocol == "consumer" and self.options.has_client_assignors and random.random() < _HAVE_CLIENT_ASSIGNORS:
            subscription, scene, ids = _draw_subscription(random), self.scene, (name, slot.group_id, slot.instance_id)
            is_mixed, is_good = slot.protocol == "mixed", slot.computes_well_at_last and not self._faults_on
            protocols = (slot.is_cooperative if is_mixed else None), self._faults_on
            member = draw_member(*ids, subscription, scene, random, self.promises, *protocols, is_good=is_good)
        elif protocol == "consumer":
            member = ModelConsumer(
                name,
                slot.group_id,
                slot.instance_id,
                _draw_subscription(random),
                None if self.options.assignor else random.choice((None, "uniform", "range")),
                self.scene,
                random,
                self.promises,
            )
        else:
            member = ClassicConsumer(
                name,
                slot.group_id,
                slot.instance_id,
                _draw_subscription(random),
                slot.is_cooperative,
                self.scene,
                random,
                self.promises,
            )
        slot.member = member
        self.trace.add("join", f"{name} {protocol}")
        member.start()

    def _disturb_member(self, kind: str, random: Random) -> None:
        slot = random.choice(self.slots)
        member = slot.member
        if member is None:
            return
        self.trace.add(kind, member.name)
        if kind == "subscribe":
            member.subscribe(_draw_subscription(random))
            return
        if kind == "freeze":
            member.freeze(random.randint(1, 2 * self.options.session_timeout_ms))
            return
        if kind == "member-crash":
            member.crash()
        else:
            member.leave(stay_static=kind == "member-pause")
        slot.member = None
        self.clock.after(random.randint(1, _LONGEST_MEMBER_PAUSE_MS), lambda: self._join(slot))

    # The second phase.

    def _end_faults(self) -> None:
        self._faults_on = self.network.faults_on = self.broker.faults_on = False
        self.trace.add("faults-end")
        self.broker.start_again()
        for client in self.clients:
            client.settle()
        for slot in self.slots:
            if slot.member is not None and slot.member.is_fenced:
                slot.member = None
            if slot.computes_well_at_last and isinstance(slot.member, AssignorMember):
                slot.member.behave()
            self._join(slot)

    def _settle(self) -> None:
        """I-28: all groups settle and all clients make progress. Raises ViolationError after the longest time."""
        options = self.options
        began_ms = self.clock.now_ms
        longest_ms = (
            3 * options.session_timeout_ms
            + 3 * options.rebalance_timeout_ms
            + 2 * options.assignment_interval_ms
            + 12 * options.heartbeat_interval_ms
            + 6 * options.request_timeout_ms
            + 20_000
        )
        if options.has_client_assignors:
            # All members but one may use up their time, for two targets, and before that a round may have ended.
            longest_ms += LONGEST_PAUSE_MS + 2 * (MEMBERS_PER_GROUP - 1) * options.rebalance_timeout_ms
        if self.broker.process is not None:
            longest_ms = ceil(longest_ms / self.broker.process.loop.clock_rate)
        while self.clock.now_ms < began_ms + longest_ms:
            self._step()
            if all(client.is_settled() for client in self.clients) and all(map(self._is_settled, self.group_ids)):
                self.settled_after_ms = self.clock.now_ms - began_ms
                self.trace.add("settled")
                return
        unsettled = [type(client).__name__ for client in self.clients if not client.is_settled()]
        groups = [group_id for group_id in self.group_ids if not self._is_settled(group_id)]
        states = [self.checks.group(group_id) for group_id in groups]
        text = f"not settled {longest_ms} ms after the last fault: clients {unsettled}, groups {groups} {states}"
        raise ViolationError("I-28 groups settle", text)

    def _is_settled(self, group_id: str) -> bool:
        """True if coordinator and members agree, and every subscribed partition has an owner.

        Also replaces members that were fenced as another incarnation of their instance id.
        """
        group = self.checks.group(group_id)
        for slot in self.slots:
            if slot.group_id == group_id and slot.member is not None and slot.member.is_fenced:
                slot.member = None
                self._join(slot)
        members = [slot.member for slot in self.slots if slot.group_id == group_id and slot.member is not None]
        if not isinstance(group, ConsumerGroup | ClassicGroup) or group.state.value != "Stable":
            return False
        if group.members.keys() != {member.member_id for member in members}:
            return False
        if isinstance(group, ConsumerGroup):
            for member in members:
                group_member = group.members[member.member_id]
                if group_member.member_epoch != member.epoch or partitions_of(group_member.assigned) != member.owned:
                    return False
            if has_error_target(group):
                return True
        return self.ownership.owned(group_id).keys() == self._subscribed(members)

    def _subscribed(self, members: Sequence[ModelConsumer | ClassicConsumer]) -> set[TopicPartition]:
        return {
            (topic.id, partition.partition_id)
            for topic in self.broker.image.topics.values()
            if any(member.subscription.covers(topic.name) for member in members)
            for partition in topic.partitions
        }


def _draw_subscription(random: Random) -> PromisedSubscription:
    both = PromisedSubscription([FIRST_TOPIC, LATER_TOPIC])
    return random.choice((both, both, PromisedSubscription([FIRST_TOPIC]), PromisedSubscription([], "topic-.*")))
