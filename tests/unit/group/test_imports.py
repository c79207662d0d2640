# SPDX-License-Identifier: Apache-2.0
"""The offsets of a group are imported at most once, and never over offsets that the group has here."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kcoord.coordinator.group.imports import ImportedOffset, ImportOutcome, ImportRequest
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import GroupImportKey, OffsetCommitValue, OffsetDeleteRequest
from tests.unit.group.group_context import SERDE, GroupContext

GROUPS = ("g", "h")
TOPIC = "t3"


def offsets(*values: int, topic: str = TOPIC) -> list[ImportedOffset]:
    return [ImportedOffset(topic, partition, value, 4, f"m{value}") for partition, value in enumerate(values)]


def run_import(
    context: GroupContext, group_id: str, *values: int, again: bool = False, dry_run: bool = False
) -> ImportOutcome:
    request = ImportRequest(group_id, offsets(*values), again, dry_run)
    return context.run(lambda ctx: context.shard.import_offsets(ctx, request))


def delete(context: GroupContext, group_id: str) -> int:
    (result,) = context.run(lambda ctx: context.shard.delete_groups(ctx, [group_id]))
    return result.error_code


def test_offsets_come_with_epoch_metadata_and_topic_id_and_count_from_now() -> None:
    context = GroupContext({TOPIC: 3})
    assert run_import(context, "g", 5, 6) is ImportOutcome.IMPORTED
    assert isinstance(context.records[0].key, GroupImportKey)
    values = [record.value for record in context.records[1:]]
    assert values == [
        OffsetCommitValue(
            offset=offset,
            leader_epoch=4,
            metadata=f"m{offset}",
            commit_timestamp=context.now_ms,
            topic_id=context.topic_id(TOPIC),
        )
        for offset in (5, 6)
    ]
    assert context.fetch("g") == {(TOPIC, 0): (5, "m5"), (TOPIC, 1): (6, "m6")}


def test_a_topic_that_the_image_lacks_has_no_id() -> None:
    context = GroupContext()
    run_import(context, "g", 5)
    value = context.records[1].value
    assert isinstance(value, OffsetCommitValue)
    assert value.topic_id == bytes(16)


def test_a_group_with_members_is_not_overwritten() -> None:
    context = GroupContext({TOPIC: 3})
    context.join("g", "m", [TOPIC])
    assert run_import(context, "g", 5) is ImportOutcome.PRESENT
    assert context.fetch("g") == {}


def test_nothing_to_import_is_remembered() -> None:
    context = GroupContext({TOPIC: 3})
    assert run_import(context, "g") is ImportOutcome.NOTHING
    assert run_import(context, "g", 5) is ImportOutcome.DEPARTED
    assert context.shard.departed_groups() == ["g"]
    context.commit("g", {TOPIC: {0: 1}})
    assert context.shard.departed_groups() == []


def test_a_dry_run_writes_nothing() -> None:
    context = GroupContext({TOPIC: 3})
    assert run_import(context, "g", 5, dry_run=True) is ImportOutcome.IMPORTED
    assert context.log == []


def test_limits_apply_to_imported_groups() -> None:
    context = GroupContext({TOPIC: 3}, {"kcoord.max.id.bytes": "100", "kcoord.partition.max.groups": "1"})
    with pytest.raises(KafkaError) as error:
        run_import(context, "g" * 101, 5)
    assert error.value.error is Errors.INVALID_GROUP_ID
    run_import(context, "g", 5)
    with pytest.raises(KafkaError) as error:
        run_import(context, "h", 5)
    assert error.value.error is Errors.POLICY_VIOLATION


def test_imported_offsets_expire_the_retention_time_after_the_import() -> None:
    context = GroupContext(
        {TOPIC: 3}, {"offsets.retention.minutes": "10", "offsets.retention.check.interval.ms": "60000"}
    )
    context.run(context.shard.on_loaded)
    run_import(context, "g", 5)
    context.sleep(9 * 60_000)
    assert context.fetch("g")
    context.sleep(2 * 60_000)
    assert not context.fetch("g")
    assert run_import(context, "g", 5) is ImportOutcome.DEPARTED


@dataclass
class Model:
    """One group as its operator sees it."""

    was_here: bool = False
    exists: bool = False
    offsets: dict[tuple[str, int], int] = field(default_factory=dict)


class ImportMachine(RuleBasedStateMachine):
    """Random imports, commits, deletions and restarts of two groups, beside a model without records."""

    def __init__(self) -> None:
        super().__init__()
        self.context = GroupContext({TOPIC: 3})
        self.models = {group_id: Model() for group_id in GROUPS}
        self.offset = 0

    def _values(self, count: int) -> list[int]:
        """Returns new offsets, so that no two commits look alike."""
        self.offset += count
        return list(range(self.offset - count, self.offset))

    @rule(group_id=st.sampled_from(GROUPS), count=st.integers(0, 3), again=st.booleans())
    def fetch_and_import(self, group_id: str, count: int, again: bool) -> None:
        values, model = self._values(count), self.models[group_id]
        outcome = run_import(self.context, group_id, *values, again=again)
        if model.exists:
            assert outcome is ImportOutcome.PRESENT
        elif model.was_here and not again:
            assert outcome is ImportOutcome.DEPARTED
        else:
            assert outcome is (ImportOutcome.IMPORTED if values else ImportOutcome.NOTHING)
            model.exists = bool(values)
            model.offsets = {(TOPIC, partition): value for partition, value in enumerate(values)}
        model.was_here = True

    @rule(group_id=st.sampled_from(GROUPS), partition=st.integers(0, 2))
    def commit(self, group_id: str, partition: int) -> None:
        """Commits as the server does: a request that may create the group comes after an import of nothing."""
        model = self.models[group_id]
        if not model.was_here:
            self.fetch_and_import(group_id, 0, again=False)
        (value,) = self._values(1)
        self.context.commit(group_id, {TOPIC: {partition: value}})
        model.exists = True
        model.offsets[TOPIC, partition] = value

    @rule(group_id=st.sampled_from(GROUPS))
    def delete(self, group_id: str) -> None:
        model = self.models[group_id]
        assert delete(self.context, group_id) == (Errors.NONE if model.exists else Errors.GROUP_ID_NOT_FOUND)
        model.exists, model.offsets = False, {}

    @rule(group_id=st.sampled_from(GROUPS))
    def delete_all_offsets(self, group_id: str) -> None:
        """Leaves nothing in the log that names the group, but its import record."""
        model = self.models[group_id]
        topic = OffsetDeleteRequest.OffsetDeleteRequestTopic(
            name=TOPIC,
            partitions=[OffsetDeleteRequest.OffsetDeleteRequestPartition(partition_index=index) for index in range(3)],
        )
        request = OffsetDeleteRequest(group_id=group_id, topics=[topic])
        if model.exists:
            self.context.run(lambda ctx: self.context.shard.delete_offsets(ctx, request))
        model.offsets = {}

    @rule()
    def restart(self) -> None:
        """Restarts with a compacted log, in which no record names a group without offsets."""
        last = {SERDE.serialize(record)[0]: record for record in self.context.log}
        self.context.log = [record for record in last.values() if record.value is not None]
        self.context.restart()
        for model in self.models.values():
            model.exists = bool(model.offsets)

    @rule(group_id=st.sampled_from(GROUPS))
    def forget(self, group_id: str) -> None:
        model = self.models[group_id]
        forgotten = self.context.run(lambda ctx: self.context.shard.forget_imports(ctx, [group_id]))
        assert forgotten == ([group_id] if model.was_here and not model.exists else [])
        if forgotten:
            model.was_here = False

    @invariant()
    def offsets_are_those_of_the_model(self) -> None:
        for group_id, model in self.models.items():
            fetched = self.context.fetch(group_id)
            assert {place: offset for place, (offset, _) in fetched.items()} == model.offsets
        departed = {group_id for group_id, model in self.models.items() if model.was_here and not model.exists}
        assert set(self.context.shard.departed_groups()) == departed


TestImportMachine = ImportMachine.TestCase
