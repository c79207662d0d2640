# SPDX-License-Identifier: Apache-2.0
"""Parses requests from the text of a command: `OffsetCommit v8 group=g member=A epoch=2 offsets=foo:0@5,1@7`.

The first word is the name of the API in Kafka's schemas. The second word may be a version. Each argument sets a field
by its name in the schema (`sessionTimeoutMs=6000`) or by a short name of `_SHORT`. The other fields have the schema's
defaults, or values that a client would send. Partitions are `foo:0-3,5;bar:0`, lists `a,b`, an empty list or text is
`none`, and null is `null`. `client=A` selects the connection and the client id.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from kcoord.coordinator.group.classic import consumer_protocol
from kcoord_protocol.json_form import from_json
from kcoord_protocol.messages import ConsumerProtocolSubscription, Message, message_class
from kcoord_protocol.schema import FieldSchema
from tests.transcripts.names import NO_TOPIC_ID, Names

VERSIONS: Final = {
    "ConsumerGroupHeartbeat": 1,
    "ConsumerGroupDescribe": 1,
    "JoinGroup": 9,
    "SyncGroup": 5,
    "Heartbeat": 4,
    "LeaveGroup": 5,
    "OffsetCommit": 9,
    "OffsetFetch": 9,
    "OffsetDelete": 0,
    "DescribeGroups": 6,
    "ListGroups": 5,
    "DeleteGroups": 2,
    "InitProducerId": 5,
    "AddPartitionsToTxn": 3,
    "AddOffsetsToTxn": 4,
    "TxnOffsetCommit": 5,
    "EndTxn": 5,
    "WriteTxnMarkers": 1,
    "DescribeTransactions": 0,
    "ListTransactions": 1,
}
"""The version of a request without a version: the newest version that Kafka 4.3.1 serves to clients, if it has topic
names.
"""
_SHORT: Final = {
    "group": ("groupId",),
    "groups": ("groups", "groupIds", "groupsNames"),
    "member": ("memberId",),
    "epoch": ("memberEpoch", "producerEpoch", "generationIdOrMemberEpoch"),
    "generation": ("generationId", "generationIdOrMemberEpoch"),
    "instance": ("instanceId", "groupInstanceId"),
    "rack": ("rackId",),
    "assignor": ("serverAssignor",),
    "subscribe": ("subscribedTopicNames",),
    "regex": ("subscribedTopicRegex",),
    "owned": ("topicPartitions",),
    "session": ("sessionTimeoutMs",),
    "rebalance": ("rebalanceTimeoutMs",),
    "states": ("statesFilter", "stateFilters"),
    "types": ("typesFilter",),
    "id": ("transactionalId",),
    "ids": ("transactionalIds",),
    "timeout": ("transactionTimeoutMs",),
    "producer": ("producerId",),
    "retention": ("retentionTimeMs",),
}
_GROUP_FIELDS: Final = ("groupId", "groupIds", "groupsNames", "transactionalId", "transactionalIds")
_OFFSET_FETCH_GROUPS_VERSION: Final = 8
_TOPIC_ID_VERSIONS: Final = {"OffsetCommit": 10, "OffsetFetch": 10, "TxnOffsetCommit": 6}
_NAMED_PROTOCOL_VERSION: Final = 5
"""SyncGroup names the protocol from this version on."""
_MEMBERS_VERSION: Final = 3
"""LeaveGroup removes several members from this version on."""

Arguments = dict[str, str]
Partitions = dict[str, list[int]]


class CommandError(ValueError):
    """A command cannot be parsed."""


@dataclass(slots=True)
class Request:
    """A parsed request, and the client that sends it."""

    api: str
    version: int
    client: str
    message: Message


def parse_partitions(text: str) -> Partitions:
    """Parses `foo:0-3,5;bar:0`; returns the partitions by topic."""
    topics: Partitions = {}
    for part in text.split(";") if text != "none" else ():
        topic, _, ranges = part.rpartition(":")
        for span in filter(None, ranges.split(",")):
            first, _, last = span.partition("-")
            topics.setdefault(topic, []).extend(range(int(first), int(last or first) + 1))
        topics.setdefault(topic, [])
    return topics


def parse_offsets(text: str) -> dict[str, dict[int, int]]:
    """Parses `foo:0@5,1@7;bar:0@3`; returns the offsets by topic and partition."""
    topics: dict[str, dict[int, int]] = {}
    for part in filter(None, text.split(";")):
        topic, _, cells = part.rpartition(":")
        for cell in cells.split(","):
            partition, _, offset = cell.partition("@")
            topics.setdefault(topic, {})[int(partition)] = int(offset)
    return topics


def parse_request(text: str, names: Names) -> Request:
    """Returns the request of a command. Raises CommandError if the text has no such API or field."""
    api, *words = shlex.split(text)
    try:
        message = message_class(f"{api}Request")()
    except KeyError:
        raise CommandError(f"API {api} does not exist") from None
    version = VERSIONS.get(api, message.valid_versions.stop - 1)
    if words and re.fullmatch(r"v\d+", words[0]):
        version = int(words.pop(0)[1:])
    arguments: Arguments = {}
    for word in words:
        name, separator, value = word.partition("=")
        if not separator:
            raise CommandError(f"{word!r} is not NAME=VALUE")
        arguments[name] = value
    client = arguments.pop("client", "") or _client_of(arguments.get("member", ""))
    _BUILDERS.get(api, _build)(message, version, arguments, names)
    return Request(api, version, client, message)


def _client_of(member: str) -> str:
    """Returns the client of a member, which has its own connection: A-1 is a member id of client A."""
    return re.sub(r"-\d+$", "", member) or "c"


# --- fields -----------------------------------------------------------------------------------------------------------


def _build(message: Message, version: int, arguments: Arguments, names: Names) -> None:
    """Sets each field that an argument names."""
    fields = {field.json_name: field for field in message.schema.fields if version in field.versions}
    for name, text in arguments.items():
        field = next((fields[full] for full in (*_SHORT.get(name, ()), name) if full in fields), None)
        if field is None:
            raise CommandError(f"{type(message).__name__} v{version} has no field {name}")
        setattr(message, field.attribute, _value(field, text, message, version, names))


def _value(field: FieldSchema, text: str, message: Message, version: int, names: Names) -> Any:
    if text == "null":
        return None
    if text[:1] in "[{" and field.is_struct:
        document = {field.json_name: json.loads(text)}
        return getattr(from_json(type(message), document, version), field.attribute)
    if field.is_array and field.struct is not None:
        return _partitions(message, field.element_type, parse_partitions(text), names)
    if field.is_array:
        items = [] if text == "none" else text.split(",")
        return [_scalar(field, item, names) for item in items]
    return _scalar(field, text, names)


def _scalar(field: FieldSchema, text: str, names: Names) -> object:
    match field.element_type:
        case "bool":
            return {"true": True, "false": False, "commit": True, "abort": False}[text]
        case "bytes":
            return bytes.fromhex(text)
        case "string":
            text = "" if text == "none" else text
            if field.json_name in _GROUP_FIELDS or (field.json_name == "groups" and text):
                return names.prefix + text if text else text
            return names.member_id(text) if field.json_name == "memberId" else text
    return names.producer_id(text) if field.json_name == "producerId" else int(text)


def _partitions(message: Message, struct_name: str, topics: Partitions, names: Names) -> list[Any]:
    """Returns a struct per topic, with the id or the name of the topic and its partitions."""
    struct = getattr(type(message), struct_name)
    attributes = {field.attribute for field in struct.schema.fields}
    numbers = next(name for name in ("partitions", "partition_indexes") if name in attributes)
    nested = next((field.struct for field in struct.schema.fields if field.attribute == numbers), None)
    result = []
    for topic, partitions in topics.items():
        item = struct()
        if "topic_id" in attributes:
            item.topic_id = names.topic_id(topic)
        if "name" in attributes:
            item.name = topic
        if nested is None:
            setattr(item, numbers, partitions)
        else:
            cls = getattr(type(message), nested.name)
            setattr(item, numbers, [cls(partition_index=partition) for partition in partitions])
        result.append(item)
    return result


# --- APIs whose requests have more structure --------------------------------------------------------------------------


_ASSIGNOR: Final = re.compile(
    r"(?P<name>[^:]*):(?P<lowest>-?\d+)-(?P<highest>\d+)@(?P<version>-?\d+)(/(?P<reason>\d+))?"
)


def _heartbeat(message: Any, version: int, arguments: Arguments, names: Names) -> None:
    """Builds a heartbeat. The first heartbeat has a rebalance timeout and no partitions, as that of Kafka's client.

    `offers=x:0-2@1,y:0-0@0/3` are client-side assignors: name, versions, version of the metadata, and the reason.
    """
    offers = arguments.pop("offers", None)
    if arguments.get("epoch") == "0":
        arguments = {"rebalance": "300000", "owned": "none", **arguments}
    _build(message, version, arguments, names)
    if offers is not None:
        message.client_assignors = [_client_assignor(message, offer) for offer in _list(offers.replace("none", ""))]


def _client_assignor(message: Any, text: str) -> object:
    match = _ASSIGNOR.fullmatch(text)
    if match is None:
        raise CommandError(f"{text!r} is not NAME:LOWEST-HIGHEST@VERSION")
    return type(message).ClientAssignor(
        name=match["name"],
        minimum_version=int(match["lowest"]),
        maximum_version=int(match["highest"]),
        reason=int(match["reason"] or 0),
        metadata_version=int(match["version"]),
        metadata_bytes=b"in",
    )


def _install(message: Any, version: int, arguments: Arguments, names: Names) -> None:
    """Builds an InstallAssignment with `A:=foo:0-2 B:=foo:3-5`; `version` is that of each member's metadata."""
    shares = {name[:-1]: arguments.pop(name) for name in list(arguments) if name.endswith(":")}
    metadata_version = int(arguments.pop("version", "0"))
    message.members = [
        type(message).Member(
            member_id=names.member_id(member),
            partitions=_partitions(message, "TopicPartitions", parse_partitions(share), names),
            metadata_version=metadata_version,
            metadata_bytes=b"out",
        )
        for member, share in shares.items()
    ]
    _build(message, version, arguments, names)


