# SPDX-License-Identifier: Apache-2.0
"""The reference codec: it follows the schema field by field, slowly, and knows the path of the current field.

It finds the wrong field in input on which compiled code failed. Tests compare compiled code with it.
"""

from __future__ import annotations

import struct
import sys
from typing import Any, Final, TypeVar

from kcoord_protocol.errors import DecodeError, EncodeError, UnsupportedFieldError
from kcoord_protocol.message import Message, Struct, encode_tags
from kcoord_protocol.primitives import (
    MAX_ARRAY_ELEMENTS,
    MAX_LENGTH,
    MAX_STRING_BYTES,
    MAX_TAGGED_FIELDS,
    decode_uvarint,
    encode_uvarint,
)
from kcoord_protocol.schema import FIXED_TYPES, INT_RANGES, FieldSchema, StructSchema
from kcoord_protocol.source import FIXED_BYTES, Source

_M = TypeVar("_M", bound=Message)
_UUID_BYTES: Final = 16


def decode_message(
    cls: type[_M], data: bytes, offset: int, version: int, max_values: int = sys.maxsize
) -> tuple[_M, int]:
    """Decode a message that starts at `offset`; return it and the position of its end.

    Raise DecodeError with the path of the wrong field if the bytes are malformed, and without a path if the first
    `max_values` values are well-formed and more follow.
    """
    decoder = _Decoder(cls, data, offset, version, max_values)
    message = cls()
    decoder.struct(cls.message_schema.root, message, "")
    return message, decoder.position


