# SPDX-License-Identifier: Apache-2.0
"""What `kcoord lake` makes of its options, before it touches a lake or connects to a broker."""

from __future__ import annotations

from pathlib import Path

import pytest
from py4j.protocol import Py4JError

from kcoord.cli.lake import main, make_parser
from kcoord.cli.lake_source import LakeSource, source_of
from kcoord.pipeline.log_files import NoLogError
from tests.unit.pipeline.support import LogWriter


def source(*arguments: str) -> LakeSource:
    made = source_of(make_parser().parse_args(["ingest", "--lake", "lake", *arguments]))
    assert made is not None
    return made


@pytest.mark.parametrize(
    ("arguments", "client_id", "timeout_ms"),
    [
        ([], "kcoord-pipeline", 60_000),
        (["--command-config", "client.properties"], "auditor", 7_000),
        (["--timeout", "500"], "kcoord-pipeline", 500),
    ],
)
def test_the_client_has_the_id_that_the_documented_quota_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], client_id: str, timeout_ms: int
) -> None:
    """The workers that read the log, and the client that takes the samples, have the same settings."""
    monkeypatch.chdir(tmp_path)
    Path("client.properties").write_text("client.id=auditor\ndefault.api.timeout.ms=7000\n")
    made = source("--bootstrap-server", "broker:9092", *arguments)
    properties = dict(made.options.properties)
    assert (properties["client.id"], properties["default.api.timeout.ms"]) == (client_id, str(timeout_ms))
    assert made.brokers is not None
    assert (made.brokers.client_id, made.brokers.default_api_timeout_ms) == (client_id, timeout_ms)


def test_following_a_log_that_does_not_exist_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It may be created later. Or its name is misspelt."""
    made = source("--log", str(tmp_path))
    with pytest.raises(NoLogError):
        made.check(may_be_missing=False)
    made.check(may_be_missing=True)
    warning = f"warning: path: there is no folder __consumer_offsets-N at {tmp_path}; waiting for it\n"
    assert capsys.readouterr().err == warning


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("ingest --log d --follow 0", "--follow: '0' is not a number of seconds above 0"),
        ("ingest --log d --follow -1", "--follow: '-1' is not a number of seconds above 0"),
        ("ingest --log d --follow nan", "--follow: 'nan' is not a number of seconds above 0"),
        ("ends --every 1e300", "--every: '1e300' is not a number of seconds above 0 up to 2147483647"),
        ("ends --every 0", "--every: '0' is not a number of seconds above 0"),
        ("ends --every 1 --samples 0", "--samples: '0' is not a whole number from 1"),
        ("compact --grace -1", "--grace: '-1' is not a number of seconds from 0"),
        ("compact --older-than yesterday", "--older-than: 'yesterday' is no time: give an age such as 2h, "),
        (
            "asof 2026-13-01",
            "TIME: '2026-13-01' is no time: give an age such as 2h, ISO 8601, or milliseconds since 1970",
        ),
        ("asof 99999999999999999999", "TIME: '99999999999999999999' is no time"),
        ("status --now 2x", "--now: '2x' is no time"),
        ("status --limit -1", "--limit: '-1' is not a whole number from 0"),
        ("status --retention-minutes 0", "--retention-minutes: '0' is not a whole number from 1"),
        ("status --storm-epochs 1", "--storm-epochs: '1' is not a whole number from 2"),
        (
            "status --retention-minutes 2147483648",
            "--retention-minutes: '2147483648' is not a whole number from 1 to 2",
        ),
        ("status --limit 2147483647", "--limit: '2147483647' is not a whole number from 0 to 2147483646"),
        ("status --conf x", "--conf: 'x' is not KEY=VALUE"),
        ("ingest --log d --option x", "--option: 'x' is not KEY=VALUE"),
        ("ingest --log d --option =x", "--option: '=x' is not KEY=VALUE"),
        ("status --storm-window-ms 1.5", "--storm-window-ms: '1.5' is not a whole number from 1"),
    ],
)
def test_a_bad_value_ends_with_exit_code_2(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    job, *arguments = line.split()
    with pytest.raises(SystemExit) as ended:
        main([job, "--lake", "lake", *arguments])
    assert ended.value.code == 2
    assert f"error: argument {message}" in capsys.readouterr().err


def test_a_number_of_samples_needs_an_interval(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["ends", "--lake", "lake", "--bootstrap-server", "127.0.0.1:1", "--samples", "2"])
    assert ended.value.code == 2
    assert "error: --samples needs --every" in capsys.readouterr().err


def test_a_lake_is_made_from_the_records_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the table `commits` of the source the records of groups would be missing."""
    for name in ("table", "TABLE"):
        assert main(["ingest", "--lake", str(tmp_path / "l"), "--log", "d", "--option", f"{name}=commits"]) == 1
        assert capsys.readouterr().err == "kcoord lake: --option table: a lake is made from the records alone\n"


