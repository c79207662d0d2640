# SPDX-License-Identifier: Apache-2.0
"""Messages made from their schemas: one deterministic full sample per version, and Hypothesis strategies."""

from __future__ import annotations

from functools import cache
from typing import Any

from hypothesis import strategies as st

from kcoord_protocol.message import Message, Struct
from kcoord_protocol.messages import message_class, message_names
from kcoord_protocol.schema import INT_RANGES, FieldSchema, StructSchema

ALL_NAMES = [name for name in message_names() if message_class(name).valid_versions]

_SCALARS: dict[str, Any] = {
    "string": "é\u65e5",
    "bytes": b"\x00\xff\x01",
    "records": b"batch",
    "uuid": bytes(range(16)),
    "bool": True,
    "float64": -2.25,
}


def full_sample(cls: type[Message], version: int) -> Message:
    """Return a message in which every field of the version has a value that is not its default."""
    return _fill(cls(), cls.message_schema.root, cls, version)  # type: ignore[return-value]


def _fill(target: Struct, schema: StructSchema, cls: type[Message], version: int) -> Struct:
    for field in schema.fields:
        if version in field.versions:
            item = _item(field, cls, version)
            setattr(target, field.attribute, [item, item] if field.is_array else item)
    if version in cls.flexible_versions:
        target.unknown_tagged_fields = ((900, b"later"),)
    return target


def _item(field: FieldSchema, cls: type[Message], version: int) -> Any:
    if field.struct is not None:
        return _fill(getattr(cls, field.element_type)(), field.struct, cls, version)
    if field.element_type in INT_RANGES:
        return INT_RANGES[field.element_type][1] - 5
    return _SCALARS[field.element_type]


@cache
def messages(name: str, version: int) -> st.SearchStrategy[Message]:
    """Return a strategy for any message of the version."""
    cls = message_class(name)
    return _structs(cls, cls.message_schema.root, cls, version)


def _structs(struct_class: type[Any], schema: StructSchema, cls: type[Message], version: int) -> st.SearchStrategy[Any]:
    fields = {field.attribute: _values(field, cls, version) for field in schema.fields if version in field.versions}
    if version in cls.flexible_versions:
        tags = st.dictionaries(st.integers(900, 2**32 - 1), st.binary(max_size=3), max_size=1)
        fields["unknown_tagged_fields"] = tags.map(lambda tagged: tuple(sorted(tagged.items())))
    return st.fixed_dictionaries(fields).map(lambda values: struct_class(**values))


def _values(field: FieldSchema, cls: type[Message], version: int) -> st.SearchStrategy[Any]:
    values = _items(field, cls, version)
    if field.is_array:
        values = st.lists(values, max_size=2)
    return st.none() | values if version in field.nullable_versions else values


def _items(field: FieldSchema, cls: type[Message], version: int) -> st.SearchStrategy[Any]:
    if field.struct is not None:
        return _structs(getattr(cls, field.element_type), field.struct, cls, version)
    if field.element_type in INT_RANGES:
        return st.integers(*INT_RANGES[field.element_type])
    if field.element_type == "string":
        return st.text(max_size=4) | st.sampled_from(["x" * 126, "x" * 127, "x" * 128, "é" * 9000])
    if field.element_type in ("bytes", "records"):
        return st.binary(max_size=4) | st.sampled_from([bytes(127), bytes(128), bytes(20000)])
    if field.element_type == "uuid":
        return st.binary(min_size=16, max_size=16)
    if field.element_type == "bool":
        return st.booleans()
    return st.floats(allow_nan=False)
