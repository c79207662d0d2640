# SPDX-License-Identifier: Apache-2.0
"""The control as a client of its own broker. Its requests are not in the history, and no fault is applied to them."""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import Any, Final

from kcoord.client import (
    AdminClient,
    Consumer,
    ConsumerRecord,
    KafkaError,
    NewTopic,
    OffsetAndMetadata,
    OffsetSpec,
    Producer,
    TopicPartition,
)
from kcoord.testing.arguments import Arguments
from kcoord.testing.errors import ControlError
from kcoord.testing.group_view import Group, group_from_description
from kcoord.testing.monitor import CONTROL_CLIENT_ID
from kcoord_protocol.acls import Acl, AclFilter, AclOperation, PatternType, PermissionType, ResourceType
from kcoord_protocol.errors import Errors

BASE64_PREFIX: Final = "base64:"
"""The prefix of bytes in JSON that are not UTF-8."""
_POLL_MS: Final = 200
_LONGEST_SEND_MS: Final = 2000
"""A topic is there at once or never. A partition that does not exist should not hold a test up."""
_READ_SECONDS: Final = 30

Offsets = dict[str, dict[str, int]]


@dataclass(slots=True)
class NewRecord:
    """A record to produce, decoded from JSON."""

    value: bytes | None
    key: bytes | None = None
    partition: int | None = None
    timestamp_ms: int | None = None
    headers: list[tuple[str, bytes]] = field(default_factory=list)


class ControlClient:
    """Connects at the first use. `connect` with another address closes the open connections."""

    def __init__(self) -> None:
        self._address = ""
        self._admin: AdminClient | None = None
        self._producer: Producer | None = None

    async def connect(self, bootstrap_servers: str) -> None:
        if bootstrap_servers != self._address:
            await self.close()
            self._address = bootstrap_servers

    async def close(self) -> None:
        admin, producer = self._admin, self._producer
        self._admin = self._producer = None
        if producer is not None:
            await producer.close(timeout_ms=0)
        if admin is not None:
            await admin.close()

    async def _ask(self) -> AdminClient:
        if self._admin is None:
            admin = AdminClient(bootstrap_servers=self._address, client_id=CONTROL_CLIENT_ID)
            await admin.start()
            self._admin = admin
        return self._admin

    async def _produce(self) -> Producer:
        if self._producer is None:
            producer = Producer(
                bootstrap_servers=self._address, client_id=CONTROL_CLIENT_ID, max_block_ms=_LONGEST_SEND_MS
            )
            await producer.start()
            self._producer = producer
        return self._producer

    # ACLs.

    async def create_acls(self, acls: Sequence[object]) -> None:
        (await (await self._ask()).create_acls([_acl_from(acl) for acl in acls])).all()

    async def delete_acls(self, acls: Sequence[object]) -> None:
        filters = [AclFilter(**_acl_fields(_acl_from(acl))) for acl in acls]
        (await (await self._ask()).delete_acls(filters)).all()

    # Topics and records.

    async def create_topic(self, name: str, partitions: int, configs: Mapping[str, str]) -> None:
        (await (await self._ask()).create_topics([NewTopic(name, partitions, configs=configs)])).all()

    async def add_partitions(self, name: str, total: int) -> None:
        (await (await self._ask()).create_partitions({name: total})).all()

    async def delete_topic(self, name: str) -> None:
        (await (await self._ask()).delete_topics([name])).all()

    async def produce(self, topic: str, records: Sequence[object]) -> list[dict[str, int]]:
        producer = await self._produce()
        sent = []
        for number, record in enumerate(records):
            try:
                new = _record_from(record)
            except ControlError as error:
                raise ControlError(f"records[{number}]: {error.text}") from None
            sent.append(
                await producer.send(
                    topic,
                    new.value,
                    new.key,
                    partition=new.partition,
                    timestamp_ms=new.timestamp_ms,
                    headers=new.headers,
                )
            )
        await producer.flush()
        places = [await delivery for delivery in sent]
        return [{"partition": place.partition, "offset": place.offset or 0} for place in places]

    async def records(self, topic: str) -> list[dict[str, object]]:
        """Returns all records that the topic has now, by partition and offset."""
        description = (await (await self._ask()).describe_topics([topic]))[topic]
        partitions = [TopicPartition(topic, partition.partition) for partition in description.partitions]
        ends = (await (await self._ask()).list_offsets(dict.fromkeys(partitions, OffsetSpec.latest()))).all()
        records: list[ConsumerRecord] = []
        async with (
            asyncio.timeout(_READ_SECONDS),
            Consumer(
                bootstrap_servers=self._address, client_id=CONTROL_CLIENT_ID, auto_offset_reset="earliest"
            ) as consumer,
        ):
            consumer.assign(partitions)
            while any([await consumer.position(partition) < ends[partition].offset for partition in partitions]):
                records += await consumer.poll(_POLL_MS)
        records.sort(key=lambda record: (record.partition, record.offset))
        return [_record_to_json(record) for record in records]

    # Groups.

    async def group(self, group_id: str) -> Group:
        results = await (await self._ask()).describe_consumer_groups([group_id])
        try:
            return group_from_description(results[group_id])
        except KafkaError as error:
            if error.error is Errors.GROUP_ID_NOT_FOUND:
                return Group(group_id)
            raise

    async def committed(self, group_id: str) -> Offsets:
        offsets = (await (await self._ask()).list_consumer_group_offsets([group_id]))[group_id]
        offsets_by_topic: Offsets = {}
        for partition, offset in sorted(offsets.items()):
            if offset is not None:
                offsets_by_topic.setdefault(partition.topic, {})[str(partition.partition)] = offset.offset
        return offsets_by_topic

    async def commit(self, group_id: str, offsets: Mapping[str, Mapping[int, int]]) -> None:
        new_offsets: dict[TopicPartition, OffsetAndMetadata | int] = {
            TopicPartition(topic, partition): offset
            for topic, partitions in offsets.items()
            for partition, offset in partitions.items()
        }
        (await (await self._ask()).alter_consumer_group_offsets(group_id, new_offsets)).all()


