# SPDX-License-Identifier: Apache-2.0
"""The tool behind `make mutate`: the mutants of a line, how they are drawn, and what kills them."""

from __future__ import annotations

import ast
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from textwrap import dedent

import pytest

from tests.mutation import equivalent, mutants
from tests.mutation.mutants import draw, mutants_of, mutants_of_files
from tests.mutation.trial import Outcome, Verdict, outcome


@pytest.mark.parametrize(
    ("line", "changes"),
    [
        ("x = a < b", {"a <= b", "a >= b"}),
        ("x = a is not b", {"a is b"}),
        ("x = (a) in b", {"(a) not in b"}),
        ("x = a + b", {"a - b"}),
        ("x -= y", {"x += y"}),
        ("x = a and b and c", {"a or b or c"}),
        ("x = not a", {"a"}),
        ("x = min(a)", {"max(a)"}),
        ("def f():\n x = a[1]", {"def f():\n x = a[2]", "def f():\n x = a[0]"}),
        ("def f():\n x = a[:-1]", {"def f():\n x = a[:-2]", "def f():\n x = a[:-0]"}),
        ("def f():\n x = 5", set()),
        ("def f():\n x += 0", {f"def f():\n x {change}" for change in ("-= 0", "+= 1", "+= (-1)")}),
        ("LIMIT = 1 << 20", {"LIMIT = 1 >> 20"}),
        ("x = a if b else c", {"a if (not (b)) else c"}),
        ("x = [a for a in b if a]", {"[a for a in b if (not (a))]"}),
        ("run(a)", {"pass"}),
        ("x: Literal[3] = a", set()),
        ("assert a < 3", set()),
        ("x = f'{a + 1}'", set()),
        ("_log.info('%s', a + 1)", set()),
        ("x = A | None", set()),
        ("x = a * (b # + 1\n - c)", {"a // (b # + 1\n - c)", "a * (b # + 1\n + c)"}),
        ("x = 'ä', a > b", {"'ä', a >= b", "'ä', a <= b"}),
    ],
)
def test_a_line_has_the_mutants_of_its_operators_and_calls(line: str, changes: set[str]) -> None:
    mutated = {mutant.apply(line) for mutant in mutants_of("sample.py", line)}
    assert {text.removeprefix("x = ") for text in mutated} == {change.removeprefix("x = ") for change in changes}


def test_a_mutant_names_its_line_and_function() -> None:
    source = dedent("""
        class Group:
            size = a + b

            @property
            def is_full(self):
                return self.size >= 3
        """)
    of_class, *of_method = mutants_of("kcoord/group/__init__.py", source)
    assert (of_class.line_text, of_class.change, of_class.function) == ("size = a + b", "+ -> -", "")
    assert {mutant.function for mutant in of_method} == {"Group.is_full"}
    assert {mutant.line for mutant in of_method} == {7}
    assert of_class.module == "kcoord.group"


def test_every_mutant_of_a_sample_is_valid_python_and_differs_from_the_source() -> None:
    drawn = draw(mutants_of_files(["kcoord/coordinator", "kcoord/storage", "kcoord/client"]), 150, seed=7)
    assert len(drawn) == 150
    for mutant in drawn:
        source = (mutants.ROOT / mutant.file).read_text()
        assert ast.dump(ast.parse(mutant.apply(source))) != ast.dump(ast.parse(source)), mutant
        assert mutant.line_text in mutant.diff()


def test_a_draw_stays_the_same_while_other_code_changes() -> None:
    source = "\n".join(f"x{number} = a{number} < b{number}" for number in range(200))
    drawn = draw(mutants_of("sample.py", source), 40, seed=3)
    later = draw(mutants_of("sample.py", f"y = c + d\n{source}"), 40, seed=3)
    kept = {mutant.line_text for mutant in drawn} & {mutant.line_text for mutant in later}
    assert len(kept) >= len({mutant.line_text for mutant in drawn}) - 1
    assert draw(mutants_of("sample.py", source), 40, seed=4) != drawn
    assert max(Counter((mutant.start, mutant.old) for mutant in drawn).values()) == 1


def test_each_equivalent_mutant_exists_in_the_code_and_has_a_reason() -> None:
    entries = equivalent.read_equivalent_mutants()
    assert equivalent.outdated(entries) == []
    assert [entry for entry in entries if len(entry.reason) < 20] == []
    assert len({entry.key for entry in entries}) == len(entries)


def test_an_equivalent_mutant_of_removed_code_is_outdated() -> None:
    entry = equivalent.EquivalentMutant("kcoord/runtime/serde.py", "no such line", "1 -> 2", "none")
    assert equivalent.outdated([entry]) == [entry]
    assert equivalent.outdated([equivalent.EquivalentMutant("kcoord/gone.py", "x = 1", "1 -> 2", "none")])


def _mutate(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.mutation", "--processes", "1", *options]
    return subprocess.run(command, cwd=mutants.ROOT, capture_output=True, text=True, timeout=240)


def _line(file: str, text: str) -> str:
    source = (mutants.ROOT / file).read_text()
    return f"{file}:{source[: source.index(text)].count(chr(10)) + 1}"


def test_a_mutant_that_fails_a_test_is_killed_and_changes_no_file() -> None:
    """A mutant of the client, because one of the broker is tried with seeds of the simulation as well."""
    file = "kcoord/client/consumer/fetch_session.py"
    source = (mutants.ROOT / file).read_text()
    line = _line(file, "session_id == NO_SESSION")
    tests = "tests/unit/client/test_fetch_session.py"
    done = _mutate("--only", line, "--tests", tests)
    assert f"{line}: == -> !=: killed by unit tests ({tests}::test_" in done.stdout, done.stderr
    assert (mutants.ROOT / file).read_text() == source


def test_a_mutant_that_fails_no_test_is_shown_and_fails_the_run() -> None:
    line = _line("kcoord/client/backoff.py", "def ")
    number = int(line.rpartition(":")[2])
    file = "kcoord/client/backoff.py"
    survivor = next(mutant for mutant in mutants_of_files([file]) if mutant.line > number)
    done = _mutate("--only", f"{file}:{survivor.line}", "--tests", "tests/unit/test_service.py")
    assert done.returncode == 1
    assert survivor.diff() in done.stdout
    assert ": 0.0 %, 95 % required" in done.stdout


@pytest.mark.parametrize("number", [signal.SIGPROF, signal.SIGALRM])
def test_a_mutant_that_exceeds_its_time_is_killed_and_its_test_is_named(tmp_path: Path, number: int) -> None:
    (tmp_path / "place").write_text("tests/test_loop.py::test_end")
    assert outcome(-number, tmp_path) == Outcome(Verdict.TIMEOUT, "tests/test_loop.py::test_end")
    assert outcome(0, tmp_path).verdict is Verdict.SURVIVED
