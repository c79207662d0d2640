# SPDX-License-Identifier: Apache-2.0
"""What TLS costs: CPU of steady heartbeats beside an echo with TLS, handshakes per second, memory of connections.

The rounds of broker and echo alternate, and the smallest of each counts.
"""

from __future__ import annotations

import ssl
import tempfile
import time
from pathlib import Path

from bench.report import Report
from bench.requests import CONNECTIONS, SETTINGS, compare, loads
from bench.wire import Broker, Connection, Server
from tests.support.certificates import Authority

IDLE_CONNECTIONS = 1000


def main(report: Report) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        authority = Authority()
        certificate = authority.issue("localhost", "localhost").write_pem(folder / "broker.pem")
        context = ssl.create_default_context(cadata=authority.pem)
        context.check_hostname = False
        settings = (
            "listener.security.protocol.map=PLAINTEXT:SSL",
            "ssl.keystore.type=PEM",
            f"ssl.keystore.location={certificate}",
            "kcoord.log.flush.policy=os",
            f"max.connections.per.ip={2 * IDLE_CONNECTIONS}",
            *SETTINGS,
        )
        with Server(["bench.echo", certificate]) as echo, Broker(folder / "data", *settings) as broker:
            echo.tls = broker.tls = context
            _requests(report, broker, echo)
            _connections(report, broker, context)


def _requests(report: Report, broker: Broker, echo: Server) -> None:
    table = report.table(
        "requests over TLS", "request", "connections x in flight", "CPU us", "echo CPU us", "ratio", "requests per s"
    )
    for load in loads(broker, wide=False)[:3]:
        broker_us, echo_us, rate = compare(broker, echo, load)
        table.row(load.name, f"{CONNECTIONS} x {load.in_flight}", broker_us, echo_us, broker_us / echo_us, round(rate))


def _connections(report: Report, broker: Broker, context: ssl.SSLContext) -> None:
    """Opens connections one after the other: full handshakes, without resumption."""
    table = report.table("TLS connections", "connections", "CPU us of a handshake", "handshakes per s", "KB each")
    began, cpu, memory = time.perf_counter(), broker.cpu_seconds(), broker.resident_mb()
    connections = [Connection(broker.port, context) for _ in range(IDLE_CONNECTIONS)]
    took, cpu = time.perf_counter() - began, broker.cpu_seconds() - cpu
    kilobytes = 1000 * (broker.resident_mb() - memory) / IDLE_CONNECTIONS
    table.row(IDLE_CONNECTIONS, 1e6 * cpu / IDLE_CONNECTIONS, round(IDLE_CONNECTIONS / took), kilobytes)
    for connection in connections:
        connection.close()
