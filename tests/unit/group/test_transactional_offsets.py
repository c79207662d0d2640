# SPDX-License-Identifier: Apache-2.0
"""Offsets within transactions: pending until the marker, with the facts recorded from Kafka 4.3.1."""

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
    """Commits with the agreement of the transaction coordinator; the error of the request or of its first partition."""
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
    """The offset of each partition, or its error."""
    wanted = OffsetFetchRequest.OffsetFetchRequestGroup(
        group_id=group,
        topics=[OffsetFetchRequest.OffsetFetchRequestTopics(name="t3", partition_indexes=list(partitions))],
    )
    answer = context.run(lambda ctx: context.shard.fetch_offsets(ctx, wanted, stable))
    return [Errors(p.error_code) if p.error_code else p.committed_offset for p in answer.topics[0].partitions]


def fetch_all(context: GroupContext) -> dict[int, int | Errors]:
    wanted = OffsetFetchRequest.OffsetFetchRequestGroup(group_id=GROUP, topics=None)
    answer = context.run(lambda ctx: context.shard.fetch_offsets(ctx, wanted, True))
    return {
        p.partition_index: Errors(p.error_code) if p.error_code else p.committed_offset
        for topic in answer.topics
        for p in topic.partitions
    }


UNSTABLE = Errors.UNSTABLE_OFFSET_COMMIT


def test_an_offset_is_pending_until_the_commit(context: GroupContext) -> None:
    assert commit(context, P, {0: 10, 1: 11}) is Errors.NONE
    assert fetch(context, 0, 1, 2) == [UNSTABLE, UNSTABLE, -1]
    assert fetch(context, 0, 1, stable=False) == [-1, -1]
    assert fetch_all(context) == {}
    context.restart()
    assert fetch(context, 0) == [UNSTABLE]
    end(context, P)
    assert fetch(context, 0, 1, 2) == [10, 11, -1]
    assert fetch_all(context) == {0: 10, 1: 11}


def test_an_abort_drops_what_was_pending(context: GroupContext) -> None:
    context.commit(GROUP, {"t3": {0: 5}})
    commit(context, P, {0: 10})
    assert fetch_all(context) == {0: UNSTABLE}
    end(context, P, committed=False)
    assert fetch(context, 0) == [5]


def test_the_last_commit_of_a_transaction_counts(context: GroupContext) -> None:
    commit(context, P, {0: 10})
    commit(context, P, {0: 12})
    end(context, P)
    assert fetch(context, 0) == [12]


def test_a_later_commit_outlives_the_transaction(context: GroupContext) -> None:
    commit(context, P, {0: 10, 1: 11})
    context.commit(GROUP, {"t3": {0: 300}})
    assert fetch(context, 0) == [UNSTABLE]
    assert fetch(context, 0, stable=False) == [300]
    end(context, P)
    assert fetch(context, 0, 1) == [300, 11]


@pytest.mark.parametrize("first", [P, Q])
def test_of_two_transactions_the_later_offset_counts(context: GroupContext, first: Producer) -> None:
    commit(context, P, {0: 10})
    commit(context, Q, {0: 20})
    end(context, first)
    assert fetch(context, 0) == [UNSTABLE]
    end(context, Q if first is P else P)
    assert fetch(context, 0) == [20]


def test_only_what_is_committed_decides_between_two_transactions(context: GroupContext) -> None:
    commit(context, P, {0: 10})
    commit(context, Q, {0: 20})
    end(context, Q, committed=False)
    end(context, P)
    assert fetch(context, 0) == [10]


# --- who may ----------------------------------------------------------------------------------------------------------


def test_a_first_commit_needs_an_agreement_that_no_marker_has_voided(context: GroupContext) -> None:
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


def test_a_marker_of_an_older_epoch_is_refused(context: GroupContext) -> None:
    commit(context, Q, {0: 1})
    with pytest.raises(KafkaError) as caught:
        end(context, Producer(2, 4))
    assert caught.value.error is Errors.INVALID_PRODUCER_EPOCH
    end(context, Producer(2, 6))
    assert fetch(context, 0) == [1]


def test_a_marker_for_nothing_writes_nothing(context: GroupContext) -> None:
    end(context, P)
    assert context.log == []


def test_groups_without_members_and_simple_ones(context: GroupContext) -> None:
    assert commit(context, P, {0: 1}, generation=1) is Errors.ILLEGAL_GENERATION
    assert commit(context, P, {0: 1}, member="m", instance="i") is Errors.NONE
    assert commit(context, P, {0: 1}, member="m") is Errors.NONE
    assert commit(context, P, {0: 1}, generation=1) is Errors.UNKNOWN_MEMBER_ID


def test_members_of_consumer_groups(context: GroupContext) -> None:
    context.join(GROUP, "a", ["t3"])
    epoch = context.describe(GROUP).members[0].member_epoch
    assert commit(context, P, {0: 1}, generation=epoch, member="a") is Errors.NONE
    assert commit(context, P, {0: 1}) is Errors.NONE
    for generation in (epoch - 1, epoch + 1, -1):
        assert commit(context, P, {0: 1}, generation=generation, member="a") is Errors.ILLEGAL_GENERATION
    assert commit(context, P, {0: 1}, generation=epoch, member="b") is Errors.UNKNOWN_MEMBER_ID
    assert commit(context, P, {0: 1}, instance="i") is Errors.UNKNOWN_MEMBER_ID


