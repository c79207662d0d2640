# SPDX-License-Identifier: Apache-2.0
"""An instance as a member of its group in the upstream: the lease, rebalances, faults, and processes that come back."""

from __future__ import annotations

import pytest

from kcoord.runtime.upstream_membership import (
    Assigned,
    Failed,
    Heartbeat,
    InstanceState,
    JoinGroup,
    LeaseOver,
    LeaveGroup,
    Reclaim,
    SyncGroup,
    UpstreamMembership,
)
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import UpstreamMemberMetadata
from tests.unit.runtime.upstream_group import INTERVAL_MS, SESSION_MS, SHARDS, World, instance

SEEDS = 60


@pytest.fixture
def world() -> World:
    return World(1)


def counts(world: World) -> list[int]:
    return sorted(len(owned) for owned in world.owners().values())


def test_instances_share_the_shards(world: World) -> None:
    first = world.start(1)
    world.run(500)
    assert first.owned == list(range(SHARDS))
    second = world.start(2)
    world.start(3)
    world.run(1_000)
    assert world.is_settled()
    assert counts(world) == [3, 3, 4]
    assert first.machine.shard_map is not None
    assert second.machine.shard_map is not None
    assert first.machine.shard_map.owner(second.owned[0]) == instance(2)


def test_the_shards_of_a_killed_instance_move_after_its_session(world: World) -> None:
    first, second = world.start(1), world.start(2)
    world.run(1_000)
    first.is_alive = False
    world.run(SESSION_MS - INTERVAL_MS - 100)
    assert len(second.owned) == SHARDS // 2
    world.run(2 * INTERVAL_MS + 200)
    assert second.owned == list(range(SHARDS))


def test_an_orderly_stop_moves_them_at_the_next_heartbeat_and_at_once_after_a_hint(world: World) -> None:
    processes = [world.start(node_id) for node_id in (1, 2, 3)]
    world.run(1_000)
    stopped = processes[0]
    stopped.owned = []
    stopped.machine.leave()
    world._execute(stopped)
    stopped.is_alive = False
    world.run(INTERVAL_MS + 100)
    assert world.is_settled()
    stopped = processes[1]
    stopped.owned = []
    stopped.machine.leave()
    world._execute(stopped)
    stopped.is_alive = False
    world.run(20)
    processes[2].machine.hurry(world.now_ms)
    world._execute(processes[2])
    world.run(60)
    assert processes[2].owned == list(range(SHARDS))


def test_a_process_that_was_stopped_for_long_has_no_lease_when_it_continues(world: World) -> None:
    first, second = world.start(1), world.start(2)
    world.run(1_000)
    first.stalled_until_ms = world.now_ms + SESSION_MS + 2_000
    world.run(SESSION_MS + 2_000 - 10)
    assert second.owned == list(range(SHARDS))
    assert not first.machine.holds_lease(world.now_ms), "before anything has told it so"
    world.run(2_000)
    assert world.is_settled()
    assert any("confirmed no heartbeat" in line for line in first.log)


def test_an_instance_that_is_cut_off_ends_its_lease_before_the_group_removes_it(world: World) -> None:
    first, second = world.start(1), world.start(2)
    world.run(1_000)
    first.cut_until_ms = world.now_ms + 3 * SESSION_MS
    while second.owned != list(range(SHARDS)):
        world.run(10)
        assert not (first.owned and len(second.owned) == SHARDS)
    assert not first.owned
    world.run(4 * SESSION_MS)
    assert world.is_settled()


def test_an_instance_resumes_its_shards_if_the_group_was_not_reachable_for_all(world: World) -> None:
    first = world.start(1)
    world.run(1_000)
    first.cut_until_ms = world.now_ms + SESSION_MS + 100
    # The coordinator has moved meanwhile, and gives every member a new session.
    world.group.members[1].deadline_ms = world.now_ms + 3 * SESSION_MS
    world.run(SESSION_MS)
    assert first.owned == []
    world.run(2_000)
    assert first.owned == list(range(SHARDS))
    assert first.log.count("generation 1") == 2


def test_a_restarted_instance_gets_its_shards_back_without_a_rebalance(world: World) -> None:
    first, second = world.start(1), world.start(2)
    world.run(1_000)
    generation, owned = world.group.generation, first.owned
    first.is_alive = False
    again = world.start(1)
    world.run(500)
    assert (again.owned, world.group.generation) == (owned, generation)
    assert len(second.owned) == SHARDS // 2


