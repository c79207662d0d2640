# SPDX-License-Identifier: Apache-2.0
"""Hypothesis checks that fast paths change no response.

Two brokers, one with `kcoord.fast.paths.enable` and one without, get the same bytes on the same connections at the same
time. Their responses have to be equal byte for byte. Their states have to be equal too, and so have the records of
their logs and the states that a replay of these logs gives.
"""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kcoord.coordinator.group.shard import GroupCoordinatorShard
from kcoord.metadata.image import GROUP_RESOURCE, ImageBuilder
from kcoord.runtime.result import CoordinatorRecord, Producer
from kcoord.runtime.serde import CoordinatorSerde
from kcoord.runtime.shard_set import ShardSet
from kcoord.runtime.waiting import ShardState
from kcoord.server.environment import RandomUuids
from kcoord.server.net.path_settings import PathSettings
from kcoord.server.net.request_path import RequestPath
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors
from kcoord_protocol.framing import FrameReader, decode_response_header, encode_request
from kcoord_protocol.messages import (
    ConfigRecord,
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
    DeleteGroupsRequest,
    HeartbeatRequest,
    JoinGroupRequest,
    JoinGroupResponse,
    Message,
    OffsetCommitRequest,
    OffsetCommitResponse,
    OffsetDeleteRequest,
    OffsetFetchRequest,
    OffsetFetchResponse,
    PartitionRecord,
    RemoveTopicRecord,
    SyncGroupRequest,
    TopicRecord,
    TxnOffsetCommitRequest,
)
from kcoord_protocol.record_batch import decode_entries
from tests.unit.server.harness import SHARDS, Harness, topic_id

TURNS = 40
"""Turns of the event loop: more than any response takes that does not wait for another request."""
CLIENTS = ("a", "b")
GROUPS = ("modern", "classic", "simple")
TOPICS = st.sampled_from(["t1", "t3", "t3", "later"])
SETTINGS = {
    "group_initial_rebalance_delay_ms": "0",
    "group_consumer_min_session_timeout_ms": "1000",
    "group_consumer_assignment_interval_ms": "0",
    "group_min_session_timeout_ms": "1000",
    "offsets_retention_check_interval_ms": "20000",
}


class Side:
    """One of the two brokers, with a connection for each client."""

    def __init__(self, harness: Harness, has_fast_paths: bool) -> None:
        self.harness = harness
        # Both brokers use the same sequence of identifiers.
        harness.broker.uuids = RandomUuids(Random(0).randbytes)
        settings = PathSettings(harness.broker, "PLAINTEXT", 100_000, 100_000, has_fast_paths, None)
        self.paths = {client: RequestPath(settings, lambda: None, "192.0.2.7", 4711) for client in CLIENTS}

    def answers(self, client: str) -> bytes:
        path = self.paths[client]
        assert path.close_reason is None
        return path.take_output()

    def reload(self, group: str) -> None:
        self.harness.runtime.claim([self.harness.groups.shard_of(group)])
        self.harness.wake()

    def states(self) -> list[object]:
        machines = [self.harness.runtime.machine(shard) for shard in range(SHARDS)]
        return [machine.hard_state() if machine is not None else None for machine in machines]

    def log(self, shard: int) -> list[tuple[bytes | None, bytes | None]]:
        log = self.harness.logs.open(shard)
        return [entry[1:] for _, data in log.batches(log.start_offset) for entry in decode_entries(data)]

    def rebuilt(self, shard: int) -> object:
        log = self.harness.logs.open(shard)
        runtime = ShardSet(lambda _: GroupCoordinatorShard(self.harness.config, self.harness.image), CoordinatorSerde())
        runtime.load(shard, log.batches(log.start_offset), self.harness.now, log.end_offset)
        machine = runtime.machine(shard)
        assert machine is not None
        return machine.hard_state()


