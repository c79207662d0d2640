# SPDX-License-Identifier: Apache-2.0
"""The options that all commands have under the same names, and the old forms, which print a warning."""

from __future__ import annotations

import argparse
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from kcoord.cli import main
from kcoord.cli.completion import whole_parser

PRINTS_A_SCRIPT = "kcoord completion"
WITHOUT_BROKER = ("kcoord log", "kcoord lake", "kcoord serve", "kcoord simulate", "kcoord model-check",
                  "kcoord completion", "kcoord workers", "kcoord storage")  # fmt: skip


def leaves(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yields the parsers of all commands and subcommands."""
    nested = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not nested:
        yield parser
    for action in nested:
        for child in action.choices.values():
            yield from leaves(child)


def shown_options(parser: argparse.ArgumentParser) -> set[str]:
    """Returns the options that --help lists."""
    shown = (action for action in parser._actions if action.help is not argparse.SUPPRESS)
    return {option for action in shown for option in action.option_strings}


PARSERS = {parser.prog: parser for parser in leaves(whole_parser())}


@pytest.mark.parametrize("prog", PARSERS)
def test_every_command_has_the_common_options(prog: str) -> None:
    options = shown_options(PARSERS[prog])
    assert "--json" in options or prog == PRINTS_A_SCRIPT
    if not prog.startswith(WITHOUT_BROKER):
        assert "--bootstrap-server" in options
    assert ("--command-config" in options) is ("--bootstrap-server" in options)
    if not prog.startswith("kcoord lake"):
        assert "--format" not in options
    metavars = {action.metavar for action in PARSERS[prog]._actions if not action.option_strings and action.help}
    if "GROUP" in metavars:
        assert "--group" in options, "a command with a positional group has --group too"


@pytest.mark.parametrize(
    "arguments",
    [["workers", "fence", "2147483648", "--data", "d"], ["workers", "fence", "1", "--data", "d", "--timeout", "1e300"]],
)
def test_numbers_for_workers_have_limits(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert "2147483647" in capsys.readouterr().err.splitlines()[-1]


def parsed(line: str) -> argparse.Namespace:
    return whole_parser().parse_args(line.split())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("health h:1", "health --bootstrap-server h:1"),
        ("groups explain g", "groups explain --group g"),
        ("groups simulate g --assignor a", "groups simulate --assignor a --group g"),
        ("groups watch g --interval 2", "groups watch --interval 2 --group g"),
        ("migrate --check g", "migrate --check --group g"),
        ("log verify d --format json", "log verify d --json"),
        ("log dump d --format table", "log dump d"),
        ("groups restore --group g --to 5 --format json", "groups restore --group g --to 5 --json"),
    ],
)
def test_old_forms_are_accepted_with_a_warning(old: str, new: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = {name: value for name, value in vars(parsed(new)).items() if name != "run"}
    assert capsys.readouterr().err == ""
    assert {name: value for name, value in vars(parsed(old)).items() if name != "run"} == options
    assert re.fullmatch(r"warning: kcoord .*: use .* instead of .*: the next release does not accept it\n",
                        capsys.readouterr().err)  # fmt: skip


@pytest.mark.parametrize("line", ["groups explain", "groups watch", "groups simulate --assignor a", "migrate --check"])
def test_a_command_about_a_group_needs_one(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    assert ended.value.code == 2
    assert "the following arguments are required: --group" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [
        ("--timeout", "0", "'0' is not a whole number from 1"),
        ("--timeout", "1s", "'1s' is not a whole number from 1"),
        ("--bootstrap-server", "h:1,h", "'h:1,h' is not HOST:PORT[,HOST:PORT...]"),
        ("--bootstrap-server", "h:99999", "'h:99999' is not HOST:PORT[,HOST:PORT...]"),
    ],
)
def test_a_wrong_value_names_its_option(
    option: str, value: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["topics", "--list", option, value])
    assert ended.value.code == 2
    assert f"argument {option}: {reason}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    [
        "health --timeout -1",
        "health --timeout nan",
        "health --timeout 0",
        "workers fence 1 --data d --timeout -1",
        "groups watch --group g --interval 0",
        "groups watch --group g --interval nan",
        "groups watch --group g --duration -1",
        "simulate --steps -1",
        "simulate --processes -1",
        "simulate --processes 257",
        "model-check --states 0",
        "model-check --processes 0",
        "model-check --processes 257",
    ],
)
def test_a_number_out_of_range_names_its_option(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    *_, option, value = line.split()
    with pytest.raises(SystemExit) as ended:
        parsed(line)
    assert ended.value.code == 2
    assert f"argument {option}: '{value}' is not a " in capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    [
        "topics --list --command-config FILE",
        "health --command-config FILE",
        "log import d --into new --properties FILE",
        "storage format --config FILE",
    ],
)
def test_a_file_that_is_not_text_is_named(line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "client.properties"
    file.write_bytes(b"a=\xff")
    assert main(line.replace("FILE", str(file)).split()) == 1
    assert f"{file}: the file is not UTF-8 text: " in capsys.readouterr().err


@pytest.mark.parametrize("time", ["yesterday", "99999999999d", "99999999999999999", "-1"])
def test_restore_rejects_a_time_that_is_none(time: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["groups", "restore", "--group", "g", f"--to={time}"])
    assert ended.value.code == 2
    assert f"argument --to: '{time}' is no time: give an age such as 2h" in capsys.readouterr().err


@pytest.mark.parametrize("address", ["h:65536", "h:\u00b2", "h", "h:-1"])
def test_health_rejects_an_address_that_is_none(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["health", "--bootstrap-server", address])
    assert ended.value.code == 2
    assert f"{address} is not HOST:PORT" in capsys.readouterr().err


def test_the_help_of_groups_describes_all_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["groups", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "Explain, watch and simulate groups, list when offsets expire, restore offsets." in text
    assert "compaction" not in text
    with pytest.raises(SystemExit):
        main(["groups", "restore", "--help"])
    assert "Offsets whose records compaction has removed are lost." in " ".join(capsys.readouterr().out.split())


def test_health_as_json_names_each_broker(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        assert main(["health", "--bootstrap-server", f"{address},{address}", "--json"]) == 1
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["address"], line["healthy"]) for line in lines] == [(address, False)] * 2
    assert "refused" in lines[0]["reason"]


@pytest.mark.parametrize(("regex", "code"), [("a.*", 0), ("a(b", 1)])
def test_the_check_of_a_regular_expression_as_json(regex: str, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["consumer-groups", "--validate-regex", regex, "--json"]) == code
    document = json.loads(capsys.readouterr().out)
    assert (document["regex"], document["valid"]) == (regex, code == 0)
