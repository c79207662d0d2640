# SPDX-License-Identifier: Apache-2.0
"""The mutants of a source file: one operator or constant is changed, or one call is left out.

Constants change by one if they are subscripts, or operands of arithmetic or comparisons. Constants that only name a
size, a time or a default have no mutants, because most of their values are chosen and not derived. Annotations,
decorators, assertions, f-strings and log lines have no mutants either: no test observes such a change, or it breaks the
import.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent

_COMPARISONS: dict[type[ast.cmpop], tuple[str, tuple[str, ...]]] = {
    ast.Lt: ("<", ("<=", ">=")),
    ast.LtE: ("<=", ("<", ">")),
    ast.Gt: (">", (">=", "<=")),
    ast.GtE: (">=", (">", "<")),
    ast.Eq: ("==", ("!=",)),
    ast.NotEq: ("!=", ("==",)),
    ast.Is: ("is", ("is not",)),
    ast.IsNot: ("is not", ("is",)),
    ast.In: ("in", ("not in",)),
    ast.NotIn: ("not in", ("in",)),
}
_ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "//"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
}
_SWAPPED_CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}
_LOGGERS = {"_log", "_logger", "logging"}


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one source file. Positions count characters."""

    file: str
    """Relative to the root of the repository."""
    line: int
    function: str
    """The qualified name of the innermost function, as in code objects. Empty outside of functions."""
    line_text: str
    start: int
    end: int
    old: str
    new: str

    @property
    def change(self) -> str:
        """The change on one line, as equivalent.toml names it."""
        return f"{' '.join(self.old.split())} -> {self.new}"

    @property
    def module(self) -> str:
        return self.file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    def apply(self, source: str) -> str:
        """Returns the mutated source."""
        assert source[self.start : self.end] == self.old, f"{self.file} has changed"
        return source[: self.start] + self.new + source[self.end :]

    def diff(self) -> str:
        """Returns the change as a unified diff."""
        source = (ROOT / self.file).read_text()
        lines = difflib.unified_diff(
            source.splitlines(), self.apply(source).splitlines(), self.file, f"{self.file} ({self.change})", "", "", 2
        )
        return "\n".join(line.rstrip("\n") for line in lines)


def mutants_of_files(names: Iterable[str]) -> list[Mutant]:
    """Returns all mutants of files and of the Python files below folders. Names are relative to the root."""
    return [
        mutant
        for name in names
        for path in ([ROOT / name] if name.endswith(".py") else sorted((ROOT / name).rglob("*.py")))
        for mutant in mutants_of(path.relative_to(ROOT).as_posix(), path.read_text())
    ]


def mutants_of(file: str, source: str) -> list[Mutant]:
    """Returns all mutants of a source text."""
    finder = _Finder(file, source)
    finder.visit(ast.parse(source))
    return finder.mutants


def draw(mutants: Sequence[Mutant], count: int, seed: int) -> list[Mutant]:
    """Draws places in the code, and one change of each place.

    The order is that of a hash of seed, file and text. So changes elsewhere in the code do not change the draw, and a
    smaller draw is the beginning of a larger one.
    """
    changes: dict[tuple[str, int, str], list[Mutant]] = defaultdict(list)
    for mutant in mutants:
        changes[mutant.file, mutant.start, mutant.old].append(mutant)
    occurrences: Counter[tuple[str, str, str]] = Counter()
    ranked: list[tuple[bytes, Mutant]] = []
    for (file, _, old), alternatives in changes.items():
        text = (file, alternatives[0].line_text, old)
        occurrences[text] += 1
        rank = hashlib.sha256("\0".join((str(seed), *text, str(occurrences[text]))).encode()).digest()
        ranked.append((rank, alternatives[rank[-1] % len(alternatives)]))
    ranked.sort(key=lambda pair: pair[0])
    return [mutant for _, mutant in ranked[:count]]


