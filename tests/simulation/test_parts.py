# SPDX-License-Identifier: Apache-2.0
"""The parts of the simulator: clock, network and checkers."""

from __future__ import annotations

from random import Random

import pytest

from kcoord.simulation.checkers import AcknowledgedCommits, Ownership, ToldEpochs, check_described_group
from kcoord.simulation.clock import START_MS, Clock
from kcoord.simulation.network import Network, Request
from kcoord.simulation.options import Options
from kcoord.simulation.trace import Trace, ViolationError
from protocol.api_keys import ApiKey
from protocol.messages import ConsumerGroupDescribeResponse, OffsetFetchResponse

TOPIC = bytes(range(16))


def test_time_jumps_and_keeps_order() -> None:
    clock = Clock()
    seen: list[tuple[str, int]] = []
    clock.after(50, lambda: seen.append(("late", clock.now_ms)))
    clock.after(5, lambda: seen.append(("first", clock.now_ms)))
    clock.after(5, lambda: seen.append(("second", clock.now_ms)))
    while clock.step():
        pass
    assert seen == [("first", START_MS + 5), ("second", START_MS + 5), ("late", START_MS + 50)]


def network_of(seed: int, drop: float, duplicate: float) -> tuple[Clock, Network]:
    clock = Clock()
    options = Options.draw(Random(seed))
    options.drop_probability, options.duplicate_probability, options.network_delay_ms = drop, duplicate, 300
    return clock, Network(clock, Random(seed), options, Trace(clock))


def test_a_connection_keeps_order_and_breaks_as_a_whole() -> None:
    lost = 0
    for seed in range(20):
        clock, network = network_of(seed, drop=0.05, duplicate=0.0)
        arrived: list[int] = []
        network.broker = lambda request, arrived=arrived: arrived.append(request.correlation_id)  # type: ignore[misc]
        connection = network.connect("c", lambda correlation_id, body: None)
        for number in range(10):
            network.send(Request(connection, number, ApiKey.OFFSET_COMMIT, 9, "g", b""))
        while clock.step():
            pass
        assert arrived == list(range(len(arrived)))
        lost += len(arrived) < 10
    assert 0 < lost < 20


def test_a_duplicate_follows_its_original() -> None:
    clock, network = network_of(1, drop=0.0, duplicate=0.5)
    arrived: list[int] = []
    network.broker = lambda request: arrived.append(request.correlation_id)
    connection = network.connect("c", lambda correlation_id, body: None)
    for number in range(20):
        network.send(Request(connection, number, ApiKey.OFFSET_COMMIT, 9, "g", b""))
    while clock.step():
        pass
    assert arrived == sorted(arrived)
    assert len(arrived) > 20


def test_a_partition_has_one_owner() -> None:
    ownership = Ownership()
    ownership.grant("g", "a", {(TOPIC, 0), (TOPIC, 1)})
    ownership.grant("g", "a", {(TOPIC, 0)})
    ownership.grant("other", "b", {(TOPIC, 0)})
    ownership.release("g", "a", {(TOPIC, 1)})
    ownership.grant("g", "b", {(TOPIC, 1)})
    assert ownership.owned("g") == {(TOPIC, 0): "a", (TOPIC, 1): "b"}
    with pytest.raises(ViolationError, match=r"^I-1 "):
        ownership.grant("g", "b", {(TOPIC, 0)})


def test_told_epochs_do_not_go_back() -> None:
    epochs = ToldEpochs()
    epochs.told("g", "a", 4)
    epochs.told("g", "b", 3)
    epochs.told("g", "a", 4)
    with pytest.raises(ViolationError, match=r"^I-5 "):
        epochs.told("g", "a", 3)


@pytest.mark.parametrize(("fetched", "fine"), [(5, True), (6, True), (4, False), (-1, False), (None, False)])
def test_an_acknowledged_commit_is_answered(fetched: int | None, fine: bool) -> None:
    commits = AcknowledgedCommits()
    commits.acknowledge("g", "t", 0, 5)
    partitions = [] if fetched is None else [_fetched(fetched)]
    topic = OffsetFetchResponse.OffsetFetchResponseTopics(name="t", partitions=partitions)
    response = OffsetFetchResponse.OffsetFetchResponseGroup(group_id="g", topics=[topic])
    if fine:
        commits.check("g", commits.of_group("g"), response)
    else:
        with pytest.raises(ViolationError, match=r"^I-11 "):
            commits.check("g", commits.of_group("g"), response)


def _fetched(offset: int) -> OffsetFetchResponse.OffsetFetchResponsePartitions:
    return OffsetFetchResponse.OffsetFetchResponsePartitions(partition_index=0, committed_offset=offset)


def _member(member_id: str, epoch: int, assigned: list[int], target: list[int]) -> ConsumerGroupDescribeResponse.Member:
    def assignment(partitions: list[int]) -> ConsumerGroupDescribeResponse.Assignment:
        topic = ConsumerGroupDescribeResponse.TopicPartitions(topic_id=TOPIC, topic_name="t", partitions=partitions)
        return ConsumerGroupDescribeResponse.Assignment(topic_partitions=[topic])

    return ConsumerGroupDescribeResponse.Member(
        member_id=member_id, member_epoch=epoch, assignment=assignment(assigned), target_assignment=assignment(target)
    )


@pytest.mark.parametrize(
    ("group_epoch", "assignment_epoch", "state", "members", "invariant"),
    [
        (3, 3, "Stable", [("a", 3, [0], [0]), ("b", 3, [1], [1])], None),
        (4, 3, "Assigning", [("a", 3, [0], [0])], None),
        (2, 3, "Assigning", [], "I-5"),
        (3, 3, "Reconciling", [("a", 4, [0], [0])], "I-5"),
        (3, 3, "Reconciling", [("a", 3, [0], [0]), ("b", 2, [0], [1])], "I-1"),
        (3, 3, "Reconciling", [("a", 3, [0], [0, 1]), ("b", 2, [], [1])], "I-1"),
        (3, 3, "Stable", [("a", 2, [0], [0])], "I-7"),
        (3, 3, "Stable", [("a", 3, [0], [0, 1])], "I-7"),
    ],
)
def test_a_described_group_is_checked(
    group_epoch: int,
    assignment_epoch: int,
    state: str,
    members: list[tuple[str, int, list[int], list[int]]],
    invariant: str | None,
) -> None:
    group = ConsumerGroupDescribeResponse.DescribedGroup(
        group_id="g",
        group_state=state,
        group_epoch=group_epoch,
        assignment_epoch=assignment_epoch,
        members=[_member(*member) for member in members],
    )
    if invariant is None:
        check_described_group(group)
    else:
        with pytest.raises(ViolationError, match=invariant):
            check_described_group(group)
