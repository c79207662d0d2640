# SPDX-License-Identifier: Apache-2.0
"""Lines of Markdown have 120 columns at most. Tables, code, and pages that are generated are exempt."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.shared import ROOT

WIDTH = 120
GENERATED = {"configuration.md", "lake-tables.md", "pipeline-tables.md"}
DOCUMENTS = [
    path
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
    if path.name not in GENERATED
]
BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def wide_lines(text: str) -> list[str]:
    """Returns the lines of prose that are too wide."""
    prose = BLOCK.sub("", text).splitlines()
    return [line for line in prose if len(line) > WIDTH and not line.startswith(("|", "!", "<"))]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_width(path: Path) -> None:
    assert wide_lines(path.read_text()) == []


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 120


def test_a_wide_line_is_seen() -> None:
    wide = "x " * WIDTH
    assert wide_lines(f"a\n{wide}\n| {wide} |\n```\n{wide}\n```\n") == [wide]
