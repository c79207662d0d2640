# SPDX-License-Identifier: Apache-2.0
"""The page "Your first change" works if it is followed literally, in a copy of the sources."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.docs.terminal import blocks_of
from tests.support.shared import ROOT, missing

PAGE = ROOT / "docs" / "contributing" / "first-change.md"
SOURCES = ("docs", "kcoord", "protocol", "schemas", "tests", "pyproject.toml")


def test_first_change(tmp_path: Path) -> None:
    if shutil.which("patch") is None:
        missing("patch is not installed")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "*.txt.gz", "site")
            )
        else:
            shutil.copy(ROOT / name, tmp_path / name)
    changed = 0
    for block in blocks_of(PAGE.read_text()):
        if block.title:
            (tmp_path / block.title).write_text(block.text)
            changed += 1
        elif block.language == "diff":
            subprocess.run(["patch", "--quiet", "-p1"], input=block.text, text=True, cwd=tmp_path, check=True)
            changed += 1
    assert changed == 4
    tests = ("tests/integration/test_raft_voters.py", "tests/unit/server/test_apis.py")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{tmp_path / 'protocol'}"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout
    # What `make generate` and `make check` run for the served versions.
    for script in ("docs/make_apis.py", "docs/make_acls.py"):
        for options in ((), ("--check",)):
            subprocess.run([sys.executable, script, *options], cwd=tmp_path, env=environment, check=True)
    assert "RemoveRaftVoter" in (tmp_path / "docs" / "reference" / "apis.md").read_text()
    subprocess.run([sys.executable, "-m", "ruff", "check", "--quiet", "kcoord/server/api"], cwd=tmp_path, check=True)
