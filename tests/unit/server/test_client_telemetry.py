# SPDX-License-Identifier: Apache-2.0
"""Client telemetry: subscriptions of clients, how often clients may ask and push, and where pushed metrics go."""

from __future__ import annotations

import gzip
import itertools
import logging
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from kcoord.config import BrokerConfig
from kcoord.metadata.client_metrics import subscriptions_of
from kcoord.metadata.image import CLIENT_METRICS_RESOURCE, ImageBuilder, MetadataImage
from kcoord.runtime.result import CoordinatorRecord
from kcoord.server.api.api_table import build_api_table
from kcoord.server.api.handlers.api_versions import listed_versions
from kcoord.server.api.served_versions import TELEMETRY_APIS
from kcoord.server.observe import client_telemetry
from kcoord.server.observe.client_telemetry import ClientFacts, ClientTelemetry, is_protobuf
from kcoord.server.observe.telemetry_exporter import TelemetryExporter
from kcoord_protocol.compression import Compression
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import ConfigRecord, GetTelemetrySubscriptionsRequest, PushTelemetryRequest
from kcoord_protocol.uuid import ZERO_UUID, uuid_to_string

START_MS = 1_700_000_000_000
METRICS = b"\x0a\x02\x08\x01"
"""A protobuf message with one field, a message."""


def image_of(**subscriptions: dict[str, str]) -> MetadataImage:
    return ImageBuilder.of(
        CoordinatorRecord(
            None,
            ConfigRecord(resource_type=CLIENT_METRICS_RESOURCE, resource_name=name, name=key, value=value),
        )
        for name, configs in subscriptions.items()
        for key, value in configs.items()
    )


class Telemetry:
    """The telemetry of a broker with a clock that the test moves, and one client."""

    def __init__(self, image: MetadataImage | None = None, **settings: str) -> None:
        config = BrokerConfig.from_properties({key.replace("_", "."): value for key, value in settings.items()})
        ids = itertools.count()
        self.received: list[bytes] = []
        self.telemetry = ClientTelemetry(config, lambda: next(ids).to_bytes(16, "big"), self.received.append)
        self.image = image or image_of()
        self.now_ms = START_MS
        self.facts = ClientFacts("the-client", "apache-kafka-java", "4.3.1", "192.0.2.1", 4711)

    def get(self, instance_id: bytes = ZERO_UUID) -> tuple[bytes, int, list[str], int]:
        """Returns instance id, subscription id, metrics and interval."""
        request = GetTelemetrySubscriptionsRequest(client_instance_id=instance_id)
        answer = self.telemetry.get_subscriptions(request, self.facts, self.image, self.now_ms)
        return answer.client_instance_id, answer.subscription_id, answer.requested_metrics, answer.push_interval_ms

    def push(
        self,
        instance_id: bytes,
        subscription_id: int,
        metrics: bytes = METRICS,
        *,
        compression: int = 0,
        terminating: bool = False,
    ) -> Errors:
        request = PushTelemetryRequest(
            client_instance_id=instance_id,
            subscription_id=subscription_id,
            metrics=metrics,
            compression_type=compression,
            terminating=terminating,
        )
        try:
            answer = self.telemetry.push(request, self.facts, self.image, self.now_ms)
        except KafkaError as error:
            return Errors(error.error)
        return Errors(answer.error_code)


def test_a_client_gets_an_id_and_its_metrics() -> None:
    client = Telemetry(image_of(all={"metrics": "org.apache.kafka.consumer.,a.b", "interval.ms": "1000"}))
    instance_id, subscription_id, metrics, interval_ms = client.get()
    assert instance_id not in client_telemetry.RESERVED_IDS
    assert (metrics, interval_ms) == (["a.b", "org.apache.kafka.consumer."], 1000)
    client.now_ms += 1000
    assert client.get(instance_id) == (instance_id, subscription_id, metrics, interval_ms)
    assert client.get()[0] != instance_id


def test_without_a_subscription_a_client_gets_no_metrics_and_five_minutes() -> None:
    _, _, metrics, interval_ms = Telemetry().get()
    assert (metrics, interval_ms) == ([], 300_000)


@pytest.mark.parametrize(
    ("match", "matches"),
    [
        ("client_id=the-.*", True),
        ("client_id=the", False),
        ("client_software_name=apache-kafka-java,client_software_version=4\\.3.*", True),
        ("client_software_name=apache-kafka-java,client_software_version=3.*", False),
        ("client_source_address=192.0.2.1,client_source_port=4711", True),
        ("client_source_port=4712", False),
    ],
)
def test_a_subscription_applies_to_clients_that_match_all_its_conditions(match: str, matches: bool) -> None:
    client = Telemetry(image_of(some={"metrics": "m.", "match": match}, fast={"interval.ms": "100"}))
    assert client.get()[2:] == (["m."] if matches else [], 100)


