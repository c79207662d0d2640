# SPDX-License-Identifier: Apache-2.0
"""The shard set over a remote log, with two owners and a faulty network: acknowledged records are never lost."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kcoord.runtime.result import OperationContext
from kcoord.runtime.serde import CoordinatorSerde
from kcoord.runtime.shard_log import ShardLog
from kcoord.runtime.shard_set import ShardSet
from kcoord.runtime.waiting import DeferredReply, ShardState
from kcoord_protocol.errors import KafkaError
from kcoord_protocol.messages import OffsetCommitKey, OffsetCommitValue
from kcoord_protocol.record_batch import decode_records
from tests.unit.runtime.ledger import Ledger
from tests.unit.runtime.remote_log import Fate, Partition, RemoteShardLog, Request

SHARDS = (0, 1)
NAMES = ("a", "b", "c")
SERDE = CoordinatorSerde()


def puts_in(partition: Partition) -> list[tuple[str, int, int]]:
    """Returns name, value and writer's epoch of every record, in the order of the log, without the shard set."""
    puts = []
    for entry in partition.entries:
        for record in decode_records(entry.data) if entry.data else ():
            decoded = SERDE.deserialize(record.key, record.value)
            assert decoded is not None
            assert isinstance(decoded.key, OffsetCommitKey)
            assert isinstance(decoded.value, OffsetCommitValue)
            puts.append((decoded.key.topic, decoded.value.offset, entry.epoch))
    return puts


def put(ledger: Ledger, context: OperationContext, request: tuple[str, int]) -> object:
    return ledger.put(context, *request)


