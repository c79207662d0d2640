# SPDX-License-Identifier: Apache-2.0
"""Everything that `kcoord.client` and `kcoord.testing` export has a docstring.

The reference pages of the site are made from the docstrings and leave out what has none.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

import pytest

import kcoord.client
import kcoord.testing


def undocumented(module: ModuleType) -> Iterator[str]:
    """Yields the exported classes and functions, and the public methods of these classes, without a docstring."""
    for name in module.__all__:
        exported = getattr(module, name)
        if not inspect.isclass(exported) and not inspect.isfunction(exported):
            continue
        # A dataclass without a docstring gets its signature as one.
        if not exported.__doc__ or exported.__doc__.startswith(f"{name}("):
            yield name
        for attribute, member in vars(exported).items() if inspect.isclass(exported) else ():
            if isinstance(member, property):
                function = member.fget
            else:
                function = member.__func__ if isinstance(member, (classmethod, staticmethod)) else member
            if inspect.isfunction(function) and not attribute.startswith("_") and not function.__doc__:
                yield f"{name}.{attribute}"


@pytest.mark.parametrize("module", [kcoord.client, kcoord.testing], ids=lambda module: module.__name__)
def test_exports_have_docstrings(module: ModuleType) -> None:
    assert list(undocumented(module)) == []


def test_a_missing_docstring_is_seen() -> None:
    @dataclass
    class Bare:
        @classmethod
        def make(cls) -> None: ...

        @property
        def size(self) -> None: ...

    module = ModuleType("example", "")
    module.__dict__.update(__all__=["Bare"], Bare=Bare)
    assert list(undocumented(module)) == ["Bare", "Bare.make", "Bare.size"]
