# SPDX-License-Identifier: Apache-2.0
"""The image of a broker in front of an upstream follows that cluster, and forgets no topic without proof."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import pytest

from kcoord.metadata import upstream
from kcoord.metadata.shared import SharedMetadata, new_topic_times_record
from kcoord.metadata.upstream import UpstreamBroker, UpstreamPartition, UpstreamSnapshot, UpstreamTopic
from tests.unit.metadata.cluster import Cluster

FIRST, SECOND = bytes(15) + b"\1", bytes(15) + b"\2"


def partition(leader: int = 7, epoch: int = 0) -> UpstreamPartition:
    return UpstreamPartition(leader, epoch, (7, 8), (7,))


def topic(name: str, topic_id: bytes, count: int = 1) -> UpstreamTopic:
    return UpstreamTopic(name, topic_id, [partition() for _ in range(count)])


class Follower(Cluster):
    """One instance. `shared` is what it has in common with others."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = SharedMetadata()

    def follow(
        self, *topics: UpstreamTopic, gone: Collection[str] = (), racks: Mapping[int, str | None] | None = None
    ) -> int:
        """Follows the upstream in as many operations as that takes. Returns the number of records."""
        brokers = [UpstreamBroker(node, "h", node, rack) for node, rack in (racks or {7: "a", 8: None}).items()]
        snapshot = UpstreamSnapshot(brokers, topics, gone)
        for record in self.shared.unstamped(self.image, snapshot, self.now_ms):
            self.shared.replay(record)
        before, is_complete = len(self.log), False
        while not is_complete:
            is_complete = self.result(
                lambda machine, context: upstream.follow(machine.image, snapshot, self.shared.creation_times)
            ).response
        return len(self.log) - before


@pytest.fixture
def follower() -> Follower:
    return Follower()


def test_topics_brokers_and_racks_are_the_upstreams(follower: Follower) -> None:
    follower.follow(topic("t", FIRST, 2), topic("__consumer_offsets", SECOND))
    image = follower.image
    assert list(image.topics) == ["t"]
    assert image.topics_by_id[FIRST].name == "t"
    assert [
        (partition.leader, partition.leader_epoch, partition.replicas, partition.isr)
        for partition in image.topics["t"].partitions
    ] == [(7, 0, [7, 8], [7])] * 2
    assert image.racks == {7: "a"}
    assert image.alive_brokers() == {1}
    assert upstream.has_upstream(image)
    assert not upstream.has_upstream(Cluster().image)


def test_an_upstream_that_is_the_same_writes_nothing(follower: Follower) -> None:
    assert follower.follow(topic("t", FIRST)) > 0
    assert follower.follow(topic("t", FIRST)) == 0


def test_creation_times_are_those_of_the_first_sight(follower: Follower) -> None:
    """KIP-1327."""
    follower.follow(topic("t", FIRST, 1))
    follower.now_ms = 5000
    moved = UpstreamTopic("t", FIRST, [partition(8, 1), partition()])
    follower.follow(moved)
    partitions = follower.image.topics["t"].partitions
    assert [partition.creation_time_ms for partition in partitions] == [1000, 5000]
    assert [partition.leader for partition in partitions] == [8, 7]
    assert [partition.partition_epoch for partition in partitions] == [1, 0]


def test_a_time_of_another_instance_counts_if_it_was_first(follower: Follower) -> None:
    follower.shared.replay(new_topic_times_record(FIRST, [500]))
    follower.follow(topic("t", FIRST, 2))
    assert [partition.creation_time_ms for partition in follower.image.topics["t"].partitions] == [500, 1000]
    follower.shared = SharedMetadata()
    follower.shared.replay(new_topic_times_record(FIRST, [400]))
    follower.follow(topic("t", FIRST, 2))
    times = [partition.creation_time_ms for partition in follower.image.topics["t"].partitions]
    assert times == [400, 1000], "the shared time replaces the own one, and the own one is proposed"


def test_a_partition_without_a_shared_time_is_left_out(follower: Follower) -> None:
    snapshot = UpstreamSnapshot([], [topic("t", FIRST, 3)])
    follower.result(lambda machine, context: upstream.follow(machine.image, snapshot, {FIRST: [5]}))
    assert [partition.creation_time_ms for partition in follower.image.topics["t"].partitions] == [5]


def test_an_older_leader_epoch_and_fewer_partitions_are_ignored(follower: Follower) -> None:
    follower.follow(UpstreamTopic("t", FIRST, [partition(8, 5), partition()]))
    assert follower.follow(UpstreamTopic("t", FIRST, [partition(7, 4)])) == 0


def test_a_topic_is_removed_only_if_it_is_gone(follower: Follower) -> None:
    follower.follow(topic("t", FIRST))
    assert follower.follow() == 0
    assert follower.follow(gone={"t"}) == 1
    assert not follower.image.topics


def test_a_topic_gets_another_id_only_if_the_old_one_is_gone(follower: Follower) -> None:
    follower.follow(topic("t", FIRST))
    follower.now_ms = 2000
    assert follower.follow(topic("t", SECOND)) == 0
    follower.follow(topic("t", SECOND), gone={"t"})
    assert follower.image.topics["t"].id == SECOND
    assert FIRST not in follower.image.topics_by_id
    assert follower.image.topics["t"].partitions[0].creation_time_ms == 2000


def test_a_broker_that_is_away_keeps_its_rack(follower: Follower) -> None:
    follower.follow(racks={7: "a", 8: "b"})
    follower.follow(racks={7: "c"})
    assert follower.image.racks == {7: "c", 8: "b"}


def test_a_large_cluster_takes_several_operations(follower: Follower) -> None:
    topics = [topic(f"t{number}", number.to_bytes(16), 2500) for number in range(1, 11)]
    follower.follow(*topics)
    assert [len(topic.partitions) for topic in follower.image.topics.values()] == [2500] * 10
    assert follower.follow(*topics) == 0
