# SPDX-License-Identifier: Apache-2.0
"""An import hook that loads one module from another source text. Its file does not change."""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType


class MutatedModuleFinder(MetaPathFinder):
    """Finds one module. All other modules are left to the next finders."""

    def __init__(self, module: str, source: str) -> None:
        self._module = module
        self._source = source

    def install(self) -> None:
        assert self._module not in sys.modules, f"{self._module} is already imported"
        sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._module:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        assert spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader)
        spec.loader = _MutatedLoader(fullname, spec.loader.path, self._source)
        return spec


class _MutatedLoader(SourceFileLoader):
    def __init__(self, fullname: str, path: str, source: str) -> None:
        super().__init__(fullname, path)
        self._source = source

    def get_code(self, fullname: str) -> CodeType:
        """Compiles the mutated source. Reads and writes no byte code files."""
        return compile(self._source, self.path, "exec", dont_inherit=True)
