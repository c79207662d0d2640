# SPDX-License-Identifier: Apache-2.0
"""The pauses of the event loop while a broker does large things, under a steady load of heartbeats (`bench.heart`).

Each row has the longest pause (`any`), the part of a pause in which the event loop's own thread computed (`own`), the
longest collection of the garbage collector, and the latency of the heartbeats. Requests that change nothing are
repeated for ROW_SECONDS; other work is done once, and the row lasts at least that long.

Other processes on the machine lengthen `any` and the latencies, and `own` hardly: run it with `chrt -f 20`.
`BENCH_PAUSES` names the stages to run, separated by blanks.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from struct import Struct
from types import TracebackType
from typing import Final, NamedTuple

from bench import recovery
from bench.data import Batch
from bench.heart import Heart
from bench.memory import free_port
from bench.report import Report
from bench.requests import create_topics
from bench.wire import Broker, Connection
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors
from kcoord_protocol.framing import decode_response_header, encode_request
from kcoord_protocol.messages import (
    ConsumerGroupDescribeRequest,
    ConsumerGroupDescribeResponse,
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
    DeleteGroupsRequest,
    DeleteGroupsResponse,
    DeleteTopicsRequest,
    DeleteTopicsResponse,
    DescribeGroupsRequest,
    DescribeGroupsResponse,
    JoinGroupRequest,
    JoinGroupResponse,
    ListGroupsRequest,
    ListGroupsResponse,
    ListOffsetsRequest,
    ListOffsetsResponse,
    MetadataRequest,
    MetadataResponse,
    OffsetCommitRequest,
    SyncGroupRequest,
)
from kcoord_protocol.record_batch import Record, encode_batch

ROW_SECONDS: Final = 3.0
REST_SECONDS: Final = 1.0
QUIET_CORES: Final = 0.3
"""The heartbeats use 0.03 to 0.15 cores."""
MEMBERS: Final = 10_000
IN_FLIGHT: Final = 50
SEND_SECONDS: Final = 0.005
"""The rest after IN_FLIGHT requests of classic members. 10,000 requests that arrive at once are a turn of 200 ms."""
GROUPS: Final = 100_000
DELETED_GROUPS: Final = 1_000
CONNECTIONS: Final = 20_000
CONNECTION_SECONDS: Final = 60.0
PRODUCED_MB: Final = 64
LARGE_SEGMENT_BYTES: Final = 128 << 20
LARGE_PRODUCED_MB: Final = 1_000
PARTITIONS: Final = 100_000
FOLDER_SECONDS: Final = 300.0
BATCHES: Final = 2_000_000
SAME_BATCHES: Final = 2_000
"""The number of batches with one timestamp."""
OFFSET: Final = Struct(">q")
JOIN_SECONDS: Final = 60.0
WATCH_SECONDS: Final = 60.0
SETTINGS: Final = (
    *("kcoord.log.flush.policy=os", "group.initial.rebalance.delay.ms=3000", "log.segment.bytes=1048576"),
    *("group.consumer.session.timeout.ms=60000", "group.consumer.heartbeat.interval.ms=15000"),
    *("group.consumer.max.size=100000", "group.max.session.timeout.ms=1800000", "offsets.topic.segment.bytes=1048576"),
)


class Pauses(NamedTuple):
    """The longest pauses, and the longest collection of the garbage collector."""

    own_ms: float
    any_ms: float
    collection_ms: float


class Stage:
    """A broker with the load of heartbeats. `row` measures one thing that it does."""

    def __init__(self, report: Report, folder: Path, *settings: str) -> None:
        self._table = report.table(
            "pauses of the event loop",
            *("while", "s", "broker CPU s", "own pause ms", "any pause ms", "collection ms"),
            *("heartbeats p99 ms", "longest ms"),
        )
        self._watch = folder.with_suffix(".pauses")
        port = f"kcoord.metrics.port={free_port()}"
        self.broker = Broker(folder, port, *SETTINGS, *settings, watch=self._watch)
        self.connection = Connection(self.broker.port)
        self.connection.find_coordinator("g")
        self._heart = Heart(self.broker.port)

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._heart.close()
        self.connection.close()
        self.broker.end(signal.SIGTERM)
        self._watch.unlink(missing_ok=True)

    def row(self, what: str, work: Callable[[], object], *, repeat: bool = False) -> None:
        # The kernel stops a process of real-time priority for 50 ms after 950 ms of work in a second.
        self.broker.settle(QUIET_CORES)
        time.sleep(REST_SECONDS)
        self.pauses()
        self._heart.take()
        cpu, began, count = self.broker.cpu_seconds(), time.perf_counter(), 0
        with at_normal_priority():
            while not count or (repeat and time.perf_counter() - began < ROW_SECONDS):
                work()
                count += 1
        took = (time.perf_counter() - began) / count
        cpu = (self.broker.cpu_seconds() - cpu) / count
        time.sleep(max(ROW_SECONDS - (time.perf_counter() - began), 0))
        pauses, beats = self.pauses(), self._heart.take()
        self._table.row(what, took, cpu, *pauses, *beats)

    def pauses(self) -> Pauses:
        """Returns the longest pauses since the last call."""
        return pauses_of(self.broker, self._watch)

    def heartbeat(self, request: ConsumerGroupHeartbeatRequest) -> ConsumerGroupHeartbeatResponse:
        answer = self.connection.call(ApiKey.CONSUMER_GROUP_HEARTBEAT, 1, request, ConsumerGroupHeartbeatResponse)
        assert answer.error_code == 0, answer
        return answer

    def pipeline(self, key: ApiKey, version: int, bodies: Iterable[bytes]) -> None:
        """Sends requests, IN_FLIGHT at a time, and drops the responses."""
        frames: list[bytes] = []
        for body in bodies:
            frames.append(encode_request(key, version, 0, "bench", body))
            if len(frames) == IN_FLIGHT:
                self._volley(frames)
                frames = []
        self._volley(frames)

    def _volley(self, frames: list[bytes]) -> None:
        self.connection.send(b"".join(frames))
        self.connection.skip(len(frames))


@contextmanager
def at_normal_priority() -> Iterator[None]:
    """Ends a real-time priority of this process meanwhile: reading a large response would delay the heartbeats."""
    policy, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    if policy != os.SCHED_OTHER:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    try:
        yield
    finally:
        if policy != os.SCHED_OTHER:
            os.sched_setscheduler(0, policy, parameters)


def pauses_of(broker: Broker, watch: Path) -> Pauses:
    watch.unlink(missing_ok=True)
    os.kill(broker.pid, signal.SIGUSR1)
    deadline = time.monotonic() + WATCH_SECONDS
    while not watch.exists():
        assert time.monotonic() < deadline, "the broker does not report its pauses"
        time.sleep(0.005)
    content = json.loads(watch.read_text())
    return Pauses(content["own"], content["any"], max(content["collections"]))


def main(report: Report) -> None:
    chosen = os.environ.get("BENCH_PAUSES", " ".join(STAGES)).split()
    for name in chosen:
        with tempfile.TemporaryDirectory() as folder:
            STAGES[name](report, Path(folder) / "data")


def members(report: Report, folder: Path) -> None:
    """Large groups: 10,000 members, 100,000 partitions."""
    with Stage(report, folder) as stage:
        stage.row("nothing else", lambda: None)
        topics = [f"topic-{number}" for number in range(10)]
        stage.row("CreateTopics with 10,000 partitions", lambda: create_topics(stage.connection, {topics[0]: 10_000}))
        for name in topics[1:]:
            create_topics(stage.connection, {name: 10_000})
        stage.row("a first join gets 100,000 partitions", lambda: _first_join(stage, "lone", topics))
        stage.row("10,000 members join", lambda: _join_all(stage, "large", topics))
        request = ConsumerGroupDescribeRequest(group_ids=["large"])

        def describe() -> None:
            answer = stage.connection.call(ApiKey.CONSUMER_GROUP_DESCRIBE, 1, request, ConsumerGroupDescribeResponse)
            assert len(answer.groups[0].members) == MEMBERS

        stage.row("ConsumerGroupDescribe, 10,000 members", describe, repeat=True)
        stage.row("DeleteTopics with 10,000 partitions", lambda: _delete_topic(stage, topics[-1]))


def classic(report: Report, folder: Path) -> None:
    """A classic group of 10,000 members."""
    with Stage(report, folder) as stage:
        connections = [Connection(stage.broker.port) for _ in range(MEMBERS // IN_FLIGHT)]
        joined: list[JoinGroupResponse] = []
        stage.row("10,000 classic members join", lambda: joined.extend(_join_classic(connections)))
        stage.row("10,000 classic members sync", lambda: _sync_classic(connections, joined))
        for connection in connections:
            connection.close()
        request = DescribeGroupsRequest(groups=["classic"])

        def describe() -> None:
            answer = stage.connection.call(ApiKey.DESCRIBE_GROUPS, 5, request, DescribeGroupsResponse)
            assert len(answer.groups[0].members) == MEMBERS

        stage.row("DescribeGroups, 10,000 members", describe, repeat=True)


def groups(report: Report, folder: Path) -> None:
    """100,000 groups with 1,000,000 offsets, and logs that roll."""
    with Stage(report, folder) as stage:
        create_topics(stage.connection, {"events": 10, "rolling": 6})
        stage.row("1,000,000 commits, logs that roll", lambda: _commit_all(stage))
        stage.row("ListGroups, 100,000 groups", lambda: _list_groups(stage), repeat=True)
        stage.row("DeleteGroups, 1,000 groups", lambda: _delete_groups(stage))
        stage.row(f"Produce {PRODUCED_MB} MB, logs that roll", lambda: _produce(stage, PRODUCED_MB))
        stage.row("20,000 connections in a minute", lambda: _connect(stage.broker.port))


def rolls(report: Report, folder: Path) -> None:
    """Logs with large segments, whose bytes are in the page cache when the next segment begins."""
    with Stage(report, folder, f"log.segment.bytes={LARGE_SEGMENT_BYTES}") as stage:
        create_topics(stage.connection, {"rolling": 6})
        stage.row(f"Produce {LARGE_PRODUCED_MB} MB, segments of 128 MiB", lambda: _produce(stage, LARGE_PRODUCED_MB))


def shard(report: Report, folder: Path) -> None:
    """100,000 groups in one shard."""
    with Stage(report, folder, "offsets.topic.num.partitions=1", "kcoord.partition.max.groups=100000") as stage:
        create_topics(stage.connection, {"events": 1})
        _commit_all(stage, partitions=1)
        stage.row("ListGroups, 100,000 groups in one shard", lambda: _list_groups(stage), repeat=True)


def topics(report: Report, folder: Path) -> None:
    """10,000 topics of 10 partitions."""
    with Stage(report, folder) as stage:
        for start in range(0, 10_000, 1_000):
            create_topics(stage.connection, {f"topic-{number:05d}": 10 for number in range(start, start + 1_000)})
        changes = iter(range(1_000_000))

        def metadata(*, is_changed: bool) -> None:
            if is_changed:
                create_topics(stage.connection, {f"new-{next(changes)}": 1})
            answer = stage.connection.call(ApiKey.METADATA, 13, MetadataRequest(topics=None), MetadataResponse)
            assert len(answer.topics) >= 10_000

        metadata(is_changed=True)  # The encoder is made on first use.
        stage.row("Metadata, 10,000 topics x 10", lambda: metadata(is_changed=True), repeat=True)
        stage.row("Metadata, 10,000 topics x 10, repeated", lambda: metadata(is_changed=False), repeat=True)


def regex(report: Report, folder: Path) -> None:
    """100,000 topics."""
    with Stage(report, folder) as stage:
        for start in range(0, 100_000, 5_000):
            create_topics(stage.connection, {f"topic-{number:05d}": 1 for number in range(start, start + 5_000)})
        stage.row("regex over 100,000 topics", lambda: _join_by_regex(stage))
        stage.row("CreateTopics with 1 partition", lambda: create_topics(stage.connection, {"topic-x99": 1}))


def logs(report: Report, folder: Path) -> None:
    """A log of 2,000,000 batches of one record, which an operator copied into the data folder."""
    with Broker(folder, *SETTINGS) as broker:
        connection = Connection(broker.port)
        create_topics(connection, {"large": 1})
        connection.close()
    with (folder / "large-0" / f"{0:020d}.log").open("wb") as file:
        for number in range(BATCHES // SAME_BATCHES):
            data = encode_batch([Record(None, b"x", timestamp_ms=number)])[OFFSET.size :]
            first = number * SAME_BATCHES
            file.writelines(OFFSET.pack(offset) + data for offset in range(first, first + SAME_BATCHES))
    with Stage(report, folder, "log.segment.bytes=1073741824", "log.retention.ms=-1") as stage:
        stage.row("first use of a log of 2,000,000 batches", lambda: _list_offsets(stage, 0))
        timestamp = BATCHES // SAME_BATCHES - 1
        stage.row("ListOffsets by timestamp", lambda: _list_offsets(stage, timestamp), repeat=True)


def start(report: Report, folder: Path) -> None:
    """A start with 100,000 partitions and 1,000,000 offsets."""
    started = report.table(
        "start with 100,000 partitions and 1,000,000 offsets",
        *("start after", "ready s", "all groups s", "broker CPU s", "own pause ms", "any pause ms", "collection ms"),
    )
    probes = recovery.fill(folder)
    with Broker(folder, *SETTINGS) as broker:
        connection = Connection(broker.port)
        for begin in range(0, 10_000, 1_000):
            create_topics(connection, {f"topic-{number:05d}": 10 for number in range(begin, begin + 1_000)})
        connection.close()
        # A start reads a file of each folder, so it takes longer if the broker before it has made all of them.
        deadline = time.monotonic() + FOLDER_SECONDS
        while len(os.listdir(folder)) < PARTITIONS:
            assert time.monotonic() < deadline, "the broker does not make the folders"
            time.sleep(1)
    for what, how in (("SIGTERM", signal.SIGKILL), ("kill -9", signal.SIGTERM)):
        watch = folder.with_suffix(".pauses")
        broker = Broker(folder, f"kcoord.metrics.port={free_port()}", *SETTINGS, watch=watch)
        ready = time.perf_counter() - broker.started
        _, last = recovery.served(broker, probes)
        started.row(what, ready, last, broker.cpu_seconds(), *pauses_of(broker, watch))
        broker.end(how)


def _first_join(stage: Stage, group_id: str, topics: list[str]) -> None:
    request = ConsumerGroupHeartbeatRequest(
        group_id=group_id,
        member_id="m",
        rebalance_timeout_ms=60_000,
        subscribed_topic_names=topics,
        topic_partitions=[],
    )
    answer = stage.heartbeat(request)
    assert answer.assignment is not None
    assert sum(len(topic.partitions) for topic in answer.assignment.topic_partitions) == 100_000


def _join_all(stage: Stage, group_id: str, topics: list[str]) -> None:
    def bodies() -> Iterable[bytes]:
        for number in range(MEMBERS):
            yield ConsumerGroupHeartbeatRequest(
                group_id=group_id,
                member_id=f"member-{number:05d}",
                rebalance_timeout_ms=60_000,
                subscribed_topic_names=topics,
                topic_partitions=[],
            ).encode(1)

    stage.pipeline(ApiKey.CONSUMER_GROUP_HEARTBEAT, 1, bodies())


def _join_classic(connections: list[Connection]) -> list[JoinGroupResponse]:
    """Sends IN_FLIGHT requests on each connection, one connection after the other, and waits for all responses."""
    protocol = JoinGroupRequest.JoinGroupRequestProtocol(name="range", metadata=bytes(60))
    join = JoinGroupRequest(
        group_id="classic",
        session_timeout_ms=600_000,
        rebalance_timeout_ms=600_000,
        protocol_type="consumer",
        protocols=[protocol],
    )
    frame = encode_request(ApiKey.JOIN_GROUP, 3, 0, "bench", join.encode(3))
    for connection in connections:
        connection.send(frame * IN_FLIGHT)
        time.sleep(SEND_SECONDS)
    joined = [
        JoinGroupResponse.decode(answer[decode_response_header(answer, ApiKey.JOIN_GROUP, 3)[1] :], 3)
        for connection in connections
        for answer in [connection.receive() for _ in range(IN_FLIGHT)]
    ]
    assert not any(answer.error_code for answer in joined)
    return joined


def _sync_classic(connections: list[Connection], joined: list[JoinGroupResponse]) -> None:
    """Sends the SyncGroup requests. They fail: the record of the generation is larger than a batch, as in Kafka."""
    assignments = [
        SyncGroupRequest.SyncGroupRequestAssignment(member_id=member.member_id, assignment=bytes(100))
        for answer in joined
        for member in answer.members
    ]
    assert len(assignments) == MEMBERS
    for number, answer in enumerate(joined):
        sync = SyncGroupRequest(
            group_id="classic",
            generation_id=answer.generation_id,
            member_id=answer.member_id,
            assignments=assignments if answer.members else [],
        )
        connections[number // IN_FLIGHT].send(encode_request(ApiKey.SYNC_GROUP, 2, 0, "bench", sync.encode(2)))
        if number % IN_FLIGHT == 0:
            time.sleep(SEND_SECONDS)
    for connection in connections:
        connection.skip(IN_FLIGHT)


def _list_groups(stage: Stage) -> None:
    answer = stage.connection.call(ApiKey.LIST_GROUPS, 5, ListGroupsRequest(), ListGroupsResponse)
    assert len(answer.groups) >= GROUPS


def _commit_all(stage: Stage, partitions: int = 10) -> None:
    committed = [
        OffsetCommitRequest.OffsetCommitRequestPartition(partition_index=partition, committed_offset=1_000)
        for partition in range(partitions)
    ]
    topic = OffsetCommitRequest.OffsetCommitRequestTopic(name="events", partitions=committed)
    stage.pipeline(
        ApiKey.OFFSET_COMMIT,
        8,
        (
            OffsetCommitRequest(
                group_id=f"group-{number:06d}", generation_id_or_member_epoch=-1, topics=[topic]
            ).encode(8)
            for number in range(GROUPS)
        ),
    )


def _delete_groups(stage: Stage) -> None:
    request = DeleteGroupsRequest(groups_names=[f"group-{number:06d}" for number in range(DELETED_GROUPS)])
    answer = stage.connection.call(ApiKey.DELETE_GROUPS, 2, request, DeleteGroupsResponse)
    assert not any(result.error_code for result in answer.results)


def _delete_topic(stage: Stage, name: str) -> None:
    request = DeleteTopicsRequest(topic_names=[name], timeout_ms=60_000)
    answer = stage.connection.call(ApiKey.DELETE_TOPICS, 5, request, DeleteTopicsResponse)
    assert answer.responses[0].error_code == 0, answer


def _produce(stage: Stage, megabytes: int) -> None:
    batch = Batch(1_000)
    for number in range(megabytes * 1_000_000 // (6 * 16_000)):
        stage.connection.send(batch.request("rolling", number))
        stage.connection.skip(1)


def _list_offsets(stage: Stage, timestamp: int) -> None:
    """Asks for the first record with a timestamp, until the log is open."""
    partition = ListOffsetsRequest.ListOffsetsPartition(partition_index=0, timestamp=timestamp)
    topic = ListOffsetsRequest.ListOffsetsTopic(name="large", partitions=[partition])
    request = ListOffsetsRequest(replica_id=-1, topics=[topic])
    deadline = time.monotonic() + WATCH_SECONDS
    while True:
        answer = stage.connection.call(ApiKey.LIST_OFFSETS, 7, request, ListOffsetsResponse).topics[0].partitions[0]
        if not answer.error_code:
            assert answer.offset == timestamp * SAME_BATCHES
            return
        assert answer.error_code == Errors.NOT_LEADER_OR_FOLLOWER and time.monotonic() < deadline, answer
        time.sleep(0.1)


def _connect(port: int) -> None:
    frame = encode_request(ApiKey.METADATA, 13, 0, "bench", MetadataRequest(topics=[]).encode(13))
    began = time.perf_counter()
    for number in range(CONNECTIONS):
        connection = Connection(port)
        connection.send(frame)
        connection.skip(1)
        connection.close()
        time.sleep(max(began + number * CONNECTION_SECONDS / CONNECTIONS - time.perf_counter(), 0))


def _join_by_regex(stage: Stage) -> None:
    request = ConsumerGroupHeartbeatRequest(
        group_id="regex",
        member_id="m",
        rebalance_timeout_ms=60_000,
        subscribed_topic_regex="topic-.*99",
        topic_partitions=[],
    )
    deadline = time.monotonic() + JOIN_SECONDS
    while True:
        answer = stage.heartbeat(request)
        if answer.assignment is not None and len(answer.assignment.topic_partitions) >= 1_000:
            return
        assert time.monotonic() < deadline, answer
        time.sleep(0.2)
        request = ConsumerGroupHeartbeatRequest(
            group_id="regex", member_id="m", member_epoch=answer.member_epoch, rebalance_timeout_ms=-1
        )


STAGES: Final[dict[str, Callable[[Report, Path], None]]] = {
    "members": members,
    "classic": classic,
    "groups": groups,
    "rolls": rolls,
    "shard": shard,
    "topics": topics,
    "regex": regex,
    "logs": logs,
    "start": start,
}
