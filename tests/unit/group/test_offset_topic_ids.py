# SPDX-License-Identifier: Apache-2.0
"""The topic ids of committed offsets: OffsetFetch of all topics returns an id if all offsets of the topic have it."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

import pytest

from kcoord.coordinator.group.offsets.committed_offsets import CommittedOffset
from kcoord.coordinator.group.offsets.expiration import MAX_TOMBSTONES
from kcoord.coordinator.group.offsets.packed_fetch import PackedFetch
from kcoord.coordinator.group.records import new_offset_commit_record
from kcoord.coordinator.group.shard import GroupCoordinatorShard
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


def take_over(context: GroupContext, deleted_topics: Collection[bytes]) -> None:
    """Loads the log in a process in which topics were deleted."""
    context.shard = GroupCoordinatorShard(context.config, context.image, None, deleted_topics)
    for record in context.log:
        context.shard.replay(record)
    context.run(context.shard.on_loaded)


def test_a_new_owner_deletes_the_offsets_of_topics_that_were_deleted_before() -> None:
    context = GroupContext({"t3": 3, "t6": 6})
    context.commit("g", {"t3": {0: 5, 1: 6}, "t6": {0: 7}}, api_version=10, topic_ids=True)
    ids = {name: context.topic_id(name) for name in ("t3", "t6")}
    # Another client has committed for the topic of this name that was created since.
    context.log.append(new_offset_commit_record("g", "t3", 1, CommittedOffset(8, 0, "", 0, topic_id=b"n" * 16)))
    take_over(context, {ids["t3"]})
    assert topic_ids_of_all(context) == {"t3": b"n" * 16, "t6": ids["t6"]}


def test_many_offsets_of_a_deleted_topic_are_deleted_in_portions() -> None:
    count = MAX_TOMBSTONES + 1
    context = GroupContext({"t": count})
    context.commit("g", {"t": dict.fromkeys(range(count), 5)}, api_version=10, topic_ids=True)
    take_over(context, {context.topic_id("t")})
    assert "t" in topic_ids_of_all(context)
    context.sleep(0)
    assert topic_ids_of_all(context) == {}


@pytest.mark.parametrize(("stored", "by_id"), [(b"n" * 16, -1), (ZERO_UUID, 5), (None, 5)])
def test_an_offset_of_another_topic_of_this_name_is_found_by_name_only(stored: bytes | None, by_id: int) -> None:
    """`stored` is the id in the record: of another topic, unknown, or the topic's own. The fast path does the same."""
    context = GroupContext({"t3": 3})
    own_id = context.topic_id("t3")
    offset = CommittedOffset(5, 0, "", 0, topic_id=stored or own_id)
    context.log.append(new_offset_commit_record("g", "t3", 0, offset))
    context.restart()
    for version, topic_id, expected in ((9, ZERO_UUID, 5), (10, own_id, by_id)):
        topic = OffsetFetchRequest.OffsetFetchRequestTopics(name="t3", topic_id=topic_id, partition_indexes=[0])
        request = OffsetFetchRequest.OffsetFetchRequestGroup(group_id="g", topics=[topic])
        group: OffsetFetchResponse.OffsetFetchResponseGroup = context.run(
            partial(context.shard.fetch_offsets, request=request, require_stable=False), version
        )
        assert group.topics[0].partitions[0].committed_offset == expected
        packed = context.shard.fetch_packed(PackedFetch(request, version), require_stable=False)
        assert packed is not None
        assert packed in OffsetFetchResponse(groups=[group]).encode(version)
