# SPDX-License-Identifier: Apache-2.0
"""Client-side assignors of a group with 10,000 members and 100,000 partitions.

The first table has the steps of a computation in the coordinator, and where they run. The second has the latency of
another group's heartbeats while a member of the large group fetches the group's state (PrepareAssignment) and installs
an assignment (InstallAssignment).
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from bench.memory import free_port, lag, summary
from bench.offload import QUIET_SECONDS, observed
from bench.report import Report, Table
from bench.requests import create_topics
from bench.wire import Broker, Connection
from kcoord.config import BrokerConfig
from kcoord.coordinator.group.consumer.assignment import computed_target, encode, install, member_specs
from kcoord.coordinator.group.consumer.client_assignors import Offer, OfferKind, select
from kcoord.coordinator.group.consumer.client_computation import InstallAssignment, PrepareAssignment, validated
from kcoord.coordinator.group.consumer.group import ConsumerGroup
from kcoord.coordinator.group.shard import GroupCoordinatorShard
from kcoord.metadata.image import ImageBuilder, MetadataImage
from kcoord.runtime.result import CoordinatorRecord, OperationContext
from kcoord.runtime.serde import CoordinatorSerde
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.framing import decode_response_header, encode_request
from kcoord_protocol.messages import (
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
    ConsumerGroupInstallAssignmentRequest,
    ConsumerGroupInstallAssignmentResponse,
    ConsumerGroupPrepareAssignmentRequest,
    ConsumerGroupPrepareAssignmentResponse,
    PartitionRecord,
    TopicRecord,
)

GROUP = "large"
MEMBERS = 10_000
TOPICS = 20
PARTITIONS_PER_TOPIC = 5_000
TOPIC_NAMES = [f"topic-{number:02d}" for number in range(TOPICS)]
IN_FLIGHT = 20
TOPICS_PER_REQUEST = 2
ROUNDS = 3
REPEATS = 5
NOW_MS = 1_000_000


def main(report: Report) -> None:
    steps(report)
    on_a_broker(report)


def steps(report: Report) -> None:
    table = report.table(
        f"{MEMBERS:,} members, {TOPICS * PARTITIONS_PER_TOPIC:,} partitions", "step", "runs in", "CPU ms"
    )
    same = Counter[Offer | None]({Offer(OfferKind.PRESENT, (("x", 0, 1, 1),)): MEMBERS})
    different = Counter[Offer | None](
        Offer(OfferKind.PRESENT, (("x", 0, number, 0), ("y", 0, number, 0))) for number in range(MEMBERS)
    )
    table.row("choose the assignor and who is able, equal offers", "event loop", cpu_ms(lambda: select(same)))
    table.row("the same, all offers differ", "event loop", cpu_ms(lambda: select(different)))
    shard, epoch = _joined_group()
    context = OperationContext(NOW_MS, 1)
    prepare = _prepare_request(epoch)
    table.row("PrepareAssignment: snapshot", "event loop", cpu_ms(lambda: shard.prepare_assignment(context, prepare)))
    work = shard.prepare_assignment(context, prepare).tasks[0].work
    assert isinstance(work, PrepareAssignment)
    table.row("PrepareAssignment: response", "thread", cpu_ms(lambda: work.run().encode(0)))
    for is_spread, what in ((False, "one topic for a member"), (True, "ten topics for a member")):
        request = _assignment(work.run(), epoch, is_spread=is_spread)
        _install_steps(table, shard, request, f"InstallAssignment, {what}")


def _joined_group() -> tuple[GroupCoordinatorShard, int]:
    """Returns a group whose first member is asked for the first target, and the epoch of this member."""
    image = ImageBuilder(MetadataImage.empty())
    for name in TOPIC_NAMES:
        topic_id = name.encode().rjust(16)
        image.replay(CoordinatorRecord(None, TopicRecord(name=name, topic_id=topic_id)))
        for partition in range(PARTITIONS_PER_TOPIC):
            record = PartitionRecord(partition_id=partition, topic_id=topic_id, replicas=[1], isr=[1], leader=1)
            image.replay(CoordinatorRecord(None, record))
    config = BrokerConfig.from_properties({"kcoord.client.assignors.enable": "true"})
    shard = GroupCoordinatorShard(config, image.build())
    context, epoch = OperationContext(NOW_MS, 1), 0
    for number in range(MEMBERS):
        result = shard.consumer_group_heartbeat(context, _joining(number))
        for made in result.records:
            shard.replay(made)
        if number == 0:
            assert result.response.should_compute_assignment
            epoch = result.response.member_epoch
    return shard, epoch


def _install_steps(
    table: Table, shard: GroupCoordinatorShard, request: ConsumerGroupInstallAssignmentRequest, what: str
) -> None:
    data = request.encode(0)
    table.row(
        f"{what}: decode {len(data) // 1000:,} kB",
        "thread",
        cpu_ms(lambda: ConsumerGroupInstallAssignmentRequest.decode(data, 0)),
    )
    context = OperationContext(NOW_MS)
    work, group = shard.install_assignment(context, request).tasks[0].work, shard.group(GROUP)
    assert isinstance(work, InstallAssignment) and isinstance(group, ConsumerGroup)
    specs = member_specs(work.snapshot)
    table.row(f"{what}: validate", "thread", cpu_ms(lambda: validated(work.snapshot, specs, request, work.max_bytes)))
    assigned, metadata = validated(work.snapshot, specs, request, work.max_bytes)
    computed = computed_target(work.snapshot, specs, assigned, metadata, request.member_id)

    def make_records() -> None:
        encode(
            computed_target(work.snapshot, specs, assigned, metadata, request.member_id), CoordinatorSerde().serialize
        )

    table.row(f"{what}: records", "thread", cpu_ms(make_records))
    encode(computed, CoordinatorSerde().serialize)

    def install_target() -> None:
        encoded = install(group, computed, NOW_MS).encoded
        assert encoded is not None
        encoded.replay()

    table.row(f"{what}: install", "event loop", cpu_ms(install_target))


def cpu_ms(work: Callable[[], object]) -> float:
    gc.collect()
    gc.disable()
    try:
        return min(_cpu_ms(work) for _ in range(REPEATS))
    finally:
        gc.enable()


def _cpu_ms(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return (time.process_time() - began) * 1000


def on_a_broker(report: Report) -> None:
    table = report.table(
        f"heartbeats of another group, {MEMBERS:,} members, {TOPICS * PARTITIONS_PER_TOPIC:,} partitions",
        *("while", "s", "broker CPU s", "p50 ms", "p99 ms", "longest ms"),
        *("own pauses p99 ms below", "p99.9 ms below", "longest ms "),
    )
    metrics = free_port()
    settings = (
        *("kcoord.log.flush.policy=os", f"kcoord.metrics.port={metrics}", "kcoord.client.assignors.enable=true"),
        # Only the first member sends heartbeats, and a busy machine may need minutes.
        *("group.consumer.max.session.timeout.ms=600000", "group.consumer.session.timeout.ms=600000"),
    )
    with tempfile.TemporaryDirectory() as folder, Broker(Path(folder), *settings) as broker:

        def observe(what: str, work: Callable[[], None]) -> None:
            before = lag(metrics)
            row = observed(broker, work)
            table.row(what, *row, *summary(lag(metrics), before)[1:])

        member = _Member(Connection(broker.port))
        observe("nothing else happens", lambda: time.sleep(QUIET_SECONDS))
        observe("all join", member.join_all)
        for round_number in range(ROUNDS):
            # One more join asks for one more target.
            member.join(MEMBERS + round_number)
            member.wait_until_asked()
            observe("PrepareAssignment", member.prepare)
            member.compute()
            observe("InstallAssignment", member.install)
        member.connection.close()


class _Member:
    """The first member, which computes for all. It sends the requests of the others, too."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        for start in range(0, TOPICS, TOPICS_PER_REQUEST):
            names = TOPIC_NAMES[start : start + TOPICS_PER_REQUEST]
            create_topics(connection, dict.fromkeys(names, PARTITIONS_PER_TOPIC))
        connection.find_coordinator(GROUP)
        self._epoch = 0
        self._answer = self._install = b""

    def join_all(self) -> None:
        for start in range(0, MEMBERS, IN_FLIGHT):
            requests = [(number, _joining(number)) for number in range(start, start + IN_FLIGHT)]
            key = ApiKey.CONSUMER_GROUP_HEARTBEAT
            frames = [encode_request(key, 1, number, "bench", request.encode(1)) for number, request in requests]
            self.connection.send(b"".join(frames))
            self.connection.skip(IN_FLIGHT)

    def join(self, number: int) -> ConsumerGroupHeartbeatResponse:
        return self._heartbeat(_joining(number))

    def wait_until_asked(self) -> None:
        """Sends heartbeats of the first member until it is asked. The assignment interval may still run."""
        answer = self.join(0) if self._epoch == 0 else self._heartbeat(self._staying())
        while not answer.should_compute_assignment:
            self._epoch = answer.member_epoch
            time.sleep(0.1)
            answer = self._heartbeat(self._staying())
        self._epoch = answer.member_epoch

    def _staying(self) -> ConsumerGroupHeartbeatRequest:
        return ConsumerGroupHeartbeatRequest(
            group_id=GROUP, member_id=_member_id(0), member_epoch=self._epoch, topic_partitions=[]
        )

    def _heartbeat(self, request: ConsumerGroupHeartbeatRequest) -> ConsumerGroupHeartbeatResponse:
        answer = self.connection.call(ApiKey.CONSUMER_GROUP_HEARTBEAT, 1, request, ConsumerGroupHeartbeatResponse)
        assert answer.error_code == 0, answer
        return answer

    # Messages are made and read before and after, since the thread of the observed heartbeats shares the GIL.

    def prepare(self) -> None:
        key = ApiKey.CONSUMER_GROUP_PREPARE_ASSIGNMENT
        self.connection.send(encode_request(key, 0, 0, "bench", _prepare_request(self._epoch).encode(0)))
        self._answer = self.connection.receive()

    def compute(self) -> None:
        key = ApiKey.CONSUMER_GROUP_PREPARE_ASSIGNMENT
        _, body = decode_response_header(self._answer, key, 0)
        state = ConsumerGroupPrepareAssignmentResponse.decode(self._answer[body:], 0)
        assert state.error_code == 0, state.error_message
        request = _assignment(state, self._epoch, is_spread=True)
        self._install = encode_request(ApiKey.CONSUMER_GROUP_INSTALL_ASSIGNMENT, 0, 0, "bench", request.encode(0))

    def install(self) -> None:
        self.connection.send(self._install)
        frame = self.connection.receive()
        _, body = decode_response_header(frame, ApiKey.CONSUMER_GROUP_INSTALL_ASSIGNMENT, 0)
        answer = ConsumerGroupInstallAssignmentResponse.decode(frame[body:], 0)
        assert answer.error_code == 0, answer


