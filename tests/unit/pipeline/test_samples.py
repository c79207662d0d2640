# SPDX-License-Identifier: Apache-2.0
"""The topics in samples of a cluster: when a topic counts as deleted, and when only as not visible."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from kcoord.pipeline.lake import lease
from kcoord.pipeline.lake.samples import End, Sample, Topics, add_sample, seen_topics
from kcoord.pipeline.lake.storage import Lake
from kcoord_protocol.errors import Errors
from tests.unit.pipeline.test_ingest import no_spark

BEGAN = datetime(2026, 11, 24, tzinfo=UTC)
GONE = Errors.UNKNOWN_TOPIC_ID


def add(lake: Lake, second: int, listed: dict[str, str], **unlisted: Errors) -> None:
    assert unlisted.keys() == {*seen_topics(lake)} - listed.keys(), "a sample asks for these"
    add_sample(lake, Sample(BEGAN + timedelta(seconds=second), [], topics=Topics(listed, unlisted)))


def states(lake: Lake) -> list[tuple[str, str, float, str]]:
    rows = []
    for path in Path(lake.uri, "silver", "topics").rglob("[!_]*.parquet"):
        rows += pq.read_table(path, partitioning=None).to_pylist()
    values = [(row["topic"], row["topic_id"], (row["timestamp"] - BEGAN).total_seconds(), row["state"]) for row in rows]
    return sorted(values, key=lambda value: value[1:3])


def test_a_topic_is_deleted_if_no_topic_has_its_id_for_a_minute(tmp_path: Path) -> None:
    lake = Lake(no_spark, str(tmp_path / "lake"))
    add(lake, 0, {"a1": "a", "b1": "b", "c1": "c"})
    add(lake, 30, {"b1": "b", "c1": "c"}, a1=GONE)
    add(lake, 40, {"a1": "a", "b1": "b", "c1": "c"})  # a broker that lagged behind did not know the topic
    add(lake, 60, {"c1": "c"}, a1=GONE, b1=Errors.REQUEST_TIMED_OUT)
    version = lake.note("topics")
    add(lake, 90, {"c1": "c"}, a1=GONE, b1=Errors.TOPIC_AUTHORIZATION_FAILED)
    add(lake, 120, {"a2": "a", "c1": "c"}, a1=GONE)
    add(lake, 150, {"a2": "a", "b1": "b", "c1": "c"})
    assert version is not None and version.version == 1, "only rows change the version"
    assert states(lake) == [
        ("a", "a1", 0.0, "listed"),
        ("a", "a1", 60.0, "deleted"),
        ("a", "a2", 120.0, "listed"),
        ("b", "b1", 0.0, "listed"),
        ("b", "b1", 90.0, "hidden"),
        ("b", "b1", 150.0, "listed"),
        ("c", "c1", 0.0, "listed"),
    ]


def test_two_processes_may_add_samples_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `ends --every` and `ingest --follow` do. Each sample is there once, and each topic is listed once."""
    monkeypatch.setattr(lease, "_LOOK_SECONDS", 0.01)
    uri, count = str(tmp_path / "lake"), 30

    def add_all(lake: Lake) -> None:
        for second in range(count):
            listed = {f"{number:02}": "t" for number in range(second + 1)}
            add_sample(lake, Sample(BEGAN, [End("t", "00", 0, 0, second, None)], topics=Topics(listed)))

    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(add_all, Lake(no_spark, uri)) for _ in range(2)]:
            done.result()
    lake = Lake(no_spark, uri)
    ends, topics = lake.note("ends"), lake.note("topics")
    assert ends is not None and ends.version == 2 * count
    assert topics is not None and topics.version == count
    assert [topic_id for _, topic_id, _, _ in states(lake)] == [f"{number:02}" for number in range(count)]


def test_a_sample_may_have_asked_for_a_topic_that_another_one_has_ended_meanwhile(tmp_path: Path) -> None:
    lake = Lake(no_spark, str(tmp_path / "lake"))
    add(lake, 0, {"a1": "a"})
    late = Sample(BEGAN + timedelta(seconds=30), [], topics=Topics({}, {"a1": Errors.TOPIC_AUTHORIZATION_FAILED}))
    add(lake, 30, {}, a1=Errors.TOPIC_AUTHORIZATION_FAILED)
    add_sample(lake, late)
    assert states(lake) == [("a", "a1", 0.0, "listed"), ("a", "a1", 30.0, "hidden")]
