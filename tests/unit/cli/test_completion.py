# SPDX-License-Identifier: Apache-2.0
"""The completion scripts, run by the shells."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kcoord.cli import COMMANDS
from kcoord.cli.completion import main, whole_parser

TRY = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($#-1)); COMPREPLY=()
function=$(complete -p kcoord | sed 's/.*-F \\([^ ]*\\).*/\\1/')
$function kcoord "${COMP_WORDS[$COMP_CWORD]}" "${COMP_WORDS[$((COMP_CWORD-1))]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("completion")
    (folder / "client.properties").touch()
    path = folder / "kcoord.bash"
    made = subprocess.run([sys.executable, "-m", "kcoord", "completion", "bash"], capture_output=True, check=True)
    path.write_bytes(made.stdout)
    yield path


def completed(script: Path, *words: str) -> set[str]:
    ran = subprocess.run(
        ["bash", "-c", TRY, "try", str(script), *words], capture_output=True, text=True, cwd=script.parent, check=True
    )
    return set(ran.stdout.split())


@pytest.mark.parametrize(
    ("words", "completions"),
    [
        (["kcoord", "con"], {"consume", "consumer-groups", "configs"}),
        (["kcoord", "consumer-groups", "--reset"], {"--reset-offsets"}),
        (
            ["kcoord", "consumer-groups", "--to-"],
            {"--to-earliest", "--to-latest", "--to-current", "--to-offset", "--to-datetime"},
        ),
        (["kcoord", "groups", "wa"], {"watch"}),
        (["kcoord", "groups", "watch", "--int"], {"--interval"}),
        (["kcoord", "configs", "--entity-type", ""], {"topics", "brokers", "groups"}),
        (["kcoord", "serve", "--test"], {"--test-mode"}),
        (["kcoord", "topics", "--command-config", "cli"], {"client.properties"}),
    ],
)
def test_bash(script: Path, words: list[str], completions: set[str]) -> None:
    assert completed(script, *words) >= completions


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_command_is_in_every_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([shell]) == 0
    script = capsys.readouterr().out
    assert all(command in script for command in COMMANDS)
    checker = shutil.which(shell)
    if checker is not None:
        subprocess.run([checker, "-n"], input=script, text=True, check=True, env=os.environ)


def test_the_whole_parser_parses() -> None:
    """Completion offers the options that the commands accept."""
    options = whole_parser().parse_args(["topics", "--describe", "--topic", "t"])
    assert (options.describe, options.topic) == (True, ["t"])
