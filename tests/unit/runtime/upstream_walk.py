# SPDX-License-Identifier: Apache-2.0
"""Random walks of two owners of one upstream partition, over a network that delays, loses and repeats.

An append sets a name to a number that is larger than all before it, or deletes it by the negative of such a number. So
a lost or overwritten record shows as a name whose number is smaller than an acknowledged one. An instance that does not
own the partition follows it with a standby, and takes snapshots of its state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from random import Random

from kcoord.runtime.loader import Loader
from kcoord.runtime.result import CoordinatorRecord, CoordinatorResult, OperationContext, Task, TimerKey
from kcoord.runtime.serde import CoordinatorSerde
from kcoord.runtime.shard_log import Append, Load
from kcoord.runtime.standby import Standby
from kcoord.runtime.upstream_actions import (
    Action,
    Ended,
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
    Rewrite,
    Unknown,
    Written,
)
from kcoord.runtime.upstream_batches import CLAIM_KEY
from kcoord.runtime.upstream_claim import UpstreamState
from kcoord.runtime.upstream_log import UpstreamLog
from kcoord.runtime.upstream_reader import DivergedError, LogMark, LogNote, UpstreamReader
from kcoord.runtime.waiting import Statistics
from kcoord.simulation.upstream.partition import ModelPartition, TransactionalIds
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.record_batch import BatchHeader, decode_entries, encode_batch_from_parts, iter_headers

NAMES = (b"a", b"b", b"c")
TIMEOUT_MS = 15_000
WAIT_MS = 25_000
KEPT_MS = 20_000
"""How long compaction keeps tombstones."""

ROUNDS_PER_SECOND = 30
WEIGHTS = {
    "claim": 2,
    "put": 40,
    "network": 100,
    "replicate": 60,
    "leader": 2,
    "time": 40,
    "late": 4,
    "replicas": 0.5,
    "expire": 0.2,
    "follow": 40,
    "stall": 2,
    "snapshot": 8,
    "compact": 4,
    "restart": 1,
    "unclean": 0,
}
"""How often a walk takes each step.

