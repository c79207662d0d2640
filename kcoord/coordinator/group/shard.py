# SPDX-License-Identifier: Apache-2.0
"""One shard of the group coordinator: every group whose id maps to one partition of `__consumer_offsets`.

One method per operation, each from state and request to a CoordinatorResult; `replay` alone changes hard state. Here is
what the runtime asks of a state machine, and what concerns groups as wholes; the rest is in the two base classes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, TypeAlias

from kcoord.coordinator.group import describe, snapshot
from kcoord.coordinator.group.classic.group import ClassicGroup
from kcoord.coordinator.group.consumer import target_assignment
from kcoord.coordinator.group.consumer.group import ConsumerGroup
from kcoord.coordinator.group.consumer.resolved_regexes import update_resolved_regexes
from kcoord.coordinator.group.consumer.target_assignment import ComputedTarget, TargetInput
from kcoord.coordinator.group.group import Group
from kcoord.coordinator.group.offsets.records import OffsetCommitReader
from kcoord.coordinator.group.regex import ResolvedRegexes
from kcoord.coordinator.group.shard_members import ShardMembers
from kcoord.coordinator.group.shard_offsets import ShardOffsets
from kcoord.coordinator.group.timers import OFFSETS_EXPIRATION
from kcoord.metadata.delta import TopicDelta
from kcoord.metadata.image import MetadataImage
from kcoord.runtime.result import CoordinatorRecord, CoordinatorResult, OperationContext, Task, TimerKey
from kcoord.runtime.snapshot import PackedState, SnapshotPart
from kcoord_protocol.errors import Errors
from kcoord_protocol.messages import ConsumerGroupDescribeResponse, DeleteGroupsResponse, ListGroupsResponse

if TYPE_CHECKING:
    from kcoord_protocol.messages import DescribeGroupsResponse

DescribedGroups: TypeAlias = list[ConsumerGroupDescribeResponse.DescribedGroup]


class GroupCoordinatorShard(ShardMembers, ShardOffsets):
    """The state machine of one partition of `__consumer_offsets`. Implements `StateMachine` of the runtime."""

    # The state machine.

    def replay(self, record: CoordinatorRecord) -> None:
        self._replay.apply(record)

    def batch_replay(self) -> Callable[[bytes, int], bool]:
        return OffsetCommitReader(self._groups, self._offsets, self._pending).replay

    def snapshot(self) -> Iterator[SnapshotPart] | None:
        """Pending offsets of a transaction are told by the log alone."""
        return None if self._pending else snapshot.parts(self._groups, self._offsets)

    def restore(self, part: PackedState) -> bool:
        if part.kind != snapshot.OFFSETS:
            return False
        snapshot.restore_offsets(self._groups, self._offsets, part.data)
        return True

    def on_loaded(self, context: OperationContext) -> CoordinatorResult[None]:
        for group in self._consumer_groups():
            if group.is_converged:
                group.completed_epoch = group.group_epoch
        self._replay.counters = self.counters
        return CoordinatorResult(
            None, timers=[self._next_expiration(context), *self._timers_after_load(context.now_ms)]
        )

    def fire_timer(self, context: OperationContext, key: TimerKey) -> CoordinatorResult[None]:
        """A member was silent or slow and is removed, or a barrier of a classic group opens."""
        if key == OFFSETS_EXPIRATION:
            return self.expire_offsets(context)
        return self._group_timer_fired(context, key)

    def target_input(self, group_id: str) -> TargetInput | None:
        """What a ComputeTarget task of the group works on, as of now; None where it needs no new target any more."""
        group = self._groups.get(group_id)
        if not isinstance(group, ConsumerGroup) or group.group_epoch == group.assignment_epoch:
            return None
        assignor = group.preferred_server_assignor(self._config.consumer_assignors)
        return target_assignment.target_input(group, group.group_epoch, assignor, self._image)

    def complete_task(self, context: OperationContext, task: Task, value: object) -> CoordinatorResult[None]:
        """The topics that a group's regular expressions match were found, or its target was computed; a failed task is
        tried again by a later heartbeat.
        """
        group = self._groups.get(task.key.group_id)
        if isinstance(group, ConsumerGroup) and isinstance(value, ResolvedRegexes):
            group.regex_refreshed_at_ms = context.now_ms
            group.regex_stale = value.version < self._image.epoch
            return update_resolved_regexes(self._image, group, value, context.now_ms)
        if isinstance(group, ConsumerGroup) and isinstance(value, ComputedTarget):
            return target_assignment.install(group, value, context.now_ms)
        return CoordinatorResult(None)

    def on_metadata_update(
        self, context: OperationContext, image: MetadataImage, delta: TopicDelta | None = None
    ) -> CoordinatorResult[None]:
        """Groups that depend on a changed topic look again at their next heartbeat; offsets of deleted topics go.

        If brokers have other racks, all groups look again.

        `delta` leads to `image`; it helps where it begins at the image that this shard has.
        """
        old, self._image = self._image, image
        self.image_epoch = image.epoch
        if delta is None or delta.old is not old:
            delta = TopicDelta.between(old, image)
        if not delta.changed and not delta.racks_changed:
            return CoordinatorResult(None)
        for group in self._consumer_groups():
            if delta.come_or_gone:
                group.regex_stale = True
            group.metadata_stale = (
                group.metadata_stale
                or delta.racks_changed
                or not delta.changed.isdisjoint(group.subscribed_topic_names())
            )
        return CoordinatorResult(
            None, [tombstone for topic in delta.gone for tombstone in self._deletion.of_topic(topic)]
        )

    # Metrics.

    def count_groups(self) -> Mapping[tuple[str, str], int]:
        """Groups by protocol and state, in Kafka's words."""
        return Counter((group.type.value.lower(), group.state.value) for group in self._groups.values())

    # Groups of both types.

    def describe_groups(
        self, context: OperationContext, group_ids: list[str]
    ) -> CoordinatorResult[list[DescribeGroupsResponse.DescribedGroup]]:
        """DescribeGroups: classic groups, one per id, in that order; other groups are Dead to this API."""
        return CoordinatorResult([self._describe_classic(group_id, context.api_version) for group_id in group_ids])

    def _describe_classic(self, group_id: str, api_version: int) -> DescribeGroupsResponse.DescribedGroup:
        group = self._groups.get(group_id)
        if isinstance(group, ClassicGroup):
            return describe.classic_group(group)
        text = f"Group {group_id} not found." if group is None else f"Group {group_id} is not a classic group."
        return describe.no_classic_group(group_id, text, api_version)

    def consumer_group_describe(
        self, context: OperationContext, group_ids: list[str]
    ) -> CoordinatorResult[DescribedGroups]:
        """One described group per id, in that order; GROUP_ID_NOT_FOUND for what is no consumer group."""
        return CoordinatorResult([self._describe(group_id) for group_id in group_ids])

    def _describe(self, group_id: str) -> ConsumerGroupDescribeResponse.DescribedGroup:
        if not group_id:
            return ConsumerGroupDescribeResponse.DescribedGroup(error_code=Errors.INVALID_GROUP_ID)
        group = self._groups.get(group_id)
        if isinstance(group, ConsumerGroup):
            return describe.consumer_group(group, self._image, self._config.consumer_assignors)
        text = f"Group {group_id} not found." if group is None else f"Group {group_id} is not a consumer group."
        return ConsumerGroupDescribeResponse.DescribedGroup(
            group_id=group_id, error_code=Errors.GROUP_ID_NOT_FOUND, error_message=text
        )

    def list_groups(
        self, context: OperationContext, states_filter: list[str], types_filter: list[str]
    ) -> CoordinatorResult[list[ListGroupsResponse.ListedGroup]]:
        """All groups that match both filters; case does not matter, an empty filter matches all.

        Ids descend, as members do in `describe`.
        """
        states, types = ({name.lower() for name in names} for names in (states_filter, types_filter))
        listed = []
        for group_id, group in sorted(self._groups.items(), reverse=True):
            if types and group.type.value not in types:
                continue
            state = group.state.value
            if states and state.lower() not in states:
                continue
            listed.append(
                ListGroupsResponse.ListedGroup(
                    group_id=group_id,
                    protocol_type=group.protocol_type,
                    group_state=state,
                    group_type=group.type.value,
                )
            )
        return CoordinatorResult(listed)

    def delete_groups(
        self, context: OperationContext, group_ids: list[str]
    ) -> CoordinatorResult[list[DeleteGroupsResponse.DeletableGroupResult]]:
        """KIP-229: an empty group goes with its offsets; one result per distinct id."""
        result: CoordinatorResult[list[DeleteGroupsResponse.DeletableGroupResult]] = CoordinatorResult(
            [], is_refusable=True
        )
        for group_id in dict.fromkeys(group_ids):
            group = self._groups.get(group_id)
            error, message = Errors.NONE, None
            if group is None:
                error, message = Errors.GROUP_ID_NOT_FOUND, f"Group {group_id} not found."
            elif not group.is_empty():
                error, message = Errors.NON_EMPTY_GROUP, f"The group {group_id} is not empty."
            else:
                result.records += self._deletion.of_group(group)
            result.response.append(
                DeleteGroupsResponse.DeletableGroupResult(group_id=group_id, error_code=error, error_message=message)
            )
        return result

    @property
    def image(self) -> MetadataImage:
        """The newest metadata image that the shard was given."""
        return self._image

    @property
    def latest_creation_time_ms(self) -> int:
        """Of any group so far (KIP-1327), -1 where there was none."""
        return self._replay.latest_creation_time_ms

    # For tests and checkers.

    def group(self, group_id: str) -> Group | None:
        """The group itself, to look at."""
        return self._groups.get(group_id)

    def hard_state(self) -> Mapping[str, object]:
        """All that the log has brought about, in a form that compares equal exactly where the states are equal."""
        return self._replay.hard_state()

    def _consumer_groups(self) -> Iterable[ConsumerGroup]:
        return (group for group in self._groups.values() if isinstance(group, ConsumerGroup))
