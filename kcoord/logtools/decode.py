# SPDX-License-Identifier: Apache-2.0
"""Records of every kind of log as JSON, with the names and the form that Kafka's own kafka-dump-log prints.

Bytes that cannot be decoded are shown as base64, never left out. SCRAM credentials and configs are shown without
their secrets.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Callable
from enum import Enum
from typing import Final, TypeAlias

from kcoord.config.keys import broker_key
from kcoord.coordinator.group.classic.consumer_protocol import (
    PROTOCOL_TYPE,
    read_assignment,
    read_subscription,
    read_version,
)
from kcoord.metadata.image import BROKER_RESOURCE
from kcoord.runtime.result import CoordinatorRecord
from kcoord.runtime.serde import METADATA_RECORDS, CoordinatorSerde, MetadataSerde
from kcoord_protocol.control_records import ControlRecordType, decode_control_key, decode_end_txn_marker
from kcoord_protocol.errors import DecodeError
from kcoord_protocol.internal_topics import CLUSTER_METADATA_TOPIC, GROUP_METADATA_TOPIC, TRANSACTION_STATE_TOPIC
from kcoord_protocol.json_form import to_json
from kcoord_protocol.message import HIDDEN
from kcoord_protocol.messages import ConfigRecord, GroupMetadataValue, Message, message_class
from kcoord_protocol.record_batch import Record

Json: TypeAlias = dict[str, object]
Described: TypeAlias = tuple[object, object]

TRANSACTION_RECORDS: Final = ("TransactionLog",)
ALL_METADATA_RECORDS: Final = (
    *METADATA_RECORDS,
    "AbortTransactionRecord",
    "BeginTransactionRecord",
    "EndTransactionRecord",
)
_CONTROL_VALUES: Final = {
    ControlRecordType.LEADER_CHANGE: "LeaderChangeMessage",
    ControlRecordType.SNAPSHOT_HEADER: "SnapshotHeaderRecord",
    ControlRecordType.SNAPSHOT_FOOTER: "SnapshotFooterRecord",
    ControlRecordType.KRAFT_VERSION: "KRaftVersionRecord",
    ControlRecordType.KRAFT_VOTERS: "VotersRecord",
}


class LogKind(Enum):
    """The kind of records that a log holds."""

    OFFSETS = "offsets"
    METADATA = "metadata"
    TRANSACTIONS = "transactions"
    DATA = "data"


_KINDS: Final = {
    GROUP_METADATA_TOPIC: LogKind.OFFSETS,
    TRANSACTION_STATE_TOPIC: LogKind.TRANSACTIONS,
    CLUSTER_METADATA_TOPIC: LogKind.METADATA,
}


def kind_of(topic: str) -> LogKind:
    return _KINDS.get(topic, LogKind.DATA)


class RecordDescriber:
    """Turns keys and values into JSON. Bytes that do not match their declared type are shown as base64."""

    def __init__(self, kind: LogKind) -> None:
        self.kind = kind
        self._describe: Callable[[Record], Described] = {
            LogKind.OFFSETS: self._coordinator,
            LogKind.TRANSACTIONS: self._coordinator,
            LogKind.METADATA: self._metadata,
            LogKind.DATA: _data,
        }[kind]
        self._coordinator_serde = (
            CoordinatorSerde(TRANSACTION_RECORDS) if kind is LogKind.TRANSACTIONS else CoordinatorSerde()
        )
        self._metadata_serde = MetadataSerde(ALL_METADATA_RECORDS)

    def describe(self, record: Record, *, is_control: bool = False) -> Described:
        """Returns the key and the value as JSON."""
        try:
            return _control(record) if is_control else self._describe(record)
        except DecodeError as error:
            return {"error": str(error), **_raw(record.key)}, _raw(record.value)

    def check(self, record: Record, *, is_control: bool = False) -> None:
        """Raises DecodeError if the bytes do not match their declared type. Faster than `describe`."""
        if is_control:
            _control(record)
        elif self.kind is LogKind.METADATA:
            self._metadata_serde.deserialize(record.key, record.value)
        elif self.kind is not LogKind.DATA:
            self._coordinator_serde.deserialize(record.key, record.value)

    def _coordinator(self, record: Record) -> Described:
        decoded = self._coordinator_serde.deserialize(record.key, record.value)
        if decoded is None or decoded.key is None:
            return _unknown_coordinator_record(record)
        assert record.key is not None
        key: Json = {"type": str(int.from_bytes(record.key[:2], "big", signed=True)), "data": to_json(decoded.key, 0)}
        value = _versioned(decoded)
        if isinstance(decoded.value, GroupMetadataValue) and decoded.value.protocol_type == PROTOCOL_TYPE:
            _open_members(value, decoded.value)
        return key, value

    def _metadata(self, record: Record) -> Described:
        decoded = self._metadata_serde.deserialize(record.key, record.value)
        if decoded is None or decoded.value is None:
            return _raw(record.key), {
                "unknown": self._metadata_serde.describe(record.key, record.value),
                **_raw(record.value),
            }
        version = decoded.value_version
        data = to_json(decoded.value, version, hides_secrets=True)
        if isinstance(decoded.value, ConfigRecord):
            data["value"] = shown_config(decoded.value.resource_type, decoded.value.name, decoded.value.value)
        return None, {
            "type": _constant_case(decoded.value.message_name),
            "version": version,
            "data": data,
            **_unknown_tags(decoded.value),
        }


def shown_config(resource_type: int, name: str, value: str | None) -> str | None:
    """Returns the value of a config, or HIDDEN: a password of a broker, or an unknown key, which may be one."""
    if value is None or resource_type != BROKER_RESOURCE:
        return value
    key = broker_key(name)
    return HIDDEN if key is None or key.sensitive else value


def _versioned(record: CoordinatorRecord) -> Json | None:
    if record.value is None:
        return None
    version = record.value_version
    return {"version": str(version), "data": to_json(record.value, version), **_unknown_tags(record.value)}


def _open_members(value: Json | None, group: GroupMetadataValue) -> None:
    """Replaces the subscription and assignment bytes of the classic protocol by JSON, if they can be decoded."""
    data = value["data"] if value is not None else None
    members = data["members"] if isinstance(data, dict) else []
    for shown, member in zip(members, group.members, strict=True):
        subscription, assignment = read_subscription(member.subscription), read_assignment(member.assignment)
        if subscription is not None:
            shown["subscription"] = to_json(subscription, _version_of(member.subscription, subscription))
        if assignment is not None:
            shown["assignment"] = to_json(assignment, _version_of(member.assignment, assignment))


def _version_of(data: bytes, message: Message) -> int:
    return min(read_version(data) or 0, message.valid_versions[-1])


def _unknown_tags(message: Message) -> Json:
    """Tagged fields that are not in the schema, such as kcoord's own reason for a group epoch."""
    if not message.unknown_tagged_fields:
        return {}
    return {"unknownTaggedFields": {str(tag): _text_or_base64(data) for tag, data in message.unknown_tagged_fields}}


