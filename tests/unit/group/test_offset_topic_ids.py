# SPDX-License-Identifier: Apache-2.0
"""The topic ids of committed offsets: OffsetFetch of all topics returns an id if all offsets of the topic have it."""

from __future__ import annotations

from kcoord.coordinator.group.offsets.committed_offsets import CommittedOffset
from kcoord.coordinator.group.records import new_offset_commit_record
from kcoord_protocol.messages import OffsetFetchRequest, OffsetFetchResponse
from kcoord_protocol.uuid import ZERO_UUID
from tests.unit.group.group_context import GroupContext


def topic_ids_of_all(context: GroupContext) -> dict[str, bytes]:
    request = OffsetFetchRequest.OffsetFetchRequestGroup(group_id="g", topics=None)
    group: OffsetFetchResponse.OffsetFetchResponseGroup = context.run(
        lambda ctx: context.shard.fetch_offsets(ctx, request, require_stable=False), 10
    )
    return {topic.name: topic.topic_id for topic in group.topics}


def test_all_topics_have_the_id_with_which_all_their_offsets_were_committed() -> None:
    context = GroupContext({"t3": 3, "t6": 6})
    context.commit("g", {"t3": {0: 5, 1: 6}}, api_version=10, topic_ids=True)
    context.commit("g", {"t6": {0: 7}})
    assert topic_ids_of_all(context) == {name: context.topic_id(name) for name in ("t3", "t6")}
    # This is a record of a release without topic ids.
    context.log.append(new_offset_commit_record("g", "t3", 2, CommittedOffset(7, 0, "", 0, topic_id=ZERO_UUID)))
    context.restart()
    assert topic_ids_of_all(context) == {"t3": ZERO_UUID, "t6": context.topic_id("t6")}