class BrokerLife(RuleBasedStateMachine):
    release = "4.4"

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        fast = self.loop.run_until_complete(self._new(has_fast_paths=True))
        plain = self.loop.run_until_complete(self._new(has_fast_paths=False))
        self.sides = (fast, plain)
        self.correlation_id = 0
        self.offset = 0
        self.epochs: dict[str, int] = {}
        self.generation, self.member_id = -1, ""
        self.commits: list[tuple[str, int, OffsetCommitRequest]] = []
        self.sent: list[tuple[str, ApiKey, int, bytes]] = []
        self.deleted: set[str] = set()

    async def _new(self, *, has_fast_paths: bool) -> Side:
        harness = Harness(file_system=None, kcoord_release=self.release, **SETTINGS)
        # The test reloads failed shards itself, on both sides at the same point.
        harness.runtime.first_reload_ms = 3_600_000
        return Side(await harness.open(), has_fast_paths)

    def teardown(self) -> None:
        try:
            for shard in range(SHARDS):
                logs = [side.log(shard) for side in self.sides]
                assert logs[0] == logs[1]
            assert self.sides[0].harness.groups.counters == self.sides[1].harness.groups.counters
            for shard in range(SHARDS):
                for side in self.sides:
                    machine = side.harness.runtime.machine(shard)
                    assert machine is not None
                    assert side.rebuilt(shard) == machine.hard_state()
        finally:
            self.loop.close()

    # --- both brokers -------------------------------------------------------------------------------------------------

    def _on_both(self, action: Any) -> None:
        for side in self.sides:
            self.loop.run_until_complete(self._run(side, action))

    async def _run(self, side: Side, action: Any) -> None:
        action(side)
        for _ in range(TURNS):
            await asyncio.sleep(0)

    def _send(self, client: str, frames: list[bytes]) -> list[bytes]:
        """Sends the frames at once on one connection, and compares the responses of both brokers."""
        self._on_both(lambda side: side.paths[client].receive(b"".join(frames)))
        answers = [{name: side.answers(name) for name in CLIENTS} for side in self.sides]
        assert answers[0] == answers[1]
        return FrameReader(1 << 20).feed(answers[0][client])

    def _frame(self, key: ApiKey, version: int, client: str, body: bytes) -> bytes:
        self.correlation_id += 1
        return encode_request(key, version, self.correlation_id, client, body)

    def _ask(self, client: str, key: ApiKey, version: int, request: Message) -> bytes | None:
        """Returns the body of the response, or None if it is not there yet."""
        body = request.encode(version)
        self.sent.append((client, key, version, body))
        for frame in self._send(client, [self._frame(key, version, client, body)]):
            # Responses to earlier requests may leave now, too.
            if int.from_bytes(frame[:4], "big") == self.correlation_id:
                return frame[decode_response_header(frame, key, version)[1] :]
        return None

    def _publish(self, *records: Message) -> None:
        for side in self.sides:
            builder = ImageBuilder(side.harness.image)
            for record in records:
                builder.replay(CoordinatorRecord(None, record))
            side.harness.image = side.harness.broker.image = builder.build()
        self._on_both(lambda side: side.harness.groups.on_metadata_update(side.harness.image))

    # --- requests -----------------------------------------------------------------------------------------------------

    @initialize()
    def start(self) -> None:
        """Sends the first requests, so that `repeat` can run from the first step on."""
        self.commit("a", "simple", 9, {"t3": [0, 2]}, "", False)
        self.consumer_heartbeat("a", joins=True, owned=False)
        self.classic_turn("b")

    @rule(
        client=st.sampled_from(CLIENTS),
        joins=st.booleans(),
        owned=st.booleans(),
        assignor=st.sampled_from([None, None, "range", "uniform"]),
    )
    def consumer_heartbeat(self, client: str, joins: bool, owned: bool, assignor: str | None = None) -> None:
        epoch = 0 if joins else self.epochs.get(client, 0)
        request = ConsumerGroupHeartbeatRequest(
            group_id="modern",
            member_id=client,
            member_epoch=epoch,
            rebalance_timeout_ms=5000 if epoch == 0 else -1,
            subscribed_topic_names=["t1", "t3", "later"] if epoch == 0 else None,
            server_assignor=assignor,
            topic_partitions=[] if owned or epoch == 0 else None,
        )
        body = self._ask(client, ApiKey.CONSUMER_GROUP_HEARTBEAT, 1, request)
        if body is not None:
            self.epochs[client] = max(ConsumerGroupHeartbeatResponse.decode(body, 1).member_epoch, 0)

    @rule(client=st.sampled_from(CLIENTS), epoch=st.sampled_from([-1, -1, 77]))
    def consumer_leaves_or_is_fenced(self, client: str, epoch: int) -> None:
        request = ConsumerGroupHeartbeatRequest(group_id="modern", member_id=client, member_epoch=epoch)
        self._ask(client, ApiKey.CONSUMER_GROUP_HEARTBEAT, 1, request)

    @rule(client=st.sampled_from(CLIENTS))
    def classic_turn(self, client: str) -> None:
        """A classic member joins, syncs and sends a heartbeat, unless its JoinGroup has to wait."""
        protocol = JoinGroupRequest.JoinGroupRequestProtocol(name="range", metadata=b"\0\0\0\0\0\0\xff\xff\xff\xff")
        for _ in range(2):
            join = JoinGroupRequest(
                group_id="classic",
                session_timeout_ms=6000,
                rebalance_timeout_ms=6000,
                member_id=self.member_id,
                protocol_type="consumer",
                protocols=[protocol],
            )
            body = self._ask(client, ApiKey.JOIN_GROUP, 9, join)
            if body is None:
                return
            joined = JoinGroupResponse.decode(body, 9)
            self.member_id, self.generation = joined.member_id, joined.generation_id
        sync = SyncGroupRequest(
            group_id="classic",
            generation_id=self.generation,
            member_id=self.member_id,
            protocol_type="consumer",
            protocol_name="range",
        )
        self._ask(client, ApiKey.SYNC_GROUP, 5, sync)
        self.classic_heartbeat(client)

    @rule(client=st.sampled_from(CLIENTS))
    def classic_heartbeat(self, client: str) -> None:
        request = HeartbeatRequest(group_id="classic", generation_id=self.generation, member_id=self.member_id)
        self._ask(client, ApiKey.HEARTBEAT, 4, request)

    @rule(
        client=st.sampled_from(CLIENTS),
        group=st.sampled_from(GROUPS),
        version=st.integers(5, 10),
        topics=st.dictionaries(
            st.sampled_from(["t1", "t3", "t3", "later"]),
            st.lists(st.integers(0, 3), min_size=1, max_size=4),
            min_size=1,
        ),
        metadata=st.sampled_from(["", "", "", None, "text"]),
        stale=st.booleans(),
    )
    def commit(
        self, client: str, group: str, version: int, topics: dict[str, list[int]], metadata: str | None, stale: bool
    ) -> None:
        member_id, epoch = "", -1
        if group == "modern":
            member_id, epoch = client, self.epochs.get(client, 0) - stale
        elif group == "classic":
            member_id, epoch = self.member_id, self.generation - stale
        request = OffsetCommitRequest(
            group_id=group,
            generation_id_or_member_epoch=epoch,
            member_id=member_id,
            topics=[
                OffsetCommitRequest.OffsetCommitRequestTopic(
                    name=name,
                    topic_id=topic_id(name),
                    partitions=[
                        OffsetCommitRequest.OffsetCommitRequestPartition(
                            partition_index=partition, committed_offset=0, committed_metadata=metadata
                        )
                        for partition in partitions
                    ],
                )
                for name, partitions in topics.items()
            ],
        )
        for times in range(3):
            self._ask(client, ApiKey.OFFSET_COMMIT, version, self._raised(request, times))
        self.commits.append((client, version, request))

    def _raised(self, request: OffsetCommitRequest, leader_epoch: int) -> OffsetCommitRequest:
        for topic in request.topics:
            for partition in topic.partitions:
                self.offset += 1
                partition.committed_offset, partition.committed_leader_epoch = self.offset, leader_epoch
        return request

    @rule(
        client=st.sampled_from(CLIENTS),
        group=st.sampled_from([*GROUPS, "unknown"]),
        version=st.integers(5, 10),
        topics=st.one_of(
            st.none(),
            st.dictionaries(TOPICS, st.lists(st.integers(0, 3), max_size=5)),
        ),
        as_member=st.booleans(),
        stable=st.booleans(),
    )
    def fetch(
        self, client: str, group: str, version: int, topics: dict[str, list[int]] | None, as_member: bool, stable: bool
    ) -> None:
        request = OffsetFetchRequest(require_stable=stable and version >= 7)
        if version < 8:
            request.group_id = group
            request.topics = None
            if topics is not None:
                request.topics = [
                    OffsetFetchRequest.OffsetFetchRequestTopic(name=name, partition_indexes=partitions)
                    for name, partitions in topics.items()
                ]
        else:
            request_group = OffsetFetchRequest.OffsetFetchRequestGroup(group_id=group, topics=None)
            if topics is not None:
                request_group.topics = [
                    OffsetFetchRequest.OffsetFetchRequestTopics(
                        name=name, topic_id=topic_id(name), partition_indexes=partitions
                    )
                    for name, partitions in topics.items()
                ]
            if as_member and version >= 9:
                request_group.member_id, request_group.member_epoch = client, self.epochs.get(client, 0)
            request.groups = [request_group]
        for _ in range(2):
            self._ask(client, ApiKey.OFFSET_FETCH, version, request)

    @precondition(lambda self: self.sent)
    @rule(data=st.data(), count=st.integers(1, 6))
    def repeat(self, data: st.DataObject, count: int) -> None:
        """Sends several earlier requests again in one piece; commits have higher offsets."""
        client = data.draw(st.sampled_from(CLIENTS))
        frames = []
        for number in range(count):
            if data.draw(st.booleans()) and self.commits:
                _, version, commit = data.draw(st.sampled_from(self.commits[-4:]))
                body = self._raised(commit, number).encode(version)
                frames.append(self._frame(ApiKey.OFFSET_COMMIT, version, client, body))
            else:
                _, key, version, body = data.draw(st.sampled_from(self.sent[-8:]))
                frames.append(self._frame(key, version, client, body))
        self._send(client, frames)

    # --- events that change responses ---------------------------------------------------------------------------------

    @rule(milliseconds=st.sampled_from([0, 100, 3_000, 50_000, 8 * 24 * 3600 * 1000]))
    def sleep(self, milliseconds: int) -> None:
        for side in self.sides:
            side.harness.now += milliseconds
        self._on_both(lambda side: side.harness.wake())

    @rule(timeout_ms=st.sampled_from(["2000", "40000"]), group=st.sampled_from(GROUPS))
    def configure_group(self, timeout_ms: str, group: str) -> None:
        self._publish(
            ConfigRecord(
                resource_type=GROUP_RESOURCE, resource_name=group, name="consumer.session.timeout.ms", value=timeout_ms
            )
        )

    @rule(limit=st.sampled_from(["2", "4096"]))
    def configure_broker(self, limit: str) -> None:
        for side in self.sides:
            side.harness.config.apply_dynamic({"offset.metadata.max.bytes": limit})
        self._publish(ConfigRecord(resource_type=4, resource_name="", name="offset.metadata.max.bytes", value=limit))

    @rule(name=st.sampled_from(["t3", "later", "later"]), count=st.integers(1, 3))
    def create_or_delete_topic(self, name: str, count: int) -> None:
        image = self.sides[0].harness.image
        if name in image.topics:
            self._publish(RemoveTopicRecord(topic_id=image.topics[name].id))
            self.deleted.add(name)
            return
        number = b"\2" if name in self.deleted else b"\1"
        made = name.encode().ljust(16, number)
        partitions = [
            PartitionRecord(partition_id=index, topic_id=made, replicas=[1], isr=[1], leader=1)
            for index in range(count)
        ]
        self._publish(TopicRecord(name=name, topic_id=made), *partitions)

    @rule(group=st.sampled_from(GROUPS))
    def fail_and_reload(self, group: str) -> None:
        """Fails the group's shard and loads it again from its log; requests are rejected meanwhile."""

        def fail(side: Side) -> None:
            side.harness.runtime.fail_shard(side.harness.groups.shard_of(group), "a test")
            side.harness.wake()

        self._on_both(fail)
        if self.sent:
            client, key, version, body = self.sent[-1]
            self._send(client, [self._frame(key, version, client, body)])
        self._on_both(lambda side: side.reload(group))
        for side in self.sides:
            assert side.harness.runtime.state(side.harness.groups.shard_of(group)) is ShardState.ACTIVE

    @rule(
        group=st.sampled_from(GROUPS), ends=st.sampled_from([None, True, False]), partitions=st.sets(st.integers(0, 2))
    )
    def transaction(self, group: str, ends: bool | None, partitions: set[int]) -> None:
        """Commits offsets in a transaction, which may stay open."""
        producer = Producer(7, 0)
        request = TxnOffsetCommitRequest(
            transactional_id="x",
            group_id=group,
            producer_id=7,
            producer_epoch=0,
            topics=[
                TxnOffsetCommitRequest.TxnOffsetCommitRequestTopic(
                    name="t3",
                    partitions=[
                        TxnOffsetCommitRequest.TxnOffsetCommitRequestPartition(
                            partition_index=partition, committed_offset=9, committed_metadata=""
                        )
                        for partition in sorted(partitions)
                    ],
                )
            ],
        )

        def act(side: Side) -> None:
            groups = side.harness.groups
            shard = groups.shard_of(group)
            ticket = groups.start_verification(shard, producer)
            context = side.harness.context(ApiKey.TXN_OFFSET_COMMIT, 3).operation_context()
            groups.call(
                group,
                lambda shard, c, request: shard.commit_transactional_offsets(c, request, ticket),
                request,
                context,
            )
            if ends is not None:
                context = side.harness.context(ApiKey.WRITE_TXN_MARKERS, 1).operation_context()
                groups.call(
                    group,
                    lambda shard, c, producer: shard.end_transaction(c, producer, 0, committed=ends),
                    producer,
                    context,
                )

        self._on_both(act)

    @rule(client=st.sampled_from(CLIENTS), group=st.sampled_from(GROUPS), partition=st.integers(0, 3))
    def delete_offset(self, client: str, group: str, partition: int) -> None:
        topic = OffsetDeleteRequest.OffsetDeleteRequestTopic(
            name="t3", partitions=[OffsetDeleteRequest.OffsetDeleteRequestPartition(partition_index=partition)]
        )
        self._ask(client, ApiKey.OFFSET_DELETE, 0, OffsetDeleteRequest(group_id=group, topics=[topic]))

    @rule(client=st.sampled_from(CLIENTS), group=st.sampled_from(GROUPS))
    def delete_group(self, client: str, group: str) -> None:
        self._ask(client, ApiKey.DELETE_GROUPS, 2, DeleteGroupsRequest(groups_names=[group]))

    @invariant()
    def states_are_equal(self) -> None:
        assert self.sides[0].states() == self.sides[1].states()


