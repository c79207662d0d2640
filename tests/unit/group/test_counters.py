# SPDX-License-Identifier: Apache-2.0
"""KIP-496's meters: commits, expirations, deletions by administrators, and completed rebalances of both protocols.

The counts are those that Apache Kafka 4.3.1 showed over JMX for the same operations: DeleteGroups and the deletion of a
topic do not change offset-deletion-count.
"""

from __future__ import annotations

from dataclasses import asdict

import pytest

from kcoord.coordinator.group.counters import GroupCounters
from kcoord.runtime.result import Producer
from kcoord_protocol.messages import OffsetDeleteRequest
from tests.unit.group.classic_members import ClassicConsumer, settle
from tests.unit.group.group_context import GroupContext
from tests.unit.group.test_transactional_offsets import commit as commit_in_transaction
from tests.unit.group.test_transactional_offsets import end

MINUTE_MS = 60_000
SETTINGS = {
    "offsets.retention.minutes": "10",
    "offsets.retention.check.interval.ms": str(MINUTE_MS),
    "group.initial.rebalance.delay.ms": "0",
}


def started() -> GroupContext:
    """Returns a loaded shard, which counts its operations."""
    context = GroupContext({"t3": 3, "t6": 6}, SETTINGS)
    context.restart()
    return context


def counted(context: GroupContext) -> dict[str, int]:
    """Returns the counters that are not 0, without the counter of group epochs."""
    counters = asdict(context.shard.counters)
    del counters["consumer_group_rebalances"]
    return {name: count for name, count in counters.items() if count}


def delete_offsets(context: GroupContext, *partitions: int) -> None:
    request = OffsetDeleteRequest(
        group_id="g",
        topics=[
            OffsetDeleteRequest.OffsetDeleteRequestTopic(
                name="t3",
                partitions=[
                    OffsetDeleteRequest.OffsetDeleteRequestPartition(partition_index=index) for index in partitions
                ],
            )
        ],
    )
    context.run(lambda ctx: context.shard.delete_offsets(ctx, request), 0)


def test_each_new_group_epoch_is_a_rebalance_of_a_consumer_group() -> None:
    context = started()
    for number, member_id in enumerate(("a", "b"), 1):
        context.join("g", member_id, ["t3"])
        assert context.shard.counters.consumer_group_rebalances == number
    context.restart()
    assert context.shard.counters.consumer_group_rebalances == 0, "a load counts nothing"


def test_a_rebalance_that_a_restart_interrupts_is_completed_once() -> None:
    context = started()
    context.join("g", "a", ["t3"])
    context.join("g", "b", ["t3"])
    context.restart()
    kept = context.assigned(context.heartbeat("g", "a", 2, owned={"t3": [0, 1, 2]}))
    assert context.heartbeat("g", "a", 2, owned=kept).member_epoch == 3
    assert counted(context) == {}
    context.heartbeat("g", "b", 3)
    assert counted(context) == {"consumer_rebalances_completed": 1}


def test_every_committed_partition_counts_once_in_a_transaction_too() -> None:
    context = started()
    context.commit("g", {"t3": {0: 1, 1: 1, 2: 1}})
    context.commit("g", {"t3": {0: 2}})
    assert counted(context) == {"offset_commits": 4}
    producer = Producer(7, 0)
    commit_in_transaction(context, producer, {0: 9, 1: 9})
    end(context, producer)
    assert counted(context) == {"offset_commits": 6}


def test_only_offset_delete_counts_as_deletion() -> None:
    context = started()
    context.commit("g", {"t3": {0: 1, 1: 1}, "t6": {0: 1, 1: 1}})
    delete_offsets(context, 0, 2)  # partition 2 has no offset
    delete_offsets(context, 0)
    assert counted(context) == {"offset_commits": 4, "offset_deletions": 1}
    context.update_metadata({"t3": 3})
    context.run(lambda ctx: context.shard.delete_groups(ctx, ["g"]))
    assert context.fetch("g") == {}
    assert counted(context) == {"offset_commits": 4, "offset_deletions": 1}


def test_expired_offsets_count_without_the_tombstones_of_their_group() -> None:
    context = started()
    context.commit("simple", {"t3": {0: 1}})
    context.join("g", "m", ["t3"])
    context.commit("g", {"t3": {0: 1, 1: 1}}, member="m", epoch=2)
    context.heartbeat("g", "m", -1)
    context.sleep(30 * MINUTE_MS)
    assert context.run(lambda ctx: context.shard.list_groups(ctx, [], [])) == []
    assert counted(context)["offset_expirations"] == 3
    assert "offset_deletions" not in counted(context)


