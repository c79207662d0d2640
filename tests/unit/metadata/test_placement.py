# SPDX-License-Identifier: Apache-2.0
"""Where partitions go, for every layout of racks: what any good placement promises, not how it gets there."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from kcoord.config import BrokerConfig
from kcoord.metadata import records
from kcoord.metadata.image import BrokerImage, ImageBuilder, MetadataImage
from kcoord.metadata.placement import Placement, directories_of, move_records, partition_records
from kcoord_protocol.internal_topics import GROUP_METADATA_TOPIC, TRANSACTION_STATE_TOPIC
from kcoord_protocol.uuid import ZERO_UUID

LAYOUTS: dict[str, list[str | None]] = {
    "no racks": [None, None, None],
    "two equal racks": ["x", "x", "y", "y"],
    "racks in turn": ["x", "y", "x", "y"],
    "unequal racks": ["x", "x", "x", "y", "z", "z"],
    "one each": ["x", "y", "z"],
    "one without": ["x", "x", None, "y"],
}
DEFAULT_BROKER = 9


def placement_of(racks: list[str | None], *fenced: int) -> Placement:
    brokers = {
        broker_id: BrokerImage(broker_id, 0, bytes(16), [], rack, broker_id in fenced, [])
        for broker_id, rack in enumerate(racks, 1)
    }
    return Placement(brokers, DEFAULT_BROKER)


@pytest.mark.parametrize("factor", [1, 2, 3])
@pytest.mark.parametrize("start", [0, 1, 5])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_leaders_are_even_and_replicas_in_as_many_racks_as_there_are(layout: str, start: int, factor: int) -> None:
    racks = LAYOUTS[layout]
    assignment = placement_of(racks).spread("t", 0, start, 3 * len(racks), factor)
    assert Counter(replicas[0] for replicas in assignment) == dict.fromkeys(range(1, len(racks) + 1), 3)
    for replicas in assignment:
        assert len(set(replicas)) == len(replicas) == factor
        assert len({racks[broker_id - 1] for broker_id in replicas}) == min(factor, len(set(racks)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_leaders_of_the_first_partitions_are_in_different_racks(layout: str) -> None:
    racks = LAYOUTS[layout]
    assignment = placement_of(racks).spread("t", 0, 0, len(set(racks)), 1)
    assert len({racks[replicas[0] - 1] for replicas in assignment}) == len(set(racks))


def test_neighbours_are_in_different_racks_where_racks_are_equal() -> None:
    for layout in ("two equal racks", "racks in turn", "one each"):
        racks = LAYOUTS[layout]
        leaders = [racks[replicas[0] - 1] for replicas in placement_of(racks).spread("t", 0, 0, 12, 1)]
        assert all(first != second for first, second in pairwise(leaders))


@pytest.mark.parametrize(
    ("factor", "fenced", "used"),
    [(1, (1, 3), {2, 4}), (2, (1, 3), {2, 4}), (3, (1, 3), {1, 2, 3, 4}), (1, (1, 2, 3, 4), {1, 2, 3, 4})],
)
def test_brokers_out_of_service_get_partitions_only_if_the_others_are_too_few(
    factor: int, fenced: tuple[int, ...], used: set[int]
) -> None:
    placement = placement_of(["x", "x", "y", "y"], *fenced)
    for name in ("t", GROUP_METADATA_TOPIC):
        assignment = placement.spread(name, 0, 0, 8, factor)
        assert {broker_id for replicas in assignment for broker_id in replicas} == used


def test_an_image_without_brokers_has_the_default_one() -> None:
    assert Placement({}, DEFAULT_BROKER).spread("t", 0, 4, 2, 1) == [[DEFAULT_BROKER], [DEFAULT_BROKER]]


def test_brokers_follow_each_other_where_racks_do_not_matter() -> None:
    assignment = placement_of([None, None, None]).spread("t", 0, 0, 4, 3)
    assert assignment == [[1, 2, 3], [2, 3, 1], [3, 1, 2], [1, 2, 3]]


@pytest.mark.parametrize(("name", "factor"), [("t", 1), (GROUP_METADATA_TOPIC, 2), (TRANSACTION_STATE_TOPIC, 3)])
def test_each_kind_of_topic_has_a_replication_factor_that_the_brokers_allow(name: str, factor: int) -> None:
    config = BrokerConfig.from_properties(
        {
            "default.replication.factor": "1",
            "offsets.topic.replication.factor": "2",
            "transaction.state.log.replication.factor": "5",
        }
    )
    assert placement_of([None, None, None]).default_replication_factor(name, config) == factor


def test_leaders_of_the_first_partitions_begin_with_the_first_broker_whatever_the_factor() -> None:
    for factor in (0, 1):
        assert [replicas[:1] for replicas in placement_of([None, None], 1).spread("t", 0, 0, 2, factor)] == (
            [[2], [2]] if factor else [[1], [2]]
        )


def brokers_with_folders() -> dict[int, BrokerImage]:
    """Brokers 1 to 3: broker 1 has two folders, broker 2 none, and broker 3 is out of service."""
    return {
        1: BrokerImage(1, 0, bytes(16), [], None, False, [b"a" * 16, b"b" * 16]),
        2: BrokerImage(2, 0, bytes(16), [], None, False, []),
        3: BrokerImage(3, 0, bytes(16), [], None, True, [b"c" * 16]),
    }


def image_of(assignments: dict[str, list[list[int]]], brokers: dict[int, BrokerImage]) -> MetadataImage:
    made = [
        record
        for number, (name, assignment) in enumerate(assignments.items(), 1)
        for record in (
            records.new_topic_record(name, bytes([number]) * 16),
            *partition_records(MetadataImage.empty(), bytes([number]) * 16, 0, assignment, 5),
        )
    ]
    image = ImageBuilder.of(made)
    image.brokers = brokers
    return image


def test_a_replica_is_in_the_first_folder_of_its_broker_and_in_sync_if_the_broker_is_in_service() -> None:
    image = image_of({}, brokers_with_folders())
    values = [record.value for record in partition_records(image, b"t" * 16, 4, [[1, 2], [3, 1]], 77)]
    assert values == [
        records.new_partition_record(b"t" * 16, 4, [1, 2], [b"a" * 16, ZERO_UUID], 77, [1, 2]).value,
        records.new_partition_record(b"t" * 16, 5, [3, 1], [b"c" * 16, b"a" * 16], 77, [1]).value,
    ]
    assert directories_of(image, [9]) == [ZERO_UUID]


def test_all_replicas_are_in_sync_if_no_broker_is_registered() -> None:
    (record,) = partition_records(MetadataImage.empty(), b"t" * 16, 0, [[7, 8]], 1)
    assert record.value == records.new_partition_record(b"t" * 16, 0, [7, 8], [ZERO_UUID] * 2, 1, [7, 8]).value


def test_partitions_move_if_their_replicas_or_their_leader_change_and_stay_otherwise() -> None:
    brokers = brokers_with_folders()
    brokers[3].fenced = False
    assignments = {"a": [[1], [2], [1]], "b": [[2], [1, 3]], "c": [[1, 2, 3, 4]], "d": []}
    image = image_of(assignments, brokers)
    image.topics["a"].partitions[0].leader = 3
    assert [record.value for record in move_records(image, DEFAULT_BROKER)] == [
        records.new_partition_change_record(bytes([1]) * 16, 0, [1], [b"a" * 16], 3).value,
        records.new_partition_change_record(bytes([1]) * 16, 2, [3], [b"c" * 16], 1).value,
        # The topic keeps the greatest replication factor of its partitions.
        records.new_partition_change_record(bytes([2]) * 16, 0, [2, 3], [ZERO_UUID, b"c" * 16], 2).value,
        records.new_partition_change_record(bytes([2]) * 16, 1, [3, 1], [b"c" * 16, b"a" * 16], 1).value,
        # Only three brokers are left of four.
        records.new_partition_change_record(bytes([3]) * 16, 0, [3, 1, 2], [b"c" * 16, b"a" * 16, ZERO_UUID], 1).value,
    ]
