# SPDX-License-Identifier: Apache-2.0
"""Compiles `kcoord_protocol.record_check` with mypyc, for platform wheels and for a checkout.

A wheel is pure by default: it has no extension module and runs everywhere. With KCOORD_COMPILE=1 in the environment the
same sources become a platform wheel, which also has the extension module. That needs a C compiler. An installation
without the module uses the pure form (`kcoord_protocol.compiled`).

`python protocol/hatch_build.py` compiles the module of a checkout in place. If that is not possible, it removes a
module of an earlier run, so that no old code is used, and says what is missing.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any, Final

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE: Final = "kcoord_protocol"
MODULE: Final = "compiled_record_check"
PATTERN: Final = f"{MODULE}*{sysconfig.get_config_var('EXT_SUFFIX')}"
"""mypyc makes two files: one has the code, the other has the name of the module and loads the code."""
BUILD_REQUIREMENTS: Final = ("mypy", "setuptools")


class CompilerError(Exception):
    """mypyc or the C compiler failed. The text has their output."""


class CustomBuildHook(BuildHookInterface[Any]):
    """Adds the extension module to platform wheels. hatchling finds the class by its name."""

    def dependencies(self) -> list[str]:
        """Returns what a build needs in addition to the requirements of pyproject.toml."""
        return list(BUILD_REQUIREMENTS) if self._is_platform_wheel else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Adds the module to the content of the wheel. An editable wheel has no content."""
        if version == "editable" or not self._is_platform_wheel:
            return
        # The files must exist until the wheel is written. The folder is removed with this object.
        self._folder = tempfile.TemporaryDirectory()
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        for path in compile_module(Path(self.root), Path(self._folder.name)):
            build_data["force_include"][str(path)] = f"{PACKAGE}/{path.name}"

    @property
    def _is_platform_wheel(self) -> bool:
        return self.target_name == "wheel" and bool(os.environ.get("KCOORD_COMPILE"))


def compile_module(root: Path, target: Path) -> list[Path]:
    """Compiles the module of the sources in `root` into the folder `target`. Returns the paths of its files."""
    source = (root / "protocol" / PACKAGE / "record_check.py").read_bytes()
    digest = hashlib.sha256(source).hexdigest()
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / PACKAGE
        # mypyc reads the types of what the module imports, and compiles the module alone.
        shutil.copytree(root / "protocol" / PACKAGE, package, ignore=shutil.ignore_patterns(PATTERN, "__pycache__"))
        (package / f"{MODULE}.py").write_bytes(source + f'\nSOURCE_SHA256: Final = "{digest}"\n'.encode())
        command = [sys.executable, "-m", "mypyc", f"{PACKAGE}/{MODULE}.py"]
        environment = {**os.environ, "MYPYC_OPT_LEVEL": "3", "MYPYC_DEBUG_LEVEL": "0"}
        done = subprocess.run(
            command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        if done.returncode:
            raise CompilerError(done.stdout)
        # A running process may have an old file mapped, so files are replaced and not overwritten.
        remove_module(target)
        return [Path(shutil.copy(path, target)) for path in sorted(package.glob(PATTERN))]


def remove_module(target: Path) -> None:
    """Removes the files of a module from a folder."""
    for path in target.glob(PATTERN):
        path.unlink()


def main() -> None:
    """Compiles the module of this checkout in place, if that is possible."""
    root = Path(__file__).parents[1]
    target = root / "protocol" / PACKAGE
    compiler = str(sysconfig.get_config_var("CC")).split()[0]
    missing = [name for name in BUILD_REQUIREMENTS if importlib.util.find_spec(name) is None]
    missing += [] if shutil.which(compiler) else [f"the C compiler {compiler}"]
    missing += [] if Path(sysconfig.get_path("include"), "Python.h").exists() else ["Python.h"]
    reason = f"these are missing: {', '.join(missing)}" if missing else None
    if reason is None:
        try:
            compile_module(root, target)
        except CompilerError as error:
            reason = f"the compiler failed:\n{error}"
    if reason is not None:
        remove_module(target)
        print(f"The checks of records are not compiled, since {reason}", file=sys.stderr)


if __name__ == "__main__":
    main()