BrokerLife.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestBrokerLife = BrokerLife.TestCase


class OlderBrokerLife(BrokerLife):
    """Checks the same for `kcoord.release=4.3`, in which group epochs differ."""

    release = "4.3"


OlderBrokerLife.TestCase.settings = settings(max_examples=15, stateful_step_count=30, deadline=None)
TestOlderBrokerLife = OlderBrokerLife.TestCase


# --- durability -------------------------------------------------------------------------------------------------------


def simple_commit(offset: int) -> bytes:
    topic = OffsetCommitRequest.OffsetCommitRequestTopic(
        name="t3",
        partitions=[OffsetCommitRequest.OffsetCommitRequestPartition(partition_index=0, committed_offset=offset)],
    )
    request = OffsetCommitRequest(group_id="simple", topics=[topic])
    return encode_request(ApiKey.OFFSET_COMMIT, 9, offset, "a", request.encode(9))


def simple_fetch() -> bytes:
    group = OffsetFetchRequest.OffsetFetchRequestGroup(group_id="simple", topics=None)
    return encode_request(ApiKey.OFFSET_FETCH, 9, 7, "b", OffsetFetchRequest(groups=[group]).encode(9))


async def turns() -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0)


async def known_commits() -> Side:
    """Returns a broker that has seen enough commits to use the fast path, and has committed offset 3."""
    side = Side(await Harness(file_system=None, **SETTINGS).open(), has_fast_paths=True)
    for offset in (1, 2, 3):
        side.paths["a"].receive(simple_commit(offset))
        await turns()
    side.paths["b"].receive(simple_fetch())
    await turns()
    for client in CLIENTS:
        assert side.answers(client)
    return side