class _Finder(ast.NodeVisitor):
    def __init__(self, file: str, source: str) -> None:
        self.mutants: list[Mutant] = []
        self._file = file
        self._source = source
        self._lines = source.splitlines(keepends=True)
        self._line_starts = [0]
        for text in self._lines:
            self._line_starts.append(self._line_starts[-1] + len(text))
        self._scope = ""
        """The qualified name of the function or class around a node, with the separator to the names in it."""
        self._functions = [""]

    # Nodes without mutants

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_arguments(self, node: ast.arguments) -> None:
        for default in (*node.defaults, *node.kw_defaults):
            if default is not None:
                self.visit(default)

    def visit_Assert(self, node: ast.Assert) -> None:
        pass

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        pass

    # Functions and classes, without decorators and annotations

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        name = f"{self._scope}{node.name}"
        self._functions.append(name)
        self.visit(node.args)
        outer, self._scope = self._scope, f"{name}.<locals>."
        self._visit_all(node.body)
        self._scope = outer
        self._functions.pop()

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        outer, self._scope = self._scope, f"{self._scope}{node.name}."
        self._functions.append("")
        self._visit_all(node.body)
        self._functions.pop()
        self._scope = outer

    # Statements

    def visit_Expr(self, node: ast.Expr) -> None:
        call = node.value.value if isinstance(node.value, ast.Await) else node.value
        if not isinstance(call, ast.Call):
            self.generic_visit(node)
            return
        target = call.func.value if isinstance(call.func, ast.Attribute) else call.func
        if isinstance(target, ast.Name) and target.id in _LOGGERS:
            return
        self._add(*self._span(node), "pass")
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            self._visit_all(node.orelse)
            return
        self._negate(node.test)
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        if not isinstance(node.test, ast.Constant):
            self._negate(node.test)
            self.visit(node.test)
        self._visit_all([*node.body, *node.orelse])

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if swap := _ARITHMETIC.get(type(node.op)):
            self._replace_between(node.target, node.value, f"{swap[0]}=", f"{swap[1]}=")
        self._change_constants(node.value)
        self.generic_visit(node)

    # Expressions

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for condition in node.ifs:
            self._negate(condition)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        left = node.left
        for operator, right in zip(node.ops, node.comparators, strict=True):
            old, replacements = _COMPARISONS[type(operator)]
            for new in replacements:
                self._replace_between(left, right, old, new)
            left = right
        self._change_constants(node.left, *node.comparators)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if isinstance(node.op, ast.BitOr) and _is_union_of_types(node):
            return
        if swap := _ARITHMETIC.get(type(node.op)):
            self._replace_between(node.left, node.right, *swap)
        self._change_constants(node.left, node.right)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        swap = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        # In `a and b and c` every operator changes: a lone one would bind differently.
        start, end = self._span(node)
        changed = self._source[start:end]
        for left, right in reversed(list(zip(node.values, node.values[1:], strict=False))):
            position = self._operator_between(left, right, swap[0])
            changed = changed[: position - start] + swap[1] + changed[position - start + len(swap[0]) :]
        self._add(start, end, changed)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            start, _ = self._span(node)
            self._add(start, start + len("not "), "")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in _SWAPPED_CALLS:
            self._add(*self._span(node.func), _SWAPPED_CALLS[node.func.id])
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self._change_constants(node.slice)
        if isinstance(node.slice, ast.Slice):
            self._change_constants(node.slice.lower, node.slice.upper)
        self.generic_visit(node)

    def _change_constants(self, *operands: ast.expr | None) -> None:
        for operand in operands:
            node = operand.operand if isinstance(operand, ast.UnaryOp) else operand
            if isinstance(node, ast.Constant) and type(node.value) is int and self._functions[-1]:
                span = self._span(node)
                self._add(*span, str(node.value + 1))
                self._add(*span, str(node.value - 1) if node.value else "(-1)")

    def _negate(self, condition: ast.expr) -> None:
        """Adds the negated condition. Comparisons, `and`, `or` and `not` have mutants of their own."""
        if not isinstance(condition, ast.Compare | ast.BoolOp) and not (
            isinstance(condition, ast.UnaryOp) and isinstance(condition.op, ast.Not)
        ):
            start, end = self._span(condition)
            self._add(start, end, f"(not ({self._source[start:end]}))")

    def _visit_all(self, nodes: Iterable[ast.AST]) -> None:
        for node in nodes:
            self.visit(node)

    def _replace_between(self, left: ast.expr, right: ast.expr, old: str, new: str) -> None:
        position = self._operator_between(left, right, old)
        self._add(position, position + len(old), new)

    def _operator_between(self, left: ast.expr, right: ast.expr, operator: str) -> int:
        """Returns the position of the operator, between brackets, line ends and comments if need be."""
        start, end = self._span(left)[1], self._span(right)[0]
        between = re.sub("#.*", lambda match: " " * len(match[0]), self._source[start:end])
        return start + between.index(operator)

    def _span(self, node: ast.AST) -> tuple[int, int]:
        assert isinstance(node, ast.expr | ast.stmt) and node.end_lineno is not None and node.end_col_offset is not None
        return self._position(node.lineno, node.col_offset), self._position(node.end_lineno, node.end_col_offset)

    def _position(self, line: int, column: int) -> int:
        # ast counts columns in bytes.
        text = self._lines[line - 1]
        return self._line_starts[line - 1] + (column if text.isascii() else len(text.encode()[:column].decode()))

    def _add(self, start: int, end: int, new: str) -> None:
        line = self._source.count("\n", 0, start) + 1
        text = self._lines[line - 1].strip()
        old = self._source[start:end]
        self.mutants.append(Mutant(self._file, line, self._functions[-1], text, start, end, old, new))


def _is_union_of_types(node: ast.expr) -> bool:
    def leaves(node: ast.expr) -> Iterator[ast.expr]:
        if isinstance(node, ast.BinOp):
            yield from leaves(node.left)
            yield from leaves(node.right)
        else:
            yield node

    return any(
        (isinstance(leaf, ast.Constant) and leaf.value is None)
        or (isinstance(leaf, ast.Name) and leaf.id in ("int", "str", "bytes", "float", "memoryview"))
        or (isinstance(leaf, ast.Name) and leaf.id[:1].isupper() and not leaf.id.isupper())
        or (isinstance(leaf, ast.Subscript) and isinstance(leaf.value, ast.Name) and leaf.value.id[:1].isupper())
        for leaf in leaves(node)
    )