def test_new_addresses_reach_all_instances(world: World) -> None:
    first, second = world.start(1), world.start(2)
    world.run(1_000)
    for process in (first, second):
        moved = instance(process.node_id, 9999)
        process.machine.join(moved, world.now_ms)
        world._execute(process)
        world.run(1_000)
        for other in (first, second):
            assert other.machine.shard_map is not None
            assert other.machine.shard_map.instances[process.node_id] == moved


def test_the_older_of_two_processes_with_the_same_node_id_fails(world: World) -> None:
    older = world.start(1)
    world.run(1_000)
    newer = world.start(1)
    world.run(1_000)
    assert older.failure is not None and older.failure.error is Errors.FENCED_INSTANCE_ID
    assert older.machine.state is InstanceState.FAILED
    assert newer.owned == list(range(SHARDS))


def test_a_stalled_process_does_not_push_out_its_successor(world: World) -> None:
    older = world.start(1)
    world.run(1_000)
    older.stalled_until_ms = world.now_ms + 2 * SESSION_MS
    world.run(SESSION_MS + 500)
    newer = world.start(1)
    world.run(2 * SESSION_MS)
    assert older.failure is not None
    assert newer.owned == list(range(SHARDS))


def test_a_release_that_cannot_read_the_records_fails_and_leaves(world: World) -> None:
    world.start(1, record_version=2)
    world.run(500)
    old = world.start(2, record_version=1)
    world.run(1_000)
    assert old.failure is not None
    assert old.failure.message == (
        "the other instances write records of version 2, and this release reads versions up to 1"
    )
    assert list(world.group.members) == [1]


@pytest.mark.parametrize("seed", range(SEEDS))
def test_faults_of_all_kinds_never_give_two_leases_and_all_shards_are_owned_afterwards(seed: int) -> None:
    world = World(seed)
    random = world.random
    for node_id in range(1, 4):
        world.start(node_id)
    for _ in range(25):
        alive = [process for process in world.processes if process.is_alive]
        world.loss = random.choice((0, 0, 0.1, 0.4))
        world.longest_delay_ms = random.choice((5, 50, 800))
        match random.randrange(6):
            case 0 if len(alive) > 1:
                random.choice(alive).is_alive = False
            case 1:
                missing = {1, 2, 3, 4} - {process.node_id for process in alive}
                if missing:
                    world.start(random.choice(sorted(missing)))
            case 2 if alive:
                random.choice(alive).stalled_until_ms = world.now_ms + random.randrange(2 * SESSION_MS)
            case 3 if alive:
                random.choice(alive).cut_until_ms = world.now_ms + random.randrange(2 * SESSION_MS)
            case 4 if len(alive) > 1:
                process = random.choice(alive)
                process.machine.leave()
                world._execute(process)
                process.is_alive, process.owned = False, []
        world.run(random.randrange(2_000))
    world.loss, world.longest_delay_ms = 0, 5
    for process in world.processes:
        process.stalled_until_ms = process.cut_until_ms = 0
    world.run(3 * SESSION_MS + 15_000)
    assert all(process.failure is None for process in world.processes)
    assert world.is_settled()
    assert max(counts(world)) - min(counts(world)) <= 1


# -- single steps ------------------------------------------------------------------------------------------------------


@pytest.fixture
def machine() -> UpstreamMembership:
    return UpstreamMembership(
        1, SHARDS, session_timeout_ms=SESSION_MS, heartbeat_interval_ms=INTERVAL_MS, record_version=1
    )


def taken(machine: UpstreamMembership) -> list[object]:
    actions, machine.actions = machine.actions, []
    return list(actions)


def become_member(machine: UpstreamMembership, now_ms: int = 0) -> None:
    machine.join(instance(1), now_ms)
    (join,) = taken(machine)
    assert isinstance(join, JoinGroup)
    machine.joined(join, "m", 1, {"m": join.metadata}, now_ms)
    (sync,) = taken(machine)
    assert isinstance(sync, SyncGroup)
    machine.synced(sync, sync.assignments["m"], now_ms)
    assert isinstance(taken(machine)[0], Assigned)


def beat(machine: UpstreamMembership, now_ms: int) -> Heartbeat:
    machine.tick(now_ms)
    (heartbeat,) = taken(machine)
    assert isinstance(heartbeat, Heartbeat)
    return heartbeat


