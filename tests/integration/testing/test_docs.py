# SPDX-License-Identifier: Apache-2.0
"""The examples of docs/testing.md run unchanged: the modules with pytest, the script with bash and curl."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.ports import free_ports

UNNEEDED = ("-p", "no:hypothesispytest", "-p", "no:xdist", "-p", "no:asyncio")
"""Options that turn off plugins with a slow import."""
PAGE = (Path(__file__).parents[3] / "docs" / "testing.md").read_text()
MODULES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
SCRIPTS = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)


def test_modules(tmp_path: Path) -> None:
    for number, module in enumerate(MODULES):
        (tmp_path / f"test_example{number}.py").write_text(module)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *UNNEEDED, str(tmp_path)]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert f"{''.join(MODULES).count('def test_')} passed" in ran.stdout


def _json_values(text: str) -> Iterator[object]:
    """Yields the responses that curl printed. The broker's ready line is between them."""
    decoder, position = json.JSONDecoder(), 0
    while start := re.compile(r"^[{\[]", re.MULTILINE).search(text, position):
        value, position = decoder.raw_decode(text, start.start())
        yield value


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_script() -> None:
    (script,) = SCRIPTS
    first = free_ports(2)
    for port, free in (("9092", first), ("9093", first + 1)):
        script = script.replace(f":{port}", f":{free}").replace(f"port {port}", f"port {free}")
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    ran = subprocess.run(
        ["bash", "-eu", "-c", script], env=environment, capture_output=True, text=True, timeout=300, cwd="/"
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    answers = list(_json_values(ran.stdout))
    assert {"name": "orders", "partitions": 2} in answers
    assert any(answer.get("state") == "Empty" for answer in answers if isinstance(answer, dict))
    assert {"orders": {"0": 1}} in answers, "the offset exists before the clock is advanced"
    assert {} in answers, "and has expired afterwards"