def _join(message: Any, version: int, arguments: Arguments, names: Names) -> None:
    """Builds a JoinGroup with `protocols=range,sticky`.

    Each protocol has the subscription that `subscribe`, `owned`, `ownedGeneration` and `subscriptionVersion` describe,
    or the bytes of `metadata`.
    """
    subscribed = arguments.pop("subscribe", "none")
    owned = parse_partitions(arguments.pop("owned", "none"))
    subscription = ConsumerProtocolSubscription(
        topics=[] if subscribed == "none" else subscribed.split(","),
        owned_partitions=[
            ConsumerProtocolSubscription.TopicPartition(topic=topic, partitions=partitions)
            for topic, partitions in owned.items()
        ],
        generation_id=int(arguments.pop("ownedGeneration", "-1")),
    )
    number = int(arguments.pop("subscriptionVersion", "3"))
    metadata = arguments.pop("metadata", None)
    data = number.to_bytes(2, "big") + subscription.encode(number) if metadata is None else bytes.fromhex(metadata)
    protocols = arguments.pop("protocols", "range")
    message.protocols = [
        type(message).JoinGroupRequestProtocol(name=name, metadata=data)
        for name in (protocols.split(",") if protocols != "none" else ())
    ]
    defaults = {"protocolType": "consumer", "session": "10000"}
    if version >= 1:
        defaults["rebalance"] = "60000"
    _build(message, version, defaults | arguments, names)


