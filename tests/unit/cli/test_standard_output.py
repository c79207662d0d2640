# SPDX-License-Identifier: Apache-2.0
"""Commands whose standard output is closed, a closed pipe or a full disk."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

COMMANDS = [
    "--help",
    "topics --help",
    "completion bash",
    "consumer-groups --validate-regex a",
    "model-check --states 1",
    "storage format --config {folder}/server.properties --ignore-formatted",
    "log dump {folder}/data",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with a formatted data folder, and the settings that name it."""
    folder = tmp_path_factory.mktemp("output")
    settings = folder / "server.properties"
    settings.write_text(f"log.dirs={folder / 'data'}\n")
    run(f"storage format --config {settings}", subprocess.PIPE, "").check_returncode()
    return folder


def run(line: str, stdout: int, unbuffered: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    command = [sys.executable, "-m", "kcoord", *line.split()]
    return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, env=environment, timeout=60)


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("line", COMMANDS)
def test_a_reader_may_close_the_pipe(line: str, unbuffered: str, folder: Path) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        done = run(line.format(folder=folder), write_end, unbuffered)
    finally:
        os.close(write_end)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("closed", [">&-", "<&- >&-"])
@pytest.mark.parametrize("line", COMMANDS)
def test_standard_streams_may_be_closed(line: str, closed: str, folder: Path) -> None:
    command = [sys.executable, "-m", "kcoord", *line.format(folder=folder).split()]
    shell = ["sh", "-c", f'exec "$@" {closed}', "sh", *command]
    done = subprocess.run(shell, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_no_file_takes_the_place_of_a_closed_stream() -> None:
    """Output of libraries would otherwise end up in a log."""
    code = "import os, sys; from kcoord.cli import main; main(['completion', 'bash']); print(os.open('/', os.O_RDONLY))"
    shell = ["sh", "-c", 'exec "$@" <&- 2>&-', "sh", sys.executable, "-c", code]
    done = subprocess.run(shell, stdout=subprocess.PIPE, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "3"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
@pytest.mark.parametrize("line", ["completion bash", "log dump {folder}/data"])
def test_a_full_disk_is_an_error(line: str, folder: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = run(line.format(folder=folder), full.fileno(), "")
    assert (done.returncode, done.stderr) == (1, "kcoord: [Errno 28] No space left on device\n")
