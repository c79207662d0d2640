# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.fuzz.record` rewrites inputs/requests.txt: requests that real clients send, one per line.

A proxy in front of a broker records the frames, in hexadecimal and without their length. For each API, version and
client id a few small distinct frames are kept. In a small frame, a mutation more often hits a field that matters.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import tempfile
import threading
from collections import defaultdict
from functools import partial
from pathlib import Path

from aiokafka import AIOKafkaConsumer
from confluent_kafka import ConsumerGroupTopicPartitions, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient as ConfluentAdmin
from confluent_kafka.admin import ConfigResource, OffsetSpec, ResourceType  # type: ignore[attr-defined]

from kcoord.client import AdminClient, Consumer, LagAssignor, NewPartitions, NewTopic
from kcoord.client import Producer as OwnProducer
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.framing import FrameReader, decode_request_header
from kcoord_protocol.messages import ConsumerGroupHeartbeatRequest
from tests.support.confluent import PolledConsumer, create_topic, produce
from tests.support.kafka_python import KafkaPythonMember
from tests.support.kcoord_process import FAST, KcoordProcess
from tests.support.waiting import wait_until

CORPUS = Path(__file__).parent / "inputs" / "requests.txt"
MOST_BYTES = 1500
MOST_OF_A_KIND = 3
TOPIC = "orders"


class RecordingProxy:
    """Forwards bytes between clients and one broker, and records the clients' frames."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.broker_port = 0
        self.frames: list[bytes] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                broker = socket.create_connection(("127.0.0.1", self.broker_port))
                threading.Thread(target=self._pass, args=(client, broker, True), daemon=True).start()
                threading.Thread(target=self._pass, args=(broker, client, False), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, keep: bool) -> None:
        reader = FrameReader(1 << 26)
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if keep:
                    self.frames += reader.feed(data)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._listener.close()


def chosen(frames: list[bytes]) -> list[bytes]:
    """Returns the smallest distinct frames of each kind, in a stable order."""
    kinds: dict[tuple[int, int, str, bool], set[bytes]] = defaultdict(set)
    for frame in frames:
        header, position = decode_request_header(frame)
        key, version = header.request_api_key, header.request_api_version
        client = (header.client_id or "").split("-")[0]
        offers = False
        if key == ApiKey.CONSUMER_GROUP_HEARTBEAT:
            beat, _ = ConsumerGroupHeartbeatRequest.decode_prefix(frame, position, version)
            offers = bool(beat.client_assignors)
        kinds[key, version, client, offers].add(frame[:4] + bytes(4) + frame[8:])
    kept = []
    for kind in sorted(kinds):
        kept += sorted((frame for frame in kinds[kind] if len(frame) <= MOST_BYTES), key=len)[:MOST_OF_A_KIND]
    return kept


def librdkafka(address: str) -> None:
    create_topic(address, TOPIC, 3)
    produce(address, TOPIC, 3, 5)
    for classic in (None, "cooperative-sticky", "range"):
        group = f"confluent-{classic}"
        with PolledConsumer(address, group, [TOPIC], commit_each=True, classic=classic) as first_member:
            first_member.wait_for(15)
            with PolledConsumer(
                address, group, [f"^{TOPIC[:3]}.*"], instance_id="static", classic=classic
            ) as second_member:
                wait_until(partial(getattr, second_member, "assigned"), "the second member owns something")
    admin = ConfluentAdmin({"bootstrap.servers": address})
    admin.list_consumer_groups().result(10)
    for future in admin.describe_consumer_groups(["confluent-None", "confluent-range"]).values():
        future.result(10)
    admin.describe_configs([ConfigResource(ResourceType.TOPIC, TOPIC)])
    admin.describe_cluster().result(10)
    first = TopicPartition(TOPIC, 0)
    latest = OffsetSpec.latest()  # type: ignore[no-untyped-call]
    admin.list_offsets({first: latest})[first].result(10)
    (future,) = admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions("confluent-range")]).values()
    future.result(10)
    (future,) = admin.delete_records([TopicPartition(TOPIC, 0, 1)]).values()
    future.result(10)
    (future,) = admin.delete_consumer_groups(["confluent-range"]).values()
    with contextlib.suppress(KafkaException):  # a static member is still in it
        future.result(10)
    producer = Producer({"bootstrap.servers": address, "transactional.id": "tx", "compression.type": "zstd"})
    producer.init_transactions(20)
    for end in (producer.commit_transaction, producer.abort_transaction):
        producer.begin_transaction()
        producer.produce(TOPIC, b"value", b"key")
        end(20)


def python_clients(address: str) -> None:
    with KafkaPythonMember(address, "python", [TOPIC], instance_id="python-static") as member:
        wait_until(lambda: len(member.seen) > 3, "kafka-python reads")

    async def aio() -> None:
        consumer = AIOKafkaConsumer(TOPIC, bootstrap_servers=address, group_id="aio", auto_offset_reset="earliest")
        await consumer.start()
        await consumer.getone()
        await consumer.commit()
        await consumer.stop()

    asyncio.run(aio())


async def own_client(address: str) -> None:
    async with AdminClient(bootstrap_servers=address) as admin, OwnProducer(bootstrap_servers=address) as producer:
        await admin.create_topics([NewTopic("new", 1, 1)])
        await admin.create_partitions({"new": NewPartitions(2)})
        await producer.send("new", b"value")
        await producer.flush()
        async with Consumer(
            bootstrap_servers=address,
            group_id="own",
            auto_offset_reset="earliest",
            auto_offset_reset_new_partitions="earliest",
        ) as consumer:
            consumer.subscribe(["new"])
            while not await consumer.poll(500):
                pass
            await consumer.commit()
        async with Consumer(
            bootstrap_servers=address,
            group_id="computing",
            auto_offset_reset="earliest",
            group_local_assignors=[LagAssignor()],
        ) as consumer:
            consumer.subscribe(["new"])
            while not await consumer.poll(500):
                pass
        await admin.describe_topics(["new"])
        await admin.describe_consumer_groups(["own"])
        await admin.delete_consumer_groups(["own"])
        await admin.delete_topics(["new"])


def main() -> None:
    proxy = RecordingProxy()
    address = f"127.0.0.1:{proxy.port}"
    with tempfile.TemporaryDirectory() as folder:
        with socket.create_server(("127.0.0.1", 0)) as free:
            proxy.broker_port = free.getsockname()[1]
        listeners = {
            "listeners": f"PLAINTEXT://127.0.0.1:{proxy.broker_port}",
            "advertised.listeners": f"PLAINTEXT://{address}",
        }
        broker = KcoordProcess(Path(folder), {**FAST, **listeners, "kcoord.client.assignors.enable": "true"})
        try:
            broker.start()
            librdkafka(address)
            python_clients(address)
            asyncio.run(own_client(address))
        finally:
            broker.kill()
            proxy.close()
    lines = [frame.hex() for frame in chosen(proxy.frames)]
    CORPUS.write_text("\n".join(lines) + "\n")
    print(f"{len(lines)} requests of {len(proxy.frames)}")


if __name__ == "__main__":
    main()