def _sync(message: Any, version: int, arguments: Arguments, names: Names) -> None:
    """Builds a SyncGroup with the leader's assignment `A-1:=foo:0-2 B-1:=foo:3-5`."""
    shares = {name[:-1]: arguments.pop(name) for name in list(arguments) if name.endswith(":")}
    message.assignments = [
        type(message).SyncGroupRequestAssignment(
            member_id=names.member_id(member),
            assignment=bytes.fromhex(share[2:])
            if share.startswith("0x")
            else consumer_protocol.write_assignment(parse_partitions(share), 3),
        )
        for member, share in shares.items()
    ]
    defaults = {"protocolType": "consumer", "protocolName": "range"} if version >= _NAMED_PROTOCOL_VERSION else {}
    _build(message, version, defaults | arguments, names)


def _leave(message: Any, version: int, arguments: Arguments, names: Names) -> None:
    """Builds a LeaveGroup of `member=A-1` with `instance` and `reason`, or of `members=A-1,B-1 instances=i1,i2`."""
    if version < _MEMBERS_VERSION:
        _build(message, version, arguments, names)
        return
    identity = type(message).MemberIdentity
    reason = arguments.pop("reason", None)
    members: list[tuple[str, str | None]] = [(member, None) for member in _list(arguments.pop("members", ""))]
    members += [("", instance) for instance in _list(arguments.pop("instances", ""))]
    if "member" in arguments or "instance" in arguments:
        members.append((arguments.pop("member", ""), arguments.pop("instance", None)))
    message.members = [
        identity(member_id=names.member_id(member), group_instance_id=instance, reason=reason)
        for member, instance in members
    ]
    _build(message, version, arguments, names)


def _list(text: str) -> list[str]:
    return text.split(",") if text else []