def test_the_lease_counts_from_the_time_the_heartbeat_was_created(machine: UpstreamMembership) -> None:
    become_member(machine)
    heartbeat = beat(machine, 1_000)
    machine.beaten(heartbeat, 4_000, rebalances=False)
    assert machine.lease_left_ms(4_000) == 1_000 + SESSION_MS - 4_000
    assert machine.holds_lease(1_000 + SESSION_MS - 1)
    assert not machine.holds_lease(1_000 + SESSION_MS)
    assert machine.next_ms == 1_000 + INTERVAL_MS


def test_the_end_of_the_lease_is_reported_once_and_heartbeats_continue(machine: UpstreamMembership) -> None:
    become_member(machine)
    lost = beat(machine, 1_000)
    machine.tick(SESSION_MS)
    (over,) = taken(machine)
    assert isinstance(over, LeaseOver)
    machine.refused(lost, KafkaError(Errors.NETWORK_EXCEPTION), SESSION_MS + 10)
    heartbeat = beat(machine, SESSION_MS + 100)
    machine.beaten(heartbeat, SESSION_MS + 110, rebalances=False)
    (assigned,) = taken(machine)
    assert isinstance(assigned, Assigned)


def test_an_answer_that_was_under_way_while_the_process_stood_still_does_not_give_the_lease_back(
    machine: UpstreamMembership,
) -> None:
    become_member(machine)
    heartbeat = beat(machine, 1_000)
    machine.beaten(heartbeat, 30_000, rebalances=False)
    (over,) = taken(machine)
    assert isinstance(over, LeaseOver)
    assert not machine.holds_lease(30_000)


def test_a_lease_that_was_over_ends_before_a_late_answer_begins_the_next_one(machine: UpstreamMembership) -> None:
    become_member(machine)
    heartbeat = beat(machine, SESSION_MS - 1)
    assert not machine.holds_lease(SESSION_MS), "from now on appends are dropped"
    machine.beaten(heartbeat, SESSION_MS, rebalances=False)
    over, assigned = taken(machine)
    assert isinstance(over, LeaseOver) and isinstance(assigned, Assigned)
    assert machine.holds_lease(SESSION_MS)


def test_the_lease_goes_on_during_a_rebalance(machine: UpstreamMembership) -> None:
    become_member(machine)
    machine.beaten(beat(machine, 200), 210, rebalances=True)
    (join,) = taken(machine)
    assert isinstance(join, JoinGroup) and join.member_id == "m"
    for now_ms in range(1_000, 3 * SESSION_MS, 1_000):
        machine.beaten(beat(machine, now_ms), now_ms + 10, rebalances=True)
        assert machine.holds_lease(now_ms + SESSION_MS - 1)
    machine.joined(join, "m", 2, {"m": join.metadata}, 3 * SESSION_MS)
    assert machine.next_ms == 3 * SESSION_MS - 1_000 + SESSION_MS, "no heartbeat before the answer to SyncGroup"


@pytest.mark.parametrize("error", [None, Errors.ILLEGAL_GENERATION])
def test_an_answer_to_join_group_that_was_lost_is_noticed_by_a_heartbeat(
    machine: UpstreamMembership, error: Errors | None
) -> None:
    become_member(machine)
    machine.beaten(beat(machine, 200), 210, rebalances=True)
    taken(machine)
    heartbeat = beat(machine, 400)
    if error is None:
        machine.beaten(heartbeat, 410, rebalances=False)
    else:
        machine.refused(heartbeat, KafkaError(error), 410)
    for now_ms in range(600, 1_400, 200):
        machine.refused(beat(machine, now_ms), KafkaError(Errors.NETWORK_EXCEPTION), now_ms)
    machine.tick(1_500)
    assert [type(action) for action in taken(machine) if not isinstance(action, Heartbeat)] == [JoinGroup]


def test_a_member_that_was_removed_joins_with_an_empty_id_and_has_no_lease(machine: UpstreamMembership) -> None:
    become_member(machine)
    machine.refused(beat(machine, 200), KafkaError(Errors.UNKNOWN_MEMBER_ID), 210)
    over, join = taken(machine)
    assert isinstance(over, LeaseOver) and isinstance(join, JoinGroup)
    assert join.member_id == ""
    assert not machine.holds_lease(220)
    # The group is being removed in the upstream: the member does not ask in a loop.
    machine.refused(join, KafkaError(Errors.UNKNOWN_MEMBER_ID), 220)
    assert taken(machine) == []
    assert machine.next_ms == 270


