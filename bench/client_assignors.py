# SPDX-License-Identifier: Apache-2.0
"""Client-side assignors of a group with 10,000 members and 100,000 partitions.

The first table has the steps of the coordinator alone. The second has the latency of another group's heartbeats while a
member of the large group fetches the group's state (PrepareAssignment) and installs an assignment (InstallAssignment).
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
from bench.report import Report
from bench.requests import create_topics
from bench.wire import Broker, Connection
from kcoord.coordinator.group.assignor.check import checked_assignment
from kcoord.coordinator.group.assignor.spec import MemberSpec
from kcoord.coordinator.group.consumer.client_assignors import Offer, OfferKind, select
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.framing import encode_request
from kcoord_protocol.messages import (
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
    ConsumerGroupInstallAssignmentRequest,
    ConsumerGroupInstallAssignmentResponse,
    ConsumerGroupPrepareAssignmentRequest,
    ConsumerGroupPrepareAssignmentResponse,
)

GROUP = "large"
MEMBERS = 10_000
TOPICS = 20
PARTITIONS_PER_TOPIC = 5_000
IN_FLIGHT = 20
TOPICS_PER_REQUEST = 2
ROUNDS = 3
REPEATS = 5


def main(report: Report) -> None:
    steps(report)
    on_a_broker(report)


def steps(report: Report) -> None:
    """Measures what the coordinator decides and checks, in CPU milliseconds."""
    table = report.table(f"{MEMBERS:,} members, {TOPICS * PARTITIONS_PER_TOPIC:,} partitions", "step", "CPU ms")
    same = Counter[Offer | None]({Offer(OfferKind.PRESENT, (("x", 0, 1, 1),)): MEMBERS})
    different = Counter[Offer | None](
        Offer(OfferKind.PRESENT, (("x", 0, number, 0), ("y", 0, number, 0))) for number in range(MEMBERS)
    )
    table.row("choose the assignor and who is able, equal offers", cpu_ms(lambda: select(same)))
    table.row("the same, all offers differ", cpu_ms(lambda: select(different)))
    topics = [bytes([number]) * 16 for number in range(TOPICS)]
    counts = dict.fromkeys(topics, PARTITIONS_PER_TOPIC)
    members = {f"member-{number:05d}": MemberSpec(None, None, frozenset(topics)) for number in range(MEMBERS)}
    share = TOPICS * PARTITIONS_PER_TOPIC // MEMBERS
    places = [(topic, partition) for topic in topics for partition in range(PARTITIONS_PER_TOPIC)]
    proposed: dict[str, dict[bytes, list[int]]] = {}
    for number, member_id in enumerate(members):
        claim: dict[bytes, list[int]] = {}
        for topic, partition in places[number * share : (number + 1) * share]:
            claim.setdefault(topic, []).append(partition)
        proposed[member_id] = claim
    names = {topic: topic.hex() for topic in topics}
    table.row("check an assignment", cpu_ms(lambda: checked_assignment(proposed, members, counts, names)))


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
        *("group.consumer.session.timeout.ms=60000", "group.consumer.heartbeat.interval.ms=15000"),
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
        self._topics = [f"topic-{number:02d}" for number in range(TOPICS)]
        for start in range(0, TOPICS, TOPICS_PER_REQUEST):
            create_topics(
                connection, dict.fromkeys(self._topics[start : start + TOPICS_PER_REQUEST], PARTITIONS_PER_TOPIC)
            )
        connection.find_coordinator(GROUP)
        self._epoch = 0
        self._state = ConsumerGroupPrepareAssignmentResponse()
        self._assignment = ConsumerGroupInstallAssignmentRequest()

    def join_all(self) -> None:
        for start in range(0, MEMBERS, IN_FLIGHT):
            requests = [(number, self._joining(number)) for number in range(start, start + IN_FLIGHT)]
            key = ApiKey.CONSUMER_GROUP_HEARTBEAT
            frames = [encode_request(key, 1, number, "bench", request.encode(1)) for number, request in requests]
            self.connection.send(b"".join(frames))
            self.connection.skip(IN_FLIGHT)

    def join(self, number: int) -> ConsumerGroupHeartbeatResponse:
        answer = self.connection.call(
            ApiKey.CONSUMER_GROUP_HEARTBEAT, 1, self._joining(number), ConsumerGroupHeartbeatResponse
        )
        assert answer.error_code == 0, answer
        return answer

    def wait_until_asked(self) -> None:
        """Joins again as the first member until it is asked. The assignment interval may still run."""
        answer = self.join(0)
        while not answer.should_compute_assignment:
            time.sleep(0.1)
            answer = self.join(0)
        self._epoch = answer.member_epoch

    def prepare(self) -> None:
        request = ConsumerGroupPrepareAssignmentRequest(
            group_id=GROUP, member_id=_member_id(0), member_epoch=self._epoch
        )
        key = ApiKey.CONSUMER_GROUP_PREPARE_ASSIGNMENT
        self._state = self.connection.call(key, 0, request, ConsumerGroupPrepareAssignmentResponse)
        assert self._state.error_code == 0, self._state.error_message

    def compute(self) -> None:
        """Gives every member an equal number of consecutive partitions."""
        request = ConsumerGroupInstallAssignmentRequest
        members, topics = self._state.members, self._state.topics
        places = [(topic.topic_id, number) for topic in topics for number in range(topic.num_partitions)]
        installed = []
        for number, member in enumerate(members):
            claim: dict[bytes, list[int]] = {}
            for topic_id, partition in places[number :: len(members)]:
                claim.setdefault(topic_id, []).append(partition)
            partitions = [request.TopicPartitions(topic_id=t, partitions=ps) for t, ps in claim.items()]
            installed.append(
                request.Member(
                    member_id=member.member_id, partitions=partitions, metadata_version=1, metadata_bytes=b"m"
                )
            )
        self._assignment = request(
            group_id=GROUP,
            member_id=_member_id(0),
            member_epoch=self._epoch,
            group_epoch=self._state.group_epoch,
            members=installed,
        )

    def install(self) -> None:
        key = ApiKey.CONSUMER_GROUP_INSTALL_ASSIGNMENT
        answer = self.connection.call(key, 0, self._assignment, ConsumerGroupInstallAssignmentResponse)
        assert answer.error_code == 0, answer

    def _joining(self, number: int) -> ConsumerGroupHeartbeatRequest:
        assignor = ConsumerGroupHeartbeatRequest.ClientAssignor(
            name="x", minimum_version=0, maximum_version=1, metadata_version=1
        )
        return ConsumerGroupHeartbeatRequest(
            group_id=GROUP,
            member_id=_member_id(number),
            rebalance_timeout_ms=60_000,
            subscribed_topic_names=self._topics,
            topic_partitions=[],
            client_assignors=[assignor],
        )


def _member_id(number: int) -> str:
    return f"member-{number:05d}"
