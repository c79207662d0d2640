# SPDX-License-Identifier: Apache-2.0
"""Compares every table with values computed by hand.

The lake is filled in two parts, and the jobs run after each part. So the tests cover updates of tables, not only new
tables.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from kcoord.pipeline.lake import status as status_table
from kcoord.pipeline.lake import storage
from kcoord.pipeline.lake.asof import snapshot
from kcoord.pipeline.lake.builders import WHOLE
from kcoord.pipeline.lake.jobs import SILVER, Jobs
from kcoord.pipeline.lake.report import data
from kcoord.pipeline.lake.report.markup import left_out, status, tiles
from kcoord.pipeline.lake.report.page import write_report
from kcoord.pipeline.lake.samples import End
from kcoord.pipeline.lake.settings import MS_PER_MINUTE, ExpiryPolicy, LakeSettings
from kcoord.pipeline.lake.storage import Lake
from kcoord.pipeline.lake.tables import TABLES
from tests.integration.lake.made_log import MadeLog, moment
from tests.integration.lake.scenario import DAY, SAMPLES, add_changes, add_samples, fill, first_half, second_half
from tests.support.shared import missing

RETENTION_S = 7 * DAY


@pytest.fixture(scope="module")
def lake(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lake]:
    made = Lake(spark, str(tmp_path_factory.mktemp("lake")))
    log, other = first_half()
    lengths = (len(log.rows), len(other.rows))
    fill(spark, made, 0, log, other)
    add_samples(made, SAMPLES[:2])
    Jobs(made, LakeSettings()).ensure_all([*SILVER, "current_offsets"])
    second_half(log, other)
    fill(spark, made, 1, log, other, skip=lengths)
    add_samples(made, SAMPLES[2:])
    add_changes(made)
    Jobs(made, LakeSettings()).ensure_all([*SILVER, "current_offsets", *WHOLE])
    yield made


def rows(frame: DataFrame, columns: str, where: str = "true") -> list[tuple[object, ...]]:
    """Returns the rows sorted by all columns. Times are in seconds after the begin of the scenario."""
    names = columns.split()
    began = moment(0)
    values = []
    for row in frame.where(where).select(*names).collect():
        plain = [
            (value.astimezone(began.tzinfo) - began).total_seconds() if hasattr(value, "astimezone") else value
            for value in row
        ]
        values.append(tuple(plain))
    return sorted(values, key=str)


def test_commits_have_the_reason_and_the_principal_of_a_removal(lake: Lake) -> None:
    removed = rows(lake.read("commits"), "group topic reason reason_source tombstone_principal", "is_tombstone")
    assert removed == [
        ("again", "orders", "group-delete", "inferred", None),
        ("early", "gone", "offset-delete", "inferred", None),
        ("early2", "gone", "offset-delete", "inferred", None),
        ("od", "orders", "offset-delete", "inferred", None),
        ("od", "orders", "offset-delete", "recorded", "User:eve"),
        ("old", "orders", "expired", "inferred", None),
        ("td1", "doomed", "offset-delete", "inferred", None),
        ("td2", "doomed", "offset-delete", "inferred", None),
    ]


def test_commits_of_transactions_count_from_the_marker(lake: Lake) -> None:
    offsets = rows(lake.read("commits"), "committed_offset timestamp effective_timestamp", "`group` = 'tx'")
    assert offsets == [(50, 35.0, 45.0)]


def test_incarnations_of_a_group_have_different_numbers(lake: Lake) -> None:
    assert rows(lake.read("commits"), "committed_offset incarnation", "`group` = 'again' AND NOT is_tombstone") == [
        (5, 0),
        (7, 1),
    ]
    streams = rows(lake.read("group_epochs"), "kind epoch members empty_since", "`group` = 'flow'")
    assert streams == [("streams", None, None, None)]
    epochs = rows(lake.read("group_epochs"), "incarnation epoch group_end", "`group` = 'again'")
    assert epochs == [(0, 1, False), (0, 2, False), (0, None, True), (1, 1, False)]
    # A group that moves between the protocols is the same group.
    moved = rows(lake.read("group_epochs"), "kind epoch incarnation reason", "`group` = 'moved' AND NOT is_tombstone")
    assert moved == [("classic", 4, 0, "join"), ("consumer", 5, 0, "migration")]


def test_group_epochs_have_reasons_and_members(lake: Lake) -> None:
    epochs = rows(
        lake.read("group_epochs"),
        "epoch reason reason_source members since_previous_ms",
        "`group` = 'g' AND `kind` = 'consumer'",
    )
    assert epochs == [
        (1, "join", "inferred", 1, None),
        (2, "join", "inferred", 2, 5000),
        (3, "fenced", "recorded", 1, 15000),
        (4, "subscription", "inferred", 1, 5000),
    ]
    assert rows(lake.read("group_epochs"), "epoch reason members empty_since", "`group` = 'classic'") == [
        (1, "join", 1, None),
        (2, "join", 2, None),
        (3, "leave", 0, 30.0),
    ]


def test_members_have_a_row_per_version(lake: Lake) -> None:
    versions = rows(lake.read("members"), "member_id subscribed_topics from_timestamp to_timestamp", "`group` = 'g'")
    assert versions == [
        ("m1", ["orders", "legacy"], 25.0, None),
        ("m1", ["orders"], 0.0, 25.0),
        ("m2", ["orders"], 5.0, 20.0),
    ]
    assert rows(lake.read("members"), "kind member_id from_timestamp to_timestamp", "`group` = 'classic'") == [
        ("classic", "a", 10.0, 30.0),
        ("classic", "b", 20.0, 30.0),
    ]


def test_regexes_are_those_that_match_now(spark: SparkSession, tmp_path: Path) -> None:
    """The second batch ends one of the two of a log partition, the third batch the other one."""
    lake, log, other = Lake(spark, str(tmp_path)), MadeLog(0), MadeLog(1)
    log.regex("a", "a.*", ["ab"], 1)
    log.regex("b", "b.*", [], 1)
    other.regex("c", "c.*", [], 1)
    for batch, expected in enumerate((["a.*", "b.*", "c.*"], ["b.*", "c.*"], ["c.*"])):
        fill(spark, lake, batch, log, other, skip=(min(batch, 1) + batch, min(batch, 1)))
        Jobs(lake, LakeSettings()).ensure("regexes")
        assert rows(lake.read("regexes"), "regex") == [(regex,) for regex in expected]
        log.regex_gone("ab"[min(batch, 1)], 2 + batch)


def test_assignments_have_a_row_per_spell_of_a_partition(lake: Lake) -> None:
    columns = "kind member_id topic partition is_revoking from_timestamp to_timestamp"
    assert rows(lake.read("assignments"), columns, "`group` = 'g' AND `kind` = 'current'") == [
        ("current", "m1", "orders", 0, False, 0.0, None),
        ("current", "m1", "orders", 1, False, 0.0, 6.0),
        ("current", "m1", "orders", 1, False, 21.0, None),
        ("current", "m1", "orders", 1, True, 6.0, 7.0),
        ("current", "m2", "orders", 1, False, 8.0, 20.0),
    ]
    assert rows(lake.read("assignments"), columns, "`group` = 'classic'") == [
        ("classic", "a", "orders", 0, False, 10.0, 30.0),
        ("classic", "a", "orders", 1, False, 10.0, 20.0),
        ("classic", "b", "orders", 1, False, 20.0, 30.0),
    ]


def test_current_offsets_are_the_newest_commits_without_removed_offsets(lake: Lake) -> None:
    offsets = rows(
        lake.read("current_offsets"), "group topic partition committed_offset", "`group` NOT IN ('watch', 'slow')"
    )
    assert offsets == [
        ("again", "orders", 0, 7),
        ("classic", "orders", 0, 3),
        ("flow", "orders", 0, 4),
        ("g", "orders", 0, 10),
        ("g", "orders", 1, 20),
        ("late", "grow", 2, 350),
        ("late", "grow", 3, 40),
        ("pattern", "legacy", 0, 3),
        ("pattern", "orders", 0, 3),
        ("reader", "legacy", 0, 9),
        ("reader", "orders", 0, 7),
        ("reader", "vanished", 0, 8),
        ("simple", "orders", 0, 1),
        ("tx", "orders", 0, 50),
        ("worker", "side", 0, 2),
    ]


def test_lag_has_the_lag_at_each_sample(lake: Lake) -> None:
    columns = "timestamp committed_offset end_offset lag seconds_behind is_lower_bound"
    assert rows(lake.read("lag"), columns, "`group` = 'slow'") == [
        (120.0, 600, 1200, 600, 60.0, False),
        (40.0, 100, 400, 300, 30.0, False),
        (60.0, 400, 600, 200, 20.0, False),
    ]
    # The commit of the transaction counts from second 45, and the aborted commit of second 50 never counts.
    assert rows(lake.read("lag"), columns, "`group` = 'tx'") == [
        (120.0, 50, 120, 70, 70.0, False),
        (60.0, 50, 60, 10, 10.0, False),
    ]
    # The partition grows by one record per second, and the group stays at offset 20.
    assert rows(lake.read("lag"), "timestamp lag seconds_behind", "`group` = 'g' AND partition = 1") == [
        (120.0, 100, 100.0),
        (40.0, 20, 20.0),
        (60.0, 40, 40.0),
    ]


def test_status_follows_burrows_rules(lake: Lake) -> None:
    status = rows(lake.read("status"), "partition status group_status lag", "`group` = 'watch'")
    assert status == [
        (0, "OK", "ERR", 300),
        (1, "REWIND", "ERR", 800),
        (2, "STOP", "ERR", 1140),
        (3, "STALL", "ERR", 1100),
        (4, "WARN", "ERR", 600),
        (5, "OK", "ERR", 500),
    ]
    assert rows(lake.read("status"), "status group_status commits", "`group` = 'slow'") == [("WARN", "WARN", 3)]


def test_a_lag_before_the_first_sample_is_not_taken_for_no_lag(spark: SparkSession) -> None:
    names = "`group` string, topic string, partition int, incarnation int, log_offset bigint, effective_offset bigint"
    more = "committed_offset bigint, commit_timestamp timestamp, is_tombstone boolean"
    made = [(0, 0, 10), (0, 5, 10), (1, 0, 10), (1, 5, 10), (2, 4, 5), (2, 7, 10)]
    values = [("g", "t", partition, 0, at, at, offset, moment(at), False) for partition, at, offset in made]
    commits = spark.createDataFrame(values, f"{names}, {more}")
    sampled = "topic string, partition int, timestamp timestamp, end_offset bigint"
    ends = spark.createDataFrame([("t", 0, moment(6), 30), ("t", 2, moment(6), 30)], sampled)
    table = status_table.build(commits, commits.where("log_offset IN (5, 7)"), ends, moment(9))
    # Partition 1 has no sample. One known lag does not show that the lag of partition 2 never shrinks.
    assert rows(table, "partition status lag") == [(0, "STALL", 20), (1, "STALL", None), (2, "OK", 20)]


def test_storms_are_five_epochs_in_ten_seconds(lake: Lake) -> None:
    columns = "group from_timestamp to_timestamp duration_ms epochs first_epoch last_epoch reasons"
    assert rows(lake.read("storms"), columns) == [
        ("storm", 100.0, 104.0, 4000, 5, 7, 11, {"metadata": 5}),
        ("storm", 30.0, 38.0, 8000, 5, 1, 5, {"join": 1, "metadata": 4}),
    ]


def test_convergence_ends_with_the_last_stable_member(lake: Lake) -> None:
    columns = "epoch target_ms members members_reached is_converged convergence_ms"
    assert rows(lake.read("convergence"), columns, "`group` = 'g'") == [
        (1, 0, 1, 1, True, 0),
        (2, 0, 2, 2, True, 3000),
        (3, 0, 1, 1, True, 1000),
        (4, None, 1, 0, False, None),
    ]


def test_churn_counts_visits(lake: Lake) -> None:
    columns = "group joins leaves mean_lifetime_ms epochs reasons"
    assert rows(lake.read("churn"), columns, "`group` IN ('classic', 'g')") == [
        ("classic", 2, 2, 15000.0, 3, {"join": 2, "leave": 1}),
        ("g", 2, 1, 15000.0, 4, {"fenced": 1, "join": 2, "subscription": 1}),
    ]


def test_expiry_follows_kip_211(lake: Lake) -> None:
    expiry = rows(lake.read("expiry"), "group topic basis expires_at", "`group` NOT IN ('watch', 'slow', 'tx')")
    assert expiry == [
        ("again", "orders", "protected", None),
        ("classic", "orders", "empty", 30.0 + RETENTION_S),
        ("flow", "orders", "unknown", None),
        ("g", "orders", "protected", None),
        ("g", "orders", "protected", None),
        ("late", "grow", "protected", None),
        ("late", "grow", "protected", None),
        ("pattern", "legacy", "protected", None),
        ("pattern", "orders", "unsubscribed", 56.0 + RETENTION_S),
        ("reader", "legacy", "unsubscribed", 3.0 + RETENTION_S),
        ("reader", "orders", "protected", None),
        ("reader", "vanished", "unsubscribed", 3.0 + RETENTION_S),
        ("simple", "orders", "simple", 2.0 + RETENTION_S),
        ("worker", "side", "protected", None),
    ]
    left = rows(lake.read("expiry"), "expires_in_ms", "`group` = 'simple'")
    assert left == [((2 + RETENTION_S - 120) * 1000,)]


@pytest.mark.parametrize(("policy", "since"), [(ExpiryPolicy.KIP211, 90.0), (ExpiryPolicy.KAFKA, 30.0)])
def test_a_commit_to_an_empty_classic_group_does_not_keep_it_in_kafka(
    lake: Lake, policy: ExpiryPolicy, since: float
) -> None:
    """Kafka 4.4.0 removed such an offset with the group, 119 s after its commit, with a retention of 120 s."""
    builder = WHOLE["expiry"]
    inputs = {name: lake.read(name) for name in builder.inputs}
    inputs["current_offsets"] = inputs["current_offsets"].withColumn("commit_timestamp", F.lit(moment(90)))
    expiry = builder.build(inputs, LakeSettings(expiry_policy=policy), moment(120))
    assert rows(expiry, "basis expires_at", "`group` = 'classic'") == [("empty", since + RETENTION_S)]


@pytest.mark.parametrize(("retention_s", "reason"), [(60, "expired"), (61, "group-delete")])
def test_offsets_that_went_with_a_group_that_was_empty_for_long_have_expired(
    lake: Lake, retention_s: int, reason: str
) -> None:
    """The classic group is empty since second 30. Its offset was committed later, and goes with the group at 90."""
    builder = WHOLE["losses"]
    inputs = {name: lake.read(name) for name in builder.inputs}
    gone = inputs["commits"].where("`group` = 'again' AND is_tombstone AND topic = 'orders'").limit(1)
    ended = {"group": F.lit("classic"), "incarnation": F.lit(0).cast(gone.schema["incarnation"].dataType)}
    times = {name: F.lit(moment(90)) for name in ("timestamp", "effective_timestamp")}
    inputs["commits"] = inputs["commits"].unionByName(
        gone.withColumns({**ended, **times, "log_offset": F.lit(10**6), "effective_offset": F.lit(10**6)})
    )
    losses = builder.build(inputs, LakeSettings(retention_ms=retention_s * 1000), moment(120))
    assert rows(losses, "timestamp action", "`group` = 'classic'") == [(90.0, reason)]


def test_orphans_are_offsets_that_nobody_needs(lake: Lake) -> None:
    assert rows(lake.read("orphans"), "group topic reason") == [
        ("pattern", "orders", "unsubscribed"),
        ("reader", "legacy", "unsubscribed"),
        ("reader", "vanished", "unsubscribed"),
    ]


@pytest.mark.parametrize(
    ("states", "reasons"),
    [
        ([("o1", 0, "listed"), ("o1", 4, "deleted")], ["topic-deleted"]),
        ([("o1", 0, "listed"), ("o1", 1, "deleted")], ["topic-not-visible"]),  # the commit is newer
        ([("o1", 0, "listed"), ("o1", 4, "hidden")], ["topic-not-visible"]),
        ([], ["topic-not-visible"]),
        ([("o1", 0, "listed"), ("o1", 4, "deleted"), ("o2", 4, "listed")], []),
        ([("o1", 0, "listed")], []),  # an internal topic, or one without a leader, has no ends
    ],
)
def test_only_evidence_makes_a_topic_deleted(
    spark: SparkSession, lake: Lake, states: list[tuple[str, int, str]], reasons: list[str]
) -> None:
    """The group has committed at second 2. The samples of `ends` do not have the topic."""
    values = [("orders", topic_id, moment(at), state, moment(at).date()) for topic_id, at, state in states]
    builder = WHOLE["orphans"]
    inputs = {name: lake.read(name) for name in builder.inputs}
    inputs["ends"] = inputs["ends"].where("topic != 'orders'")
    inputs["topics"] = spark.createDataFrame(values, TABLES["topics"].schema)
    orphans = builder.build(inputs, LakeSettings(), moment(120))
    assert [reason for (reason,) in rows(orphans, "reason", "`group` = 'simple'")] == reasons


def test_audit_1327_has_the_records_that_latest_skips(lake: Lake) -> None:
    columns = "group partition verdict records created_source partition_created first_assigned"
    assert rows(lake.read("audit_1327"), columns, "topic = 'grow'") == [
        ("late", 1, "at-risk", 300, "inferred", 60.0, None),
        ("late", 2, "skipped", 300, "recorded", 52.0, 80.0),
        ("late", 3, "safe", 0, "recorded", 53.0, 80.0),
    ]


@pytest.mark.parametrize(
    ("ends", "commit", "verdict", "records"),
    [
        # The partition is empty in its first sample, so it was empty when a member got it.
        ([(90, 0), (100, 50)], 40, "safe", 0),
        ([(90, 30), (100, 50)], 0, "safe", 0),
        # The member may have skipped all records that the first sample has, or none.
        ([(90, 30), (100, 50)], 40, "unknown", 30),
        ([(90, 30), (100, 50)], 20, "unknown", 20),
    ],
)
def test_audit_1327_does_not_know_the_end_before_the_first_sample(
    spark: SparkSession, lake: Lake, ends: list[tuple[int, int]], commit: int, verdict: str, records: int
) -> None:
    """The group `late` gets partition 3 of `grow` at second 80."""
    builder = WHOLE["audit_1327"]
    inputs = {name: lake.read(name) for name in builder.inputs}
    samples = [
        {**End("grow", "grow-id", 3, 0, end, moment(53))._asdict(), "timestamp": moment(at), "date": moment(at).date()}
        for at, end in ends
    ]
    inputs["ends"] = spark.createDataFrame(pa.Table.from_pylist(samples, schema=TABLES["ends"].arrow_schema))
    is_late = "`group` = 'late' AND partition = 3 AND topic = 'grow'"
    commits = inputs["commits"]
    inputs["commits"] = commits.where(is_late).withColumn("committed_offset", F.lit(commit))
    audit = builder.build(inputs, LakeSettings(), moment(120))
    assert rows(audit, "verdict records", is_late) == [(verdict, records)]


def test_losses_have_who_removed_or_reset_offsets(lake: Lake) -> None:
    columns = "group topic partition action lost_offset new_offset records reason_source principal client_id"
    assert rows(lake.read("losses"), columns) == [
        ("again", "orders", 0, "group-delete", 5, None, None, "audit", "User:admin", "tool"),
        ("early", "gone", 0, "topic-delete", 1, None, None, "inferred", None, None),
        ("early2", "gone", 0, "topic-delete", 1, None, None, "inferred", None, None),
        ("od", "orders", 0, "offset-delete", 1, None, None, "inferred", None, None),
        ("od", "orders", 1, "offset-delete", 1, None, None, "recorded", "User:eve", None),
        ("old", "orders", 1, "expired", 4, None, None, "inferred", None, None),
        ("td1", "doomed", 0, "topic-delete", 1, None, None, "inferred", None, None),
        ("td2", "doomed", 0, "topic-delete", 1, None, None, "inferred", None, None),
        ("watch", "st", 1, "reset", 300, 250, -50, "audit", "User:admin", "tool"),
    ]
    assert rows(lake.read("losses"), "timestamp request_timestamp", "action = 'reset'") == [(80.0, 79.0)]


def test_losses_have_who_reset_an_offset_in_a_long_transaction(lake: Lake) -> None:
    builder = WHOLE["losses"]
    inputs = {name: lake.read(name) for name in builder.inputs}
    marker = F.col("timestamp") + F.expr("INTERVAL 60 SECONDS")
    inputs["commits"] = inputs["commits"].withColumn("effective_timestamp", marker)
    losses = builder.build(inputs, LakeSettings(), moment(200))
    columns = "timestamp action new_offset principal request_timestamp"
    assert rows(losses, columns, "`group` = 'watch'") == [(140.0, "reset", 250, "User:admin", 79.0)]


def test_hot_groups_are_counted_by_the_hour(lake: Lake) -> None:
    columns = "hour commits tombstones partitions share"
    assert rows(lake.read("hot_groups"), columns, "`group` = 'old'") == [
        (-8.0 * DAY, 1, 0, 1, 1.0),
        (0.0, 0, 1, 0, 0.0),
    ]
    rates = rows(lake.read("hot_groups"), "commits commits_per_s", "`group` = 'classic'")
    assert rates == [(1, 1 / 3600)]


def test_asof_is_the_state_at_that_moment(lake: Lake) -> None:
    jobs = Jobs(lake, LakeSettings())
    before = snapshot(lake, jobs, moment(7.5), ("g",))
    assert rows(before.groups, "group kind state epoch members") == [("g", "consumer", "Stable", 2, 2)]
    assert rows(before.members, "member_id") == [("m1",), ("m2",)]
    assert rows(before.assignments, "kind member_id partition is_revoking") == [
        ("current", "m1", 0, False),
        ("target", "m1", 0, False),
        ("target", "m2", 1, False),
    ]
    # The transaction was open until second 45.
    assert rows(snapshot(lake, jobs, moment(44.9), ("tx",)).offsets, "committed_offset") == []
    assert rows(snapshot(lake, jobs, moment(45), ("tx",)).offsets, "committed_offset") == [(50,)]
    # Between its two incarnations the group does not exist.
    assert rows(snapshot(lake, jobs, moment(13), ("again",)).groups, "group") == []
    assert rows(snapshot(lake, jobs, moment(11.5), ("again",)).offsets, "committed_offset incarnation") == [(5, 0)]


def test_jobs_do_not_make_tables_that_are_up_to_date(lake: Lake) -> None:
    jobs = Jobs(lake, LakeSettings())
    jobs.ensure_all([*SILVER, "current_offsets", *WHOLE])
    assert jobs.made == []
    shorter = Jobs(lake, LakeSettings(retention_ms=30 * MS_PER_MINUTE))
    shorter.ensure("expiry")
    assert shorter.made == ["commits", "expiry"]
    back = Jobs(lake, LakeSettings())
    back.ensure("expiry")
    assert rows(lake.read("expiry"), "expires_at", "`group` = 'simple'") == [(2.0 + RETENTION_S,)]


def test_a_lake_that_spark_fills_at_once_has_the_same_tables(
    lake: Lake, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "SMALL_ROWS", -1)
    whole = Lake(spark, str(tmp_path))
    log, other = first_half()
    second_half(log, other)
    fill(spark, whole, 0, log, other)
    add_samples(whole, SAMPLES)
    names = [*SILVER, "current_offsets", "lag", "audit_1327", "convergence"]
    # The session of another application may have other rules for SQL.
    spark.conf.set("spark.sql.ansi.enabled", "false")
    try:
        Jobs(whole, LakeSettings()).ensure_all(names)
    finally:
        spark.conf.unset("spark.sql.ansi.enabled")
    monkeypatch.undo()
    for name in names:
        columns = " ".join(column.name for column in TABLES[name].columns if column.name != "batch")
        assert rows(whole.read(name), columns) == rows(lake.read(name), columns), name


@pytest.fixture(scope="module")
def page(lake: Lake, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("report") / "report.html"
    size = write_report(lake, Jobs(lake, LakeSettings()), str(output), "Made <by> hand")
    assert output.stat().st_size == size
    return output


PLOTS = ("lag", "timeline", "owners", "expiry", "busiest")


def test_the_report_has_every_section(page: Path) -> None:
    text = page.read_text()
    assert "<title>Made &lt;by&gt; hand</title>" in text
    for name in PLOTS:
        assert f'id="plot-{name}"' in text
    assert '<span class="chip REWIND">REWIND</span>' in text
    assert '<span class="chip skipped">skipped</span>' in text
    assert "--delete-offsets --group reader --topic legacy:0" in text
    assert "User:admin (tool at 10.0.0.7)" in text and ">-50<" in text
    # The page loads no other file.
    assert "<script src" not in text and '<link rel="stylesheet"' not in text


def test_the_report_counts_what_it_does_not_list(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = data.collect(lake, moment(120))
    assert left_out(whole.groups) == ""
    monkeypatch.setattr(data, "MAX_ROWS", 1)
    cut = data.collect(lake, moment(120))
    assert len(whole.groups) > len(cut.groups) == 1 and cut.groups["group"][0] == "watch"  # the largest lag
    assert f"{len(whole.groups) - 1} more are not shown" in status(cut)
    assert tiles(cut) == tiles(whole)
    bad = {row["group"] for row in lake.read("status").where("group_status = 'ERR'").collect()}
    for fact in (
        f"<b>{len(bad)}</b><span>groups in error",
        "<b>2</b><span>rebalance storms",
        "<b>600</b><span>records lost",
    ):
        assert fact in tiles(cut)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_browser_draws_the_report(page: Path, theme: str, tmp_path: Path) -> None:
    chromium = shutil.which("chromium") or missing("chromium is not installed")
    command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}"]
    command += ["--virtual-time-budget=20000", "--window-size=390,844", "--dump-dom", f"{page.as_uri()}?theme={theme}"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=180, check=True).stdout
    assert f'data-theme="{theme}"' in shown
    for name in PLOTS:
        drawn = shown.partition(f'id="plot-{name}"')[2].partition("</section>")[0]
        assert "main-svg" in drawn, name
