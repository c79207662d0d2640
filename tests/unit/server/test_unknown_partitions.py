# SPDX-License-Identifier: Apache-2.0
"""OffsetCommit, its fast path, TxnOffsetCommit and OffsetDelete reject the same partitions as unknown."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kcoord.coordinator.group.offsets.packed_commit import CommitPlan
from kcoord.runtime.waiting import Waiter
from kcoord.server.fast.offset_commit import read_commit
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import OffsetCommitRequest, OffsetDeleteRequest, TxnOffsetCommitRequest
from tests.unit.server.harness import TOPICS, Harness, topic_id

GROUP = "g"
NAMES = [*TOPICS, "absent"]
UNKNOWN = (Errors.UNKNOWN_TOPIC_OR_PARTITION, Errors.UNKNOWN_TOPIC_ID)
ASKED = st.dictionaries(st.sampled_from(NAMES), st.lists(st.integers(-2, 4), min_size=1, max_size=6, unique=True))

Asked = dict[str, list[int]]
Refused = dict[tuple[str, int], Errors]


class CommitWaiter(Waiter):
    def settle(self) -> None:
        """Does nothing: the tests do not wait for the commit."""

    def fail(self, error: KafkaError) -> None:
        raise AssertionError(error)


def expected(asked: Asked, error_of_topic: Errors) -> Refused:
    return {
        (name, index): error_of_topic if name not in TOPICS else Errors.UNKNOWN_TOPIC_OR_PARTITION
        for name, indexes in asked.items()
        for index in indexes
        if not 0 <= index < TOPICS.get(name, 0)
    }


def refused(response: Any, *, by_id: bool = False) -> Refused:
    names = {topic_id(name): name for name in NAMES}
    return {
        (names[topic.topic_id] if by_id else topic.name, partition.partition_index): Errors(partition.error_code)
        for topic in response.topics
        for partition in topic.partitions
        if partition.error_code in UNKNOWN
    }


def commit_request(asked: Asked) -> OffsetCommitRequest:
    return OffsetCommitRequest(
        group_id=GROUP,
        topics=[
            OffsetCommitRequest.OffsetCommitRequestTopic(
                name=name,
                topic_id=topic_id(name),
                partitions=[
                    OffsetCommitRequest.OffsetCommitRequestPartition(
                        partition_index=index, committed_offset=1, committed_metadata=""
                    )
                    for index in indexes
                ],
            )
            for name, indexes in asked.items()
        ],
    )


def transactional_request(asked: Asked) -> TxnOffsetCommitRequest:
    return TxnOffsetCommitRequest(
        transactional_id="t",
        group_id=GROUP,
        topics=[
            TxnOffsetCommitRequest.TxnOffsetCommitRequestTopic(
                name=name,
                topic_id=topic_id(name),
                partitions=[
                    TxnOffsetCommitRequest.TxnOffsetCommitRequestPartition(
                        partition_index=index, committed_offset=1, committed_metadata=""
                    )
                    for index in indexes
                ],
            )
            for name, indexes in asked.items()
        ],
    )


def delete_request(asked: Asked) -> OffsetDeleteRequest:
    return OffsetDeleteRequest(
        group_id=GROUP,
        topics=[
            OffsetDeleteRequest.OffsetDeleteRequestTopic(
                name=name,
                partitions=[
                    OffsetDeleteRequest.OffsetDeleteRequestPartition(partition_index=index) for index in indexes
                ],
            )
            for name, indexes in asked.items()
        ],
    )


def takes_fast_path(harness: Harness, asked: Asked, version: int) -> bool:
    body = commit_request(asked).encode(version)
    frame = read_commit(body, 0, version)
    committer = harness.groups.committer(GROUP)
    assert frame is not None and committer is not None
    cells = [body[at : at + 12] for at in frame.cells_at]
    return committer.commit(CommitPlan(frame.shape, version), cells, harness.now, CommitWaiter())


async def compare(asked: Asked) -> None:
    harness = await Harness(transaction_partition_verification_enable="false").open()
    try:
        assert refused(await harness.call(commit_request({"t1": [0]}), 9)) == {}
        by_name = expected(asked, Errors.UNKNOWN_TOPIC_OR_PARTITION)
        by_id = expected(asked, Errors.UNKNOWN_TOPIC_ID)
        if asked:
            # Comes first: the transaction below closes the fast path while it is open in the shard.
            for version in (9, 10):
                assert takes_fast_path(harness, asked, version) == (not by_name)
        for request, version in (
            (commit_request(asked), 9),
            (transactional_request(asked), 3),
            (delete_request(asked), 0),
        ):
            assert refused(await harness.call(request, version)) == by_name
        for request, version in ((commit_request(asked), 10), (transactional_request(asked), 6)):
            assert refused(await harness.call(request, version), by_id=True) == by_id
    finally:
        harness.groups.close()
        harness.worker.close(0)


@settings(max_examples=60, deadline=None)
@given(ASKED)
def test_all_apis_reject_the_same_partitions(asked: Asked) -> None:
    asyncio.run(compare(asked))


async def test_only_offset_delete_and_offset_commit_name_an_unknown_topic_without_partitions() -> None:
    harness = await Harness(transaction_partition_verification_enable="false").open()
    await harness.call(commit_request({"t1": [0]}), 9)
    asked: Asked = {"absent": [], "t1": []}
    assert [topic.name for topic in (await harness.call(delete_request(asked), 0)).topics] == ["absent"]
    assert [topic.name for topic in (await harness.call(commit_request(asked), 9)).topics] == ["absent"]
    assert (await harness.call(transactional_request(asked), 3)).topics == []
