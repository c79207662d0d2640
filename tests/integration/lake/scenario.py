# SPDX-License-Identifier: Apache-2.0
"""Two minutes of a cluster, made by hand. Each group is there for one fact that a table has to show."""

from __future__ import annotations

import json
from typing import Final

import pyarrow as pa
from pyspark.sql import SparkSession

from kcoord.pipeline.group_values import to_json
from kcoord.pipeline.lake.ingest import write_batch
from kcoord.pipeline.lake.samples import End, Sample, add_sample
from kcoord.pipeline.lake.storage import Lake, TableNote
from kcoord.pipeline.lake.tables import TABLES
from tests.integration.lake.made_log import MadeLog, moment, partitions, source_frame

DAY: Final = 86_400
SAMPLES: Final = (0, 40, 60, 120)


def first_half() -> tuple[MadeLog, MadeLog]:
    """Makes two log partitions, up to second 12."""
    log, other = MadeLog(0), MadeLog(1)
    log.commit("old", 1, 4, -8 * DAY)
    log.member("g", "m1", 0)
    log.epoch("g", 1, 0)
    log.wanted("g", "m1", [0, 1], 0)
    log.target("g", 1, 0)
    log.owned("g", "m1", 1, [0, 1], 0)
    log.commit("old", 1, None, 1)
    log.commit("g", 0, 10, 1, topic_id="orders-id")
    log.commit("g", 1, 20, 1)
    log.commit("simple", 0, 1, 2)
    log.member("reader", "r1", 3, ["orders"])
    log.epoch("reader", 1, 3)
    log.commit("reader", 0, 9, 3, topic="legacy")
    log.commit("reader", 0, 8, 3, topic="vanished")
    log.commit("reader", 0, 7, 3, expire_timestamp=moment(500))
    log.member("g", "m2", 5)
    log.epoch("g", 2, 5)
    log.wanted("g", "m1", [0], 5)
    log.wanted("g", "m2", [1], 5)
    log.target("g", 2, 5)
    other.member("late", "l1", 5, ["grow"])
    other.epoch("late", 1, 5, creation_timestamp=moment(5))
    log.owned("g", "m1", 1, [0], 6, state="unrevoked_partitions", revoking=[1])
    log.owned("g", "m2", 2, [], 6, state="unreleased_partitions")
    log.owned("g", "m1", 2, [0], 7)
    log.owned("g", "m2", 2, [1], 8)
    log.generation("classic", 1, {"a": [0, 1]}, 10)
    log.generation("worker", 1, {"w": []}, 10, topics=None, protocol_type="connect")
    log.commit("worker", 0, 2, 10, topic="side")
    log.streams_group("flow", 10)
    log.commit("flow", 0, 4, 10)
    log.member("again", "x", 10)
    log.epoch("again", 1, 10)
    log.commit("again", 0, 5, 10)
    log.member_gone("again", "x", 11)
    log.epoch("again", 2, 11)
    log.commit("again", 0, None, 12)
    log.group_end("again", 12)
    log.generation("moved", 4, {"a": [0]}, 12)
    log.commit("early", 0, 1, 11, topic="gone")
    log.commit("early", 0, None, 12, topic="gone")
    for at, partition, offset in WATCHED:
        if at <= 12:
            other.commit("watch", partition, offset, at, topic="st")
    return log, other


def second_half(log: MadeLog, other: MadeLog) -> None:
    """Continues the same logs, up to second 118."""
    other.commit("early2", 0, 1, 11, topic="gone")
    other.commit("early2", 0, None, 12.5, topic="gone")
    log.member("again", "y", 15)
    log.epoch("again", 1, 15)
    log.commit("again", 0, 7, 16)
    log.commit("classic", 0, 3, 15)
    log.group_end("moved", 18, 2, group_end=False)
    log.member("moved", "a", 18)
    log.epoch("moved", 5, 18, epoch_reason="migration")
    log.generation("classic", 2, {"a": [0], "b": [1]}, 20)
    log.member_gone("g", "m2", 20)
    log.epoch("g", 3, 20, epoch_reason="fenced")
    log.wanted("g", "m1", [0, 1], 20)
    log.target("g", 3, 20)
    log.owned("g", "m1", 3, [0, 1], 21)
    log.member("g", "m1", 25, ["orders", "legacy"])
    log.epoch("g", 4, 25)
    log.generation("classic", 3, {}, 30)
    for number, at in enumerate((30, 32, 34, 36, 38, 60, 100, 101, 102, 103, 104), 1):
        other.epoch("storm", number, at, epoch_reason="join" if number == 1 else "metadata")
    marker_offset = len(other.rows) + 1
    committed = other.commit("tx", 0, 50, 35, producer_id=7, transaction="committed", effective_offset=marker_offset)
    other.rows[committed]["marker_timestamp"] = moment(45)
    other.marker(7, 45)
    other.commit("tx", 0, 60, 50, producer_id=7, transaction="aborted", effective_offset=None)
    other.marker(7, 55, "abort")
    for group in ("td1", "td2"):
        log.commit(group, 0, 1, 49, topic="doomed")
        log.commit(group, 0, None, 50, topic="doomed")
    log.commit("od", 0, 1, 51)
    log.commit("od", 0, None, 52)
    log.commit("od", 1, 1, 53)
    log.commit("od", 1, None, 54, tombstone_reason="offset-delete", tombstone_principal="User:eve")
    log.regex("pattern", "l.*", ["legacy"], 55)
    log.member("pattern", "p", 55, [], subscribed_regex="l.*")
    log.epoch("pattern", 1, 55)
    log.commit("pattern", 0, 3, 56, topic="legacy")
    log.commit("pattern", 0, 3, 56)
    for at, partition, offset in WATCHED:
        if at > 12:
            other.commit("watch", partition, offset, at, topic="st")
    other.commit("slow", 4, 100, 20, topic="st")
    other.commit("slow", 4, 400, 60, topic="st")
    other.commit("slow", 4, 600, 100, topic="st")
    other.rows.append(_late_assignment(other))
    other.commit("late", 2, 350, 90, topic="grow")
    other.commit("late", 3, 40, 90, topic="grow")


