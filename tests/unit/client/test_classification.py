# SPDX-License-Identifier: Apache-2.0
"""KIP-1327: the 13 rows of its matrix, and the classification flow with its inputs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcoord.client.consumer.classification import (
    Decision,
    Reason,
    RefreshMetadata,
    UseCommitted,
    UsePolicy,
    decide,
    topics_to_refresh,
)
from kcoord.client.consumer.subscription import Phase, SubscriptionState
from kcoord.client.reset_policy import EARLIEST, LATEST, NONE, ResetPolicy, ResetStrategy, parse_reset_policy
from kcoord.client.types import TopicIdPartition, TopicPartition

NOW_MS = 1_000_000_000
LEO, START = -1, -2
GROUP_MS = 5_000
HOUR_AGO, FIVE_SECONDS_AGO = NOW_MS - 3_600_000, NOW_MS - 5_000
NO_OFFSET = None
"""The policy none: NoOffsetForPartitionException."""

MATRIX = [
    # auto.offset.reset, auto.offset.reset.new.partitions, pre-existing partition, newly expanded partition
    ("latest", None, LEO, LEO),
    ("latest", "earliest", LEO, START),
    ("latest", "latest", LEO, LEO),
    ("latest", "by_duration:PT5S", LEO, FIVE_SECONDS_AGO),
    ("earliest", None, START, START),
    ("earliest", "earliest", START, START),
    ("earliest", "latest", START, LEO),
    ("earliest", "by_duration:PT5S", START, FIVE_SECONDS_AGO),
    ("by_duration:PT1H", None, HOUR_AGO, HOUR_AGO),
    ("by_duration:PT1H", "earliest", HOUR_AGO, START),
    ("by_duration:PT1H", "latest", HOUR_AGO, LEO),
    ("by_duration:PT1H", "by_duration:PT5S", HOUR_AGO, FIVE_SECONDS_AGO),
    ("none", "earliest", NO_OFFSET, START),
    ("none", "latest", NO_OFFSET, LEO),
    ("none", "by_duration:PT5S", NO_OFFSET, FIVE_SECONDS_AGO),
    ("none", None, NO_OFFSET, NO_OFFSET),
]


def classify(
    base: ResetPolicy, new: ResetPolicy | None, partition_ms: int | None, group_ms: int = GROUP_MS
) -> Decision:
    return decide(
        committed_offset=None,
        is_out_of_range=False,
        base_policy=base,
        new_partitions_policy=new,
        group_creation_time_ms=group_ms,
        partition_creation_time_ms=partition_ms,
    )


def timestamp(decision: Decision) -> int | None:
    assert isinstance(decision, UsePolicy)
    return NO_OFFSET if decision.policy is NONE else decision.policy.timestamp(NOW_MS)


@pytest.mark.parametrize(("base", "new", "pre_existing", "newly_expanded"), MATRIX)
def test_matrix(base: str, new: str | None, pre_existing: int | None, newly_expanded: int | None) -> None:
    base_policy = parse_reset_policy("base", base)
    new_policy = None if new is None else parse_reset_policy("new", new, none_allowed=False)
    assert timestamp(classify(base_policy, new_policy, GROUP_MS - 1)) == pre_existing
    assert timestamp(classify(base_policy, new_policy, GROUP_MS)) == pre_existing
    assert timestamp(classify(base_policy, new_policy, GROUP_MS + 1)) == newly_expanded


policies = st.one_of(
    st.sampled_from([LATEST, EARLIEST]),
    st.integers(0, 10**9).map(lambda duration_ms: ResetPolicy(ResetStrategy.BY_DURATION, duration_ms)),
)
base_policies = st.one_of(policies, st.just(NONE))
times = st.one_of(st.just(-1), st.integers(0, 20))


@given(st.integers(0, 10), base_policies, st.none() | policies, times, st.none() | times)
def test_step_1_a_committed_offset_in_range_is_used(
    offset: int, base: ResetPolicy, new: ResetPolicy | None, group_ms: int, partition_ms: int | None
) -> None:
    assert decide(
        committed_offset=offset,
        is_out_of_range=False,
        base_policy=base,
        new_partitions_policy=new,
        group_creation_time_ms=group_ms,
        partition_creation_time_ms=partition_ms,
    ) == UseCommitted(offset)


@given(st.none() | st.integers(0, 10), base_policies, st.none() | policies, times, st.none() | times)
def test_step_2_out_of_range_uses_the_base_policy(
    offset: int | None, base: ResetPolicy, new: ResetPolicy | None, group_ms: int, partition_ms: int | None
) -> None:
    assert decide(
        committed_offset=offset,
        is_out_of_range=True,
        base_policy=base,
        new_partitions_policy=new,
        group_creation_time_ms=group_ms,
        partition_creation_time_ms=partition_ms,
    ) == UsePolicy(base, Reason.OUT_OF_RANGE)


@given(base_policies, times, st.none() | times)
def test_step_3_without_the_option_the_base_policy_applies(
    base: ResetPolicy, group_ms: int, partition_ms: int | None
) -> None:
    assert classify(base, None, partition_ms, group_ms) == UsePolicy(base, Reason.NOT_SET)


@given(base_policies, policies, times, st.none() | times)
def test_steps_4_and_5(base: ResetPolicy, new: ResetPolicy, group_ms: int, partition_ms: int | None) -> None:
    decision = classify(base, new, partition_ms, group_ms)
    if group_ms == -1:
        assert decision == UsePolicy(base, Reason.UNKNOWN_TIME)
    elif partition_ms is None:
        assert decision == RefreshMetadata()
    elif partition_ms == -1:
        assert decision == UsePolicy(base, Reason.UNKNOWN_TIME)
    elif partition_ms > group_ms:
        assert decision == UsePolicy(new, Reason.NEWLY_EXPANDED)
    else:
        assert decision == UsePolicy(base, Reason.PRE_EXISTING)


@given(st.none() | st.integers(0, 10), st.booleans(), base_policies, policies, times, st.none() | times)
def test_times_do_not_count_if_the_coordinator_lists_new_partitions(
    offset: int | None,
    is_out_of_range: bool,
    base: ResetPolicy,
    new: ResetPolicy,
    group_ms: int,
    partition_ms: int | None,
) -> None:
    for is_listed_as_new in (True, False):
        decision = decide(
            committed_offset=offset,
            is_out_of_range=is_out_of_range,
            base_policy=base,
            new_partitions_policy=new,
            group_creation_time_ms=group_ms,
            partition_creation_time_ms=partition_ms,
            is_listed_as_new=is_listed_as_new,
        )
        if is_out_of_range:
            assert decision == UsePolicy(base, Reason.OUT_OF_RANGE)
        elif offset is not None:
            assert decision == UseCommitted(offset)
        elif is_listed_as_new:
            assert decision == UsePolicy(new, Reason.NEWLY_EXPANDED)
        else:
            assert decision == UsePolicy(base, Reason.PRE_EXISTING)


class TestForcedRefresh:
    KNOWN = TopicIdPartition(b"k" * 16, 0)
    GROWN = TopicIdPartition(b"k" * 16, 1)
    OLD = TopicIdPartition(b"o" * 16, 0)

    def creation_time_ms(self, partition: TopicIdPartition) -> int | None:
        return {self.KNOWN: 7, self.OLD: -1}.get(partition)

    def test_refreshes_topics_whose_partitions_are_not_in_the_cache(self) -> None:
        topic_ids = topics_to_refresh([self.KNOWN, self.GROWN, self.OLD], self.creation_time_ms, EARLIEST)
        assert topic_ids == {self.GROWN.topic_id}

    def test_does_not_refresh_topics_in_the_cache_even_with_unknown_times(self) -> None:
        assert topics_to_refresh([self.KNOWN, self.OLD], self.creation_time_ms, EARLIEST) == set()

    def test_refreshes_nothing_without_the_option(self) -> None:
        assert topics_to_refresh([self.GROWN], self.creation_time_ms, None) == set()


class TestSubscriptionState:
    """Jumps, look-ups and the end of an assignment make requests in flight void."""

    PARTITION = TopicPartition("t", 0)

    def assigned(self) -> SubscriptionState:
        state = SubscriptionState()
        state.subscribe({"t"})
        state.add({self.PARTITION: b"t" * 16}, fenced_off=False)
        return state

    def test_a_new_partition_needs_its_committed_offset(self) -> None:
        state = self.assigned()
        assert state[self.PARTITION].phase is Phase.COMMITTED
        assert state.consumed() == {}
        state[self.PARTITION].jump(5, 2)
        assert state.consumed() == {self.PARTITION: (5, "", 2)}

    def test_each_jump_begins_a_new_generation(self) -> None:
        partition = self.assigned()[self.PARTITION]
        seen = [partition.generation]
        partition.jump(1)
        seen.append(partition.generation)
        partition.look_up(EARLIEST, NOW_MS)
        seen.append(partition.generation)
        partition.out_of_range()
        seen.append(partition.generation)
        assert len(set(seen)) == 4

    def test_a_look_up_by_duration_keeps_its_time(self) -> None:
        partition = self.assigned()[self.PARTITION]
        partition.look_up(replace(LATEST, strategy=ResetStrategy.BY_DURATION, duration_ms=10), NOW_MS)
        assert partition.look_up_timestamp == NOW_MS - 10

    def test_paused_and_fenced_off_partitions_are_not_fetched(self) -> None:
        state = self.assigned()
        partition = state[self.PARTITION]
        partition.jump(0)
        seen = [partition.is_fetchable]
        partition.is_paused = True
        seen.append(partition.is_fetchable)
        assert state.paused() == {self.PARTITION}
        partition.is_paused = False
        state.fence_off([self.PARTITION])
        assert [*seen, partition.is_fetchable] == [True, False, False]

    def test_a_new_assignment_by_the_application_keeps_positions(self) -> None:
        state = SubscriptionState()
        other = TopicPartition("t", 1)
        state.assign_from_user({self.PARTITION: b"t" * 16})
        state[self.PARTITION].jump(3)
        state.assign_from_user({self.PARTITION: b"t" * 16, other: b"t" * 16})
        assert state[self.PARTITION].position == 3
        assert [partition_state.phase for _, partition_state in state.items()] == [Phase.FETCH, Phase.COMMITTED]
        state.unsubscribe()
        assert (state.assignment, state.uses_group) == (frozenset(), False)
