# SPDX-License-Identifier: Apache-2.0
"""The jobs over real logs: a log of Kafka, and the log of a broker with real members."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from kcoord.cli.lake import main
from kcoord.client.admin.client import AdminClient
from kcoord.client.admin.model import NewTopic
from kcoord.client.consumer.client import Consumer
from kcoord.client.types import OffsetAndMetadata, TopicPartition
from kcoord.pipeline.lake.asof import snapshot
from kcoord.pipeline.lake.builders import WHOLE
from kcoord.pipeline.lake.ingest import ingest
from kcoord.pipeline.lake.jobs import SILVER, Jobs
from kcoord.pipeline.lake.samples import add_sample, take_sample
from kcoord.pipeline.lake.settings import MS_PER_MINUTE, LakeSettings
from kcoord.pipeline.lake.storage import Lake
from tests.integration.lake.replay import replay
from tests.support.kcoord_process import KcoordProcess
from tests.support.offsets_sample import committed_offsets, described_offsets, dumped_records, unpack_sample
from tests.support.shared import ROOT
from tests.support.spark import small_options, unless_too_busy
from tests.support.waiting import wait_until

SAMPLE_RECORDS = 24_368
DUMPED = "log_partition IN (0, 5, 6) AND `group` IS NOT NULL"
SAMPLE_SETTINGS = LakeSettings(retention_ms=MS_PER_MINUTE)


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A log that Kafka 4.3.1 wrote."""
    return unpack_sample(tmp_path_factory.mktemp("sample"))


@pytest.fixture(scope="module")
def lake(spark: SparkSession, sample: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lake]:
    """A lake of the sample, made by an `ingest` that was killed and then run again."""
    made = Lake(spark, str(tmp_path_factory.mktemp("lake")))
    _ingest_until_killed(sample, made.uri)
    unless_too_busy(lambda: ingest(made, sample))
    yield made


def _ingest_until_killed(log: str, lake: str) -> None:
    command = [sys.executable, "-m", "kcoord", "lake", "ingest", "--log", log, "--lake", lake, "--master", "local[1]"]
    command += ["--option", f"maxBytesPerTrigger={600_000}", *small_options()]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL, start_new_session=True)
    note = Path(lake, "_kcoord", "cluster=default", "records.json")

    def has_batches() -> bool:
        assert process.poll() is None, "ingest ended before it could be killed"
        return note.exists() and json.loads(note.read_text())["progress"]["batch"] >= 0

    try:
        wait_until(has_batches, "a micro-batch is in the lake", 400.0)
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # the session of the process includes Spark's JVM and workers
        process.wait()


def test_a_killed_ingest_neither_loses_nor_repeats_records(lake: Lake) -> None:
    places = lake.read("records").select("log_partition", "log_offset")
    assert places.count() == SAMPLE_RECORDS
    assert places.distinct().count() == SAMPLE_RECORDS
    note = lake.note("records")
    assert note is not None and note.progress["rows"] == SAMPLE_RECORDS


def test_current_offsets_are_what_kafka_consumer_groups_shows(lake: Lake) -> None:
    Jobs(lake, SAMPLE_SETTINGS).run("current")
    expected = described_offsets()
    assert len(expected) == 68
    assert committed_offsets(lake.read("current_offsets").collect()) == expected


def test_the_second_run_of_a_job_changes_nothing(lake: Lake, sample: str) -> None:
    jobs = Jobs(lake, SAMPLE_SETTINGS)
    jobs.ensure_all([*SILVER, "current_offsets", *WHOLE])
    before = _files(lake.uri)
    assert ingest(lake, sample) == []
    again = Jobs(lake, SAMPLE_SETTINGS)
    again.ensure_all([*SILVER, "current_offsets", *WHOLE])
    assert again.made == []
    assert _files(lake.uri) == before


def test_the_tables_show_the_history_of_the_sample(lake: Lake) -> None:
    """The sample's README has it: retention of 1 minute, a storm, a deleted group, two incarnations of most groups."""
    Jobs(lake, SAMPLE_SETTINGS).ensure_all(["storms", "members", "group_epochs", "commits"])
    storms = lake.read("storms").select("group").distinct().collect()
    assert [row["group"] for row in storms] == ["storm-848"]
    removed = lake.read("commits").where("is_tombstone").groupBy("group", "reason").count().collect()
    reasons = {(row["group"], row["reason"]): row["count"] for row in removed}
    assert reasons[("simple-1", "group-delete")] == 3
    assert reasons[("doomed-reader", "expired")] == 14
    assert sum(reasons.values()) == 84
    lives = lake.read("group_epochs").where("`group` = 'billing-848' AND `kind` = 'consumer' AND epoch = 3")
    assert sorted(row["incarnation"] for row in lives.collect()) == [0, 1]


