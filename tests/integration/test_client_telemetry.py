# SPDX-License-Identifier: Apache-2.0
"""The metrics that librdkafka pushes reach a collector."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from confluent_kafka import Producer

from kcoord.metadata.image import CLIENT_METRICS_RESOURCE
from kcoord.server.observe.client_telemetry import is_protobuf
from kcoord_protocol.messages import IncrementalAlterConfigsRequest, IncrementalAlterConfigsResponse
from tests.integration.wire import WireClient
from tests.support.confluent import create_topic
from tests.support.kcoord_process import FAST, KcoordProcess
from tests.support.waiting import wait_until


class Collector(HTTPServer):
    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        bodies = self.bodies

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *arguments: object) -> None:
                """Prints nothing."""

        super().__init__(("127.0.0.1", 0), Handler)


def subscribe(broker: KcoordProcess, name: str, configs: dict[str, str]) -> None:
    request = IncrementalAlterConfigsRequest(
        resources=[
            IncrementalAlterConfigsRequest.AlterConfigsResource(
                resource_type=CLIENT_METRICS_RESOURCE,
                resource_name=name,
                configs=[
                    IncrementalAlterConfigsRequest.AlterableConfig(name=key, config_operation=0, value=value)
                    for key, value in configs.items()
                ],
            )
        ]
    )
    with WireClient(broker.port) as client:
        assert client.call(request, 1, IncrementalAlterConfigsResponse).responses[0].error_code == 0


def test_a_client_pushes_the_metrics_of_its_subscription(tmp_path: Path) -> None:
    collector = Collector()
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{collector.server_port}/v1/metrics"
    broker = KcoordProcess(tmp_path, {**FAST, "kcoord.client.telemetry.endpoint": endpoint}).start()
    try:
        create_topic(broker.address, "t")
        subscribe(
            broker, "all", {"metrics": "*", "interval.ms": "100", "match": "client_software_name=.*,client_id=it"}
        )
        producer = Producer({"bootstrap.servers": broker.address, "client.id": "it", "enable.metrics.push": True})

        def has_pushed() -> bool:
            producer.produce("t", b"x")
            producer.poll(0.05)
            return any(b"org.apache.kafka.producer" in body for body in collector.bodies)

        wait_until(has_pushed, f"the collector has metrics of the producer; {broker.log}", 30)
        assert all(is_protobuf(body) for body in collector.bodies)
        producer.flush(10)
    finally:
        assert broker.stop() == 0, broker.log
        collector.shutdown()
        collector.server_close()
