# SPDX-License-Identifier: Apache-2.0
"""The shared base of the generators of decoders and encoders: indented lines, constants, and minimal sizes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kcoord_protocol.schema import FIXED_TYPES, FieldSchema, MessageSchema, StructSchema

FIXED_BYTES = {"?": 1, "b": 1, "B": 1, "h": 2, "H": 2, "i": 4, "I": 4, "q": 8, "d": 8, "16s": 16}


class Source:
    """Collects the lines of generated functions and the objects that they use."""

    def __init__(self, schema: MessageSchema, version: int) -> None:
        self.schema = schema
        self.version = version
        self.flexible = version in schema.flexible_versions
        self.constants: dict[str, object] = {}
        self.lines: list[str] = []
        self.functions: list[str] = []
        self._indent = 1

    def line(self, text: str) -> None:
        """Emit a line at the current indentation."""
        self.lines.append("    " * self._indent + text)

    @contextmanager
    def block(self, head: str) -> Iterator[None]:
        """Indent the lines that are emitted inside, under `head`."""
        self.line(head)
        self._indent += 1
        length = len(self.lines)
        yield
        if len(self.lines) == length:
            self.line("pass")
        self._indent -= 1

    @contextmanager
    def function(self, head: str) -> Iterator[None]:
        """Collect the lines that are emitted inside as a separate function."""
        outer, self.lines = self.lines, [head]
        outer_indent, self._indent = self._indent, 1
        yield
        self.functions.append("\n".join(self.lines))
        self.lines, self._indent = outer, outer_indent

    def text(self) -> str:
        """Return the source of all functions."""
        return "\n\n".join(self.functions)

    def is_inline(self, field: FieldSchema) -> bool:
        """Return whether the field is in the fixed order of the struct, not in its tagged section."""
        return self.version in field.versions and self.version not in field.tagged_versions

    def tagged_fields(self, struct: StructSchema) -> list[FieldSchema]:
        """Return the struct's tagged fields of this version, in the order of their tags."""
        if not self.flexible:
            return []
        return sorted((f for f in struct.fields if self.version in f.tagged_versions), key=lambda field: field.tag or 0)

    def min_bytes(self, field: FieldSchema) -> int:
        """Return the smallest size of an element of an array field, in bytes."""
        if field.struct is not None:
            return self._min_struct_bytes(field.struct)
        if field.element_type in FIXED_TYPES:
            return FIXED_BYTES[FIXED_TYPES[field.element_type]]
        if field.is_flexible(self.version, self.flexible):
            return 1
        return 2 if field.element_type == "string" else 4

    def _min_struct_bytes(self, struct: StructSchema) -> int:
        total = int(self.flexible)
        for field in struct.fields:
            if not self.is_inline(field):
                continue
            if field.is_array:
                total += 1 if field.is_flexible(self.version, self.flexible) else 4
            elif field.struct is not None and field.is_nullable(self.version):
                total += 1
            else:
                total += self.min_bytes(field)
        return max(total, 1)