def test_metadata_has_a_limit() -> None:
    context = GroupContext({"t3": 3}, {"offset.metadata.max.bytes": "3"})
    request = request_of(P, {0: 1, 1: 2}, GROUP, -1, "", None)
    request.topics[0].partitions[0].committed_metadata = "äö"
    ticket = context.shard.start_verification(P)
    response = context.run(lambda ctx: context.shard.commit_transactional_offsets(ctx, request, ticket))
    codes = [partition.error_code for partition in response.topics[0].partitions]
    assert codes == [Errors.OFFSET_METADATA_TOO_LARGE, Errors.NONE]


# --- deletion ---------------------------------------------------------------------------------------------------------


def delete(context: GroupContext, *partitions: int) -> None:
    topic = OffsetDeleteRequest.OffsetDeleteRequestTopic(
        name="t3", partitions=[OffsetDeleteRequest.OffsetDeleteRequestPartition(partition_index=p) for p in partitions]
    )
    request = OffsetDeleteRequest(group_id=GROUP, topics=[topic])
    context.run(lambda ctx: context.shard.delete_offsets(ctx, request))


def test_deleting_an_offset_deletes_what_is_pending(context: GroupContext) -> None:
    context.commit(GROUP, {"t3": {0: 5}})
    commit(context, P, {0: 10, 1: 11, 2: 12})
    delete(context, 0, 1)
    assert fetch(context, 0, 1, 2) == [-1, -1, UNSTABLE]
    end(context, P)
    assert fetch(context, 0, 1, 2) == [-1, -1, 12]


def test_deleting_a_group_deletes_what_is_pending(context: GroupContext) -> None:
    context.commit(GROUP, {"t3": {0: 5}})
    commit(context, P, {0: 10, 1: 11})
    (answer,) = context.run(lambda ctx: context.shard.delete_groups(ctx, [GROUP]))
    assert answer.error_code == 0
    assert len(context.records) == 3
    end(context, P)
    assert fetch(context, 0, 1) == [-1, -1]
    (answer,) = context.run(lambda ctx: context.shard.delete_groups(ctx, [GROUP]))
    assert answer.error_code == Errors.GROUP_ID_NOT_FOUND


def test_deleting_a_topic_deletes_what_is_pending(context: GroupContext) -> None:
    context.commit(GROUP, {"t3": {0: 5}})
    commit(context, P, {0: 10, 1: 11})
    context.update_metadata({"t6": 6})
    end(context, P)
    assert fetch(context, 0, 1) == [-1, -1]


def test_pending_offsets_neither_expire_nor_let_their_group_go(context: GroupContext) -> None:
    context.commit(GROUP, {"t3": {0: 5, 1: 6}})
    commit(context, P, {0: 10})
    context.restart()
    context.sleep(8 * 24 * 3600 * 1000)
    assert fetch(context, 0, 1, stable=False) == [5, -1]
    end(context, P, committed=False)
    context.sleep(24 * 3600 * 1000)
    assert fetch(context, 0, stable=False) == [-1]


def test_errors_of_consumer_groups_since_v6(context: GroupContext) -> None:
    """Observed in Kafka 4.4.0 (KIP-1319)."""
    for version, unknown, stale in (
        (5, Errors.ILLEGAL_GENERATION, Errors.ILLEGAL_GENERATION),
        (6, Errors.GROUP_ID_NOT_FOUND, Errors.STALE_MEMBER_EPOCH),
    ):
        group = f"g{version}"
        assert commit(context, P, {0: 1}, group=group, generation=3, member="a", api_version=version) is unknown
        epoch = context.join(group, "a", ["t3"]).member_epoch
        for generation in (epoch - 1, epoch + 1, -1):
            error = commit(context, P, {0: 1}, group=group, generation=generation, member="a", api_version=version)
            assert error is stale, generation
        missing = commit(context, P, {0: 1}, group=group, generation=epoch, member="b", api_version=version)
        assert missing is Errors.UNKNOWN_MEMBER_ID


def test_an_older_epoch_is_good_for_partitions_that_the_member_has_kept(context: GroupContext) -> None:
    """As for OffsetCommit; observed in Kafka 4.4.0."""
    context.join(GROUP, "a", ["t3"])
    context.join(GROUP, "b", ["t3"])
    context.heartbeat(GROUP, "a", 2)
    assert context.heartbeat(GROUP, "a", 2, owned={"t3": [0, 1]}).member_epoch == 3
    for version, stale in ((5, Errors.ILLEGAL_GENERATION), (6, Errors.STALE_MEMBER_EPOCH)):
        for offsets, generation, error in (
            ({0: 1}, 2, Errors.NONE),
            ({0: 1, 2: 1}, 2, stale),
            ({0: 1, 2: 1}, 3, Errors.NONE),
            ({0: 1}, 1, stale),
            ({0: 1}, -1, stale),
        ):
            answer = commit(context, P, offsets, generation=generation, member="a", api_version=version)
            assert answer is error, (version, offsets, generation)


# --- any order --------------------------------------------------------------------------------------------------------

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
def test_any_order_gives_what_the_log_says(steps: list[tuple[str, Producer | None, int]]) -> None:
    """The model: of all commits of a partition that count and came after its last deletion, the last in the log."""
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
    assert [found is UNSTABLE for found in fetch(context, 0, 1, 2)] == [p in unstable for p in range(3)]
