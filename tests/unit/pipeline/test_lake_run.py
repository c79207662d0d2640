# SPDX-License-Identifier: Apache-2.0
"""A run of a job of `kcoord lake`, as far as it needs no Spark: settings that a lake keeps, failures that pass."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from random import Random

import pytest
from pyspark.errors import PySparkException

from kcoord.cli import lake as cli_lake
from kcoord.cli import lake_run
from kcoord.cli.lake import main, make_parser
from kcoord.cli.lake_run import LakeRun
from kcoord.cli.lake_source import LakeSource
from kcoord.client.admin.model import ClusterDescription, TopicDescription
from kcoord.client.errors import TimeoutException
from kcoord.client.results import Results
from kcoord.pipeline.errors import BrokerError, BrokerUnavailableError
from kcoord.pipeline.lake.errors import LakeError
from kcoord.pipeline.lake.ingest import Ingest, ingest
from kcoord.pipeline.lake.samples import End, Retention, Sample, Topics
from kcoord.pipeline.lake.settings import ExpiryPolicy
from kcoord.pipeline.lake.storage import Lake
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.uuid import uuid_to_string
from tests.support.coordinator_log import batches_of, random_log
from tests.unit.pipeline.support import LogWriter
from tests.unit.pipeline.test_ingest import name_topic, no_spark

TOPIC_ID = "AAAAAAAAAAAAAAAAAAAAAQ"


@pytest.fixture
def log(tmp_path: Path) -> str:
    writer = LogWriter(tmp_path / "log", 0)
    for batch in batches_of(random_log(Random(1), 10)):
        writer.append(batch)
    writer.close()
    return str(tmp_path / "log")


@pytest.fixture
def lake(tmp_path: Path, log: str) -> Lake:
    """A lake with the records of the log."""
    made = Lake(no_spark, str(tmp_path / "lake"))
    ingest(made, log)
    return made


def run_of(job: str, lake: Lake, *arguments: str) -> LakeRun:
    return LakeRun(make_parser().parse_args([job, "--lake", lake.uri, *arguments]))


def test_a_lake_keeps_the_settings_that_were_given_or_that_brokers_told(
    lake: Lake, log: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The brokers tell their retention only after the client has got the right to see it."""

    def stored(*arguments: str) -> dict[str, str]:
        run = run_of("status", lake, *arguments)
        run.jobs(lake)
        return lake.stored_settings()

    assert stored() == {}
    assert stored("--storm-epochs", "7") == {"storm_epochs": "7"}
    told: list[Retention | None] = [None, Retention(77, ExpiryPolicy.KAFKA)]
    monkeypatch.setattr(LakeSource, "retention", lambda source: told.pop(0))
    assert "retention_ms" not in stored("--log", log)
    learned = {"retention_ms": str(77 * 60_000), "storm_epochs": "7", "expiry_policy": "kafka"}
    assert stored("--log", log) == learned
    assert stored("--log", log) == learned, "the brokers are not asked again"
    given = stored("--retention-minutes", "5", "--expiry-policy", "kip211")
    assert given == {"retention_ms": "300000", "storm_epochs": "7", "expiry_policy": "kip211"}
    assert stored() == given


# --- clusters ---------------------------------------------------------------------------------------------------------


def test_a_cluster_without_records_is_left_out(lake: Lake, capsys: pytest.CaptureFixture[str]) -> None:
    """Its log is empty, or its first copy failed, or it has samples only."""
    Lake(no_spark, lake.uri).bind("A")  # the id of the cluster with records
    Lake(no_spark, lake.uri).bind("B")
    run = run_of("status", lake)
    assert [of_cluster.cluster for of_cluster, _ in run.each_cluster()] == ["default"]
    assert capsys.readouterr().err == f"warning: cluster B of lake {lake.uri} has no records: run `ingest` first\n"
    with pytest.raises(LakeError, match=r"^cluster B of lake .* has no records: run `ingest` first$"):
        next(run_of("compact", lake, "--cluster", "B").each_cluster())


def test_a_misspelt_cluster_is_named_with_those_of_the_lake(lake: Lake, log: str) -> None:
    with pytest.raises(LakeError, match=r"^lake .* has no cluster defolt; it has default$"):
        run_of("status", lake, "--cluster", "defolt")
    assert run_of("ingest", lake, "--log", log, "--cluster", "second").lake.cluster == "second"


