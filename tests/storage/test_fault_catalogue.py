# SPDX-License-Identifier: Apache-2.0
"""docs/operations.md numbers the faults of a disk, D-1 to D-14; each has tests whose names carry its number."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
FAULTS = range(1, 15)
_TEST = re.compile(r"def test((?:_d\d+)+)_\w+\(")


def test_each_fault_has_a_test_and_a_line_in_the_documentation() -> None:
    tested = {
        int(number)
        for path in (ROOT / "tests").rglob("test_*.py")
        for found in _TEST.findall(path.read_text(encoding="utf-8"))
        for number in re.findall(r"\d+", found)
    }
    documented = {int(number) for number in re.findall(r"^\| D-(\d+) \|", _operations(), re.MULTILINE)}
    assert tested == documented == set(FAULTS)


def _operations() -> str:
    return (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