def test_an_expression_with_exponential_backtracking_takes_no_time() -> None:
    client = Telemetry(image_of(bomb={"metrics": "m.", "match": "client_id=(a|aa)*(a|aa)*(a|aa)*b"}))
    client.facts.client_id = "a" * 20_000
    began = time.process_time()
    assert client.get()[2] == []
    assert time.process_time() - began < 5


def test_a_subscription_can_match_an_instance_by_its_id() -> None:
    other = bytes(15) + b"\x63"
    client = Telemetry(
        image_of(one={"metrics": "m.", "match": f"client_instance_id={re.escape(uuid_to_string(other))}"})
    )
    assert client.get(other)[2] == ["m."]
    assert client.get()[2] == []


def test_all_metrics_replace_single_metrics_and_the_shortest_interval_counts() -> None:
    client = Telemetry(image_of(a={"metrics": "x.", "interval.ms": "500"}, b={"metrics": "*", "interval.ms": "900"}))
    assert client.get()[2:] == (["*"], 500)


def test_invalid_subscriptions_in_the_log_are_ignored() -> None:
    image = image_of(bad={"interval.ms": "7"}, worse={"match": "client_id=["}, good={"metrics": "m."})
    assert [subscription.metrics for subscription in subscriptions_of(image)] == [("m.",)]


def test_requests_and_pushes_that_come_too_early_are_throttled() -> None:
    client = Telemetry(image_of(a={"metrics": "*", "interval.ms": "1000"}))
    instance_id, subscription_id, *_ = client.get()
    with pytest.raises(KafkaError) as caught:
        client.get(instance_id)
    assert caught.value.error == Errors.THROTTLING_QUOTA_EXCEEDED
    client.now_ms += 1
    assert client.push(instance_id, subscription_id) == Errors.NONE
    client.now_ms += 999
    assert client.push(instance_id, subscription_id) == Errors.THROTTLING_QUOTA_EXCEEDED
    client.now_ms += 1
    assert client.push(instance_id, subscription_id) == Errors.NONE
    assert client.push(instance_id, subscription_id, terminating=True) == Errors.NONE
    assert client.push(instance_id, subscription_id) == Errors.INVALID_REQUEST
    assert client.received == [METRICS] * 3


def test_changed_subscriptions_apply_at_once_and_reject_pushes_of_the_old_ones() -> None:
    client = Telemetry(image_of(a={"metrics": "x."}))
    instance_id, old_id, *_ = client.get()
    client.image = image_of(a={"metrics": "y."})
    assert client.push(instance_id, old_id) == Errors.UNKNOWN_SUBSCRIPTION_ID
    client.image = image_of(a={"metrics": "z."})
    _, new_id, metrics, _ = client.get(instance_id)
    assert metrics == ["z."]
    assert new_id != old_id
    assert client.push(instance_id, new_id) == Errors.NONE


def test_changes_of_other_metadata_do_not_change_the_subscriptions() -> None:
    client = Telemetry(image_of(a={"metrics": "x."}))
    instance_id, *_ = client.get()
    client.image = image_of(a={"metrics": "x."})
    with pytest.raises(KafkaError):
        client.get(instance_id)


@pytest.mark.parametrize("instance_id", sorted(client_telemetry.RESERVED_IDS))
def test_pushes_with_a_reserved_id_are_rejected(instance_id: bytes) -> None:
    assert Telemetry().push(instance_id, 0) == Errors.INVALID_REQUEST


@pytest.mark.parametrize(
    ("metrics", "compression", "error"),
    [
        (METRICS, 9, Errors.UNSUPPORTED_COMPRESSION_TYPE),
        (METRICS * 4, 0, Errors.TELEMETRY_TOO_LARGE),
        (METRICS, int(Compression.GZIP), Errors.INVALID_RECORD),
        (gzip.compress(bytes(100_000)), int(Compression.GZIP), Errors.TELEMETRY_TOO_LARGE),
        (b"\x07", 0, Errors.INVALID_RECORD),
        (b"", 0, Errors.NONE),
        (METRICS, 0, Errors.NONE),
    ],
)
def test_invalid_pushes_are_rejected(metrics: bytes, compression: int, error: Errors) -> None:
    client = Telemetry(telemetry_max_bytes="10")
    instance_id, subscription_id, *_ = client.get()
    assert client.push(instance_id, subscription_id, metrics, compression=compression) == error
    assert client.received == ([METRICS] if error is Errors.NONE and metrics else [])


