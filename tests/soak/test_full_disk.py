# SPDX-License-Identifier: Apache-2.0
"""A full disk under a running broker: writes fail, heartbeats and reads succeed, and no acknowledged write is lost.

`make soak` repeats it as often as KCOORD_SOAK_ROUNDS says.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from kcoord_protocol.errors import Errors
from kcoord_protocol.messages import (
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
    OffsetCommitRequest,
    OffsetCommitResponse,
    OffsetFetchRequest,
    OffsetFetchResponse,
)
from tests.integration.wire import WireClient
from tests.soak.crowd import END_SECONDS, SETTINGS, TOPIC, Crowd, rest
from tests.support.kcoord_process import KcoordProcess
from tests.support.small_disk import SmallDisk, small_disk
from tests.support.waiting import wait_until

ROUNDS = int(os.environ.get("KCOORD_SOAK_ROUNDS", "1"))
FULL_SECONDS = 3.0
LEAST_FAILED = 5
"""So many commits fail in each round. The cleaner and snapshots free some space again, so others succeed."""
DISK_MEBIBYTES = 48
AWAY = (Errors.NOT_COORDINATOR, Errors.COORDINATOR_LOAD_IN_PROGRESS)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "data", DISK_MEBIBYTES) as disk:
        yield disk


@pytest.fixture
def server(tmp_path: Path, disk: SmallDisk) -> Iterator[KcoordProcess]:
    # The session timeout is long, so that no member expires on a busy machine.
    server = KcoordProcess(tmp_path, {**SETTINGS, "group.consumer.session.timeout.ms": "10000"})
    assert server.data == disk.folder
    server.start()
    yield server
    server.kill()


def heartbeat(client: WireClient, epoch: int) -> ConsumerGroupHeartbeatResponse:
    request = ConsumerGroupHeartbeatRequest(
        group_id="steady",
        member_id="steady",
        member_epoch=epoch,
        rebalance_timeout_ms=60_000 if epoch == 0 else -1,
        subscribed_topic_names=["elsewhere"] if epoch == 0 else None,
        topic_partitions=[] if epoch == 0 else None,
    )
    return client.call(request, 1, ConsumerGroupHeartbeatResponse)


def commit(client: WireClient, offset: int) -> Errors:
    partition = OffsetCommitRequest.OffsetCommitRequestPartition(partition_index=0, committed_offset=offset)
    topic = OffsetCommitRequest.OffsetCommitRequestTopic(name=TOPIC, partitions=[partition])
    request = OffsetCommitRequest(group_id="steady-too", generation_id_or_member_epoch=-1, topics=[topic])
    return Errors(client.call(request, 9, OffsetCommitResponse).topics[0].partitions[0].error_code)


def fetch(client: WireClient) -> tuple[Errors, list[int]]:
    requested = OffsetFetchRequest.OffsetFetchRequestGroup(group_id="steady-too", topics=None)
    group = client.call(OffsetFetchRequest(groups=[requested]), 9, OffsetFetchResponse).groups[0]
    return Errors(group.error_code), [part.committed_offset for topic in group.topics for part in topic.partitions]


def check(beats: Counter[Errors], reads: Counter[Errors], commits: Counter[Errors]) -> None:
    """Checks the error counts. A shard whose write fails is loaded again, so some requests fail meanwhile."""
    assert beats.keys() | reads.keys() <= {Errors.NONE, *AWAY}, (beats, reads)
    assert beats[Errors.NONE] > 0.7 * beats.total(), beats
    assert reads[Errors.NONE] > 0.7 * reads.total(), reads
    assert commits.keys() <= {Errors.NONE, *AWAY}, commits


def test_a_full_disk(server: KcoordProcess, disk: SmallDisk) -> None:
    with Crowd(server) as crowd, WireClient(server.port, END_SECONDS) as client:
        crowd.wait_for_commits()
        offset = 1
        wait_until(lambda: commit(client, offset) == Errors.NONE, "a first commit")
        for _ in range(ROUNDS):
            wait_until(lambda: heartbeat(client, 0).error_code == Errors.NONE, "the steady member has joined")
            epoch = heartbeat(client, 0).member_epoch
            beats: Counter[Errors] = Counter()
            reads: Counter[Errors] = Counter()
            commits: Counter[Errors] = Counter()
            last = offset
            end = time.monotonic() + FULL_SECONDS
            while time.monotonic() < end or commits.total() - commits[Errors.NONE] < LEAST_FAILED:
                assert time.monotonic() < end + END_SECONDS, commits
                # A journal that cannot grow frees some space, so the disk is filled again before every request.
                disk.fill()
                beats[Errors(heartbeat(client, epoch).error_code)] += 1
                error = commit(client, offset + 1)
                commits[error] += 1
                last = offset + 1 if error == Errors.NONE else last  # there may be a few bytes left
                error, offsets = fetch(client)
                reads[error] += 1
                assert error != Errors.NONE or offsets == [last]
                rest(0.02)
            check(beats, reads, commits)
            disk.free()
            crowd.wait_for_commits()
            offset += 2
            wait_until(lambda: commit(client, offset) == Errors.NONE, "commits succeed again")  # noqa: B023
        crowd.finish()
    assert server.stop() == 0
