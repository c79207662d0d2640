# SPDX-License-Identifier: Apache-2.0
"""A network that loses packets, and peers that disappear without a FIN or reset, in a network namespace.

`make soak` repeats them as often as KCOORD_SOAK_ROUNDS says.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.framing import encode_request
from kcoord_protocol.messages import (
    CreateTopicsRequest,
    CreateTopicsResponse,
    FetchRequest,
    MetadataRequest,
    MetadataResponse,
)
from tests.integration.wire import WireClient
from tests.soak.crowd import END_SECONDS, SETTINGS, Crowd, rest
from tests.support.kcoord_process import KcoordProcess
from tests.support.memory import resident_kib
from tests.support.private_network import PrivateNetwork, private_network
from tests.support.waiting import wait_until

ROUNDS = int(os.environ.get("KCOORD_SOAK_ROUNDS", "1"))
LOSS = 0.2
LOSS_SECONDS = 5.0
IDLE_MS = 1000
HALF_OPEN = 40
REAPED_SECONDS = 10.0
"""Several times the longest idle time. Without it, a TCP connection with unsent data lives for a quarter of an hour."""
MOST_GROWTH_KIB = 64 * 1024


@pytest.fixture
def network() -> Iterator[PrivateNetwork]:
    with private_network() as network:
        yield network


@pytest.fixture
def server(tmp_path: Path, network: PrivateNetwork) -> Iterator[KcoordProcess]:
    server = KcoordProcess(tmp_path, SETTINGS).start()
    yield server
    server.kill()


def test_lost_packets(server: KcoordProcess, network: PrivateNetwork) -> None:
    with Crowd(server) as crowd:
        crowd.wait_for_commits()
        for _ in range(ROUNDS):
            with network.loss(LOSS):
                rest(LOSS_SECONDS)
                crowd.check()
            crowd.wait_for_commits()
        crowd.finish()
    assert server.stop() == 0


def connections(server: KcoordProcess) -> int:
    """Returns the number of open sockets of the process."""
    count = 0
    for descriptor in Path(f"/proc/{server.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed since the folder was read
            count += os.readlink(descriptor).startswith("socket:")
    return count


def test_peers_that_disappear_without_a_fin(tmp_path: Path, network: PrivateNetwork) -> None:
    """The broker closes half-open connections after connections.max.idle.ms.

    Some are idle, some are in the middle of a request, some wait for records, and some were receiving responses of
    megabytes.
    """
    server = KcoordProcess(tmp_path, {**SETTINGS, "connections.max.idle.ms": str(IDLE_MS)}).start()
    try:
        idle = connections(server)
        with WireClient(server.port, END_SECONDS) as client:
            topic = CreateTopicsRequest.CreatableTopic(name="wide", num_partitions=3000, replication_factor=1)
            request = CreateTopicsRequest(topics=[topic], timeout_ms=60_000)
            assert not client.call(request, 7, CreateTopicsResponse).topics[0].error_code
        wait_until(lambda: connections(server) == idle, "the clean connection is closed")
        for _ in range(ROUNDS):
            before_kib = resident_kib(server.pid)
            peers = speak_and_stop_reading(server)
            wait_until(lambda: connections(server) == idle + len(peers), "the broker has accepted all connections")  # noqa: B023
            with network.silence(server.port):
                for peer in peers:
                    # No FIN and no reset arrives.
                    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    peer.close()
                wait_until(lambda: connections(server) == idle, "half-open connections are closed", REAPED_SECONDS)
            assert resident_kib(server.pid) - before_kib < MOST_GROWTH_KIB
        assert server.stop() == 0
    finally:
        server.kill()


def speak_and_stop_reading(server: KcoordProcess) -> list[socket.socket]:
    metadata = encode_request(ApiKey.METADATA, 12, 1, None, MetadataRequest(topics=None).encode(12))
    requested = FetchRequest.FetchPartition(partition=0, fetch_offset=0, partition_max_bytes=1 << 20)
    topics = [FetchRequest.FetchTopic(topic="wide", partitions=[requested])]
    fetch = FetchRequest(max_wait_ms=500, min_bytes=1, topics=topics).encode(12)
    sent = [b"", metadata[:7], encode_request(ApiKey.FETCH, 12, 1, None, fetch), metadata, metadata * 100]
    peers = []
    for number in range(HALF_OPEN):
        peer = socket.socket()
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        peer.connect(("127.0.0.1", server.port))
        peer.sendall(sent[number % len(sent)])
        peers.append(peer)
    with WireClient(server.port, END_SECONDS) as client:
        # Its response comes after the broker has processed the requests above.
        assert client.call(MetadataRequest(topics=[]), 12, MetadataResponse).brokers
    return peers
