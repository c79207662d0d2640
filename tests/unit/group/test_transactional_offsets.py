# SPDX-License-Identifier: Apache-2.0
"""Offsets in transactions, in addition to `tests/transcripts/transactions`: verification, and any order of events."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kcoord.coordinator.group import records
from kcoord.coordinator.group.offsets.committed_offsets import CommittedOffset
from kcoord.runtime.result import CoordinatorRecord, OperationContext, Producer, new_end_transaction_marker
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import (
    GroupMetadataKey,
    OffsetCommitKey,
    OffsetDeleteRequest,
    OffsetFetchRequest,
    TxnOffsetCommitRequest,
)
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


def test_offsets_without_a_producer_count_at_once(context: GroupContext) -> None:
    """Only a coordinator that does not verify transactions accepts them. Kafka 4.4.0 counts them at once, too."""
    assert commit(context, Producer(-1, 0), {0: 5}) is Errors.NONE
    assert commit(context, Producer(-2, 0), {1: 6}) is Errors.NONE
    assert fetch(context, 0, 1) == [5, 6]
    assert [record.producer for record in context.log] == [None, None]


# -- in front of an upstream: the log may refuse a commit --------------------------------------------------------------


def commit_provisionally(context: GroupContext, producer: Producer, offsets: Mapping[int, int]) -> int:
    """Commits offsets about which the log has not decided. Returns their ticket."""
    request = request_of(producer, offsets, GROUP, -1, "", None)
    result = context.shard.commit_provisionally(OperationContext(context.now_ms, 3), request)
    assert result.provisional is not None
    assert result.provisional.transactional_id == "tx"
    for record in result.records:
        context.shard.replay(record)
    return result.provisional.ticket


def test_provisional_offsets_are_unstable_until_the_log_refuses_them(context: GroupContext) -> None:
    context.commit(GROUP, {"t3": {0: 5}})
    ticket = commit_provisionally(context, P, {0: 7, 1: 7})
    assert fetch(context, 0, 1) == [UNSTABLE, UNSTABLE]
    assert context.shard.snapshot() is None
    context.shard.decide(ticket, accepted=False)
    assert fetch(context, 0, 1) == [5, -1]


def test_accepted_offsets_wait_for_the_marker(context: GroupContext) -> None:
    context.shard.decide(commit_provisionally(context, P, {0: 7}), accepted=True)
    record = offset_record(0, 7)
    record.producer = P
    context.log.append(record)
    assert fetch(context, 0) == [UNSTABLE]
    marker = new_end_transaction_marker(P, 0, committed=True)
    context.shard.replay(marker)
    context.log.append(marker)
    assert fetch(context, 0) == [7]


def test_a_fenced_producer_commits_nothing_provisionally(context: GroupContext) -> None:
    context.shard.decide(commit_provisionally(context, Q, {0: 7}), accepted=True)
    with pytest.raises(KafkaError, match="INVALID_PRODUCER_EPOCH"):
        commit_provisionally(context, Producer(Q.producer_id, Q.producer_epoch - 1), {0: 8})


def test_a_commit_without_any_record_is_not_provisional(context: GroupContext) -> None:
    request = request_of(P, {0: 1}, GROUP, -1, "", None)
    request.topics[0].partitions[0].committed_metadata = "x" * 5000
    result = context.shard.commit_provisionally(OperationContext(context.now_ms, 3), request)
    assert (result.records, result.provisional) == ([], None)


def test_present_values_are_rewritten_unless_offsets_are_pending(context: GroupContext) -> None:
    context.commit(GROUP, {"t3": {0: 5, 1: 6}})
    commit_provisionally(context, P, {1: 7})
    keys = [OffsetCommitKey(group=GROUP, topic="t3", partition=partition) for partition in range(3)]
    result = context.shard.rewrite(OperationContext(context.now_ms), [*keys, GroupMetadataKey(group=GROUP)])
    assert result.records == [offset_record(0, 5), offset_record(2, None)], "a tombstone where nothing is committed"


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("commit"), st.sampled_from([P, Q]), st.integers(0, 2)),
        st.tuples(st.just("accept"), st.none(), st.just(0)),
        st.tuples(st.just("refuse"), st.none(), st.just(0)),
        st.tuples(st.just("end"), st.sampled_from([P, Q]), st.integers(0, 1)),
        st.tuples(st.just("plain"), st.none(), st.integers(0, 2)),
        st.tuples(st.just("delete"), st.none(), st.integers(0, 2)),
    ),
    max_size=25,
)


@settings(max_examples=200, deadline=None)
@given(EVENTS)
def test_the_state_is_that_of_the_log_when_everything_is_decided(
    events: list[tuple[str, Producer | None, int]],
) -> None:
    """A marker is in the log before everything that is not decided yet. What its producer has there is refused."""
    live, rebuilt = GroupContext({"t3": 3}), GroupContext({"t3": 3})
    log: list[CoordinatorRecord] = []
    undecided: list[tuple[int, CoordinatorRecord]] = []

    def decide(place: int, *, accepted: bool) -> None:
        ticket, record = undecided.pop(place)
        live.shard.decide(ticket, accepted=accepted)
        if not accepted:
            log[:] = [other for other in log if other is not record]

    for number, (kind, producer, argument) in enumerate(events):
        if kind == "commit" and producer is not None:
            ticket = commit_provisionally(live, producer, {argument: number})
            record = offset_record(argument, number)
            record.producer = producer
            log.append(record)
            undecided.append((ticket, record))
        elif kind in ("accept", "refuse") and undecided:
            decide(0, accepted=kind == "accept")
        elif kind == "end" and producer is not None:
            marker = new_end_transaction_marker(producer, 0, committed=bool(argument))
            live.shard.replay(marker)
            waiting = [id(record) for _, record in undecided]
            log.insert(next((place for place, record in enumerate(log) if id(record) in waiting), len(log)), marker)
            for place in reversed(range(len(undecided))):
                if undecided[place][1].producer == producer:
                    decide(place, accepted=False)
        elif kind in ("plain", "delete"):
            record = offset_record(argument, number if kind == "plain" else None)
            live.shard.replay(record)
            log.append(record)
    while undecided:
        decide(0, accepted=True)
    for record in log:
        rebuilt.shard.replay(record)
    for part in ("offsets", "pending"):
        assert live.shard.hard_state()[part] == rebuilt.shard.hard_state()[part]


def offset_record(partition: int, offset: int | None) -> CoordinatorRecord:
    if offset is None:
        return CoordinatorRecord(OffsetCommitKey(group=GROUP, topic="t3", partition=partition), None)
    topic_id = GroupContext({"t3": 3}).image.topics["t3"].id
    committed = CommittedOffset(offset, -1, "", 1_000_000, -1, topic_id)
    return records.new_offset_commit_record(GROUP, "t3", partition, committed)
