# SPDX-License-Identifier: Apache-2.0
"""Reads and checks message schema files: one JSON file per message, in Kafka's schema language.

The codec, the class and the type stub of a message are made from its schema alone. Schemas are package data, in
`schemas/` of a source checkout and in `kcoord_protocol/_schemas/` of an installed package. The folder `extensions` adds
kcoord's own tagged fields to messages of Kafka, whose schema files stay as Kafka has them.
"""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Final, TypeAlias, cast

from kcoord_protocol.uuid import ZERO_UUID

JsonObject: TypeAlias = dict[str, object]
Default: TypeAlias = int | float | str | bytes | bool | None

MAX_VERSION: Final = 0x7FFF
NO_VERSIONS: Final = range(0)

FIXED_TYPES: Final = {
    "bool": "?",
    "int8": "b",
    "int16": "h",
    "uint16": "H",
    "uint32": "I",
    "int32": "i",
    "int64": "q",
    "float64": "d",
    "uuid": "16s",
}
VARIABLE_TYPES: Final = frozenset({"string", "bytes", "records"})
INT_RANGES: Final = {
    "int8": (-0x80, 0x7F), "int16": (-0x8000, 0x7FFF), "uint16": (0, 0xFFFF), "uint32": (0, 0xFFFF_FFFF),
    "int32": (-0x8000_0000, 0x7FFF_FFFF), "int64": (-0x8000_0000_0000_0000, 0x7FFF_FFFF_FFFF_FFFF),
}  # fmt: skip

_WORD_START: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_COMMENT_LINE: Final = re.compile(r"^\s*//.*$", re.MULTILINE)


class SchemaError(ValueError):
    """A schema file breaks the rules of the schema language."""


class FieldSchema:
    """One field of a struct."""

    __slots__ = (
        "attribute",
        "default",
        "default_is_null",
        "element_type",
        "flexible_override",
        "ignorable",
        "is_array",
        "json_name",
        "name",
        "nullable_versions",
        "sensitive",
        "struct",
        "tag",
        "tagged_versions",
        "versions",
    )

    def __init__(self, spec: JsonObject, owner: str) -> None:
        self.name = _text(spec, "name", owner)
        owner = f"{owner}.{self.name}"
        self.attribute = attribute_name(self.name)
        self.json_name = self.name[0].lower() + self.name[1:]
        type_name = _text(spec, "type", owner)
        self.is_array = type_name.startswith("[]")
        self.element_type = type_name.removeprefix("[]")
        self.tagged_versions = parse_versions(spec.get("taggedVersions"))
        self.versions = parse_versions(spec.get("versions", spec.get("taggedVersions")))
        self.nullable_versions = parse_versions(spec.get("nullableVersions"))
        self.tag = cast(int, spec["tag"]) if "tag" in spec else None
        self.ignorable = bool(spec.get("ignorable", False))
        self.sensitive = bool(spec.get("sensitive", False))
        self.flexible_override = parse_versions(spec["flexibleVersions"]) if "flexibleVersions" in spec else None
        self.struct: StructSchema | None = None
        self.default, self.default_is_null = self._parse_default(spec, owner)
        if bool(self.tagged_versions) != (self.tag is not None):
            raise SchemaError(f"{owner}: tag and taggedVersions belong together")
        if not self.is_struct and self.element_type not in FIXED_TYPES and self.element_type not in VARIABLE_TYPES:
            raise SchemaError(f"{owner}: unknown type {type_name}")

    @property
    def is_struct(self) -> bool:
        """True if the type, or the element type of an array, is a struct."""
        return self.element_type[0].isupper()

    def is_tagged(self, version: int) -> bool:
        """Return whether the field is in the tagged section in this version."""
        return version in self.tagged_versions

    def is_nullable(self, version: int) -> bool:
        """Return whether the field may be null in this version."""
        return version in self.nullable_versions

    def is_flexible(self, version: int, message_is_flexible: bool) -> bool:
        """Return whether lengths are compact. Only RequestHeader's ClientId differs from its message (KIP-511)."""
        return message_is_flexible if self.flexible_override is None else version in self.flexible_override

    def _parse_default(self, spec: JsonObject, owner: str) -> tuple[Default, bool]:
        # The text "null" is a null default. A JSON null means that there is no default (observed in the bytes of Kafka
        # 4.3.1).
        text = str(spec.get("default") if spec.get("default") is not None else "")
        if text == "null" or (self.element_type == "records" and not self.is_array):
            return None, True
        if self.is_array or self.is_struct:
            return None, False
        try:
            return _DEFAULT_PARSERS.get(self.element_type, _parse_int)(text), False
        except (KeyError, ValueError) as e:
            raise SchemaError(f"{owner}: bad default {text!r}") from e


class StructSchema:
    """A struct: an ordered list of fields. The message itself is the outermost struct."""

    __slots__ = ("fields", "name")

    def __init__(self, name: str, fields: list[FieldSchema]) -> None:
        self.name = name
        self.fields = fields


