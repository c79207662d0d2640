# SPDX-License-Identifier: Apache-2.0
"""The requests that an audit log has as changes, as JSON objects without secrets, and the errors of their responses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import IntEnum
from itertools import islice
from typing import Final, TypeAlias

from kcoord.metadata.image import (
    BROKER_LOGGER_RESOURCE,
    BROKER_RESOURCE,
    CLIENT_METRICS_RESOURCE,
    GROUP_RESOURCE,
    TOPIC_RESOURCE,
)
from kcoord_protocol.acls import AclOperation, PatternType, PermissionType, ResourceType
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors
from kcoord_protocol.message import Message, Struct
from kcoord_protocol.messages import LeaveGroupRequest, OffsetCommitRequest, TxnOffsetCommitRequest
from kcoord_protocol.scram_mechanisms import ScramMechanism
from kcoord_protocol.uuid import ZERO_UUID, uuid_to_string

TopicName: TypeAlias = Callable[[bytes], str | None]

CHANGES: Final = frozenset(
    {
        ApiKey.ALTER_CLIENT_QUOTAS,
        ApiKey.ALTER_CONFIGS,
        ApiKey.ALTER_PARTITION_REASSIGNMENTS,
        ApiKey.ALTER_REPLICA_LOG_DIRS,
        ApiKey.ALTER_USER_SCRAM_CREDENTIALS,
        ApiKey.BROKER_HEARTBEAT,
        ApiKey.CREATE_ACLS,
        ApiKey.CREATE_DELEGATION_TOKEN,
        ApiKey.CREATE_PARTITIONS,
        ApiKey.CREATE_TOPICS,
        ApiKey.DELETE_ACLS,
        ApiKey.DELETE_GROUPS,
        ApiKey.DELETE_RECORDS,
        ApiKey.DELETE_TOPICS,
        ApiKey.ELECT_LEADERS,
        ApiKey.EXPIRE_DELEGATION_TOKEN,
        ApiKey.INCREMENTAL_ALTER_CONFIGS,
        ApiKey.OFFSET_DELETE,
        ApiKey.RENEW_DELEGATION_TOKEN,
        ApiKey.UNREGISTER_BROKER,
        ApiKey.UPDATE_FEATURES,
        ApiKey.WRITE_TXN_MARKERS,
    }
)
"""The APIs of administrators that change something. LeaveGroup counts too if an administrator removes members."""

_REMOVED_BY_ADMIN: Final = "member was removed by an admin"
"""The beginning of the reason that Kafka's admin client sends in LeaveGroup."""

MOST_PARTS: Final = 200
"""An entry has no more topics, partitions and other parts of its request, and no more decisions and errors.

A client could otherwise fill the file and the memory with one denied request of many partitions.
"""
_MOST_RESULTS: Final = 10_000
"""No more results of a response are searched for errors, since that blocks the event loop."""

_LEFT_OUT: Final = frozenset({"value", "timeout_ms", "retention_time_ms"})
"""Values of configs are left out, since any of them may be a password. The times are no part of a change."""

_CONFIG_TYPES: Final[Mapping[int, str]] = {
    TOPIC_RESOURCE: "TOPIC",
    BROKER_RESOURCE: "BROKER",
    BROKER_LOGGER_RESOURCE: "BROKER_LOGGER",
    CLIENT_METRICS_RESOURCE: "CLIENT_METRICS",
    GROUP_RESOURCE: "GROUP",
}
_CONFIG_OPERATIONS: Final[Mapping[int, str]] = {0: "SET", 1: "DELETE", 2: "APPEND", 3: "SUBTRACT"}


def _names(codes: type[IntEnum]) -> Mapping[int, str]:
    return {int(code): code.name for code in codes}


