# SPDX-License-Identifier: Apache-2.0
"""SCRAM credentials in a running broker: durable, the same at every worker, and never in its log."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from kcoord.logtools.metadata_source import read_metadata
from kcoord.storage.file_system import RealFileSystem
from kcoord_protocol.messages import (
    AlterUserScramCredentialsRequest,
    AlterUserScramCredentialsResponse,
    DescribeUserScramCredentialsRequest,
    DescribeUserScramCredentialsResponse,
)
from tests.integration.conftest import MakeServer
from tests.integration.test_workers import settings
from tests.integration.wire import WireClient
from tests.support.kcoord_process import KcoordProcess

SALTED_PASSWORD = b"do-not-print-me-" * 2
Upsertion = AlterUserScramCredentialsRequest.ScramCredentialUpsertion
Deletion = AlterUserScramCredentialsRequest.ScramCredentialDeletion


def put(port: int, user: str, iterations: int = 4096) -> int:
    upsertion = Upsertion(name=user, mechanism=1, iterations=iterations, salt=b"salt", salted_password=SALTED_PASSWORD)
    return alter(port, AlterUserScramCredentialsRequest(upsertions=[upsertion]))


def drop(port: int, user: str) -> int:
    return alter(port, AlterUserScramCredentialsRequest(deletions=[Deletion(name=user, mechanism=1)]))


def alter(port: int, request: AlterUserScramCredentialsRequest) -> int:
    with WireClient(port) as client:
        (result,) = client.call(request, 0, AlterUserScramCredentialsResponse).results
    return result.error_code


def users(port: int) -> dict[str, int]:
    """Returns the iterations of each user."""
    with WireClient(port) as client:
        response = client.call(DescribeUserScramCredentialsRequest(users=None), 0, DescribeUserScramCredentialsResponse)
    return {result.user: result.credential_infos[0].iterations for result in response.results}


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[KcoordProcess]:
    process = KcoordProcess(tmp_path, settings()).start()
    yield process
    process.kill()


def test_credentials_survive_kill_9(make_server: MakeServer) -> None:
    server = make_server().start()
    assert put(server.port, "alice", 8192) == put(server.port, "bob") == put(server.port, "carol") == 0
    assert drop(server.port, "bob") == 0
    server.restart(signal.SIGKILL)
    assert users(server.port) == {"alice": 8192, "carol": 4096}
    assert drop(server.port, "bob") == 91
    server.stop()
    source = read_metadata(RealFileSystem(), str(server.data / "__cluster_metadata-0"))
    assert source.image.scram_credentials.keys() == {("SCRAM-SHA-256", "alice"), ("SCRAM-SHA-256", "carol")}
    assert "do-not-print-me" not in server.log


def test_every_worker_has_a_change_before_its_response(workers: KcoordProcess) -> None:
    for number, port in enumerate(workers.ports):
        assert put(port, f"user-{number}") == put(port, "alice", 5000 + number) == 0
        assert drop(port, f"user-{number - 1}") == (0 if number else 91)
        expected = {f"user-{number}": 4096, "alice": 5000 + number}
        assert [users(other) for other in workers.ports] == [expected] * len(workers.ports)