class MessageSchema:
    """The content of a schema file."""

    __slots__ = ("api_key", "flexible_versions", "kind", "name", "root", "structs", "valid_versions")

    def __init__(self, spec: JsonObject, extension: JsonObject | None = None) -> None:
        self.name = _text(spec, "name", "a message")
        self.kind = _text(spec, "type", self.name)
        self.api_key = cast(int, spec.get("apiKey", -1))
        self.valid_versions = parse_versions(spec.get("validVersions"))
        self.flexible_versions = parse_versions(spec.get("flexibleVersions"))
        self.structs: dict[str, StructSchema] = {}
        for common in _objects(spec, "commonStructs", self.name):
            self._add_struct(_text(common, "name", self.name), common)
        self.root = StructSchema(self.name, self._fields(spec, self.name))
        if extension is not None:
            self._extend(extension)
        self._resolve()

    def has_view(self, field: FieldSchema) -> bool:
        """Return whether a decoded field is a view of the message's bytes and not a copy."""
        return field.element_type == "records" and self.kind == "request"

    def _fields(self, spec: JsonObject, owner: str) -> list[FieldSchema]:
        fields = []
        for item in _objects(spec, "fields", owner):
            field = FieldSchema(item, owner)
            if "fields" in item:
                self._add_struct(field.element_type, item)
            fields.append(field)
        if len({field.attribute for field in fields}) != len(fields):
            raise SchemaError(f"{owner}: a field name is used twice")
        return fields

    def _add_struct(self, name: str, spec: JsonObject) -> None:
        if name in self.structs:
            raise SchemaError(f"{self.name}: struct {name} is defined twice")
        struct = self.structs[name] = StructSchema(name, [])
        struct.fields.extend(self._fields(spec, f"{self.name}.{name}"))

    def _extend(self, extension: JsonObject) -> None:
        for added in _objects(extension, "structs", f"extension of {self.name}"):
            name = _text(added, "name", f"extension of {self.name}")
            struct = self.root if name == self.name else self.structs.get(name)
            if struct is None:
                raise SchemaError(f"extension of {self.name}: struct {name} is not defined")
            fields = self._fields(added, f"extension of {self.name}.{name}")
            present = {field.attribute for field in struct.fields} | {field.tag for field in struct.fields} - {None}
            for field in fields:
                if field.tag is None or field.tag in present or field.attribute in present:
                    raise SchemaError(f"extension of {self.name}.{name}.{field.name}: not a new tagged field")
            struct.fields.extend(fields)

    def _resolve(self) -> None:
        for struct in (self.root, *self.structs.values()):
            for field in filter(lambda f: f.is_struct, struct.fields):
                if field.element_type not in self.structs:
                    raise SchemaError(f"{self.name}: struct {field.element_type} is not defined")
                field.struct = self.structs[field.element_type]


@cache
def attribute_name(name: str) -> str:
    """Return the Python attribute of a schema field: snake_case, with a trailing underscore for a keyword."""
    snake = _WORD_START.sub("_", name).lower()
    return snake + "_" if keyword.iskeyword(snake) else snake


@cache
def parse_versions(text: object) -> range:
    """Parse Kafka's "2-5", "3+", "4" or "none"."""
    if text in (None, "", "none"):
        return NO_VERSIONS
    spec = str(text)
    try:
        if spec.endswith("+"):
            return range(int(spec[:-1]), MAX_VERSION + 1)
        low, _, high = spec.partition("-")
        return range(int(low), int(high or low) + 1)
    except ValueError as e:
        raise SchemaError(f"bad versions {spec!r}") from e


def load_schema(name: str) -> MessageSchema:
    """Read the schema of a message; raise KeyError if the message has no schema."""
    path = schema_paths()[name]
    extension = _extensions.get(name)
    schema = MessageSchema(_read(path), _read(extension) if extension is not None else None)
    if schema.name != name:
        raise SchemaError(f"the schema file of {name} describes {schema.name}")
    return schema


def _read(path: Path) -> JsonObject:
    text = path.read_text("utf-8")
    return cast(JsonObject, json.loads(_COMMENT_LINE.sub("", text) if "//" in text else text))


def schema_names() -> Iterator[str]:
    """Return the names of all messages that have a schema, sorted."""
    return iter(sorted(schema_paths()))


def schema_paths() -> dict[str, Path]:
    """Return the schema files by message name."""
    if not _paths:
        package = Path(__file__).parent
        installed = package / "_schemas"
        folder = installed if installed.is_dir() else package.parents[1] / "schemas"
        _extensions.update((path.stem, path) for path in folder.glob("extensions/*.json"))
        _paths.update((path.stem, path) for path in folder.glob("**/*.json") if path.parent.name != "extensions")
    return _paths


_paths: dict[str, Path] = {}
_extensions: dict[str, Path] = {}


def _parse_int(text: str) -> int:
    return int(text, 0) if text else 0


_DEFAULT_PARSERS: Final[dict[str, Callable[[str], Default]]] = {
    "string": str,
    "bytes": str.encode,
    "uuid": lambda text: {"": ZERO_UUID}[text],
    "bool": lambda text: {"": False, "false": False, "true": True}[text.lower()],
    "float64": lambda text: float(text or 0),
}


def _text(spec: JsonObject, key: str, owner: str) -> str:
    value = spec.get(key)
    if not isinstance(value, str) or not value:
        raise SchemaError(f"{owner}: {key} is missing")
    return value


def _objects(spec: JsonObject, key: str, owner: str) -> list[JsonObject]:
    items = spec.get(key, [])
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise SchemaError(f"{owner}: {key} is not a list of objects")
    return items