class _Decoder:
    def __init__(self, cls: type[Message], data: bytes, offset: int, version: int, max_values: int) -> None:
        self._values_left = max_values
        self.data = data
        self.position = offset
        self._version = version
        self._structs = cls._structs
        self._layout = Source(cls.message_schema, version)
        if not 0 <= offset <= len(data):
            raise DecodeError(f"offset {offset} of {len(data)} bytes")

    def struct(self, schema: StructSchema, target: Struct, path: str) -> None:
        for field in schema.fields:
            if self._layout.is_inline(field):
                setattr(target, field.attribute, self._field(field, _join(path, field)))
        if self._layout.flexible:
            self._tags(schema, target, path)

    def _field(self, field: FieldSchema, path: str) -> object:
        flexible = field.is_flexible(self._version, self._layout.flexible)
        if field.is_array:
            return self._array(field, flexible, path)
        if field.struct is not None and field.is_nullable(self._version) and self._is_null_struct(field, path):
            return None
        return self._value(field, flexible, path, nullable=field.is_nullable(self._version))

    def _is_null_struct(self, field: FieldSchema, path: str) -> bool:
        return bool(self._fixed("b", path) < (1 if field.is_tagged(self._version) else 0))

    def _count_value(self) -> None:
        self._values_left -= 1
        if self._values_left < 0:
            raise DecodeError("malformed, beyond the values that are searched for the cause")

    def _value(self, field: FieldSchema, flexible: bool, path: str, *, nullable: bool) -> object:
        self._count_value()
        if field.struct is not None:
            target = self._structs[field.element_type]()
            self.struct(field.struct, target, path)
            return target
        code = FIXED_TYPES.get(field.element_type)
        if code is not None:
            return self._fixed(code, path)
        is_string = field.element_type == "string"
        size = self._length(flexible, "h" if is_string else "i", path)
        if size < 0:
            _check_nullable(nullable, path)
            return None
        if is_string and size > MAX_STRING_BYTES:
            raise DecodeError(f"string of {size} bytes", path)
        content = self._take(size, path)
        if not is_string:
            return content
        try:
            return content.decode()
        except UnicodeDecodeError as e:
            raise DecodeError(f"invalid UTF-8: {e.reason}", path) from e

    def _array(self, field: FieldSchema, flexible: bool, path: str) -> list[object] | None:
        count = self._length(flexible, "i", path)
        if count < 0:
            _check_nullable(field.is_nullable(self._version), path)
            return None
        remaining = len(self.data) - self.position
        if count * self._layout.min_bytes(field) > remaining:
            raise DecodeError(f"{count} elements announced, {remaining} bytes left", path)
        if count > MAX_ARRAY_ELEMENTS:
            raise DecodeError(f"{count} elements, allowed are {MAX_ARRAY_ELEMENTS}", path)
        return [self._value(field, flexible, f"{path}[{i}]", nullable=False) for i in range(count)]

    def _fixed(self, code: str, path: str) -> Any:
        return struct.unpack(">" + code, self._take(FIXED_BYTES[code], path))[0]

    def _take(self, size: int, path: str) -> bytes:
        end = self.position + size
        if end > len(self.data):
            raise DecodeError(f"{size} bytes announced, {len(self.data) - self.position} left", path)
        content = self.data[self.position : end]
        self.position = end
        return content

    def _uvarint(self, path: str) -> int:
        try:
            value, self.position = decode_uvarint(self.data, self.position)
        except IndexError as e:
            raise DecodeError("the message ends inside a varint", path) from e
        except ValueError as e:
            raise DecodeError(str(e), path) from e
        return value

    def _length(self, flexible: bool, code: str, path: str) -> int:
        """Read a length or count; -1 is null."""
        length = self._uvarint(path) - 1 if flexible else int(self._fixed(code, path))
        if length < -1:
            raise DecodeError(f"length {length}", path)
        return length

    def _tags(self, schema: StructSchema, target: Struct, path: str) -> None:
        place = f"{path}.<tags>" if path else "<tags>"
        fields_by_tag = {field.tag: field for field in self._layout.tagged_fields(schema)}
        count = self._uvarint(place)
        if count * 2 > len(self.data) - self.position:
            raise DecodeError(f"{count} tagged fields announced, {len(self.data) - self.position} bytes left", place)
        if count > MAX_TAGGED_FIELDS:
            raise DecodeError(f"{count} tagged fields, allowed are {MAX_TAGGED_FIELDS}", place)
        seen: set[int] = set()
        unknown = []
        for _ in range(count):
            self._count_value()
            tag = self._uvarint(place)
            size = self._uvarint(place)
            field = fields_by_tag.get(tag)
            place_of_tag = _join(path, field) if field else f"{place}[{tag}]"
            if tag in seen:
                raise DecodeError("tag occurs twice", place_of_tag)
            seen.add(tag)
            end = self.position + size
            if end > len(self.data):
                raise DecodeError(f"{size} bytes announced, {len(self.data) - self.position} left", place_of_tag)
            if field is None:
                unknown.append((tag, self._take(size, place)))
                continue
            setattr(target, field.attribute, self._field(field, place_of_tag))
            if self.position != end:
                raise DecodeError(
                    f"tagged field has {size} bytes, its content {size + self.position - end}", place_of_tag
                )
        target.unknown_tagged_fields = tuple(sorted(unknown))


def _check_nullable(nullable: bool, path: str) -> None:
    if not nullable:
        raise DecodeError("null in a field that is not nullable", path)


def encode_message(message: Message, version: int) -> bytes:
    """Encode a message; raise EncodeError with the path of a field that cannot be encoded."""
    encoder = _Encoder(type(message), version)
    encoder.struct(message.message_schema.root, message, "")
    return b"".join(encoder.pieces)


