# SPDX-License-Identifier: Apache-2.0
"""A change of one topic costs the same among ten topics and among a thousand."""

from __future__ import annotations

from kcoord.metadata.delta import TopicDelta
from tests.support.calls import count_calls
from tests.unit.metadata.cluster import Cluster, Topic
from tests.unit.topics.helpers import NODE_ID
from tests.unit.topics.helpers import Cluster as Store


def cluster_with(topics: int) -> Cluster:
    cluster = Cluster({"node.id": str(NODE_ID)})
    for number in range(topics):
        cluster.create(Topic(name=f"t-{number}", num_partitions=1, replication_factor=-1))
    return cluster


def test_an_image_names_the_topics_that_its_records_are_about() -> None:
    cluster = cluster_with(3)
    old = cluster.image
    cluster.create(Topic(name="new", num_partitions=1, replication_factor=-1))
    new = cluster.image
    assert list(new.topics_to_compare(old)) == ["new"]
    assert TopicDelta.between(old, new).change.changed == {"new"}
    cluster.create(Topic(name="newer", num_partitions=1, replication_factor=-1))
    assert set(cluster.image.topics_to_compare(old)) == {"t-0", "t-1", "t-2", "new", "newer"}
    delta = TopicDelta.between(old, cluster.image)
    assert (set(delta.change.changed), list(delta.gone), delta.change.come_or_gone) == ({"new", "newer"}, [], True)
    back = TopicDelta.between(cluster.image, old)
    assert (set(back.change.changed), list(back.gone), back.change.come_or_gone) == (
        {"new", "newer"},
        ["new", "newer"],
        True,
    )


def calls_of_a_creation(topics: int) -> tuple[int, int, int]:
    """Returns the calls of one more topic among `topics`: of the operation, the comparison, and the topic store."""
    cluster = cluster_with(topics)
    old = cluster.image
    store = Store(old)
    created = count_calls(lambda: cluster.create(Topic(name="new", num_partitions=1, replication_factor=-1)))
    new = cluster.image
    compared = count_calls(lambda: TopicDelta.between(old, new))
    followed = count_calls(lambda: store.store.on_metadata_update(new, store.now_ms))
    return created, compared, followed


def test_calls_do_not_grow_with_the_topics() -> None:
    calls_of_a_creation(1)  # Codecs are made on first use.
    assert calls_of_a_creation(10) == calls_of_a_creation(1_000)
