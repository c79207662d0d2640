# SPDX-License-Identifier: Apache-2.0
"""Reads the values of group records: groups, members, assignments. The rows have the types in `schemas.VALUES`.

These records are few, so the broker's own decoder reads them one by one.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from typing import Final, TypeAlias

from kcoord.coordinator.group.classic.consumer_protocol import PROTOCOL_TYPE, read_assignment, read_topics
from kcoord.coordinator.group.records import EPOCH_REASON_TAG, empty_since_from
from kcoord_protocol.errors import DecodeError
from kcoord_protocol.messages import (
    ConsumerGroupCurrentMemberAssignmentValue,
    ConsumerGroupMemberMetadataValue,
    ConsumerGroupMetadataValue,
    ConsumerGroupRegularExpressionValue,
    ConsumerGroupTargetAssignmentMemberValue,
    ConsumerGroupTargetAssignmentMetadataValue,
    GroupMetadataValue,
    Message,
)
from kcoord_protocol.uuid import uuid_to_string

Row: TypeAlias = dict[str, object]

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_LATEST_MS: Final = 253_402_300_799_999
_STATES: Final = {0: "stable", 1: "unrevoked_partitions", 2: "unreleased_partitions"}


def moment(milliseconds: int) -> datetime | None:
    """Converts a timestamp. Returns None for a negative one ("unknown") and for one after the year 9999."""
    return _EPOCH + timedelta(milliseconds=milliseconds) if 0 <= milliseconds <= _LATEST_MS else None


def _assigned(topics: Iterable[tuple[bytes, list[int], list[int] | None]]) -> list[Row]:
    rows: list[Row] = []
    for topic_id, partitions, epochs in topics:
        name = uuid_to_string(topic_id)
        for number, partition in enumerate(partitions):
            epoch = epochs[number] if epochs is not None and number < len(epochs) else None
            rows.append({"topic": None, "topic_id": name, "partition": partition, "epoch": epoch})
    return rows


def _group(value: Message) -> Row:
    assert isinstance(value, ConsumerGroupMetadataValue)
    reasons = [data for tag, data in value.unknown_tagged_fields if tag == EPOCH_REASON_TAG]
    return {
        "epoch": value.epoch,
        "epoch_reason": reasons[0].decode("utf-8", "replace") if reasons else None,
        "metadata_hash": value.metadata_hash,
        "creation_timestamp": moment(value.creation_time_ms),
        "empty_since": moment(empty_since_from(value)),
    }


def _member(value: Message) -> Row:
    assert isinstance(value, ConsumerGroupMemberMetadataValue)
    classic = value.classic_member_metadata
    protocols = None
    if classic is not None:
        protocols = [{"name": protocol.name, "metadata": protocol.metadata} for protocol in classic.supported_protocols]
    return {
        "instance_id": value.instance_id,
        "rack_id": value.rack_id,
        "client_id": value.client_id,
        "client_host": value.client_host,
        "subscribed_topics": value.subscribed_topic_names,
        "subscribed_regex": value.subscribed_topic_regex or None,
        "rebalance_timeout_ms": value.rebalance_timeout_ms,
        "session_timeout_ms": None if classic is None else classic.session_timeout_ms,
        "server_assignor": value.server_assignor,
        "classic_protocols": protocols,
        "client_assignors": [
            {
                "name": assignor.name,
                "minimum_version": assignor.minimum_version,
                "maximum_version": assignor.maximum_version,
                "reason": assignor.reason,
                "metadata_version": assignor.metadata_version,
                "metadata": assignor.metadata_bytes,
            }
            for assignor in value.client_assignors
        ]
        or None,
    }


def _target(value: Message) -> Row:
    assert isinstance(value, ConsumerGroupTargetAssignmentMetadataValue)
    # A record without a time has the schema's default, 0.
    return {
        "assignment_epoch": value.assignment_epoch,
        "assignment_timestamp": moment(value.assignment_timestamp or -1),
        "client_assignor": value.assignor or None,
        "assigned_by": value.assigned_by or None,
    }


def _target_assignment(value: Message) -> list[Row]:
    assert isinstance(value, ConsumerGroupTargetAssignmentMemberValue)
    return _assigned((topic.topic_id, topic.partitions, None) for topic in value.topic_partitions)


def _current_assignment(value: Message) -> Row:
    assert isinstance(value, ConsumerGroupCurrentMemberAssignmentValue)
    owned, pending = value.assigned_partitions, value.partitions_pending_revocation
    return {
        "member_epoch": value.member_epoch,
        "previous_member_epoch": value.previous_member_epoch,
        "state": _STATES.get(value.state, str(value.state)),
        "assigned": _assigned((topic.topic_id, topic.partitions, topic.assignment_epochs) for topic in owned),
        "pending_revocation": _assigned(
            (topic.topic_id, topic.partitions, topic.assignment_epochs) for topic in pending
        ),
        "assignor_error": value.error or None,
        "assignor_metadata_version": value.metadata_version if value.metadata_version >= 0 else None,
        "assignor_metadata": value.metadata_bytes or None,
    }


def _regular_expression(value: Message) -> Row:
    assert isinstance(value, ConsumerGroupRegularExpressionValue)
    return {
        "topics": value.topics,
        "metadata_version": value.version,
        "resolved_timestamp": moment(value.timestamp),
    }


def _classic_group(value: Message) -> Row:
    assert isinstance(value, GroupMetadataValue)
    is_consumer = value.protocol_type == PROTOCOL_TYPE
    return {
        "protocol_type": value.protocol_type,
        "generation": value.generation,
        "protocol": value.protocol,
        "leader": value.leader,
        "state_timestamp": moment(value.current_state_timestamp),
        "members": [_classic_member(member, is_consumer=is_consumer) for member in value.members],
    }


def _classic_member(member: GroupMetadataValue.MemberMetadata, *, is_consumer: bool) -> Row:
    assignment = read_assignment(member.assignment) if is_consumer else None
    return {
        "member_id": member.member_id,
        "instance_id": member.group_instance_id,
        "client_id": member.client_id,
        "client_host": member.client_host,
        "rebalance_timeout_ms": member.rebalance_timeout,
        "session_timeout_ms": member.session_timeout,
        "subscribed_topics": read_topics(member.subscription) if is_consumer else None,
        "assigned": None
        if assignment is None
        else [
            {"topic": topic.topic, "topic_id": None, "partition": partition, "epoch": None}
            for topic in assignment.assigned_partitions
            for partition in topic.partitions
        ],
        "subscription": member.subscription,
        "assignment": member.assignment,
    }


VALUE_READERS: Final[dict[int, tuple[type[Message], Callable[[Message], object]]]] = {
    2: (GroupMetadataValue, _classic_group),
    3: (ConsumerGroupMetadataValue, _group),
    5: (ConsumerGroupMemberMetadataValue, _member),
    6: (ConsumerGroupTargetAssignmentMetadataValue, _target),
    7: (ConsumerGroupTargetAssignmentMemberValue, _target_assignment),
    8: (ConsumerGroupCurrentMemberAssignmentValue, _current_assignment),
    16: (ConsumerGroupRegularExpressionValue, _regular_expression),
}
"""Record type -> (class of its value, function that makes an entry of the type in `schemas.VALUES`)."""


def read_value(record_type: int, data: bytes) -> tuple[object | None, str | None]:
    """Returns (entry, error). Both are None for an unknown version."""
    cls, reader = VALUE_READERS[record_type]
    if len(data) < 2:
        return None, f"the value has {len(data)} bytes"
    version = int.from_bytes(data[:2], "big", signed=True)
    if version not in cls.valid_versions:
        return None, None
    try:
        return reader(cls.decode(data[2:], version)), None
    except DecodeError as error:
        return None, str(error)


def to_json(entry: object) -> str:
    """Encodes an entry as JSON, in the form that `schemas.Value` describes."""
    return json.dumps(entry, default=_plain, ensure_ascii=False, separators=(",", ":"))


def _plain(value: object) -> str:
    if isinstance(value, bytes):
        return b64encode(value).decode()
    assert isinstance(value, datetime)
    return value.isoformat(timespec="milliseconds").replace("+00:00", "Z")