@pytest.mark.parametrize(
    "error", [Errors.GROUP_AUTHORIZATION_FAILED, Errors.INCONSISTENT_GROUP_PROTOCOL, Errors.INVALID_SESSION_TIMEOUT]
)
def test_a_wrong_setting_fails_at_the_start_and_is_repeated_later(machine: UpstreamMembership, error: Errors) -> None:
    starting = UpstreamMembership(
        1, SHARDS, session_timeout_ms=SESSION_MS, heartbeat_interval_ms=INTERVAL_MS, record_version=1
    )
    starting.join(instance(1), 0)
    (join,) = taken(starting)
    assert isinstance(join, JoinGroup)
    starting.refused(join, KafkaError(error), 10)
    (failed,) = taken(starting)
    assert isinstance(failed, Failed) and failed.error.error is error
    become_member(machine)
    machine.refused(beat(machine, 200), KafkaError(error), 210)
    assert taken(machine) == []
    assert machine.holds_lease(220)
    assert machine.next_ms == 260


def test_an_empty_assignment_begins_another_rebalance(machine: UpstreamMembership) -> None:
    machine.join(instance(1), 0)
    (join,) = taken(machine)
    assert isinstance(join, JoinGroup)
    machine.joined(join, "m", 1, None, 10)
    (sync,) = taken(machine)
    assert isinstance(sync, SyncGroup) and not sync.assignments
    machine.synced(sync, b"", 20)
    assert taken(machine) == []
    machine.tick(20 + INTERVAL_MS)
    (again,) = taken(machine)
    assert isinstance(again, JoinGroup) and again.metadata != join.metadata


def test_a_fenced_shard_is_claimed_again_if_a_later_heartbeat_confirms_the_owner(machine: UpstreamMembership) -> None:
    become_member(machine)
    before = beat(machine, 200)
    machine.fenced(3, 205)
    machine.beaten(before, 210, rebalances=False)
    assert taken(machine) == [], "this heartbeat says nothing about the time after the claim"
    machine.beaten(beat(machine, 211), 215, rebalances=False)
    (reclaim,) = taken(machine)
    assert isinstance(reclaim, Reclaim) and list(reclaim.shard_ids) == [3]
    machine.beaten(beat(machine, 411), 415, rebalances=True)
    assert [type(action) for action in taken(machine)] == [JoinGroup]
    machine.fenced(4, 420)
    (heartbeat,) = taken(machine)
    assert isinstance(heartbeat, Heartbeat), "it does not wait for the interval"
    machine.beaten(heartbeat, 430, rebalances=True)
    assert taken(machine) == [], "the map of the rebalance decides"


def rejoin(machine: UpstreamMembership, now_ms: int) -> SyncGroup:
    """Takes a member through a rebalance, up to SyncGroup."""
    heartbeat = beat(machine, now_ms)
    machine.beaten(heartbeat, now_ms, rebalances=True)
    (join,) = taken(machine)
    assert isinstance(join, JoinGroup)
    machine.joined(join, "m", machine.generation + 1, {"m": join.metadata}, now_ms)
    (sync,) = taken(machine)
    assert isinstance(sync, SyncGroup)
    return sync


def test_heartbeats_begin_with_the_assignment_and_a_hint_does_not_change_that(machine: UpstreamMembership) -> None:
    machine.hurry(0)
    assert taken(machine) == []
    become_member(machine, 1_000)
    assert machine.next_ms == 1_000 + INTERVAL_MS
    rejoin(machine, 2_000)
    machine.hurry(2_010)
    assert taken(machine) == []


@pytest.mark.parametrize("late_ms", [-1, 0])
def test_an_assignment_that_arrives_after_the_lease_gives_none(machine: UpstreamMembership, late_ms: int) -> None:
    become_member(machine)
    sync = rejoin(machine, 1_000)
    machine.synced(sync, sync.assignments["m"], 1_000 + SESSION_MS + late_ms)
    (outcome,) = taken(machine)
    if late_ms < 0:
        assert isinstance(outcome, Assigned)
        return
    assert isinstance(outcome, LeaseOver)
    heartbeat = beat(machine, 1_000 + SESSION_MS + INTERVAL_MS)
    machine.beaten(heartbeat, 1_000 + 2 * SESSION_MS + INTERVAL_MS, rebalances=False)
    assert taken(machine) == [], "this answer is too late as well"
    heartbeat = beat(machine, 9_000 + SESSION_MS)
    machine.beaten(heartbeat, 9_001 + SESSION_MS, rebalances=False)
    (outcome,) = taken(machine)
    assert isinstance(outcome, Assigned)


