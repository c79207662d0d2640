# SPDX-License-Identifier: Apache-2.0
"""An import hook that gives one module with other source than the file has; the file stays as it is."""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType


class MutatedModuleFinder(MetaPathFinder):
    """Finds the one module; the next finders find all others."""

    def __init__(self, module: str, source: str) -> None:
        self._module = module
        self._source = source

    def install(self) -> None:
        assert self._module not in sys.modules, f"{self._module} has been imported already"
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
        """Compiles the mutated source; neither reads nor writes byte code files."""
        return compile(self._source, self.path, "exec", dont_inherit=True)
