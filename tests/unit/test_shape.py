# SPDX-License-Identifier: Apache-2.0
"""The functions that `make shape` counts as forwarding, and the import circles that it finds."""

from __future__ import annotations

import ast

import pytest

from tests.shape.source import circles, only_forwards


@pytest.mark.parametrize(
    ("body", "forwards"),
    [
        ("return self._groups.run(a, self._b)", True),
        ('"""Text."""\n    return await self._groups.run(*a, key=self._b.c)', True),
        ("self._close()", True),
        ("return self._groups.run(a, 1)", False),
        ("return self._groups.run(other)", False),
        ("return self._groups.run(a + 1)", False),
        ("return self._groups", False),
        ("self._count += 1\n    return self._groups.run(a)", False),
    ],
)
def test_a_function_that_only_forwards(body: str, forwards: bool) -> None:
    (function,) = ast.parse(f"async def function(self, a):\n    {body}\n").body
    assert isinstance(function, ast.AsyncFunctionDef)
    assert only_forwards(function) is forwards


def test_import_circles() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": {"d"}, "f": {"a", "d"}}
    assert circles(graph) == [["a", "b", "c"], ["d", "e"]]
    assert circles({"a": {"b"}, "b": {"c"}, "c": set()}) == []
