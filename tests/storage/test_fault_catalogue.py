# SPDX-License-Identifier: Apache-2.0
"""docs/durability.md numbers the faults of a disk, D-1 to D-15; the tests of a fault have its number in their names."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
FAULTS = range(1, 16)
_TEST = re.compile(r"def test((?:_d\d+)+)_\w+\(")


def test_every_fault_has_a_test_and_a_line_in_the_documentation() -> None:
    tested = {
        int(number)
        for path in (ROOT / "tests").rglob("test_*.py")
        for numbers in _TEST.findall(path.read_text(encoding="utf-8"))
        for number in re.findall(r"\d+", numbers)
    }
    documented = {int(number) for number in re.findall(r"^\| D-(\d+) \|", _durability(), re.MULTILINE)}
    assert tested == documented == set(FAULTS)


def _durability() -> str:
    return (ROOT / "docs" / "durability.md").read_text(encoding="utf-8")
