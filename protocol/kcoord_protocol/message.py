# SPDX-License-Identifier: Apache-2.0
"""Message classes, made from schemas, with constructors, decoders and encoders that are compiled for them.

A class has one slot per schema field and serves all versions. Its constructor, and the codec of each version, are
generated as Python source and compiled on first use, so importing a message costs little. Generic code that follows a
schema costs three to five times as much per message as code generated for one version.

Compiled code does not say which field is wrong: malformed bytes make it raise some exception, or end at a wrong
position. `decode` and `encode` then call the `Explainer`, which finds the field, and raise DecodeError or EncodeError
with its path. They raise no other error than these and UnsupportedVersionError.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from operator import attrgetter, itemgetter
from struct import error as StructError
from typing import Any, ClassVar, Final, Self, TypeAlias, TypeVar, cast

from kcoord_protocol.decoder_source import decoder_source
from kcoord_protocol.encoder_source import encoder_source
from kcoord_protocol.errors import DecodeError, EncodeError, UnsupportedVersionError
from kcoord_protocol.primitives import MAX_TAGGED_FIELDS, decode_uvarint, encode_uvarint
from kcoord_protocol.schema import FieldSchema, MessageSchema, StructSchema

Buffer: TypeAlias = bytes | bytearray | memoryview
TaggedFields: TypeAlias = tuple[tuple[int, bytes], ...]
Decoder: TypeAlias = Callable[[bytes, int], tuple[Any, int]]
E = TypeVar("E")
Encoder: TypeAlias = Callable[[Any], E]

# The exceptions of generated code on malformed bytes or wrong values. A slow second pass then finds the field.
_CODEC_FAILURES = (StructError, IndexError, ValueError, TypeError, AttributeError, OverflowError)

# A program uses few different tags and sizes.
_uvarint = lru_cache(maxsize=1024)(encode_uvarint)

# The slow pass stops after this number of values. A hostile frame therefore costs little more time than a good frame.
_EXPLAINED_VALUES = 100_000

_MODULE: Final = "kcoord_protocol.messages"


class _Missing:
    """The default of a constructor argument whose real default is a new object for each call."""

    def __repr__(self) -> str:
        return "<default>"


_MISSING: Final = _Missing()


class Explainer(ABC):
    """Finds the wrong field after compiled code has failed."""

    @abstractmethod
    def explain_decode(self, cls: type[Message], data: bytes, offset: int, version: int, max_values: int) -> int:
        """Decodes slowly and returns the position of the end; raises DecodeError with the path of the wrong field."""

    @abstractmethod
    def explain_encode(self, message: Message, version: int) -> None:
        """Encodes slowly; raises EncodeError with the path of the wrong field."""


HIDDEN: Final = "[hidden]"
"""Shown in place of the value of a sensitive field, such as a key of a password."""


class Struct:
    """A group of fields inside a message. Structs are compared by value, and mutable, and therefore not hashable."""

    __slots__ = ("unknown_tagged_fields",)

    schema: ClassVar[StructSchema]
    _structs: ClassVar[dict[str, type[Struct]]]
    _field_values: ClassVar[Callable[[Struct], object] | None] = None

    unknown_tagged_fields: TaggedFields

    def __init__(self, **fields: object) -> None:
        cls = type(self)
        constructor = _compile_constructor(cls.schema, cls._structs)
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
        shown = [
            f"{field.attribute}={HIDDEN if field.sensitive else _shown(getattr(self, field.attribute))}"
            for field in self.schema.fields
        ]
        if self.unknown_tagged_fields:
            shown.append(f"unknown_tagged_fields={self.unknown_tagged_fields!r}")
        return f"{type(self).__qualname__}({', '.join(shown)})"


def _shown(value: object) -> str:
    """Return the representation of a field's value: the bytes of a view."""
    return repr(bytes(value) if isinstance(value, memoryview) else value)


def encode_tags(tagged: Iterable[tuple[int, bytes]], unknown: Iterable[tuple[int, bytes]]) -> bytes:
    """Write a tagged section, in the order of the tags."""
    fields = sorted([*tagged, *unknown], key=itemgetter(0))
    pieces = [_uvarint(len(fields))]
    last = -1
    for tag, data in fields:
        if tag == last:
            raise ValueError(f"tag {tag} is used twice")
        last = tag
        pieces += (_uvarint(tag), _uvarint(len(data)), data)
    return b"".join(pieces)


def decode_unknown_tags(data: bytes, position: int, target: Struct) -> int:
    """Read the tagged section of a struct without tagged fields in its schema; return the position of its end."""
    count, position = decode_uvarint(data, position)
    end = len(data)
    if count * 2 > end - position or count > MAX_TAGGED_FIELDS:
        raise ValueError("too many tagged fields")
    unknown = {}
    for _ in range(count):
        tag, position = decode_uvarint(data, position)
        size, position = decode_uvarint(data, position)
        if size > end - position or tag in unknown:
            raise ValueError("invalid tagged field")
        unknown[tag] = data[position : position + size]
        position += size
    target.unknown_tagged_fields = tuple(sorted(unknown.items()))
    return position


class _Decoders(dict[int, Decoder]):
    """Version -> compiled decoder."""

    def __init__(self, cls: type[Message]) -> None:
        super().__init__()
        self._cls = cls

    def __missing__(self, version: int) -> Decoder:
        cls = self._cls
        cls.check_version(version)
        decoder = self[version] = _compile_decoder(cls, version)
        return decoder


