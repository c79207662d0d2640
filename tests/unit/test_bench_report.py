# SPDX-License-Identifier: Apache-2.0
"""Tables of measurements in documents."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.peers import DOCUMENT_SECTION
from bench.report import Report, write_into


def test_a_section_is_replaced_by_tables_and_the_rest_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = tmp_path / "page.md"
    document.write_text("# Page\n\n<!-- speed -->\n\nold\n\n<!-- end of speed -->\n\nThe end.\n")
    table = Report().table("speed of all", "server", "us", "per s")
    table.row("kcoord", 1.234, 56_789)
    for _ in range(2):
        write_into(document, "speed", table.markdown())
    content = "speed of all:\n\n| server | us | per s |\n|---|---|---|\n| kcoord | 1.23 | 56,789 |"
    expected = f"# Page\n\n<!-- speed -->\n\n{content}\n\n<!-- end of speed -->\n\nThe end.\n"
    assert document.read_text() == expected
    assert content in capsys.readouterr().out


def test_a_document_without_the_section_is_not_changed(tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    document.write_text("# Page\n\n<!-- speed -->\n")
    with pytest.raises(AssertionError, match=r"has no section between <!-- speed --> and <!-- end of speed -->"):
        write_into(document, "speed", "new")
    assert document.read_text() == "# Page\n\n<!-- speed -->\n"


def test_the_page_of_figures_has_the_section_of_bench_peers(tmp_path: Path) -> None:
    copy = tmp_path / "performance.md"
    copy.write_text((Path(__file__).parents[2] / "docs" / "performance.md").read_text())
    write_into(copy, DOCUMENT_SECTION, "new")
    assert f"<!-- {DOCUMENT_SECTION} -->\n\nnew\n\n<!-- end of {DOCUMENT_SECTION} -->\n" in copy.read_text()
