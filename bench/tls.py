# SPDX-License-Identifier: Apache-2.0
"""What TLS 1.3 costs: CPU of steady requests beside an echo with TLS, full and resumed handshakes, and memory.

The rounds of broker and echo alternate, and the smallest of each counts.
"""

from __future__ import annotations

import multiprocessing
import resource
import ssl
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

from bench.report import Report
from bench.requests import CONNECTIONS, SETTINGS, Driver, compare, loads
from bench.wire import Broker, Connection, Server
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.messages import ApiVersionsRequest, ApiVersionsResponse
from tests.support.certificates import Authority

ROUNDS = 12
SECONDS_PER_ROUND = 0.4
HANDSHAKES = 1_000
IDLE_CONNECTIONS = 10_000
CLIENT_PROCESSES = 4


def main(report: Report) -> None:
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        authority = Authority()
        certificate = authority.issue("localhost", "localhost").write_pem(folder / "broker.pem")
        context = ssl.create_default_context(cadata=authority.pem)
        context.check_hostname = False
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        plain = ("kcoord.log.flush.policy=os", f"max.connections={2 * IDLE_CONNECTIONS}", *SETTINGS)
        settings = (
            "listener.security.protocol.map=PLAINTEXT:SSL",
            "ssl.keystore.type=PEM",
            f"ssl.keystore.location={certificate}",
            *plain,
        )
        with Server(["bench.echo", certificate]) as echo, Broker(folder / "data", *settings) as broker:
            echo.tls = broker.tls = context
            _requests(report, broker, echo)
            _handshakes(report, broker, context)
        table = report.table("idle connections", "connections", "protocol", "KB each")
        for protocol, overrides, tls in (("PLAINTEXT", plain, None), ("SSL", settings, context)):
            with Broker(folder / protocol, *overrides) as broker:
                broker.tls = tls
                table.row(IDLE_CONNECTIONS, protocol, _kilobytes_each(broker))


def _requests(report: Report, broker: Broker, echo: Server) -> None:
    table = report.table(
        "requests over TLS 1.3",
        "request",
        "connections x in flight",
        "CPU us",
        "echo CPU us",
        "ratio",
        "requests per s",
    )
    measured = loads(broker, wide=False)[:3]
    # The first buffers of 256 KiB that the echo frees raise glibc's threshold for mapped memory. Before, each of its
    # reads maps and unmaps memory, which doubles its cost.
    warm_up = Driver(echo, measured[0], 0.1)
    warm_up.warm_up()
    warm_up.close()
    for load in measured:
        broker_us, echo_us, rate = compare(broker, echo, load, ROUNDS, SECONDS_PER_ROUND)
        table.row(load.name, f"{CONNECTIONS} x {load.in_flight}", broker_us, echo_us, broker_us / echo_us, round(rate))


def _handshakes(report: Report, broker: Broker, context: ssl.SSLContext) -> None:
    """Opens connections one after the other. The client's work counts in the wall time only."""
    table = report.table(
        "TLS 1.3 handshakes", "handshake", "connections", "CPU us", "per CPU s of the broker", "per s, one client"
    )
    first = Connection(broker.port, context)
    # A session ticket of TLS 1.3 arrives with the first response.
    _use(first)
    session = first.session
    assert session is not None
    new: dict[str, Callable[[], Connection]] = {
        "full": lambda: Connection(broker.port, context),
        "resumed": lambda: Connection(broker.port, context, session),
    }
    for kind, connect in new.items():
        began, cpu = time.perf_counter(), broker.cpu_seconds()
        for _ in range(HANDSHAKES):
            connection = connect()
            assert connection.is_resumed is (kind == "resumed")
            connection.close()
        took, cpu = time.perf_counter() - began, broker.cpu_seconds() - cpu
        table.row(kind, HANDSHAKES, 1e6 * cpu / HANDSHAKES, round(HANDSHAKES / cpu), round(HANDSHAKES / took))
    first.close()


def _kilobytes_each(broker: Broker) -> float:
    """Returns the memory of a connection that has had one response, after those of a few connections were freed."""
    _use(Connection(broker.port, broker.tls))
    memory = broker.resident_mb()
    clients = []
    # The other methods would pickle the broker.
    fork = multiprocessing.get_context("fork")
    for _ in range(CLIENT_PROCESSES):
        own, its = fork.Pipe()
        process = fork.Process(target=_open, args=(broker, IDLE_CONNECTIONS // CLIENT_PROCESSES, its))
        process.start()
        # If a client ends early, recv below fails instead of waiting forever.
        its.close()
        clients.append((process, own))
    for _, own in clients:
        assert own.recv() == "open"
    kilobytes = 1000 * (broker.resident_mb() - memory) / IDLE_CONNECTIONS
    for process, own in clients:
        own.send("end")
        process.join()
    return kilobytes


def _open(broker: Broker, count: int, pipe: Pipe) -> None:
    connections = [Connection(broker.port, broker.tls) for _ in range(count)]
    for connection in connections:
        _use(connection)
    pipe.send("open")
    pipe.recv()


def _use(connection: Connection) -> None:
    answer = connection.call(ApiKey.API_VERSIONS, 0, ApiVersionsRequest(), ApiVersionsResponse)
    assert answer.error_code == 0, answer
