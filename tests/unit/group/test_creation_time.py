# SPDX-License-Identifier: Apache-2.0
"""KIP-1327: a group's creation time is recorded once, whatever happens to the group, its log and the clock."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcoord.coordinator.group import records
from kcoord.coordinator.group.consumer.group import ConsumerGroup
from kcoord.coordinator.group.creation_limits import CreationLimits
from kcoord.coordinator.group.records import EpochReason
from kcoord.runtime.result import NO_CREATION_LIMIT, CoordinatorRecord
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import ConsumerGroupMetadataKey, ConsumerGroupMetadataValue
from tests.unit.group.group_context import GroupContext

GROUPS = st.sampled_from(["g", "h"])
MEMBERS = st.sampled_from(["a", "b"])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("join"), GROUPS, MEMBERS),
        st.tuples(st.just("subscribe"), GROUPS, MEMBERS),
        st.tuples(st.just("leave"), GROUPS, MEMBERS),
        st.tuples(st.just("delete"), GROUPS, st.none()),
        st.tuples(st.sampled_from(["grow", "restart", "compact", "wait", "clock back"]), st.none(), st.none()),
    ),
    max_size=25,
)


class Story:
    """The steps of a test, and the creation times that they must give."""

    def __init__(self) -> None:
        self.context = GroupContext({"t": 1, "u": 1})
        self.context.now_ms = 1_700_000_000_000
        self.expected: dict[str, int] = {}
        self._latest = -1

    def step(self, what: str, group: str | None, member: str | None) -> None:
        context = self.context
        match what:
            case "join":
                assert group and member
                response = context.join(group, member, ["t"])
                if group not in self.expected:
                    self._latest = self.expected[group] = max(self._latest, context.now_ms)
                assert response.group_creation_time_ms == self.expected[group]
            case "subscribe" | "leave":
                assert group and member
                epoch = self._epoch(group, member)
                if epoch and what == "subscribe":
                    context.heartbeat(group, member, epoch, names=["t", "u"], owned={})
                elif epoch:
                    context.heartbeat(group, member, -1)
            case "delete":
                assert group
                (result,) = context.run(lambda operation: context.shard.delete_groups(operation, [group]))
                if result.error_code == Errors.NONE:
                    self.expected.pop(group)
            case "grow":
                context.update_metadata({**context.topics, "t": context.topics["t"] + 1})
            case "restart":
                context.restart()
            case "compact":
                context.log = compacted(context.log)
                context.restart()
                self._latest = max(self.expected.values(), default=-1)
            case "wait":
                context.sleep(60_000)
            case "clock back":
                context.now_ms -= 500_000

    def _epoch(self, group: str, member: str) -> int | None:
        described = self.context.describe(group)
        return next((entry.member_epoch for entry in described.members if entry.member_id == member), None)


def compacted(log: list[CoordinatorRecord]) -> list[CoordinatorRecord]:
    """Returns the last record of each key, as the cleaner leaves them, without tombstones."""
    last = {(type(record.key).__name__, repr(record.key)): record for record in log}
    return [record for record in log if last[type(record.key).__name__, repr(record.key)] is record and record.value]


@given(STEPS)
def test_the_creation_time_is_recorded_once(steps: list[tuple[str, str | None, str | None]]) -> None:
    story = Story()
    for step in steps:
        try:
            story.step(*step)
        except KafkaError as error:
            # The member's session has ended, or its epoch is too old.
            assert error.error in (Errors.UNKNOWN_MEMBER_ID, Errors.FENCED_MEMBER_EPOCH, Errors.GROUP_ID_NOT_FOUND)
        for group, created_ms in list(story.expected.items()):
            described = story.context.describe(group)
            if described.error_code == Errors.GROUP_ID_NOT_FOUND:
                # The group was empty for so long that it expired.
                del story.expected[group]
            else:
                assert described.group_creation_time_ms == created_ms


def test_after_compaction_the_remaining_groups_limit_the_creation_time() -> None:
    """The guard against a clock that goes back knows only the remaining groups, and the partitions."""
    context = GroupContext({"t": 1})
    context.join("g", "a", ["t"])
    created_ms = context.now_ms
    context.log = compacted(context.log)
    context.restart()
    context.now_ms -= 5_000
    assert context.join("h", "b", ["t"]).group_creation_time_ms == created_ms


@pytest.mark.parametrize("epochs", [1, 3])
def test_an_unknown_creation_time_stays_unknown(epochs: int) -> None:
    """The records of a broker without KIP-1327 have no such tag; later records of such a group have none either."""
    context = GroupContext({"t": 1})
    context.join("g", "a", ["t"])
    for record in context.log:
        if isinstance(record.value, ConsumerGroupMetadataValue):
            record.value.creation_time_ms = -1
    context.restart()
    for number in range(epochs):
        assert context.join("g", f"b{number}", ["t"]).group_creation_time_ms == -1
    assert context.describe("g").group_creation_time_ms == -1
    context.restart()
    values = [record.value for record in context.log if isinstance(record.key, ConsumerGroupMetadataKey)]
    assert {value.creation_time_ms for value in values if isinstance(value, ConsumerGroupMetadataValue)} == {-1}


def test_the_record_has_the_creation_time() -> None:
    record = records.new_group_epoch_record("g", 1, 0, 1234, EpochReason.JOIN)
    assert isinstance(record.value, ConsumerGroupMetadataValue)
    assert ConsumerGroupMetadataValue.decode(record.value.encode(0), 0).creation_time_ms == 1234
    assert ConsumerGroup("g").creation_time_ms == -1


def test_a_group_is_not_created_after_partitions_that_are_being_created() -> None:
    """To this group the partitions are new, see `kcoord.metadata.creation_order`."""
    context = GroupContext({"t": 1})
    limits = CreationLimits()
    assert limits.limit_ms == NO_CREATION_LIMIT
    limits.hold(1, context.now_ms - 5)
    limits.hold(2, context.now_ms - 3)
    context.creation_limit_ms = limits.limit_ms
    assert context.join("g", "a", ["t"]).group_creation_time_ms == context.now_ms - 5
    limits.release(1)
    context.creation_limit_ms = limits.limit_ms
    assert context.join("h", "a", ["t"]).group_creation_time_ms == context.now_ms - 3
    limits.release(2)
    limits.release(2)
    context.creation_limit_ms = limits.limit_ms
    assert context.join("i", "a", ["t"]).group_creation_time_ms == context.now_ms
