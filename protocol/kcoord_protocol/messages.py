# SPDX-License-Identifier: Apache-2.0
"""All message classes, made from their schemas on first use: `from kcoord_protocol.messages import FetchRequest`.

Structs inside a message are attributes of the message's class. The stub beside this file lists every field;
`kcoord_protocol.stubs` writes it. Threads that ask for a class at the same time get the same class.
"""

from __future__ import annotations

from typing import Final

from kcoord_protocol.message import Explainer, Message, Struct, make_class
from kcoord_protocol.schema import load_schema, schema_names


class _Reference(Explainer):
    """Explains a failure with the reference codec, which is imported at the first failure."""

    def explain_decode(self, cls: type[Message], data: bytes, offset: int, version: int, max_values: int) -> int:
        from kcoord_protocol.reference import decode_message

        return decode_message(cls, data, offset, version, max_values)[1]

    def explain_encode(self, message: Message, version: int) -> None:
        from kcoord_protocol.reference import encode_message

        encode_message(message, version)


_REFERENCE: Final = _Reference()


def message_names() -> list[str]:
    """Return the names of all messages that have a schema."""
    return list(schema_names())


def message_class(name: str) -> type[Message]:
    """Return the class of a message by its schema name; raise KeyError if the message does not exist."""
    cls = _classes.get(name)
    if cls is None:
        # A client and a broker may run in two threads of one process, and both must get the same class.
        cls = _classes.setdefault(name, make_class(load_schema(name), _REFERENCE))
        globals()[name] = cls
    return cls


def __getattr__(name: str) -> type[Message]:
    if name[:1].isupper():
        try:
            return message_class(name)
        except KeyError:
            pass
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *schema_names()})


_classes: dict[str, type[Message]] = {}

__all__ = ["Message", "Struct", "message_class", "message_names"]
