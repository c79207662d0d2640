# SPDX-License-Identifier: Apache-2.0
"""Settings that take effect on the wire and on the disk: at the start, and while the broker runs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._config import AlterConfigOpType, ConfigEntry, ConfigResource
from confluent_kafka.admin._resource import ResourceType
from confluent_kafka.cimpl import NewTopic

from kcoord.metadata.describe import ConfigOrigin
from kcoord.metadata.image import BROKER_RESOURCE
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.compression import Compression
from kcoord_protocol.errors import Errors
from kcoord_protocol.messages import (
    ApiVersionsRequest,
    ApiVersionsResponse,
    IncrementalAlterConfigsRequest,
    IncrementalAlterConfigsResponse,
    OffsetCommitRequest,
    OffsetCommitResponse,
)
from kcoord_protocol.record_batch import iter_headers
from tests.integration.conftest import MakeServer
from tests.integration.wire import WireClient
from tests.support.kcoord_process import KcoordProcess
from tests.support.waiting import wait_until

TOPIC = "orders"
LISTENER_KEY = "listener.name.internal.ssl.keystore.location"


def make_topic(server: KcoordProcess, **configs: str) -> None:
    config = {key.replace("_", "."): value for key, value in configs.items()}
    admin = AdminClient({"bootstrap.servers": server.address})
    admin.create_topics([NewTopic(TOPIC, 1, 1, config=config)])[TOPIC].result(20)


def alter_broker(server: KcoordProcess, configs: Mapping[str, str]) -> None:
    """Sets dynamic configs of the broker."""
    entries = [ConfigEntry(key, value, incremental_operation=AlterConfigOpType.SET) for key, value in configs.items()]
    resource = ConfigResource(ResourceType.BROKER, "1", incremental_configs=entries)
    admin = AdminClient({"bootstrap.servers": server.address})
    admin.incremental_alter_configs([resource])[resource].result(20)


def alter_all_brokers(server: KcoordProcess, key: str, value: str) -> tuple[int, str | None]:
    """Sets a dynamic config of all brokers, which librdkafka does not offer; returns error and text."""
    config = IncrementalAlterConfigsRequest.AlterableConfig(name=key, config_operation=0, value=value)
    resource = IncrementalAlterConfigsRequest.AlterConfigsResource(
        resource_type=BROKER_RESOURCE, resource_name="", configs=[config]
    )
    with WireClient(server.port) as client:
        request = IncrementalAlterConfigsRequest(resources=[resource])
        (answer,) = client.call(request, 1, IncrementalAlterConfigsResponse).responses
    return answer.error_code, answer.error_message


def describe_broker(server: KcoordProcess) -> dict[str, ConfigEntry]:
    resource = ConfigResource(ResourceType.BROKER, "1")
    admin = AdminClient({"bootstrap.servers": server.address})
    described: dict[str, ConfigEntry] = admin.describe_configs([resource])[resource].result(20)
    return described


def log_files(server: KcoordProcess, folder: str) -> list[Path]:
    return sorted((server.data / folder).glob("*.log"))


def codecs_on_disk(server: KcoordProcess, topic: str) -> set[Compression]:
    return {
        header.compression
        for path in server.data.glob(f"{topic}-*/*.log")
        for _, header in iter_headers(path.read_bytes())
        if not header.is_control
    }


# --- allowed settings -------------------------------------------------------------------------------------------------


def test_a_key_that_is_not_dynamic_is_rejected(server: KcoordProcess) -> None:
    with pytest.raises(KafkaException, match=r"Cannot update these configs dynamically: \[num\.partitions\]"):
        alter_broker(server, {"num.partitions": "3"})
    refusal = (Errors.INVALID_REQUEST, "Cannot update these configs dynamically: [num.partitions]")
    assert alter_all_brokers(server, "num.partitions", "3") == refusal
    assert describe_broker(server)["num.partitions"].value == "1"


def test_keys_for_one_listener_are_kept_and_described(make_server: MakeServer) -> None:
    server = make_server(**{"listener.name.internal.ssl.keystore.password": "secret"}).start()
    alter_broker(server, {LISTENER_KEY: "/etc/kafka/internal.jks"})
    server.kill()
    server.start()
    described = describe_broker(server)
    location, password = described[LISTENER_KEY], described["listener.name.internal.ssl.keystore.password"]
    source: object = location.source
    assert (location.value, source) == ("/etc/kafka/internal.jks", ConfigOrigin.DYNAMIC_BROKER_CONFIG)
    assert (password.value, password.is_sensitive) == (None, True)
    error, text = alter_all_brokers(server, LISTENER_KEY, "/etc/kafka/internal.jks")
    assert error == Errors.INVALID_REQUEST
    assert text is not None
    assert text.startswith("Cannot update these configs at default cluster level")


# --- compression ------------------------------------------------------------------------------------------------------


def test_a_compression_level_takes_effect_while_the_broker_runs(server: KcoordProcess) -> None:
    make_topic(server, compression_type="gzip")
    text = "".join(f"{number * number % 9973} sold to {number % 617}\n" for number in range(20_000)).encode()

    def stored_bytes() -> int:
        """Produces the text; returns by how many bytes the log has grown."""
        before = sum(path.stat().st_size for path in log_files(server, f"{TOPIC}-0"))
        producer = Producer({"bootstrap.servers": server.address})
        producer.produce(TOPIC, text)
        assert producer.flush(20) == 0
        return sum(path.stat().st_size for path in log_files(server, f"{TOPIC}-0")) - before

    usual_bytes = stored_bytes()
    assert alter_all_brokers(server, "compression.gzip.level", "1") == (0, None)
    quick_bytes = stored_bytes()
    assert alter_all_brokers(server, "compression.gzip.level", "9") == (0, None)
    small_bytes = stored_bytes()
    assert small_bytes <= usual_bytes < quick_bytes < len(text)
    assert alter_all_brokers(server, "compression.type", "zstd") == (0, None)
    assert codecs_on_disk(server, TOPIC) == {Compression.GZIP}
    consumer = Consumer({"bootstrap.servers": server.address, "group.id": "g", "auto.offset.reset": "earliest"})
    consumer.assign([TopicPartition(TOPIC, 0, 0)])
    assert [message.value() for message in consumer.consume(3, 20)] == [text] * 3
    consumer.close()


@pytest.mark.parametrize("codec", [Compression.GZIP, Compression.ZSTD])
def test_the_coordinator_writes_with_the_configured_codec(make_server: MakeServer, codec: Compression) -> None:
    server = make_server(offsets_topic_compression_codec=str(int(codec))).start()
    make_topic(server)

    def committed() -> int:
        consumer = Consumer({"bootstrap.servers": server.address, "group.id": "g"})
        try:
            return consumer.committed([TopicPartition(TOPIC, 0)], timeout=20)[0].offset
        finally:
            consumer.close()

    consumer = Consumer(
        {
            "bootstrap.servers": server.address,
            "group.id": "g",
            "group.protocol": "consumer",
            "enable.auto.commit": False,
        }
    )
    consumer.subscribe([TOPIC])
    wait_until(lambda: consumer.poll(0.1) is not None or bool(consumer.assignment()), "the member has its partition")
    consumer.commit(offsets=[TopicPartition(TOPIC, 0, 12)], asynchronous=False)
    consumer.close()
    server.kill()
    server.start()
    assert committed() == 12
    server.stop()
    assert codecs_on_disk(server, "__consumer_offsets") == {codec}


# --- writes of the coordinator ----------------------------------------------------------------------------------------


def commit_seconds(client: WireClient) -> float:
    """Returns the duration of a commit without a member."""
    topic = OffsetCommitRequest.OffsetCommitRequestTopic(
        name=TOPIC, partitions=[OffsetCommitRequest.OffsetCommitRequestPartition(committed_offset=1)]
    )
    request = OffsetCommitRequest(group_id="g", generation_id_or_member_epoch=-1, topics=[topic])
    began = time.monotonic()
    answer = client.call(request, 8, OffsetCommitResponse)
    took = time.monotonic() - began
    assert answer.topics[0].partitions[0].error_code == Errors.NONE
    return took


@pytest.mark.parametrize(("linger_ms", "is_slow"), [("400", True), ("0", False), ("-1", False)])
def test_a_write_lingers_as_configured(make_server: MakeServer, linger_ms: str, is_slow: bool) -> None:
    server = make_server(group_coordinator_append_linger_ms=linger_ms).start()
    make_topic(server)
    consumer = Consumer({"bootstrap.servers": server.address, "group.id": "g"})
    assert consumer.committed([TopicPartition(TOPIC, 0)], timeout=20)[0].offset < 0
    consumer.close()
    with WireClient(server.port) as client:
        quickest = min(commit_seconds(client) for _ in range(1 if is_slow else 8))
    assert (quickest >= 0.399) == is_slow


# --- data -------------------------------------------------------------------------------------------------------------


def test_files_of_old_segments_stay_for_the_configured_delay(make_server: MakeServer) -> None:
    server = make_server(log_retention_check_interval_ms="200").start()
    make_topic(server, segment_bytes=str(1 << 20), retention_bytes=str(1 << 20), file_delete_delay_ms="1500")
    producer = Producer({"bootstrap.servers": server.address, "linger.ms": 0, "batch.num.messages": 1})
    for _ in range(45):
        producer.produce(TOPIC, bytes(100_000))
    assert producer.flush(30) == 0

    def deleted() -> list[Path]:
        return list((server.data / f"{TOPIC}-0").glob("*.deleted"))

    wait_until(lambda: bool(deleted()), "old segments are renamed")
    wait_until(lambda: not deleted(), "their files are removed")


def test_clients_may_push_metrics_if_a_reporter_is_configured(server: KcoordProcess) -> None:
    request = ApiVersionsRequest(client_software_name="wire", client_software_version="1")

    def offers_telemetry() -> bool:
        with WireClient(server.port) as client:
            answer = client.call(request, 3, ApiVersionsResponse)
        return ApiKey.PUSH_TELEMETRY in {api.api_key for api in answer.api_keys}

    assert not offers_telemetry()
    alter_broker(server, {"metric.reporters": "org.example.Reporter"})
    wait_until(offers_telemetry, "new connections may push metrics")