expire: both instances crash, and the transactional id expires. restart: one crashes. stall: one stands still, or
continues. unclean: the upstream loses what it has acknowledged.
"""


SPANS_MS = (5, 50, 1_000, 16_000, 7 * 3_600_000, 25 * 3_600_000)


def is_tombstone(value: bytes | None) -> bool:
    return value is not None and value.startswith(b"-")


class Violation(Exception):
    """A promise to clients is broken."""


@lru_cache(maxsize=4096)
def entries_of(data: bytes) -> list[tuple[bytes, int]]:
    return [(key, int(value)) for _, key, value in decode_entries(data) if key in NAMES and value]


def writes(batches: list[tuple[BatchHeader, bytes]], name: bytes, end_offset: int) -> list[tuple[int, int]]:
    """Returns (offset, value) of all batches below an offset that set a name."""
    return [
        (header.base_offset, value)
        for header, data in batches
        if header.next_offset <= end_offset
        for key, value in entries_of(data)
        if key == name
    ]


def replayed(batches: list[tuple[BatchHeader, bytes]], end_offset: int) -> dict[bytes, int]:
    """Returns the state of the batches below an offset."""
    state: dict[bytes, int] = {}
    for header, data in batches:
        if header.next_offset <= end_offset:
            state.update(entries_of(data))
    return state


class Numbers:
    """A state machine: numbers by name."""

    def __init__(self) -> None:
        self.state: dict[bytes, int] = {}

    def batch_replay(self) -> Callable[[bytes, int], bool]:
        def replay(data: bytes, count: int) -> bool:
            self.state.update(entries_of(data))
            return True

        return replay

    def replay(self, record: CoordinatorRecord) -> None:
        raise AssertionError(record)

    def on_loaded(self, context: OperationContext) -> CoordinatorResult[None]:
        raise AssertionError

    def fire_timer(self, context: OperationContext, key: TimerKey) -> CoordinatorResult[None]:
        raise AssertionError

    def complete_task(self, context: OperationContext, task: Task, value: object) -> CoordinatorResult[None]:
        raise AssertionError


@dataclass(eq=False)
class Follow:
    """A fetch of a standby. The response goes to the standby that the instance has then."""

    offset: int


@dataclass
class Snapshot:
    """A snapshot on the disk of an instance, or one that is being taken."""

    note: LogNote
    state: dict[bytes, int]
    machine: object
    mark: bytes = b""


class Instance:
    """A process with one shard. `state` is what its state machine has."""

    def __init__(self, world: World, log: UpstreamLog) -> None:
        self.world = world
        self.log = log
        self.state: dict[bytes, int] | None = None
        self.standby: Standby[Numbers] | None = None
        self.taking: Snapshot | None = None
        self.snapshot: Snapshot | None = None
        self.loading = Numbers()
        self.in_flight: list[Request | Follow] = []
        self.unreplicated: list[tuple[Produce, int]] = []
        """Requests whose batch is appended, with the offsets up to which it has to be replicated."""
        self.load: Load | None = None
        self.append: Append | None = None
        self.wants = True
        self.is_stalled = False
        """True while the process is stopped. It neither sends nor receives anything."""
        self.taken_over = 0
        """How many loads continued with a standby that had read something."""

    # The shard set.

    def claim(self) -> None:
        if self.load is None and self.append is None and self.state is None:
            standby = self.stand_by()
            standby.is_paused = True
            self.load = Load(0, with_snapshot=False)
            self.log.open(self.load, self.world.now_ms, standby.reader)
            self.settle()

    def put(self, name: bytes) -> None:
        if self.state is None or self.append is not None:
            return
        is_deleted = self.world.random.random() < 0.3
        data = self.world.batch(name, is_deleted=is_deleted)
        if self.world.random.random() < 0.3:
            data += self.world.batch(name, base_offset=1)
        self.append = Append(0, 0, 1, data)
        self.log.append(self.append, self.world.now_ms)
        self.settle()

    def crash(self) -> None:
        """Loses everything in memory. Requests in the network may still arrive."""
        for request in self.in_flight:
            if isinstance(request, Produce) and self.log.may_send(request, self.world.now_ms):
                self.world.send_late(request.data)
        self.in_flight, self.unreplicated = [], []
        self.load = self.append = self.state = self.standby = self.taking = None
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
                standby, self.standby = self.standby, None
                assert standby is not None
                self.loading = standby.loader.machine
                self.taken_over += standby.reader.last is not None
                self.log.read(load)
            case Loaded(load, batches, is_end):
                assert load is self.load
                for _, data in batches:
                    self.loading.state.update(entries_of(data))
                if not is_end:
                    self.log.read(load)
                    return
                self.load = None
                self.state = self.loading.state
                self.world.check_loaded(self)
            case Written(append):
                self.append = None
                for batch in split(append.data):
                    self.world.acknowledge(batch)
                    if self.state is not None:
                        self.state.update(entries_of(batch))
                if self.state is not None and self.world.last_claimer() == self.log.claimed_id:
                    self.world.check_state(self.state)
            case Held() | LoadFailed():
                if self.log.reader.has_diverged:
                    self.snapshot = None
                self.load = None
                self.wants = True
                self.resume()
            case Unknown():
                self.append = self.state = None
                self.wants = True
                self.resume()
            case Fenced():
                self.append = self.state = self.load = None
                self.wants = False
                self.resume()
            case Lost(_, is_fenced):
                self.state = None
                self.wants = not is_fenced
                self.resume()
            case Ended() | Rewrite():
                pass

    # The standby.

    def stand_by(self) -> Standby[Numbers]:
        """Returns the standby. If there is none, it is made from the snapshot, or empty."""
        if self.standby is None:
            snapshot, machine = self.snapshot, Numbers()
            reader = self.world.make_reader(self.world.now_ms, KEPT_MS)
            if snapshot is not None:
                machine.state = dict(snapshot.state)
                reader = self.world.make_reader.restored(LogMark.decode(snapshot.mark), KEPT_MS)
            loader = Loader(0, machine, CoordinatorSerde(), 0, Statistics(), set())
            loader.read_offset = reader.position
            self.standby = self.world.make_standby(0, loader, reader)
        return self.standby

    def resume(self) -> None:
        """Follows the log again, with the standby that was not used, or with another one."""
        self.stand_by().is_paused = False

    def follow_log(self) -> bool:
        """Reads the next batches of an owned partition. Returns whether there were any."""
        log, reader = self.log, self.log.reader
        if not log.is_following:
            return False
        before = reader.position, reader.is_verified
        try:
            log.followed(self.world.partition.fetch(reader.fetch_offset), self.world.now_ms)
        except KafkaError as error:
            log.not_followed(error)
        self.settle()
        return (reader.position, reader.is_verified) != before

    def follow(self) -> None:
        self.follow_log()
        is_following = any(isinstance(request, Follow) for request in self.in_flight)
        if self.load is None and not is_following:
            reader = self.log.reader if self.state is not None else self.stand_by().reader
            self.in_flight.append(Follow(reader.fetch_offset))

    def followed(self, follow: Follow) -> None:
        """Delivers the fetch of a standby."""
        standby, partition = self.standby, self.world.partition
        if standby is None:
            return
        try:
            data = partition.fetch(follow.offset)
            standby.fetched(follow.offset, data, partition.high_watermark, self.world.now_ms)
        except DivergedError:
            self.drop_standby(standby)
        except KafkaError:
            if follow.offset != standby.reader.fetch_offset:
                return
            try:
                standby.begin_at(partition.start_offset)
            except DivergedError:
                self.drop_standby(standby)

    def drop_standby(self, standby: Standby[Numbers]) -> None:
        if standby is self.standby:
            self.standby = self.snapshot = None

    def take_snapshot(self) -> None:
        """Begins a snapshot, or ends it. It then has some names of the first time, and the others of the second."""
        standby = self.standby
        machine: object = self.state if self.state is not None else standby
        reader = standby.reader if standby is not None else self.log.reader
        state = self.state if standby is None else standby.loader.machine.state
        note = reader.note()
        if state is None or note is None or reader.last is None or self.append is not None:
            return
        if self.taking is None or self.taking.machine is not machine:
            self.taking = Snapshot(note, {NAMES[0]: state.get(NAMES[0], 0)}, machine)
            return
        taking, self.taking = self.taking, None
        mark = reader.mark(taking.note)
        assert mark is not None
        taking.state = {name: value for name, value in (state | taking.state).items() if value}
        taking.mark = mark.encode()
        self.snapshot = taking

    # The network.

    def answer(self, request: Request | Follow) -> None:
        """Delivers a request to the upstream and its response to the log."""
        if isinstance(request, Follow):
            self.followed(request)
            return
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

    def refuse(self, request: Request | Follow, error: Errors) -> None:
        if isinstance(request, Follow):
            if self.standby is not None:
                self.standby.failed()
            return
        self.log.refused(request, KafkaError(error), self.world.now_ms)
        self.settle()


def split(data: bytes) -> list[bytes]:
    return [data[position : position + header.size_bytes] for position, header in iter_headers(data)]


class World:
    """The partition, the coordinator, two instances, and what was acknowledged."""

    def __init__(
        self,
        seed: int,
        make_log: type[UpstreamLog] = UpstreamLog,
        make_reader: type[UpstreamReader] = UpstreamReader,
        make_standby: type[Standby[Numbers]] = Standby,
        **weights: float,
    ) -> None:
        self.random = Random(seed)
        self.make_reader = make_reader
        self.make_standby = make_standby
        self.weights = WEIGHTS | weights
        self.span_weights = [4, 10, 6, 0.5, 0.1, 0.1]
        self.now_ms = 1_000
        self.value = 0
        self.partition = ModelPartition(self.random, is_tombstone)
        self.coordinator = TransactionalIds()
        self.acknowledged: dict[bytes, int] = {}
        self.instances = [
            Instance(self, make_log(name, write_timeout_ms=TIMEOUT_MS, foreign_id_wait_ms=WAIT_MS))
            for name in ("first", "second")
        ]
        self.late: list[tuple[bytes, int]] = []
        """Batches that may still arrive, with the time at which the network has lost them."""
        self.served = 0

    def batch(self, name: bytes, *, is_deleted: bool = False, base_offset: int = 0) -> bytes:
        """Returns a batch that sets a name to a new number, or deletes it."""
        self.value += 1
        pairs: list[tuple[bytes | None, bytes | None]] = [(name, b"%d" % (-self.value if is_deleted else self.value))]
        return encode_batch_from_parts(pairs, 1, base_offset=base_offset)

    def acknowledge(self, data: bytes) -> None:
        self.served += 1
        for name, value in entries_of(data):
            self.acknowledged[name] = max(self.acknowledged.get(name, 0), value, key=abs)
        if self.durable().items() < dict(entries_of(data)).items():
            raise Violation("acknowledged before it was durable")

    def durable(self) -> dict[bytes, int]:
        return replayed(self.partition.written, self.partition.high_watermark)

    def last_claimer(self) -> tuple[int, int]:
        """Returns the producer id and the epoch of the last claim. Earlier owners can append nothing any more."""
        for header, data in reversed(self.partition.batches):
            if any(key and key.startswith(CLAIM_KEY) and value is not None for _, key, value in decode_entries(data)):
                return header.producer_id, header.producer_epoch
        return -1, -1

    def check_loaded(self, instance: Instance) -> None:
        """Checks that an instance begins to serve with exactly what the log has.

        If an unclean election has lost the batches that replaced compacted ones, the compacted ones are right, too.
        """
        if self.last_claimer() != instance.log.claimed_id or instance.state is None:
            return
        end_offset = instance.log.reader.position
        for name in NAMES:
            left = writes(self.partition.batches, name, end_offset)
            first = left[-1][0] if left else 0
            allowed = {value for offset, value in writes(self.partition.written, name, end_offset) if offset >= first}
            value = instance.state.get(name)
            if value not in allowed and (value or left):
                raise Violation(f"the log has one of {allowed} as {name!r}, but an owner serves {value}")

    def check_state(self, state: dict[bytes, int]) -> None:
        """Checks that nothing acknowledged is lost. Compaction may have removed a name that was deleted."""
        durable = self.durable()
        for name, value in self.acknowledged.items():
            is_compacted = name not in state and durable.get(name, 0) < 0
            if abs(state.get(name, 0)) < abs(value) and not is_compacted:
                raise Violation(f"acknowledged {name!r}={value}, but the state has {state.get(name)}")

    def check(self) -> None:
        self.check_state(self.durable())
        counts = Counter(entry for _, data in self.partition.written for entry in entries_of(data))
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
        instance = draw.choice([instance for instance in self.instances if not instance.is_stalled] or self.instances)
        match draw.choices(list(WEIGHTS), [self.weights[name] for name in WEIGHTS])[0]:
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
                self.lose_leader()
            case "time":
                self.pass_time(draw.choices(SPANS_MS, self.span_weights)[0])
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
            case "follow":
                instance.follow()
            case "stall":
                stalled = draw.choice(self.instances)
                stalled.is_stalled = not stalled.is_stalled
            case "snapshot":
                instance.take_snapshot()
            case "compact":
                self.partition.compact(self.now_ms, KEPT_MS)
            case "restart":
                instance.crash()
                instance.wants = draw.random() < 0.5
            case "unclean":
                self.lose_tail()

    def lose_leader(self) -> None:
        for instance in self.instances:
            waiting, instance.unreplicated = instance.unreplicated, []
            for request, _ in waiting:
                instance.refuse(request, Errors.NOT_LEADER_OR_FOLLOWER)

    def lose_tail(self) -> None:
        """Elects a leader that lacks some batches below the high watermark. Appends in flight are given up."""
        partition = self.partition
        if partition.batches:
            partition.truncate(self.random.choice(partition.batches[-8:])[0].base_offset)
        self.lose_leader()
        left = replayed(partition.batches, partition.high_watermark)
        self.acknowledged = {name: value for name, value in self.acknowledged.items() if left.get(name) == value}

    def deliver(self, instance: Instance, request: Request | Follow) -> None:
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

    def deliver_now(self, instance: Instance, request: Request | Follow) -> None:
        """Delivers a request and its answer, unless the instance must not send it any more."""
        if isinstance(request, Produce) and not instance.log.may_send(request, self.now_ms):
            return
        instance.answer(request)

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
            if instance.is_stalled:
                continue
            waiting, instance.unreplicated = instance.unreplicated, []
            for request, offset in waiting:
                instance.log.produced(request, offset, self.now_ms)
                instance.settle()

    def pass_time(self, milliseconds: int) -> None:
        self.now_ms += milliseconds
        self.partition.pass_time(self.now_ms)
        for instance in self.instances:
            if instance.is_stalled:
                continue
            instance.log.tick(self.now_ms)
            instance.settle()
            if instance.wants:
                instance.claim()

    def heal(self) -> None:
        """Ends all faults. Then one instance has to serve again within a minute."""
        self.partition.has_too_few_replicas = False
        owner = self.instances[0]
        for instance in self.instances:
            instance.is_stalled = False
        owner.wants = True
        self.instances[1].wants = False
        for _ in range(120):
            self.pass_time(1_000)
            owner.put(b"a")
            for instance in self.instances * ROUNDS_PER_SECOND:
                if instance.in_flight:
                    self.deliver_now(instance, instance.in_flight.pop(0))
                    self.replicate()
                instance.follow_log()
            if owner.state is not None and owner.append is None and self.last_claimer() == owner.log.claimed_id:
                break
            if owner.log.state is UpstreamState.FENCED:
                owner.wants = True
        else:
            raise Violation("the shard is not served again")
        self.check()
        self.check_state(owner.state)
