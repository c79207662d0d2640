# SPDX-License-Identifier: Apache-2.0
"""The partitions that pass the filters of `kcoord topics --describe`."""

from __future__ import annotations

import pytest

from kcoord.cli.topic_filters import filter_of, filtered
from kcoord.cli.topics import make_parser
from kcoord.client.admin.model import ConfigEntry, ConfigSource, TopicDescription, TopicPartitionInfo
from kcoord.client.types import Node

BROKER = Node(1, "h", 1)


def partition(number: int, leader: Node | None, isr: list[int]) -> TopicPartitionInfo:
    return TopicPartitionInfo(number, leader, 0, [1, 2, 3], isr, [])


TOPIC = TopicDescription(
    "t",
    bytes(16),
    False,
    [partition(0, BROKER, [1, 2, 3]), partition(1, BROKER, [1, 2]), partition(2, BROKER, [1]), partition(3, None, [])],
)
MIN_ISR = {"min.insync.replicas": ConfigEntry("min.insync.replicas", "2", ConfigSource.DYNAMIC_TOPIC_CONFIG)}


@pytest.mark.parametrize(
    ("option", "left"),
    [
        (None, [0, 1, 2, 3]),
        ("--under-replicated-partitions", [1, 2, 3]),
        ("--unavailable-partitions", [3]),
        ("--under-min-isr-partitions", [2, 3]),
        ("--at-min-isr-partitions", [1]),
    ],
)
def test_filters(option: str | None, left: list[int]) -> None:
    options = make_parser().parse_args(["--describe", *([option] if option else [])])
    assert [partition.partition for partition in filtered(TOPIC, MIN_ISR, filter_of(options)).partitions] == left


def test_two_filters_are_an_error() -> None:
    with pytest.raises(SystemExit):
        make_parser().parse_args(["--describe", "--unavailable-partitions", "--topics-with-overrides"])
