# SPDX-License-Identifier: Apache-2.0
"""Random walks of two instances whose clients commit offsets in transactions of the upstream.

An instance has a real shard set and group coordinator. A client's requests may be delivered late, to an instance that
was stalled meanwhile: such an instance writes the offsets into a later transaction of the client. `Outcome` says what
the partition means, independently of the code under test.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count

from kcoord.config import BrokerConfig
from kcoord.coordinator.group.shard import GroupCoordinatorShard
from kcoord.metadata.image import MetadataImage
from kcoord.runtime.result import OperationContext, Producer, new_end_transaction_marker
from kcoord.runtime.serde import CoordinatorSerde
from kcoord.runtime.shard_log import Load, OpenedLog
from kcoord.runtime.shard_set import ShardSet
from kcoord.runtime.upstream_actions import (
    Action,
    Decided,
    Ended,
    Fenced,
    Held,
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
from kcoord.runtime.upstream_claim import UpstreamState
from kcoord.runtime.upstream_log import UpstreamLog
from kcoord.runtime.upstream_reader import DivergedError, UpstreamReader
from kcoord.runtime.waiting import DeferredReply, ShardState
from kcoord.simulation.upstream.meaning import CommitKey, Meaning
from kcoord.simulation.upstream.transactions import TransactionalPartition, TransactionPhase, UpstreamTransactions
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import OffsetCommitRequest, TxnOffsetCommitRequest
from tests.unit.runtime.upstream_walk import Follow, Instance, Violation, World

TOPICS = ("t0", "t1")
CLIENTS = (10, 20)
"""The producer ids of clients. Each commits offsets of both topics for a group of its own."""
MIXED = 20
"""The offsets of this client are also committed without a transaction, and deleted."""
LEASE_MS = 3_000
CONFIG = BrokerConfig.from_properties({"offsets.retention.minutes": "2147483647"})
RETRIABLE = {
    Errors.COORDINATOR_NOT_AVAILABLE,
    Errors.COORDINATOR_LOAD_IN_PROGRESS,
    Errors.NOT_COORDINATOR,
    Errors.REQUEST_TIMED_OUT,
}

SERDE = CoordinatorSerde()


def group_of(producer_id: int) -> str:
    return f"g{producer_id}"


@dataclass
class Commit:
    """A TxnOffsetCommit on its way."""

    producer: Producer
    topics: list[str]
    offset: int
    on_answer: Callable[[KafkaError | None], None] = lambda error: None
    is_abandoned: bool = False
    """The client has given it up, and may be in another transaction."""


class Client:
    """Runs transactions, each of which commits a new offset."""

    def __init__(self, world: TransactionalWorld, producer_id: int) -> None:
        self.world = world
        self.producer = world.transactions.init(producer_id)
        self.offset = 0
        """The offset of the present transaction, 0 if there is none."""
        self.topics: list[str] = []
        self.waits: Commit | None = None
        self.is_sent = False
        self.is_doomed = False
        self.committed = dict.fromkeys(TOPICS, 0)
        self.aborted: set[int] = set()

    def step(self) -> None:
        """Takes the next step, unless it waits for an answer."""
        if self.waits is not None:
            if self.world.random.random() < 0.3:
                # The client gives the request up. It may be executed all the same.
                self.waits.on_answer = lambda error: None
                self.waits.is_abandoned = True
                self.waits = None
                self.is_doomed = self.world.random.random() < 0.5
            return
        try:
            self._step()
        except KafkaError as error:
            if error.error is Errors.INVALID_PRODUCER_EPOCH:
                with suppress(KafkaError):
                    self.producer = self.world.transactions.init(self.producer.producer_id)
                    self.aborted.add(self.offset)
                    self.offset = 0

    def _step(self) -> None:
        world = self.world
        if not self.offset:
            world.transactions.add_partition(self.producer)
            world.value += 1
            self.offset, self.is_sent, self.is_doomed = world.value, False, False
            self.topics = [*TOPICS] if world.random.random() < 0.2 else [world.random.choice(TOPICS)]
        elif self.is_doomed or (self.is_sent and world.random.random() < 0.2):
            world.transactions.end(self.producer, committed=False)
            self.aborted.add(self.offset)
            self.offset = 0
        elif self.is_sent:
            world.transactions.end(self.producer, committed=True)
            self.committed |= dict.fromkeys(self.topics, self.offset)
            self.offset = 0
            world.served += 1
        else:
            self._send()

    def _send(self) -> None:
        commit = Commit(self.producer, self.topics, self.offset)

        def answered(error: KafkaError | None) -> None:
            self.waits = None
            if error is None:
                self.is_sent = True
            elif error.error not in RETRIABLE:
                self.is_doomed = True

        commit.on_answer = answered
        self.waits = commit
        self.world.random.choice(self.world.owners()).requests.append(commit)


class TransactionalInstance(Instance):
    """A process with one shard of the group coordinator. `requests` are those in its sockets."""

    def __init__(self, world: TransactionalWorld, log: UpstreamLog) -> None:
        super().__init__(world, log)
        self.transactional_world = world
        self.requests: list[Commit] = []
        self.shards = self._new_shards()

    def _new_shards(self) -> ShardSet[GroupCoordinatorShard]:
        return ShardSet(
            lambda _: GroupCoordinatorShard(CONFIG, MetadataImage.empty()),
            SERDE,
            first_reload_ms=50,
            longest_reload_ms=200,
        )

    # The shard set.

    def claim(self) -> None:
        self.wants = False
        if not self.shards.shard_ids:
            self.shards.open_shards(1, [0], (), self.world.now_ms)
        elif self.shards.state(0) is ShardState.CLOSED:
            self.shards.claim([0])
        self.settle()

    def crash(self) -> None:
        super().crash()
        self.requests = []
        self.shards = self._new_shards()

    def settle(self) -> None:
        """Handles the actions of the log and the work of the shard set, until there are none."""
        shards, log = self.shards, self.log
        for _ in range(100):
            actions, log.actions = log.actions, []
            for action in actions:
                self.handle(action)
            ready = shards.poll(self.world.now_ms)
            for append in ready.appends:
                log.append(append, self.world.now_ms)
            for waiter in ready.replies:
                waiter.settle()
            for _ in ready.closes:
                log.close()
            for load in ready.opens:
                self.open(load)
            for load in ready.reads:
                log.read(load)
            if not log.actions and not shards.has_ready(self.world.now_ms):
                return
        raise AssertionError("the instance does not come to rest")

    def handle(self, action: Action) -> None:
        shards, log, now_ms = self.shards, self.log, self.world.now_ms
        match action:
            case Written(append):
                shards.written(append)
            case Decided(append, offset, error):
                shards.decided(append, offset, error)
            case Ended(producer, coordinator_epoch, committed):
                shards.ended(0, new_end_transaction_marker(producer, coordinator_epoch, committed=committed))
            case Rewrite(keys):
                shards.rewrite(0, keys, now_ms)
            case Unknown(append, reason):
                shards.unknown(append, OSError(reason), now_ms)
            case Fenced(ticket):
                self.resume()
                shards.fenced(ticket)
            case Opened(load, end_offset):
                has_standby = 0 in shards.standbys
                self.taken_over += has_standby and log.reader.last is not None
                shards.opened(load, OpenedLog(log.reader.position, end_offset, has_standby=has_standby))
            case Loaded(load, batches, is_end):
                shards.read(load, batches, now_ms, is_end=is_end)
            case Held(load):
                self.resume()
                shards.held(load, now_ms)
            case LoadFailed(load, reason):
                self.resume()
                shards.failed(load, OSError(reason), now_ms)
            case Lost(reason, is_fenced):
                if is_fenced:
                    shards.close_shard(0)
                else:
                    shards.fail_shard(0, reason)
            case _:
                super().handle(action)

    # The standby.

    def open(self, load: Load) -> None:
        """Claims the log, with the standby if there is one."""
        standby = self.shards.standbys.get(0)
        if standby is not None:
            standby.is_paused = True
        self.log.open(load, self.world.now_ms, standby.reader if standby is not None else None)

    def resume(self) -> None:
        standby = self.shards.standbys.get(0)
        if standby is not None:
            standby.is_paused = False
            if standby.reader.has_diverged:
                del self.shards.standbys[0]

    def follow(self) -> None:
        """Reads the next batches as the owner, or else as a standby."""
        shards, partition, now_ms = self.shards, self.transactional_world.partition, self.world.now_ms
        if self.follow_log() or shards.machine(0) is not None or shards.is_loading:
            return
        standby = shards.standbys.get(0) or shards.stand_by(0, UpstreamReader(now_ms))
        try:
            offset = standby.reader.fetch_offset
            standby.fetched(offset, partition.fetch(offset), partition.high_watermark, now_ms)
        except KafkaError:
            standby.failed()
        except DivergedError:
            del shards.standbys[0]

    # Requests of clients.

    def execute(self) -> None:
        """Executes the oldest request.

        A true owner executes none that its client has given up: it would be part of the client's next transaction, also
        in Apache Kafka before transaction.version 2.
        """
        commit = self.requests.pop(0)
        if commit.is_abandoned and self.world.last_claimer() == self.log.claimed_id:
            return
        producer_id, epoch = commit.producer
        topics = [
            TxnOffsetCommitRequest.TxnOffsetCommitRequestTopic(
                name=topic,
                partitions=[
                    TxnOffsetCommitRequest.TxnOffsetCommitRequestPartition(
                        partition_index=0, committed_offset=commit.offset
                    )
                ],
            )
            for topic in commit.topics
        ]
        request = TxnOffsetCommitRequest(
            transactional_id=str(producer_id),
            group_id=group_of(producer_id),
            producer_id=producer_id,
            producer_epoch=epoch,
            topics=topics,
        )
        self._run(GroupCoordinatorShard.commit_provisionally, request, lambda error: commit.on_answer(error))

    def commit_plainly(self, topic: str, offset: int) -> None:
        partition = OffsetCommitRequest.OffsetCommitRequestPartition(partition_index=0, committed_offset=offset)
        topics = [OffsetCommitRequest.OffsetCommitRequestTopic(name=topic, partitions=[partition])]
        request = OffsetCommitRequest(group_id=group_of(MIXED), topics=topics)
        self._run(GroupCoordinatorShard.commit_offset, request, lambda error: None)

    def delete_group(self) -> None:
        self._run(GroupCoordinatorShard.delete_groups, [group_of(MIXED)], lambda error: None)

    def _run(self, operation: object, request: object, on_answer: Callable[[KafkaError | None], None]) -> None:
        context = OperationContext(self.world.now_ms, api_version=3, token=next(self.transactional_world.tokens))
        try:
            outcome = self.shards.run(0, operation, request, context)  # type: ignore[arg-type]
        except KafkaError as error:
            on_answer(error)
        else:
            if isinstance(outcome, DeferredReply):
                outcome.deliver = lambda value: on_answer(value if isinstance(value, KafkaError) else None)
        self.settle()


class TransactionalWorld(World):
    """Two instances, and clients with transactions."""

    def __init__(self, seed: int, make_log: type[UpstreamLog] = UpstreamLog) -> None:
        super().__init__(seed, make_log)
        self.weights |= {"claim": 6, "put": 0, "follow": 60, "stall": 10, "leader": 1, "time": 20, "replicas": 0.1}
        self.weights |= {"expire": 0.1, "snapshot": 0, "compact": 0, "restart": 0.2}
        self.span_weights = [4, 10, 3, 0.2, 0.02, 0.02]
        self.transactions = UpstreamTransactions()
        self.partition: TransactionalPartition = TransactionalPartition(self.random, self.transactions)
        self.tokens = count(1)
        self._meant = (-1, -1, 0)
        self._meanings: list[Meaning] = []
        self.processes = [TransactionalInstance(self, instance.log) for instance in self.instances]
        self.instances = [*self.processes]
        self.clients = [Client(self, producer_id) for producer_id in CLIENTS]

    def owners(self) -> list[TransactionalInstance]:
        """Returns the instances that a client may take for the coordinator."""
        serving = [process for process in self.processes if process.shards.machine(0) is not None]
        awake = [process for process in serving if not process.is_stalled]
        return (awake if self.random.random() < 0.7 else serving) or self.processes

    def step(self) -> None:
        draw = self.random
        process = draw.choice(self.processes)
        client = draw.choice(self.clients)
        match draw.choices(
            ["world", "client", "execute", "marker", "plain", "delete", "time out"], [260, 120, 60, 20, 8, 1, 0.5]
        )[0]:
            case "world":
                super().step()
            case "client":
                client.step()
            case "execute":
                if process.requests and not process.is_stalled:
                    process.execute()
            case "marker":
                if self.transactions.markers:
                    with suppress(KafkaError):
                        self.transactions.write_marker(self.partition)
            case "plain":
                if not process.is_stalled:
                    self.value += 1
                    process.commit_plainly(draw.choice(TOPICS), self.value)
            case "delete":
                if not process.is_stalled:
                    process.delete_group()
            case "time out":
                self.transactions.time_out(client.producer.producer_id)

    def deliver_now(self, instance: Instance, request: Request | Follow) -> None:
        if not isinstance(request, Produce) or self.may_act(instance):
            super().deliver_now(instance, request)

    def may_act(self, instance: Instance) -> bool:
        """Returns whether an instance may be the owner, as far as it knows."""
        return True

    # Checks.

    def check(self) -> None:
        partition = self.partition
        last = id(partition.batches[-1][1]) if partition.batches else 0
        key = partition.end_offset, partition.high_watermark, last
        if key != self._meant:
            self._meant = key
            self._meanings = [Meaning.of(partition, knows_claims=knows) for knows in (True, False)]
        mine, foreign = self._meanings
        for process in self.processes:
            if self._is_quiet(process):
                machine = process.shards.machine(0)
                assert machine is not None
                self._compare(machine, mine)
                self._compare_readers(mine, foreign)
            standby = process.shards.standbys.get(0)
            if standby is not None and standby.reader.is_verified and standby.reader.position == partition.end_offset:
                self._compare(standby.loader.machine, mine)
        self._check_clients(mine.offsets())

    def _is_quiet(self, process: TransactionalInstance) -> bool:
        """True if the state in memory should be that of the partition."""
        shard, partition = process.shards.active(0), self.partition
        return (
            shard is not None
            and not shard.is_behind
            and process.log.state is UpstreamState.OWNER
            and process.log.reader.position == partition.end_offset == partition.high_watermark
        )

    @staticmethod
    def _compare(machine: GroupCoordinatorShard, meaning: Meaning) -> None:
        state = machine.hard_state()
        offsets = {(group, topic): offset.offset for (group, topic, _), offset in state["offsets"].items()}  # type: ignore[attr-defined]
        if offsets != meaning.offsets():
            raise Violation(f"the state has {offsets}, the partition means {meaning.offsets()}")
        pending = {(key.group_id, key.topic) for key in state["pending"]["writers"]}  # type: ignore[index]
        if pending != meaning.unstable():
            raise Violation(f"pending are {pending}, in the partition {meaning.unstable()}")

    @staticmethod
    def _compare_readers(mine: Meaning, foreign: Meaning) -> None:
        """Void records of a key are superseded, unless offsets of the key are pending."""
        for key in {*mine.committed, *foreign.committed} - mine.unstable():
            offset, other = mine.offsets().get(key), foreign.offsets().get(key)
            if offset != other:
                raise Violation(f"other readers have {other} for {key}, and not {offset}")

    def _check_clients(self, offsets: dict[CommitKey, int]) -> None:
        for client in self.clients:
            producer_id = client.producer.producer_id
            for topic in TOPICS:
                offset = offsets.get((group_of(producer_id), topic), 0)
                if offset in client.aborted:
                    raise Violation(f"offset {offset} of an aborted transaction is committed")
                if (
                    producer_id == MIXED
                    or self.transactions.transactions[producer_id].status is TransactionPhase.ENDING
                ):
                    continue
                if offset != client.committed[topic]:
                    raise Violation(f"{producer_id} has committed {client.committed} of {topic}, but it has {offset}")

    def heal(self) -> None:
        """Ends all faults and transactions. Then one instance serves what every reader of the partition has."""
        self.partition.has_too_few_replicas = False
        owner, other = self.processes
        for process in self.processes:
            process.is_stalled = False
        other.crash()
        for _ in range(200):
            self.pass_time(1_000)
            for process in self.processes:
                while process.requests:
                    process.execute()
            owner.claim()
            for client in self.clients:
                client.waits = None
                if client.offset:
                    client.step()
            while self.transactions.markers:
                self.transactions.write_marker(self.partition)
            while owner.in_flight or owner.follow_log():
                if owner.in_flight:
                    self.deliver_now(owner, owner.in_flight.pop(0))
                    self.replicate()
            self.check()
            if not any(client.offset for client in self.clients) and self._is_quiet(owner):
                break
        else:
            raise Violation("the shard is not served again")


class LeasedWorld(TransactionalWorld):
    """Only the holder of a lease claims, and a request that is sent arrives at once.

    A process knows how long it holds the lease. The other one gets it when that time is over.
    """

    def __init__(self, seed: int, make_log: type[UpstreamLog] = UpstreamLog) -> None:
        super().__init__(seed, make_log)
        self.weights |= {"claim": 0, "late": 0, "expire": 0, "stall": 20, "time": 60}
        self.candidates = [0, 1]
        self.until_ms = [0, 0]
        """The end of the lease, as each process knows it."""

    def may_act(self, instance: Instance) -> bool:
        return self.now_ms < self.until_ms[self.instances.index(instance)]

    def pass_time(self, milliseconds: int) -> None:
        now_ms = self.now_ms + milliseconds
        awake = [number for number in self.candidates if not self.processes[number].is_stalled]
        holder = next((number for number in self.candidates if now_ms < self.until_ms[number]), None)
        if holder is None and awake:
            holder = self.random.choice(awake)
            # It was not the holder for a while, so its claim may not be the last one.
            self.processes[holder].crash()
        for number, process in enumerate(self.processes):
            process.wants = number == holder
            if number == holder and number in awake:
                self.until_ms[number] = now_ms + LEASE_MS
        super().pass_time(milliseconds)

    def heal(self) -> None:
        self.candidates = [0]
        super().heal()

    def deliver(self, instance: Instance, request: Request | Follow) -> None:
        self.deliver_now(instance, request)
