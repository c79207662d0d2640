# SPDX-License-Identifier: Apache-2.0
"""The difference between two images: changed topics, deleted topics, and whether the set of names changed."""

from __future__ import annotations

from kcoord.metadata.delta import TopicDelta
from kcoord_protocol.messages import CreatePartitionsRequest, DeleteTopicsRequest
from tests.unit.metadata.cluster import Cluster, Topic


def cluster_of(*names: str) -> Cluster:
    cluster = Cluster()
    cluster.create(*(Topic(name=name, num_partitions=2, replication_factor=1) for name in names))
    return cluster


def grow(cluster: Cluster, name: str) -> None:
    topic = CreatePartitionsRequest.CreatePartitionsTopic(name=name, count=3, assignments=None)
    request = CreatePartitionsRequest(topics=[topic])
    cluster.run(lambda machine, context: machine.create_partitions(context, request))


def delete(cluster: Cluster, name: str) -> None:
    request = DeleteTopicsRequest(topic_names=[name])
    cluster.run(lambda machine, context: machine.delete_topics(context, request), api_version=5)


def delta(cluster: Cluster, change: object, name: str) -> tuple[set[str], list[str], bool]:
    before = cluster.image
    change(cluster, name)  # type: ignore[operator]
    difference = TopicDelta.between(before, cluster.image)
    assert (difference.old, difference.new) == (before, cluster.image)
    return set(difference.change.changed), list(difference.gone), difference.change.come_or_gone


def test_new_partitions_change_only_their_topic() -> None:
    assert delta(cluster_of("a", "b"), grow, "a") == ({"a"}, [], False)


def test_a_new_topic() -> None:
    def create(cluster: Cluster, name: str) -> None:
        cluster.create(Topic(name=name, num_partitions=1, replication_factor=1))

    assert delta(cluster_of("a"), create, "b") == ({"b"}, [], True)


def test_a_deleted_topic() -> None:
    assert delta(cluster_of("a", "b"), delete, "b") == ({"b"}, ["b"], True)


def test_a_topic_that_was_created_again_is_gone_although_its_name_exists() -> None:
    def again(cluster: Cluster, name: str) -> None:
        delete(cluster, name)
        cluster.create(Topic(name=name, num_partitions=2, replication_factor=1))

    assert delta(cluster_of("a", "b"), again, "b") == ({"b"}, ["b"], False)


def test_nothing_changed() -> None:
    assert delta(cluster_of("a"), lambda cluster, name: None, "") == (set(), [], False)
