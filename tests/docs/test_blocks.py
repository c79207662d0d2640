# SPDX-License-Identifier: Apache-2.0
"""Every code block of the documents is run, parsed by the program that reads it, or made by one.

A block belongs to exactly one kind. A new language, or a new page with a program, needs a kind here.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from kcoord.cli.completion import whole_parser
from kcoord.config import BROKER_KEYS
from kcoord.config.properties import environment_properties, parse_properties
from tests.docs.shell import ShellCommand, shell_commands
from tests.docs.terminal import Block, blocks_of, commands_of
from tests.docs.test_pages import PAGES as PLAYED
from tests.support.shared import ROOT

DOCUMENTS = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
PARSER = whole_parser()
FENCE = re.compile(r"^ *```", re.MULTILINE)
INDENTED = re.compile(r"(?:^|\n)(?:#[^\n]*|[^\n-*|0-9 ][^\n]*)\n\n    \S")
"""A block that is indented below a paragraph instead of fenced. Nothing looks at those."""
RUN_BY = {
    ("docs/client.md", "python"): (
        "tests/integration/client/test_docs.py",
        "tests/integration/client/test_security.py",
    ),
    ("docs/contributing/first-change.md", "diff"): ("tests/docs/test_first_change.py",),
    ("docs/contributing/first-change.md", "python"): ("tests/docs/test_first_change.py",),
    ("docs/guides/client-assignor.md", "weights.py"): ("tests/integration/client/test_client_assignors.py",),
    ("docs/guides/maintain-a-lake.md", "a compaction"): ("tests/integration/lake/test_compaction.py",),
    ("docs/guides/maintain-a-lake.md", "python"): ("tests/integration/lake/test_formats.py",),
    ("docs/guides/own-assignor.md", "pinned.py"): ("tests/unit/server/test_own_assignors.py",),
    # These need Spark, which takes many seconds to start: the tests that have a session run them.
    ("docs/guides/pipeline-on-a-cluster.md", "spark-defaults.conf"): ("tests/integration/lake/test_submit.py",),
    ("docs/guides/pipeline-on-a-cluster.md", "a job on a standalone cluster"): (
        "tests/integration/lake/test_submit.py",
    ),
    ("docs/guides/pipeline-on-a-cluster.md", "a job whose workers get kcoord from an archive"): (
        "tests/live_lake/stage.py",
    ),
    ("docs/pipeline.md", "python"): ("tests/integration/lake/test_docs.py",),
    ("docs/simulation.md", "python"): ("tests/simulation/test_parts.py",),
    ("docs/testing.md", "python"): ("tests/integration/testing/test_docs.py",),
    ("docs/testing.md", "sh"): ("tests/integration/testing/test_docs.py",),
}
"""The test files that run the blocks of a page with a language or a title. The files name the page."""
FOREIGN = {
    "cd": "a part of the shell",
    "chrt": "sets the priority of a measurement; a part of Linux",
    "docker": "make docker-test runs the image; it needs a Docker daemon",
    "fish": "a shell that few machines have",
    "git": "test_first_change makes the copy itself",
    "jq": "not a part of kcoord",
    "printf": "a part of the shell",
    "kafka-server-start.sh": "Kafka's own; tests/integration/clients/test_kafka_export.py starts Kafka on the folder",
    "spark-pipelines": "tests/integration/lake/test_submit.py runs the example with it",
}
"""Programs whose arguments are not checked here, and why."""


@dataclass(frozen=True, slots=True)
class Place:
    """A block with its page, as a path below the root."""

    page: str
    block: Block

    def __str__(self) -> str:
        return f"{self.page}: {self.block.language} {self.block.title}".strip()


BLOCKS = [Place(str(path.relative_to(ROOT)), block) for path in DOCUMENTS for block in blocks_of(path.read_text())]


def is_run_elsewhere(place: Place) -> bool:
    return (place.page, place.block.language) in RUN_BY or (place.page, place.block.title) in RUN_BY


def is_played(place: Place) -> bool:
    return place.block.language == "console" and ROOT / place.page in PLAYED


def is_file_of_a_session(place: Place) -> bool:
    """Whether test_pages writes the file, and a session of the page reads it."""
    sessions = [other.block.text for other in BLOCKS if other.page == place.page and is_played(other)]
    title = place.block.title
    is_code = place.block.language in ("bash", "properties", "python")
    return is_code and bool(title) and any(title in session for session in sessions)


def is_script(place: Place) -> bool:
    return place.block.language == "sh" and not is_run_elsewhere(place)


def is_settings(place: Place) -> bool:
    return place.block.language == "properties" and not is_run_elsewhere(place) and not is_file_of_a_session(place)


KINDS: dict[str, Callable[[Place], bool]] = {
    "played by test_pages": is_played,
    "a file that a session reads": is_file_of_a_session,
    "run by another test": is_run_elsewhere,
    "a script whose commands are parsed here": is_script,
    "a diagram that test_diagrams draws": lambda place: place.block.language == "mermaid",
    "settings that are parsed here": is_settings,
    "a part of a transcript": lambda place: place.block.language == "transcript",
    "a screen that test_screen draws": lambda place: place.block.language == "screen",
}


@pytest.mark.parametrize("place", BLOCKS, ids=str)
def test_a_block_has_one_kind(place: Place) -> None:
    assert [kind for kind, applies in KINDS.items() if applies(place)] != []
    assert len([kind for kind, applies in KINDS.items() if applies(place)]) == 1


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_block_is_seen(path: Path) -> None:
    text = path.read_text()
    assert len(FENCE.findall(text)) == 2 * len(blocks_of(text))
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    assert INDENTED.findall(prose) == []


@pytest.mark.parametrize("page", sorted({page for page, _ in RUN_BY}))
def test_the_other_tests_name_the_page(page: str) -> None:
    tests = {test for (name, _), paths in RUN_BY.items() if name == page for test in paths}
    for test in tests:
        assert Path(page).name in (ROOT / test).read_text(), test


@pytest.mark.parametrize("place", [place for place in BLOCKS if is_script(place)], ids=str)
def test_script(place: Place) -> None:
    subprocess.run(["bash", "-n"], input=place.block.text, text=True, check=True)
    commands = shell_commands(place.block.text)
    assert commands
    for command in commands:
        check_command(command)


@pytest.mark.parametrize("path", PLAYED, ids=lambda path: path.stem)
def test_sessions_use_no_old_forms(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for block in blocks_of(path.read_text()):
        for line in commands_of(block.text) if block.language == "console" else ():
            for command in shell_commands(line.text):
                if Path(command.words[0]).name == "kcoord":
                    PARSER.parse_args(command.words[1:])
    assert capsys.readouterr().err == ""


def check_command(command: ShellCommand) -> None:
    """Raises AssertionError, or SystemExit, if the program would reject its arguments."""
    if any(name.startswith("KCOORD_") for name in command.variables):
        assert set(environment_properties(command.variables, BROKER_KEYS)) <= set(BROKER_KEYS)
    if not command.words:
        return
    program, *arguments = command.words
    name = Path(program).name
    if name == "kcoord":
        PARSER.parse_args(arguments)
    elif name == "make":
        assert arguments[0] in set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    elif name == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert arguments[0] == "install"
        assert arguments[1] in {".", *(f".[{extra}]" for extra in extras)}
    elif name in ("python", "python3") and arguments[0] == "-m":
        assert importlib.util.find_spec(arguments[1]) is not None
    elif name in ("python", "python3"):
        assert arguments[0] == "-c"
        compile(arguments[1], "<document>", "exec")
    else:
        assert name in FOREIGN


@pytest.mark.parametrize("place", [place for place in BLOCKS if is_settings(place)], ids=str)
def test_settings(place: Place) -> None:
    """The keys are keys of Kafka's broker, which kcoord knows even if they have no effect."""
    settings = parse_properties(place.block.text)
    assert settings
    for name, text in settings.items():
        BROKER_KEYS[name].parse(text)


@pytest.mark.parametrize("place", [place for place in BLOCKS if place.block.language == "transcript"], ids=str)
def test_transcript(place: Place) -> None:
    """tests/transcripts plays the files that contain it."""
    files = (ROOT / "tests" / "transcripts").rglob("*.txt")
    assert any(place.block.text in path.read_text() for path in files)


@pytest.mark.parametrize(
    "text", ["kcoord topics --creat", "make nothing", "pip install kcoord", "KCOORD_LISTENER=x kcoord serve", "ls"]
)
def test_a_wrong_command_is_seen(text: str) -> None:
    (command,) = shell_commands(text)
    with pytest.raises((AssertionError, SystemExit)):
        check_command(command)


def test_commands_of_a_script() -> None:
    script = "A=1 kcoord x 'a b' > f && y | z  # note\nsource <(kcoord v) & kcoord \\\n  w#1\n"
    assert [(command.variables, command.words) for command in shell_commands(script)] == [
        ({"A": "1"}, ["kcoord", "x", "a b"]),
        ({}, ["y"]),
        ({}, ["z"]),
        ({}, ["kcoord", "v"]),
        ({}, ["kcoord", "w#1"]),
    ]
