# SPDX-License-Identifier: Apache-2.0
"""Makes message classes from schemas, and compiles constructors, decoders and encoders as Python source of their own.

Generic code that walks a schema costs three to five times as much per message as code written out for one version.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, cast

from kcoord_protocol.decoder_source import decoder_source
from kcoord_protocol.encoder_source import encoder_source
from kcoord_protocol.message import Codecs, Decoder, Encoder, Message, Struct, _Decoders, _Encoders
from kcoord_protocol.schema import FieldSchema, MessageSchema, StructSchema

_MODULE: Final = "kcoord_protocol.messages"


class _Missing:
    """The default of a constructor argument whose real default has to be made afresh."""

    def __repr__(self) -> str:
        return "<default>"


_MISSING: Final = _Missing()


def make_class(schema: MessageSchema) -> type[Message]:
    """Create the class of a message, and those of its structs as attributes of it. Compiles nothing yet."""
    structs: dict[str, type[Struct]] = {}
    for struct in schema.structs.values():
        namespace = _namespace(struct, f"{schema.name}.{struct.name}", structs)
        structs[struct.name] = type(struct.name, (Struct,), namespace)
    namespace = _namespace(schema.root, schema.name, structs)
    namespace |= structs
    namespace["message_schema"] = schema
    namespace["message_name"] = schema.name
    if "name" not in namespace["__slots__"]:
        namespace["name"] = schema.name
    namespace["api_key"] = schema.api_key
    namespace["valid_versions"] = schema.valid_versions
    namespace["flexible_versions"] = schema.flexible_versions
    cls = cast(type[Message], type(schema.name, (Message,), namespace))
    cls._decoders = _Decoders(cls)
    cls._encoders = _Encoders(cls)
    return cls


def _namespace(struct: StructSchema, qualified_name: str, structs: dict[str, type[Struct]]) -> dict[str, Any]:
    return {
        "__slots__": tuple(field.attribute for field in struct.fields),
        "__module__": _MODULE,
        "__qualname__": qualified_name,
        "schema": struct,
        "_structs": structs,
        "_codecs": _CODECS,
    }


class _CompiledCodecs(Codecs):
    """Compiles codecs; explains with the reference codec, which is imported when something is wrong."""

    def constructor(self, cls: type[Struct]) -> Callable[..., None]:
        return compile_constructor(cls.schema, cls._structs)

    def decoder(self, cls: type[Message], version: int) -> Decoder:
        return compile_decoder(cls.message_schema, version, cls, cls._structs)

    def encoder(self, cls: type[Message], version: int) -> Encoder:
        return compile_encoder(cls.message_schema, version)

    def explain_decode(self, cls: type[Message], data: bytes, offset: int, version: int, max_values: int) -> int:
        from kcoord_protocol.reference import decode_message

        return decode_message(cls, data, offset, version, max_values)[1]

    def explain_encode(self, message: Message, version: int) -> None:
        from kcoord_protocol.reference import encode_message

        encode_message(message, version)


_CODECS: Final = _CompiledCodecs()


def compile_decoder(
    schema: MessageSchema, version: int, cls: type[Message], structs: Mapping[str, type[Struct]]
) -> Decoder:
    source, constants = decoder_source(schema, version, cls, structs)
    return cast(Decoder, _compile(source, constants, f"{schema.name} v{version} decoder", "decode"))


def compile_encoder(schema: MessageSchema, version: int) -> Encoder:
    source, constants = encoder_source(schema, version)
    return cast(Encoder, _compile(source, constants, f"{schema.name} v{version} encoder", "encode"))


def compile_constructor(struct: StructSchema, structs: Mapping[str, type[Struct]]) -> Callable[..., None]:
    """The constructor of a struct's class: every field a keyword argument with the schema's default."""
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
    exec(compile(source, f"<{title}>", "exec"), constants)  # the source is built from our own schema files alone
    return cast(Callable[..., Any], constants[function])
