# SPDX-License-Identifier: Apache-2.0
"""Messages as JSON, in the form that Kafka's own tools print.

Names are in camelCase, bytes are base64, and uuids have 22 characters. A document has only the fields of the version,
and no tagged field that has its default.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from typing import Any, cast

from kcoord_protocol.message import HIDDEN, Message, Struct
from kcoord_protocol.schema import FieldSchema, JsonObject, StructSchema
from kcoord_protocol.uuid import uuid_from_string, uuid_to_string


def to_json(message: Message, version: int, *, hides_secrets: bool = False) -> JsonObject:
    """Return the JSON object of a message. With `hides_secrets`, the values of sensitive fields are left out."""
    message.check_version(version)
    document = _struct_to_json(message, message.message_schema.root, version, message._structs)
    if hides_secrets:
        _hide(document, message.message_schema.root)
    return document


def _hide(document: JsonObject, schema: StructSchema) -> None:
    for field in schema.fields:
        content = document.get(field.json_name)
        if content is not None and field.sensitive:
            document[field.json_name] = HIDDEN
        elif field.struct is not None:
            for item in cast("list[JsonObject | None]", content if field.is_array else [content]) or ():
                if item is not None:
                    _hide(item, field.struct)


def _struct_to_json(value: Struct, schema: StructSchema, version: int, structs: dict[str, type[Struct]]) -> JsonObject:
    document: JsonObject = {}
    for field in schema.fields:
        if version not in field.versions:
            continue
        content = getattr(value, field.attribute)
        if field.is_tagged(version) and content == _default(field, structs):
            continue
        document[field.json_name] = _to_json(field, content, version, structs)
    return document


def _default(field: FieldSchema, structs: dict[str, type[Struct]]) -> object:
    if field.default_is_null:
        return None
    if field.is_array:
        return []
    return structs[field.element_type]() if field.is_struct else field.default


def _to_json(field: FieldSchema, content: Any, version: int, structs: dict[str, type[Struct]]) -> object:
    if content is None:
        return None
    if not field.is_array:
        return _item_to_json(field, content, version, structs)
    return [_item_to_json(field, item, version, structs) for item in content]


def _item_to_json(field: FieldSchema, item: Any, version: int, structs: dict[str, type[Struct]]) -> object:
    if field.struct is not None:
        return _struct_to_json(item, field.struct, version, structs)
    if field.element_type == "uuid":
        return uuid_to_string(item)
    if field.element_type in ("bytes", "records"):
        return b64encode(item).decode("ascii")
    return cast(object, item)


def from_json(cls: type[Message], document: JsonObject, version: int) -> Message:
    """Return the message of a JSON object. Absent fields get their defaults.

    Raise KeyError if the version lacks a field of the object.
    """
    cls.check_version(version)
    message = cls()
    _fill(message, cls.message_schema.root, document, version, cls._structs)
    return message


def _fill(
    target: Struct, schema: StructSchema, document: JsonObject, version: int, structs: dict[str, type[Struct]]
) -> None:
    fields = {field.json_name: field for field in schema.fields if version in field.versions}
    for key, content in document.items():
        setattr(target, fields[key].attribute, _from_json(fields[key], content, version, structs))


def _from_json(field: FieldSchema, content: Any, version: int, structs: dict[str, type[Struct]]) -> object:
    if content is None:
        return None
    if not field.is_array:
        return _item_from_json(field, content, version, structs)
    return [_item_from_json(field, item, version, structs) for item in content]


def _item_from_json(field: FieldSchema, item: Any, version: int, structs: dict[str, type[Struct]]) -> object:
    if field.struct is not None:
        target = structs[field.element_type]()
        _fill(target, field.struct, item, version, structs)
        return target
    if field.element_type == "uuid":
        return uuid_from_string(item)
    if field.element_type in ("bytes", "records"):
        return b64decode(item)
    return float(item) if field.element_type == "float64" else item