@pytest.mark.parametrize("job", ["status", "asof 1h", "compact", "report"])
def test_a_misspelt_lake_is_not_created(tmp_path: Path, job: str, capsys: pytest.CaptureFixture[str]) -> None:
    name, *arguments = job.split()
    assert main([name, "--lake", str(tmp_path / "typo"), *arguments, "--format", "delta"]) == 1
    assert capsys.readouterr().err == f"kcoord lake: lake {tmp_path}/typo has no records: run `ingest` first\n"
    assert not (tmp_path / "typo").exists()


# --- ingest --follow --------------------------------------------------------------------------------------------------


def follow(
    lake: Lake, log: str, monkeypatch: pytest.MonkeyPatch, events: list[BaseException | None], *arguments: str
) -> int:
    """Follows the log, in which each look for new records has an event: an error, or None. Returns the looks left."""
    stop = threading.Event()

    @contextmanager
    def stopped() -> Iterator[threading.Event]:
        yield stop

    def look(ingest: Ingest) -> None:
        event = events.pop(0)
        if not events:
            stop.set()
        if event is not None:
            raise event

    monkeypatch.setattr(lake_run, "stop_on_signals", stopped)
    monkeypatch.setattr(lake_run, "session_of", lambda options, is_small: None)
    monkeypatch.setattr(Ingest, "next", look)
    run_of("ingest", lake, "--log", log, "--follow", "0.01", *arguments).follow(0.01)
    return len(events)


OF_A_WORKER = """
Job aborted due to stage failure: Task 0 in stage 1.0 failed 1 times: Traceback (most recent call last):
kcoord.client.errors.TimeoutException: REQUEST_TIMED_OUT

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
kcoord.pipeline.errors.{}: 127.0.0.1:1: no connection

\tat org.apache.spark.api.python.BasePythonRunner
"""


