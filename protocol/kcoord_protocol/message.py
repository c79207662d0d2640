# SPDX-License-Identifier: Apache-2.0
"""The base classes of all messages and of the structs in them.

A class has one slot per schema field and serves all versions. Its constructor and its codecs are compiled on first
use, so that importing a message costs little. `compiler.make_class` makes the classes and gives them a `Codecs`, so
that this module needs neither the compiler nor the slow reference codec.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from functools import lru_cache
from operator import attrgetter, itemgetter
from typing import Any, ClassVar, Self, TypeAlias

from kcoord_protocol.errors import DecodeError, EncodeError, UnsupportedVersionError
from kcoord_protocol.primitives import encode_uvarint
from kcoord_protocol.schema import MessageSchema, StructSchema

Buffer: TypeAlias = bytes | bytearray | memoryview
TaggedFields: TypeAlias = tuple[tuple[int, bytes], ...]
Decoder: TypeAlias = Callable[[bytes, int], tuple[Any, int]]
Encoder: TypeAlias = Callable[[Any], bytes]

# What generated code runs into on malformed bytes or wrong values; a slow second pass then finds the field.
_CODEC_FAILURES = (struct.error, IndexError, ValueError, TypeError, AttributeError, OverflowError)

# The tags and sizes of one program are few.
_uvarint = lru_cache(maxsize=1024)(encode_uvarint)

# The slow pass stops here, so that a hostile frame cannot buy much more time than an honest one of its size.
_EXPLAINED_VALUES = 100_000


class Codecs(ABC):
    """Makes what message classes need on first use, and explains their failures."""

    @abstractmethod
    def constructor(self, cls: type[Struct]) -> Callable[..., None]:
        """The constructor of a class: every field a keyword argument with the schema's default."""

    @abstractmethod
    def decoder(self, cls: type[Message], version: int) -> Decoder: ...

    @abstractmethod
    def encoder(self, cls: type[Message], version: int) -> Encoder: ...

    @abstractmethod
    def explain_decode(self, cls: type[Message], data: bytes, offset: int, version: int, max_values: int) -> int:
        """Decodes slowly and returns where the message ends; DecodeError with the path of the field that is wrong."""

    @abstractmethod
    def explain_encode(self, message: Message, version: int) -> None:
        """Encodes slowly; EncodeError with the path of the field that is wrong."""


class Struct:
    """A group of fields inside a message. Compared by value, mutable, and therefore not hashable."""

    __slots__ = ("unknown_tagged_fields",)

    schema: ClassVar[StructSchema]
    _structs: ClassVar[dict[str, type[Struct]]]
    _codecs: ClassVar[Codecs]
    _field_values: ClassVar[Callable[[Struct], object] | None] = None

    unknown_tagged_fields: TaggedFields

    def __init__(self, **fields: object) -> None:
        cls = type(self)
        constructor = cls._codecs.constructor(cls)
        cls.__init__ = constructor  # type: ignore[method-assign]
        constructor(self, **fields)

    def __eq__(self, other: object) -> bool:
        cls = type(self)
        if type(other) is not cls:
            return NotImplemented
        values = cls._field_values
        if values is None:
            values = cls._field_values = attrgetter(
                "unknown_tagged_fields", *(field.attribute for field in cls.schema.fields)
            )
        return values(self) == values(other)

    def __repr__(self) -> str:
        names = [field.attribute for field in self.schema.fields]
        if self.unknown_tagged_fields:
            names.append("unknown_tagged_fields")
        return f"{type(self).__qualname__}({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"


def encode_tags(known: Iterable[tuple[int, bytes]], unknown: Iterable[tuple[int, bytes]]) -> bytes:
    """Write a tagged section, in the order of the tags."""
    fields = sorted([*known, *unknown], key=itemgetter(0))
    pieces = [_uvarint(len(fields))]
    last = -1
    for tag, data in fields:
        if tag == last:
            raise ValueError(f"tag {tag} is used twice")
        last = tag
        pieces += (_uvarint(tag), _uvarint(len(data)), data)
    return b"".join(pieces)


class _Decoders(dict[int, Decoder]):
    """Version -> compiled decoder."""

    def __init__(self, cls: type[Message]) -> None:
        super().__init__()
        self._cls = cls

    def __missing__(self, version: int) -> Decoder:
        cls = self._cls
        cls.check_version(version)
        decoder = self[version] = cls._codecs.decoder(cls, version)
        return decoder


class _Encoders(dict[int, Encoder]):
    """Version -> compiled encoder."""

    def __init__(self, cls: type[Message]) -> None:
        super().__init__()
        self._cls = cls

    def __missing__(self, version: int) -> Encoder:
        cls = self._cls
        cls.check_version(version)
        encoder = self[version] = cls._codecs.encoder(cls, version)
        return encoder


class Message(Struct):
    """A request, a response, a header or a record: what one schema file describes.

    Subclasses also have `name`, the same as `message_name`, unless the message has a field of that name.
    """

    __slots__ = ()

    message_name: ClassVar[str]
    api_key: ClassVar[int]
    valid_versions: ClassVar[range]
    flexible_versions: ClassVar[range]
    message_schema: ClassVar[MessageSchema]
    _decoders: ClassVar[_Decoders]
    _encoders: ClassVar[_Encoders]

    @classmethod
    def decode(cls, data: Buffer, version: int) -> Self:
        """Decode a message that fills `data` exactly."""
        if type(data) is not bytes:
            data = bytes(data)
        try:
            message, end = cls._decoders[version](data, 0)
            if end == len(data):
                return message  # type: ignore[no-any-return]
        except UnsupportedVersionError:
            raise
        except _CODEC_FAILURES:
            pass
        raise cls._explain_decode(data, 0, version, whole=True)

    @classmethod
    def decode_prefix(cls, data: Buffer, offset: int, version: int) -> tuple[Self, int]:
        """Decode a message that starts at `offset`; also returns where it ends."""
        if type(data) is not bytes:
            data = bytes(data)
        try:
            message, end = cls._decoders[version](data, offset)
            if end <= len(data) and offset >= 0:
                return message, end
        except UnsupportedVersionError:
            raise
        except _CODEC_FAILURES:
            pass
        raise cls._explain_decode(data, offset, version, whole=False)

    def encode(self, version: int) -> bytes:
        """Write the message as bytes of the given version."""
        try:
            return self._encoders[version](self)
        except UnsupportedVersionError:
            raise
        except _CODEC_FAILURES as e:
            failure = e
        raise self._explain_encode(version, failure)

    @classmethod
    def check_version(cls, version: int) -> None:
        """Raise UnsupportedVersionError unless the message exists in that version."""
        if version not in cls.valid_versions:
            raise UnsupportedVersionError(f"{cls.message_name} has no version {version}")

    @classmethod
    def is_flexible(cls, version: int) -> bool:
        """Whether the version has compact lengths and tagged fields (KIP-482)."""
        return version in cls.flexible_versions

    @classmethod
    def _explain_decode(cls, data: bytes, offset: int, version: int, *, whole: bool) -> DecodeError:
        try:
            end = cls._codecs.explain_decode(cls, data, offset, version, _EXPLAINED_VALUES)
        except DecodeError as e:
            return e
        if whole and end != len(data):
            return DecodeError(f"{len(data) - end} bytes after the end of {cls.message_name}")
        return DecodeError(f"malformed {cls.message_name}")

    def _explain_encode(self, version: int, failure: Exception) -> EncodeError:
        try:
            self._codecs.explain_encode(self, version)
        except EncodeError as e:
            return e
        return EncodeError(f"{self.message_name}: {failure}")
