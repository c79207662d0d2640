# SPDX-License-Identifier: Apache-2.0
"""Every variable has a name that describes its value (CONTRIBUTING.md, "Language")."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.support.shared import ROOT

EMPTY_NAMES = frozenset({"each", "found", "known", "one", "others", "wanted"})
FOLDERS = ("bench", "docs", "examples", "kcoord", "protocol", "tests")


def empty_names(source: str) -> Iterator[tuple[int, str]]:
    """Yields the line and the name of each variable and parameter with such a name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in EMPTY_NAMES:
            yield node.lineno, node.id
        elif isinstance(node, ast.arg) and node.arg in EMPTY_NAMES:
            yield node.lineno, node.arg


@pytest.mark.parametrize("folder", FOLDERS)
def test_variables_have_names_of_the_domain(folder: str) -> None:
    paths = list((ROOT / folder).rglob("*.py"))
    assert paths
    assert [(path, name) for path in paths for name in empty_names(path.read_text())] == []


def test_an_empty_name_is_seen() -> None:
    source = "def f(one):\n    for each in ():\n        topic = one\n"
    assert sorted(empty_names(source)) == [(1, "one"), (2, "each")]
