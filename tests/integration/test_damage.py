# SPDX-License-Identifier: Apache-2.0
"""Bytes that changed on the disk.

The broker names the damaged partition and does not serve it, the other partitions are served, and a repair restores the
damaged partition.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from kcoord.cli import main
from kcoord.runtime.serde import partition_for
from kcoord.storage.journal import JOURNAL_FILE
from kcoord.storage.snapshot import SNAPSHOT_FILE
from kcoord_protocol.errors import Errors
from kcoord_protocol.messages import (
    FetchRequest,
    FetchResponse,
    OffsetFetchRequest,
    OffsetFetchResponse,
    ProduceRequest,
    ProduceResponse,
)
from kcoord_protocol.record_batch import Record, encode_batch
from tests.integration.conftest import MakeServer
from tests.integration.test_log_commands import TOPIC, commit, create_topic
from tests.integration.wire import WireClient
from tests.support.waiting import wait_until

SHARDS = 4
COMMITS = 20
GROUPS = [next(f"g{n}" for n in range(99) if partition_for(f"g{n}", SHARDS) == shard) for shard in range(SHARDS)]
REFUSED = (Errors.NOT_COORDINATOR, Errors.COORDINATOR_LOAD_IN_PROGRESS)


def flip(position: int) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[position] ^= 0x10
        path.write_bytes(data)

    return change


def repeat_first_batch(path: Path) -> None:
    """Appends the first batch again, so that the base offsets go back."""
    data = path.read_bytes()
    path.write_bytes(data + data[: 12 + int.from_bytes(data[8:12], "big")])


def offsets(client: WireClient, group_id: str) -> list[int] | int:
    """Returns the committed offsets, or the error."""
    requested = OffsetFetchRequest.OffsetFetchRequestGroup(group_id=group_id, topics=None, member_id=None)
    group = client.call(OffsetFetchRequest(groups=[requested]), 9, OffsetFetchResponse).groups[0]
    if group.error_code:
        return group.error_code
    return [part.committed_offset for topic in group.topics for part in topic.partitions]


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGKILL], ids=["clean", "killed"])
@pytest.mark.parametrize(
    "damage",
    [flip(8), flip(18), flip(75), flip(90), repeat_first_batch],
    ids=["length", "crc", "key", "value", "offsets going back"],
)
def test_d8_only_a_damaged_partition_of_groups_is_not_served(
    make_server: MakeServer, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], None], ending: signal.Signals
) -> None:
    server = make_server(log_cleaner_enable="false", offsets_topic_num_partitions=str(SHARDS)).start()
    with WireClient(server.port) as client:
        create_topic(client)
        for offset in range(COMMITS):
            for group_id in GROUPS:
                commit(client, offset, group_id)
    server.stop(ending)
    damaged, path = GROUPS[2], server.data / "__consumer_offsets-2" / f"{0:020d}.log"
    damage(path)
    # No snapshot or journal has a copy of the damaged bytes.
    for copy in (*server.data.glob(f"*/{SNAPSHOT_FILE}"), *server.data.glob(JOURNAL_FILE)):
        copy.unlink()
    server.start()
    with WireClient(server.port) as client:
        for group_id in GROUPS:
            if group_id != damaged:
                wait_until(lambda g=group_id: offsets(client, g) == [COMMITS - 1] * 3, f"{group_id} is served")  # type: ignore[misc]
                commit(client, COMMITS, group_id)
        wait_until(lambda: f"{path}: position " in server.log, "the log names the damage")
        for _ in range(20):
            assert offsets(client, damaged) in REFUSED, "no offsets are returned"
    (line, *_) = [line for line in server.log.splitlines() if f"{path}: position " in line]
    assert "offset " in line
    assert "kcoord log repair" in line
    assert server.stop() == 0
    assert main(["log", "verify", str(server.data)]) == 1
    assert str(path) in capsys.readouterr().out
    assert main(["log", "repair", str(server.data), "--yes"]) == 0
    assert main(["log", "verify", str(server.data)]) == 0
    server.start()
    with WireClient(server.port) as client:
        wait_until(lambda: offsets(client, damaged) == [COMMITS - 1] * 3, "the repaired partition is served")
        assert offsets(client, GROUPS[0]) == [COMMITS] * 3


def test_d8_damaged_bytes_that_the_journal_has_are_restored(
    make_server: MakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server = make_server(log_cleaner_enable="false", offsets_topic_num_partitions=str(SHARDS)).start()
    with WireClient(server.port) as client:
        create_topic(client)
        for offset in range(COMMITS):
            commit(client, offset, GROUPS[2])
    server.stop(signal.SIGKILL)
    path = server.data / "__consumer_offsets-2" / f"{0:020d}.log"
    whole = path.read_bytes()
    flip(18)(path)
    server.start()
    with WireClient(server.port) as client:
        wait_until(lambda: offsets(client, GROUPS[2]) == [COMMITS - 1] * 3, "the partition is served")
    assert "bytes came back from the journal" in server.log
    assert server.stop() == 0
    assert path.read_bytes() == whole
    assert main(["log", "verify", str(server.data)]) == 0
    assert "sound" in capsys.readouterr().err


def test_d8_only_a_damaged_partition_of_a_topic_is_not_served(make_server: MakeServer) -> None:
    server = make_server().start()
    with WireClient(server.port) as client:
        create_topic(client)
        for partition in (0, 1):
            for number in range(5):
                assert produce(client, partition, number) is Errors.NONE
    server.stop(signal.SIGKILL)
    path = server.data / f"{TOPIC}-0" / f"{0:020d}.log"
    flip(70)(path)
    server.start()
    with WireClient(server.port) as client:
        assert fetch(client, 1) is Errors.NONE
        assert produce(client, 1, 9) is Errors.NONE
        assert fetch(client, 0) not in (Errors.NONE, Errors.UNKNOWN_SERVER_ERROR)
        assert produce(client, 0, 9) not in (Errors.NONE, Errors.UNKNOWN_SERVER_ERROR)
    assert f"{path}: position 0, offset 0" in server.log
    assert "kcoord log repair" in server.log
    assert server.stop() == 0


def produce(client: WireClient, partition: int, number: int) -> Errors:
    data = encode_batch([Record(b"key", b"value %d" % number, [], 5, 0)])
    part = ProduceRequest.PartitionProduceData(index=partition, records=data)
    topic = ProduceRequest.TopicProduceData(name=TOPIC, partition_data=[part])
    answer = client.call(ProduceRequest(acks=-1, timeout_ms=5000, topic_data=[topic]), 9, ProduceResponse)
    return Errors(answer.responses[0].partition_responses[0].error_code)


def fetch(client: WireClient, partition: int) -> Errors:
    requested = FetchRequest.FetchPartition(partition=partition, fetch_offset=0, partition_max_bytes=1 << 20)
    topic = FetchRequest.FetchTopic(topic=TOPIC, partitions=[requested])
    answer = client.call(FetchRequest(max_wait_ms=0, max_bytes=1 << 20, topics=[topic]), 12, FetchResponse)
    return Errors(answer.responses[0].partitions[0].error_code)
