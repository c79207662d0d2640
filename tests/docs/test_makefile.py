# SPDX-License-Identifier: Apache-2.0
"""Targets that need the recorded facts say so, in `make help` and when the facts are missing."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.shared import ROOT

HELP = re.compile(r"^([a-z-]+):.*?## .*needs SHARED=\.\./shared; without: (.*)\)$", re.MULTILINE)
TARGETS = dict(HELP.findall((ROOT / "Makefile").read_text()))
MAKE = ("make", "--old-file=.venv/.dev-stamp", "--old-file=.venv/.run-stamp")


@pytest.mark.parametrize("target", TARGETS)
def test_a_target_without_the_facts(target: str, tmp_path: Path) -> None:
    make = subprocess.run((*MAKE, target, f"SHARED={tmp_path}"), cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert make.returncode == 2
    assert make.stderr.startswith(f"make {target} reads ")
    assert f"Without it: {TARGETS[target]}" in make.stderr


def test_targets() -> None:
    recipes = re.findall(r"^([a-z-]+):.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {target for target, recipe in recipes if "$(call needs," in recipe} == set(TARGETS)
    assert {target for target, recipe in recipes if "$(SHARED)" in recipe} <= set(TARGETS)


def test_the_check_reads_no_facts() -> None:
    """Neither `make check` nor a program that it runs names the folder."""
    # make runs the line that builds Vale even in a dry run.
    dry_run = (*MAKE, "--dry-run", "check", f"VALE={shutil.which('true')}")
    make = subprocess.run(dry_run, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert "ruff check" in make.stdout
    assert "shared" not in make.stdout.replace(str(ROOT), "").lower()
