# SPDX-License-Identifier: Apache-2.0
"""Markers in partitions that another worker leads."""

from __future__ import annotations

import asyncio

import pytest

from kcoord.coordinator.transaction.work import WriteMarkers
from kcoord.runtime.result import Producer
from kcoord.server.shards.transaction_service import MARKERS_AT_A_TIME
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import WriteTxnMarkersRequest, WriteTxnMarkersResponse
from tests.unit.server.harness import Harness, image_of

OTHER_WORKER = 2


@pytest.mark.parametrize("failing", [None, 0, 2 * MARKERS_AT_A_TIME])
async def test_many_markers_are_sent_in_several_requests(monkeypatch: pytest.MonkeyPatch, failing: int | None) -> None:
    """The other worker writes the markers of a request in one turn of its event loop."""
    count = 2 * MARKERS_AT_A_TIME + 1
    image = image_of({"t": count})
    for partition in image.topics["t"].partitions:
        partition.leader = OTHER_WORKER
    asked: list[list[int]] = []

    class Peers:
        def ask(self, broker_id: int, request: WriteTxnMarkersRequest, version: int) -> object:
            (topic,) = request.markers[0].topics
            asked.append(topic.partition_indexes)
            result = WriteTxnMarkersResponse.WritableTxnMarkerTopicResult(
                name="t",
                partitions=[
                    WriteTxnMarkersResponse.WritableTxnMarkerPartitionResult(
                        partition_index=index,
                        error_code=Errors.NOT_LEADER_OR_FOLLOWER if index == failing else Errors.NONE,
                    )
                    for index in topic.partition_indexes
                ],
            )
            marker = WriteTxnMarkersResponse.WritableTxnMarkerResult(producer_id=1, topics=[result])
            future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
            future.set_result(WriteTxnMarkersResponse(markers=[marker]))
            return future

    transactions = Harness().broker.transactions
    monkeypatch.setattr(transactions, "_image", lambda: image)
    monkeypatch.setattr(transactions, "_peers", Peers())
    work = WriteMarkers("id", Producer(1, 0), True, 0, 2, {"t": frozenset(range(count))})
    if failing is None:
        await transactions._write_markers(work)
    else:
        with pytest.raises(KafkaError):
            await transactions._write_markers(work)
    assert [index for indexes in asked for index in indexes] == list(range(count))
    assert max(map(len, asked)) == MARKERS_AT_A_TIME
