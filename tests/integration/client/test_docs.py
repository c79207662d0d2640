# SPDX-License-Identifier: Apache-2.0
"""The programs in docs/client.md run unchanged."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[3] / "docs" / "client.md").read_text()
PROGRAMS = [block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "async def main" in block]


def test_the_page_has_programs() -> None:
    assert len(PROGRAMS) == 5


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: re.findall(r'NewTopic\("(\w+)', program)[0])
async def test_programs_of_the_page_run(program: str, kcoord: str, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {"__name__": "example"}
    exec(compile(program.replace("localhost:9092", kcoord), "docs/client.md", "exec"), names)
    main = names["main"]
    assert callable(main)
    await main()
    printed = capsys.readouterr().out
    if "the first record of the new partition" in program:
        assert "partition=1, offset=0" in printed
