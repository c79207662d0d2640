# SPDX-License-Identifier: Apache-2.0
"""The ends of batches in a cluster whose leader knows the end of a transaction before its followers, and lost logs."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kcoord.client.leaders import ActiveProducers
from kcoord.pipeline.log_files import LogFolder, folders_at
from kcoord.pipeline.log_reader import Piece, read_pieces
from kcoord.pipeline.options import SourceOptions
from kcoord.pipeline.wire import follower as module
from kcoord.pipeline.wire.follower import BrokerFollower
from kcoord.pipeline.wire.place import BrokerPartition
from kcoord_protocol.control_records import ControlRecordType, end_txn_marker
from kcoord_protocol.messages import DescribeProducersResponse
from kcoord_protocol.record_batch import encode_batch, encode_control_batch
from tests.unit.logtools.support import commit_record
from tests.unit.pipeline.support import NOW_MS, TOPIC, LogWriter

Producer = DescribeProducersResponse.ProducerState
BUDGET = 1 << 20
HUNG, COMMITTED = 4, 5


@dataclass
class Leader:
    """The leader of a log. It has appended the whole log, and followers have the part below the high watermark."""

    folder: Path
    last_stable_offset: int
    high_watermark: int
    active: list[Producer] = field(default_factory=list)

    def offsets(
        self, topic: str, partitions: Collection[int], timestamp: int, *, read_committed: bool = False
    ) -> dict[int, int]:
        return {0: self.last_stable_offset if read_committed else self.high_watermark}

    def producers(self, topic: str, partitions: Collection[int]) -> dict[int, ActiveProducers]:
        return {0: self.active}

    def pieces(self, start: int, end: int, *, verify: bool) -> Iterator[Piece]:
        return read_pieces(LogFolder(folders_at([str(self.folder)], TOPIC)[0]), start, end)


def follow(leader: Leader, monkeypatch: pytest.MonkeyPatch, **options: str) -> BrokerFollower:
    def partitions(options: SourceOptions) -> list[BrokerPartition]:
        return [BrokerPartition(0, TOPIC, bytes(16), options.properties, 0, leader.high_watermark)]

    monkeypatch.setattr(module, "broker_partitions", partitions)
    monkeypatch.setattr(module, "client_of", lambda properties: leader)
    monkeypatch.setattr(module, "BrokerLog", lambda place: leader)
    return BrokerFollower(SourceOptions.parse({"kafka.bootstrap.servers": "broker:9092", **options}), resolves=True)


def transaction(producer_id: int) -> bytes:
    record = commit_record("g", "t", 0, 1)
    return encode_batch([record], is_transactional=True, producer_id=producer_id, producer_epoch=0)


def marker(producer_id: int) -> bytes:
    return encode_control_batch(
        ControlRecordType.COMMIT, end_txn_marker(0), timestamp_ms=NOW_MS, producer_id=producer_id, producer_epoch=0
    )


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A log with a transaction that hangs at offset 1, and one at offset 2 that the marker at offset 4 commits."""
    writer = LogWriter(tmp_path)
    for batch in (encode_batch([commit_record("g", "t", 0, 0)]), transaction(HUNG), transaction(COMMITTED)):
        writer.append(batch)
    writer.append(encode_batch([commit_record("g", "t", 0, 2)]))
    writer.append(marker(COMMITTED))
    writer.close()
    return tmp_path


def test_a_batch_ends_before_a_transaction_whose_marker_is_not_replicated_yet(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader knows no open transaction of the producer, but consumers cannot see the marker."""
    leader = Leader(log, last_stable_offset=2, high_watermark=4, active=[Producer(producer_id=COMMITTED)])
    follower = follow(leader, monkeypatch)
    follower.look()
    assert follower.advance({}, BUDGET, None) == {"0": 2}


def test_such_a_transaction_behind_an_abandoned_one_ends_the_batch(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last stable offset stays at the abandoned transaction, so only the log shows the other one."""
    active = [Producer(producer_id=HUNG, current_txn_start_offset=1, last_timestamp=0), Producer(producer_id=COMMITTED)]
    leader = Leader(log, last_stable_offset=1, high_watermark=4, active=active)
    follower = follow(leader, monkeypatch)
    follower.look()
    assert follower.advance({}, BUDGET, None) == {"0": 2}
    leader.high_watermark = 5
    follower.look()
    assert follower.advance({"0": 2}, BUDGET, None) == {"0": 5}


def test_markers_are_looked_for_up_to_the_end_at_which_a_batch_was_judged(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leader that has just been elected has a lower high watermark for a moment."""
    leader = Leader(log, last_stable_offset=5, high_watermark=5)
    follower = follow(leader, monkeypatch)
    follower.look()
    assert follower.advance({}, BUDGET, {"0": 3}) == {"0": 3}
    leader.high_watermark = 3
    follower.look()
    ((log_range, _),) = follower.ranges({}, {"0": 3})
    assert isinstance(log_range.log, BrokerPartition)
    assert log_range.log.end_offset == 5


@pytest.mark.parametrize(("high_watermark", "start"), [(3, 4), (0, 0)])
def test_a_log_that_lost_a_planned_batch_has_an_empty_range_for_it(
    log: Path, monkeypatch: pytest.MonkeyPatch, high_watermark: int, start: int
) -> None:
    """If the loss is accepted, the batch is done with what the other logs have."""
    follower = follow(Leader(log, 0, high_watermark), monkeypatch, failOnDataLoss="false")
    follower.look()
    ((log_range, _),) = follower.ranges({"0": start}, {"0": 5})
    assert (log_range.log.log_partition, log_range.start, log_range.end) == (0, start, start)