class _Encoders(dict[int, Encoder[E]]):
    """Version -> compiled encoder. `finish` makes its result out of the list of pieces."""

    def __init__(self, cls: type[Message], finish: Callable[[list[bytes]], E]) -> None:
        super().__init__()
        self._cls = cls
        self._finish = finish

    def __missing__(self, version: int) -> Encoder[E]:
        cls = self._cls
        cls.check_version(version)
        encoder = self[version] = _compile_encoder(cls, version, self._finish)
        return encoder


class Message(Struct):
    """A request, a response, a header or a record. Each schema file describes one message.

    Subclasses also have `name`, the same as `message_name`, unless the message has a field called `name`.
    """

    __slots__ = ()

    message_name: ClassVar[str]
    api_key: ClassVar[int]
    valid_versions: ClassVar[range]
    flexible_versions: ClassVar[range]
    message_schema: ClassVar[MessageSchema]
    _explainer: ClassVar[Explainer]
    _decoders: ClassVar[_Decoders]
    _encoders: ClassVar[_Encoders[bytes]]
    _piece_encoders: ClassVar[_Encoders[list[bytes]]]

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
        """Decode a message that starts at `offset`; return it and the position of its end."""
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

    def encode_pieces(self, version: int) -> list[bytes]:
        """Write the message as pieces, which are its bytes if they are joined.

        The value of a field of type bytes or records is a piece of its own. So it may be any object that has a length.
        """
        try:
            return self._piece_encoders[version](self)
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
            end = cls._explainer.explain_decode(cls, data, offset, version, _EXPLAINED_VALUES)
        except DecodeError as e:
            return e
        if whole and end != len(data):
            return DecodeError(f"{len(data) - end} bytes after the end of {cls.message_name}")
        return DecodeError(f"malformed {cls.message_name}")

    def _explain_encode(self, version: int, failure: Exception) -> EncodeError:
        try:
            self._explainer.explain_encode(self, version)
        except EncodeError as e:
            return e
        return EncodeError(f"{self.message_name}: {failure}")


def make_class(schema: MessageSchema, explainer: Explainer) -> type[Message]:
    """Create the class of a message, with the classes of its structs as attributes. Compiles nothing yet."""
    structs: dict[str, type[Struct]] = {}
    for struct in schema.structs.values():
        namespace = _namespace(struct, f"{schema.name}.{struct.name}", structs)
        structs[struct.name] = type(struct.name, (Struct,), namespace)
    namespace = _namespace(schema.root, schema.name, structs)
    namespace |= structs
    namespace["_explainer"] = explainer
    namespace["message_schema"] = schema
    namespace["message_name"] = schema.name
    if "name" not in namespace["__slots__"]:
        namespace["name"] = schema.name
    namespace["api_key"] = schema.api_key
    namespace["valid_versions"] = schema.valid_versions
    namespace["flexible_versions"] = schema.flexible_versions
    cls = cast(type[Message], type(schema.name, (Message,), namespace))
    cls._decoders = _Decoders(cls)
    cls._encoders = _Encoders(cls, b"".join)
    cls._piece_encoders = _Encoders(cls, list)
    return cls


def _namespace(struct: StructSchema, qualified_name: str, structs: dict[str, type[Struct]]) -> dict[str, Any]:
    return {
        "__slots__": tuple(field.attribute for field in struct.fields),
        "__module__": _MODULE,
        "__qualname__": qualified_name,
        "schema": struct,
        "_structs": structs,
    }


def _compile_decoder(cls: type[Message], version: int) -> Decoder:
    source, constants = decoder_source(cls.message_schema, version, cls, cls._structs)
    constants["unknown_tags"] = decode_unknown_tags
    return cast(Decoder, _compile(source, constants, f"{cls.message_name} v{version} decoder", "decode"))


def _compile_encoder(cls: type[Message], version: int, finish: Callable[[list[bytes]], E]) -> Encoder[E]:
    source, constants = encoder_source(cls.message_schema, version)
    constants |= {"encode_tags": encode_tags, "finish": finish}
    return cast("Encoder[E]", _compile(source, constants, f"{cls.message_name} v{version} encoder", "encode"))


def _compile_constructor(struct: StructSchema, structs: Mapping[str, type[Struct]]) -> Callable[..., None]:
    """Return the constructor of a struct's class: every field is a keyword argument with the schema's default."""
    constants: dict[str, object] = {"MISSING": _MISSING}
    parameters = ["self", "*"]
    lines = []
    for field in struct.fields:
        name = field.attribute
        fresh = _fresh_default(field, structs, constants)
        if fresh:
            parameters.append(f"{name}=MISSING")
            lines.append(f"    self.{name} = {fresh} if {name} is MISSING else {name}")
        else:
            parameters.append(f"{name}={field.default!r}")
            lines.append(f"    self.{name} = {name}")
    parameters.append("unknown_tagged_fields=()")
    lines.append("    self.unknown_tagged_fields = unknown_tagged_fields")
    source = "\n".join([f"def __init__({', '.join(parameters)}):", *lines])
    return _compile(source, constants, f"{struct.name} constructor", "__init__")


def _fresh_default(field: FieldSchema, structs: Mapping[str, type[Struct]], constants: dict[str, object]) -> str:
    if field.default_is_null:
        return ""
    if field.is_array:
        return "[]"
    if field.is_struct:
        constants[field.element_type] = structs[field.element_type]
        return f"{field.element_type}()"
    return ""


def _compile(source: str, constants: dict[str, object], title: str, function: str) -> Callable[..., Any]:
    # The source is built from the schema files of this package alone, never from input.
    exec(compile(source, f"<{title}>", "exec"), constants)
    return cast(Callable[..., Any], constants[function])
