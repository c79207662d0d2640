# SPDX-License-Identifier: Apache-2.0
"""Generates the decoder of one message version.

Adjacent fields of fixed size become one struct call, which also reads the first byte of a following length. Strings are
sliced without a bounds check. Since the position only grows, a slice beyond the end makes a later read fail, or the
final comparison with the length. The count of an array is checked before memory is allocated for it.

The records of a request are a view of its frame, because the broker copies them anyway when it stamps their offsets.
"""

from __future__ import annotations

from collections.abc import Mapping
from struct import Struct as FixedStruct
from typing import Final

from kcoord_protocol.primitives import (
    MAX_ARRAY_ELEMENTS,
    MAX_TAGGED_FIELDS,
    RunStructs,
    decode_compact_bytes,
    decode_compact_nullable_bytes,
    decode_compact_nullable_string,
    decode_compact_string,
    decode_uvarint,
)
from kcoord_protocol.schema import FIXED_TYPES, FieldSchema, MessageSchema, StructSchema
from kcoord_protocol.source import FIXED_BYTES, Source

_UUID_BYTES: Final = 16
_RUNS: Final = {code: RunStructs(code) for code in "?bhHiIqd"}


def _uuids(data: bytes, position: int, end: int) -> list[bytes]:
    return [data[at : at + _UUID_BYTES] for at in range(position, end, _UUID_BYTES)]


def decoder_source(
    schema: MessageSchema, version: int, cls: type[object], structs: Mapping[str, type[object]]
) -> tuple[str, dict[str, object]]:
    """Return the source of `decode(b, p)`, and the names that it uses; the caller adds `unknown_tags`."""
    source = _DecoderSource(schema, version, cls, structs)
    source.generate()
    return source.text(), source.constants


