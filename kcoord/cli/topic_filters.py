# SPDX-License-Identifier: Apache-2.0
"""The filters of `kcoord topics --describe`, as in kafka-topics.sh, such as --under-replicated-partitions. Pure."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from kcoord.client.admin.model import ConfigEntry, TopicDescription, TopicPartitionInfo

FILTERS: Final = {
    "under_replicated_partitions": "only partitions with replicas that are not in sync",
    "unavailable_partitions": "only partitions without a leader",
    "under_min_isr_partitions": "only partitions with fewer replicas in sync than min.insync.replicas",
    "at_min_isr_partitions": "only partitions with exactly min.insync.replicas in sync",
}
_MIN_ISR: Final = "min.insync.replicas"


def add_filters(parser: argparse.ArgumentParser) -> None:
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--topics-with-overrides", action="store_true", help="only topics with dynamic settings")
    for name, text in FILTERS.items():
        only.add_argument(f"--{name.replace('_', '-')}", action="store_true", help=text)


def filter_of(options: argparse.Namespace) -> str | None:
    """Returns the chosen filter, or None."""
    return next((name for name in FILTERS if getattr(options, name)), None)


def filtered(topic: TopicDescription, configs: Mapping[str, ConfigEntry], chosen: str | None) -> TopicDescription:
    """Returns the topic with only the partitions that match the filter."""
    if chosen is None:
        return topic
    entry = configs.get(_MIN_ISR)
    min_isr = int(entry.value) if entry is not None and entry.value else 1
    return replace(
        topic, partitions=[partition for partition in topic.partitions if _is_left(partition, chosen, min_isr)]
    )


def _is_left(partition: TopicPartitionInfo, chosen: str, min_isr: int) -> bool:
    in_sync = len(partition.isr)
    match chosen:
        case "under_replicated_partitions":
            return in_sync < len(partition.replicas)
        case "unavailable_partitions":
            return partition.leader is None
        case "under_min_isr_partitions":
            return in_sync < min_isr
        case _:
            return in_sync == min_isr
