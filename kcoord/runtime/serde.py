# SPDX-License-Identifier: Apache-2.0
"""Records to bytes and back, in the framing of Kafka's coordinator logs and of its metadata log.

A record of an unknown type or version gives None: it was written by a newer release, and whoever reads the log counts
and skips it (KIP-915 does the same for downgrades). Bytes that contradict their own type and version are an error
instead.
"""

from __future__ import annotations

from collections.abc import Iterable
from struct import Struct
from typing import Final, Protocol, TypeAlias

from kcoord.runtime.result import CoordinatorRecord
from kcoord_protocol.errors import DecodeError
from kcoord_protocol.messages import Message, message_class
from kcoord_protocol.primitives import decode_uvarint, encode_uvarint

SerializedRecord: TypeAlias = tuple[bytes | None, bytes | None]

GROUP_RECORDS: Final = (
    "OffsetCommit",
    "GroupMetadata",
    "ConsumerGroupMetadata",
    "ConsumerGroupPartitionMetadata",
    "ConsumerGroupMemberMetadata",
    "ConsumerGroupTargetAssignmentMetadata",
    "ConsumerGroupTargetAssignmentMember",
    "ConsumerGroupCurrentMemberAssignment",
    "ConsumerGroupRegularExpression",
)
TRANSACTION_RECORDS: Final = ("TransactionLog",)
METADATA_RECORDS: Final = (
    "AccessControlEntryRecord",
    "BrokerRegistrationChangeRecord",
    "ClearElrRecord",
    "ClientQuotaRecord",
    "ConfigRecord",
    "DelegationTokenRecord",
    "FeatureLevelRecord",
    "FenceBrokerRecord",
    "NoOpRecord",
    "PartitionChangeRecord",
    "PartitionRecord",
    "ProducerIdsRecord",
    "RegisterBrokerRecord",
    "RegisterControllerRecord",
    "RemoveAccessControlEntryRecord",
    "RemoveDelegationTokenRecord",
    "RemoveTopicRecord",
    "RemoveUserScramCredentialRecord",
    "TopicRecord",
    "UnfenceBrokerRecord",
    "UnregisterBrokerRecord",
    "UserScramCredentialRecord",
)
_INT16: Final = Struct(">h")
_METADATA_FRAME_VERSION: Final = 1
_METADATA_FRAME: Final = encode_uvarint(_METADATA_FRAME_VERSION)


class RecordSerde(Protocol):
    """How the records of one kind of log look in bytes."""

    def serialize(self, record: CoordinatorRecord) -> SerializedRecord: ...

    def deserialize(self, key: bytes | None, value: bytes | None) -> CoordinatorRecord | None:
        """The record, or None for one of an unknown type or version. DecodeError where the bytes are malformed."""

    def describe(self, key: bytes | None, value: bytes | None) -> str:
        """Type and version of a record that could not be deserialized, for a log line."""


class CoordinatorSerde:
    """Kafka's coordinator records: an int16 type before the key, an int16 version before the value.

    `names` are the record types of the log without `Key` and `Value`; each log numbers its types on its own.
    """

    def __init__(self, names: Iterable[str] = GROUP_RECORDS) -> None:
        self._types: dict[int, tuple[type[Message], type[Message]]] = {}
        for name in names:
            key_class = message_class(f"{name}Key")
            self._types[key_class.api_key] = key_class, message_class(f"{name}Value")
        self._type_prefixes = {key_class: _INT16.pack(number) for number, (key_class, _) in self._types.items()}
        # Offset commits of old Kafka releases have type 0 where today's have 1; the key is the same.
        if 1 in self._types and 0 not in self._types:
            self._types[0] = self._types[1]

    def serialize(self, record: CoordinatorRecord) -> SerializedRecord:
        key = record.key
        assert key is not None, "a coordinator record has a key"
        key_bytes = self._type_prefixes[type(key)] + key.encode(0)
        if record.value is None:
            return key_bytes, None
        version = record.value_version
        return key_bytes, _INT16.pack(version) + record.value.encode(version)

    def deserialize(self, key: bytes | None, value: bytes | None) -> CoordinatorRecord | None:
        if key is None:
            return None
        classes = self._types.get(_int16(key, "key"))
        if classes is None:
            return None
        key_class, value_class = classes
        if value is None:
            return CoordinatorRecord(key_class.decode(key[2:], 0), None)
        version = _int16(value, "value")
        if version not in value_class.valid_versions:
            return None
        return CoordinatorRecord(key_class.decode(key[2:], 0), value_class.decode(value[2:], version), version)

    def describe(self, key: bytes | None, value: bytes | None) -> str:
        if key is None:
            return "a record without a key"
        version = "" if value is None else f", version {_int16(value, 'value')}"
        return f"record type {_int16(key, 'key')}{version}"


class MetadataSerde:
    """Kafka's metadata records: no key; the value starts with a frame version, the type and the version as varints."""

    def __init__(self, names: Iterable[str] = METADATA_RECORDS) -> None:
        classes = [message_class(name) for name in names]
        self._types = {cls.api_key: cls for cls in classes}
        self._prefixes = {cls: _METADATA_FRAME + encode_uvarint(cls.api_key) for cls in classes}

    def serialize(self, record: CoordinatorRecord) -> SerializedRecord:
        value = record.value
        assert value is not None, "a metadata record has a value"
        version = record.value_version
        return None, self._prefixes[type(value)] + encode_uvarint(version) + value.encode(version)

    def deserialize(self, key: bytes | None, value: bytes | None) -> CoordinatorRecord | None:
        if value is None:
            return None
        frame_version, record_type, version, position = _metadata_header(value)
        cls = self._types.get(record_type)
        if frame_version != _METADATA_FRAME_VERSION or cls is None or version not in cls.valid_versions:
            return None
        return CoordinatorRecord(None, cls.decode(value[position:], version), version)

    def describe(self, key: bytes | None, value: bytes | None) -> str:
        if value is None:
            return "a record without a value"
        frame_version, record_type, version, _ = _metadata_header(value)
        return f"frame version {frame_version}, record type {record_type}, version {version}"


def _int16(data: bytes, what: str) -> int:
    if len(data) < 2:
        raise DecodeError(f"the {what} of a coordinator record has {len(data)} bytes")
    number: int = _INT16.unpack_from(data)[0]
    return number


def _metadata_header(value: bytes) -> tuple[int, int, int, int]:
    """Frame version, record type, record version, and where the record starts."""
    try:
        frame_version, position = decode_uvarint(value, 0)
        record_type, position = decode_uvarint(value, position)
        version, position = decode_uvarint(value, position)
    except (IndexError, ValueError) as error:
        raise DecodeError("the header of a metadata record is cut off or not made of varints") from error
    return frame_version, record_type, version, position
