# SPDX-License-Identifier: Apache-2.0
"""Compares `lag`, and the end offsets that are interpolated, with loops over random histories, a partition each.

Ends fall when a topic is created again, and when a log is truncated. Clocks of coordinators differ, so later commits
may have earlier times.
"""

from __future__ import annotations

from itertools import pairwise
from random import Random
from typing import NamedTuple

import pytest
from pyspark.sql import DataFrame, SparkSession

from kcoord.pipeline.lake import lag
from kcoord.pipeline.lake.ends_lines import with_end_at
from tests.integration.lake.made_log import moment

PARTITIONS = 60
SECONDS = 100


class Sample(NamedTuple):
    at: int
    end: int
    topic: int


class Commit(NamedTuple):
    """A commit of the key, or a tombstone if `offset` is None. Its place in the log is its place in the list."""

    at: int
    offset: int | None


History = tuple[list[Sample], list[Commit]]


def random_history(random: Random) -> History:
    end, topic = random.randrange(20), 0
    samples: list[Sample] = []
    for at in sorted(random.sample(range(SECONDS), random.randint(1, 8))):
        topic += random.random() < 0.15
        is_new = bool(samples) and topic != samples[-1].topic
        end = random.randrange(10) if is_new else max(end + random.choice((-10, 0, 0, 5, 40)), 0)
        samples.append(Sample(at, end, topic))
    commits, clock = [], 0
    for _ in range(random.randrange(6)):
        clock += random.randint(-8, 30)
        commits.append(Commit(max(clock, 0), None if random.random() < 0.2 else random.randrange(120)))
    return samples, commits


def expected_lag(samples: list[Sample], commits: list[Commit]) -> list[tuple[int, int, int, float, bool]]:
    """Returns (second, committed offset, lag, seconds behind, whether they are a lower bound) of each sample."""
    rows = []
    for number, sample in enumerate(samples):
        committed, latest = None, 0
        for commit in commits:
            latest = max(latest, commit.at)
            if latest <= sample.at:
                committed = commit.offset
        if committed is None:
            continue
        behind = max(sample.end - committed, 0)
        life = [earlier for earlier in samples[: number + 1] if earlier.topic == sample.topic]
        passed, reached = None, life[0].end
        for before, after in pairwise(life):
            if reached <= committed < after.end:
                passed = before.at + (committed - reached) * (after.at - before.at) / (after.end - reached)
            reached = max(reached, after.end)
        seconds = sample.at - (life[0].at if passed is None else passed) if behind else 0.0
        rows.append((sample.at, committed, behind, round(seconds, 3), bool(behind) and passed is None))
    return rows


def expected_end(samples: list[Sample], at: float) -> int | None:
    for before, after in zip(samples, [*samples[1:], None], strict=True):
        if before.at <= at and after is None:
            return before.end
        if after is not None and before.at <= at < after.at:
            return int((before.end + (after.end - before.end) * (at - before.at) / (after.at - before.at)) // 1)
    return None


@pytest.fixture(scope="module")
def histories() -> list[History]:
    random = Random(20)
    return [random_history(random) for _ in range(PARTITIONS)]


def ends_of(spark: SparkSession, histories: list[History]) -> DataFrame:
    rows = [
        ("t", number, str(topic), moment(at), end)
        for number, (samples, _) in enumerate(histories)
        for at, end, topic in samples
    ]
    names = "topic string, partition int, topic_id string, timestamp timestamp, end_offset bigint"
    return spark.createDataFrame(rows, names)


def test_lag_of_random_histories_is_what_a_loop_finds(spark: SparkSession, histories: list[History]) -> None:
    rows = [
        ("g", "t", number, 0, place, place, offset, moment(at), offset is None)
        for number, (_, commits) in enumerate(histories)
        for place, (at, offset) in enumerate(commits)
    ]
    names = "`group` string, topic string, partition int, incarnation int, log_offset bigint, effective_offset bigint"
    more = "committed_offset bigint, effective_timestamp timestamp, is_tombstone boolean"
    table = lag.build(spark.createDataFrame(rows, f"{names}, {more}"), ends_of(spark, histories))
    lags: dict[int, list[tuple[object, ...]]] = {number: [] for number in range(PARTITIONS)}
    for row in table.collect():
        second = round((row["timestamp"].astimezone(moment(0).tzinfo) - moment(0)).total_seconds())
        seconds = round(row["seconds_behind"], 3)
        lags[row["partition"]].append((second, row["committed_offset"], row["lag"], seconds, row["is_lower_bound"]))
    for number, history in enumerate(histories):
        assert sorted(lags[number]) == expected_lag(*history), history


def test_ends_between_samples_are_what_a_loop_finds(spark: SparkSession, histories: list[History]) -> None:
    random = Random(21)
    asked = [(number, random.randrange(SECONDS)) for number in range(PARTITIONS) for _ in range(3)]
    rows = [("t", 0, -1, None), *(("t", number, second, moment(second)) for number, second in asked)]
    frame = spark.createDataFrame(rows, "topic string, partition int, second int, at timestamp")
    table = with_end_at(frame, ends_of(spark, histories), "at", "end").collect()
    assert sorted((row["partition"], row["second"], row["end"]) for row in table if row["second"] >= 0) == sorted(
        (number, second, expected_end(histories[number][0], second)) for number, second in asked
    )
    assert [row["end"] for row in table if row["second"] < 0] == [None]
