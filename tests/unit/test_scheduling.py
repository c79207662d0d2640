# SPDX-License-Identifier: Apache-2.0
"""The order of test files, and what happens when a test ends its process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.scheduling import SPARK_FOLDERS, uses_spark
from tests.support.shared import ROOT


def test_every_file_that_starts_spark_is_in_a_folder_of_spark() -> None:
    assert all((ROOT / folder).is_dir() for folder in SPARK_FOLDERS)
    for path in (ROOT / "tests").rglob("test_*.py"):
        nodeid = path.relative_to(ROOT).as_posix()
        takes_session = "spark: SparkSession" in path.read_text() and path != Path(__file__)
        assert uses_spark(nodeid) == takes_session, nodeid


CONFTEST = """
from tests.support.scheduling import LongFilesFirst

def pytest_xdist_make_scheduler(config, log):
    return LongFilesFirst(config, log)
"""


def test_tests_that_end_their_processes_fail_and_all_others_run_once(tmp_path: Path) -> None:
    """A process that has finished several files ends; xdist's own scheduler would not come to an end after that."""
    ran = tmp_path / "ran"
    test = f"def test_{{0}}(): print('{{1}}', file=open({str(ran)!r}, 'a'))\n"
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for file in range(8):
        tests = [test.format(number, f"{file}.{number}") for number in range(3)]
        if file in (5, 6):
            tests.insert(1, "def test_crash(): import os; os._exit(3)\n")
        (tmp_path / f"test_{file}.py").write_text("".join(tests))
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", "-p", "no:cacheprovider"]
    result = subprocess.run(
        [*command, "--rootdir", tmp_path, "-c", "/dev/null", tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "2 failed, 24 passed" in result.stdout, result.stdout + result.stderr
    assert "test_5.py::test_crash" in result.stdout
    assert "test_6.py::test_crash" in result.stdout
    assert sorted(ran.read_text().split()) == [f"{file}.{number}" for file in range(8) for number in range(3)]
