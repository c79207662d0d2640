# SPDX-License-Identifier: Apache-2.0
"""The difference between two images: what changed, what is gone, and whether there are other names."""

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
    found = TopicDelta.between(before, cluster.image)
    assert (found.old, found.new) == (before, cluster.image)
    return set(found.changed), list(found.gone), found.come_or_gone


def test_a_topic_that_grew_has_changed_and_nothing_else() -> None:
    assert delta(cluster_of("a", "b"), grow, "a") == ({"a"}, [], False)


def test_a_topic_that_came() -> None:
    def create(cluster: Cluster, name: str) -> None:
        cluster.create(Topic(name=name, num_partitions=1, replication_factor=1))

    assert delta(cluster_of("a"), create, "b") == ({"b"}, [], True)


def test_a_topic_that_went() -> None:
    assert delta(cluster_of("a", "b"), delete, "b") == ({"b"}, ["b"], True)


def test_a_topic_that_was_made_again_is_gone_though_its_name_is_there() -> None:
    def again(cluster: Cluster, name: str) -> None:
        delete(cluster, name)
        cluster.create(Topic(name=name, num_partitions=2, replication_factor=1))

    assert delta(cluster_of("a", "b"), again, "b") == ({"b"}, ["b"], False)


def test_nothing_changed() -> None:
    assert delta(cluster_of("a"), lambda cluster, name: None, "") == (set(), [], False)