class _Encoder:
    def __init__(self, cls: type[Message], version: int) -> None:
        self.pieces: list[bytes] = []
        self._cls = cls
        self._version = version
        self._layout = Source(cls.message_schema, version)

    def struct(self, schema: StructSchema, value: Struct, path: str) -> None:
        for field in schema.fields:
            content = getattr(value, field.attribute, None)
            place = _join(path, field)
            if self._layout.is_inline(field):
                self._field(field, content, place)
            elif self._version not in field.versions and not field.ignorable and self._is_set(field, content):
                raise UnsupportedFieldError(
                    f"{self._cls.message_name} version {self._version} has no such field", place
                )
        if self._layout.flexible:
            self._tags(schema, value, path)

    def _is_set(self, field: FieldSchema, content: object) -> bool:
        if field.default_is_null:
            return content is not None
        if field.is_array:
            return content is None or bool(content)
        if field.is_struct:
            return content != self._cls._structs[field.element_type]()
        return content != field.default

    def _tags(self, schema: StructSchema, value: Struct, path: str) -> None:
        tagged = []
        for field in self._layout.tagged_fields(schema):
            content = getattr(value, field.attribute, None)
            if self._is_set(field, content) and field.tag is not None:
                outer, self.pieces = self.pieces, []
                self._field(field, content, _join(path, field))
                tagged.append((field.tag, b"".join(self.pieces)))
                self.pieces = outer
        try:
            self.pieces.append(encode_tags(tagged, value.unknown_tagged_fields))
        except (ValueError, TypeError) as e:
            raise EncodeError(f"invalid tagged fields: {e}", f"{path}.unknown_tagged_fields".lstrip(".")) from e

    def _field(self, field: FieldSchema, content: Any, path: str) -> None:
        flexible = field.is_flexible(self._version, self._layout.flexible)
        nullable = field.is_nullable(self._version)
        if content is None and not nullable:
            raise EncodeError("null in a field that is not nullable", path)
        if field.is_array:
            self._array(field, content, flexible, path)
        elif field.struct is not None and nullable:
            if content is None:
                self.pieces.append(b"\x00" if field.is_tagged(self._version) else b"\xff")
            else:
                self.pieces.append(b"\x01")
                self._value(field, content, flexible, path)
        else:
            self._value(field, content, flexible, path)

    def _array(self, field: FieldSchema, content: Any, flexible: bool, path: str) -> None:
        if content is not None and not isinstance(content, list | tuple):
            raise EncodeError(f"{type(content).__name__} instead of a list", path)
        self._length(-1 if content is None else len(content), flexible, "i")
        for i, item in enumerate(content or ()):
            if item is None:
                raise EncodeError("null in an array", f"{path}[{i}]")
            self._value(field, item, flexible, f"{path}[{i}]")

    def _value(self, field: FieldSchema, content: Any, flexible: bool, path: str) -> None:
        if field.struct is not None:
            if not isinstance(content, Struct):
                raise EncodeError(f"{type(content).__name__} instead of {field.element_type}", path)
            self.struct(field.struct, content, path)
        elif field.element_type in FIXED_TYPES:
            self.pieces.append(_fixed_bytes(field.element_type, content, path))
        else:
            self._sized(field, content, flexible, path)

    def _sized(self, field: FieldSchema, content: Any, flexible: bool, path: str) -> None:
        is_string = field.element_type == "string"
        code = "h" if is_string else "i"
        if content is None:
            self._length(-1, flexible, code)
            return
        if not isinstance(content, str if is_string else bytes | bytearray | memoryview):
            raise EncodeError(f"{type(content).__name__} instead of {field.element_type}", path)
        try:
            data = content.encode() if isinstance(content, str) else bytes(content)
        except UnicodeEncodeError as e:
            raise EncodeError(f"not encodable as UTF-8: {e.reason}", path) from e
        if len(data) > (MAX_STRING_BYTES if is_string else MAX_LENGTH):
            raise EncodeError(f"{len(data)} bytes are too many", path)
        self._length(len(data), flexible, code)
        self.pieces.append(data)

    def _length(self, length: int, flexible: bool, code: str) -> None:
        self.pieces.append(encode_uvarint(length + 1) if flexible else struct.pack(">" + code, length))


def _fixed_bytes(element_type: str, content: Any, path: str) -> bytes:
    if element_type == "uuid":
        if not isinstance(content, bytes) or len(content) != _UUID_BYTES:
            raise EncodeError(f"{content!r} is not a uuid of {_UUID_BYTES} bytes", path)
        return content
    if element_type in INT_RANGES:
        low, high = INT_RANGES[element_type]
        if not isinstance(content, int):
            raise EncodeError(f"{type(content).__name__} instead of {element_type}", path)
        if not low <= content <= high:
            raise EncodeError(f"{content} does not fit in {element_type}", path)
    elif not isinstance(content, bool if element_type == "bool" else float | int):
        raise EncodeError(f"{type(content).__name__} instead of {element_type}", path)
    try:
        return struct.pack(">" + FIXED_TYPES[element_type], content)
    except (struct.error, OverflowError) as e:
        raise EncodeError(str(e), path) from e


def _join(path: str, field: FieldSchema) -> str:
    return f"{path}.{field.attribute}" if path else field.attribute