def _member_id(number: int) -> str:
    return f"member-{number:05d}"


def _joining(number: int) -> ConsumerGroupHeartbeatRequest:
    assignor = ConsumerGroupHeartbeatRequest.ClientAssignor(
        name="x", minimum_version=0, maximum_version=1, metadata_version=1
    )
    return ConsumerGroupHeartbeatRequest(
        group_id=GROUP,
        member_id=_member_id(number),
        rebalance_timeout_ms=600_000,
        subscribed_topic_names=TOPIC_NAMES,
        topic_partitions=[],
        client_assignors=[assignor],
    )


def _prepare_request(epoch: int) -> ConsumerGroupPrepareAssignmentRequest:
    return ConsumerGroupPrepareAssignmentRequest(group_id=GROUP, member_id=_member_id(0), member_epoch=epoch)


def _assignment(
    state: ConsumerGroupPrepareAssignmentResponse, epoch: int, *, is_spread: bool
) -> ConsumerGroupInstallAssignmentRequest:
    """Gives every member an equal number of partitions, of one topic or two, or spread over many topics."""
    request = ConsumerGroupInstallAssignmentRequest
    places = [(topic.topic_id, number) for topic in state.topics for number in range(topic.num_partitions)]
    count = len(state.members)
    share = -(-len(places) // count)
    installed = []
    for number, member in enumerate(state.members):
        claim: dict[bytes, list[int]] = {}
        for topic_id, partition in (
            places[number::count] if is_spread else places[number * share : (number + 1) * share]
        ):
            claim.setdefault(topic_id, []).append(partition)
        partitions = [request.TopicPartitions(topic_id=t, partitions=ps) for t, ps in claim.items()]
        installed.append(
            request.Member(member_id=member.member_id, partitions=partitions, metadata_version=1, metadata_bytes=b"m")
        )
    return request(
        group_id=GROUP,
        member_id=_member_id(0),
        member_epoch=epoch,
        group_epoch=state.group_epoch,
        members=installed,
    )
