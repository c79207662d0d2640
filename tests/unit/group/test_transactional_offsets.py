# SPDX-License-Identifier: Apache-2.0
"""Offsets in transactions, in addition to `tests/transcripts/transactions`: verification, and any order of events."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kcoord.runtime.result import Producer
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import OffsetDeleteRequest, OffsetFetchRequest, TxnOffsetCommitRequest
from tests.unit.group.group_context import GroupContext

GROUP = "g"
P, Q = Producer(1, 0), Producer(2, 5)


@pytest.fixture
def context() -> GroupContext:
    return GroupContext({"t3": 3, "t6": 6})


def request_of(
    producer: Producer, offsets: Mapping[int, int], group: str, generation: int, member: str, instance: str | None
) -> TxnOffsetCommitRequest:
    topic = TxnOffsetCommitRequest.TxnOffsetCommitRequestTopic(
        name="t3",
        partitions=[
            TxnOffsetCommitRequest.TxnOffsetCommitRequestPartition(partition_index=index, committed_offset=offset)
            for index, offset in offsets.items()
        ],
    )
    return TxnOffsetCommitRequest(
        transactional_id="tx",
        group_id=group,
        producer_id=producer.producer_id,
        producer_epoch=producer.producer_epoch,
        generation_id_or_member_epoch=generation,
        member_id=member,
        group_instance_id=instance,
        topics=[topic],
    )


def commit(
    context: GroupContext,
    producer: Producer,
    offsets: Mapping[int, int],
    *,
    group: str = GROUP,
    generation: int = -1,
    member: str = "",
    instance: str | None = None,
    api_version: int = 5,
) -> Errors:
    """Commits after verification; returns the error of the request or of its first partition."""
    request = request_of(producer, offsets, group, generation, member, instance)
    ticket = context.shard.start_verification(producer)
    try:
        response = context.run(
            lambda ctx: context.shard.commit_transactional_offsets(ctx, request, ticket), api_version
        )
    except KafkaError as error:
        return error.error
    finally:
        if ticket is not None:
            context.shard.finish_verification(producer, ticket)
    return Errors(response.topics[0].partitions[0].error_code)


def end(context: GroupContext, producer: Producer, *, committed: bool = True) -> None:
    context.run(lambda ctx: context.shard.end_transaction(ctx, producer, 0, committed=committed))


def fetch(context: GroupContext, *partitions: int, stable: bool = True, group: str = GROUP) -> list[int | Errors]:
    """Returns the offset or the error of each partition."""
    request = OffsetFetchRequest.OffsetFetchRequestGroup(
        group_id=group,
        topics=[OffsetFetchRequest.OffsetFetchRequestTopics(name="t3", partition_indexes=list(partitions))],
    )
    answer = context.run(lambda ctx: context.shard.fetch_offsets(ctx, request, stable))
    return [Errors(p.error_code) if p.error_code else p.committed_offset for p in answer.topics[0].partitions]


UNSTABLE = Errors.UNSTABLE_OFFSET_COMMIT


def test_a_first_commit_needs_a_ticket_that_no_marker_has_invalidated(context: GroupContext) -> None:
    request = request_of(P, {0: 1}, GROUP, -1, "", None)

    def error_with(ticket: int | None) -> Errors:
        with pytest.raises(KafkaError) as caught:
            context.run(lambda ctx: context.shard.commit_transactional_offsets(ctx, request, ticket))
        return caught.value.error

    assert error_with(None) is Errors.INVALID_TXN_STATE
    ticket = context.shard.start_verification(P)
    end(context, P, committed=False)
    assert error_with(ticket) is Errors.INVALID_TXN_STATE
    assert commit(context, P, {0: 1}) is Errors.NONE
    assert context.shard.start_verification(P) is None
    assert context.shard.start_verification(Producer(1, 1)) is not None
    assert commit(context, Producer(1, -1), {0: 1}) is Errors.INVALID_PRODUCER_EPOCH


def test_a_generation_without_a_group_is_rejected(context: GroupContext) -> None:
    for generation in (0, 1):
        assert commit(context, P, {0: 1}, generation=generation) is Errors.ILLEGAL_GENERATION
        assert commit(context, P, {0: 1}, generation=generation, api_version=6) is Errors.GROUP_ID_NOT_FOUND


def delete(context: GroupContext, *partitions: int) -> None:
    topic = OffsetDeleteRequest.OffsetDeleteRequestTopic(
        name="t3", partitions=[OffsetDeleteRequest.OffsetDeleteRequestPartition(partition_index=p) for p in partitions]
    )
    request = OffsetDeleteRequest(group_id=GROUP, topics=[topic])
    context.run(lambda ctx: context.shard.delete_offsets(ctx, request))


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("txn"), st.sampled_from([P, Q, Producer(3, 1)]), st.integers(0, 2)),
        st.tuples(st.just("end"), st.sampled_from([P, Q, Producer(3, 1)]), st.booleans()),
        st.tuples(st.just("plain"), st.none(), st.integers(0, 2)),
        st.tuples(st.just("delete"), st.none(), st.integers(0, 2)),
    ),
    max_size=25,
)


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_the_order_of_the_log_decides(steps: list[tuple[str, Producer | None, int]]) -> None:
    """The model: of all commits of a partition that count and follow its last deletion, the last in the log."""
    context = GroupContext({"t3": 3})
    writes: list[tuple[int, int, Producer | None]] = []
    counted: dict[int, set[int]] = {0: set(), 1: set(), 2: set()}
    for number, (kind, producer, argument) in enumerate(steps):
        if kind == "txn" and producer is not None:
            commit(context, producer, {argument: number})
            writes.append((number, argument, producer))
        elif kind == "end" and producer is not None:
            end(context, producer, committed=bool(argument))
            for offset, partition, writer in writes if argument else ():
                if writer == producer:
                    counted[partition].add(offset)
            writes = [write for write in writes if write[2] != producer]
        elif kind == "plain":
            context.commit(GROUP, {"t3": {argument: number}})
            counted[argument].add(number)
        elif context.fetch(GROUP) or writes:
            delete(context, argument)
            counted[argument].clear()
            writes = [write for write in writes if write[1] != argument]
    assert fetch(context, 0, 1, 2, stable=False) == [max(counted[p], default=-1) for p in range(3)]
    unstable = {partition for _, partition, _ in writes}
    assert [offset is UNSTABLE for offset in fetch(context, 0, 1, 2)] == [p in unstable for p in range(3)]
