# SPDX-License-Identifier: Apache-2.0
"""Generates the encoder of one message version.

The encoder appends pieces to a list and joins them once. Adjacent fields of fixed size become one struct call, together
with the length byte of the next field. A value that does not fit makes the generated code raise some exception. The
reference encoder then finds the field.
"""

from __future__ import annotations

from struct import Struct as FixedStruct
from typing import Final

from kcoord_protocol.primitives import MAX_STRING_BYTES, RunStructs, encode_uvarint
from kcoord_protocol.schema import FIXED_TYPES, FieldSchema, MessageSchema, StructSchema
from kcoord_protocol.source import Source

_RUNS: Final = {code: RunStructs(code) for code in "bBhHiIqd"}


def _joined_uuids(uuids: list[bytes]) -> bytes:
    for uuid in uuids:
        if len(uuid) != 16:
            raise ValueError("a uuid has 16 bytes")
    return b"".join(uuids)


def encoder_source(schema: MessageSchema, version: int) -> tuple[str, dict[str, object]]:
    """Return the source of `encode(o0)`, and the names that it uses.

    The caller adds `encode_tags`, and `finish`, which makes the result out of the list of pieces.
    """
    source = _EncoderSource(schema, version)
    source.generate()
    return source.text(), source.constants


class _EncoderSource(Source):
    # In generated code, w is the list of pieces, a its append, s a value, n its encoded length, and o0 o1 ... structs.

    def __init__(self, schema: MessageSchema, version: int) -> None:
        super().__init__(schema, version)
        self._run: list[tuple[str, str]] = []
        self._packers: dict[str, str] = {}
        self._variables = 0
        self.constants.update(
            join=b"".join, uvarint=encode_uvarint, joined_uuids=_joined_uuids,
            byte=tuple(bytes((value,)) for value in range(128)),
        )  # fmt: skip

    def generate(self) -> None:
        with self.function("def encode(o0):"):
            self.line("w = []")
            self.line("a = w.append")
            self._struct(self.schema.root, "o0")
            self._flush()
            self.line("return finish(w)")

    def _struct(self, struct: StructSchema, var: str) -> None:
        lost = [
            self._is_set(field, f"{var}.{field.attribute}")
            for field in struct.fields
            if self.version not in field.versions and not field.ignorable
        ]
        if lost:
            with self.block(f"if {' or '.join(lost)}:"):
                self.line("raise ValueError")
        for field in struct.fields:
            if self.is_inline(field):
                self._field(field, f"{var}.{field.attribute}")
        if self.flexible:
            self._tags(struct, var)

    def _is_set(self, field: FieldSchema, value: str) -> str:
        """Return an expression that is true if the field does not have its default."""
        if field.default_is_null:
            return f"{value} is not None"
        if field.is_array:
            return f"{value} is None or {value}"
        if field.struct is not None:
            inner = [f"{value} is None", f"{value}.unknown_tagged_fields"]
            inner += [self._is_set(f, f"{value}.{f.attribute}") for f in field.struct.fields]
            return " or ".join(inner)
        return f"{value} != {field.default!r}"

    def _field(self, field: FieldSchema, value: str) -> None:
        nullable = field.is_nullable(self.version)
        flexible = field.is_flexible(self.version, self.flexible)
        if field.is_array:
            self._array(field, value, nullable, flexible)
        elif field.struct is not None:
            self._single_struct(field, field.struct, value, nullable)
        elif field.element_type in FIXED_TYPES:
            self._fixed(FIXED_TYPES[field.element_type], value)
        else:
            self._sized(field, value, nullable, flexible)

    def _fixed(self, code: str, value: str) -> None:
        if code == "16s":
            with self.block(f"if len({value}) != 16:"):
                self.line("raise ValueError")
        # A bool is packed as a number, because the format "?" would accept any object, also None.
        self._run.append(("B" if code == "?" else code, value))

    def _flush(self, *more: tuple[str, str]) -> None:
        """Emit the pending run of fixed fields, together with the fields in `more`."""
        self._pack([*self._run, *more])
        self._run = []

    def _pack(self, run: list[tuple[str, str]]) -> None:
        if not run:
            return
        values = [value for _, value in run]
        codes = "".join(code for code, _ in run)
        if all(value.lstrip("-").isdigit() for value in values):
            self.line(f"a({FixedStruct('>' + codes).pack(*map(int, values))!r})")
            return
        pack = self._packers.get(codes)
        if pack is None:
            pack = self._packers[codes] = f"S_{len(self._packers)}"
            self.constants[pack] = FixedStruct(">" + codes).pack
        self.line(f"a({pack}({', '.join(values)}))")

    def _length(self, flexible: bool, code: str) -> None:
        """Emit the pending run and the length `n`. In the compact form, `n` is the length plus one, or 0 for null."""
        if not flexible:
            self._flush((code, "n"))
            return
        run, self._run = self._run, []
        with self.block("if n < 128:"):
            if run:
                self._pack([*run, ("B", "n")])
            else:
                self.line("a(byte[n])")
        with self.block("else:"):
            if code == "h":
                with self.block(f"if n > {MAX_STRING_BYTES + 1}:"):
                    self.line("raise ValueError")
            self._pack(run)
            self.line("a(uvarint(n))")

    def _sized(self, field: FieldSchema, value: str, nullable: bool, flexible: bool) -> None:
        is_string = field.element_type == "string"
        plus = " + 1" if flexible else ""
        null_length = 0 if flexible else -1
        self.line(f"s = {value}" if nullable or not is_string else f"s = {value}.encode()")
        if nullable:
            with self.block("if s is None:"):
                self.line(f"n = {null_length}")
            with self.block("else:"):
                if is_string:
                    self.line("s = s.encode()")
                self.line(f"n = len(s){plus}")
        else:
            self.line(f"n = len(s){plus}")
        self._length(flexible, "h" if is_string else "i")
        if nullable:
            with self.block(f"if n > {null_length + 1}:"):
                self.line("a(s)")
        else:
            self.line("a(s)")

    def _single_struct(self, field: FieldSchema, struct: StructSchema, value: str, nullable: bool) -> None:
        var = self._variable()
        self.line(f"{var} = {value}")
        if not nullable:
            self._struct(struct, var)
            return
        run, self._run = self._run, []
        with self.block(f"if {var} is None:"):
            # A null struct is -1 in the fixed order, but 0 in a tagged field: observed in the bytes of Kafka 4.3.1.
            self._pack([*run, ("b", "0" if field.is_tagged(self.version) else "-1")])
        with self.block("else:"):
            self._run = [*run, ("b", "1")]
            self._struct(struct, var)
            self._flush()

    def _variable(self) -> str:
        self._variables += 1
        return f"o{self._variables}"

    def _array(self, field: FieldSchema, value: str, nullable: bool, flexible: bool) -> None:
        items = f"l{self._variable()}"
        plus = " + 1" if flexible else ""
        null_length = 0 if flexible else -1
        self.line(f"{items} = {value}")
        self.line(f"n = {f'{null_length} if {items} is None else ' if nullable else ''}len({items}){plus}")
        if field.element_type == "string":
            with self.block(f"if {items}.__class__ is str:"):
                self.line("raise TypeError")
        self._length(flexible, "i")
        with self.block(f"if {items}:"):
            self._elements(field, items, flexible)

    def _elements(self, field: FieldSchema, items: str, flexible: bool) -> None:
        code = FIXED_TYPES.get(field.element_type)
        if code == "16s":
            self.line(f"a(joined_uuids({items}))")
            return
        if code is not None:
            name = f"run_{'B' if code == '?' else code}"
            self.constants[name] = _RUNS["B" if code == "?" else code]
            self.line(f"a({name}[len({items})].pack(*{items}))")
            return
        var = self._variable()
        with self.block(f"for {var} in {items}:"):
            if field.struct is not None:
                self._struct(field.struct, var)
                self._flush()
            else:
                self._sized(field, var, nullable=False, flexible=flexible)

    def _tags(self, struct: StructSchema, var: str) -> None:
        tagged = self.tagged_fields(struct)
        conditions = [f"{var}.unknown_tagged_fields", *(self._is_set(f, f"{var}.{f.attribute}") for f in tagged)]
        run, self._run = self._run, []
        with self.block(f"if {' or '.join(conditions)}:"):
            self._pack(run)
            if tagged:
                self.line(f"a({self._tags_function(struct, tagged)}({var}))")
            else:
                self.line(f"a(encode_tags((), {var}.unknown_tagged_fields))")
        with self.block("else:"):
            self._pack([*run, ("B", "0")])

    def _tags_function(self, struct: StructSchema, tagged: list[FieldSchema]) -> str:
        name = f"tags_{struct.name}"
        if any(function.startswith(f"def {name}(") for function in self.functions):
            return name
        with self.function(f"def {name}(o):"):
            self.line("known = []")
            for field in tagged:
                with self.block(f"if {self._is_set(field, f'o.{field.attribute}')}:"):
                    self.line("w = []")
                    self.line("a = w.append")
                    self._field(field, f"o.{field.attribute}")
                    self._flush()
                    self.line(f"known.append(({field.tag}, join(w)))")
            self.line("return encode_tags(known, o.unknown_tagged_fields)")
        return name