def test_a_map_without_the_current_addresses_is_replaced_at_once_and_then_after_longer_and_longer_pauses(
    machine: UpstreamMembership,
) -> None:
    become_member(machine)
    sync: object = rejoin(machine, 1_000)
    assert isinstance(sync, SyncGroup)
    old = sync.assignments["m"]
    machine.join(instance(1, 9999), 1_010)
    now_ms, pauses = 1_010, []
    for _ in range(4):
        assert isinstance(sync, SyncGroup)
        machine.synced(sync, old, now_ms)
        actions = [action for action in taken(machine) if not isinstance(action, Assigned)]
        begun_ms = now_ms
        while not actions:
            now_ms += 10
            machine.tick(now_ms)
            actions = [action for action in taken(machine) if not isinstance(action, Heartbeat)]
        pauses.append(now_ms - begun_ms)
        (join,) = actions
        assert isinstance(join, JoinGroup)
        machine.joined(join, "m", machine.generation + 1, None, now_ms)
        (sync,) = taken(machine)
    assert pauses == [0, 100, 200, 200]


def test_a_failed_request_is_repeated_with_doubled_pauses(machine: UpstreamMembership) -> None:
    machine.join(instance(1), 0)
    now_ms, attempts, pauses = 0, [], []
    for _ in range(4):
        (join,) = taken(machine)
        assert isinstance(join, JoinGroup)
        attempts.append(UpstreamMemberMetadata.decode_prefix(join.metadata, 2, 0)[0].attempt)
        machine.refused(join, KafkaError(Errors.COORDINATOR_NOT_AVAILABLE), now_ms)
        pauses.append(machine.next_ms - now_ms)
        now_ms = int(machine.next_ms)
        machine.tick(now_ms)
    assert pauses == [50, 100, 200, 200]
    assert attempts == [1, 2, 3, 4]


def test_a_generation_that_is_over_is_left_for_the_next_one(machine: UpstreamMembership) -> None:
    become_member(machine)
    machine.refused(beat(machine, 200), KafkaError(Errors.ILLEGAL_GENERATION), 210)
    (join,) = taken(machine)
    assert isinstance(join, JoinGroup) and join.member_id == "m"
    assert machine.holds_lease(220), "the lease of the last heartbeat still holds"


def test_a_heartbeat_from_before_a_request_to_join_says_nothing_about_it(machine: UpstreamMembership) -> None:
    become_member(machine)
    early = beat(machine, 200)
    machine.join(instance(1, 9999), 200)
    (join,) = taken(machine)
    assert isinstance(join, JoinGroup)
    machine.beaten(early, 210, rebalances=False)
    for now_ms in range(400, 2_000, 200):
        machine.refused(beat(machine, now_ms), KafkaError(Errors.NETWORK_EXCEPTION), now_ms)
    machine.joined(join, "m", 2, None, 2_000)
    assert [type(action) for action in taken(machine)] == [SyncGroup]


def test_a_new_map_forgets_which_shards_were_fenced(machine: UpstreamMembership) -> None:
    become_member(machine)
    machine.fenced(3, 150)
    (heartbeat,) = taken(machine)
    assert isinstance(heartbeat, Heartbeat)
    machine.beaten(heartbeat, 160, rebalances=True)
    (join,) = taken(machine)
    assert isinstance(join, JoinGroup)
    machine.joined(join, "m", 2, {"m": join.metadata}, 170)
    (sync,) = taken(machine)
    assert isinstance(sync, SyncGroup)
    machine.synced(sync, sync.assignments["m"], 180)
    assert [type(action) for action in taken(machine)] == [Assigned], "which claims all shards of the map"
    machine.beaten(beat(machine, 400), 410, rebalances=False)
    assert taken(machine) == []
    machine.fenced(4, 500)
    (heartbeat,) = taken(machine)
    assert isinstance(heartbeat, Heartbeat) and heartbeat.created_ms == 500
    machine.beaten(heartbeat, 510, rebalances=False)
    assert [type(action) for action in taken(machine)] == [Reclaim]


def test_leaving_needs_a_member_id_and_ends_everything(machine: UpstreamMembership) -> None:
    machine.leave()
    assert taken(machine) == []
    become_member(machine)
    machine.leave()
    (leave,) = taken(machine)
    assert isinstance(leave, LeaveGroup) and leave.member_id == "m"
    assert not machine.holds_lease(1)
    assert machine.next_ms == float("inf")
