# SPDX-License-Identifier: Apache-2.0
"""The operations of a test broker, observed by a real client."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import pytest

from kcoord.client import AdminClient, Consumer, KafkaError, NewTopic, OffsetSpec, Producer, TopicPartition
from kcoord.client.api_versions import Kip1327Revision
from kcoord.config import ConfigError
from kcoord.testing import ControlError, KcoordBroker, Mode, Record, start_broker
from kcoord.testing.pool import BrokerPool
from kcoord.testing.security import BrokerSecurity

DAY_SECONDS = 86_400
ASSIGNOR = """
from kcoord.assignors import ServerAssignor

class Last(ServerAssignor):
    name = "last"

    def assign(self, members, topics):
        last = max(members, key=lambda member_id: members[member_id].instance_id)
        return {last: {name: range(topic.partition_count) for name, topic in topics.items()}}
"""


@asynccontextmanager
async def consuming(broker: KcoordBroker, group: str, topic: str, **options: str) -> AsyncIterator[Consumer]:
    """Yields a subscribed consumer that is polled in the background."""
    async with Consumer(
        bootstrap_servers=broker.bootstrap_servers,
        group_id=group,
        auto_offset_reset="earliest",
        client_id=options.get("client_id", "member"),
        group_instance_id=options.get("group_instance_id"),
        group_remote_assignor=options.get("group_remote_assignor"),
        retry_backoff_ms=20,
    ) as consumer:
        consumer.subscribe([topic])

        async def poll() -> None:
            while True:
                await consumer.poll(20)

        polling = asyncio.create_task(poll())
        try:
            yield consumer
        finally:
            polling.cancel()
            await asyncio.gather(polling, return_exceptions=True)


def test_topics_and_records(broker: KcoordBroker) -> None:
    broker.create_topic("t", 2, {"retention.ms": "-1"})
    places = broker.produce(
        "t", [Record("a", partition=0), Record(b"\xff", b"k", 0, 5, {"h": "x"}), Record(None, "k", 1)]
    )
    assert places == [(0, 0), (0, 1), (1, 0)]
    stored = broker.records("t")
    assert [(record.partition, record.offset, record.key, record.value) for record in stored] == [
        (0, 0, None, b"a"),
        (0, 1, b"k", b"\xff"),
        (1, 0, b"k", None),
    ]
    assert (stored[1].timestamp_ms, stored[1].headers) == (5, {"h": b"x"})
    broker.add_partitions("t", 3)
    assert broker.produce("t", [Record("b", partition=2)]) == [(2, 0)]
    broker.delete_topic("t")
    with pytest.raises(ControlError, match="UNKNOWN_TOPIC_OR_PARTITION"):
        broker.records("t")


def test_a_record_for_a_partition_that_does_not_exist(broker: KcoordBroker) -> None:
    broker.create_topic("t", 1)
    with pytest.raises(ControlError, match="timed out after 2000 ms: UNKNOWN_TOPIC_OR_PARTITION: t-1"):
        broker.produce("t", [Record("x", partition=1)])


def test_settings_in_the_environment_have_no_effect(mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KCOORD_NUM_PARTITIONS", "7")
    with start_broker(mode=mode) as broker:
        broker.create_topic("t", -1)
        with pytest.raises(ControlError, match="UNKNOWN_TOPIC_OR_PARTITION"):
            broker.commit("g", {"t": {1: 0}})


async def test_waiting_for_a_group(broker: KcoordBroker) -> None:
    broker.create_topic("t", 2)
    assert str(broker.group("g/1")) == "group g/1 is Dead, or does not exist"
    async with consuming(broker, "g/1", "t", group_instance_id="i"):
        group = await asyncio.to_thread(broker.wait_for_group, "g/1", state="Stable", members=1)
        assert group.members[0].assignment == group.members[0].target_assignment == {"t": [0, 1]}
        assert (group.type, group.members[0].instance_id, group.epoch) == ("Consumer", "i", group.target_epoch)
        assert group.creation_time_ms is not None
        with pytest.raises(TimeoutError, match="waited 50 ms for state Empty and 2 members, but group g/1 is Stable"):
            await asyncio.to_thread(broker.wait_for_group, "g/1", state="Empty", members=2, timeout=0.05)


async def test_an_error_by_group_and_epoch(broker: KcoordBroker) -> None:
    """A fenced member joins again. The other group is not affected."""
    broker.create_topic("t", 1)
    async with consuming(broker, "g", "t"), consuming(broker, "other", "t"):
        group = await asyncio.to_thread(broker.wait_for_group, "g", state="Stable", members=1)
        fault = broker.inject_fault(
            "ConsumerGroupHeartbeat", group="g", epoch=group.epoch, error="FENCED_MEMBER_EPOCH", message="by a test"
        )
        await asyncio.to_thread(fault.wait)
        member_id = group.members[0].member_id
        for _ in range(500):
            if broker.requests("ConsumerGroupHeartbeat", member=member_id, epoch=0)[1:]:
                break
            await asyncio.sleep(0.02)
        else:
            pytest.fail("the member did not join again")
        assert fault.hits == 1
        assert [request.fault for request in broker.requests(group="other")].count(fault.number) == 0
        hit = [request for request in broker.requests(group="g") if request.fault == fault.number]
        assert [(request.api, request.epochs, request.members) for request in hit] == [
            ("ConsumerGroupHeartbeat", [group.epoch], [member_id])
        ]
        assert hit[0].body["groupId"] == "g"


async def test_a_lost_response(broker: KcoordBroker) -> None:
    """The broker commits, but the client gets no response and retries."""
    broker.create_topic("t", 1)
    partition = TopicPartition("t", 0)
    with broker.inject_fault("OffsetCommit", close=True, after_handling=True) as fault:
        async with Consumer(
            bootstrap_servers=broker.bootstrap_servers, group_id="g", enable_auto_commit=False
        ) as consumer:
            consumer.assign([partition])
            await consumer.commit({partition: 7})
        assert fault.hits == 1
    assert len(broker.requests("OffsetCommit")) == 2
    assert broker.committed("g") == {"t": {0: 7}}
    with pytest.raises(ControlError, match="there is no fault"):
        fault.remove()


async def test_a_lost_request(broker: KcoordBroker) -> None:
    broker.inject_fault("CreateTopics", close=True, times=None)
    async with AdminClient(bootstrap_servers=broker.bootstrap_servers) as admin:
        assert not await admin.list_topics()
        with pytest.raises(KafkaError):
            (await admin.create_topics([NewTopic("t", 1, 1)], timeout_ms=1500)).all()
    broker.clear_faults()
    assert broker.call("GET", "/faults") == []
    assert [request.api for request in broker.requests("CreateTopics")] != []
    with pytest.raises(ControlError):
        broker.records("t")


async def test_a_fault_that_is_removed_during_its_delay_does_not_hang(broker: KcoordBroker) -> None:
    with broker.inject_fault("DescribeCluster", drop=True, delay=0.2) as fault:
        async with AdminClient(bootstrap_servers=broker.bootstrap_servers, request_timeout_ms=20_000) as admin:
            began = time.monotonic()
            asking = asyncio.create_task(admin.describe_cluster())
            await asyncio.to_thread(fault.wait)
            await asyncio.to_thread(fault.remove)
            await asking
            assert time.monotonic() - began < 10


async def test_a_hanging_and_a_delayed_response(broker: KcoordBroker) -> None:
    broker.create_topic("t", 1)
    hang = broker.inject_fault("ListOffsets", drop=True)
    slow = broker.inject_fault("DescribeCluster", delay=0.2)
    async with AdminClient(bootstrap_servers=broker.bootstrap_servers, request_timeout_ms=500) as admin:
        began = time.monotonic()
        offsets = await admin.list_offsets({TopicPartition("t", 0): OffsetSpec.latest()})
        assert offsets[TopicPartition("t", 0)].offset == 0
        assert time.monotonic() - began >= 0.5
    async with AdminClient(bootstrap_servers=broker.bootstrap_servers) as admin:
        began = time.monotonic()
        await admin.describe_cluster()
        assert time.monotonic() - began >= 0.2
    assert (hang.hits, slow.hits) == (1, 1)


async def test_an_error_closes_the_connection_of_a_producer_with_acks_0(broker: KcoordBroker) -> None:
    broker.create_topic("t", 1)
    fault = broker.inject_fault("Produce", error="NOT_LEADER_OR_FOLLOWER")
    async with Producer(bootstrap_servers=broker.bootstrap_servers, acks=0, enable_idempotence=False) as producer:
        await producer.send_and_wait("t", "lost")
        await asyncio.to_thread(fault.wait)
        await producer.send_and_wait("t", "kept")
        await producer.flush()
    for _ in range(200):
        if broker.records("t"):
            break
        await asyncio.sleep(0.02)
    assert [record.value for record in broker.records("t")] == [b"kept"]


async def test_an_advanced_clock_expires_sessions_offsets_and_records(broker: KcoordBroker) -> None:
    broker.create_topic("t", 1, {"retention.ms": str(30 * DAY_SECONDS * 1000)})
    broker.produce("t", ["a"])
    before_ms = broker.now_ms
    async with consuming(broker, "g", "t") as consumer:
        await asyncio.to_thread(broker.wait_for_group, "g", state="Stable", members=1)
        while not consumer.assignment:  # the response may still be in flight
            await asyncio.sleep(0.01)
        await consumer.commit({TopicPartition("t", 0): 1})
        heartbeats = broker.inject_fault("ConsumerGroupHeartbeat", group="g", drop=True, times=None)
        await asyncio.to_thread(heartbeats.wait)
        assert await asyncio.to_thread(broker.advance_clock, 44) >= before_ms + 44_000
        assert len(broker.group("g").members) == 1
        await asyncio.to_thread(broker.advance_clock, 2)
        assert (broker.group("g").state, broker.group("g").members) == ("Empty", [])
        # The offset of the empty group is kept for its retention.
        await asyncio.to_thread(broker.advance_clock, 6.9 * DAY_SECONDS)
        assert broker.committed("g") == {"t": {0: 1}}
        await asyncio.to_thread(broker.advance_clock, 0.2 * DAY_SECONDS)
        assert broker.committed("g") == {}
        assert broker.group("g").state == "Dead"
        assert len(broker.records("t")) == 1
        await asyncio.to_thread(broker.advance_clock, 24 * DAY_SECONDS)
        assert broker.records("t") == []
        await asyncio.to_thread(broker.clear_faults)


async def test_the_session_of_a_single_member_can_be_expired(broker: KcoordBroker) -> None:
    broker.create_topic("t", 2)
    async with consuming(broker, "g", "t", client_id="a"), consuming(broker, "g", "t", client_id="b"):
        group = await asyncio.to_thread(broker.wait_for_group, "g", state="Stable", members=2)
        fault = broker.inject_fault("ConsumerGroupHeartbeat", client_id="a", drop=True, times=None)
        await asyncio.to_thread(fault.wait)
        await asyncio.to_thread(broker.expire_session, "g", "a")
        left = await asyncio.to_thread(broker.wait_for_group, "g", state="Stable", members=1)
        assert [member.client_id for member in left.members] == ["b"]
        assert left.members[0].assignment == {"t": [0, 1]}
        assert left.epoch is not None and group.epoch is not None and left.epoch > group.epoch
        with pytest.raises(ControlError, match="has no single member c"):
            broker.expire_session("g", "c")
        await asyncio.to_thread(fault.remove)
        await asyncio.to_thread(broker.wait_for_group, "g", state="Stable", members=2)


async def test_a_test_can_set_the_target_assignment(broker: KcoordBroker) -> None:
    broker.create_topic("t", 4)
    async with consuming(broker, "g", "t", client_id="a"), consuming(broker, "g", "t", client_id="b"):
        before = await asyncio.to_thread(broker.wait_for_group, "g", state="Stable", members=2)
        epoch = await asyncio.to_thread(broker.override_target_assignment, "g", {"a": {"t": [0, 1, 2]}})
        assert before.epoch is not None and epoch == before.epoch + 1
        after = await asyncio.to_thread(broker.wait_for_group, "g", state="Stable", members=2)
        owned = {member.client_id: member.assignment for member in after.members}
        kept = {member.client_id: member.assignment for member in before.members}["b"]["t"]
        assert owned["a"] == {"t": [0, 1, 2]}
        assert owned["b"] == ({"t": [3]} if 3 in kept else {})
        assert after.creation_time_ms == before.creation_time_ms
        for members, text in (
            ({"x": {"t": [0]}}, "no single member x"),
            ({"a": {"u": [0]}}, "there is no topic u"),
            ({"a": {"t": [4]}}, "has no partition 4"),
            ({"a": {"t": [0]}, "b": {"t": [0]}}, "partition 0 of a topic is assigned to"),
        ):
            with pytest.raises(ControlError, match=text):
                broker.override_target_assignment("g", members)
    with pytest.raises(ControlError, match="there is no consumer group h"):
        broker.override_target_assignment("h", {"a": {"t": [0]}})


async def test_a_restart_keeps_everything(broker: KcoordBroker) -> None:
    broker.create_topic("t", 1)
    broker.produce("t", ["a"])
    broker.commit("g", {"t": {0: 1}})
    broker.advance_clock(3600)
    before_ms, address = broker.now_ms, broker.bootstrap_servers
    async with AdminClient(bootstrap_servers=address) as admin:
        await admin.list_topics()
        await asyncio.to_thread(broker.restart)
        assert [topic.name for topic in await admin.list_topics()] == ["t"]
    assert broker.now_ms >= before_ms
    assert [record.value for record in broker.records("t")] == [b"a"]
    assert broker.committed("g") == {"t": {0: 1}}


def test_a_reset_deletes_everything_except_the_address(broker: KcoordBroker) -> None:
    broker.create_topic("t", 1)
    broker.inject_fault(drop=True, client_id="nobody")
    broker.advance_clock(DAY_SECONDS)
    address = broker.bootstrap_servers
    broker.reset({"num.partitions": "5"})
    assert broker.bootstrap_servers == address
    assert broker.now_ms < time.time() * 1000 + DAY_SECONDS * 500
    assert broker.call("GET", "/faults") == []
    with pytest.raises(ControlError):
        broker.records("t")
    broker.create_topic("u", -1)
    assert len(broker.produce("u", [Record("a", partition=4)])) == 1
    with pytest.raises(ControlError, match=r"unknown settings: no\.such"):
        broker.reset({"no.such": "1"})
    with pytest.raises(ControlError, match=r"num\.partitions"):
        broker.reset({"num.partitions": "many"})
    assert len(broker.records("u")) == 1, "a rejected reset changes nothing"


def test_a_reset_to_an_address_that_cannot_be_bound(broker: KcoordBroker) -> None:
    with pytest.raises(ControlError, match=r"^cannot listen on PLAINTEXT://192\.0\.2\.1:9092"):
        broker.reset({"listeners": "PLAINTEXT://192.0.2.1:9092"})
    broker.reset({"listeners": "PLAINTEXT://127.0.0.1:0"})
    broker.create_topic("t")


def test_brokers_of_a_pool_share_no_data(pool: BrokerPool, mode: Mode) -> None:
    ports = set()
    for number in range(3):
        broker = pool.take(mode, {"num.partitions": "2"} if number else {}, BrokerSecurity())
        broker.create_topic("t", -1)
        if number:
            broker.produce("t", [Record("a", partition=1)])
        assert len(broker.records("t")) == bool(number)
        ports.add(broker.port)
        pool.give_back(broker)
    assert len(ports) == 3


def test_a_test_may_stop_its_broker(mode: Mode, pool: BrokerPool) -> None:
    broker = pool.take(mode, {}, BrokerSecurity())
    broker.stop()
    pool.give_back(broker)
    other = pool.take(mode, {}, BrokerSecurity())
    assert other is not broker
    other.create_topic("t")
    pool.give_back(other)
    with start_broker(mode=mode) as alone:
        alone.stop()
        with pytest.raises(ControlError, match="the broker was stopped"):
            alone.create_topic("t")


def test_a_broker_process_does_not_outlive_a_killed_test_run() -> None:
    script = "from kcoord.testing import start_broker; print(start_broker(mode='process').port, flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as run:
        assert run.stdout is not None
        port = int(run.stdout.readline())
        socket.create_connection(("127.0.0.1", port)).close()
        run.kill()
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
            except ConnectionRefusedError:
                return
            time.sleep(0.05)
    pytest.fail("the broker still runs")


def test_settings_are_checked_before_anything_starts(mode: Mode) -> None:
    with pytest.raises(ConfigError, match=r"unknown settings: num\.partition$"):
        start_broker({"num.partition": "3"}, mode)
    with pytest.raises((ConfigError, ControlError), match=r"num\.partitions"):
        start_broker({"num.partitions": "x"}, mode)
    with pytest.raises(ValueError, match="mode must be in-process or process, not 'thread'"):
        start_broker(mode="thread")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"group.coordinator.threads": "3"}, "it cannot have 3 workers"),
        ({"listeners": "SASL_SSL://127.0.0.1:0"}, "GSSAPI is not offered"),
    ],
)
def test_settings_that_a_test_broker_rejects(
    config: dict[str, str], named: str, broker: KcoordBroker, mode: Mode
) -> None:
    with pytest.raises(ConfigError, match=named):
        start_broker(config, mode)
    with pytest.raises(ControlError, match=named):
        broker.reset(config)
    broker.create_topic("still-there")


def test_an_address_in_use_is_an_error(broker: KcoordBroker, mode: Mode) -> None:
    with pytest.raises(Exception, match="cannot listen on"):
        start_broker({"listeners": f"PLAINTEXT://127.0.0.1:{broker.port}"}, mode)


async def test_each_client_is_served_its_form_of_kip_1327(broker: KcoordBroker) -> None:
    """An observed connection serves the same revision of KIP-1327, and error responses have its layout."""
    broker.create_topic("t", 1)
    for software, revision, knows in [("kcoord", "creation-time", True), ("dekaf", "new-partitions", False)]:
        async with Consumer(
            bootstrap_servers=broker.bootstrap_servers,
            group_id=software,
            client_software_name=software,
            kip_1327_revision=cast("Kip1327Revision", revision),
            retry_backoff_ms=20,
        ) as consumer:
            consumer.subscribe(["t"])
            broker.inject_fault(api="ConsumerGroupHeartbeat", group=software, error="COORDINATOR_LOAD_IN_PROGRESS")
            async with asyncio.timeout(60):
                while not consumer.assignment:
                    await consumer.poll(20)
            assert (consumer.group_creation_time_ms is not None) == knows
        versions = {request.version for request in broker.requests("ConsumerGroupHeartbeat", group=software)}
        assert versions == {2}
        highest = {request.version for request in broker.requests("Metadata")}
        assert max(highest) == (14 if knows else 13)
        broker.clear_requests()


@pytest.mark.parametrize("mode", ["in-process", "process"])
async def test_an_assignor_of_the_test_assigns_partitions(
    mode: Mode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "assignor_of_test_broker.py").write_text(ASSIGNOR)
    monkeypatch.syspath_prepend(tmp_path)
    settings = {"group.consumer.assignors": "uniform,assignor_of_test_broker:Last"}
    broker = await asyncio.to_thread(start_broker, settings, mode)
    try:
        # A class that cannot be loaded leaves the broker as it is.
        with pytest.raises(ControlError, match="No module named 'assignor_of_nobody'"):
            await asyncio.to_thread(broker.reset, {"group.consumer.assignors": "assignor_of_nobody:Last"})
        await asyncio.to_thread(broker.create_topic, "t", 4)
        async with (
            consuming(broker, "g", "t", group_instance_id="a", group_remote_assignor="last"),
            consuming(broker, "g", "t", group_instance_id="b", group_remote_assignor="last"),
        ):
            group = await asyncio.to_thread(broker.wait_for_group, "g", state="Stable", members=2)
            assert {member.instance_id: member.assignment for member in group.members} == {
                "a": {},
                "b": {"t": [0, 1, 2, 3]},
            }
    finally:
        await asyncio.to_thread(broker.stop)