_ACL_NAMES: Final[Mapping[str, Mapping[int, str]]] = {
    "resource_type": _names(ResourceType),
    "resource_type_filter": _names(ResourceType),
    "resource_pattern_type": _names(PatternType),
    "pattern_type": _names(PatternType),
    "pattern_type_filter": _names(PatternType),
    "operation": _names(AclOperation),
    "permission_type": _names(PermissionType),
}
_OTHER_NAMES: Final[Mapping[str, Mapping[int, str]]] = {
    "resource_type": _CONFIG_TYPES,
    "config_operation": _CONFIG_OPERATIONS,
    "mechanism": {int(mechanism): mechanism.mechanism_name for mechanism in ScramMechanism},
}
_NAMING: Final = frozenset(
    {"name", "topic", "topic_name", "topic_id", "group_id", "user", "resource_name", "feature", "member_id"}
    | {"group_instance_id", "partition_index", "partition_id", "producer_id"}
)
"""Fields of a response that say which resource an error is about."""


def is_change(key: ApiKey, request: Message) -> bool:
    """Returns whether an administrator's request changes something."""
    if key in CHANGES:
        return True
    return isinstance(request, LeaveGroupRequest) and any(
        not member.member_id or (member.reason or "").startswith(_REMOVED_BY_ADMIN) for member in request.members
    )


def is_commit_without_member(request: Message) -> bool:
    """Returns whether a client that is no member commits offsets: a reset, or a consumer that assigns itself."""
    return (
        isinstance(request, OffsetCommitRequest | TxnOffsetCommitRequest) and request.generation_id_or_member_epoch < 0
    )


def fields_of(key: ApiKey, message: Message, topic_name: TopicName) -> dict[str, object]:
    """Returns the fields of a request under Kafka's names, without secrets.

    Empty fields are left out. A topic that is named by its id gets its name, too, if it exists.
    """
    names = _ACL_NAMES if key in (ApiKey.CREATE_ACLS, ApiKey.DELETE_ACLS) else _OTHER_NAMES
    return _fields(message, names, topic_name, iter(range(MOST_PARTS)))


def _fields(
    message: Struct, names: Mapping[str, Mapping[int, str]], topic_name: TopicName, places: Iterator[int]
) -> dict[str, object]:
    """`places` has an element for each part that the entry may still have."""
    fields: dict[str, object] = {}
    for name in _slots(message):
        value = getattr(message, name)
        if name == "value" and isinstance(value, float):
            fields["value"] = value  # The value of a quota.
        elif name in _LEFT_OUT or value is None or value == [] or value in (b"", ""):
            continue
        elif isinstance(value, list):
            parts = [
                _fields(part, names, topic_name, places) if isinstance(part, Struct) else _plain(part)
                for part, _ in zip(value, places, strict=False)
            ]
            fields[_kafka_name(name)] = parts
            if len(parts) < len(value):
                fields[f"{_kafka_name(name)}LeftOut"] = len(value) - len(parts)
        elif isinstance(value, bytes):
            # All other bytes of these requests are secrets, such as the HMAC of a delegation token.
            if name == "topic_id" and value != ZERO_UUID:
                fields["topicId"] = uuid_to_string(value)
                if "name" not in fields and (topic := topic_name(value)) is not None:
                    fields["name"] = topic
        else:
            fields[_kafka_name(name)] = names[name].get(value, value) if name in names else value
    return fields


def _slots(message: Struct) -> Iterable[str]:
    slots: Iterable[str] = type(message).__slots__
    return slots


def _plain(value: object) -> object:
    return uuid_to_string(value) if isinstance(value, bytes) else value


def _kafka_name(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest)


def errors_of(message: Message) -> list[dict[str, object]]:
    """Returns the first errors in a response, each with the resource that it is about."""
    return [*islice(_errors(message, {}, iter(range(_MOST_RESULTS))), MOST_PARTS)]


def _errors(message: Struct, resource: Mapping[str, object], places: Iterator[int]) -> Iterator[dict[str, object]]:
    """`places` has an element for each result that may still be examined."""
    parts: list[Struct] = []
    inner = dict(resource)
    code = 0
    for name in _slots(message):
        value = getattr(message, name)
        if name == "error_code":
            code = value
        elif isinstance(value, list):
            parts += [part for part in value if isinstance(part, Struct)]
        elif name in _NAMING and value not in (None, "", ZERO_UUID):
            inner[_kafka_name(name)] = _plain(value)
    if code:
        yield {**inner, "error": Errors(code).name}
    for part, _ in zip(parts, places, strict=False):
        yield from _errors(part, inner, places)