def test_a_report_needs_a_folder_before_any_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    absent = tmp_path / "absent"
    lake = tmp_path / "lake"
    assert main(["report", "--lake", str(lake), "--log", str(absent), "--output", str(absent / "report.html")]) == 1
    assert capsys.readouterr().err == f"kcoord lake: --output: {absent} is no folder that can be written\n"
    assert main(["report", "--lake", str(lake), "--log", str(absent), "--output", str(tmp_path)]) == 1
    assert (
        capsys.readouterr().err == f"kcoord lake: --output: {str(tmp_path)!r} is a folder, and the report is one file\n"
    )
    assert not lake.exists()


def test_an_empty_name_of_a_lake_is_not_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A script may use a variable that is not set."""
    monkeypatch.chdir(tmp_path)
    LogWriter(tmp_path / "log", 0).close()
    assert main(["ingest", "--lake", "", "--log", str(tmp_path / "log")]) == 1
    assert capsys.readouterr().err == "kcoord lake: lake : its URI is empty\n"
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


def test_a_name_that_is_too_long_for_a_folder_is_an_error_of_its_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "x" * 300
    LogWriter(tmp_path / "log", 0).close()
    assert main(["ingest", "--lake", f"{tmp_path}/{name}", "--log", f"{tmp_path}/log"]) == 1
    place = f"{tmp_path}/{name}"
    text = f"lake {place}: the name {name} in {place} has 300 bytes; names of files have 255 at most"
    assert capsys.readouterr().err == f"kcoord lake: {text}\n"
    lake = ["ingest", "--lake", f"{tmp_path}/lake", "--log", f"{tmp_path}/log"]
    assert main([*lake, "--cluster", name[:248]]) == 1
    text = f"cluster '{name[:248]}': a name has 1 to 247 letters, digits, '.', '_' and '-'"
    assert capsys.readouterr().err == f"kcoord lake: {text}\n"
    assert not (tmp_path / "lake").exists()


@pytest.mark.parametrize(
    ("cause", "message"),
    [
        ("java.io.IOException: No space left on device", "java.io.IOException: No space left on device"),
        ("x.PythonException: in a worker\nkcoord.pipeline.errors.DataLossError: a log is gone\n", "a log is gone"),
    ],
)
def test_an_exception_of_java_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cause: str, message: str
) -> None:
    """PySpark passes on what Java throws if a task cannot write, with the stacks of all causes."""
    text = "An error occurred while calling o52.parquet.\n: org.apache.spark.SparkException: [TASK_WRITE_FAILED]"

    def fail(_: object) -> int:
        raise Py4JError(f"{text}\n\tat o.a.s.Writer.commit(Writer.scala:823)\nCaused by: {cause}\n\tat j.io.write()")

    monkeypatch.setattr("kcoord.cli.lake._answer", fail)
    assert main(["losses", "--lake", "lake"]) == 1
    assert capsys.readouterr().err == f"kcoord lake: {message}\n"