def test_a_classic_rebalance_counts_when_its_assignment_is_written() -> None:
    context = started()
    members = [ClassicConsumer(context, "g", name, ["t3"], instance=f"i-{name}") for name in "ab"]
    settle(context, members, {"t3": 3})
    assert counted(context) == {"classic_rebalances_completed": 1}
    # A static member returns: this writes a record with members, but is no rebalance.
    back = ClassicConsumer(context, "g", "a", ["t3"], instance="i-a")
    back.on_joined(back.join())
    assert back.generation == members[1].generation
    assert counted(context) == {"classic_rebalances_completed": 1}
    newcomer = ClassicConsumer(context, "g", "c", ["t3"])
    settle(context, [back, members[1], newcomer], {"t3": 3})
    assert counted(context) == {"classic_rebalances_completed": 2}
    for member in (back, members[1], newcomer):
        member.leave()
    assert counted(context) == {"classic_rebalances_completed": 2}


def test_a_consumer_rebalance_counts_when_all_members_have_reached_its_epoch() -> None:
    context = started()
    epoch = context.join("g", "a", ["t3"]).member_epoch
    assert counted(context) == {"consumer_rebalances_completed": 1}
    context.join("g", "b", ["t3"])
    asked = context.heartbeat("g", "a", epoch)
    assert counted(context) == {"consumer_rebalances_completed": 1}
    owned = context.assigned(asked)
    epoch = context.heartbeat("g", "a", epoch, owned=owned).member_epoch
    context.heartbeat("g", "b", context.describe("g").members[0].member_epoch, owned={})
    assert context.describe("g").group_state == "Stable"
    assert counted(context) == {"consumer_rebalances_completed": 2}
    # Further heartbeats complete no rebalance.
    context.heartbeat("g", "a", epoch, owned=owned)
    assert counted(context) == {"consumer_rebalances_completed": 2}


def test_a_static_member_that_returns_completes_no_rebalance() -> None:
    context = started()
    context.join("g", "a", ["t3"], instance="i")
    context.heartbeat("g", "a", -2, instance="i")
    context.join("g", "b", ["t3"], instance="i")
    assert context.describe("g").group_state == "Stable"
    assert counted(context) == {"consumer_rebalances_completed": 1}


def test_a_conversion_completes_no_rebalance() -> None:
    context = started()
    static = ClassicConsumer(context, "g", "a", ["t3"], instance="i")
    settle(context, [static], {"t3": 3})
    context.join("g", "new", ["t3"], instance="i", assignor=None)
    assert context.describe("g").group_state == "Stable"
    assert counted(context) == {"classic_rebalances_completed": 1}


@pytest.mark.parametrize("has_offsets", [False, True])
def test_a_conversion_back_completes_no_rebalance(has_offsets: bool) -> None:
    """With offsets the group still exists after the records of its old type are deleted."""
    context = started()
    epoch = context.join("g", "old", ["t3"], instance="i", assignor=None).member_epoch
    if has_offsets:
        context.commit("g", {"t3": {0: 1}}, member="old", epoch=epoch)
    before = counted(context)
    static = ClassicConsumer(context, "g", "a", ["t3"], instance="i")
    static.on_joined(static.join())
    context.sleep(0)
    static.on_synced(static.sync())
    assert static.heartbeat() == 0
    (group,) = context.run(lambda ctx: context.shard.list_groups(ctx, [], []))
    assert (group.group_type, group.group_state) == ("classic", "Stable")
    assert counted(context) == before


def test_loading_counts_nothing_and_shards_can_share_their_counters() -> None:
    context = started()
    context.commit("g", {"t3": {0: 1}})
    context.join("c", "a", ["t3"])
    settle(context, [ClassicConsumer(context, "k", "a", ["t3"])], {"t3": 3})
    context.restart()
    assert counted(context) == {}
    # The group was stable before the load.
    context.heartbeat("c", "a", context.describe("c").group_epoch, owned={"t3": [0, 1, 2]})
    assert counted(context) == {}
    shared = GroupCounters(offset_commits=5)
    context.shard.counters = shared
    context.run(context.shard.on_loaded)
    context.commit("g", {"t3": {0: 2}})
    assert shared.offset_commits == 6