WATCHED: Final = (
    (10, 2, 50),
    (20, 2, 60),
    (20, 3, 100),
    (20, 4, 100),
    (20, 5, 100),
    (50, 0, 500),
    (60, 1, 300),
    (60, 3, 100),
    (60, 4, 400),
    (60, 5, 550),
    (80, 1, 250),
    (90, 3, 100),
    (100, 4, 600),
    (100, 5, 700),
    (110, 0, 900),
    (110, 1, 400),
)
"""Commits of the group `watch`: second, partition of `st`, offset. Each partition of `st` grows by 10 a second."""


def _late_assignment(log: MadeLog) -> dict[str, object]:
    log.owned("late", "l1", 1, [], 80)
    row = log.rows.pop()
    value = json.loads(str(row["value_json"]))
    return {**row, "value_json": to_json({**value, "assigned": partitions([2, 3], "grow-id")})}


def ends_at(at: int) -> list[End]:
    """Returns the sample that a broker would give in second `at`."""
    rows = [End("orders", "orders-id", number, 0, at, None) for number in range(3)]
    rows += [End("st", "st-id", number, 0, 10 * at, None) for number in range(6)]
    rows += [End("legacy", "legacy-id", 0, 0, 9, None), End("side", "side-id", 0, 0, 2, None)]
    rows.append(End("grow", "grow-id", 0, 0, 5 * at, None))
    rows.append(End("grow", "grow-id", 4, 0, 10, moment(-5)))
    if at >= 60:
        rows += [End("grow", "grow-id", number, 0, 10 * (at - 50), moment(50 + number)) for number in (2, 3)]
    if at >= 120:
        rows.append(End("grow", "grow-id", 1, 0, 300, None))
    return rows


def fill(spark: SparkSession, lake: Lake, batch: int, *logs: MadeLog, skip: tuple[int, int] = (0, 0)) -> None:
    """Writes one micro-batch: all rows of the logs but the first `skip`."""
    rest = []
    for log, begun in zip(logs, skip, strict=True):
        part = MadeLog(log.log_partition)
        part.rows = log.rows[begun:]
        rest.append(part)
    write_batch(lake, source_frame(spark, *rest), batch)


def add_changes(lake: Lake) -> None:
    """Adds what the audit log of a broker has: a deletion, a reset, a deletion that failed, and one of long ago."""
    common = {"principal": "User:admin", "host": "10.0.0.7", "client_id": "tool", "batch": 0, "broker": 1}
    place = {"group": "watch", "topic": "st", "partition": 1}
    rows = [
        {"timestamp": moment(12.5), "request": "DeleteGroups", "action": "group-delete", "group": "again"},
        {"timestamp": moment(79), "request": "OffsetCommit", "action": "reset", **place, "committed_offset": 250},
        {"timestamp": moment(52), "request": "OffsetDelete", "action": "offset-delete", "error": "DENIED"},
        {"timestamp": moment(-DAY), "request": "DeleteTopics", "action": "topic-delete", "topic": "doomed"},
    ]
    rows[2] |= {"group": "od", "topic": "orders", "partition": 0}
    numbered = [{**common, **row, "file": "f", "position": number} for number, row in enumerate(rows)]
    lake.replace_rows("changes", pa.Table.from_pylist(numbered, schema=TABLES["changes"].arrow_schema))
    lake.set_note("changes", TableNote(1))


def add_samples(lake: Lake, moments: tuple[int, ...]) -> None:
    for at in moments:
        add_sample(lake, Sample(moment(at), ends_at(at)))
