# SPDX-License-Identifier: Apache-2.0
"""Retries of tests after a race in a client library: at most one per call, and the end of the run lists them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from pyspark.errors import PySparkException

from tests.support.client_races import take_retries
from tests.support.shared import ROOT
from tests.support.spark import TOO_BUSY, TOO_BUSY_RACE, unless_too_busy

FLAKY = """
from tests.support.client_races import note_retry

def test_flaky():
    note_retry("a race")
"""


class Work:
    """A function that fails `failures` times with this text."""

    def __init__(self, failures: int, text: str) -> None:
        self.runs = 0
        self._failures = failures
        self._text = text

    def __call__(self) -> str:
        self.runs += 1
        if self.runs <= self._failures:
            raise PySparkException(self._text)
        return "done"


def test_spark_gets_one_more_attempt_which_is_counted() -> None:
    work = Work(1, f"{TOO_BUSY}.")
    assert unless_too_busy(work) == "done"
    assert (work.runs, take_retries()) == (2, [TOO_BUSY_RACE])
    work = Work(2, TOO_BUSY)
    with pytest.raises(PySparkException, match=TOO_BUSY):
        unless_too_busy(work)
    assert (work.runs, take_retries()) == (2, [TOO_BUSY_RACE])


def test_other_failures_and_successes_are_not_retried() -> None:
    work = Work(1, "something else")
    with pytest.raises(PySparkException, match="something else"):
        unless_too_busy(work)
    assert (work.runs, take_retries()) == (1, [])
    assert unless_too_busy(Work(0, "")) == "done"
    assert take_retries() == []


@pytest.mark.parametrize("processes", ["0", "1"])
def test_the_end_of_a_run_names_retries_of_all_processes(tmp_path: Path, processes: str) -> None:
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (tmp_path / "test_flaky.py").write_text(FLAKY)
    command = [sys.executable, "-m", "pytest", "-q", "-n", processes, "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run([*command, f"--rootdir={tmp_path}"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 retries after a race of a client library" in done.stdout
    assert "test_flaky.py::test_flaky: a race" in done.stdout