def test_compressed_metrics_are_decompressed() -> None:
    client = Telemetry()
    instance_id, subscription_id, *_ = client.get()
    assert client.push(instance_id, subscription_id, gzip.compress(METRICS), compression=1) == Errors.NONE
    assert client.received == [METRICS]


def test_the_size_of_decompressed_metrics_is_limited() -> None:
    client = Telemetry(telemetry_max_bytes="1000")
    instance_id, subscription_id, *_ = client.get()
    bomb = gzip.compress(bytes(17_000))
    assert len(bomb) < 1000
    assert client.push(instance_id, subscription_id, bomb, compression=1) == Errors.INVALID_RECORD


def test_quiet_instances_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Telemetry(image_of(a={"metrics": "*", "interval.ms": "30000"}))
    first, *_ = client.get()
    client.now_ms += 89_999
    second, *_ = client.get()
    assert len(client.telemetry) == 2
    client.now_ms += 1
    client.get()
    assert len(client.telemetry) == 2
    client.telemetry.disconnected(second)
    assert len(client.telemetry) == 1
    monkeypatch.setattr(client_telemetry, "MOST_INSTANCES", 3)
    for _ in range(5):
        client.get()
    assert len(client.telemetry) == 3
    assert client.get(first)[0] == first


def test_a_client_that_reconnects_may_ask_at_once() -> None:
    client = Telemetry()
    instance_id, *_ = client.get()
    assert client.facts.instance_id == instance_id
    client.telemetry.disconnected(instance_id)
    assert client.get(instance_id)[0] == instance_id


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", True),
        (METRICS, True),
        (b"\x08\x96\x01\x11" + bytes(8) + b"\x1d" + bytes(4), True),
        (b"\x0a\x05\x08\x01", False),
        (b"\x08", False),
        (b"\x08" + b"\xff" * 11, False),
        (b"\x02\x00", False),
        (b"\x0b", False),
        (b"\x11\x00", False),
        (b"\x0a\x00" * client_telemetry.MOST_FIELDS, True),
        (b"\x0a\x00" * (client_telemetry.MOST_FIELDS + 1), False),
    ],
)
def test_protobuf(data: bytes, expected: bool) -> None:
    assert is_protobuf(data) is expected


@pytest.mark.parametrize(
    ("settings", "listed"),
    [
        ({}, False),
        ({"metric.reporters": "org.apache.kafka.common.metrics.JmxReporter"}, False),
        ({"metric.reporters": "com.example.Telemetry"}, True),
        ({"kcoord.client.telemetry.endpoint": "http://127.0.0.1:4318/v1/metrics"}, True),
    ],
)
def test_the_apis_are_listed_if_a_receiver_is_configured(settings: dict[str, str], listed: bool) -> None:
    config = BrokerConfig.from_properties(settings)
    table = build_api_table(config)
    keys = {version.api_key for version in listed_versions(table, config)}
    assert [key in keys for key in TELEMETRY_APIS] == [listed, listed]
    assert all(key in table.apis for key in TELEMETRY_APIS)


class Collector(HTTPServer):
    """An HTTP server that records what is posted and responds to every request with `status`."""

    def __init__(self, status: int = 200) -> None:
        self.bodies: list[tuple[str, bytes]] = []
        self.has_body = threading.Event()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.bodies.append((self.headers["Content-Type"], body))
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()
                collector.has_body.set()

            def log_message(self, format: str, *arguments: object) -> None:
                """Tests print nothing."""

        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self.shutdown()
        self.server_close()


def test_pushes_go_to_the_collector() -> None:
    collector = Collector()
    exporter = TelemetryExporter(f"http://127.0.0.1:{collector.server_port}/v1/metrics")
    exporter.export(METRICS)
    assert collector.has_body.wait(10)
    exporter.close()
    collector.stop()
    assert collector.bodies == [("application/x-protobuf", METRICS)]


def test_a_collector_that_rejects_metrics_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    collector = Collector(status=503)
    exporter = TelemetryExporter(f"http://127.0.0.1:{collector.server_port}/v1/metrics")
    with caplog.at_level(logging.WARNING):
        exporter.export(METRICS)
        exporter.export(METRICS)
        exporter.close()
        assert exporter._thread is not None
        exporter._thread.join(10)
    collector.stop()
    assert len(collector.bodies) == 2
    assert len([record for record in caplog.records if "Metrics of clients are lost" in record.message]) == 1
