# SPDX-License-Identifier: Apache-2.0
"""`python -m kcoord_protocol.stubs [--check]`: writes the type stub of the messages, or checks that it is current."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kcoord_protocol.schema import FieldSchema, MessageSchema, StructSchema, load_schema, schema_names

_STUB: Final = Path(__file__).with_name("messages.pyi")
_PYTHON_TYPES: Final = {
    "bool": "bool",
    "bytes": "bytes",
    "float64": "float",
    "records": "bytes",
    "string": "str",
    "uuid": "bytes",
}
_HEAD: Final = """\
# SPDX-License-Identifier: Apache-2.0
# Written by `python -m kcoord_protocol.stubs` from the schema files; do not edit.

from typing import ClassVar

from kcoord_protocol.message import Buffer
from kcoord_protocol.message import Message as Message
from kcoord_protocol.message import Struct as Struct
from kcoord_protocol.message import TaggedFields

def message_names() -> list[str]: ...
def message_class(name: str) -> type[Message]: ...
"""


def stub_text() -> str:
    """Return the content of the stub."""
    classes = ["\n".join(_message_lines(load_schema(name))) + "\n" for name in schema_names()]
    return "\n".join([_HEAD, *classes])


def _message_lines(schema: MessageSchema) -> Iterator[str]:
    yield f"class {schema.name}(Message):"
    for struct in schema.structs.values():
        yield f"    class {struct.name}(Struct):"
        yield from _struct_lines(struct, schema, "        ")
        yield ""
    if all(field.attribute != "name" for field in schema.root.fields):
        yield "    name: ClassVar[str]"
    yield from _struct_lines(schema.root, schema, "    ")


def _struct_lines(struct: StructSchema, schema: MessageSchema, indent: str) -> Iterator[str]:
    typed = [(field.attribute, _python_type(field, schema)) for field in struct.fields]
    for name, python_type in typed:
        yield f"{indent}{name}: {python_type}"
    yield f"{indent}def __init__("
    yield f"{indent}    self,"
    yield f"{indent}    *,"
    for name, python_type in typed:
        yield f"{indent}    {name}: {python_type} = ...,"
    yield f"{indent}    unknown_tagged_fields: TaggedFields = ...,"
    yield f"{indent}) -> None: ..."


def _python_type(field: FieldSchema, schema: MessageSchema) -> str:
    python_type = _PYTHON_TYPES.get(field.element_type, "int")
    if field.is_struct:
        python_type = f"{schema.name}.{field.element_type}"
    elif schema.has_view(field):
        python_type = "Buffer"
    if field.is_array:
        python_type = f"list[{python_type}]"
    return f"{python_type} | None" if field.nullable_versions or field.default_is_null else python_type


def main(arguments: list[str]) -> int:
    """Write or check the stub."""
    text = stub_text()
    if arguments == ["--check"]:
        if _STUB.exists() and _STUB.read_text("utf-8") == text:
            return 0
        print(f"{_STUB.name} is out of date: run python -m kcoord_protocol.stubs", file=sys.stderr)
        return 1
    if arguments:
        print("usage: python -m kcoord_protocol.stubs [--check]", file=sys.stderr)
        return 2
    _STUB.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