def _unknown_coordinator_record(record: Record) -> Described:
    key: Json = {}
    value: Json = {}
    if record.key is not None and len(record.key) >= 2:
        key["type"] = str(int.from_bytes(record.key[:2], "big", signed=True))
    if record.value is not None and len(record.value) >= 2:
        value["version"] = str(int.from_bytes(record.value[:2], "big", signed=True))
    return {**key, **_raw(record.key)}, None if record.value is None else {**value, **_raw(record.value)}


def _control(record: Record) -> Described:
    control_type = decode_control_key(record.key)
    if control_type is None:
        return {"control": "UNKNOWN", **_raw(record.key)}, _raw(record.value)
    key: Json = {"control": control_type.name}
    if control_type in (ControlRecordType.COMMIT, ControlRecordType.ABORT):
        return key, {"coordinatorEpoch": decode_end_txn_marker(record.value)}
    cls = message_class(_CONTROL_VALUES[control_type])
    data = record.value or b""
    version = int.from_bytes(data[:2], "big", signed=True)
    if version not in cls.valid_versions:
        return key, _raw(record.value)
    return key, {"version": str(version), "data": to_json(cls.decode_prefix(data, 0, version)[0], version)}


def _data(record: Record) -> Described:
    return _text_or_base64(record.key), _text_or_base64(record.value)


def _raw(data: bytes | None) -> Json:
    return {"base64": None if data is None else b64encode(data).decode("ascii")}


def _text_or_base64(data: bytes | None) -> object:
    """Returns UTF-8 bytes as text, and other bytes as {"base64": ...}."""
    if data is None:
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return _raw(data)


def headers_json(headers: list[tuple[str, bytes | None]]) -> list[Json]:
    return [{"key": name, "value": _text_or_base64(value)} for name, value in headers]


def _constant_case(name: str) -> str:
    """Converts a name such as TopicRecord to TOPIC_RECORD."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).upper()


def group_id_of(key: bytes | None) -> str | None:
    """The group of a coordinator record. Works for unknown record types too, since every key begins with the group."""
    if key is None or len(key) < 4:
        return None
    end = 4 + int.from_bytes(key[2:4], "big", signed=True)
    if not 4 <= end <= len(key):
        return None
    try:
        return key[4:end].decode()
    except UnicodeDecodeError:
        return None