def _commit(message: Any, version: int, arguments: Arguments, names: Names) -> None:
    """Builds a commit of `offsets=foo:0@5,1@7`. `metadata`, `leaderEpoch` and `commitTimestamp` are for all offsets."""
    api = type(message).__name__.removesuffix("Request")
    topic_class = getattr(type(message), f"{api}RequestTopic")
    partition_class = getattr(type(message), f"{api}RequestPartition")
    common: dict[str, object] = {}
    if "metadata" in arguments:
        text = arguments.pop("metadata")
        common["committed_metadata"] = None if text == "null" else "" if text == "none" else text
    if "leaderEpoch" in arguments:
        common["committed_leader_epoch"] = int(arguments.pop("leaderEpoch"))
    if "commitTimestamp" in arguments:
        common["commit_timestamp"] = int(arguments.pop("commitTimestamp"))
    common.setdefault("committed_metadata", "")
    by_id = version >= _TOPIC_ID_VERSIONS[api]
    message.topics = [
        topic_class(
            name="" if by_id else topic,
            topic_id=names.topic_id(topic) if by_id else NO_TOPIC_ID,
            partitions=[
                partition_class(partition_index=partition, committed_offset=offset, **common)
                for partition, offset in offsets.items()
            ],
        )
        for topic, offsets in parse_offsets(arguments.pop("offsets", "")).items()
    ]
    _build(message, version, arguments, names)


def _fetch(message: Any, version: int, arguments: Arguments, names: Names) -> None:
    """Builds an OffsetFetch of `group=g partitions=foo:0-2`, of all partitions, or of several groups: `groups=g,h`."""
    partitions = arguments.pop("partitions", None)
    if version < _OFFSET_FETCH_GROUPS_VERSION:
        topics = None if partitions is None else parse_partitions(partitions)
        message.topics = None if topics is None else _partitions(message, "OffsetFetchRequestTopic", topics, names)
        _build(message, version, arguments, names)
        return
    groups = _list(arguments.pop("groups", "")) or [arguments.pop("group")]
    for group in groups:
        fetched = type(message).OffsetFetchRequestGroup(
            group_id=names.prefix + group,
            topics=None
            if partitions is None
            else _partitions(message, "OffsetFetchRequestTopics", parse_partitions(partitions), names),
        )
        if "member" in arguments:
            fetched.member_id = names.member_id(arguments["member"])
        fetched.member_epoch = int(arguments.get("epoch", "-1"))
        message.groups.append(fetched)
    rest = {name: value for name, value in arguments.items() if name not in ("member", "epoch")}
    _build(message, version, rest, names)


def _delete_offsets(message: Any, version: int, arguments: Arguments, names: Names) -> None:
    topics = parse_partitions(arguments.pop("partitions"))
    message.topics = _partitions(message, "OffsetDeleteRequestTopic", topics, names)
    _build(message, version, arguments, names)


def _add_partitions(message: Any, version: int, arguments: Arguments, names: Names) -> None:
    """Builds an AddPartitionsToTxn for one transaction, in the layout of the version."""
    topics = _partitions(message, "AddPartitionsToTxnTopic", parse_partitions(arguments.pop("partitions")), names)
    transactional_id = names.prefix + arguments.pop("id")
    producer_id, epoch = names.producer_id(arguments.pop("producer")), int(arguments.pop("epoch"))
    if version <= 3:
        message.v3_and_below_transactional_id = transactional_id
        message.v3_and_below_producer_id, message.v3_and_below_producer_epoch = producer_id, epoch
        message.v3_and_below_topics = topics
    else:
        transaction = type(message).AddPartitionsToTxnTransaction(
            transactional_id=transactional_id, producer_id=producer_id, producer_epoch=epoch, topics=topics
        )
        transaction.verify_only = arguments.pop("verifyOnly", "false") == "true"
        message.transactions = [transaction]
    _build(message, version, arguments, names)


def _write_markers(message: Any, version: int, arguments: Arguments, names: Names) -> None:
    """Builds one marker: `producer=P1 epoch=0 result=commit partitions=foo:0 coordinatorEpoch=0`."""
    marker = type(message).WritableTxnMarker(
        producer_id=names.producer_id(arguments.pop("producer")),
        producer_epoch=int(arguments.pop("epoch")),
        transaction_result=arguments.pop("result") == "commit",
        coordinator_epoch=int(arguments.pop("coordinatorEpoch", "0")),
        topics=_partitions(message, "WritableTxnMarkerTopic", parse_partitions(arguments.pop("partitions")), names),
    )
    message.markers = [marker]
    _build(message, version, arguments, names)


_BUILDERS: Final[dict[str, Callable[[Any, int, Arguments, Names], None]]] = {
    "ConsumerGroupHeartbeat": _heartbeat,
    "ConsumerGroupInstallAssignment": _install,
    "JoinGroup": _join,
    "SyncGroup": _sync,
    "LeaveGroup": _leave,
    "OffsetCommit": _commit,
    "TxnOffsetCommit": _commit,
    "OffsetFetch": _fetch,
    "OffsetDelete": _delete_offsets,
    "AddPartitionsToTxn": _add_partitions,
    "WriteTxnMarkers": _write_markers,
}
