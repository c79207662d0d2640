# SPDX-License-Identifier: Apache-2.0
"""What a new group or member may look like: the limits that keep strangers from filling the memory of a coordinator.

Kafka has none of them; the defaults are beyond what an honest client asks for. They hold for what is to be made, so
that a group that is older than a limit can still be used and deleted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kcoord_protocol.errors import Errors, KafkaError

if TYPE_CHECKING:
    from kcoord.config import BrokerConfig


def check_new_group(config: BrokerConfig, group_id: str, present_groups: int) -> None:
    """INVALID_GROUP_ID beyond kcoord.max.id.bytes, POLICY_VIOLATION beyond kcoord.partition.max.groups."""
    if _is_too_long(config, group_id):
        raise KafkaError(
            Errors.INVALID_GROUP_ID, f"The group id is longer than kcoord.max.id.bytes={config.kcoord_max_id_bytes}."
        )
    limit = config.kcoord_partition_max_groups
    if present_groups >= limit:
        raise KafkaError(
            Errors.POLICY_VIOLATION, f"This coordinator partition has kcoord.partition.max.groups={limit} groups."
        )


def check_new_member(config: BrokerConfig, member_id: str, instance_id: str | None) -> None:
    """INVALID_REQUEST where an id is longer than kcoord.max.id.bytes."""
    for name, text in (("member id", member_id), ("group instance id", instance_id or "")):
        if _is_too_long(config, text):
            raise KafkaError(
                Errors.INVALID_REQUEST, f"The {name} is longer than kcoord.max.id.bytes={config.kcoord_max_id_bytes}."
            )


def _is_too_long(config: BrokerConfig, text: str) -> bool:
    limit = config.kcoord_max_id_bytes
    return len(text) > limit or (not text.isascii() and len(text.encode()) > limit)
