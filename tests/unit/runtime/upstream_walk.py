# SPDX-License-Identifier: Apache-2.0
"""Random walks of two owners of one upstream partition, over a network that delays, loses and repeats.

An append sets a name to a number that is larger than all before it. So a lost or overwritten record shows as a name
whose number is smaller than an acknowledged one.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from functools import lru_cache
from random import Random

from kcoord.runtime.shard_log import Append, Load
from kcoord.runtime.upstream_actions import (
    Action,
    Fenced,
    Fetch,
    FindStart,
    Held,
    InitProducerId,
    Loaded,
    LoadFailed,
    Lost,
    Opened,
    Produce,
    Request,
    Unknown,
    Written,
)
from kcoord.runtime.upstream_log import CLAIM_KEY, UpstreamLog, UpstreamState
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.record_batch import decode_entries, encode_batch_from_parts, iter_headers
from tests.unit.runtime.upstream_partition import Coordinator, UpstreamPartition

NAMES = (b"a", b"b", b"c")
TIMEOUT_MS = 15_000
WAIT_MS = 25_000


class Violation(Exception):
    """A promise to clients is broken."""


@lru_cache(maxsize=4096)
def entries_of(data: bytes) -> list[tuple[bytes, int]]:
    return [(key, int(value)) for _, key, value in decode_entries(data) if key in NAMES and value]


class Instance:
    """A process with one shard. `state` is what its state machine has."""

    def __init__(self, world: World, log: UpstreamLog) -> None:
        self.world = world
        self.log = log
        self.state: dict[bytes, int] | None = None
        self.loading: dict[bytes, int] = {}
        self.in_flight: list[Request] = []
        self.unreplicated: list[tuple[Produce, int]] = []
        """Requests whose batch is appended, with the offsets up to which it has to be replicated."""
        self.load: Load | None = None
        self.append: Append | None = None
        self.wants = True

    # The shard set.

    def claim(self) -> None:
        if self.load is None and self.append is None and self.state is None:
            self.load = Load(0, with_snapshot=False)
            self.loading = {}
            self.log.open(self.load, self.world.now_ms)
            self.settle()

    def put(self, name: bytes) -> None:
        if self.state is None or self.append is not None:
            return
        self.world.value += 1
        pairs: list[tuple[bytes | None, bytes | None]] = [(name, b"%d" % self.world.value)]
        data = encode_batch_from_parts(pairs, 1)
        if self.world.random.random() < 0.3:
            self.world.value += 1
            data += encode_batch_from_parts([(name, b"%d" % self.world.value)], 1, base_offset=1)
        self.append = Append(0, 0, 1, data)
        self.log.append(self.append, self.world.now_ms)
        self.settle()

    def crash(self) -> None:
        """Loses everything in memory. Requests in the network may still arrive."""
        for request in self.in_flight:
            if isinstance(request, Produce) and self.log.may_send(request, self.world.now_ms):
                self.world.send_late(request.data)
        self.in_flight, self.unreplicated = [], []
        self.load = self.append = self.state = None
        self.log.close()

    def settle(self) -> None:
        """Handles the actions of the log."""
        actions, self.log.actions = self.log.actions, []
        for action in actions:
            self.handle(action)
        if self.log.actions:
            self.settle()

    def handle(self, action: Action) -> None:
        match action:
            case InitProducerId() | Produce() | Fetch() | FindStart():
                self.in_flight.append(action)
            case Opened(load):
                self.log.read(load)
            case Loaded(load, batches, is_end):
                assert load is self.load
                for _, data in batches:
                    self.loading.update(entries_of(data))
                if not is_end:
                    self.log.read(load)
                    return
                self.load = None
                self.state = dict(self.loading)
                if self.world.last_claimer() == self.log.claimed_id:
                    self.world.check_state(self.state)
            case Written(append):
                self.append = None
                for position_of_batch in split(append.data):
                    self.world.acknowledge(position_of_batch)
                    if self.state is not None:
                        self.state.update(entries_of(position_of_batch))
                if self.state is not None and self.world.last_claimer() == self.log.claimed_id:
                    self.world.check_state(self.state)
            case Held() | LoadFailed():
                self.load = None
                self.wants = True
            case Unknown():
                self.append = self.state = None
                self.wants = True
            case Fenced():
                self.append = self.state = self.load = None
                self.wants = False
            case Lost(_, is_fenced):
                self.state = None
                self.wants = not is_fenced

    # The network.

    def answer(self, request: Request) -> None:
        """Delivers a request to the upstream and its response to the log."""
        now_ms = self.world.now_ms
        partition = self.world.partition
        try:
            match request:
                case InitProducerId():
                    self.log.initialized(request, *self.world.coordinator.init("shard"), now_ms)
                case Produce(data):
                    offset = self.produce(request, data)
                    header_count = len(decode_entries(data))
                    if offset + header_count > partition.high_watermark:
                        self.unreplicated.append((request, offset))
                    else:
                        self.log.produced(request, offset, now_ms)
                case Fetch(offset):
                    self.log.fetched(request, partition.fetch(offset), now_ms)
                case FindStart():
                    self.log.found_start(request, partition.start_offset, now_ms)
        except KafkaError as error:
            self.log.refused(request, error, now_ms)
        self.settle()

    def produce(self, request: Produce, data: bytes) -> int:
        return self.world.partition.append(data)

    def refuse(self, request: Request, error: Errors) -> None:
        self.log.refused(request, KafkaError(error), self.world.now_ms)
        self.settle()


def split(data: bytes) -> list[bytes]:
    return [data[position : position + header.size_bytes] for position, header in iter_headers(data)]


class World:
    """The partition, the coordinator, two instances, and what was acknowledged."""

    def __init__(self, seed: int, make_log: type[UpstreamLog] = UpstreamLog, *, expiries: float = 0.2) -> None:
        self.random = Random(seed)
        self.expiries = expiries
        """How often both instances crash and the transactional id expires."""
        self.now_ms = 1_000
        self.value = 0
        self.partition = UpstreamPartition()
        self.coordinator = Coordinator()
        self.acknowledged: dict[bytes, int] = {}
        self.instances = [
            Instance(self, make_log(name, write_timeout_ms=TIMEOUT_MS, foreign_id_wait_ms=WAIT_MS))
            for name in ("first", "second")
        ]
        self.late: list[tuple[bytes, int]] = []
        """Batches that may still arrive, with the time at which the network has lost them."""
        self.served = 0

    def acknowledge(self, data: bytes) -> None:
        self.served += 1
        for name, value in entries_of(data):
            self.acknowledged[name] = max(self.acknowledged.get(name, 0), value)
        if self.durable().items() < dict(entries_of(data)).items():
            raise Violation("acknowledged before it was durable")

    def durable(self) -> dict[bytes, int]:
        state: dict[bytes, int] = {}
        for header, data in self.partition.batches:
            if header.next_offset <= self.partition.high_watermark:
                state.update(entries_of(data))
        return state

    def last_claimer(self) -> tuple[int, int]:
        """Returns the producer id and the epoch of the last claim. Earlier owners can append nothing any more."""
        for header, data in reversed(self.partition.batches):
            if decode_entries(data)[0][1] == CLAIM_KEY:
                return header.producer_id, header.producer_epoch
        return -1, -1

    def check_state(self, state: dict[bytes, int]) -> None:
        for name, value in self.acknowledged.items():
            if state.get(name, 0) < value:
                raise Violation(f"acknowledged {name!r}={value}, but the state has {state.get(name)}")

    def check(self) -> None:
        self.check_state(self.durable())
        counts = Counter(entry for _, data in self.partition.batches for entry in entries_of(data))
        if any(count > 1 for count in counts.values()):
            raise Violation("a batch is in the log twice")

    # The walk.

    def walk(self, steps: int) -> None:
        for _ in range(steps):
            self.step()
            self.check()
        self.heal()

    def step(self) -> None:
        draw = self.random
        instance = draw.choice(self.instances)
        match draw.choices(
            ["claim", "put", "network", "replicate", "leader", "time", "late", "replicas", "expire"],
            [2, 40, 100, 60, 2, 40, 4, 0.5, self.expiries],
        )[0]:
            case "claim":
                instance.wants = True
                instance.claim()
            case "put":
                instance.put(draw.choice(NAMES))
            case "network":
                if instance.in_flight:
                    self.deliver(instance, instance.in_flight.pop(draw.randrange(len(instance.in_flight))))
            case "replicate":
                if not self.partition.has_too_few_replicas:
                    self.replicate()
            case "leader":
                self.partition.change_leader()
                for other in self.instances:
                    waiting, other.unreplicated = other.unreplicated, []
                    for request, _ in waiting:
                        other.refuse(request, Errors.NOT_LEADER_OR_FOLLOWER)
            case "time":
                self.pass_time(draw.choices([5, 50, 1_000, 16_000, 7 * 3_600_000], [4, 10, 6, 0.5, 0.1])[0])
            case "late":
                if self.late:
                    self.arrive_late()
            case "replicas":
                self.partition.has_too_few_replicas = not self.partition.has_too_few_replicas
            case "expire":
                # The next producer id is another one, and does not fence what is still in the network.
                for other in self.instances:
                    other.crash()
                self.coordinator.ids.clear()

    def deliver(self, instance: Instance, request: Request) -> None:
        if isinstance(request, Produce) and not instance.log.may_send(request, self.now_ms):
            return
        fate = self.random.random()
        if fate < 0.88:
            instance.answer(request)
        elif fate < 0.92:
            instance.refuse(request, Errors.NETWORK_EXCEPTION)
        elif fate < 0.96:
            # The request arrives, and its response is lost.
            if isinstance(request, Produce):
                self.send_late(request.data)
                self.arrive_late()
            instance.refuse(request, Errors.REQUEST_TIMED_OUT)
        else:
            if isinstance(request, Produce):
                self.send_late(request.data)
            instance.refuse(request, Errors.NETWORK_EXCEPTION)

    def send_late(self, data: bytes) -> None:
        self.late.append((data, self.now_ms + TIMEOUT_MS))

    def arrive_late(self) -> None:
        data, lost_ms = self.late.pop(self.random.randrange(len(self.late)))
        if self.now_ms < lost_ms:
            with suppress(KafkaError):
                self.partition.append(data)

    def replicate(self) -> None:
        self.partition.replicate()
        for instance in self.instances:
            waiting, instance.unreplicated = instance.unreplicated, []
            for request, offset in waiting:
                instance.log.produced(request, offset, self.now_ms)
                instance.settle()

    def pass_time(self, milliseconds: int) -> None:
        self.now_ms += milliseconds
        for instance in self.instances:
            instance.log.tick(self.now_ms)
            instance.settle()
            if instance.wants:
                instance.claim()

    def heal(self) -> None:
        """Ends all faults. Then one instance has to serve again within a minute."""
        self.partition.has_too_few_replicas = False
        owner = self.instances[0]
        owner.wants = True
        self.instances[1].wants = False
        for _ in range(120):
            self.pass_time(1_000)
            owner.put(b"a")
            for instance in self.instances:
                while instance.in_flight:
                    instance.answer(instance.in_flight.pop(0))
                    self.replicate()
            if owner.state is not None and owner.append is None and self.last_claimer() == owner.log.claimed_id:
                break
            if owner.log.state is UpstreamState.FENCED:
                owner.wants = True
        else:
            raise Violation("the shard is not served again")
        self.check()
        self.check_state(owner.state)
