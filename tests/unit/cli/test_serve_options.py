# SPDX-License-Identifier: Apache-2.0
"""Wrong settings of `kcoord serve` are one line that names them."""

from __future__ import annotations

from pathlib import Path

import pytest

from kcoord.cli import main, serve


def test_a_file_that_is_not_text_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "server.properties"
    file.write_bytes(b"node.id=1\n\xff")
    assert main(["serve", str(file)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"kcoord: {file}: the file is not UTF-8 text: ")


def test_a_wrong_level_in_the_environment(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("KCOORD_LOG_LEVEL", "loud")
    with pytest.raises(SystemExit):
        main(["serve"])
    error = capsys.readouterr().err.splitlines()[-1]
    assert error == (
        "kcoord serve: error: argument --log-level: 'loud', here or in KCOORD_LOG_LEVEL, is not one of "
        "DEBUG, INFO, WARNING, ERROR, CRITICAL"
    )


def test_an_empty_level_in_the_environment_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KCOORD_LOG_LEVEL", "")
    assert serve.make_parser().parse_args([]).log_level == "INFO"
    assert serve.make_parser().parse_args(["--log-level", "debug"]).log_level == "DEBUG"
