# SPDX-License-Identifier: Apache-2.0
"""The named invariants: each is asserted once, has a test, and is on the page docs/contributing/invariants.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.support.shared import ROOT

PAGE = ROOT / "docs" / "contributing" / "invariants.md"
NAME = re.compile(r"([GTPSR]-\d+): ")
ROW = re.compile(r"^\| ([GTPSR]-\d+) \| .+ \| `([\w.]+)` \| .+ \|$", re.MULTILINE)


def text_of(message: ast.expr | None) -> str:
    """Returns the constant text at the beginning of an assertion's message."""
    if isinstance(message, ast.JoinedStr):
        message = message.values[0]
    return message.value if isinstance(message, ast.Constant) and isinstance(message.value, str) else ""


def named_assertions(source: str) -> Iterator[str]:
    """Yields the name of each named assertion in a module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assert) and (name := NAME.match(text_of(node.msg))):
            yield name[1]


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def test_the_page_has_every_named_assertion_once() -> None:
    paths = (ROOT / "kcoord").rglob("*.py")
    assertions = sorted((name, module_of(path)) for path in paths for name in named_assertions(path.read_text()))
    assert sorted(ROW.findall(PAGE.read_text())) == assertions
    names = [name for name, _ in assertions]
    assert len(set(names)) == len(names) >= 20


def test_every_invariant_has_a_test() -> None:
    paths = (path for folder in ("unit", "storage") for path in (ROOT / "tests" / folder).rglob("test_invariants.py"))
    texts = "\n".join(path.read_text() for path in paths)
    missing = [name for name, _ in ROW.findall(PAGE.read_text()) if not re.search(rf"\b{name}\b", texts)]
    assert missing == []


def test_a_named_assertion_is_seen() -> None:
    source = 'assert a, f"G-1: {b}"\nassert a, "G-2: b"\nassert a, "b"\nassert a\nassert a, f"{b} G-3: "\n'
    assert list(named_assertions(source)) == ["G-1", "G-2"]