def test_following_goes_on_while_brokers_do_not_answer(
    lake: Lake, log: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The driver or a worker of Spark may meet the error."""
    outages = [BrokerUnavailableError("no connection"), PySparkException(OF_A_WORKER.format("BrokerUnavailableError"))]
    assert follow(lake, log, monkeypatch, [*outages, None]) == 0
    warnings = capsys.readouterr().err.splitlines()
    assert warnings == [
        "warning: no connection; trying again",
        "warning: 127.0.0.1:1: no connection; trying again",
    ]


@pytest.mark.parametrize(
    "failure", [BrokerError("READ is missing"), PySparkException(OF_A_WORKER.format("BrokerError"))]
)
def test_following_ends_with_an_error_that_does_not_pass(
    lake: Lake, log: str, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    with pytest.raises(type(failure)):
        follow(lake, log, monkeypatch, [failure, None])


def test_following_goes_on_while_an_audit_log_rotates(
    lake: Lake, log: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Between two renames there may be no file, or one that is gone when it is opened."""
    audit = tmp_path / "audit.log"
    audit.write_text("")
    failures: list[Exception] = [LakeError("there is no such file"), FileNotFoundError("audit.log.1")]
    copies = 0

    def copy(lake: Lake, uri: str, wait_s: float | None) -> int:
        nonlocal copies
        copies += 1
        if failures:
            raise failures.pop(0)
        return 1

    monkeypatch.setattr(lake_run, "copy_audit_log", copy)
    assert follow(lake, log, monkeypatch, [None, None, None], "--audit", str(audit)) == 0
    assert copies == 3
    assert capsys.readouterr().err.splitlines() == [
        "warning: there is no such file; trying again",
        "warning: audit.log.1; trying again",
        f"{audit}: 1 new entries",
    ]


# --- ends --every -----------------------------------------------------------------------------------------------------


def test_sampling_goes_on_after_a_missed_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes: list[Sample | KafkaError] = [sample(0), TimeoutException("no connection"), sample(1)]

    async def take(*arguments: object) -> Sample:
        outcome = outcomes.pop(0)
        if isinstance(outcome, KafkaError):
            raise outcome
        return outcome

    monkeypatch.setattr(cli_lake, "_sample", take)
    arguments = ["ends", "--lake", str(tmp_path / "lake"), "--bootstrap-server", "broker:9092"]
    assert main([*arguments, "--every", "0.01", "--samples", "2"]) == 0
    assert capsys.readouterr().err.splitlines() == [
        "sample 1: 1 partitions",
        "warning: no sample of the brokers: no connection",
        "sample 2: 1 partitions",
    ]
    outcomes = [TimeoutException("no connection")]
    assert main(arguments) == 1


def sample(second: int) -> Sample:
    return Sample(datetime(2026, 11, 24, 0, 0, second, tzinfo=UTC), [End("t", "id", 0, 0, 1, None)], "A")


class Admin:
    """A client of the cluster A, in which no topic has an id of `deleted`."""

    deleted: Sequence[str] = ()

    def __init__(self, config: object) -> None:
        pass

    async def __aenter__(self) -> Admin:
        return self

    async def __aexit__(self, *error: object) -> None:
        pass

    async def describe_cluster(self) -> ClusterDescription:
        return ClusterDescription("A", None, [])

    async def describe_topic_ids(self, topic_ids: Iterable[bytes]) -> Results[bytes, TopicDescription]:
        unknown = KafkaError(Errors.UNKNOWN_TOPIC_ID)
        return Results({topic_id: unknown for topic_id in topic_ids if uuid_to_string(topic_id) in self.deleted})


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """Makes samples of the cluster A. Each lists a topic `tN`. Returns the topics that each sample was asked for."""
    asked: list[set[str]] = []

    async def take(admin: Admin, *, seen: Iterable[str]) -> Sample:
        asked.append({*seen})
        return replace(sample(len(asked)), topics=Topics({f"t{len(asked)}": "t"}))

    monkeypatch.setattr("kcoord.client.admin.client.AdminClient", Admin)
    monkeypatch.setattr("kcoord.pipeline.lake.samples.take_sample", take)
    return asked


def test_each_sample_asks_for_the_topics_that_earlier_ones_listed(tmp_path: Path, asked: list[set[str]]) -> None:
    for _ in range(3):
        assert main(["ends", "--lake", str(tmp_path / "lake"), "--bootstrap-server", "broker:9092"]) == 0
    assert asked == [set(), {"t1"}, {"t1", "t2"}]


def test_samples_of_another_cluster_leave_a_cluster_without_an_id_as_it_is(
    tmp_path: Path,
    log: str,
    asked: list[set[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The lake was begun from a copied folder. The id of its topic shows whether the brokers have the same log."""
    name_topic(log, TOPIC_ID)
    lake = Lake(no_spark, str(tmp_path / "lake"))
    ingest(lake, log)
    ends = ["ends", "--lake", lake.uri, "--bootstrap-server", "broker:9092"]
    monkeypatch.setattr(Admin, "deleted", [TOPIC_ID])
    assert main(ends) == 1
    assert capsys.readouterr().err == (
        f"kcoord lake: lake {lake.uri}: the cluster default was copied from a topic with the id {TOPIC_ID}, which the "
        "cluster A does not have: choose another name (--cluster)\n"
    )
    assert (lake.text("cluster_id"), lake.note("ends"), asked) == (None, None, [])
    assert main([*ends, "--cluster", "other"]) == 0
    other = Lake(no_spark, lake.uri, cluster="other")
    assert (lake.text("cluster_id"), other.text("cluster_id")) == (None, "A")


def test_samples_give_a_cluster_its_id_if_the_brokers_have_its_log(
    tmp_path: Path, log: str, asked: list[set[str]]
) -> None:
    name_topic(log, TOPIC_ID)
    lake = Lake(no_spark, str(tmp_path / "lake"))
    ingest(lake, log)
    assert main(["ends", "--lake", lake.uri, "--bootstrap-server", "broker:9092"]) == 0
    assert (lake.clusters(), lake.text("cluster_id"), len(asked)) == (["default"], "A", 1)


def test_a_sample_without_partitions_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def take(*arguments: object) -> Sample:
        return replace(sample(0), ends=[])

    monkeypatch.setattr(cli_lake, "_sample", take)
    assert main(["ends", "--lake", str(tmp_path / "lake"), "--bootstrap-server", "broker:9092"]) == 0
    assert capsys.readouterr().err.splitlines() == [
        "warning: the brokers list no partitions: there are no topics, or the client may not DESCRIBE them",
        "sample 1: 0 partitions",
    ]
