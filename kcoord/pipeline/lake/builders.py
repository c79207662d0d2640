# SPDX-License-Identifier: Apache-2.0
"""The inputs and the builder of each table, for the jobs and for Spark's declarative pipelines alike.

bronze.records and silver.ends come from outside the lake. silver.commits and gold.current_offsets grow (`jobs`). All
other tables are pure functions of their inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from kcoord.pipeline.lake import (
    audit_1327,
    expiry,
    group_epochs,
    hot_groups,
    lag,
    losses,
    members,
    rebalances,
    status,
)
from kcoord.pipeline.lake.group_records import group_records
from kcoord.pipeline.lake.settings import LakeSettings

Inputs = Mapping[str, DataFrame]
Build = Callable[[Inputs, LakeSettings, datetime], DataFrame]


@dataclass(frozen=True, slots=True)
class Builder:
    """How a table is made. `uses` names the settings on which it depends, including `now`."""

    inputs: tuple[str, ...]
    build: Build
    uses: tuple[str, ...] = ()


def topic_names(commits: DataFrame, ends: DataFrame) -> DataFrame:
    """Returns `topic_id` and `topic` of all topics whose commits or samples have both."""
    named = commits.select("topic_id", "topic").union(ends.select("topic_id", "topic"))
    named = named.where("topic_id IS NOT NULL AND topic IS NOT NULL")
    return named.groupBy("topic_id").agg(F.max("topic").alias("topic"))


def _convergence(inputs: Inputs, settings: LakeSettings, now: datetime) -> DataFrame:
    return rebalances.build_convergence(inputs["group_epochs"], group_records(inputs["records"]))


BY_LOG_PARTITION: Final = {
    "group_epochs": Builder(
        ("records",), lambda inputs, settings, now: group_epochs.build(group_records(inputs["records"]))
    ),
    "members": Builder(
        ("records",), lambda inputs, settings, now: members.build_members(group_records(inputs["records"]))
    ),
    "regexes": Builder(
        ("records",), lambda inputs, settings, now: members.build_regexes(group_records(inputs["records"]))
    ),
    "assignments": Builder(
        ("records", "commits", "ends"),
        lambda inputs, settings, now: members.build_assignments(
            group_records(inputs["records"]), topic_names(inputs["commits"], inputs["ends"])
        ),
    ),
}
"""These tables are rebuilt for the log partitions that have new group records."""

WHOLE: Final = {
    "lag": Builder(("commits", "ends"), lambda inputs, settings, now: lag.build(inputs["commits"], inputs["ends"])),
    "status": Builder(
        ("commits", "current_offsets", "ends"),
        lambda inputs, settings, now: status.build(inputs["commits"], inputs["current_offsets"], inputs["ends"], now),
        ("now",),
    ),
    "storms": Builder(
        ("group_epochs",),
        lambda inputs, settings, now: rebalances.build_storms(inputs["group_epochs"], settings),
        ("storm_epochs", "storm_window_ms"),
    ),
    "convergence": Builder(("group_epochs", "records"), _convergence),
    "churn": Builder(
        ("members", "group_epochs"),
        lambda inputs, settings, now: rebalances.build_churn(inputs["members"], inputs["group_epochs"]),
    ),
    "losses": Builder(
        ("commits", "changes", "group_epochs"),
        lambda inputs, settings, now: losses.build(
            inputs["commits"], inputs["changes"], inputs["group_epochs"], settings
        ),
        ("retention_ms",),
    ),
    "hot_groups": Builder(("commits",), lambda inputs, settings, now: hot_groups.build(inputs["commits"])),
    "expiry": Builder(
        ("current_offsets", "group_epochs", "members", "regexes"),
        lambda inputs, settings, now: expiry.build_expiry(
            inputs["current_offsets"], inputs["group_epochs"], inputs["members"], inputs["regexes"], settings, now
        ),
        ("now", "retention_ms", "expiry_policy"),
    ),
    "orphans": Builder(
        ("current_offsets", "group_epochs", "members", "regexes", "expiry", "ends", "topics"),
        lambda inputs, settings, now: expiry.build_orphans(
            inputs["current_offsets"],
            inputs["group_epochs"],
            inputs["members"],
            inputs["regexes"],
            inputs["expiry"],
            inputs["ends"],
            inputs["topics"],
        ),
    ),
    "audit_1327": Builder(
        ("commits", "group_epochs", "members", "assignments", "regexes", "ends"),
        lambda inputs, settings, now: audit_1327.build(
            inputs["commits"],
            inputs["group_epochs"],
            inputs["members"],
            inputs["assignments"],
            inputs["regexes"],
            inputs["ends"],
        ),
    ),
}
"""These tables are rebuilt as a whole if an input or a setting has changed."""