def test_asof_equals_a_replay_of_the_log_up_to_that_moment(lake: Lake) -> None:
    """Compares the first moment, the last moment, and some in between, for the groups in Kafka's dump."""
    dumped = list(dumped_records())
    moments = sorted({record.timestamp_ms for record in dumped})
    jobs = Jobs(lake, SAMPLE_SETTINGS)
    groups = tuple({row[0] for row in lake.read("records").where(DUMPED).select("group").distinct().collect()})
    for moment_ms in [moments[0], *random.Random(848).sample(moments, 3), moments[-1]]:
        state = replay(dumped, moment_ms)
        as_of = snapshot(lake, jobs, datetime.fromtimestamp(moment_ms / 1000, UTC), groups)
        assert committed_offsets(as_of.offsets.collect()) == state.offsets, moment_ms
        assert {(row["group"], row["member_id"]) for row in as_of.members.collect()} == state.members, moment_ms
        owned = as_of.assignments.where("kind != 'target'").selectExpr(
            "group", "member_id", "coalesce(topic_id, topic)", "partition", "coalesce(is_revoking, false)"
        )
        assert set(map(tuple, owned.collect())) == state.owned, moment_ms


def test_the_commands_print_tables_and_errors(lake: Lake, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--lake", lake.uri, "--master", "local[2]", "--retention-minutes", "1"]
    assert main(["current", *options, "--json", "--limit", "100"]) == 0
    assert len(json.loads(capsys.readouterr().out)["current_offsets"]) == 68
    assert main(["asof", "2026-11-21T02:06:00Z", *options, "--group", "billing-848"]) == 0
    table = capsys.readouterr().out
    assert "offsets\n" in table and "billing-848" in table
    page = tmp_path / "page.html"
    assert main(["report", *options, "--output", str(page), "--title", "Sample"]) == 0
    assert "<title>Sample</title>" in page.read_text()
    assert "page.html: " in capsys.readouterr().err
    assert main(["status", "--lake", lake.uri, "--format", "delta"]) == 1
    assert "is kept as parquet, not as delta" in capsys.readouterr().err


def _files(folder: str) -> dict[str, int]:
    """Returns the data files with their modification times. Checkpoints are excluded, since every run changes them."""
    return {
        str(path): path.stat().st_mtime_ns
        for path in Path(folder).rglob("*")
        if path.is_file() and "checkpoint" not in path.parts and path.suffix == ".parquet"
    }


# --- our own broker ---------------------------------------------------------------------------------------------------


def test_asof_equals_what_the_broker_reported_at_that_moment(spark: SparkSession, tmp_path: Path) -> None:
    broker = KcoordProcess(tmp_path).start()
    lake = Lake(spark, str(tmp_path / "lake"))
    try:
        moment, offsets, members = asyncio.run(_life(broker.address, lake))
    finally:
        broker.stop()
    ingest(lake, str(broker.data))
    as_of = snapshot(lake, Jobs(lake, LakeSettings()), moment)
    assert committed_offsets(as_of.offsets.collect()) == offsets
    owned = {
        (row["member_id"], row["topic"], row["partition"])
        for row in as_of.assignments.where("kind = 'current'").collect()
    }
    assert owned == members
    assert [(row["group"], row["state"]) for row in as_of.groups.collect()] == [("live", "Stable")]
    # The lake also has the records after that moment, with the reasons and principals that the broker wrote.
    names = ("group", "reason", "reason_source", "tombstone_principal")
    commits = lake.read("commits").where("is_tombstone").select(*names).distinct()
    assert [tuple(row) for row in commits.collect()] == [("side", "group-delete", "recorded", "User:ANONYMOUS")]
    Jobs(lake, LakeSettings()).run("status")
    lag = {(row["partition"], row["lag"]) for row in lake.read("lag").where("`group` = 'side'").collect()}
    assert lag == {(0, 0)}


Offsets = dict[tuple[str, str, int], int]


async def _life(address: str, lake: Lake) -> tuple[datetime, Offsets, set[tuple[str, str, int]]]:
    """Makes a group with a member and a group with offsets only, and deletes the second group at the end.

    Returns a moment, and the offsets and members that the broker reported then.
    """
    async with AdminClient(bootstrap_servers=address) as admin:
        (await admin.create_topics([NewTopic("orders", 3)])).all()
        for group, number in (("live", 3), ("side", 0)):
            await _commit(admin, group, number)
        async with Consumer(bootstrap_servers=address, group_id="live", enable_auto_commit=False) as consumer:
            consumer.subscribe(["orders"])
            await _until_assigned(consumer)
            listed = await admin.list_consumer_group_offsets(["live", "side"])
            offsets = {
                (group, place.topic, place.partition): offset.offset
                for group in listed
                for place, offset in listed[group].items()
                if offset is not None
            }
            described = (await admin.describe_consumer_groups(["live"]))["live"]
            members = {(member.member_id, *place) for member in described.members for place in member.assignment}
            add_sample(lake, await take_sample(admin))
            await asyncio.sleep(0.05)
            moment = datetime.now(UTC)
            await asyncio.sleep(0.05)
            await _commit(admin, "side", 9)
        (await admin.delete_consumer_groups(["side"])).all()
    return moment, offsets, members


async def _commit(admin: AdminClient, group: str, number: int) -> None:
    offsets = {TopicPartition("orders", 0): OffsetAndMetadata(number)}
    (await admin.alter_consumer_group_offsets(group, offsets)).all()


async def _until_assigned(consumer: Consumer) -> None:
    deadline = time.monotonic() + 30
    while len(consumer.assignment) < 3:
        assert time.monotonic() < deadline, "the member has no partitions"
        await consumer.poll(timeout_ms=100)