class _DecoderSource(Source):
    # In generated code, b is the bytes, e their length, p the position, n a length, o0 o1 ... structs, l1 l2 ... lists.

    def __init__(
        self, schema: MessageSchema, version: int, cls: type[object], structs: Mapping[str, type[object]]
    ) -> None:
        super().__init__(schema, version)
        self._run: list[tuple[str, str]] = []
        self._variables = 0
        self._unpackers: dict[str, str] = {}
        self.constants.update(
            new=object.__new__, Root=cls, uvarint=decode_uvarint, compact_string=decode_compact_string,
            compact_bytes=decode_compact_bytes, compact_nullable_string=decode_compact_nullable_string,
            compact_nullable_bytes=decode_compact_nullable_bytes, uuids=_uuids,
        )  # fmt: skip
        self.constants |= {f"C_{name}": struct for name, struct in structs.items()}

    def generate(self) -> None:
        with self.function("def decode(b, p):"):
            self.line("e = len(b)")
            self.line("o0 = new(Root)")
            self._struct(self.schema.root, "o0")
            self._flush()
            self.line("return o0, p")

    def _struct(self, struct: StructSchema, var: str) -> None:
        self.line(f"{var}.unknown_tagged_fields = ()")
        for field in struct.fields:
            target = f"{var}.{field.attribute}"
            if self.is_inline(field):
                self._field(field, target)
            else:
                self.line(f"{target} = {self._default(field)}")
        if self.flexible:
            self._tags(struct, var)

    def _default(self, field: FieldSchema) -> str:
        if field.default_is_null:
            return "None"
        if field.is_array:
            return "[]"
        if field.is_struct:
            return f"C_{field.element_type}()"
        return repr(field.default)

    def _field(self, field: FieldSchema, target: str) -> None:
        nullable = field.is_nullable(self.version)
        flexible = field.is_flexible(self.version, self.flexible)
        if field.is_array:
            self._array(field, target, nullable, flexible)
        elif field.struct is not None:
            self._single_struct(field, field.struct, target, nullable)
        elif field.element_type in FIXED_TYPES:
            self._run.append((FIXED_TYPES[field.element_type], target))
        elif field.element_type == "string":
            self._string(target, nullable, flexible)
        elif self.schema.has_view(field):
            self._view(target, nullable, flexible)
        else:
            self._bytes(target, nullable, flexible)

    def _flush(self, length_code: str = "") -> None:
        """Emit the pending run of fixed fields; if `length_code` is given, also read the following length into `n`."""
        run = [*self._run, (length_code, "n")] if length_code else self._run
        self._run = []
        if not run:
            return
        if len(run) == 1 and run[0][0] == "B":
            self.line("n = b[p]")
            self.line("p += 1")
            return
        codes = "".join(code for code, _ in run)
        targets = ", ".join(target for _, target in run)
        unpack = self._unpackers.get(codes)
        if unpack is None:
            unpack = self._unpackers[codes] = f"S_{len(self._unpackers)}"
            self.constants[unpack] = FixedStruct(">" + codes).unpack_from
        self.line(f"{targets}{',' if len(run) == 1 else ''} = {unpack}(b, p)")
        self.line(f"p += {sum(FIXED_BYTES[code] for code, _ in run)}")

    def _string(self, target: str, nullable: bool, flexible: bool) -> None:
        self._flush("B" if flexible else "h")
        if not flexible:
            with self.block("if n >= 0:"):
                self.line(f"{target} = b[p:(p := p + n)].decode()")
            self._null_or_raise("elif n == -1:", target, nullable)
        elif nullable:
            with self.block("if n == 0:"):
                self.line(f"{target} = None")
            with self.block("elif n < 128:"):
                self.line(f"{target} = b[p:(p := p + n - 1)].decode()")
            with self.block("else:"):
                self.line(f"{target}, p = compact_nullable_string(b, p - 1)")
        else:
            with self.block("if 0 < n < 128:"):
                self.line(f"{target} = b[p:(p := p + n - 1)].decode()")
            with self.block("else:"):
                self.line(f"{target}, p = compact_string(b, p - 1)")

    def _bytes(self, target: str, nullable: bool, flexible: bool) -> None:
        self._flush("B" if flexible else "i")
        if not flexible:
            with self.block("if n >= 0:"):
                self.line(f"{target} = b[p:(p := p + n)]")
            self._null_or_raise("elif n == -1:", target, nullable)
            return
        if nullable:
            with self.block("if n == 0:"):
                self.line(f"{target} = None")
            with self.block("else:"):
                self.line(f"{target}, p = compact_nullable_bytes(b, p - 1)")
        else:
            self.line(f"{target}, p = compact_bytes(b, p - 1)")

    def _view(self, target: str, nullable: bool, flexible: bool) -> None:
        self._flush("B" if flexible else "i")
        if flexible:
            with self.block("if n > 127:"):
                self.line("n, p = uvarint(b, p - 1)")
            self.line("n -= 1")
        with self.block("if n >= 0:"):
            self.line(f"{target} = memoryview(b)[p:(p := p + n)]")
        self._null_or_raise("elif n == -1:", target, nullable)

    def _null_or_raise(self, null_test: str, target: str, nullable: bool) -> None:
        if nullable:
            with self.block(null_test):
                self.line(f"{target} = None")
        with self.block("else:"):
            self.line("raise ValueError")

    def _single_struct(self, field: FieldSchema, struct: StructSchema, target: str, nullable: bool) -> None:
        var = self._variable("o")
        if nullable:
            self._flush("b")
            # A null struct is -1 in the fixed order, but 0 in a tagged field: observed in the bytes of Kafka 4.3.1.
            with self.block(f"if n < {1 if field.is_tagged(self.version) else 0}:"):
                self.line(f"{target} = None")
            with self.block("else:"):
                self.line(f"{target} = {var} = new(C_{struct.name})")
                self._struct(struct, var)
                self._flush()
        else:
            self.line(f"{target} = {var} = new(C_{struct.name})")
            self._struct(struct, var)

    def _array(self, field: FieldSchema, target: str, nullable: bool, flexible: bool) -> None:
        self._flush("B" if flexible else "i")
        if flexible:
            with self.block("if n > 127:"):
                self.line("n, p = uvarint(b, p - 1)")
            self.line("n -= 1")
        with self.block("if n >= 0:"):
            self._elements(field, target, flexible)
        self._null_or_raise("elif n == -1:", target, nullable)

    def _elements(self, field: FieldSchema, target: str, flexible: bool) -> None:
        size = self.min_bytes(field)
        with self.block(f"if n{f' * {size}' if size > 1 else ''} > e - p or n > {MAX_ARRAY_ELEMENTS}:"):
            self.line("raise ValueError")
        code = FIXED_TYPES.get(field.element_type)
        if code == "16s":
            self.line(f"{target} = uuids(b, p, p := p + {_UUID_BYTES} * n)")
            return
        if code is not None:
            self.constants[f"run_{code.replace('?', 'bool')}"] = _RUNS[code]
            self.line(f"{target} = list(run_{code.replace('?', 'bool')}[n].unpack_from(b, p))")
            self.line(f"p += {size} * n" if size > 1 else "p += n")
            return
        items = self._variable("l")
        self.line(f"{target} = {items} = []")
        with self.block("for _ in range(n):"):
            self._element(field, items, flexible)
            self._flush()

    def _variable(self, prefix: str) -> str:
        self._variables += 1
        return f"{prefix}{self._variables}"

    def _element(self, field: FieldSchema, items: str, flexible: bool) -> None:
        if field.struct is not None:
            var = self._variable("o")
            self.line(f"{var} = new(C_{field.struct.name})")
            self.line(f"{items}.append({var})")
            self._struct(field.struct, var)
            return
        if field.element_type == "string":
            self._string("s", nullable=False, flexible=flexible)
        else:
            self._bytes("s", nullable=False, flexible=flexible)
        self.line(f"{items}.append(s)")

    def _tags(self, struct: StructSchema, var: str) -> None:
        self._flush("B")
        tagged = self.tagged_fields(struct)
        with self.block("if n:"):
            if tagged:
                self.line(f"p = {self._tags_function(struct, tagged)}(b, p - 1, {var})")
            else:
                self.line(f"p = unknown_tags(b, p - 1, {var})")

    def _tags_function(self, struct: StructSchema, tagged: list[FieldSchema]) -> str:
        name = f"tags_{struct.name}"
        if any(function.startswith(f"def {name}(") for function in self.functions):
            return name
        with self.function(f"def {name}(b, p, o):"):
            self.line("e = len(b)")
            self.line("n, p = uvarint(b, p)")
            with self.block(f"if n * 2 > e - p or n > {MAX_TAGGED_FIELDS}:"):
                self.line("raise ValueError")
            self.line("seen = {}")
            with self.block("for _ in range(n):"):
                self._one_tag(tagged)
            with self.block("if unknown := sorted((tag, data) for tag, data in seen.items() if data is not None):"):
                self.line("o.unknown_tagged_fields = tuple(unknown)")
            self.line("return p")
        return name

    def _one_tag(self, tagged: list[FieldSchema]) -> None:
        self.line("tag, p = uvarint(b, p)")
        self.line("size, p = uvarint(b, p)")
        with self.block("if size > e - p or tag in seen:"):
            self.line("raise ValueError")
        self.line("q = p + size")
        for i, field in enumerate(tagged):
            with self.block(f"{'elif' if i else 'if'} tag == {field.tag}:"):
                self.line(f"seen[{field.tag}] = None")
                self._field(field, f"o.{field.attribute}")
                self._flush()
        with self.block("else:"):
            self.line("seen[tag] = b[p:q]")
            self.line("p = q")
        with self.block("if p != q:"):
            self.line("raise ValueError")