def fetched_offset(data: bytes) -> int:
    (frame,) = FrameReader(1 << 20).feed(data)
    start = decode_response_header(frame, ApiKey.OFFSET_FETCH, 9)[1]
    return OffsetFetchResponse.decode(frame[start:], 9).groups[0].topics[0].partitions[0].committed_offset


async def test_a_fetch_of_offsets_that_are_not_durable_waits_for_them() -> None:
    side = await known_commits()
    side.paths["a"].receive(simple_commit(4))
    side.paths["b"].receive(simple_fetch())
    # The event loop had no turn since the commit, so the record is not written.
    assert side.answers("a") == side.answers("b") == b""
    await turns()
    assert side.answers("a")
    assert fetched_offset(side.answers("b")) == 4


async def test_a_commit_whose_shard_fails_is_not_acknowledged() -> None:
    side = await known_commits()
    side.paths["a"].receive(simple_commit(4))
    side.harness.runtime.fail_shard(side.harness.groups.shard_of("simple"), "a test")
    await turns()
    (frame,) = FrameReader(1 << 20).feed(side.answers("a"))
    start = decode_response_header(frame, ApiKey.OFFSET_COMMIT, 9)[1]
    answer = OffsetCommitResponse.decode(frame[start:], 9)
    assert [partition.error_code for partition in answer.topics[0].partitions] == [Errors.NOT_COORDINATOR]
    side.reload("simple")
    await turns()
    side.paths["b"].receive(simple_fetch())
    await turns()
    assert fetched_offset(side.answers("b")) == 3


async def test_a_commit_that_the_fast_path_cannot_write_is_not_counted_by_it() -> None:
    harness = Harness(file_system=None, **SETTINGS)
    harness.runtime._max_batch_bytes = 250  # one record fits, three do not
    side = Side(await harness.open(), has_fast_paths=True)
    topic = OffsetCommitRequest.OffsetCommitRequestTopic(
        name="t3",
        partitions=[
            OffsetCommitRequest.OffsetCommitRequestPartition(partition_index=index, committed_offset=1)
            for index in range(3)
        ],
    )
    large = OffsetCommitRequest(group_id="simple", topics=[topic]).encode(9)
    for frame in (simple_commit(1), simple_commit(2), encode_request(ApiKey.OFFSET_COMMIT, 9, 3, "a", large)):
        side.paths["a"].receive(frame)
        await turns()
    assert harness.groups.counters.offset_commits == 2
    side.paths["a"].receive(simple_commit(4))
    await turns()
    assert harness.groups.counters.offset_commits == 3