class Instance:
    """A process that owns shards until it learns of another owner."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.shards: ShardSet[Ledger] = ShardSet(lambda _: Ledger(), SERDE, loads_at_a_time=2)
        self.remote = RemoteShardLog(cluster.partitions, self.shards, lambda: cluster.now_ms)
        self.log: ShardLog = self.remote

    def claim(self, shard_id: int) -> None:
        self.remote.may_open.add(shard_id)
        self.shards.claim([shard_id])
        self.turn()

    def turn(self) -> None:
        """Handles a `Ready` as a driver does."""
        ready = self.shards.poll(self.cluster.now_ms)
        for append in ready.appends:
            self.log.append(append, self.cluster.now_ms)
        for waiter in ready.replies:
            waiter.settle()
        for shard_id in ready.closes:
            self.log.close(shard_id)
        for load in ready.opens:
            self.log.open(load)
        for load in ready.reads:
            self.log.read(load)

    def put(self, shard_id: int, name: str) -> None:
        self.cluster.value += 1
        value, epoch = self.cluster.value, self.remote.epochs.get(shard_id, -1)
        context = OperationContext(self.cluster.now_ms)
        try:
            outcome = self.shards.run(shard_id, put, (name, value), context)  # type: ignore[arg-type]
        except KafkaError:
            return
        assert isinstance(outcome, DeferredReply), "the response to a write has left before the write was durable"
        outcome.deliver = lambda answer: self.cluster.on_put(shard_id, name, value, epoch, answer)

    def get(self, shard_id: int, name: str) -> None:
        def get(ledger: Ledger, context: OperationContext, request: None) -> object:
            return ledger.get(context, name)

        try:
            outcome = self.shards.run(shard_id, get, None, OperationContext(0))  # type: ignore[arg-type]
        except KafkaError:
            return
        self._tell(outcome, shard_id, name)

    def _tell(self, outcome: object, shard_id: int, name: str) -> None:
        if isinstance(outcome, DeferredReply):
            outcome.deliver = lambda answer: self.cluster.on_get(shard_id, name, answer)
        else:
            self.cluster.on_get(shard_id, name, outcome)


class Cluster:
    """Two instances, the partitions, and a list of the responses to clients."""

    def __init__(self) -> None:
        self.now_ms = 1_000
        self.value = 0
        self.partitions = {shard_id: Partition() for shard_id in SHARDS}
        self.acknowledged: dict[tuple[int, str], int] = {}
        self.answered: set[int] = set()
        self.instances = [Instance(self), Instance(self)]

    def on_put(self, shard_id: int, name: str, value: int, epoch: int, answer: object) -> None:
        assert value not in self.answered, "an operation got two responses"
        self.answered.add(value)
        if isinstance(answer, KafkaError):
            return
        assert (name, value, epoch) in puts_in(self.partitions[shard_id]), "acknowledged before it was durable"
        self.acknowledged[shard_id, name] = max(self.acknowledged.get((shard_id, name), 0), value)

    def on_get(self, shard_id: int, name: str, answer: object) -> None:
        if answer is None or isinstance(answer, KafkaError):
            return
        values = [value for other, value, _ in puts_in(self.partitions[shard_id]) if other == name]
        assert answer in values, "a response has a value that is not durable"

    def check(self) -> None:
        """Checks that the last record of every name is the last acknowledged one, or was appended after it."""
        for shard_id, partition in self.partitions.items():
            balance = {name: value for name, value, _ in puts_in(partition)}
            for name in NAMES:
                acknowledged = self.acknowledged.get((shard_id, name), 0)
                assert balance.get(name, 0) >= acknowledged, "an acknowledged record is lost"
            epochs = [entry.epoch for entry in partition.entries]
            assert epochs == sorted(epochs), "an owner appended after the claim of another"

    def is_owner(self, instance: Instance, shard_id: int) -> bool:
        return instance.remote.epochs.get(shard_id) == self.partitions[shard_id].claimed_epoch

    def is_served(self, instance: Instance, shard_id: int) -> bool:
        return instance.shards.state(shard_id) is ShardState.ACTIVE and self.is_owner(instance, shard_id)

    def heal(self, owner: Instance) -> None:
        """Repairs the network and gives all shards to one instance."""
        for instance in self.instances:
            instance.remote.late.clear()
        for _ in range(400):
            for instance in self.instances:
                for request in list(instance.remote.requests):
                    instance.remote.settle(request, Fate.ANSWERED)
                instance.turn()
            self.now_ms += 1_000
            for shard_id in SHARDS:
                if owner.shards.state(shard_id) in (ShardState.INITIAL, ShardState.CLOSED):
                    owner.claim(shard_id)
                elif not self.is_owner(owner, shard_id):
                    # The instance learns of the other owner by its next append.
                    owner.put(shard_id, "a")
            is_quiet = not any(instance.remote.requests for instance in self.instances)
            if is_quiet and all(self.is_served(owner, shard_id) for shard_id in SHARDS):
                return
        raise AssertionError("the shards are not served again")


class TwoOwners(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.cluster = Cluster()

    instances = st.integers(0, 1)
    shards = st.sampled_from(SHARDS)
    names = st.sampled_from(NAMES)

    @rule(instance=instances, shard=shards)
    def claim(self, instance: int, shard: int) -> None:
        self.cluster.instances[instance].claim(shard)

    @rule(instance=instances, shard=shards, name=names)
    def put(self, instance: int, shard: int, name: str) -> None:
        self.cluster.instances[instance].put(shard, name)

    @rule(instance=instances, shard=shards, name=names)
    def get(self, instance: int, shard: int, name: str) -> None:
        self.cluster.instances[instance].get(shard, name)

    @rule(instance=instances)
    def turn(self, instance: int) -> None:
        self.cluster.instances[instance].turn()

    @rule(instance=instances, which=st.integers(0, 3), fate=st.sampled_from(list(Fate)))
    def one_request(self, instance: int, which: int, fate: Fate) -> None:
        remote = self.cluster.instances[instance].remote
        if remote.requests:
            remote.settle(remote.requests[which % len(remote.requests)], fate)

    @rule(instance=instances)
    def all_is_well(self, instance: int) -> None:
        """Delivers enough responses to finish a load."""
        owner = self.cluster.instances[instance]
        for _ in range(4):
            for request in list(owner.remote.requests):
                owner.remote.settle(request, Fate.ANSWERED)
            owner.turn()

    @rule(instance=instances)
    def a_late_request_arrives(self, instance: int) -> None:
        late = self.cluster.instances[instance].remote.late
        if late:
            late.pop(0).arrive()

    @rule(shard=shards)
    def another_coordinator_writes(self, shard: int) -> None:
        self.cluster.partitions[shard].write_marker()

    @rule(milliseconds=st.sampled_from([1, 50, 1_000, 60_000]))
    def pass_time(self, milliseconds: int) -> None:
        self.cluster.now_ms += milliseconds
        for instance in self.cluster.instances:
            instance.turn()

    @invariant()
    def nothing_acknowledged_is_lost(self) -> None:
        self.cluster.check()

    def teardown(self) -> None:
        owner = self.cluster.instances[0]
        self.cluster.heal(owner)
        self.cluster.check()
        for shard_id, partition in self.cluster.partitions.items():
            machine = owner.shards.machine(shard_id)
            assert machine is not None
            assert machine.balance == {name: value for name, value, _ in puts_in(partition)}


TestTwoOwners = TwoOwners.TestCase
TestTwoOwners.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


# -- every outcome alone -----------------------------------------------------------------------------------------------


@pytest.fixture
def cluster() -> Cluster:
    cluster = Cluster()
    cluster.heal(cluster.instances[0])
    return cluster


def append_of(instance: Instance) -> Request:
    instance.turn()
    (request,) = [request for request in instance.remote.requests if request.is_append]
    return request


@pytest.mark.parametrize("fate", [Fate.LOST, Fate.ANSWER_LOST])
def test_a_new_claim_settles_an_unknown_outcome(cluster: Cluster, fate: Fate) -> None:
    first = cluster.instances[0]
    first.put(0, "a")
    first.remote.settle(append_of(first), fate)
    assert first.shards.state(0) is ShardState.FAILED
    first.put(0, "b")
    first.get(0, "a")
    first.turn()
    assert cluster.acknowledged == {}
    epoch = first.remote.epochs[0]
    cluster.heal(first)
    assert first.remote.epochs[0] > epoch, "the instance has claimed the log again"
    machine = first.shards.machine(0)
    assert machine is not None
    assert ("a" in machine.balance) == (fate is Fate.ANSWER_LOST)


def test_an_append_that_arrives_after_the_new_claim_is_rejected(cluster: Cluster) -> None:
    first = cluster.instances[0]
    first.put(0, "a")
    first.remote.settle(append_of(first), Fate.LATE)
    late = first.remote.late[0]
    cluster.heal(first)
    late.arrive()
    assert puts_in(cluster.partitions[0]) == []
    machine = first.shards.machine(0)
    assert machine is not None
    assert machine.balance == {}


def test_a_fenced_owner_acknowledges_nothing_and_stays_away(cluster: Cluster) -> None:
    first, second = cluster.instances
    first.put(0, "a")
    cluster.heal(second)
    assert cluster.acknowledged == {(0, "a"): 1}, "the record was appended before the claim"
    first.put(0, "a")
    first.remote.settle(append_of(first), Fate.ANSWERED)
    first.turn()
    assert cluster.acknowledged == {(0, "a"): 1}
    assert first.shards.state(0) is ShardState.CLOSED
    for _ in range(5):
        cluster.now_ms += 60_000
        first.turn()
    assert first.remote.requests == [], "the fenced instance sends no request"
    cluster.heal(first)
    assert first.shards.state(0) is ShardState.ACTIVE


def test_an_append_between_the_new_epoch_and_the_claim_is_read_by_the_new_owner(cluster: Cluster) -> None:
    first, second = cluster.instances
    second.claim(0)
    first.put(0, "a")
    first.remote.settle(append_of(first), Fate.ANSWERED)
    first.turn()
    assert cluster.acknowledged == {(0, "a"): 1}
    cluster.heal(second)
    machine = second.shards.machine(0)
    assert machine is not None
    assert machine.balance == {"a": 1}
