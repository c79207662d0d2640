# SPDX-License-Identifier: Apache-2.0
"""Members of three client libraries, a producer and simple commits, which run while a test disturbs the broker.

Afterwards these invariants must hold: every acknowledged commit and record is there, every group exists, and each
partition had at most one owner at all times.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter

from kafka import KafkaConsumer
from kafka import TopicPartition as PythonTopicPartition
from kafka.consumer.fetcher import ConsumerRecord
from kafka.errors import KafkaConnectionError as PythonConnectionError
from kafka.errors import KafkaError as PythonKafkaError
from kafka.structs import OffsetAndMetadata

from kcoord.client import ClientException, Consumer, KafkaError, TopicPartition
from kcoord.runtime.serde import partition_for
from kcoord_protocol.errors import Errors
from kcoord_protocol.messages import (
    ConsumerGroupDescribeRequest,
    ConsumerGroupDescribeResponse,
    ListGroupsRequest,
    ListGroupsResponse,
)
from tests.integration.wire import ConnectionClosed, WireClient
from tests.soak.registers import Register
from tests.soak.streams import COMMIT_EVERY, GroupMember, Records
from tests.soak.worker import Worker
from tests.support.client_races import note_retry
from tests.support.confluent import committed, create_topic
from tests.support.kcoord_process import FAST, KcoordProcess
from tests.support.waiting import wait_until

TOPIC = "records"
PARTITIONS = 3
SESSION_MS = 1000
SETTINGS = {
    **FAST,
    "group.consumer.heartbeat.interval.ms": "200",
    "group.consumer.session.timeout.ms": str(SESSION_MS),
    "offsets.topic.num.partitions": "4",
}
END_SECONDS = 120.0
"""The longest time until the groups are stable again. Without a fault it takes seconds."""
LEAVE_SECONDS = 5.0
WATCH_SECONDS = 0.1
PRODUCE_PAUSE_SECONDS = 0.02
PYTHON_SESSION_MS = 3000
FORGOTTEN_SECONDS = 10.0
"""If the only member of a group has no partition for this long, it is replaced, once."""


class PythonMember(Worker):
    """A kafka-python member of a classic group. `delivered` and `committed` are as in `GroupMember`."""

    def __init__(self, address: str, group_id: str, topic: str) -> None:
        super().__init__()
        self.delivered: set[tuple[int, int]] = set()
        self.committed: dict[int, int] = {}
        self._address = address
        self._group_id = group_id
        self._topic = topic
        self._consumer = self._new_consumer()
        self._owned_at = time.monotonic()
        self._is_replaced = False

    def _new_consumer(self) -> KafkaConsumer:
        return KafkaConsumer(
            self._topic,
            bootstrap_servers=self._address.split(","),
            group_id=self._group_id,
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            session_timeout_ms=PYTHON_SESSION_MS,
            heartbeat_interval_ms=200,
            request_timeout_ms=5000,
            max_poll_interval_ms=5000,
            reconnect_backoff_max_ms=200,
        )

    def _run(self) -> None:
        while not self._ending.is_set():
            for records in self._poll():
                self.delivered |= {(record.partition, record.offset) for record in records}
                self._commit(records[-1].partition, records[-1].offset + 1)
            if self._consumer.assignment():
                self._owned_at = time.monotonic()
            elif time.monotonic() - self._owned_at > FORGOTTEN_SECONDS:
                self._replace_consumer()
        self._consumer.close()

    def _replace_consumer(self) -> None:
        """Replaces a consumer that forgot to rebalance (docs/conformance.md).

        If kafka-python subscribes during a refresh of its metadata, it leads its group without knowing the topic. It
        sometimes forgets to rebalance when the metadata arrives.
        """
        assert not self._is_replaced, "kafka-python has no partition, and a second consumer has none either"
        self._owned_at = time.monotonic()
        try:
            consumer = self._new_consumer()
        except PythonKafkaError:
            return  # No broker is up; the next call tries again.
        note_retry("kafka-python forgets to rebalance when it learns of a topic")
        self._is_replaced = True
        self._consumer.close()
        self._consumer = consumer

    def _poll(self) -> list[list[ConsumerRecord]]:
        try:
            return list(self._consumer.poll(timeout_ms=300).values())
        except PythonConnectionError:
            # This client sometimes raises if the broker is away, instead of retrying by itself.
            return []

    def _commit(self, partition: int, offset: int) -> None:
        place = PythonTopicPartition(self._topic, partition)
        try:
            self._consumer.commit({place: OffsetAndMetadata(offset, "", -1)})
        except PythonKafkaError:
            return
        self.committed[partition] = max(self.committed.get(partition, 0), offset)


class ClientMember(Worker):
    """A `kcoord.client` member of a KIP-848 group."""

    def __init__(self, address: str, group_id: str, topic: str) -> None:
        super().__init__()
        self.delivered: set[tuple[int, int]] = set()
        self.committed: dict[int, int] = {}
        self._address = address
        self._group_id = group_id
        self._topic = topic

    def _run(self) -> None:
        asyncio.run(self._consume())

    async def _consume(self) -> None:
        async with Consumer(
            bootstrap_servers=self._address.split(","),
            group_id=self._group_id,
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            default_api_timeout_ms=5000,
            request_timeout_ms=3000,
        ) as consumer:
            consumer.subscribe([self._topic])
            while not self._ending.is_set():
                try:
                    records = await consumer.poll(100)
                except KafkaError:
                    continue
                self.delivered |= {(record.partition, record.offset) for record in records}
                for record in records:
                    if not record.offset % COMMIT_EVERY:
                        await self._commit(consumer, record.partition, record.offset + 1)

    async def _commit(self, consumer: Consumer, partition: int, offset: int) -> None:
        try:
            await consumer.commit({TopicPartition(self._topic, partition): offset}, timeout_ms=3000)
        except (KafkaError, ClientException):
            return
        self.committed[partition] = max(self.committed.get(partition, 0), offset)


Member = GroupMember | PythonMember | ClientMember


class Watch(Worker):
    """Describes KIP-848 groups repeatedly and checks that no two members own the same partition."""

    def __init__(self, ports: list[int], group_ids: list[str]) -> None:
        super().__init__()
        self.looks = 0
        self._ports = ports
        self._group_ids = group_ids

    def _run(self) -> None:
        while not self._ending.wait(WATCH_SECONDS):
            for port in self._ports:
                try:
                    with WireClient(port, 2.0) as client:
                        self._look(client)
                except (OSError, ConnectionClosed):
                    continue

    def _look(self, client: WireClient) -> None:
        request = ConsumerGroupDescribeRequest(group_ids=self._group_ids)
        for group in client.call(request, 1, ConsumerGroupDescribeResponse).groups:
            if group.error_code:
                continue
            owners = Counter(
                (part.topic_name, partition)
                for member in group.members
                for part in member.assignment.topic_partitions
                for partition in part.partitions
            )
            assert not owners or max(owners.values()) == 1, f"{group.group_id}: two owners of a partition: {group}"
            self.looks += 1


class Crowd:
    """All workers of a soak test. They start when the context is entered, and end with `finish` or with the context."""

    def __init__(self, server: KcoordProcess, seed: int = 1) -> None:
        self._server = server
        self.address = ",".join(f"127.0.0.1:{port}" for port in server.ports)
        create_topic(self.address, TOPIC, PARTITIONS)
        self.records = Records(self.address, TOPIC, PARTITIONS, seed, PRODUCE_PAUSE_SECONDS)
        self.members: dict[str, list[Member]] = {
            "librdkafka": [GroupMember(self.address, "librdkafka", TOPIC) for _ in range(2)],
            "kafka-python": [PythonMember(self.address, "kafka-python", TOPIC)],
            "kcoord": [ClientMember(self.address, "kcoord", TOPIC) for _ in range(2)],
        }
        shard = partition_for("register", int(server.overrides["offsets.topic.num.partitions"]))
        self.register = Register(server.ports[shard % len(server.ports)], "register", TOPIC, PARTITIONS, seed)
        self.watch = Watch(server.ports, ["librdkafka", "kcoord"])

    def __enter__(self) -> Crowd:
        for worker in self._workers():
            worker.start()
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers():
            worker.end()
        for worker in self._workers():
            worker.join(LEAVE_SECONDS)

    def _workers(self) -> list[Worker]:
        members = (member for group in self.members.values() for member in group)
        return [self.records, *members, self.register, self.watch]

    def check(self) -> None:
        """Fails if a worker has failed, or if the broker has logged a traceback."""
        failures = [worker.failure for worker in self._workers() if worker.failure is not None]
        assert not failures, failures
        assert "Traceback" not in self._server.log, self._server.log

    def delivered(self, group_id: str) -> set[tuple[int, int]]:
        return set().union(*(member.delivered.copy() for member in self.members[group_id]))

    def promised(self, group_id: str) -> dict[int, int]:
        """Returns the highest acknowledged commit of each partition."""
        return {
            partition: max(member.committed.get(partition, 0) for member in self.members[group_id])
            for partition in range(PARTITIONS)
        }

    def wait_for_commits(self, seconds: float = END_SECONDS) -> None:
        """Waits until every group has committed a greater offset on every partition."""
        before = {group_id: self.promised(group_id) for group_id in self.members}
        done = self.register.done

        def have_committed() -> bool:
            self.check()
            return self.register.done > done and all(
                offset > before[group_id][partition]
                for group_id in self.members
                for partition, offset in self.promised(group_id).items()
            )

        try:
            wait_until(have_committed, "all groups commit", seconds)
        except AssertionError as error:
            now = {group_id: self.promised(group_id) for group_id in self.members}
            delivered = {group_id: dict(sorted(self.delivered(group_id))) for group_id in self.members}
            raise AssertionError(
                f"{error}: before {before}, now {now}, delivered until {delivered}, "
                f"{self.register.done - done} requests of the register"
            ) from None

    def finish(self) -> None:
        """Ends all workers and checks the invariants."""
        self.records.finish(END_SECONDS)
        assert self.records.refused == []
        sent = set(self.records.acknowledged.values())
        assert sent
        for group_id in self.members:
            wait_until(
                lambda group_id=group_id: not sent - self.delivered(group_id),  # type: ignore[misc]
                f"{group_id} has consumed everything",
                END_SECONDS,
            )
        for members in self.members.values():
            for member in members:
                member.finish(END_SECONDS)
        self.register.finish(END_SECONDS)
        self.watch.finish(END_SECONDS)
        assert self.watch.looks
        self.check()
        self._check_groups(sent)

    def _check_groups(self, sent: set[tuple[int, int]]) -> None:
        listed: set[str] = set()
        for port in self._server.ports:
            with WireClient(port) as client:
                answer = client.call(ListGroupsRequest(), 5, ListGroupsResponse)
                assert answer.error_code == Errors.NONE
                listed |= {group.group_id for group in answer.groups}
        assert listed >= set(self.members), "a group is missing"
        for group_id in self.members:
            stored = committed(self.address, group_id, [(TOPIC, partition) for partition in range(PARTITIONS)])
            for partition, offset in self.promised(group_id).items():
                end = max(record_offset for number, record_offset in sent if number == partition) + 1
                assert 0 < offset <= stored[TOPIC, partition] <= end, f"{group_id}, partition {partition}"


def rest(seconds: float) -> None:
    """Sleeps while a fault lasts. There is no condition to wait for, since members notice the fault at any time."""
    time.sleep(seconds)