_ACL_CODES: Final[Mapping[str, type[IntEnum]]] = {
    "resource_type": ResourceType,
    "pattern_type": PatternType,
    "operation": AclOperation,
    "permission_type": PermissionType,
}


def _acl_fields(acl: Acl) -> dict[str, Any]:
    return {acl_field.name: getattr(acl, acl_field.name) for acl_field in fields(Acl)}


def acl_to_json(acl: Acl) -> dict[str, str]:
    """Returns the fields of an ACL, with the names of its codes, such as TOPIC and READ."""
    return {name: value.name if isinstance(value, IntEnum) else value for name, value in _acl_fields(acl).items()}


def _acl_from(document: object) -> Acl:
    """Decodes an ACL of `acl_to_json`."""
    if not isinstance(document, dict):
        raise ControlError("an ACL must be an object")
    arguments = Arguments(document)
    values: dict[str, Any] = {}
    for name in (acl_field.name for acl_field in fields(Acl)):
        text = arguments.text(name)
        codes = _ACL_CODES.get(name)
        if codes is not None and text not in codes.__members__:
            raise ControlError(f"{name} must be one of {', '.join(codes.__members__)}, not {text!r}")
        values[name] = text if codes is None else codes[text]
    arguments.end()
    return Acl(**values)


def _record_from(record: object) -> NewRecord:
    """Decodes a record from JSON: a string is its value, an object has its fields."""
    arguments = Arguments(record if isinstance(record, dict) else {"value": record})
    new = NewRecord(
        _to_bytes("value", arguments.text("value", None)),
        _to_bytes("key", arguments.text("key", None)),
        arguments.integer("partition", None),
        arguments.integer("timestamp_ms", None),
        [(name, _to_bytes("headers", text) or b"") for name, text in arguments.texts("headers").items()],
    )
    arguments.end()
    return new


def _record_to_json(record: ConsumerRecord) -> dict[str, object]:
    return {
        "partition": record.partition,
        "offset": record.offset,
        "timestamp_ms": record.timestamp_ms,
        "key": to_text(record.key),
        "value": to_text(record.value),
        "headers": {name: to_text(value) for name, value in record.headers},
    }


def to_text(data: bytes | None) -> str | None:
    """Returns UTF-8 bytes as text, and all other bytes as `base64:...`."""
    if data is None:
        return None
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return BASE64_PREFIX + base64.b64encode(data).decode()
    return text if not text.startswith(BASE64_PREFIX) else BASE64_PREFIX + base64.b64encode(data).decode()


def from_text(text: str | None) -> bytes | None:
    """Returns the bytes for a text of `to_text`. Raises ValueError if the base64 is malformed."""
    if text is None:
        return None
    if not text.startswith(BASE64_PREFIX):
        return text.encode()
    return base64.b64decode(text.removeprefix(BASE64_PREFIX), validate=True)


def _to_bytes(name: str, text: str | None) -> bytes | None:
    try:
        return from_text(text)
    except binascii.Error as error:
        raise ControlError(f"{name} is not valid base64: {error}") from None
